"""Sparse MLPs equal a block of `transformers` in one process, wherever tokens and experts are."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_hetero.groups.local_group import SilentGroup
from megatron_hetero.models.layers import experts as layer
from megatron_hetero.models.layers import grouped
from megatron_hetero.models.layers.dispatch import Dispatch, RowExchange, Sizes, block
from megatron_hetero.models.layers.experts import ExpertMLP, _Experts, chunks
from megatron_hetero.models.layers.recompute import Recompute
from tests.support.expert_blocks import EMPTY, Row, _apart, differences
from tests.support.pool import Pools

ROWS = [
    *EMPTY,
    Row("dp:1@0"),
    Row("dp:4,ep:1"),
    Row("dp:4,ep:2", shared=True),
    Row("dp:4,ep:4"),
    Row("dp:4,ep:4", experts=5, top_k=1),
    Row("dp:4,ep:4", experts=16, top_k=8, ffn=7),
    Row("tp:4,ep:4", shared=True),
    Row("tp:4,ep:2", shared=True, split=False),
    Row("tp:2,dp:2,ep:4", experts=7, top_k=3, split=False),
    Row("tp:2,cp:2,ep:4", recompute=Recompute("none", chunk=5)),
    Row("dp:4,ep:1", recompute=Recompute("none", chunk=1)),
    Row("dp:4,ep:4", experts=5, top_k=1, recompute=Recompute("none", chunk=2), dtype=torch.float64),
    Row("dp:4,ep:2", experts=7, top_k=3, recompute=Recompute("selective", chunk=3)),
    Row("sp:2,dp:2,ep:2", recompute=Recompute("selective")),
    Row("dp:4,ep:4", dtype=torch.float64),
    Row("dp:4,ep:4", experts=4, top_k=4),
    Row("dp:4,ep:4", idle=True, recompute=Recompute("experts")),
    Row("dp:4,ep:1", recompute=Recompute("experts")),
    Row("tp:2,dp:2,ep:4", experts=7, top_k=3, shared=True, split=False, recompute=Recompute("experts")),
    Row("tp:4,ep:4", shared=True, recompute=Recompute("experts")),
    Row("dp:4,ep:4", experts=5, top_k=1, recompute=Recompute("experts", chunk=2)),
]


ON_GPU = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_the_layer_equals_transformers(row: Row, pools: Pools) -> None:
    results = pools(4).run(differences, row)
    limit = 1e-12 if row.dtype == torch.float64 else 2e-6
    assert all(difference <= limit for found in results for difference in found.values()), results


COUNTS = [(0, 0, 0, 0), (1, 0, 0, 0), (0, 0, 0, 1), (0, 5, 0, 33), (64, 0, 0, 0)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunk", [0, 7])
@pytest.mark.parametrize("one_kernel", [True, False], ids=["one kernel", "loop"])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_experts_with_no_rows_or_one(
    counts: tuple[int, ...], one_kernel: bool, chunk: int, dtype: torch.dtype, device: str
) -> None:
    """On a GPU with one kernel for all experts in bfloat16, the loop is what others run."""
    generator, options = torch.Generator().manual_seed(sum(counts)), {"dtype": dtype, "device": device}
    site: Any = SimpleNamespace(recompute=Recompute("none", chunk), compile_layers=False)
    module = _Experts(ExpertMLP(24, 20, 4, 1, "mlp."), 4, site, options)
    chosen = torch.arange(4).repeat_interleave(torch.tensor(counts))[torch.randperm(sum(counts), generator=generator)]
    first, second, x, weights, cotangent = (
        torch.randn(*shape, generator=generator).bfloat16().double().requires_grad_()
        for shape in ((4, 48, 24), (4, 24, 24), (len(chosen), 24), (len(chosen),), (len(chosen), 24))
    )
    order = chosen.argsort(stable=True)
    gate, up = torch.einsum("ni,noi->no", x[order], first[chosen[order]]).chunk(2, 1)
    inner = torch.nn.functional.silu(gate) * up * weights[:, None]
    expected = torch.einsum("ni,noi->no", inner, second[chosen[order]])
    of_expected = torch.autograd.grad(expected, (x, weights, first, second), cotangent)

    module.first.data.copy_(first.detach().flatten(0, 1))
    module.second.data.copy_(second.detach().flatten(0, 1))
    rows, factors = (tensor.detach().to(**options).requires_grad_() for tensor in (x, weights))
    loops = mock.patch.object(layer, "is_grouped", return_value=False)
    with contextlib.nullcontext() if one_kernel else loops:
        out, _ = module.of_pairs(
            rows, factors, Dispatch.of(chosen.to(device)[:, None], factors[:, None], 4, SilentGroup(1))
        )
        out.backward(cotangent.detach().to(**options))
    found = (out, rows.grad, factors.grad, module.first.grad, module.second.grad)
    for one, other in zip(found, (expected, *of_expected), strict=True):
        assert one is not None and one.numel() == other.numel()
        assert _apart(one.view(other.shape).double(), other) <= (2e-6 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize(
    "ends, limit, wanted",
    [
        ((3, 3, 5, 9), 5, [(0, 3, 0, 5), (3, 4, 5, 9)]),
        ((0, 0, 12, 12, 13), 5, [(0, 2, 0, 0), (2, 3, 0, 5), (2, 3, 5, 10), (2, 3, 10, 12), (3, 5, 12, 13)]),
        ((0, 7), 3, [(0, 1, 0, 0), (1, 2, 0, 3), (1, 2, 3, 6), (1, 2, 6, 7)]),
        ((7, 7), 7, [(0, 2, 0, 7)]),
        ((8, 8), 7, [(0, 1, 0, 7), (0, 1, 7, 8), (1, 2, 8, 8)]),
    ],
)
def test_chunks_have_whole_experts_or_a_part_of_one(
    ends: tuple[int, ...], limit: int, wanted: list[tuple[int, ...]]
) -> None:
    found = chunks(ends, limit)
    assert [(e.start, e.stop, r.start, r.stop) for e, r, _ in found] == wanted
    starts = (0, *ends)
    assert [continues for *_, continues in found] == [rows > starts[first] for first, _, rows, _ in wanted]


def chunked(chunk: int, dtype: torch.dtype, top_k: int = 2) -> dict[str, Tensor]:
    """What `experts` give for 1,024 tokens, and gradients, all of one sign so that errors of sums add up."""
    part, generator = ExpertMLP(64, 32, 4, top_k, "mlp."), torch.Generator().manual_seed(7)
    site: Any = SimpleNamespace(recompute=Recompute("none", chunk), compile_layers=False)
    module = _Experts(part, 4, site, {"dtype": dtype, "device": "cpu"})

    def drawn(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator).bfloat16().to(dtype)

    for parameter in module.parameters():
        parameter.data.copy_(drawn(*parameter.shape) / 8)
    dispatch = Dispatch.of(drawn(1024, 4).float().topk(top_k).indices, drawn(1024, top_k), 4, SilentGroup(1))
    x, weights, cotangent = drawn(1024, 64), drawn(1024 * top_k), drawn(1024 * top_k, 64)
    out, _ = module.of_pairs(x.requires_grad_(), weights.requires_grad_(), dispatch)
    out.backward(cotangent)
    gradients = {name: p.grad for name, p in (("x", x), ("weights", weights), *module.named_parameters())}
    return {"out": out.detach()} | {name: grad for name, grad in gradients.items() if grad is not None}


@pytest.mark.parametrize("pieces", [2, 16, 128])
def test_gradients_of_chunks_are_as_exact_as_those_of_one_product(pieces: int) -> None:
    exact, whole = chunked(0, torch.float32), chunked(0, torch.bfloat16)
    found = chunked(1024 // pieces, torch.bfloat16)
    for name, expected in exact.items():
        errors = [float((x[name].float() - expected).norm() / expected.norm()) for x in (found, whole)]
        assert errors[0] <= 1.2 * errors[1] + 1e-4, (name, errors)


def test_a_chunk_writes_gradients_of_its_experts_only() -> None:
    written = []
    real = grouped.outer_products

    def counted(*given: Any) -> Tensor:
        written.append(len(found := real(*given)))
        return found

    with mock.patch.object(grouped, "outer_products", counted):
        chunked(600, torch.float32)
    assert sum(written) == 2 * 4 and len(written) >= 4


def test_chunks_count_tokens() -> None:
    """Of which each is as many pairs as it has experts."""
    with mock.patch.object(layer, "chunks", side_effect=layer.chunks) as cut:
        chunked(1024, torch.float32)
        assert not cut.called
        chunked(1023, torch.float32)
        cut.assert_called_once_with(mock.ANY, 2046)


AHEAD = ["send", "inner", "wait", "product", "product", "send", "send", "wait", "wait"]
BACKWARD = {
    "none": AHEAD,
    "experts": AHEAD,
    # Nothing ahead.
    "chunks": ["send", "wait", *["inner", "product", "product"] * 3, "send", "send", "wait", "wait"],
}


@pytest.mark.parametrize("how", BACKWARD)
def test_what_runs_beside_exchanges(how: str) -> None:
    """In the backward pass: the gradients of results beside hidden activations."""
    events, real = list[str](), RowExchange.run

    class Noted(SimpleNamespace):
        def wait(self) -> None:
            events.append("wait")

    def run(exchange: RowExchange, x: Tensor) -> tuple[Tensor, Any]:
        events.append("send")
        return real(exchange, x)[0], Noted()

    def noting(name: str, function: Any) -> Any:
        return lambda *given: (events.append(name), function(*given))[1]

    recompute = Recompute("experts" if how == "experts" else "none", chunk=255 * (how == "chunks"))
    site: Any = SimpleNamespace(recompute=recompute, compile_layers=False)
    part = ExpertMLP(64, 16, 4, 4, "mlp.")
    module = _Experts(part, 2, site, {"dtype": torch.bfloat16, "device": "meta"})
    tokens, weights = (torch.empty(256, n, dtype=torch.bfloat16, device="meta") for n in (64, 4))
    dispatch = Dispatch.of(torch.empty(256, 4, dtype=torch.int64, device="meta"), weights, 4, SilentGroup(2))
    with (
        mock.patch.object(RowExchange, "run", run),
        mock.patch.object(grouped, "outer_products", noting("product", grouped.outer_products)),
        mock.patch.object(_Experts, "_inner", noting("inner", _Experts._inner)),
    ):
        out = module(tokens.requires_grad_(), weights.requires_grad_(), dispatch)
        inner = ["inner"] * (1 + 2 * (how == "chunks"))
        assert events == ["send", "send", "wait", "wait", *inner, "send", "wait"]
        events.clear()
        out.backward(torch.empty_like(out))
    assert events == BACKWARD[how]


@pytest.mark.parametrize(
    "dtype, capability, one_kernel",
    [
        (torch.bfloat16, (7, 5), False),
        (torch.bfloat16, (8, 0), False),
        (torch.bfloat16, (8, 9), False),
        (torch.bfloat16, (9, 0), True),
        (torch.bfloat16, (10, 3), True),
        (torch.bfloat16, (11, 0), False),
        (torch.bfloat16, (12, 0), False),
        (torch.float32, (9, 0), False),
    ],
)
def test_gpus_with_one_kernel_for_all_experts(
    dtype: torch.dtype, capability: tuple[int, int], one_kernel: bool
) -> None:
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=capability), FakeTensorMode():
        assert layer.is_grouped(torch.empty(3, 16, dtype=dtype, device="cuda"), 16, 32) is one_kernel
        assert not layer.is_grouped(torch.empty(3, 12, dtype=torch.bfloat16, device="cuda"), 12)


def test_blocks_of_experts() -> None:
    for experts in (1, 5, 6, 128):
        for ranks in (1, 2, 3, 4, 5):
            blocks = [block(experts, rank, ranks) for rank in range(ranks)] if ranks <= experts else []
            sizes = [stop - start for start, stop in blocks]
            assert [start for start, _ in blocks] == np.cumsum([0, *sizes])[:-1].tolist()
            assert not sizes or (sum(sizes) == experts and max(sizes) - min(sizes) <= 1 and min(sizes) > 0)


def test_expected_sizes() -> None:
    sizes = Sizes.expected(1000, 8, 8, 1.5)
    assert sum(sizes.sent) == 8 * round(1000 * (1 - (7 / 8) ** 8)) and sizes.pairs == 12000
    assert sum(sizes.received) == pytest.approx(1.5 * sum(sizes.sent), abs=8)
