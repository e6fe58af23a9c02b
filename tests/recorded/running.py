"""Runs the commands of a row on forked ranks, and reads what they leave.

Ranks import the checkout under test by themselves. Packages of others, which take seconds to import, are imported once,
here: this process starts no thread and does not import `megatron_hetero`.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import runpy
import shutil
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
PRELOADED = (
    "torch.distributed",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.optimizer",
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
    "transformers.models.qwen3_vl.modeling_qwen3_vl",
)
FAMILIES = ("qwen3_vl", "qwen2_5_vl")
MODELS = [f"{family}{tied}" for family in FAMILIES for tied in ("", "-tied")]
BASE = {
    "model": {"dtype": "float32"},
    "data": {
        "registry": {
            name: {"annotations": f"{name}.jsonl", "images": "qwen2_5_vl-demo/data/images"}
            for name in ("mixed", "text", "two", "heldout")
        },
        "datasets": ["mixed"],
        "max_seq_length": 256,
    },
    "train": {"iters": 4, "global_batch_size": 8},
    "optimizer": {"lr": 2e-3, "min_lr": 1e-4, "weight_decay": 0.01},
}
METRICS = "step loss grad_norm lr tokens images skipped_samples eval_loss eval_exact_match".split()
TIMEOUT_S, NOTICED_S = 180.0, 15.0
"""Seconds for a command, and for ranks to notice that another one has failed."""
_numbers = count()


def preload() -> None:
    """Import what all ranks need, for one thread in each of them."""
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in PRELOADED:
            import_module(name)


def write_inputs(tree: Path, folder: Path) -> str:
    """Write models, data sets and the base of all configurations. Tokenizers, processors and pictures are the demo's.

    Returns:
        The hash of all files.
    """
    for family in FAMILIES:
        sizes = "--train-pictures 28 --heldout-questions 4 --text-layers 4"
        words = f"{folder}/{family}-demo --model {family} {sizes}".split()
        run_ranks(1, tree, folder, partial(_run, "examples.make_demo", words))
    run_ranks(1, tree, folder, lambda: [_write_model(folder, name, seed) for seed, name in enumerate(MODELS)])
    data = folder / "qwen2_5_vl-demo/data"
    shown = [json.loads(line) for line in (data / "train.jsonl").read_text().splitlines()]
    text = [json.loads(json.dumps(each).replace("<image>\\n", "")) for each in shown]
    for record in text:
        record.pop("image", None)
    mixed = [text[i] if i % 3 == 2 else record for i, record in enumerate(shown)]
    two = [json.loads(json.dumps(each).replace("<image>", "<image>\\n<detail>")) for each in mixed]
    two = [each | ({"detail": each["image"]} if "image" in each else {}) for each in two]
    for name, records in {"mixed": mixed, "text": text, "two": two}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    shutil.copy(data / "heldout.jsonl", folder)
    (folder / "base.yaml").write_text(yaml.safe_dump(BASE))
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith("said-"))
    return _hash(f"{path.relative_to(folder)} {_hash([path.read_bytes()])}\n".encode() for path in files)


def _write_model(folder: Path, name: str, seed: int) -> None:
    """A model in which every parameter matters, with sizes that `tp` does not divide."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    shutil.copytree(folder / f"{name.removesuffix('-tied')}-demo/model", folder / name)
    config: Any = AutoConfig.from_pretrained(folder / name)
    config.tie_word_embeddings = name.endswith("-tied")
    config.text_config.vocab_size, config.text_config.intermediate_size = 387, 250
    torch.manual_seed(seed)
    model: Any = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            weight.normal_(std=0.2 if weight.dim() == 1 else (1.0 / weight[0].numel()) ** 0.5)
            weight.add_(1.0 if "norm" in key else 0.0)
    model.save_pretrained(folder / name)


def run_row(commands: Sequence[str], tree: Path, inputs: Path, place: Path) -> dict[str, Any]:
    """Run the commands of a row in `place`; returns their metrics, step by step, and hashes of exported weights."""
    place.mkdir()
    for number, command in enumerate(commands):
        ranks, program, *words = command.replace("../", f"{inputs}/").split()
        if program in MODELS:
            head = f"--config {inputs}/base.yaml --model.hf_path {inputs}/{program}"
            words = [*f"{head} --log.dir log-{number} --export.hf_dir out".split(), *words]
            program = str(tree / "pretrain_vlm.py")
        else:
            program = str(HERE / "library.py") if program == "library" else f"megatron_hetero.cli.{program}"
        run_ranks(int(ranks), tree, place, partial(_run, program, words))
    lines = [line for log in sorted(place.glob("log-*/metrics.jsonl")) for line in log.read_text().splitlines()]
    steps = [{name: record[name] for name in METRICS if name in record} for record in map(json.loads, lines)]
    return {"steps": steps, "weights": _hash_weights(place)}


def _hash_weights(place: Path) -> dict[str, str]:
    """The hash of each module in each `out*` folder: names, dtypes, shapes and bytes of tensors, sorted by name."""
    from safetensors import deserialize

    found: dict[str, list[bytes]] = {}
    for file in sorted(place.glob("out*/*.safetensors")):
        for name, tensor in deserialize(file.read_bytes()):
            text = f"{name} {tensor['dtype']} {list(tensor['shape'])} {_hash([tensor['data']])}\n"
            found.setdefault(f"{file.parent.name} {name.removeprefix('model.').split('.')[0]}", []).append(
                text.encode()
            )
    return {module: _hash(sorted(texts)) for module, texts in sorted(found.items())}


def _hash(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def run_ranks(ranks: int, tree: Path, place: Path, work: Callable[[], Any]) -> None:
    """`work` on each of so many forked ranks. Raises `RuntimeError`, with what they say, where one fails or hangs."""
    said = place / f"said-{next(_numbers)}"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": str(ranks)}
    fork = multiprocessing.get_context("fork")
    environs = [world | {"RANK": str(rank), "LOCAL_RANK": "0", "PYTHONPATH": str(tree)} for rank in range(ranks)]
    processes = [fork.Process(target=_be_rank, args=(environ, tree, place, said, work)) for environ in environs]
    for process in processes:
        process.start()
    end = time.monotonic() + TIMEOUT_S
    while any(process.is_alive() for process in processes) and time.monotonic() < end:
        if any(process.exitcode for process in processes):
            end = min(end, time.monotonic() + NOTICED_S)
        time.sleep(0.01)
    for process in processes:
        process.kill()
        process.join()
    if any(process.exitcode for process in processes):
        raise RuntimeError(said.read_text(errors="replace")[-4000:])


def _be_rank(environ: dict[str, str], tree: Path, place: Path, said: Path, work: Callable[[], Any]) -> None:
    os.environ.update(environ)
    os.chdir(place)
    for stream in (1, 2):
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    sys.path[:] = [str(tree), *(path for path in sys.path if path not in ("", str(HERE.parents[1])))]
    found = find_spec("megatron_hetero")
    assert found is not None and found.origin == str(tree / "megatron_hetero/__init__.py"), found
    work()


def _run(program: str, words: Sequence[str]) -> None:
    """A script, or a module by its name."""
    sys.argv = [program, *words]
    if program.endswith(".py"):
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
