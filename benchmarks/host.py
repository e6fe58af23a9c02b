"""What the host does in a step, and what loading the next step takes from it: `python -m benchmarks.host [--help]`.

A GPU computes while the host issues its kernels. Here a model with the depth of a large one, and so narrow that
computing takes next to no time, trains on tiny micro-batches: what is measured is Python and the dispatch of
operations, of both passes. Meanwhile the next step is loaded, over and over, one of large pictures and long texts:

    alone         nothing is loaded
    threads       by threads of the same process, which take turns with the training thread (Python's global lock)
    switching     likewise, with turns of `SWITCH_MS` in place of Python's 5 ms
    workers       by a process of the loader, as with `data.worker_type process`, whose results a thread receives
    process       by another process altogether, which takes nothing but the memory's bandwidth

in turn, each in every round. Wants two idle cores; writes a table and the numbers to `benchmarks/results`.

`--by_module` instead measures the CPU time of each module's passes, with nothing loaded: of this checkout, also in
waves of several micro-batches, and of another one (`--against DIR`). Each runs as a process, and they take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Self

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.crew import join_group
from benchmarks.measuring.material import ModelSize, write_samples
from benchmarks.report import Ratio, table
from megatron_hetero.config.schema import load_config
from megatron_hetero.data.loader import StepLoader
from megatron_hetero.data.processor import ReaderProcesses
from megatron_hetero.groups.watchdog import Stopwatch

RESULTS = Path(__file__).parent / "results"
DEEP = ModelSize(
    vision_hidden=32,
    vision_layers=32,
    vision_heads=2,
    text_hidden=32,
    text_layers=28,
    text_heads=2,
    text_kv_heads=2,
)
"""The depth of Qwen2.5-VL-7B."""
SAMPLES, MICRO_BATCHES = 16, 4
TINY, LARGE = 56, 1008
"""Sides of the pictures that are trained on, and that are loaded."""
WORDS = 600
"""Of the answer of each sample that is loaded."""
SWITCH_MS = 0.5
SYSTEMS = ("alone", "threads", "switching", "workers", "process")
PASSES = {
    "vision.F": "encoder, forward",
    "vision.B": "encoder, backward",
    "text.F": "text, forward",
    "text.B": "text, backward",
}
LAYERS = {"encoder": DEEP.vision_layers, "text": DEEP.text_layers}
WAVES = (1, 2, 4)
"""Micro-batches in a wave, by module. Only this checkout runs more than one."""


def main() -> None:
    """Measure, print, write."""
    options = _options()
    if options.worker:
        _work(Path(options.worker), options.waves, options.samples)
    elif options.by_module:
        _by_module(options)
    else:
        _beside_loading(options)


def _beside_loading(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as name:
        seconds = _measure(Path(name), options.rounds, options.seconds)
    text = _text(seconds)
    print(text)
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "host.md").write_text(text + "\n", encoding="utf-8")
    (options.results / "host.json").write_text(json.dumps(seconds, indent=1) + "\n", encoding="utf-8")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host", description=__doc__)
    parser.add_argument("--rounds", type=int, default=4, help="how often each is measured")
    parser.add_argument("--seconds", type=float, default=10.0, help="of steps in each round")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where to write")
    parser.add_argument("--by_module", action="store_true", help="measure the passes of each module, without loading")
    parser.add_argument("--against", type=Path, help="another checkout, for --by_module")
    parser.add_argument("--samples", type=int, default=1, help="samples of a micro-batch, for --by_module")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--waves", type=int, default=1, help=argparse.SUPPRESS)
    return parser.parse_args()


# ------------------------------------------------------------------------------------------------ by module


class _Laps(Stopwatch):
    """Adds up the CPU time of this process in the actions of each module's passes."""

    seconds: dict[str, float]

    @contextlib.contextmanager
    def lap(self, name: str, label: str = "") -> Iterator[None]:
        begin = time.process_time()
        yield
        module, _, action = (label or name).split(".", 2) if label.count(".") == 2 else (name, "", "")
        key = f"{module}.{action[:1]}"
        self.seconds[key] = self.seconds.get(key, 0.0) + time.process_time() - begin


def _work(folder: Path, waves: int, samples: int) -> None:
    """Compute gradients for as many seconds as each line of the input says, and print the mean CPU times of a
    micro-batch.
    """
    run = _run(folder, f"worker-{os.getpid()}", f"--schedule.waves {waves}", samples)
    batch, trainer = run.loader.load(1, map), run.trainer
    trainer.runner.watch = watch = _Laps(run.trainer.runner.watch._platform)  # pyright: ignore[reportPrivateUsage]
    print("ready", flush=True)
    for line in sys.stdin:
        steps, watch.seconds, begin = 0, {}, time.process_time()
        while not steps or time.process_time() - begin < float(line):
            trainer.gradients(batch)
            steps += 1
        seconds = watch.seconds | {"all": time.process_time() - begin}
        print(json.dumps({name: each / steps / MICRO_BATCHES for name, each in seconds.items()}), flush=True)


def _by_module(options: argparse.Namespace) -> None:
    here = Path(__file__).parents[1]
    sides = {} if options.against is None else {"before": (options.against, 1)}
    sides |= {"now" if waves == 1 else f"waves of {waves}": (here, waves) for waves in WAVES}
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        samples = options.samples * MICRO_BATCHES
        write_samples(Path(name), DEEP, [TINY] * samples, words=[24] * samples)
        workers = {side: stack.enter_context(_Worker(name, *place, options.samples)) for side, place in sides.items()}
        measured: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
        for turn in range(-1, options.rounds):  # The first round only warms up.
            for side in list(sides)[:: 1 if turn % 2 == 0 else -1]:
                seconds = workers[side].measure(options.seconds)
                if turn >= 0:
                    measured[side].append(seconds)
    text = _by_module_text(measured, options.samples)
    print(text)
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "host-by-module.md").write_text(text + "\n", encoding="utf-8")


class _Worker:
    """A process that measures a checkout, a while for each request."""

    def __init__(self, folder: str, checkout: Path, waves: int, samples: int):
        command = [sys.executable, "-P", __file__, "--worker", folder]
        command += ["--waves", str(waves), "--samples", str(samples)]
        environment = os.environ | {"PYTHONPATH": str(checkout.resolve())}
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Self:
        while self._answer() != "ready":
            pass
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()  # The end of its input ends it.

    def measure(self, seconds: float) -> dict[str, float]:
        """Seconds of a micro-batch by module and pass."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()
        return json.loads(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError("a worker has ended early; see its messages above")
        return line.strip()


def _by_module_text(measured: dict[str, list[dict[str, float]]], samples: int) -> str:
    sides = list(measured)
    first = measured[sides[0]]
    rows = []
    for key, name in (*PASSES.items(), ("all", "micro-batch")):
        layers = LAYERS.get(name.partition(",")[0])
        cells = []
        for side in sides:
            seconds = [each[key] for each in measured[side]]
            cell = (
                f"{1e3 * median(seconds):.1f} | {1e6 * median(seconds) / layers:.0f}"
                if layers
                else (f"{1e3 * median(seconds):.1f} | ")
            )
            cells.append(cell if side == sides[0] else f"{cell} | {Ratio.of(seconds, [each[key] for each in first])}")
        rows.append(" | ".join([name, *cells]))
    header = " | ".join(
        ["", *(f"{side}, ms | µs a layer" + f" | over {sides[0]}" * (side != sides[0]) for side in sides)]
    )
    return "\n".join(
        [
            f"CPU time of a micro-batch of {samples} tiny pictures and short texts, "
            f"{DEEP.vision_layers} layers of the encoder and {DEEP.text_layers} of the language model, one rank, CPU, "
            f"nothing loaded; `micro-batch` with all else of a step ({MICRO_BATCHES} micro-batches).\n",
            table(header, rows),
            f"\nMedians of {len(first)} rounds, in each of which all take turns. Ratio: median [min, max] of rounds.",
        ]
    )


# ------------------------------------------------------------------------------------------ beside loading


def _measure(folder: Path, rounds: int, seconds: float) -> dict[str, list[float]]:
    """By system, the median of the seconds of a micro-batch in each round."""
    write_samples(folder, DEEP, [TINY] * SAMPLES + [LARGE] * SAMPLES, words=[24] * SAMPLES + [WORDS] * SAMPLES)
    context = multiprocessing.get_context("spawn")
    go, end = context.Event(), context.Event()
    other = context.Process(target=_load_when_told, args=(folder, go, end), daemon=True)
    other.start()
    run = _run(folder, "own")
    batch, readers = run.loader.load(1, map), ReaderProcesses(run.loader.reader, 1)
    loading: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
        "alone": contextlib.nullcontext,
        "threads": lambda: _loading_here(run.loader),
        "switching": lambda: _switching(run.loader),
        "workers": lambda: _loading_here(replace(run.loader, reader=readers)),
        "process": lambda: _loading_there(go),
    }
    found: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    for turn in range(rounds):
        for name in SYSTEMS[:: 1 if turn % 2 == 0 else -1]:
            with loading[name]():
                found[name].append(_micro_batch_seconds(run.trainer, batch, seconds))
            print(f"{name}: {1e3 * found[name][-1]:.1f} ms", flush=True)
    end.set()
    go.set()
    other.join()
    readers.close()
    return found


def _run(folder: Path, log: str, more: str = "", samples: int = SAMPLES // MICRO_BATCHES) -> Any:
    from pretrain_vlm import build_run

    flags = f"--model.hf_path {folder}/model --model.dtype float32 --data.registry.d.annotations {folder}/data.jsonl "
    flags += (
        f"--data.registry.d.images {folder}/images --data.datasets d --data.shuffle false --log.dir {folder}/{log} "
    )
    flags += f"--data.max_seq_length 8192 --train.global_batch_size {samples * MICRO_BATCHES} "
    flags += (
        f"--train.iters 100000 --train.micro_batch_size {samples} --vision-parallel dp:1 --text-parallel dp:1 {more}"
    )
    return build_run(load_config(flags.split()), join_group(0, 1, f"{folder}/store-{log}"))


def _micro_batch_seconds(trainer: Any, batch: Any, seconds: float) -> float:
    found, begin = [], time.perf_counter()
    while not found or time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        trainer.gradients(batch)
        found.append((time.perf_counter() - start) / MICRO_BATCHES)
    return median(found)


@contextlib.contextmanager
def _loading_here(loader: StepLoader) -> Iterator[None]:
    end = threading.Event()
    loading = threading.Thread(target=_load, args=(loader, end))
    loading.start()
    try:
        yield
    finally:
        end.set()
        loading.join()


@contextlib.contextmanager
def _switching(loader: StepLoader) -> Iterator[None]:
    usual = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_MS / 1e3)
    try:
        with _loading_here(loader):
            yield
    finally:
        sys.setswitchinterval(usual)


@contextlib.contextmanager
def _loading_there(go: Any) -> Iterator[None]:
    go.set()
    try:
        yield
    finally:
        go.clear()


def _load_when_told(folder: Path, go: Any, end: Any) -> None:
    run = _run(folder, "other")
    while go.wait() and not end.is_set():
        run.loader.load(2, map)


def _load(loader: StepLoader, end: threading.Event) -> None:
    while not end.is_set():
        loader.load(2, map)


def _text(seconds: dict[str, list[float]]) -> str:
    alone = seconds["alone"]
    rows = [f"{name} | {1e3 * median(found):.1f} | {Ratio.of(found, alone)}" for name, found in seconds.items()]
    return "\n".join(
        [
            f"Host time of a micro-batch, forward and backward, {DEEP.vision_layers} layers of the encoder and "
            f"{DEEP.text_layers} of the language model, one rank, CPU.\n",
            table("the next step is loaded | ms | over alone", rows),
            f"\nLoaded: {SAMPLES} pictures of {LARGE} x {LARGE} pixels, {WORDS} words each. Ratio: median [min, max] "
            "of rounds.",
        ]
    )


if __name__ == "__main__":
    main()
