"""The sections, each run in a process of its own: one that fails or hangs takes none of the others along."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu import record

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Section:
    """`module`: which measures, `measure(record, folder, *arguments, small=...)`. `limit_s`: of the seconds of all
    sections, those that this one may take. `exact`: whether its arithmetic is to be fp32's own. Such a section compares
    numbers and times nothing, so another one may run beside it.
    """

    title: str
    module: str
    limit_s: float
    arguments: tuple[str, ...] = ()
    exact: bool = False


SECTIONS: Mapping[str, Section] = {
    "environment": Section("Environment", "environment", 40),
    "correctness": Section("One rank against transformers", "correctness", 150, exact=True),
    "sharing": Section("Several ranks on one device", "sharing", 200, exact=True),
    "program": Section("The program: save, kill, resume, evaluation, export", "program", 200),
    "video": Section("Frames of a video on one rank", "video", 120),
    "share-7b": Section("One rank's share of 7B, without communication", "share", 150, ("7B",)),
    "share-32b": Section("One rank's share of 32B, without communication", "share", 150, ("32B",)),
    "attention": Section("Attention kernels", "hopper.attention", 100),
    "spinning": Section("Products beside a kernel that holds multiprocessors", "hopper.spinning", 60),
    "swiglu": Section("SwiGLU", "hopper.swiglu", 80),
    "heads": Section("Norms and rotation of heads", "hopper.heads", 60),
    "graph": Section("An encoder's layers as a CUDA graph", "hopper.graph", 90),
    "experts": Section("Experts", "hopper.experts", 120, exact=True),
    "share-7b-before": Section("7B's share without kernels for Hopper", "share", 100, ("7B", "before")),
    "share-32b-before": Section("32B's share without kernels for Hopper", "share", 100, ("32B", "before")),
}
SETS: Mapping[str, tuple[str, ...]] = {
    "all": tuple(SECTIONS),
    "default": ("environment", "correctness", "sharing", "program", "video", "share-7b", "share-32b"),
    "hopper": (
        "environment", "attention", "spinning", "swiglu", "heads", "graph", "experts",
        "share-7b", "share-32b", "share-7b-before", "share-32b-before",
    ),
}  # fmt: skip
"""Sections by the name of a set that `--sections` takes, too."""

TOTAL_S = 590.0
"""Seconds of all sections. Few take what they may: their limits are for kernels that are compiled for the first time.
"""


@dataclass(frozen=True)
class Outcome:
    """How a section ended (`ok`, `failed` or `stopped`), the last lines that it said where it did not end well, its
    seconds, and what it found.
    """

    status: str
    seconds: float
    limit_s: float
    said: str
    numbers: dict[str, Any]
    checks: list[dict[str, Any]]

    @property
    def passed(self) -> bool:
        """Whether it came to its end, and all that it checked is as it must be."""
        return self.status == "ok" and all(check["passed"] for check in self.checks)


def run(name: str, folder: Path, limit_s: float, *, small: bool) -> Outcome:
    """Run a section for at most `limit_s`, with `folder` for its files."""
    folder.mkdir()
    found, log = folder / "found.json", folder / "said"
    command = [sys.executable, "-m", "benchmarks.gpu.section", name, str(folder), *(["--small"] if small else [])]
    start = time.monotonic()
    with (
        open(log, "wb") as output,
        _ended(
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=_environment(name, folder.parent / "kernels"),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        ) as process,
    ):
        try:
            status = "ok" if process.wait(limit_s) == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "stopped"
    seconds = time.monotonic() - start
    said = "" if status == "ok" else _end_of(log)
    return Outcome(status, seconds, limit_s, said, **record.read(found))


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """However the context ends, the process and all that it started in its session are gone afterwards."""
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _environment(name: str, kernels: Path) -> dict[str, str]:
    """That of the section: this one's, without what torchrun may have left there. `kernels`: for compiled ones."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    kept["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [kept.get("PYTHONPATH")])])
    kept.setdefault("OMP_NUM_THREADS", "1")
    kept["HF_HUB_OFFLINE"] = "1"
    # Up to seven processes want the same kernels: each is compiled once, and none of them starts a pool for every core.
    kept.setdefault("TORCHINDUCTOR_CACHE_DIR", str(kernels / "inductor"))
    kept.setdefault("TRITON_CACHE_DIR", str(kernels / "triton"))
    kept.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
    if SECTIONS[name].exact:
        # Of all of NVIDIA's libraries, whatever PyTorch's own flags say.
        kept["NVIDIA_TF32_OVERRIDE"] = "0"
    return kept


def _end_of(log: Path, lines: int = 20) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-lines:])
