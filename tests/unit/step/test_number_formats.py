"""Fp32 numbers in fewer bits: exact where they say so, else right on average, and to a bound."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_hetero.groups.platform import Platform
from megatron_hetero.step.number_formats import (
    BLOCK,
    Blocks8,
    FlatTensors,
    Master,
    Noise,
    Plain,
    Stored,
    joined,
    levels,
    rounded,
    upper_half,
)

CPU = torch.device("cpu")
NOISE = Noise.of("a test")
PLATFORMS = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
FINITE = st.integers(0, 2**32 - 1).filter(lambda bits: bits >> 23 & 0xFF != 0xFF)


@pytest.fixture
def platform(request: pytest.FixtureRequest) -> Platform:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return Platform(CPU, "gloo") if request.param == "cpu" else Platform(torch.device("cuda", 0), "nccl")


def floats(bits: list[int]) -> Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def drawn(size: int, seed: int = 0) -> Tensor:
    """Of many magnitudes, some of them halfway between two numbers of bfloat16."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(size, generator=random) * torch.logspace(-20, 20, size)
    values.view(torch.int32)[::7].bitwise_and_(-(1 << 16)).bitwise_or_(1 << 15)
    return values


@given(st.lists(FINITE, min_size=1, max_size=50))
def test_weight_and_remainder_are_the_master_bit_for_bit(bits: list[int]) -> None:
    values = floats(bits)
    weights, lower = upper_half(rounded(values)).clone(), values.view(torch.int16)[::2].clone()
    assert torch.equal(joined(weights, lower).view(torch.int32), values.view(torch.int32))


@given(st.lists(FINITE, min_size=1, max_size=50))
def test_weights_are_the_nearest(bits: list[int]) -> None:
    values = floats(bits).double()
    weights = upper_half(rounded(values.float())).double()
    finite = weights.isfinite()  # The largest round to infinity.
    nearest = values.float().bfloat16().double()
    assert torch.equal((weights - values).abs()[finite], (nearest - values).abs()[finite])


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0x7FC00000, 0xFFC00000, 0x7F800000, 0xFF800000])
def test_nan_and_infinity_stay_what_they_are(bits: int) -> None:
    """NaN as GPUs and CPUs make it."""
    values = floats([bits] * BLOCK)
    for stored in (*masters(BLOCK), stored_in("weights", BLOCK), stored_in("bfloat16", BLOCK)):
        for noise in (None, NOISE):
            stored.write(0, values, noise)
            assert torch.equal(stored.read(0, BLOCK).isnan(), values.isnan())
    for master in masters(BLOCK):
        master.write(0, values)
        weights = master.weights.read(0, BLOCK).float()
        assert torch.equal(weights.isnan(), values.isnan())
        assert values.isnan().all() or torch.equal(weights, values)


def spread(*tensors: Tensor) -> FlatTensors:
    return FlatTensors(tensors)


def masters(size: int) -> list[Master]:
    weights = [spread(torch.zeros(size, dtype=torch.bfloat16)) for _ in range(2)]
    return [Master(weights[0], torch.zeros(size)), Master(weights[1], torch.zeros(size, dtype=torch.int16))]


def test_split_and_fp32_masters_have_the_same_weights_and_values() -> None:
    values = drawn(1000)
    whole, split = masters(1000)
    for master in (whole, split):
        for start in (0, 300):
            master.write(start, values[start : start + 700])
    [of_whole, of_split] = [each.weights.read(0, 1000) for each in (whole, split)]
    assert torch.equal(of_whole, of_split)
    for span in ((0, 1000), (3, 4), (299, 777)):
        assert torch.equal(whole.read(*span), values[slice(*span)])
        assert torch.equal(split.read(*span), values[slice(*span)])


@pytest.mark.parametrize("platform", PLATFORMS, indirect=True)
def test_states_in_host_memory_are_those_of_the_device(platform: Platform) -> None:
    """Each in its own stream, as updates read and write them."""
    size, device = 3000, platform.device
    values = drawn(size).clamp(-1e15, 1e15).to(device)
    pairs = [
        (Master(spread(values.new_zeros(size, dtype=torch.bfloat16)), zeros(size, torch.int16)),
         Plain(zeros(size, torch.bfloat16), device),
         Blocks8(zeros(size, torch.uint8), zeros(-(-size // BLOCK), torch.float32), device, False, (size,)))
        for zeros in (platform.host_zeros, lambda count, dtype: torch.zeros(count, dtype=dtype, device=device))
    ]  # fmt: skip
    for host, here in zip(*pairs, strict=True):
        for stored in (host, here):
            for start in (0, 1024):
                stored.write(start, values[start : start + 1024], replace(NOISE, start=start))
        assert torch.equal(host.read(0, size), here.read(0, size))
    platform.synchronize()


def stored_in(kind: str, size: int) -> Stored:
    if kind == "weights":
        return Master(spread(torch.zeros(size, dtype=torch.bfloat16)))
    if kind == "bfloat16":
        return Plain(torch.zeros(size, dtype=torch.bfloat16), CPU)
    blocks = torch.zeros(-(-size // BLOCK))
    return Blocks8(torch.zeros(size, dtype=torch.uint8), blocks, CPU, kind == "squares", (size,))


@pytest.mark.parametrize("kind", ["weights", "bfloat16", "8bit", "squares"])
def test_what_is_rounded_is_right_on_average(kind: str) -> None:
    values = torch.rand(2 * BLOCK + 9, generator=torch.Generator().manual_seed(0)) + 0.1
    stored, total = stored_in(kind, len(values)), torch.zeros(len(values))
    for step in range(1000):
        stored.write(0, values, Noise.of(f"{step}"))
        total += stored.read(0, len(values))
    largest = 2**-8 if kind in ("weights", "bfloat16") else 0.08
    worst = ((total / 1000 - values) / values).abs().max().item()
    assert worst < largest / 5, "a single rounding is off by up to `largest`"
    stored.write(0, values)
    assert ((stored.read(0, len(values)) - values) / values).abs().max() < largest


@pytest.mark.parametrize("kind", ["weights", "bfloat16", "8bit", "squares"])
def test_what_was_kept_is_kept_again_as_it_is(kind: str) -> None:
    values = drawn(1000).clamp(-1e15, 1e15)
    stored, other = stored_in(kind, 1000), stored_in(kind, 1000)
    stored.write(0, values.abs() if kind == "squares" else values, NOISE)
    other.write(0, stored.read(0, 1000))
    assert torch.equal(other.read(0, 1000), stored.read(0, 1000))
    for each, again in zip(vars(stored).values(), vars(other).values(), strict=True):
        assert not isinstance(each, Tensor) or torch.equal(each, again)
    assert torch.equal(stored.read(300, 777), stored.read(0, 1000)[300:777])


def test_a_second_moment_that_is_not_zero_stays_so() -> None:
    """It is what updates are divided by."""
    values = torch.full((BLOCK,), 1e-30)
    values[0], values[1] = 1.0, 0.0
    stored = stored_in("squares", BLOCK)
    stored.write(0, values, NOISE)
    read = stored.read(0, BLOCK)
    assert read[0] == 1.0 and read[1] == 0.0 and (read[2:] > 0).all()


@pytest.mark.parametrize("signed", [True, False])
def test_levels_ascend_to_one(signed: bool) -> None:
    found = levels(signed, CPU)
    assert len(found) <= 256 and (found.diff() > 0).all() and found[-1] == 1.0
    assert found[0] == (-1.0 if signed else 0.0) and (found == 0).sum() == 1
    assert torch.equal(found, -found.flip(0)) or not signed


SIZES = st.lists(st.integers(1, 2 * BLOCK + 3), min_size=1, max_size=6)


@given(SIZES, st.data())
def test_numbers_in_several_tensors_are_one_after_the_other(sizes: list[int], data: st.DataObject) -> None:
    """Whichever of the tensors are neighbours in memory."""
    apart = data.draw(st.lists(st.integers(0, 1), min_size=len(sizes), max_size=len(sizes)))
    memory, tensors, begin = torch.zeros(sum(sizes) + len(sizes)), list[Tensor](), 0
    for size, gap in zip(sizes, apart, strict=True):
        begin += gap
        tensors.append(memory[begin : begin + size])
        begin += size
    numbers = FlatTensors.of(tensors)
    assert len(numbers.tensors) == 1 + sum(apart[1:])
    start = data.draw(st.integers(0, sum(sizes) - 1))
    stop = data.draw(st.integers(start + 1, sum(sizes)))
    expected = torch.zeros(sum(sizes))
    expected[start:stop] = torch.arange(1.0, stop - start + 1)
    numbers.write(start, expected[start:stop])
    assert torch.equal(torch.cat(tensors), expected)
    assert torch.equal(numbers.read(start, stop), expected[start:stop])
    assert torch.equal(numbers.slice(start, stop).read(0, stop - start), expected[start:stop])
    assert memory.count_nonzero() == stop - start, "nothing is written between them"


@given(SIZES, st.booleans(), st.data())
def test_blocks_of_several_parameters_are_those_of_each(sizes: list[int], squares: bool, data: st.DataObject) -> None:
    total, ends = sum(sizes), torch.tensor(sizes).cumsum(0).tolist()
    values = torch.randn(total, generator=torch.Generator().manual_seed(total))
    values = values.abs() if squares else values
    blocks = sum(-(-size // BLOCK) for size in sizes)
    together = Blocks8(torch.zeros(total, dtype=torch.uint8), torch.zeros(blocks), CPU, squares, tuple(sizes))
    # Cut where a batch may end: behind a block, or behind a parameter.
    edges = [end - size + at for end, size in zip(ends, sizes, strict=True) for at in (*range(0, size, BLOCK), size)]
    middle = data.draw(st.sampled_from(sorted(set(edges))))
    for start, stop in ((0, middle), (middle, total)):
        if start < stop:
            together.write(start, values[start:stop])
    expected = []
    for size, own in zip(sizes, values.split(sizes), strict=True):
        alone = Blocks8(torch.zeros(size, dtype=torch.uint8), torch.zeros(-(-size // BLOCK)), CPU, squares, (size,))
        alone.write(0, own)
        expected.append(alone.read(0, size))
    assert torch.equal(together.read(0, total), torch.cat(expected))
    start = data.draw(st.integers(0, total - 1))
    assert torch.equal(together.read(start, total), torch.cat(expected)[start:])
    for end, own in zip(ends, expected, strict=True):
        assert torch.equal(together.slice(end - len(own), end).read(0, len(own)), own)
