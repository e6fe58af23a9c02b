"""The event model of a host that issues kernels, by which CUDA graphs do not pay in waves."""

from __future__ import annotations

import pytest

from benchmarks.roofline import graphs
from benchmarks.roofline.graphs import (
    BUCKETS,
    ENCODER,
    KERNEL,
    MICRO_BATCHES,
    SHARES,
    SPENT,
    Pass,
    exposed,
    page,
    wasted,
)


@pytest.mark.parametrize(
    "passes, waits",
    [
        ([Pass(10, 20.0, 1.0)], 1.0),  # two a kernel: only the first waits
        ([Pass(10, 5.0, 1.0)], 1.0 + 9 * 0.5),  # each of the others waits for half its launch
        ([Pass(10, 30.0, 1.0), Pass(10, 1.0, 1.0)], 1.0),  # the host is 20 ahead, and falls back by 9
        ([Pass(10, 20.0, 1.0), Pass(30, 3.0, 1.0)], 1.0 + 40 + 0.1 - 24.0),  # the last launch decides
    ],
)
def test_a_device_waits_for_the_host(passes: list[Pass], waits: float) -> None:
    assert exposed(passes) == pytest.approx(waits)


def test_the_host_is_only_so_far_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for four launches it has four to do when the long pass ends, and loses what it could have gained."""
    passes = [Pass(10, 100.0, 1.0), Pass(20, 2.0, 1.0)]
    assert exposed(passes) == pytest.approx(1.0)
    monkeypatch.setattr(graphs, "AHEAD", 4)
    assert exposed(passes) > 10


def test_more_buckets_waste_less() -> None:
    found = [wasted(buckets) for buckets in BUCKETS]
    assert found == sorted(found, reverse=True)
    assert found[0] == pytest.approx(0.195, abs=1e-3)


@pytest.mark.parametrize("share", [share for share, _ in SHARES])
@pytest.mark.parametrize("kernel", KERNEL.values())
def test_graphs_do_not_pay_in_waves_of_four(share: graphs.Share, kernel: float) -> None:
    def micro_batch(waves: int, modules: tuple[str, ...] = ()) -> float:
        return exposed(share.step(SPENT * kernel, MICRO_BATCHES, waves, modules)) / MICRO_BATCHES

    saved = micro_batch(4) - micro_batch(4, ENCODER)
    assert saved < share.padding(ENCODER, BUCKETS[0])
    assert saved - share.padding(ENCODER, BUCKETS[-1]) < 0.004 * sum(map(sum, share.device.values()))
    assert micro_batch(4) < 0.2 * micro_batch(1)


def test_results_are_those_of_the_model() -> None:
    assert (graphs.RESULTS / "graphs.md").read_text(encoding="utf-8") == page() + "\n"
