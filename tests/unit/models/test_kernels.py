"""Kernels of attention: which runs where, and that each computes what a masked softmax does.

The flash kernels run on GPUs alone. What they are called with is tested everywhere, on stand-ins with the signature,
the checks and the results of PyTorch's operator and of flash-attn's function; tests marked `cuda` run the real ones.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_hetero.layout.context import AttentionSegments, contiguous_segments, zigzag_segments
from megatron_hetero.models.layers.attention import TorchAttention
from megatron_hetero.models.layers.kernels import (
    Kernel,
    bucketed,
    choose_kernel,
    cuda_capability,
    flash_attn,
    kernel_for,
    torch_flash,
)
from megatron_hetero.models.layers.segments import PackedSegments
from tests.support.stand_ins.flash import (
    aten_flash_attention_forward,
    flash_attn_3_varlen_func,
    flash_attn_varlen_func,
)
from tests.unit.models.packs import naive

CPU = torch.device("cpu")
FORWARD, BACKWARD = "aten::_flash_attention_forward", "aten::_flash_attention_backward"
HALF = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("dim", [8, 72, 80, 128, 256])
def test_one_launch_on_gpus_in_half_precision(dtype: torch.dtype, dim: int) -> None:
    for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
        assert choose_kernel("cuda", dtype, dim, capability, ["flash_attn"]) == "flash_attn"
        assert choose_kernel("cuda", dtype, dim, capability, []) == "torch_flash"


def test_flash_attention_3_is_for_hopper() -> None:
    both = ["flash_attn_3", "flash_attn"]
    assert choose_kernel("cuda", torch.bfloat16, 80, (9, 0), both) == "flash_attn_3"
    for capability in ((8, 0), (10, 0), (12, 0)):
        assert choose_kernel("cuda", torch.bfloat16, 80, capability, both) == "flash_attn"
        assert choose_kernel("cuda", torch.bfloat16, 80, capability, both[:1]) == "torch_flash"


@pytest.mark.parametrize(
    "device, dtype, dim, capability",
    [
        ("cpu", torch.bfloat16, 80, (9, 0)),
        ("cuda", torch.float32, 80, (9, 0)),
        ("cuda", torch.bfloat16, 264, (9, 0)),
        ("cuda", torch.bfloat16, 12, (9, 0)),
        ("cuda", torch.float16, 80, (7, 5)),
    ],
    ids=["cpu", "fp32", "wide heads", "odd heads", "Turing"],
)
def test_what_flash_kernels_do_not_take_is_bucketed(
    device: str, dtype: torch.dtype, dim: int, capability: tuple[int, int]
) -> None:
    assert choose_kernel(device, dtype, dim, capability, ["flash_attn_3", "flash_attn"]) == "bucketed"
    assert choose_kernel(device, dtype, dim, capability, []) == "bucketed"


def test_a_cpu_takes_the_buckets() -> None:
    assert kernel_for(CPU, torch.bfloat16, 80) is bucketed


STAND_INS: dict[str, Kernel] = {
    "torch_flash": partial(torch_flash, op=aten_flash_attention_forward),
    "flash_attn": partial(flash_attn, function=flash_attn_varlen_func),
    "flash_attn_3": partial(flash_attn, function=flash_attn_3_varlen_func),
    "flash_attn_3, early": partial(flash_attn, function=lambda *x, **more: (flash_attn_3_varlen_func(*x, **more), 0)),
}
SEGMENTS = {
    "ragged": AttentionSegments.whole([7, 1, 4, 4, 2]),
    "one": AttentionSegments.whole([9]),
    "single tokens": AttentionSegments.whole([1, 1, 1]),
    "zigzag": zigzag_segments([16, 7, 1, 3], 2, 0),
    "zigzag, last member": zigzag_segments([16, 7, 1, 3], 2, 1),
    "contiguous": contiguous_segments([5, 9, 2], [8, 8], 1),
}


def compare(
    kernel: Kernel, segments: AttentionSegments, heads: tuple[int, int], dim: int, causal: bool, **options: Any
) -> None:
    """`kernel` against the buckets in fp32: outputs and gradients. `options`: device and dtype of the inputs."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(segments.queries), heads[0], dim), *[(sum(segments.keys), heads[1], dim)] * 2]
    drawn = [torch.randn(shape, generator=generator).to(options["dtype"]) for shape in shapes]
    cotangent = torch.randn(shapes[0], generator=generator).to(options["dtype"])
    segments = AttentionSegments(segments.queries, segments.keys)  # whose keys are those drawn
    results = []
    for run, to in ((kernel, options), (bucketed, {"device": CPU, "dtype": torch.float32})):
        inputs = [x.to(**to).requires_grad_() for x in drawn]
        q, k, v = inputs
        out = run(q, k, v, PackedSegments.of_segments(segments, to["device"]), causal=causal)
        results.append([out.detach(), *torch.autograd.grad(out, inputs, cotangent.to(**to))])
    for ours, expected in zip(*results, strict=True):
        assert ours.dtype == options["dtype"] and ours.shape == expected.shape
        if options["dtype"] == torch.float32:
            torch.testing.assert_close(ours, expected)
        else:
            # Rounding of what is stored in half precision: inputs are exact, weights and results are not. With one key
            # per query the gradients of queries and keys are zero, but for rounding in fp32.
            least = 0.01 * cotangent.float().norm()
            error = (ours.cpu().float() - expected).norm() / torch.maximum(expected.norm(), least)
            assert error < 4 * torch.finfo(options["dtype"]).eps


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)], ids=str)
@pytest.mark.parametrize("dim", [16, 8])
@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
@pytest.mark.parametrize("kernel", STAND_INS.values(), ids=STAND_INS)
def test_one_launch_equals_the_buckets(
    kernel: Kernel, segments: AttentionSegments, dim: int, heads: tuple[int, int], causal: bool
) -> None:
    compare(kernel, segments, heads, dim, causal, device=CPU, dtype=torch.float32)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)], ids=str)
@pytest.mark.parametrize("dim", [16, 72, 80, 128])
@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
def test_pytorchs_kernel_equals_the_buckets(
    segments: AttentionSegments, dim: int, heads: tuple[int, int], causal: bool, dtype: torch.dtype
) -> None:
    device = torch.device("cuda", 0)
    if cuda_capability(device) < (8, 0):
        pytest.skip("the flash kernel needs Ampere or newer")
    compare(torch_flash, segments, heads, dim, causal, device=device, dtype=dtype)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=8),
    st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    st.booleans(),
    st.sampled_from(sorted(STAND_INS)),
    st.integers(0, 2**32 - 1),
)
def test_one_launch_equals_a_masked_softmax(
    shapes: list[tuple[int, int]], heads: tuple[int, int], causal: bool, name: str, seed: int
) -> None:
    """The last queries of a sequence get what they would get if all of it attended."""
    generator = torch.Generator().manual_seed(seed)
    segments = AttentionSegments(tuple(q for q, _ in shapes), tuple(q + more for q, more in shapes))
    whole = [
        torch.randn(sum(segments.keys), h, 8, generator=generator, dtype=torch.float64).requires_grad_()
        for h in (heads[0], heads[1], heads[1])
    ]
    ends = np.cumsum(segments.keys)
    asked = np.concatenate([np.arange(end - q, end) for end, q in zip(ends, segments.queries, strict=True)])
    q, k, v = whole
    mask = AttnMaskType.causal if causal else AttnMaskType.no_mask
    attention = TorchAttention(SimpleNamespace(), 1, mask, "self", kernel=STAND_INS[name])  # pyright: ignore[reportArgumentType]
    got = attention(q[asked], k, v, None, packed_seq_params=PackedSegments.of_segments(segments, CPU))
    expected = naive(q, k, v, segments.keys, causal)[asked]
    torch.testing.assert_close(got, expected)
    cotangent = torch.randn(got.shape, generator=generator, dtype=torch.float64)
    gradients = torch.autograd.grad((got * cotangent).sum(), whole)
    torch.testing.assert_close(gradients, torch.autograd.grad((expected * cotangent).sum(), whole))


class Launches(TorchDispatchMode):
    """The operators of attention that are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "attention" in func._schema.name:
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("dim", [80, 72])
@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
def test_pytorchs_kernel_is_one_launch_each_way(segments: AttentionSegments, dim: int, causal: bool) -> None:
    """On tensors without data, for which PyTorch has the operator and its gradient in any build."""
    packed = PackedSegments.of_segments(AttentionSegments(segments.queries, segments.keys), CPU)
    packed.cu_seqlens_q, packed.cu_seqlens_kv = (x.to("meta") for x in (packed.cu_seqlens_q, packed.cu_seqlens_kv))

    def empty(tokens: tuple[int, ...], heads: int) -> Tensor:
        return torch.empty(sum(tokens), heads, dim, dtype=torch.bfloat16, device="meta", requires_grad=True)

    q, k, v = empty(segments.queries, 8), empty(segments.keys, 2), empty(segments.keys, 2)
    with Launches() as launches:
        out = torch_flash(q, k, v, packed, causal=causal)
        assert launches.names == [FORWARD] and out.shape == q.shape
        gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert launches.names == [FORWARD, BACKWARD]
    assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
def test_a_gpu_gets_one_launch_and_no_buckets(segments: AttentionSegments, causal: bool) -> None:
    mask = AttnMaskType.causal if causal else AttnMaskType.no_mask
    attention = TorchAttention(SimpleNamespace(), 1, mask, "self")  # pyright: ignore[reportArgumentType]
    with FakeTensorMode(allow_non_fake_inputs=True), Launches() as launches:
        packed = PackedSegments.of_segments(AttentionSegments(segments.queries, segments.keys), CPU)
        packed.cu_seqlens_q, packed.cu_seqlens_kv = (
            torch.empty(len(segments.queries) + 1, dtype=torch.int32, device="cuda") for _ in range(2)
        )
        q = torch.empty(sum(segments.queries), 8, 80, dtype=torch.bfloat16, device="cuda")
        k, v = (torch.empty(sum(segments.keys), 2, 80, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        out = attention(q, k, v, None, packed_seq_params=packed)
    assert launches.names == [FORWARD] and out.shape == (sum(segments.queries), 640)
    # What only the buckets need has not been made.
    assert not {"buckets", "order", "key_order"} & vars(packed).keys()
