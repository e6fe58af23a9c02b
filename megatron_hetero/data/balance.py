"""Balanced assignment of items to replicas, samples to micro-batches, and micro-batches to calls of an encoder, as pure
functions.

Every rank computes the same assignment for itself: ties go to the lower index, sums are plain additions in a fixed
order, never reductions whose order depends on the machine, and sums of integers are exact in float64 up to 2^53.

  - `assign` gives items, each with a *cost* such as flops, to replicas.
  - `fill_bins` assigns the samples of a step to *bins*, each a micro-batch of one replica of the text module. A bin has
    a *budget* for each *kind* of size, and the first kind (tokens) is balanced first; costs (predicted flops of the
    encoders) have no budget. The bins of all replicas that are trained at the same time are a *round*.
  - `cut_calls` groups micro-batches into calls. Small pictures leave a GPU waiting for the host, which issues as many
    kernels for few patches as for many. So several micro-batches may form one packed call: attention stays within a
    piece, and pieces are assigned to replicas, and cut over ranks, over the whole call.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_hetero.layout.layout import Layout

MAX_EXCHANGES = 32
"""Maximum number of exchanges in one assignment. Each exchange takes one pass over the items."""

EVEN_ENOUGH = 1.002
"""A largest load within this factor of its lower bound is not improved further, since predictions are coarser."""


def assign(costs: Sequence[float], replicas: int) -> list[list[int]]:
    """Return the items of each replica, ascending, such that the largest sum of `costs` (0 or more) is small.

    Items are assigned the largest first, each to the least loaded replica; the largest load is then at most 4/3 - 1/(3
    replicas) of the best possible (Graham 1969, "Bounds on multiprocessing timing anomalies"). Then the most loaded
    replica gives single items away, or exchanges them for smaller ones, as long as the larger load of the two replicas
    decreases. This never increases the largest load, nor decreases the smallest. Items of equal cost go to replicas in
    order, so that a rank decodes neighbouring frames of a video.
    """
    values = np.asarray(costs, dtype=np.float64)
    owner, loads = _largest_first(values.tolist(), replicas)
    floor = max(sum(loads.tolist()) / replicas, values.max(initial=0.0))
    for _ in range(MAX_EXCHANGES):
        fullest = int(loads.argmax())
        if loads[fullest] <= floor * EVEN_ENOUGH or not _exchange(fullest, values, owner, loads):
            break
    by_number, by_owner = np.argsort(values, kind="stable"), np.lexsort((owner, values))
    owner[by_number] = owner[by_owner]
    return _items_of(owner, replicas)


def assign_in_order(count: int, replicas: int) -> list[list[int]]:
    """Return the items of each of `replicas`: contiguous blocks of 0 .. `count` - 1, the first ones longer by one if
    `replicas` does not divide `count`.
    """
    each, longer = divmod(count, replicas)
    starts = [replica * each + min(replica, longer) for replica in range(replicas + 1)]
    return [list(range(start, stop)) for start, stop in itertools.pairwise(starts)]


def idle_share(*rounds: Sequence[float]) -> float:
    """Return the share (0 to 1) of their time that replicas wait for the most loaded replica: 1 - mean / max, or 0
    without work. `rounds`: loads of all replicas in each round, at the end of which they wait for each other.
    """
    longest = sum(max(loads, default=0.0) for loads in rounds)
    return 1 - sum(sum(loads) / len(loads) for loads in rounds if loads) / longest if longest > 0 else 0.0


def _largest_first(costs: list[float], replicas: int) -> tuple[np.ndarray, np.ndarray]:
    """Assign items, the largest first. Returns each item's owner (int64) and each replica's load (float64)."""
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


def _exchange(fullest: int, costs: np.ndarray, owner: np.ndarray, loads: np.ndarray) -> bool:
    """Perform the exchange that minimises the larger load of the two replicas. Returns False if none helps.

    The best partner of each item of another replica is the item of `fullest` that is larger by nearly half of the
    difference of the two loads. A zero-cost item per replica stands for receiving an item without giving one.
    """
    items = np.flatnonzero(owner == fullest)
    items = items[np.argsort(costs[items], kind="stable")]
    partner = np.concatenate([owner, np.arange(len(loads))])
    partner_cost: np.ndarray = np.concatenate([costs, np.zeros(len(loads))])
    gaps: np.ndarray = loads[fullest] - loads[partner]
    wanted: np.ndarray = partner_cost + gaps / 2
    above: np.ndarray = np.searchsorted(costs[items], wanted)
    either = np.stack((np.maximum(above - 1, 0), np.minimum(above, len(items) - 1)))
    shifts = costs[items][either] - partner_cost
    # Change of the larger of the two loads; never negative for items of the fullest replica itself.
    changes = np.maximum(-shifts, shifts - gaps)
    side, best = np.unravel_index(changes.argmin(), changes.shape)
    if changes[side, best] >= -1e-9 * loads[fullest]:  # Smaller gains are rounding errors.
        return False
    loads[[fullest, partner[best]]] += shifts[side, best] * np.array([-1, 1])
    if best < len(owner):
        owner[best] = fullest
    owner[items[either[side, best]]] = partner[best]
    return True


def _items_of(owner: np.ndarray, replicas: int) -> list[list[int]]:
    order = np.argsort(owner, kind="stable")
    ends = np.cumsum(np.bincount(owner, minlength=replicas))
    return [items.tolist() for items in np.split(order, ends[:-1])]


UNLIMITED = 1 << 62
"""Budget of a size without a limit."""
COST_WEIGHT = 0.01
"""Weight of uneven costs relative to uneven sizes of the first kind, such that bins stay within 1 % of each other."""
EXCHANGES = 5
"""Maximum number of exchanges per bin in each pass over the bins."""
CANDIDATES = 192
"""Approximate number of items considered for an exchange with a bin, from the bins that differ most from it."""
NEAR = 1e-7
"""Squared distance from the mean below which bins are not improved, and minimum gain of an exchange."""


def fill_bins(
    sizes: np.ndarray, budgets: Sequence[int], costs: Sequence[int] | np.ndarray, multiple: int = 1
) -> list[list[int]]:
    """Return the items of each bin, ascending, in as few bins as the search finds. Some are empty if there are fewer
    items than bins.

      1. Begin with the fewest rounds that the sums of sizes allow; add a round whenever step 2 fails.
      2. Assign each item, the largest first, to the least full bin that has room. Then exchange an item of the bin that
         is farthest from the mean for another bin's, or give one away, as long as that brings bins nearer to the mean.
      3. Continue exchanges to balance costs too, within budgets and at little unevenness of the first kind.

    Args:
        sizes: sizes of the items, int64 [items, kinds], at least 1 of the first kind.
        budgets: limit of each kind in any bin.
        costs: costs of the items, [items], 0 or more.
        multiple: divisor of the number of bins, at least 1.

    Raises:
        ValueError: an item alone exceeds a budget.
    """
    if len(sizes) == 0:
        return [[] for _ in range(multiple)]
    if (sizes > np.array(budgets)).any():
        raise ValueError(f"an item of sizes {sizes.max(axis=0).tolist()}, budgets of {list(budgets)}")
    rounds = max(
        -(-int(total) // (budget * multiple)) for total, budget in zip(sizes.sum(axis=0), budgets, strict=True)
    )
    while True:
        bins = _Bins.of(sizes, budgets, np.asarray(costs), rounds * multiple)
        bins.even_out(0.0)
        if (bins.loads <= bins.caps[:, None]).all():
            bins.even_out(COST_WEIGHT)
            return _items_of(bins.owner[: len(sizes)], bins.count)
        rounds += 1


def into_rounds(work: Sequence[float], replicas: int) -> list[list[int]]:
    """Return, for each round, the number of each replica's bin. `work`: work of each bin, for a whole number of rounds.

    Bins of similar work form a round, the largest first, so that running out of memory shows at once. In a round, bins
    with more work go to replicas that had less work before.
    """
    order = sorted(range(len(work)), key=lambda i: (-work[i], i))
    done: list[float] = [0.0] * replicas
    rounds: list[list[int]] = []
    for first in range(0, len(order), replicas):
        least = sorted(range(replicas), key=lambda r: (done[r], r))
        chosen = [0] * replicas
        for replica, number in zip(least, order[first : first + replicas], strict=True):
            chosen[replica], done[replica] = number, done[replica] + work[number]
        rounds.append(chosen)
    return rounds


@dataclass(eq=False)
class _Bins:
    """An assignment to bins that is improved in place. Sizes are relative to the mean bin; the last kind is the cost.

    After the real items, each bin owns an item of size 0, which it exchanges to give an item away or to get one.
    `sizes`: [kinds + 1, items + bins]; `caps`: [kinds + 1]; `owner`: int64 [items + bins]; `loads`: [kinds + 1, bins].
    """

    sizes: np.ndarray
    caps: np.ndarray
    owner: np.ndarray
    loads: np.ndarray

    @classmethod
    def of(cls, sizes: np.ndarray, budgets: Sequence[int], costs: np.ndarray, bins: int) -> _Bins:
        """Assign items, largest first, each to the least full bin with room, or to the least full if none has room."""
        totals = np.concatenate([sizes.sum(axis=0), [costs.sum()]]).astype(np.float64)
        means = np.where(totals > 0, totals, 1.0) / bins
        whole = np.concatenate([sizes.T, costs[None]]).astype(np.float64)
        caps = np.array([*budgets, UNLIMITED], np.float64)
        loads, owner = np.zeros((len(whole), bins)), np.zeros(len(sizes), np.int64)
        for item in np.argsort(-sizes[:, 0], kind="stable").tolist():
            after = loads + whole[:, item, None]
            room = (after <= caps[:, None]).all(axis=0)
            chosen = int(np.argmin(np.where(room, loads[0], np.inf) if room.any() else loads[0]))
            owner[item] = chosen
            loads[:, chosen] = after[:, chosen]
        none = np.zeros((len(whole), bins))
        return cls(
            np.concatenate([whole, none], axis=1) / means[:, None],
            caps / means * (1 + 1e-9),  # Tolerance for rounding.
            np.concatenate([owner, np.arange(bins)]),
            loads / means[:, None],
        )

    @property
    def count(self) -> int:
        """Number of bins."""
        return self.loads.shape[1]

    def even_out(self, cost_weight: float) -> None:
        """Exchange items until all bins are near the mean, no exchange helps, or the limit of exchanges is reached."""
        distance = self._distance(self.loads, cost_weight)
        settled = np.zeros(self.count, bool)
        for _ in range(EXCHANGES * self.count):
            farthest = int(np.where(settled, -1.0, distance).argmax())
            if settled[farthest] or distance[farthest] <= NEAR:
                return
            changed = self._exchange(farthest, distance, cost_weight)
            if changed is None:
                settled[farthest] = True
                continue
            pair = [farthest, changed]
            distance[pair] = self._distance(self.loads[:, pair], cost_weight)
            settled[:] = False

    def _distance(self, loads: np.ndarray, cost_weight: float) -> np.ndarray:
        """Return the squared distance from the mean of bins with `loads` [kinds + 1, ...], penalised over budgets."""
        first, cost = loads[0] - 1.0, loads[-1] - 1.0
        distance = first * first + cost_weight * (cost * cost)
        for load, cap in zip(loads, self.caps, strict=True):
            over = np.maximum(load - cap, 0.0)
            distance = distance + 1e3 * over
        return distance

    def _exchange(self, one: int, distance: np.ndarray, cost_weight: float) -> int | None:
        """Exchange the two items that bring bin `one` and another bin nearest to the mean. Returns the other bin; None
        if no exchange helps.
        """
        items = np.flatnonzero(self.owner == one)
        theirs = np.flatnonzero(self._partners(one)[self.owner])
        others = self.owner[theirs]
        if not len(theirs):
            return None
        moved = self.sizes[:, None, theirs] - self.sizes[:, items, None]
        after = self._distance(self.loads[:, one, None, None] + moved, cost_weight)
        after = after + self._distance(self.loads[:, None, others] - moved, cost_weight)
        gains = distance[one] + distance[others] - after
        give, take = np.unravel_index(int(gains.argmax()), gains.shape)
        if gains[give, take] <= NEAR:
            return None
        other = int(others[take])
        self.loads[:, one] += moved[:, give, take]
        self.loads[:, other] -= moved[:, give, take]
        given, taken, real = int(items[give]), int(theirs[take]), len(self.owner) - self.count
        # Items of size 0 do not change their owner.
        if given < real:
            self.owner[given] = other
        if taken < real:
            self.owner[taken] = one
        return other

    def _partners(self, one: int) -> np.ndarray:
        """Return a mask of the bins that differ most from bin `one`, bool [bins], without `one` itself."""
        apart = np.abs(self.loads[0] - self.loads[0, one])
        apart[one] = -1.0
        number = max(1, CANDIDATES * self.count // len(self.owner))
        chosen = np.zeros(self.count, bool)
        chosen[np.argsort(-apart, kind="stable")[: min(number, self.count - 1)]] = True
        return chosen


PATCHES_OF_A_CALL = 4096
"""Patches per rank, on average over the encoder's ranks, up to which a call takes more micro-batches.

A GPU then computes for longer than its host needs to launch the kernels: a layer of a vision encoder takes some 40
MFLOP per patch forward, about 0.3 ms for 4,096 patches on an H100, and launching a dozen kernels takes less. A larger
call would gain nothing and take more temporary memory, here about 150 MB for a layer.
"""


def cut_calls(
    patches: Sequence[int], runs: Iterable[range], layout: Layout, limit: int | None = None
) -> tuple[range, ...]:
    """Group all micro-batches into calls. Returns the range of micro-batches of each call.

    A call takes at least one micro-batch, and more up to `PATCHES_OF_A_CALL` per rank and `limit` per shard.

    Args:
        patches: number of patches of each micro-batch, over all replicas.
        runs: runs of consecutive micro-batches that one call may encode, together all micro-batches.
        layout: layout of the encoder.
        limit: see `data.encoder_shards.EncoderShards`; None: no limit.
    """
    calls, maximum = [], PATCHES_OF_A_CALL * layout.stage_size
    if limit is not None:
        maximum = min(maximum, limit * layout.ways("tokens", "samples"))
    for run in runs:
        first, total = run.start, 0
        for m in run:
            if m > first and total + patches[m] > maximum:
                calls.append(range(first, m))
                first, total = m, 0
            total += patches[m]
        calls.append(range(first, run.stop))
    return tuple(calls)
