"""What parts of modules take, measured without memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_hetero.config.schema import load_config
from megatron_hetero.estimate import measured
from megatron_hetero.estimate.measured import FIRST, LAST, MeasuredModule, ModulePart, flash_workspace, measure
from megatron_hetero.estimate.shards import SequenceShard
from megatron_hetero.job.job import JobSpec
from megatron_hetero.models.layers.recompute import Recompute

SELECTIVE = Recompute("selective")


@pytest.fixture(scope="module")
def shapes(config_folder: Path, qwen3_folder: Path) -> dict[str, Any]:
    """The shapes of a model of each family."""
    flags = "--data.registry.d.annotations none.json --data.datasets d --vision-parallel dp:1 --text-parallel dp:1"
    found = {}
    for name, folder in (("qwen2_5_vl", config_folder), ("qwen3_vl", qwen3_folder)):
        found[name] = JobSpec.of(load_config(["--model.hf_path", str(folder), *flags.split()]), 1).shapes
    return found


def text(shapes: dict[str, Any], family: str, **changed: Any) -> MeasuredModule:
    alone = MeasuredModule(
        "text", shapes[family].text, 1, 1, 1, False, torch.bfloat16, Recompute()
    )  # fmt: skip
    if changed.get("frozen") == "all":
        changed["frozen"] = frozenset(alone.shape.architecture.tensors)
    return replace(alone, **changed)


def shard_of(tokens: int, module: MeasuredModule, supervised: int = 0) -> SequenceShard:
    """One sample over all ranks of a module, in equal parts."""
    local, member = tokens // module.tp if module.sequence_parallel else tokens, tokens * module.sp
    return SequenceShard(
        tokens, tokens, local, member, ((member, member * module.cp),), ((64, 64),) * (tokens // 64), supervised
    )


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"tp": 4},
        {"tp": 4, "sequence_parallel": True},
        {"tp": 4, "sequence_parallel": True, "parts": 4},
        {"sp": 4, "recompute": SELECTIVE},
        {"tp": 2, "cp": 2, "sp": 2},
        {"frozen": "all"},
        {"gpu": False, "dtype": torch.float32},
    ],
    ids=str,
)
def test_a_layer_takes_twice_as_much_for_twice_as_many_tokens(
    family: str, changed: dict[str, Any], shapes: dict[str, Any]
) -> None:
    module = text(shapes, family, **changed)
    found = [measure(module, ModulePart("layer", 3), shard_of(tokens, module)) for tokens in (2048, 4096)]
    assert found[1].saved == pytest.approx(2 * found[0].saved, rel=1e-3)
    assert (
        found[1].passed
        == 2 * found[0].passed
        == shard_of(4096, module).local * module.shape.hidden * module.dtype.itemsize
    )
    assert found[0].backward < found[1].backward


def test_what_a_setting_is_for_shows(shapes: dict[str, Any]) -> None:
    usual = text(shapes, "qwen3_vl", tp=4)
    others = {
        "frozen": replace(usual, frozen=frozenset(usual.shape.architecture.tensors)),
        "split": replace(usual, sequence_parallel=True),
        "selective": replace(usual, recompute=SELECTIVE),
        "chunks": replace(usual, recompute=Recompute("none", 512)),
    }
    whole = measure(usual, ModulePart("layer", 0), shard_of(4096, usual)).saved
    for name, module in others.items():
        assert measure(module, ModulePart("layer", 0), shard_of(4096, module)).saved < 0.9 * whole, name


def test_what_is_recomputed_as_a_whole_and_layers_that_are_alike_are_measured_once(shapes: dict[str, Any]) -> None:
    module = text(shapes, "qwen2_5_vl")
    first = measure(module, ModulePart("layer", 0), shard_of(128, module))
    before = measured._measured.cache_info().misses
    for recompute in ("full", 3):
        for layer in range(module.shape.layers):
            given = replace(module, recompute=Recompute(recompute))
            assert measure(given, ModulePart("layer", layer), shard_of(128, module)) is first
    assert measured._measured.cache_info().misses == before


def test_the_ends_of_the_text_module(shapes: dict[str, Any]) -> None:
    """Which tokens they are is kept; of the head, gradients of its input and of few logits, and places."""
    module = text(shapes, "qwen2_5_vl", tp=4, sequence_parallel=True)
    shard, hidden = shard_of(4096, module, supervised=256), module.shape.hidden
    assert measure(module, FIRST, shard).saved <= 4096 * 10
    head = measure(module, LAST, shard)
    logits = 256 * module.shape.vocab // 4
    assert head.saved == pytest.approx(2 * (logits + 2 * 256 * hidden + 1024 * hidden) + 4 * 1024 + 256 * 16, rel=1e-3)
    assert head.backward > 2 * module.shape.vocab // 4 * hidden, "the gradient of its weight"
    frozen = measure(replace(module, frozen=frozenset(module.shape.architecture.tensors)), LAST, shard)
    assert frozen.backward < head.backward / 4


def test_the_workspace_of_attention_is_that_of_its_windows(
    shapes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here MLPs are so narrow that a layer's backward pass peaks in attention."""
    module = text(shapes, "qwen2_5_vl", name="vision", shape=shapes["qwen2_5_vl"].encoders["vision"])
    windowed, full = (measure(module, ModulePart("layer", layer), shard_of(16384, module)) for layer in (0, 7))
    assert windowed.saved == pytest.approx(full.saved, rel=1e-3)
    more = flash_workspace(16384, 16384, 256, 16, 16, 80) - flash_workspace(16384, 16384, 1, 16, 16, 80)
    assert windowed.backward - full.backward == more > 0


def test_nothing_is_left_behind(shapes: dict[str, Any]) -> None:
    asked, module = torch.cuda.current_device, text(shapes, "qwen2_5_vl")
    measure(module, LAST, shard_of(77, module, supervised=5))
    assert torch.cuda.current_device is asked and not dist.is_initialized()
    with pytest.raises(AttributeError):
        measure(replace(module, shape=None), LAST, shard_of(78, module))
    assert torch.cuda.current_device is asked and not dist.is_initialized()
    assert torch.empty(1).device.type == "cpu"
