"""The exact moves that turn one ownership of rows into another. Pure data.

A direction has up to three stages, each one uneven all-to-all (or batched point-to-point, where the two sides have no
rank in common):

  1. *reduce* (only where the rows that move are parts of a sum): every holder of a row sends its part to the one that
     passes the row on, which adds them up;
  2. *scatter*: every row that no member of its destination group holds crosses once, to one member of that group. Where
     the source is replicated over n ranks, each sends about 1/n of the rows; where the destination is replicated over n
     ranks, each receives about 1/n of them;
  3. *gather* (only where some destination is replicated): inside each destination group, each member passes on its
     portion to the members that do not hold those rows.

Cases, for a row r with source group S and destination group D. Its *leaver* is the rank of S that passes it on, its
*lander* the rank of D that gets it first:

     S and D share ranks           the shared ranks keep r; one, its leaver and lander, passes it on to the rest of D
     they share none, |D| = 1      one member of S sends r to D
     they share none, |D| > 1      one member of S sends r to one member of D, which passes it on to the rest
     the parts in S are a sum      as above after stage 1, except that only the lander has the sum to begin with
     D needs r in one place only   only the lander gets it

The last two arise in the backward pass. It is the adjoint of the forward pass: gradients travel from D to S, as parts
of a sum where D holds them so (`Ownership.gradient` is partial), and to one holder only where S is partial. Rows that
nobody needs get a gradient of zero.

Nobody receives a row that it does not need or already holds, so that received rows are the minimum for the pair of
ownerships. Each rank computes its own part only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from typing import Literal, NamedTuple
from zlib import crc32

import numpy as np

from megatron_hetero.boundary.ownership import Ownership

Stage = Literal["reduce", "scatter", "gather"]
SHOWN = 256
"""Moves, and ranks, that a plan's text lists at most."""
STAGES: tuple[Stage, ...] = ("reduce", "scatter", "gather")


class Move(NamedTuple):
    """Rows that one rank sends to another in one stage of a direction. ``Move.parse(str(move)) == move``."""

    direction: str
    stage: str
    sender: int
    receiver: int
    rows: int

    def __str__(self) -> str:
        return f"{self.direction:<8}  {self.stage:<7}  {self.sender:>6} -> {self.receiver:<6}  {self.rows:>9,}"

    @classmethod
    def parse(cls, text: str) -> Move:
        """The move at the head of a line of a plan's table. Raises `ValueError`."""
        found = re.match(r"(forward|backward) +(reduce|scatter|gather) +(\d+) -> (\d+) +([\d,]+)", text)
        if found is None:
            raise ValueError(f"found {text!r}, expected a line such as 'forward scatter 0 -> 1 17'")
        direction, stage, *numbers = found.groups()
        sender, receiver, rows = (int(number.replace(",", "")) for number in numbers)
        return cls(direction, stage, sender, receiver, rows)


@dataclass(frozen=True, eq=False)
class Exchange:
    """One stage as one rank sees it, in row indices of its buffers.

    `send`: int64, the rows to send, ordered by receiver; `send_counts`: int64, rows for each of the plan's ranks.
    `receive`: int64, where the rows that arrive are put (or added, in a reduce), ordered by sender; `receive_counts`:
    int64, rows from each of the plan's ranks.
    """

    stage: Stage
    send: np.ndarray
    send_counts: np.ndarray
    receive: np.ndarray
    receive_counts: np.ndarray


@dataclass(frozen=True, eq=False)
class DirectionPlan:
    """One direction of a boundary for one rank.

    `held`, `rows`: sizes of the buffers that rows leave and arrive in. `kept_from`, `kept_to`: indices of rows that
    stay on the rank, from the first to the second. `exchanges`: the stages, the same ones on every rank. A reduce adds
    to a copy of the first buffer, from which the scatter then reads; a gather reads and writes the second.
    `complete`: whether every row of the second buffer is written; the others are zero.
    """

    held: int
    rows: int
    kept_from: np.ndarray
    kept_to: np.ndarray
    exchanges: tuple[Exchange, ...]
    complete: bool

    def exchange(self, stage: Stage) -> Exchange | None:
        """The exchange of that stage, if there is one."""
        return next((e for e in self.exchanges if e.stage == stage), None)

    @property
    def received_rows(self) -> int:
        """Rows that reach this rank from others."""
        return sum(int(e.receive_counts.sum()) for e in self.exchanges)

    @property
    def sent_rows(self) -> int:
        """Rows that this rank sends to others."""
        return sum(int(e.send_counts.sum()) for e in self.exchanges)

    @property
    def collectives(self) -> int:
        """Collectives that this direction takes: the same number on every rank."""
        return len(self.exchanges)


@dataclass(frozen=True, eq=False)
class RankPlan:
    """One boundary for one rank and one batch.

    `ranks`: those that take part, ascending; counts are in their order. `digest`: the `BoundaryPlan.digest` of the plan
    that this is a part of. `point_to_point`: whether exchanges are batches of sends and receives, rather than
    all-to-alls over all of `ranks`. `backward`: None where nothing will come back.
    """

    rank: int
    ranks: tuple[int, ...]
    digest: int
    point_to_point: bool
    forward: DirectionPlan
    backward: DirectionPlan | None


class Traffic(NamedTuple):
    """Rows that one rank moves in one direction, and the least that it could receive (None where only the sum over all
    ranks has a least value: in a reduce the ranks can take over each other's share).
    """

    held: int
    needed: int
    received: int
    sent: int
    minimum: int | None


@dataclass(frozen=True, eq=False)
class BoundaryPlan:
    """How rows get from `source` to `destination`, and their gradients back. `row_bytes`: bytes of a row on the wire.

    `rank` gives one rank's part; `print` shows the whole.
    """

    source: Ownership
    destination: Ownership
    row_bytes: int

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that take part, ascending."""
        return tuple(np.union1d(self.source.members.ranks, self.destination.members.ranks).tolist())

    @property
    def point_to_point(self) -> bool:
        """Whether source and destination have no rank in common."""
        return len(self.ranks) == len(self.source.members.ranks) + len(self.destination.members.ranks)

    @cached_property
    def digest(self) -> int:
        """A number of 32 bits that follows from who holds and who needs what: ranks with parts of plans that differ
        can tell by it.
        """
        digest = 0
        for side in (self.source, self.destination):
            digest = crc32(side.gradient.encode(), digest)
            for numbers in (side.members.starts, side.members.ranks, side.starts, side.ids):
                digest = crc32(numbers.astype(np.int32).data, digest)
        return digest

    def rank(self, rank: int, *, backward: bool = True) -> RankPlan:
        """The part of `rank`, which is one of `ranks`; without `backward` of the forward direction only."""
        forward, back = self.directions.values()
        return RankPlan(
            rank,
            self.ranks,
            self.digest,
            self.point_to_point,
            forward.plan(rank, self.ranks),
            back.plan(rank, self.ranks) if backward else None,
        )

    @cached_property
    def directions(self) -> dict[str, Direction]:
        """Forward and backward."""
        source, destination = self.source, self.destination
        forward = Direction(source, destination, summed=False, once=False)
        summed, once = destination.gradient == "partial", source.gradient == "partial"
        return {"forward": forward, "backward": Direction(destination, source, summed, once, mirror=forward)}

    def moves(self) -> tuple[Move, ...]:
        """All moves of both directions, in the order in which they happen."""
        return tuple(_moves_of(_counted(self)))

    def traffic(self, direction: str, rank: int) -> Traffic:
        """What `rank` moves in "forward" or "backward"."""
        chosen = self.directions[direction]
        plan = chosen.plan(rank, self.ranks)
        return Traffic(plan.held, plan.rows, plan.received_rows, plan.sent_rows, chosen.minimum(rank))

    def __str__(self) -> str:
        return "\n".join(_described(self))


def plan_boundary(source: Ownership, destination: Ownership, row_bytes: int) -> BoundaryPlan:
    """Plan a boundary. `row_bytes`: bytes of a row on the wire.

    Raises:
        ValueError: a row is needed that nobody holds.
    """
    plan = BoundaryPlan(source, destination, row_bytes)
    if plan.directions["forward"].rows < len(destination.ids):
        group, _ = source.locate(destination.ids)
        at = int(np.flatnonzero(group < 0)[0])
        ranks = destination.groups[int(destination.group_of_entry[at])]
        raise ValueError(
            f"boundary: found {np.sum(group < 0)} rows that are needed but held by nobody, such as row "
            f"{destination.ids[at]}, needed by ranks {ranks}; expected the destination's rows to be among the "
            f"source's {len(source.ids)}; plan with ownerships of the same batch"
        )
    return plan


# ------------------------------------------------------------------------------------------- directions


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows on their way, a column per property, ordered by pair of groups and then by place at the destination.

    `held`, `needed`: the groups that hold and need the row; `from_place`, `to_place`: its places in their orders;
    `index`, `count`: which of the rows of its pair of groups it is, and how many there are.
    """

    held: np.ndarray
    needed: np.ndarray
    from_place: np.ndarray
    to_place: np.ndarray
    index: np.ndarray
    count: np.ndarray

    def repeated(self, times: np.ndarray) -> Rows:
        """Each row as often as `times` says."""
        return Rows(*(np.repeat(column, times) for column in self.__dict__.values()))


@dataclass(frozen=True, eq=False)
class Routes:
    """Single rows from rank to rank: int64 columns. Where sender and receiver are the same the row stays."""

    sender: np.ndarray
    receiver: np.ndarray
    from_place: np.ndarray
    to_place: np.ndarray

    def counted(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Senders, receivers and numbers of rows of all pairs of different ranks, ordered by sender and receiver."""
        moved = self.sender != self.receiver
        ranks = 1 + int(self.receiver.max(initial=0))
        keys, rows = np.unique(self.sender[moved] * ranks + self.receiver[moved], return_counts=True)
        return keys // ranks, keys % ranks, rows

    def exchange(self, stage: Stage, rank: int, ranks: Sequence[int]) -> Exchange:
        """What `rank` sends and receives."""
        order = np.asarray(ranks)

        def side(own: np.ndarray, other: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            mine = np.flatnonzero((own == rank) & (other != rank))
            mine = mine[np.argsort(other[mine], kind="stable")]
            peers = np.searchsorted(order, other[mine])
            return places[mine], np.bincount(peers, minlength=len(order))

        send = side(self.sender, self.receiver, self.from_place)
        return Exchange(stage, *send, *side(self.receiver, self.sender, self.to_place))


@dataclass(frozen=True, eq=False)
class Direction:
    """Rows from one ownership to another. `summed`: the holders of a row hold parts of a sum. `once`: a row is needed
    by one member of its group only. `mirror`: the direction with the sides exchanged, where it is known.
    """

    held: Ownership
    needed: Ownership
    summed: bool
    once: bool
    mirror: Direction | None = None

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The stages that move anything on any rank."""
        held, needed = self._pairs
        shared = self._shared.counts(held * len(self.needed.groups) + needed)
        sharers, readers = self.held.members.sizes[held], self.needed.members.sizes[needed]
        used = {
            "reduce": self.summed and bool(np.any(sharers > 1)),
            "scatter": bool(np.any(shared == 0)),
            "gather": not self.once and bool(np.any(readers > (1 if self.summed else np.maximum(shared, 1)))),
        }
        return tuple(stage for stage in STAGES if used[stage])

    def plan(self, rank: int, ranks: Sequence[int]) -> DirectionPlan:
        """The part of `rank`."""
        rows = self.rows_of(rank)
        # The scatter says which rows stay, also where it moves none.
        scatter = self.routes("scatter", rows)
        routes = {stage: scatter if stage == "scatter" else self.routes(stage, rows) for stage in self.stages}
        kept = np.flatnonzero((scatter.sender == rank) & (scatter.receiver == rank))
        exchanges = tuple(routes[stage].exchange(stage, rank, ranks) for stage in self.stages)
        arriving = sum(int(e.receive_counts.sum()) for e in exchanges if e.stage != "reduce")
        needed = self.needed.rows_of(rank)
        return DirectionPlan(
            held=self.held.rows_of(rank),
            rows=needed,
            kept_from=scatter.from_place[kept],
            kept_to=scatter.to_place[kept],
            exchanges=exchanges,
            complete=len(kept) + arriving == needed,
        )

    def minimum(self, rank: int) -> int | None:
        """The least rows that `rank` must receive: those it needs less those it holds."""
        return int(self.missing(np.array([rank]))[0]) if self.has_minima else None

    @property
    def has_minima(self) -> bool:
        """Whether each rank has a minimum of its own: no rows are added up, and all that need a row get it."""
        return not self.once and not (self.summed and self.held.members.sizes.max(initial=1) > 1)

    def missing(self, ranks: np.ndarray) -> np.ndarray:
        """The rows that each of `ranks` needs, less those that it holds."""
        keys, rows = self._rows_of_pairs
        held, needed = self.held.members.groups_of(ranks), self.needed.members.groups_of(ranks)
        groups = len(self.needed.groups)
        in_all = np.bincount(keys % max(1, groups), rows, groups + 1)[needed]  # 0 at -1, which is no group
        own = held * groups + needed
        at = np.searchsorted(keys, own)
        found = (held >= 0) & (needed >= 0) & (np.append(keys, -1)[at] == own)
        return (in_all - np.where(found, np.append(rows, 0)[at], 0)).astype(np.int64)

    @cached_property
    def minimum_total(self) -> int:
        """The least rows that all ranks together must receive.

        Adding up a row from n holders takes n - 1 messages, bringing it to another rank one, and telling m - 1 more
        ranks of a group m - 1.
        """
        rows = self.rows_of(None)
        shared = self._shared.counts(rows.held * len(self.needed.groups) + rows.needed)
        parts = self.held.members.sizes[rows.held] if self.summed else 1
        readers = 1 if self.once else self.needed.members.sizes[rows.needed]
        settled = 1 if self.summed or self.once else np.maximum(shared, 1)
        return int(np.sum((parts - 1) + (shared == 0) + (readers - settled)))

    # ----------------------------------------------------------------------------- rows and their ranks

    @cached_property
    def _columns(self) -> tuple[np.ndarray, ...]:
        """(held group, needed group, place there, place here) of all rows that are both held and needed."""
        held, from_place = self.held.locate(self.needed.ids)
        columns = held, self.needed.group_of_entry, from_place, self.needed.place_of_entry
        if np.all(held >= 0):
            return columns
        return tuple(column[held >= 0] for column in columns)

    @property
    def rows(self) -> int:
        """The number of rows that are both held and needed."""
        return len(self._columns[0])

    @cached_property
    def _pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """The pairs of groups (held, needed) that have rows."""
        if self.mirror is not None:
            needed, held = self.mirror._pairs
            return held, needed
        keys, _ = self._rows_of_pairs
        return keys // len(self.needed.groups), keys % len(self.needed.groups)

    @cached_property
    def _rows_of_pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """The pairs of groups that have rows as keys, ascending, and the number of rows of each."""
        if self.mirror is None:
            held, needed, *_ = self._columns
            return np.unique(held * len(self.needed.groups) + needed, return_counts=True)
        held, needed = self._pairs
        keys = held * len(self.needed.groups) + needed
        order = np.argsort(keys)
        return keys[order], self.mirror._rows_of_pairs[1][order]

    def rows_of(self, rank: int | None) -> Rows:
        """The rows that a rank holds or needs, or all. A pair of groups is there with all of its rows or with none."""
        held, needed, from_place, to_place = self._columns
        if rank is not None:
            mine = (held == self.held.members.group_of(rank)) | (needed == self.needed.members.group_of(rank))
            held, needed, from_place, to_place = (column[mine] for column in self._columns)
        key = held * len(self.needed.groups) + needed
        order = np.lexsort((to_place, key))
        _, first, counts = np.unique(key[order], return_index=True, return_counts=True)
        return Rows(
            held[order], needed[order], from_place[order], to_place[order],
            np.arange(len(order)) - np.repeat(first, counts), np.repeat(counts, counts),
        )  # fmt: skip

    @cached_property
    def _shared(self) -> _SharedRanks:
        return _SharedRanks.of(self.held, self.needed)

    def routes(self, stage: Stage, rows: Rows) -> Routes:
        """How `rows` travel in a stage."""
        return {"reduce": self._reduce, "scatter": self._scatter, "gather": self._gather}[stage](rows)

    def _ends(self, rows: Rows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Leaver and lander of each row, and the number of ranks that its groups share."""
        holders, readers = self.held.members, self.needed.members
        key = rows.held * len(self.needed.groups) + rows.needed
        shared = self._shared.counts(key)
        # Portions are contiguous runs; they begin at another member for each group, so that remainders spread.
        portion = (rows.index * np.where(shared, shared, readers.sizes[rows.needed]) // rows.count) + rows.held
        sender = (rows.index + rows.needed) % holders.sizes[rows.held]
        leaver = holders.ranks[holders.starts[rows.held] + sender]
        lander = readers.ranks[readers.starts[rows.needed] + portion % readers.sizes[rows.needed]]
        both = shared > 0
        if np.any(both):
            meeting = self._shared.rank_at(key[both], portion[both] % shared[both])
            leaver[both], lander[both] = meeting, meeting
        return leaver, lander, shared

    def _reduce(self, rows: Rows) -> Routes:
        leaver, _, _ = self._ends(rows)
        sender, times = _all_members(self.held, rows.held)
        at = np.repeat(rows.from_place, times)
        return Routes(sender, np.repeat(leaver, times), at, at)

    def _scatter(self, rows: Rows) -> Routes:
        leaver, lander, shared = self._ends(rows)
        crossing = Routes(leaver, lander, rows.from_place, rows.to_place)
        if self.summed or self.once or not np.any(shared > 1):
            return crossing
        # All shared ranks keep their copies, not only the one that passes the row on.
        member, times = _all_members(self.needed, rows.needed)
        copies = rows.repeated(times)
        stays = (self.held.members.groups_of(member) == copies.held) & (member != np.repeat(leaver, times))
        return Routes(
            np.concatenate([crossing.sender, member[stays]]),
            np.concatenate([crossing.receiver, member[stays]]),
            np.concatenate([crossing.from_place, copies.from_place[stays]]),
            np.concatenate([crossing.to_place, copies.to_place[stays]]),
        )

    def _gather(self, rows: Rows) -> Routes:
        _, lander, _ = self._ends(rows)
        receiver, times = _all_members(self.needed, rows.needed)
        passer, at = np.repeat(lander, times), np.repeat(rows.to_place, times)
        lacking = receiver != passer
        if not self.summed:
            lacking &= self.held.members.groups_of(receiver) != np.repeat(rows.held, times)
        return Routes(passer[lacking], receiver[lacking], at[lacking], at[lacking])


@dataclass(frozen=True, eq=False)
class _SharedRanks:
    """The ranks that a group that holds and a group that needs have in common.

    `keys`: of the pairs of groups that share ranks, ascending; `ranks`: those of each pair, one pair after the other;
    `starts`: where each pair's begin, and the end.
    """

    keys: np.ndarray
    ranks: np.ndarray
    starts: np.ndarray

    @classmethod
    def of(cls, held: Ownership, needed: Ownership) -> _SharedRanks:
        a, b = held.members, needed.members
        ranks, at_a, at_b = np.intersect1d(a.sorted_ranks, b.sorted_ranks, assume_unique=True, return_indices=True)
        key = a.sorted_groups[at_a] * len(needed.groups) + b.sorted_groups[at_b]
        order = np.argsort(key, kind="stable")
        keys, counts = np.unique(key, return_counts=True)
        return cls(keys, ranks[order], np.concatenate([[0], np.cumsum(counts)]))

    def _find(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        at = np.minimum(np.searchsorted(self.keys, keys), max(0, len(self.keys) - 1))
        return at, (self.keys[at] == keys) if len(self.keys) else np.zeros(len(keys), bool)

    def counts(self, keys: np.ndarray) -> np.ndarray:
        """How many ranks each of these pairs shares."""
        at, found = self._find(keys)
        return np.where(found, np.diff(self.starts)[at], 0) if len(self.keys) else np.zeros(len(keys), np.int64)

    def rank_at(self, keys: np.ndarray, index: np.ndarray) -> np.ndarray:
        """The shared rank of that index of each pair."""
        at, _ = self._find(keys)
        return self.ranks[self.starts[at] + index]


def _all_members(side: Ownership, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The ranks of each of `groups`, one group after the other, and how many each has."""
    sizes = side.members.sizes[groups]
    within = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return side.members.ranks[np.repeat(side.members.starts[groups], sizes) + within], sizes


# ------------------------------------------------------------------------------------------- for people


class _Counted(NamedTuple):
    """The moves of one stage of one direction, as columns."""

    direction: str
    stage: str
    senders: np.ndarray
    receivers: np.ndarray
    rows: np.ndarray


def _counted(plan: BoundaryPlan) -> list[_Counted]:
    """All moves of a plan."""
    found = []
    for name, direction in plan.directions.items():
        everything = direction.rows_of(None)
        found += [_Counted(name, stage, *direction.routes(stage, everything).counted()) for stage in direction.stages]
    return found


def _moves_of(counted: Sequence[_Counted]) -> Iterator[Move]:
    def of_stage(stage: _Counted) -> Iterator[Move]:
        columns = zip(stage.senders, stage.receivers, stage.rows, strict=True)
        return (Move(stage.direction, stage.stage, *map(int, move)) for move in columns)

    return chain.from_iterable(map(of_stage, counted))


def _described(plan: BoundaryPlan) -> Iterator[str]:
    """The lines of a plan's text: what it is, its moves, each rank's traffic, and what they come to."""
    how = "batched point-to-point" if plan.point_to_point else "one uneven all-to-all a stage"
    rows = len(plan.destination.ids)
    yield f"boundary of {rows:,} rows of {plan.row_bytes:,} bytes over {len(plan.ranks)} ranks, {how}"
    for name, direction in plan.directions.items():
        stages = ", ".join(direction.stages) or "nothing moves"
        yield f"{name}: {stages}; {direction.minimum_total:,} rows received is the minimum{_gradient_note(plan, name)}"
    counted = _counted(plan)
    yield "direction stage        from -> to           rows           bytes"
    yield from (f"{move}  {move.rows * plan.row_bytes:>14,}" for move in islice(_moves_of(counted), SHOWN))
    yield from _more(sum(len(stage.rows) for stage in counted))
    yield "direction   rank       held     needed  received bytes         minimum      sent bytes"
    traffic = {name: _traffic_of_all(plan, name, counted) for name in plan.directions}
    for name, columns in traffic.items():
        yield from _rank_lines(plan, name, columns)
    for name, (_, _, received, sent, _) in traffic.items():
        most, sent_most, total = (n * plan.row_bytes for n in (received.max(initial=0), sent.max(initial=0), sum(sent)))
        yield f"{name}: at most {most:,} bytes received and {sent_most:,} bytes sent by a rank; {total:,} bytes in all"


def _traffic_of_all(plan: BoundaryPlan, name: str, counted: Sequence[_Counted]) -> tuple[np.ndarray, ...]:
    """The columns of `Traffic` for all ranks, from the moves: planning each rank would take long. -1 for None."""
    ranks, direction = np.array(plan.ranks, np.int64), plan.directions[name]
    received, sent = np.zeros((2, len(ranks)), np.int64)
    for stage in counted:
        if stage.direction == name:
            np.add.at(received, np.searchsorted(ranks, stage.receivers), stage.rows)
            np.add.at(sent, np.searchsorted(ranks, stage.senders), stage.rows)
    held, needed = (
        np.append(np.diff(side.starts), 0)[side.members.groups_of(ranks)] for side in (direction.held, direction.needed)
    )
    return held, needed, received, sent, direction.missing(ranks) if direction.has_minima else np.full(len(ranks), -1)


def _rank_lines(plan: BoundaryPlan, name: str, columns: Sequence[np.ndarray]) -> Iterator[str]:
    shown = (column[:SHOWN].tolist() for column in columns)
    for rank, held, needed, received, sent, minimum in zip(plan.ranks[:SHOWN], *shown, strict=True):
        least = "shared" if minimum < 0 else f"{minimum * plan.row_bytes:,}"
        yield (
            f"{name:<8} {rank:>7} {held:>10,} {needed:>10,} {received * plan.row_bytes:>15,} {least:>15} "
            f"{sent * plan.row_bytes:>15,}"
        )
    yield from _more(len(plan.ranks))


def _more(lines: int) -> Iterator[str]:
    """What a table leaves out."""
    if lines > SHOWN:
        yield f"… and {lines - SHOWN:,} more"


def _gradient_note(plan: BoundaryPlan, direction: str) -> str:
    if direction == "forward":
        return ""
    needed = {
        "invariant": "each destination rank holds a row's whole gradient, and one of them sends it",
        "partial": "destination ranks hold parts of a row's gradient, which are added up on the way",
    }[plan.destination.gradient]
    held = {"invariant": "every source rank gets all of it", "partial": "one source rank gets it, the others zero"}
    return f"; {needed}; {held[plan.source.gradient]}"
