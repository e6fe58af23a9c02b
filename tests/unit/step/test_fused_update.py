"""The update in one pass is that in steps: to rounding where PyTorch's kernel computes it, and to the bit where only
what masters are kept in differs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.adamw import adamw

from megatron_hetero.step.fused import SEGMENTS, CallRates, SegmentRates, ends_on, numbers_of, update_
from megatron_hetero.step.number_formats import FlatTensors, Master, Noise, Plain

CPU = torch.device("cpu")
BETAS, EPS, LR, DECAY = (0.9, 0.99), 1e-8, 0.01, 0.1
MASTERS = ("weights", "fp32", "split", "none")


def master_of(kind: str, values: Tensor) -> Master:
    if kind == "weights":
        return Master(FlatTensors((values.clone(),)))
    weights = FlatTensors((torch.zeros(len(values), dtype=torch.bfloat16),))
    dtypes = {"fp32": torch.float32, "split": torch.int16}
    master = Master(weights, torch.zeros(len(values), dtype=dtypes[kind]) if kind in dtypes else None)
    master.write(0, values)
    return master


class Kept:
    """Masters and moments of one parameter, updated in steps or in one pass."""

    def __init__(self, master: str, dtype: torch.dtype, values: Tensor):
        self.master = master_of(master, values)
        self.moments = [Plain(torch.zeros(len(values), dtype=dtype), CPU) for _ in BETAS]

    def in_steps(self, gradients: Tensor, count: int, noise: Noise, decay: float) -> None:
        numbers = [each.read(0, len(gradients)) for each in (self.master, *self.moments)]
        master, first, second = numbers
        adamw(
            [master], [gradients.float()], [first], [second], [], [torch.tensor(count - 1.0)], fused=True,
            amsgrad=False, beta1=BETAS[0], beta2=BETAS[1], lr=LR, weight_decay=decay, eps=EPS, maximize=False,
        )  # fmt: skip
        for number, moment in enumerate(self.moments):
            moment.write(0, numbers[1 + number], replace(noise, number=number))
        self.master.write(0, numbers[0], replace(noise, number=2))

    def at_once(
        self, gradients: Tensor, call: CallRates, ends: tuple[int, ...], function: Any = update_, scale: float = 1.0
    ) -> None:
        weights = self.master
        bits = [moment.values.view(torch.int16) if moment.values.dtype == torch.bfloat16 else moment.values
                for moment in self.moments]  # fmt: skip
        [flat] = weights.weights.tensors
        flat = flat.view(torch.int16) if flat.dtype == torch.bfloat16 else flat
        [numbers] = numbers_of([call], CPU)
        at_ends, factor = ends_on(CPU, ends), torch.tensor(scale)
        function(flat, self.master.beside, gradients, tuple(bits), numbers, at_ends, factor)

    def stored(self) -> list[Tensor]:
        beside = [] if self.master.beside is None else [self.master.beside]
        return [*self.master.weights.tensors, *beside, *(moment.values for moment in self.moments)]

    def read(self) -> list[Tensor]:
        return [each.read(0, self.moments[0].values.numel()) for each in (self.master, *self.moments)]


def drawn(size: int, steps: int) -> tuple[Tensor, list[Tensor]]:
    random = torch.Generator().manual_seed(size)
    return torch.randn(size, generator=random), [torch.randn(size, generator=random) for _ in range(steps)]


def rates(count: int, decay: float = DECAY, lr: float = LR) -> SegmentRates:
    first, second = (1 - beta**count for beta in BETAS)
    return SegmentRates(lr / first, second**-0.5, 1 - lr * decay)


def call(count: int, *segments: SegmentRates) -> CallRates:
    noise = Noise.of(f"{count}", 7)
    return CallRates(1 - BETAS[0], 1 - BETAS[1], EPS, noise, segments or (rates(count),))


@pytest.mark.parametrize("gradients", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("master", MASTERS)
def test_one_pass_updates_as_steps_do(master: str, moments: torch.dtype, gradients: torch.dtype) -> None:
    """Rounded with the same noise; what rounding of fp32 carries over a unit of bfloat16 is rare."""
    values, drawn_gradients = drawn(3001, 5)
    steps, once = Kept(master, moments, values), Kept(master, moments, values)
    for count, each in enumerate(drawn_gradients, 1):
        given = each.to(gradients)
        steps.in_steps(given.float() * 0.5, count, call(count).noise, DECAY)
        once.at_once(given, call(count), (3001,), scale=0.5)
    rounds = (master == "none", moments == torch.bfloat16, moments == torch.bfloat16)
    for found, expected, rounded in zip(once.read(), steps.read(), rounds, strict=True):
        far = ~torch.isclose(found, expected, rtol=1e-5, atol=1e-6)
        assert far.sum() <= (30 if rounded or True in rounds else 0)
        torch.testing.assert_close(found, expected, rtol=2**-6 if True in rounds else 1e-5, atol=LR)


def test_masters_are_the_same_whatever_they_are_kept_in() -> None:
    values, gradients = drawn(999, 20)
    kept = [Kept(master, torch.bfloat16, values.bfloat16().float()) for master in ("weights", "fp32", "split")]
    for count, each in enumerate(gradients, 1):
        for of in kept:
            of.at_once(each, call(count), (999,))
    for other in kept[1:]:
        assert all(torch.equal(one, two) for one, two in zip(kept[0].read(), other.read(), strict=True))
    [of_fp32, of_split] = [of.master.weights.tensors[0] for of in kept[1:]]  # pyright: ignore[reportAttributeAccessIssue]
    assert torch.equal(of_fp32, of_split)


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("master", MASTERS)
def test_a_scale_of_nan_changes_nothing(master: str, moments: torch.dtype) -> None:
    """Neither at the start, nor after updates, whose numbers were rounded; with gradients that are not finite."""
    values, gradients = drawn(3001, 6)
    kept = Kept(master, moments, values)
    for count, each in enumerate(gradients, 1):
        before = [stored.clone() for stored in kept.stored()]
        broken = torch.where(each > 1, torch.nan, torch.where(each < -1, torch.inf, each))
        kept.at_once(broken, call(count), (3001,), scale=torch.nan)
        assert all(torch.equal(one, two) for one, two in zip(kept.stored(), before, strict=True))
        kept.at_once(each, call(count), (3001,))
        assert not any(torch.equal(one, two) for one, two in zip(kept.stored(), before, strict=True))
    weights, [numbers] = values.clone(), numbers_of([call(1, SegmentRates(0.5))], CPU)
    update_(weights, None, gradients[0], None, numbers, None, torch.tensor(torch.nan))
    assert torch.equal(weights, values), "without moments"


@pytest.mark.parametrize("count", [2, 3, SEGMENTS])
def test_each_segment_has_its_rates(count: int) -> None:
    values, [gradients] = drawn(1000, 1)
    ends = tuple(1000 * (i + 1) ** 2 // count**2 for i in range(count))
    of = tuple(rates(1, decay=0.1 * (i % 2), lr=0.01 * i) for i in range(count))
    together = Kept("split", torch.bfloat16, values)
    together.at_once(gradients, call(1, *of), ends)
    for i, (begin, end) in enumerate(zip((0, *ends), ends, strict=False)):
        alone = Kept("split", torch.bfloat16, values)
        alone.at_once(gradients, call(1, of[i]), (1000,))
        for found, expected in zip(together.read(), alone.read(), strict=True):
            assert torch.equal(found[begin:end], expected[begin:end])


def test_plain_gradient_descent_has_no_moments() -> None:
    values, [gradients] = drawn(100, 1)
    weights, [numbers] = values.clone(), numbers_of([call(1, SegmentRates(0.5))], CPU)
    update_(weights, None, gradients, None, numbers, None, torch.tensor(0.25))
    torch.testing.assert_close(weights, values - 0.125 * gradients)


def test_noise_is_that_of_places() -> None:
    """However many elements are drawn at a time, beyond what int32 counts too; and other draws are other."""
    noise = Noise.of("a text")
    whole = replace(noise, start=2**33 + 5).bits(5000, CPU)
    assert torch.equal(replace(noise, start=2**33 + 1005).bits(4000, CPU), whole[1000:])
    draws = [replace(noise, number=n).bits(100_000, CPU).double() for n in range(3)]
    draws += [Noise.of("another").bits(100_000, CPU).double()]
    for draw in draws:
        assert draw.min() >= 0 and draw.max() < 2**16
        assert abs(draw.mean() / 2**16 - 0.5) < 0.005 and abs(draw.std() / 2**16 - 12**-0.5) < 0.005
        assert abs(torch.corrcoef(torch.stack((draw[1:], draw[:-1])))[0, 1]) < 0.02
    assert (torch.corrcoef(torch.stack(draws)) - torch.eye(len(draws))).abs().max() < 0.02


@pytest.mark.long
@pytest.mark.parametrize("segments", [1, 5])
def test_compiled_it_is_one_kernel_for_any_size(segments: int) -> None:
    """By the compiler's back end for CPUs, which joins loops as that for GPUs does. Masters are then the same in fp32
    and split, too.
    """
    from torch._dynamo.utils import counters
    from torch._inductor import metrics

    torch._dynamo.reset()
    compiled: Any = torch.compile(update_, dynamic=True)
    for turn, (size, master) in enumerate([(1000, "split"), (1000, "fp32"), (777, "split"), (50_001, "fp32")]):
        metrics.reset()
        counters.clear()
        values, gradients = drawn(size, 20)
        kept = [Kept(master, torch.bfloat16, values) for _ in range(2)]
        kept += [Kept("split", torch.bfloat16, values)]
        for count, each in enumerate(gradients, 1):
            of = call(count, *(rates(count, decay=0.1 * i) for i in range(segments)))
            ends = tuple(size * (i + 1) // segments for i in range(segments))
            kept[0].at_once(each, of, ends, compiled)
            kept[2].at_once(each, of, ends, compiled)
            if count == 1:
                kept[1].at_once(each, of, ends)
                for found, expected in zip(kept[0].read(), kept[1].read(), strict=True):
                    torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-6)
        assert all(torch.equal(one, two) for one, two in zip(kept[0].read(), kept[2].read(), strict=True))
        assert metrics.generated_kernel_count == (turn < 2)
        assert counters["stats"]["unique_graphs"] == (turn < 2)
