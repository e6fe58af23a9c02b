"""What parts of modules take, measured without memory."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hetero.config.schema import load_config
from megatron_hetero.data.token_shards import SequenceShard
from megatron_hetero.estimate import measured
from megatron_hetero.estimate.allocations import META, Memory, SubmoduleBytes, cudnn_workspace, flash_workspace
from megatron_hetero.estimate.measured import FIRST, LAST, Measured, Submodule, measure
from megatron_hetero.groups.megatron import without_processes
from megatron_hetero.job.job import JobSpec
from megatron_hetero.layout.context import AttentionSegments
from megatron_hetero.models.layers.attention import PackedSelfAttention
from megatron_hetero.models.layers.cudnn_attention import attend, calls_for
from megatron_hetero.models.layers.kernels import torch_flash
from megatron_hetero.models.layers.segments import PackedSegments
from tests.fake_cuda.device import SHAPES, _cudnn_workspace

Make = Callable[..., Measured]
WHOLE = "--text-sequence_parallel false"


@pytest.fixture(scope="module")
def make(config_folder: Path, qwen3_folder: Path) -> Make:
    """`make(family, layout, more flags)`: a module of a model of the family, by default its text module on a GPU."""
    folders = {"qwen2_5_vl": config_folder, "qwen3_vl": qwen3_folder}

    def make(family: str, layout: str = "dp:1", more: str = "", name: str = "text", gpu: bool = True) -> Measured:
        flags = f"--model.hf_path {folders[family]} --data.registry.d.annotations none.json --data.datasets d"
        world = math.prod(map(int, re.findall(r":(\d+)", layout)))
        job = JobSpec.of(load_config(f"{flags} --{name}-parallel {layout} {more}".split()), world)
        return Measured.of(job.modules[name], gpu=gpu, imbalance=1.0)

    return make


def shard_of(tokens: int, measured: Measured, supervised: int = 0) -> SequenceShard:
    """One sample over all ranks of a module, in equal parts."""
    module, layout = measured.module, measured.module.layout
    local, member = tokens // layout.tp if module.sequence_parallel else tokens, tokens * layout.sp
    keys = np.zeros(member * layout.cp, np.int64) if layout.cp > 1 else None
    return SequenceShard(
        tokens,
        local,
        tokens // local,
        sp_lengths=(tokens,) * layout.sp,
        cp_lengths=(member,) * layout.cp,
        segments=AttentionSegments((member,), (member * layout.cp,), keys),
        windows=(64,) * (tokens // 64),
        supervised=supervised,
    )


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize(
    "flags",
    [
        "dp:1",
        f"tp:4 {WHOLE}",
        "tp:4",
        "tp:4 --text-tp_overlap true",
        "sp:4 --text-recompute selective",
        f"tp:2,cp:2,sp:2 {WHOLE}",
        "dp:1 --model.freeze text",
        "dp:1 --model.dtype float32",
    ],
)
def test_a_layer_takes_twice_as_much_for_twice_as_many_tokens(family: str, flags: str, make: Make) -> None:
    layout, _, more = flags.partition(" ")
    module = make(family, layout, more, gpu="float32" not in more)
    found = [measure(module, Submodule("layer", 3), shard_of(tokens, module)) for tokens in (2048, 4096)]
    assert found[1].saved == pytest.approx(2 * found[0].saved, rel=1e-3)
    row = module.shape.hidden * module.module.dtype.itemsize
    assert found[1].passed == 2 * found[0].passed == shard_of(4096, module).local * row
    assert found[0].backward < found[1].backward


def test_what_a_setting_is_for_shows(make: Make) -> None:
    usual = make("qwen3_vl", "tp:4", WHOLE)
    others = {
        "frozen": make("qwen3_vl", "tp:4", f"{WHOLE} --model.freeze text"),
        "split": make("qwen3_vl", "tp:4"),
        "selective": make("qwen3_vl", "tp:4", f"{WHOLE} --text-recompute selective"),
        "chunks": make("qwen3_vl", "tp:4", f"{WHOLE} --text-chunk 512"),
    }
    whole = measure(usual, Submodule("layer", 0), shard_of(4096, usual)).saved
    for name, module in others.items():
        assert measure(module, Submodule("layer", 0), shard_of(4096, module)).saved < 0.9 * whole, name


def test_what_is_recomputed_as_a_whole_and_layers_that_are_alike_are_measured_once(make: Make) -> None:
    module = make("qwen2_5_vl")
    first = measure(module, Submodule("layer", 0), shard_of(128, module))
    before = measured._measured.cache_info().misses
    for recompute in ("full", 3):
        given = make("qwen2_5_vl", "dp:1", f"--text-recompute {recompute}")
        for layer in range(module.shape.layers):
            assert measure(given, Submodule("layer", layer), shard_of(128, module)) is first
    assert measured._measured.cache_info().misses == before


def test_the_ends_of_the_text_module(make: Make) -> None:
    """Which tokens they are is kept; of the head, gradients of its input and of few logits, and places."""
    module = make("qwen2_5_vl", "tp:4")
    shard, hidden = shard_of(4096, module, supervised=256), module.shape.hidden
    assert measure(module, FIRST, shard).saved <= 4096 * 10
    head = measure(module, LAST, shard)
    logits = 256 * module.shape.vocab // 4
    assert head.saved == pytest.approx(2 * (logits + 2 * 256 * hidden + 1024 * hidden) + 4 * 1024 + 256 * 16, rel=1e-3)
    assert head.backward > 2 * module.shape.vocab // 4 * hidden, "the gradient of its weight"
    frozen = measure(make("qwen2_5_vl", "tp:4", "--model.freeze text"), LAST, shard)
    assert frozen.backward < head.backward / 4


def test_the_workspace_of_attention_is_that_of_its_windows(make: Make) -> None:
    """Here MLPs are so narrow that a layer's backward pass peaks in attention."""
    module = make("qwen2_5_vl", name="vision")
    windowed, full = (measure(module, Submodule("layer", layer), shard_of(16384, module)) for layer in (0, 7))
    assert windowed.saved == pytest.approx(full.saved, rel=1e-3)
    more = flash_workspace(16384, 16384, 256, 16, 16, 80) - flash_workspace(16384, 16384, 1, 16, 16, 80)
    assert windowed.backward - full.backward == more > 0


def test_the_plan_has_room_for_attention_by_cudnn() -> None:
    """Which saves what FlashAttention-2 saves, and takes more backward: padded copies, and a larger workspace."""
    lengths, (heads, kv_heads, dim) = (5000, 3208), (7, 1, 128)
    segments = PackedSegments.of(lengths, META)

    def backward(*given: Any) -> Any:
        _ = torch.empty(_cudnn_workspace(given[1], given[2], given[9], given[11]), dtype=torch.uint8, device=META)
        return SHAPES[torch.ops.aten._cudnn_attention_backward](*given)

    def taken(kernel: Callable[..., Tensor]) -> SubmoduleBytes:
        def run(given: Tensor) -> list[Tensor]:
            parts = given.split([n * dim for n in (heads, kv_heads, kv_heads)], dim=1)
            q, k, v = (x.contiguous().unflatten(1, (-1, dim)) for x in parts)
            return [kernel(q, k, v)]

        given = torch.empty(8208, (heads + 2 * kv_heads) * dim, dtype=torch.bfloat16, device=META, requires_grad=True)
        return Memory(gpu=True).measure(run, given, {})

    flash = taken(lambda q, k, v: torch_flash(q, k, v, segments, causal=True))
    operators: Any = (
        (lambda *given, **_: SHAPES[torch.ops.aten._cudnn_attention_forward](*given)),
        (lambda *given, **_: backward(*given)),
    )
    for form, least in (("ragged", 0.99), ("dense", 0.5)):
        calls = calls_for(form, lengths, heads, dim)
        cudnn = taken(lambda q, k, v, calls=calls: attend(q, k, v, segments, calls, operators))
        assert cudnn.saved == pytest.approx(flash.saved, rel=0.02)
        assert least * flash.backward < cudnn.backward <= flash.backward
    sizes = 8208, 8208, 2, heads, kv_heads, dim
    padded = 2 * dim * (8704 * (3 * heads + 2 * kv_heads) + (8704 - 8208) * (heads + 2 * kv_heads))
    assert cudnn_workspace(*sizes, 5000) == padded + 2 * 5120 * heads * (4 * (dim + 1) + 4 * dim)
    assert cudnn_workspace(8208, 16384, *sizes[2:], 5000) == 0, "under cp"
    assert cudnn_workspace(8208, 8208, 9, *sizes[3:], 5000) == 0, "unequal segments"


def test_attention_by_cudnn_can_be_switched_off(make: Make) -> None:
    for more, allowed in (("", True), ("--model.attention flash", False)):
        with without_processes(META):
            built = measured._built(make("qwen2_5_vl", more=more), Submodule("layer", 0))
        assert [m.core_attention.cudnn for m in built.modules() if isinstance(m, PackedSelfAttention)] == [allowed]


def test_nothing_is_left_behind(make: Make) -> None:
    asked, module = torch.cuda.current_device, make("qwen2_5_vl")
    measure(module, LAST, shard_of(77, module, supervised=5))
    assert torch.cuda.current_device is asked and not dist.is_initialized()
    with pytest.raises(AttributeError):
        measure(replace(module, module=replace(module.module, shape=None)), LAST, shard_of(78, module))
    assert torch.cuda.current_device is asked and not dist.is_initialized()
    assert torch.empty(1).device.type == "cpu"


def test_adapters_of_a_layer(make: Make) -> None:
    """Inputs of layers are saved for A, products with A for B, and a number for each token and linear layer for
    dropout. A pattern makes another kind of layer.
    """
    lora, tokens, hidden = "--text-lora.r 8", 4096, 3584
    flags = {"full": "", "frozen": "--model.freeze text", "some": f"{lora} --text-lora.targets v_proj", "all": lora}
    flags |= {"wide": "--text-lora.r 64 --text-lora.patterns.*.layers.[0-3].*.r 8"}
    flags |= {"dropped": f"{lora} --text-lora.dropout 0.1"}
    modules = {name: make("qwen2_5_vl", "tp:4", f"{WHOLE} {more}") for name, more in flags.items()}
    found = {name: measure(each, Submodule("layer", 5), shard_of(tokens, each)) for name, each in modules.items()}
    saved = {name: each.saved for name, each in found.items()}
    assert saved["some"] - saved["frozen"] == 2 * tokens * (hidden + 8)
    assert saved["all"] - saved["full"] == 2 * tokens * 7 * 8 and saved["wide"] - saved["full"] == 2 * tokens * 7 * 64
    assert saved["dropped"] - saved["all"] == 4 * tokens * 4
    assert measured._first_equal(modules["wide"]) == (*[0] * 4, *[4] * 12)
    assert set(measured._first_equal(modules["all"])) == {0}
