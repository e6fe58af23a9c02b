"""A small model that all tests of this folder train, and command lines for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.folders import ModelChoice, write_data, write_model
from tests.support.runs import MakeFlags


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two vision layers and one text layer, with random weights."""
    return write_model(tmp_path_factory.mktemp("small") / "model", ModelChoice(vision_layers=2, text_layers=1))


@pytest.fixture(scope="session")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight samples with one, two and no pictures."""
    return write_data(tmp_path_factory.mktemp("data"), 8)


@pytest.fixture
def make_flags(small_model: Path, small_data: Path, tmp_path: Path) -> MakeFlags:
    """`make_flags(vision layout, text layout, more flags, data=...)`: a command line. SGD unless told otherwise."""

    def make(vision: str, text: str, more: str = "", data: Path = small_data, batch: int = 4) -> list[str]:
        common = (
            f"--model.hf_path {small_model} --model.dtype float32 --data.registry.d.annotations {data} "
            f"--data.registry.d.images {data.parent}/images --data.datasets d --data.shuffle false --data.workers 0 "
            f"--train.global_batch_size {batch} --train.iters 1 --log.dir {tmp_path}/log "
            "--optimizer.schedule constant --optimizer.clip_grad 0 "
            f"--vision-parallel {vision} --text-parallel {text}"
        )
        # A flag that comes again wins here, since the command line itself refuses it.
        words = [*common.split(), *more.split()]
        settings: dict[str, list[str]] = {}
        name = ""
        for word in words:
            if word.startswith("--"):
                settings[name := word] = []
            else:
                settings[name].append(word)
        return [word for name, values in settings.items() for word in (name, *values)]

    return make
