"""Kernels of attention: which runs where, and that each computes what a masked softmax does.

The flash kernels run on GPUs alone. What they are called with is tested everywhere, on stand-ins with the signature,
the checks and the results of PyTorch's operator and of flash-attn's function; tests marked `cuda` run the real ones.
"""

from __future__ import annotations

from functools import partial
from inspect import signature
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
from torch.utils.checkpoint import checkpoint

from megatron_hetero.layout.context import AttentionSegments, contiguous_segments, zigzag_segments
from megatron_hetero.models.layers import kernels
from megatron_hetero.models.layers.attention import TorchAttention
from megatron_hetero.models.layers.cudnn_attention import Call, Form, Operators, attend, calls_for
from megatron_hetero.models.layers.kernels import (
    Kernel,
    bucketed,
    choose_kernel,
    cuda_capability,
    cudnn_or,
    cudnn_problem,
    cudnn_support,
    flash_attn,
    kernel_for,
    torch_flash,
)
from megatron_hetero.models.layers.segments import PackedSegments
from tests.support.stand_ins import cudnn
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


def test_cudnn_is_for_hopper() -> None:
    installed = ["cudnn", "flash_attn"]
    for dim in (64, 72, 80, 128):
        assert choose_kernel("cuda", torch.bfloat16, dim, (9, 0), installed) == "cudnn"
        assert choose_kernel("cuda", torch.bfloat16, dim, (9, 0), [*installed, "flash_attn_3"]) == "flash_attn_3"
        for capability in ((8, 0), (10, 0), (12, 0)):
            assert choose_kernel("cuda", torch.bfloat16, dim, capability, installed) == "flash_attn"
            assert choose_kernel("cuda", torch.bfloat16, dim, capability, ["cudnn"]) == "torch_flash"
    for dim in (56, 136, 256):
        assert choose_kernel("cuda", torch.bfloat16, dim, (9, 0), ["cudnn"]) == "torch_flash"
    assert choose_kernel("cuda", torch.float32, 128, (9, 0), ["cudnn"]) == "bucketed"


PACKS: list[tuple[tuple[int, ...], tuple[int, int], int, int]] = [
    # Lengths; heads and their size; how many ragged, and dense, calls.
    ((8208,), (7, 128), 1, 1),  # Of 7B under tp:4.
    ((8208,), (5, 128), 1, 1),  # Of 32B under tp:8.
    ((8208,), (28, 128), 1, 1),
    ((4000, 4208), (7, 128), 1, 2),
    ((5000, 1000, 1000, 1000), (7, 128), 1, 0),  # Too little for three calls.
    ((6000, *[100] * 20), (7, 128), 0, 0),  # Would need a workspace of 32 times 6,144 rows.
    ((4096,) * 8, (7, 128), 1, 8),
    ((1024,) * 8, (7, 128), 0, 0),
    ((512,) * 16, (28, 128), 1, 0),
    ((2048,), (28, 128), 1, 1),
    ((64,) * 81, (2, 80), 0, 0),
    ((1 << 20,), (16, 128), 0, 0),  # Too many elements.
    ((), (7, 128), 0, 0),
]


@pytest.mark.parametrize("lengths, heads, ragged, dense", PACKS, ids=str)
def test_long_segments_are_for_cudnn(lengths: tuple[int, ...], heads: tuple[int, int], ragged: int, dense: int) -> None:
    calls = {"ragged": calls_for("ragged", lengths, *heads), "dense": calls_for("dense", lengths, *heads)}
    assert {form: len(of_form) for form, of_form in calls.items()} == {"ragged": ragged, "dense": dense}


def test_packs_share_plans() -> None:
    """Of each number of tokens from 2,048 to 8,192: few sizes, each at most as much larger as is said."""
    tokens = range(2048, 8193)
    assert len({Call.dense(n) for n in tokens}) == 49 and len({Call.ragged(n, 3, n) for n in tokens}) == 33
    assert {Call.ragged(n, segments, n).segments for n in tokens for segments in (1, 2, 3, 5, 9)} == {1, 2, 4, 8, 16}
    for n in tokens:
        call = Call.ragged(n, 1, n)
        assert n <= Call.dense(n).tokens < n + max(128, n / 32) and n <= call.tokens < n + max(128, n / 16)
        assert n <= call.longest < n + max(128, n / 4)
        assert not any(size % 128 for size in (call.tokens, call.longest, Call.dense(n).tokens))


def test_signatures_of_cudnns_operators() -> None:
    """What is passed, and in which order, as in torch 2.11 and 2.15."""
    forward, backward = (
        getattr(torch.ops.aten, f"_cudnn_attention_{way}").default._schema for way in ("forward", "backward")
    )
    of_forward = (
        "(Tensor query, Tensor key, Tensor value, Tensor? attn_bias, Tensor? cum_seq_q, Tensor? cum_seq_k, "
        "SymInt max_q, SymInt max_k, bool compute_log_sumexp, float dropout_p=0., bool is_causal=False, "
        "bool return_debug_mask=False, *, float? scale=None"
    )
    assert str(forward).partition("forward")[2].startswith(of_forward)
    assert all(argument.has_default_value() for argument in forward.arguments[9:])
    assert [out.name for out in forward.returns] == (
        "output logsumexp cum_seq_q cum_seq_k max_q max_k philox_seed philox_offset debug_attn_mask".split()
    )
    assert str(backward).partition("backward")[2] == (
        "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, Tensor philox_seed, "
        "Tensor philox_offset, Tensor attn_bias, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, "
        "float dropout_p, bool is_causal, *, float? scale=None) -> (Tensor, Tensor, Tensor)"
    )
    for schema, stand_in in ((forward, cudnn.forward), (backward, cudnn.backward)):
        names = list(signature(stand_in).parameters)
        assert [argument.name for argument in schema.arguments][: len(names)] == names


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


def by_cudnn(form: Form, operators: Operators | None = None) -> Kernel:
    """cuDNN for what it can compute, be it as short as it may; the buckets for the rest."""

    def kernel(q_nHD: Tensor, k_KhD: Tensor, v_KhD: Tensor, segments: PackedSegments, *, causal: bool) -> Tensor:
        lengths = segments.segments.queries
        if not causal or lengths != segments.segments.keys:
            return bucketed(q_nHD, k_KhD, v_KhD, segments, causal=causal)
        ragged = [Call.ragged(sum(lengths), len(lengths), max(lengths))]
        calls = ragged if form == "ragged" else list(map(Call.dense, lengths))
        return attend(q_nHD, k_KhD, v_KhD, segments, calls, operators)

    return kernel


OPERATORS: Operators = (cudnn.forward, cudnn.backward)
FORMS: tuple[Form, ...] = "ragged", "dense"
STAND_INS: dict[str, Kernel] = {
    **{f"cudnn, {form}": by_cudnn(form, OPERATORS) for form in FORMS},
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


def worst(kernel: Kernel, dtype: torch.dtype, device: torch.device, lengths: list[int], dim: int) -> list[float]:
    """How much outputs and gradients differ, in all, from those in fp32."""
    drawn = [
        torch.randn(sum(lengths), heads, dim, generator=torch.Generator().manual_seed(heads)) for heads in (7, 1, 1)
    ]
    drawn = [x.to(device, dtype) for x in drawn]
    results = []
    for run, kind in ((kernel, dtype), (bucketed, torch.float32)):
        inputs = [x.to(kind).requires_grad_() for x in drawn]
        q, k, v = inputs
        out = run(q, k, v, PackedSegments.of(lengths, device), causal=True)
        results.append([out.detach(), *torch.autograd.grad(out, inputs, drawn[0].to(kind).flip(0))])
    return [float((x.float() - y).norm() / y.norm()) for x, y in zip(*results, strict=True)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "device", [CPU, pytest.param(torch.device("cuda", 0), marks=pytest.mark.cuda)], ids=lambda device: device.type
)
def test_cudnn_is_as_exact_as_flash_attention(form: Form, device: torch.device) -> None:
    """On a CPU by stand-ins, of which that of cuDNN rounds less."""
    operators, lengths, dims, flash = OPERATORS, [200, 57, 1], [64], STAND_INS["torch_flash"]
    if device.type == "cuda":
        if not torch.cuda.is_available() or cuda_capability(device)[0] != 9:
            pytest.skip("needs a Hopper GPU")
        if form == "ragged" and cudnn_support(device)[0] != "ragged":
            pytest.skip("this version makes a plan in each ragged call")
        operators, lengths, dims, flash = None, [4100, 1300, 700, 1], [64, 80, 128], torch_flash
    for dim in dims:
        errors, of_flash = (worst(k, torch.bfloat16, device, lengths, dim) for k in (by_cudnn(form, operators), flash))
        assert all(ours <= 1.05 * theirs for ours, theirs in zip(errors, of_flash, strict=True)), (errors, of_flash)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)], ids=str)
@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
def test_cudnn_equals_the_buckets(
    segments: AttentionSegments, dim: int, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    device = torch.device("cuda", 0)
    form, why = cudnn_support(device)
    if form is None:
        pytest.skip(why or "needs a Hopper GPU")
    compare(by_cudnn(form), segments, heads, dim, True, device=device, dtype=dtype)


@pytest.mark.parametrize(
    "form, lengths, rows", [("ragged", [201, 57], 258), ("dense", [201, 57], 258), ("dense", [258], 384)]
)
def test_cudnn_saves_inputs_and_output(form: Form, lengths: list[int], rows: int) -> None:
    """Without padding, but for the output of one dense call, which is not copied. Also where the forward pass is
    repeated; without gradients nothing is saved.
    """
    inputs = [torch.randn(258, heads, 16).requires_grad_() for heads in (4, 2, 2)]
    q, k, v = inputs
    segments, saved = PackedSegments.of(lengths, CPU), list[Tensor]()

    def kernel(*given: Tensor) -> Tensor:
        return by_cudnn(form, OPERATORS)(*given, segments, causal=True)  # pyright: ignore[reportCallIssue]

    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out = kernel(*inputs)
    shapes = [x.shape for x in saved if x.dim() == 3 and x.shape[2] == 16]
    assert sorted(shapes) == sorted([*((258, heads, 16) for heads in (4, 2, 2)), (rows, 4, 16)])
    storages = {x.untyped_storage().data_ptr() for x in saved}
    assert {x.untyped_storage().data_ptr() for x in (*inputs, out)} <= storages
    gradients = torch.autograd.grad(out.sum(), inputs)
    again: Any = checkpoint(kernel, q, k, v, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(again.sum(), inputs), gradients)
    with torch.no_grad():
        torch.testing.assert_close(kernel(*inputs), out)


def test_what_cudnn_does_not_take_is_for_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "attend", lambda *_: "cudnn")
    other: Any = lambda *_, **__: "other"  # noqa: E731

    def chosen(segments: AttentionSegments, causal: bool = True) -> Any:
        q = torch.empty(sum(segments.queries), 28, 128, device="meta")
        packed = PackedSegments.of_segments(AttentionSegments(segments.queries, segments.keys), CPU)
        return cudnn_or(q, q, q, packed, causal=causal, form="ragged", other=other)

    assert chosen(AttentionSegments.whole([4096, 4000])) == "cudnn"
    assert chosen(AttentionSegments.whole([4096, 4000]), causal=False) == "other"
    assert chosen(AttentionSegments.whole([256] * 16)) == "other"
    assert chosen(zigzag_segments([16384], 2, 0)) == "other"
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert chosen(AttentionSegments.whole([4096, 4000])) == "other"


@pytest.mark.parametrize("form", FORMS)
def test_a_small_pack_shows_whether_cudnn_works(form: Form) -> None:
    def by(forward: Any = cudnn.forward, backward: Any = cudnn.backward) -> Any:
        return partial(attend, operators=(forward, backward))

    def wrong(*args: Any, **more: Any) -> Any:
        return tuple(1.1 * x for x in cudnn.backward(*args, **more))

    assert cudnn_problem(form, CPU, by()) == ""
    assert cudnn_problem(form, CPU, by(backward=wrong)) == "its results differ by 10.0%"
    assert "Could not run 'aten::_cudnn_attention_forward'" in cudnn_problem(form, CPU)


@pytest.mark.parametrize("version, found", [(None, "0"), (90100, "90100"), (91900, "91900")])
def test_one_line_says_whether_cudnn_is_used(version: int | None, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(kernels, "cuda_capability", lambda _: (9, 0))
    monkeypatch.setattr(kernels, "cudnn_problem", lambda *_: "" if version == 91900 else "not asked")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    for cached in (cudnn_support, kernel_for):
        monkeypatch.setattr(kernels, cached.__name__, cached.__wrapped__)
    form, notice = kernels.cudnn_support(device)
    chosen: Any = kernels.kernel_for(device, torch.bfloat16, 128)
    assert isinstance(chosen, partial) == (form is not None) == (version == 91900)
    if form is None:
        assert (
            notice == f"cuDNN {found} is not used for attention (91800 or newer works): FlashAttention is used instead."
        )
    else:
        assert notice.endswith(f"long segments, heads of 64 to 128 ({form} calls).") and found in notice
        assert chosen.func is cudnn_or and chosen.keywords == {"form": form, "other": torch_flash}
        assert kernels.kernel_for(device, torch.bfloat16, 128, cudnn=False) is torch_flash
        assert kernels.kernel_for(device, torch.bfloat16, 56) is torch_flash
    with monkeypatch.context() as installed:
        installed.setattr(kernels, "unusable", lambda *_: "")
        assert kernels.cudnn_support(device) == (None, ""), "FlashAttention-3 computes it"
    monkeypatch.setattr(kernels, "cuda_capability", lambda _: (8, 0))
    assert kernels.cudnn_support(device) == (None, "") == kernels.cudnn_support(CPU)


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
