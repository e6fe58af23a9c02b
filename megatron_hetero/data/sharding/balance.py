"""Assigning pieces of work to replicas so that predicted cost is even. Pure, and for any model.

Words: an *item* is what is assigned whole (a picture); its *cost* is any number that adds up over items, such as flops
(0 or more). Every rank assigns for itself and must come to the same result: ties go to the lower index, and sums are
plain additions in a fixed order, never reductions whose order depends on the machine.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

import numpy as np

MAX_EXCHANGES = 32
"""Most exchanges that one assignment tries. Each costs one pass over the items."""

EVEN_ENOUGH = 1.002
"""Above its lower bound by this factor, a maximum is left alone: predictions are coarser than that."""


def assign(costs: Sequence[float], replicas: int) -> list[list[int]]:
    """The items of each of `replicas`, ascending, such that the largest sum of `costs` is small.

    Items are assigned the largest first, each to the least loaded replica, whose largest load is at most 4/3 - 1/(3
    replicas) of the best possible (Graham 1969, "Bounds on multiprocessing timing anomalies"). Then the most loaded
    replica gives single items away, or exchanges them for smaller ones, for as long as that makes it less loaded and
    nobody as loaded as it was. This never makes the largest load larger, nor the smallest smaller.
    """
    values = np.asarray(costs, dtype=np.float64)
    owner, loads = _largest_first(values.tolist(), replicas)
    _even_out(values, owner, loads)
    return _items_of(owner, replicas)


def assign_in_order(count: int, replicas: int) -> list[list[int]]:
    """The items of each of `replicas`: contiguous blocks of 0 .. `count` - 1, the first ones longer by at most one."""
    each, longer = divmod(count, replicas)
    starts = [replica * each + min(replica, longer) for replica in range(replicas + 1)]
    return [list(range(start, stop)) for start, stop in itertools.pairwise(starts)]


def loads_of(costs: Sequence[float], assigned: Sequence[Sequence[int]]) -> list[float]:
    """The summed cost of each replica's items."""
    return [sum(costs[item] for item in items) for items in assigned]


def idle_share(*rounds: Sequence[float]) -> float:
    """The share, 0 to 1, of the replicas' time that is spent waiting for the most loaded: 1 - mean / max.

    `rounds`: the loads of all replicas in each round, at the end of which they wait for each other. 0 without work.
    """
    longest = sum(max(loads, default=0.0) for loads in rounds)
    return 1 - sum(sum(loads) / len(loads) for loads in rounds if loads) / longest if longest > 0 else 0.0


# ---------------------------------------------------------------------------------------------------------
# How it is done
# ---------------------------------------------------------------------------------------------------------


def _largest_first(costs: list[float], replicas: int) -> tuple[np.ndarray, np.ndarray]:
    """The owner (int64) of each item, and the load (float64) of each replica."""
    heap = [(0.0, replica) for replica in range(replicas)]
    owner = [0] * len(costs)
    for item in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
        load, replica = heap[0]
        owner[item] = replica
        heapq.heapreplace(heap, (load + costs[item], replica))
    loads = np.zeros(replicas)
    for load, replica in heap:
        loads[replica] = load
    return np.array(owner, dtype=np.int64), loads


def _even_out(costs: np.ndarray, owner: np.ndarray, loads: np.ndarray) -> None:
    """Improve an assignment in place, one exchange at a time."""
    floor = max(sum(loads.tolist()) / len(loads), costs.max(initial=0.0))
    for _ in range(MAX_EXCHANGES):
        fullest = int(loads.argmax())
        if loads[fullest] <= floor * EVEN_ENOUGH or not _exchange(fullest, costs, owner, loads):
            return


def _exchange(fullest: int, costs: np.ndarray, owner: np.ndarray, loads: np.ndarray) -> bool:
    """Make the exchange after which the larger load of the two replicas concerned is smallest; False if none helps.

    Each item j of another replica has its best partner among those of `fullest`: the one that is larger by nearly half
    of the difference of the two loads. A replica that gives nothing takes part with an item of no cost.
    """
    mine = np.flatnonzero(owner == fullest)
    mine = mine[np.argsort(costs[mine], kind="stable")]
    partner = np.concatenate([owner, np.arange(len(loads))])
    partner_cost: np.ndarray = np.concatenate([costs, np.zeros(len(loads))])
    gaps: np.ndarray = loads[fullest] - loads[partner]
    wanted: np.ndarray = partner_cost + gaps / 2
    above: np.ndarray = np.searchsorted(costs[mine], wanted)
    either = np.stack((np.maximum(above - 1, 0), np.minimum(above, len(mine) - 1)))
    shifts = costs[mine][either] - partner_cost
    # The larger of the two loads afterwards, less that of the fullest now. Never negative for items of the fullest.
    changes = np.maximum(-shifts, shifts - gaps)
    side, best = np.unravel_index(changes.argmin(), changes.shape)
    # Less than this is rounding.
    if changes[side, best] >= -1e-9 * loads[fullest]:
        return False
    loads[[fullest, partner[best]]] += shifts[side, best] * np.array([-1, 1])
    if best < len(owner):
        owner[best] = fullest
    owner[mine[either[side, best]]] = partner[best]
    return True


def _items_of(owner: np.ndarray, replicas: int) -> list[list[int]]:
    order = np.argsort(owner, kind="stable")
    ends = np.cumsum(np.bincount(owner, minlength=replicas))
    return [items.tolist() for items in np.split(order, ends[:-1])]
