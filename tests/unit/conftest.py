"""One small demo for all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.make_demo import DemoOptions, make_demo


@pytest.fixture(scope="session")
def small() -> DemoOptions:
    return DemoOptions(seed=3, train_pictures=240, heldout_questions=64)


@pytest.fixture(scope="session")
def demo(small: DemoOptions, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "demo"
    make_demo(folder, small)
    return folder
