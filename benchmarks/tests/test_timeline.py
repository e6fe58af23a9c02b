"""How kernels and collectives share the multiprocessors of a GPU, on the roofline's timeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.roofline.costs import Ask
from benchmarks.roofline.devices import ASSUMED, HELD, SLOWEST
from benchmarks.roofline.timeline import Sharing, Timeline

FREE = Sharing(processors=100)
LAST = replace(FREE, whole=True)
FIRST = replace(LAST, product_first=True)
CARVED = replace(FIRST, carved=True)
EVERY = (FREE, LAST, FIRST, CARVED)
"""Products share multiprocessors; hold them, and land after collectives, or before; or leave collectives theirs."""


@pytest.mark.parametrize(
    "sharing, product, both",
    [
        (FREE, 3.5, 3.5),  # 2 beside the collective at three quarters of the speed, then the rest
        (LAST, 5.0, 5.0),  # a second wave begins when the collective ends
        (FIRST, 3.0, 5.0),  # the collective begins when the product ends
        (CARVED, 4.0, 4.0),  # the product has three quarters of the device all the time
    ],
)
def test_a_product_beside_a_collective(sharing: Sharing, product: float, both: float) -> None:
    gpu = Timeline(sharing=sharing)
    work = gpu.issue(2.0, "once", ctas=25)
    late = gpu.compute(3.0, product=True)
    assert (gpu.now, late) == (product, {"once": product - 3.0} if product > 3 else {})
    gpu.wait(work)
    assert gpu.now == both


def test_a_second_wave_begins_at_the_latest_when_the_first_ends() -> None:
    gpu = Timeline(sharing=LAST)
    gpu.issue(9.0, ctas=25)
    gpu.compute(3.0, product=True)
    assert gpu.now == 6.0


@pytest.mark.parametrize("sharing", EVERY)
def test_what_is_no_product_lets_collectives_in(sharing: Sharing) -> None:
    gpu = Timeline(sharing=sharing)
    work = gpu.issue(2.0, ctas=25)
    gpu.compute(3.0)
    assert (gpu.now, gpu.wait(work)) == (3.5, 0.0)


@pytest.mark.parametrize("sharing", EVERY)
def test_what_needs_no_multiprocessors_begins_beside_products(sharing: Sharing) -> None:
    gpu = Timeline(sharing=sharing)
    work = gpu.issue(2.0)
    gpu.compute(3.0, product=True)
    assert (gpu.now, gpu.wait(work)) == (3.0 if sharing is not CARVED else gpu.now, 0.0)


def test_a_collective_that_waits_for_another_or_since_a_product_lands_before_the_next_product() -> None:
    gpu = Timeline(sharing=FIRST)
    first, second = gpu.issue(1.0, ctas=25), gpu.issue(1.0, ctas=25)
    gpu.wait(first)
    gpu.compute(2.0, product=True)  # from 1 on, as the second, which has multiprocessors until 2
    assert (gpu.now, gpu.wait(second)) == (4.0, 0.0)
    gpu = Timeline(sharing=FIRST)
    work = gpu.issue(1.0, ctas=25)
    gpu.compute(2.0, product=True)
    gpu.compute(2.0, product=True)  # from 2 on, as the collective, until 3
    assert (gpu.now, gpu.wait(work)) == (5.0, 0.0)


def test_with_one_queue_collectives_land_first() -> None:
    gpu = Timeline(queues=1, sharing=FIRST)
    work = gpu.issue(2.0, ctas=25)
    gpu.compute(3.0, product=True)
    assert (gpu.now, gpu.wait(work)) == (5.0, 0.0)


def test_kernels_share_with_each_of_several_collectives() -> None:
    gpu = Timeline(sharing=FREE)
    gpu.issue(2.0, "a", "first", ctas=25)
    gpu.issue(1.0, "b", "second", ctas=25)
    gpu.compute(2.0)  # a half in 1, three quarters in 1, the rest alone
    assert gpu.now == pytest.approx(2.75)


_SECONDS = st.floats(0.01, 5.0)
_COLLECTIVES = st.tuples(st.just("issue"), _SECONDS, st.integers(0, 60))
_KERNELS = st.tuples(st.sampled_from(("product", "kernel")), _SECONDS, st.just(0))
_WAITS = st.tuples(st.just("wait"), st.just(0.0), st.integers(0, 30))
_PROGRAMS = st.lists(st.one_of(_COLLECTIVES, _KERNELS, _WAITS), max_size=30)


def _ended(program: Sequence[tuple[str, float, int]], sharing: Sharing, *, queues: int = 32) -> tuple[float, float]:
    """When a program of one communicator ends, and by how much later than its kernels, by what the timeline reports."""
    gpu, works, late = Timeline(queues, sharing), list[int](), 0.0
    for what, seconds, number in program:
        if what == "issue":
            works.append(gpu.issue(seconds, ctas=number))
        elif what == "wait":
            late += gpu.wait(works[number % len(works)]) if works else 0.0
        else:
            late += sum(gpu.compute(seconds, product=what == "product").values())
    for work in works:
        late += gpu.wait(work)
    return gpu.now, late


@given(_PROGRAMS, st.sampled_from(EVERY), st.sampled_from((1, 32)))
def test_times_are_bounded_and_accounted_for(
    program: list[tuple[str, float, int]], sharing: Sharing, queues: int
) -> None:
    kernels = sum(seconds for what, seconds, _ in program if what in ("product", "kernel"))
    collectives = sum(seconds for what, seconds, _ in program if what == "issue")
    now, late = _ended(program, sharing, queues=queues)
    assert now == pytest.approx(kernels + late)
    assert max(kernels, collectives) <= now + 1e-9
    assert now <= 2.5 * kernels + collectives + 1e-9  # two waves of a product; two fifths of the device for a kernel


@given(_PROGRAMS)
def test_what_collectives_hold_costs_something_or_nothing(program: list[tuple[str, float, int]]) -> None:
    free = [(what, seconds, 0 if what == "issue" else number) for what, seconds, number in program]
    alone, _ = _ended(free, FREE)
    assert all(_ended(program, sharing)[0] >= alone - 1e-9 for sharing in EVERY)


@given(_PROGRAMS)
def test_products_without_collectives_share_nothing(program: list[tuple[str, float, int]]) -> None:
    kernels = [each for each in program if each[0] != "issue"]
    assert len({_ended(kernels, sharing) for sharing in EVERY}) == 1


def test_multiprocessors_of_a_collective() -> None:
    wide, narrow, gather = Ask("wire"), Ask("wire", ctas=4), Ask("wire", copies=True)
    assert [ask.held(ASSUMED[SLOWEST]) for ask in (wide, narrow, gather)] == [HELD, 4, HELD]
    assert [ask.held(ASSUMED["copy engines gather"]) for ask in (wide, narrow, gather)] == [HELD, 4, 0]
    assert [ask.held(ASSUMED["fastest"]) for ask in (wide, narrow)] == [0, 0]
