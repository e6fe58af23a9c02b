"""Gated delta rule in chunks, against its definition token by token and against `transformers`, one sequence at a
time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from megatron_hetero.groups.platform import CPU
from megatron_hetero.models.layers import chunks
from megatron_hetero.models.layers.chunks import blocks_of, chunk_length
from megatron_hetero.models.layers.delta_rule import delta_rule
from megatron_hetero.models.layers.sequences import Sequences

LENGTHS = st.lists(st.sampled_from([1, 2, 3, 63, 64, 65, 127]) | st.integers(0, 200), min_size=1, max_size=6)
PACKS = LENGTHS.map(tuple).filter(any)
NAMES = "out", "q", "k", "v", "decay", "beta"
ROUNDING = 2e-6
"""Largest error of an output or gradient over its norm in fp32."""

Rule = Callable[..., Tensor]


class Heads(NamedTuple):
    key: int = 2
    value: int = 4
    key_dim: int = 16
    value_dim: int = 8


HEADS = Heads()


def inputs_of(tokens: int, heads: Heads = HEADS, seed: int = 0) -> Any:
    """Queries, keys, values, decay and beta."""
    draw = torch.Generator().manual_seed(seed)
    sizes = [(heads.key, heads.key_dim)] * 2 + [(heads.value, heads.value_dim)]
    q, k, v = (torch.randn(tokens, *size, generator=draw) for size in sizes)
    decay = -torch.rand(tokens, heads.value, generator=draw)
    return [q, k, v, decay, torch.rand(tokens, heads.value, generator=draw)]


def run(rule: Rule, inputs: list[Tensor], lengths: tuple[int, ...], dtype: torch.dtype | None = None) -> list[Tensor]:
    """Result and gradients of a rule that takes a pack, in `dtype` if given."""
    leaves = [x.detach().clone().to(dtype or x.dtype).requires_grad_() for x in inputs]
    out = rule(*leaves, Sequences(lengths, CPU))
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(inputs[2].dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, weights.to(out.dtype))]


def one_by_one(rule: Rule) -> Rule:
    """A rule of packs that calls `rule` with each sequence."""

    def packed(*arguments: Any) -> Tensor:
        *inputs, sequences = arguments
        each = zip(*(x.split(sequences.lengths) for x in inputs), strict=True)
        return torch.cat([rule(*one) if len(one[0]) else one[2] for one in each])

    return packed


@one_by_one
def token_by_token(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    copies = v.shape[1] // q.shape[1]
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(copies, dim=1) for x in (q * q.shape[-1] ** -0.5, k))
    state, out = v.new_zeros(v.shape[1], k.shape[-1], v.shape[-1]), []
    for t in range(len(v)):
        state = decay[t].exp()[:, None, None] * state
        change = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + torch.einsum("hk,hv->hkv", k[t], change)
        out.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return torch.stack(out)


@one_by_one
def theirs(*inputs: Any) -> Tensor:
    return torch_chunk_gated_delta_rule(*(x[None] for x in inputs), use_qk_l2norm_in_kernel=True)[0][0]


@one_by_one
def alone(*inputs: Any) -> Tensor:
    return delta_rule(*inputs, sequences=Sequences((len(inputs[0]),), CPU))


def errors(found: list[Tensor], expected: list[Tensor]) -> dict[str, float]:
    pairs = zip(NAMES, found, expected, strict=True)
    return {name: float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30)) for name, a, b in pairs}


def same(found: list[Tensor], expected: list[Tensor], most: float = ROUNDING) -> None:
    wrong = {name: error for name, error in errors(found, expected).items() if not error <= most}
    assert not wrong


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks in a block, so that packs have several."""
    monkeypatch.setattr(chunks, "BLOCK", (128, 128))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("heads", [HEADS, Heads(1, 3), Heads(4, 4), Heads(1, 1), Heads(2, 4, 4, 24)])
@pytest.mark.parametrize("lengths", [(1, 2, 3, 63, 64, 65, 127), (330,), (0, 5, 0, 1), (3,) * 9, (130, 1, 200)])
def test_definition(heads: Heads, lengths: tuple[int, ...]) -> None:
    inputs = inputs_of(sum(lengths), heads)
    found = run(delta_rule, inputs, lengths)
    same(found, run(token_by_token, inputs, lengths, torch.float64))
    same(found, run(theirs, inputs, lengths))


@pytest.mark.usefixtures("small_blocks")
@settings(max_examples=40)
@given(PACKS, st.integers(0, 2**16))
def test_packed_is_one_at_a_time(lengths: tuple[int, ...], seed: int) -> None:
    inputs = inputs_of(sum(lengths), seed=seed)
    found, expected = run(delta_rule, inputs, lengths), run(alone, inputs, lengths)
    for name, a, b in zip(NAMES, found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=3e-6, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.usefixtures("small_blocks")
@settings(max_examples=40)
@given(PACKS, st.data())
def test_sequences_do_not_mix(lengths: tuple[int, ...], data: st.DataObject) -> None:
    changed = data.draw(st.sampled_from([i for i, length in enumerate(lengths) if length]))
    inputs, others = inputs_of(sum(lengths)), inputs_of(sum(lengths), seed=1)
    number = Sequences(lengths, CPU).numbers
    mixed = [
        torch.where((number == changed).view(-1, *[1] * (x.dim() - 1)), y, x)
        for x, y in zip(inputs, others, strict=True)
    ]
    for a, b in zip(run(delta_rule, inputs, lengths), run(delta_rule, mixed, lengths), strict=True):
        assert torch.equal(a[number != changed], b[number != changed])
        assert not torch.equal(a[number == changed], b[number == changed]) or lengths[changed] == 1


DECAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": torch.zeros_like,
    "strong": lambda x: torch.full_like(x, -50.0),
    "some strong": lambda x: torch.where(x < -0.9, -1e4, 0.1 * x),
    "denormal": lambda x: torch.full_like(x, -1.5),
}


@pytest.mark.parametrize("name", DECAYS)
def test_decays(name: str) -> None:
    lengths = (130, 65, 3)
    inputs = inputs_of(sum(lengths))
    inputs[3] = DECAYS[name](inputs[3])
    same(run(delta_rule, inputs, lengths), run(token_by_token, inputs, lengths, torch.float64))


@pytest.mark.parametrize("beta", [0.0, 1.0, None])
def test_zeros_and_ones(beta: float | None) -> None:
    lengths = (130, 65, 3)
    inputs = inputs_of(sum(lengths))
    inputs[0][::3], inputs[1][::2] = 0, 0
    inputs[4] = inputs[4].round() if beta is None else torch.full_like(inputs[4], beta)
    same(run(delta_rule, inputs, lengths), run(token_by_token, inputs, lengths, torch.float64))


def test_equal_keys_without_decay() -> None:
    """The system is as far from the identity as it can be."""
    inputs = inputs_of(200)
    inputs[1], inputs[3], inputs[4] = inputs[1][:1].expand(200, -1, -1), 0 * inputs[3], torch.ones_like(inputs[4])
    found = run(delta_rule, inputs, (200,))
    expected = run(token_by_token, inputs, (200,), torch.float64)
    # The decay's gradient is zero but for rounding.
    found[4], expected[4] = found[4] + 1, expected[4] + 1
    same(found, expected, 1e-5)


def test_half_precision() -> None:
    lengths = (130, 65, 3, 1)
    inputs: Any = [x if i == 3 else x.bfloat16() for i, x in enumerate(inputs_of(sum(lengths)))]
    found, reference = run(delta_rule, inputs, lengths), run(theirs, inputs, lengths)
    assert [x.dtype for x in found] == [torch.bfloat16] * 4 + [torch.float32, torch.bfloat16]
    expected = run(token_by_token, inputs, lengths, torch.float64)
    ours, others = errors(found, expected), errors(reference, expected)
    assert all(ours[name] <= 1.2 * others[name] for name in NAMES), (ours, others)


@pytest.mark.parametrize("wanted", [0, 1, 2, 3, 4])
def test_gradient_of_one_input(wanted: int) -> None:
    lengths = (70, 3)
    inputs = inputs_of(sum(lengths))
    expected = run(delta_rule, inputs, lengths)[1 + wanted]
    inputs[wanted].requires_grad_()
    out = delta_rule(*inputs, sequences=Sequences(lengths, CPU))
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
    assert torch.equal(torch.autograd.grad(out, inputs[wanted], weights)[0], expected)


def test_strided_inputs() -> None:
    """Queries, keys and values of one projection."""
    lengths, heads = (70, 3), Heads(2, 4, 8, 8)
    inputs = inputs_of(sum(lengths), heads)
    mixed = torch.cat([x.flatten(1) for x in inputs[:3]], dim=1)
    views: Any = [x.unflatten(1, (-1, 8)) for x in mixed.split((16, 16, 32), dim=1)]
    assert torch.equal(
        delta_rule(*views, *inputs[3:], sequences=Sequences(lengths, CPU)),
        delta_rule(*inputs, sequences=Sequences(lengths, CPU)),
    )


@pytest.mark.parametrize("device, mode", [("meta", contextlib.nullcontext), ("cpu", FakeTensorMode)])
def test_tensors_without_values(device: str, mode: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    lengths = (130, 0, 3, 500)
    shapes = [x.shape for x in inputs_of(sum(lengths))]
    with mode():
        inputs: Any = [torch.empty(shape, device=device, requires_grad=True) for shape in shapes]
        out = delta_rule(*inputs, sequences=Sequences(lengths, torch.device(device)))
        found = [out.shape, *(x.shape for x in torch.autograd.grad(out.sum(), inputs))]
    assert found == [shapes[2], *shapes]


def test_saved_for_the_backward_pass() -> None:
    """The inputs, and a state for every 512 tokens but the first ones."""
    saved: list[Tensor] = []
    inputs: Any = [x.requires_grad_() for x in inputs_of(1600)]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        delta_rule(*inputs, sequences=Sequences((1600,), CPU))
    assert [x.shape for x in saved] == [*(x.shape for x in inputs), *[(4, 16, 8)] * 3]


def test_saved_tensors_are_unpacked_once() -> None:
    """`torch.utils.checkpoint` refuses a second time, and other hooks would copy them again."""
    inputs: Any = [x.requires_grad_() for x in inputs_of(1600)]
    unpacked: list[int] = []

    def unpack(x: Tensor) -> Tensor:
        unpacked.append(id(x))
        return x

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
        out = delta_rule(*inputs, sequences=Sequences((1600,), CPU))
    out.sum().backward()
    assert len(unpacked) == len(set(unpacked)) == len(inputs) + 3


@given(PACKS, st.integers(1, 12))
def test_blocks(lengths: tuple[int, ...], most: int) -> None:
    chunk, total = chunk_length(lengths), sum(lengths)
    blocks = list(blocks_of(lengths, chunk, most))
    places = np.concatenate([block.tokens.flatten() for block in blocks])
    assert sorted(places[places < total]) == list(range(total))
    last: list[int] = []
    for block, after in zip(blocks, [*blocks[1:], None], strict=True):
        assert block.starts == (not last)
        assert len(block.tokens) == sum(block.steps)
        assert len(block.tokens) <= most or len(block.steps) == 1
        for tokens in np.split(block.tokens, np.cumsum(block.steps)[:-1]):
            # A chunk follows the chunk at its place in the step before, and its tokens each other.
            assert not last or len(tokens) <= len(last)
            assert not last or all(row[0] == before + 1 for row, before in zip(tokens, last, strict=False))
            assert all((np.diff(row[row < total]) == 1).all() for row in tokens)
            last = [int(row[-1]) for row in tokens]
        assert block.follows == (0 if after is None or after.starts else after.steps[0])
        last = last if block.follows else []


@pytest.mark.parametrize(
    "lengths, chunk",
    [((1000,), 64), ((65,), 64), ((33,), 64), ((31,), 32), ((10,) * 500, 16), ((1,), 16), ((4000, 10, 10), 64)],
)
def test_chunks_of_short_sequences(lengths: tuple[int, ...], chunk: int) -> None:
    assert chunk_length(lengths) == chunk
