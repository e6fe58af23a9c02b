"""Activations in host memory: what is copied, when it leaves the device and comes back, and that nothing changes."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Module, Parameter

from megatron_hetero.groups.platform import CPU, Platform
from megatron_hetero.models.layers import offload as activations
from megatron_hetero.models.layers.offload import (
    ActivationOffload,
    HostPool,
    HostRoom,
    OffloadSizes,
    SavedStorage,
    offloaded_layers,
)
from megatron_hetero.models.layers.recompute import Hooks, not_saving, recompute
from tests.support.folders import write_model
from tests.support.matrix import thinned
from tests.support.ranks import on_ranks
from tests.unit.models.choices import CHOICES, flags_of
from tests.unit.models.steps import train

PLATFORM = Platform(CPU, "gloo")
Make = Callable[[Tensor], Tensor]


class Step(Module):
    """A layer that is any function of its input and a weight of its own."""

    def __init__(self, compute: Callable[[Tensor, Tensor], Tensor]):
        super().__init__()
        self.compute = compute
        self.weight = Parameter(torch.rand(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x, self.weight)


def blocks_in_use(pool: Any) -> int:
    return pool.allocated - len(pool._free)


def offload_of(least: int = 1, block: int = 100) -> ActivationOffload:
    """By default of everything, in blocks in which no tensor fits whole."""
    return ActivationOffload(PLATFORM, OffloadSizes(least, block))


def forward(layers: list[Step], x: Tensor, offload: ActivationOffload | None, apart: tuple[Tensor, ...] = ()) -> Tensor:
    def run(x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x)
        return x

    if offload is None:
        return run(x)
    with offload.saving(layers, apart=apart):
        return run(x)


def gradients(layers: list[Step], out: Tensor, x: Tensor) -> list[Tensor]:
    weights = [layer.weight for layer in layers if layer.weight.requires_grad]
    return list(torch.autograd.grad(out.square().sum(), [x, *weights], allow_unused=True))


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[SavedStorage]:
    """All that are made."""
    made: list[SavedStorage] = []

    class Listed(SavedStorage):
        def __init__(self, saved: Tensor):
            super().__init__(saved)
            made.append(self)

    monkeypatch.setattr(activations, "SavedStorage", Listed)
    return made


def through_views(x: Tensor, w: Tensor) -> Tensor:
    """Views of one memory, of all kinds, are saved."""
    made = torch.cat([x @ w, x * 2], dim=-1)
    one, other = made.split(8, dim=-1)
    wide = made[:, :1].expand(-1, 8)
    return ((one * other).t().contiguous().t() * wide + made[1:3].sum(0)[:8] * made.t()[0].unsqueeze(1)).tanh()


COMPUTE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda x, w: x @ w,
    "transposed": lambda x, w: torch.nn.functional.linear(x, w).tanh(),
    "views": through_views,
    "output": lambda x, w: torch.softmax(x @ w, -1),
    "other dtype": lambda x, w: (x.double() @ w.double()).float() * (x > 0),
    "in place before it is saved": lambda x, w: (x @ w).mul_(2).sigmoid(),
    "recomputed": lambda x, w: recomputed(x, w),
    "detached weight": lambda x, w: (x * w.detach()[0]).tanh() @ w,
    "complex": lambda x, w: torch.view_as_complex((x @ w).reshape(-1, 4, 2)).abs().repeat(1, 2),
}


def recomputed(x: Tensor, w: Tensor) -> Tensor:
    made = recompute(lambda x: x.exp().sin(), x)
    with not_saving(made):
        return (made.view(-1)[: made.numel()].view_as(made) @ w).cos()


@pytest.mark.parametrize("compute", COMPUTE.values(), ids=COMPUTE)
@pytest.mark.parametrize("layers", [1, 2, 5])
def test_nothing_changes(compute: Callable[[Tensor, Tensor], Tensor], layers: int) -> None:
    torch.manual_seed(0)
    offload = offload_of()
    chain = [Step(compute) for _ in range(layers)]
    for _ in range(3):
        x = torch.randn(5, 8, requires_grad=True)
        start = x * 1  # no leaf
        found = gradients(chain, forward(chain, start, offload), x)
        expected = gradients(chain, forward(chain, x * 1, None), x)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert blocks_in_use(offload.pool) == 0


@pytest.mark.parametrize("layers, moved", [(0, 0), (1, 1), (2, 1), (28, 27)])
def test_all_layers_move_but_the_last(layers: int, moved: int) -> None:
    assert offloaded_layers(layers) == moved


def test_a_memory_is_copied_once_whatever_lies_in_it(copies: list[SavedStorage]) -> None:
    chain = [Step(through_views), Step(lambda x, w: x @ w)]
    out = forward(chain, torch.randn(5, 8, requires_grad=True) * 1, offload_of())
    made = 5 * 16 * 4
    assert sorted(copy.size for copy in copies).count(made) == 1
    out.sum().backward()


def test_what_the_next_layer_saves_too_is_copied_once(copies: list[SavedStorage]) -> None:
    """The second layer saves what the first has saved, while that is on its way."""
    chain = [Step(lambda x, w: x.exp()), Step(lambda x, w: x * x), Step(lambda x, w: x @ w)]
    x = torch.randn(4, 8, requires_grad=True)
    found = gradients(chain, forward(chain, x * 1, offload_of()), x)
    assert [copy.size for copy in copies] == [4 * 8 * 4]
    expected = gradients(chain, forward(chain, x * 1, None), x)
    assert torch.equal(found[0], expected[0])


def test_layers_leave_one_behind_the_other_and_come_back_one_ahead(copies: list[SavedStorage]) -> None:
    where: list[list[bool]] = []

    def look(x: Tensor, w: Tensor) -> Tensor:
        where.append([copy.device is not None for copy in copies])
        return _Watched.apply(x, lambda: where.append([copy.device is not None for copy in copies]))

    chain = [Step(look) for _ in range(4)]
    out = forward(chain, torch.randn(4, 8, requires_grad=True) * 1, offload_of())
    # Layer 2 computes while layer 1 is copied, and layer 0 is away.
    assert where == [[], [True], [False, True], [False, False, True]]
    assert [copy.device is not None for copy in copies] == [False] * 3
    where.clear()
    out.sum().backward()
    # While the last layer goes back the third is fetched; with each its memory on the device ends.
    assert where == [[False, False, True], [False, True, True], [True, True, True], [True, True, True]]


class _Watched(torch.autograd.Function):
    """Keeps its input; calls `look` in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, look: Callable[[], None]) -> Tensor:
        ctx.look = look
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        assert x.shape == grads[0].shape
        ctx.look()
        return grads[0], None


def test_what_would_free_nothing_or_is_small_stays(copies: list[SavedStorage]) -> None:
    table, x = torch.randn(64, 8), torch.randn(64, 8, requires_grad=True)

    def compute(y: Tensor, w: Tensor) -> Tensor:
        small = y[:1] * w.view(-1)[:8]  # a view of a weight
        return (y[1:].sum() * y * table + small.sigmoid()) @ w.t()

    chain = [Step(compute) for _ in range(3)]
    out = forward(chain, x, offload_of(least=64 * 8 * 4), apart=(table,))
    # What the products take, and the input of the second layer: that of the first is held, the last layer stays.
    assert [copy.size for copy in copies] == [64 * 8 * 4] * 3
    found = gradients(chain, out, x)
    expected = gradients(chain, forward(chain, x, None), x)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_micro_batches_in_flight_have_their_own(order: tuple[int, ...]) -> None:
    offload = offload_of()
    chain = [Step(COMPUTE["views"]) for _ in range(3)]
    inputs = [torch.randn(size, 8, requires_grad=True) for size in (5, 7)]
    outs = [forward(chain, x * 1, offload) for x in inputs]
    in_use = blocks_in_use(offload.pool)
    for i in order:
        found = gradients(chain, outs[i], inputs[i])
        expected = gradients(chain, forward(chain, inputs[i] * 1, None), inputs[i])
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert in_use > 0 == blocks_in_use(offload.pool)


def test_host_memory_is_used_again() -> None:
    offload = offload_of()
    chain = [Step(COMPUTE["views"]) for _ in range(3)]
    sizes = []
    for rows in (6, 3, 5, 6):
        x = torch.randn(rows, 8, requires_grad=True)
        gradients(chain, forward(chain, x * 1, offload), x)
        sizes.append(offload.pool.nbytes)
    assert len(set(sizes)) == 1 and blocks_in_use(offload.pool) == 0


def test_in_evaluation_nothing_is_saved() -> None:
    offload = offload_of()
    with torch.no_grad():
        forward([Step(COMPUTE["views"]) for _ in range(3)], torch.randn(5, 8), offload)
    assert offload.pool.allocated == 0


def test_a_graph_that_is_dropped_returns_its_host_memory() -> None:
    offload = offload_of()
    chain = [Step(COMPUTE["output"]) for _ in range(3)]
    out = forward(chain, torch.randn(5, 8, requires_grad=True) * 1, offload)
    assert blocks_in_use(offload.pool) > 0
    gc.disable()
    try:
        del out
        assert blocks_in_use(offload.pool) == 0  # without a look for cycles
    finally:
        gc.enable()


def test_an_error_in_the_forward_pass_leaves_nothing_behind() -> None:
    offload = offload_of()

    def fail(x: Tensor, w: Tensor) -> Tensor:
        raise ValueError("no")

    hooks = Hooks.current()
    chain = [Step(COMPUTE["output"]), Step(COMPUTE["output"]), Step(fail), Step(COMPUTE["output"])]
    x = torch.randn(5, 8, requires_grad=True)
    with pytest.raises(ValueError, match="no"):
        forward(chain, x * 1, offload)
    gc.collect()
    assert blocks_in_use(offload.pool) == 0 and not any(layer._forward_pre_hooks for layer in chain)
    assert Hooks.current() == hooks
    chain[2].compute = COMPUTE["output"]
    assert torch.equal(gradients(chain, forward(chain, x * 1, offload), x)[0],
                       gradients(chain, forward(chain, x * 1, None), x)[0])  # fmt: skip


@pytest.mark.parametrize("layers", [1, 2], ids=["that moves", "that stays"])
def test_a_tensor_that_is_overwritten_is_refused(layers: int) -> None:
    """As autograd does; in a layer that moves, and in the last, which stays."""

    def overwrite(x: Tensor, w: Tensor) -> Tensor:
        made = x @ w
        out = made.exp() + made.square()
        made.add_(1)
        return out

    chain = [*(Step(COMPUTE["product"]) for _ in range(layers - 1)), Step(overwrite)]
    out = forward(chain, torch.randn(5, 8, requires_grad=True) * 1, offload_of())
    with pytest.raises(RuntimeError, match=r"tensor of shape \[5, 8\] .*in place"):
        out.sum().backward()


def test_a_memory_that_changes_between_two_operations_is_copied_twice(copies: list[SavedStorage]) -> None:
    """The first of its states is not asked for again."""

    def compute(x: Tensor, w: Tensor) -> Tensor:
        made = (x @ w).detach()
        ahead = x * made
        del ahead
        made = made.mul_(3)
        return x * made

    chain = [Step(compute), Step(COMPUTE["product"])]
    x = torch.randn(5, 8, requires_grad=True)
    found = gradients(chain, forward(chain, x * 1, offload_of()), x)
    assert torch.equal(found[0], gradients(chain, forward(chain, x * 1, None), x)[0])
    assert len({copy.version for copy in copies}) == 2


def test_outer_hooks_get_what_stays() -> None:
    packed: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        packed.append(x)
        return x

    chain, x = [Step(COMPUTE["product"]), Step(COMPUTE["recomputed"])], torch.randn(5, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = forward(chain, x * 1, offload_of())
    weights = {layer.weight.data_ptr() for layer in chain}
    kept = [t for t in packed if t.data_ptr() not in weights]
    assert len(kept) == 2  # of the layer that stays: what is recomputed from, and what cos takes
    assert torch.equal(gradients(chain, out, x)[0], gradients(chain, forward(chain, x * 1, None), x)[0])


# ----------------------------------------------------------------------------------------------------- streams


class _Late:
    """A stream as slow as can be: what it is asked for is done when the computing stream waits for it."""

    def __init__(self) -> None:
        self.asked: list[Callable[[], None]] = []

    @contextlib.contextmanager
    def after_compute(self) -> Iterator[None]:
        yield

    def join(self) -> None:
        while self.asked:
            self.asked.pop(0)()


@pytest.mark.parametrize("compute", [COMPUTE["views"], COMPUTE["recomputed"]], ids=["views", "recomputed"])
def test_computation_waits_for_the_copies_that_it_needs(
    compute: Callable[[Tensor, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies as late as streams allow, of memory that holds nonsense until then, and after it has been let go."""
    offload = offload_of()
    out, back = _Late(), _Late()
    offload.out, offload.back = out, back  # pyright: ignore[reportAttributeAccessIssue]

    def copy_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
        for to, other in pairs:
            to.copy_(other)

    class LateCopy(SavedStorage):
        def send(self, room: HostRoom) -> None:
            device = self.device
            assert device is not None
            self.host = room.place(self.size)
            self.parts = list(zip(self.host, self._split(device), strict=True))
            out.asked.append(lambda: copy_all(self.parts))

        def leave(self) -> None:
            self.parts = []
            super().leave()

        def bring(self, device: Tensor) -> None:
            parts, self.host = list(zip(self._split(device), self.host, strict=True)), []
            back.asked.append(lambda: copy_all(parts))
            self.device = device.fill_(255)

    monkeypatch.setattr(activations, "SavedStorage", LateCopy)
    chain = [Step(compute) for _ in range(4)]
    for _ in range(2):
        inputs = [torch.randn(5, 8, requires_grad=True) for _ in range(3)]
        outs = [forward(chain, x * 1, offload) for x in inputs]
        for x, end in zip(inputs, outs, strict=True):
            found = gradients(chain, end, x)
            expected = gradients(chain, forward(chain, x * 1, None), x)
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert not out.asked and not back.asked


# ------------------------------------------------------------------------------------------------- host memory


def test_room_goes_on_from_block_to_block() -> None:
    pool = HostPool(PLATFORM, 10)
    room = HostRoom(pool)
    pieces = [[len(piece) for piece in room.place(size)] for size in (4, 13, 0, 3, 1)]
    assert pieces == [[4], [6, 7], [], [3], [1]] and blocks_in_use(pool) == 3
    room.free()
    assert blocks_in_use(pool) == 0 and pool.nbytes == 30
    other = HostRoom(pool)
    other.place(25)
    assert pool.allocated == 3
    del other
    assert blocks_in_use(pool) == 0


@pytest.mark.parametrize("gpu", [False, True])
def test_sizes(gpu: bool) -> None:
    sizes = OffloadSizes.of(gpu)
    assert [sizes.on_host(size) for size in (0, 1, sizes.block, sizes.block + 1)] == [
        0, sizes.block, sizes.block, 2 * sizes.block,
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------- whole steps

STEPS = [
    ("qwen2_5_vl", "sp:2", "tp:2", 2, "--schedule.waves 2"),
    ("qwen3_vl", "dp:2", "pp:2", 2, "--schedule.virtual_stages 2"),
    ("qwen3_vl", "tp:2", "tp:2", 2, "--text-sequence_parallel false --model.freeze text"),
    ("qwen2_5_vl", "cp:2", "cp:2", 2, "--schedule.kind recompute"),
    ("qwen2_5_vl", "dp:1@0", "pp:2@1-2", 3, "--text-layers 3 1 --schedule.run_ahead 2"),
]
RULES = [
    *(f"--vision-recompute {how} --text-recompute {how}" for how in ("none", "selective", "full", "1")),
    "--vision-chunk 8 --text-chunk 8 --text-recompute selective",
]
ROWS = [(*step, rule) for rule, step in itertools.product(RULES, STEPS)]
OFFLOADED = "--vision-offload.activations true --text-offload.activations true"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write_model(tmp_path_factory.mktemp(name) / "model", choice) for name, choice in CHOICES.items()}


@pytest.mark.parametrize("family, vision, text, ranks, more, rule", thinned(ROWS, 11))
@on_ranks("ranks")
def test_steps_are_the_same_bit_by_bit(
    family: str,
    vision: str,
    text: str,
    ranks: int,
    more: str,
    rule: str,
    models: dict[str, Path],
) -> None:
    flags = flags_of(models[family], vision, text, f"{more} {rule}")
    wanted, other = train(flags, 2)
    metrics, weights = train([*flags, *OFFLOADED.split()], 2)
    assert metrics == wanted
    assert weights.keys() == other.keys()
    assert all(torch.equal(weight, other[name]) for name, weight in weights.items())
