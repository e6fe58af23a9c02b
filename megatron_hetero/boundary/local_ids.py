"""Both ownerships of a boundary from the ids that each of its ranks knows. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import numpy as np

from megatron_hetero.boundary.ownership import Gradient, Ownership
from megatron_hetero.distributed.collective import require_alike
from megatron_hetero.errors import UserError

PADDING = -1
"""The id of a held row that does not cross."""


class Known(NamedTuple):
    """What one rank knows of a crossing of `boundary`: ids of rows, int64, in order, `PADDING` among those held, and
    how gradients of needed rows are held. `terms`: with which the rank has opened the boundary, by name.
    """

    boundary: str
    held: np.ndarray
    needed: np.ndarray
    gradient: Gradient
    terms: Mapping[str, str] = {}

    @classmethod
    def of(
        cls,
        boundary: str,
        rank: int,
        held: Any,
        needed: Any,
        gradient: Gradient,
        terms: Mapping[str, str] = MappingProxyType({}),
    ) -> Self:
        """Those of `rank`, checked. Raises `UserError`."""
        where = f"boundary {boundary} on rank {rank}"
        if gradient not in ("invariant", "partial"):
            expected = "'invariant' or 'partial'"
            raise UserError.at(f"{where}: gradient", found=repr(gradient), expected=expected, fix="correct it")
        own = _ids(f"{where}: held", held, least=PADDING), _ids(f"{where}: needed", needed)
        return cls(boundary, *own, gradient, dict(terms))


Sides = tuple[Sequence[int], Sequence[int]]
"""The ranks that rows leave, and those that they enter."""


def ownerships_of(
    ranks: Sequence[int], known: Sequence[Known], sides: Sides | None = None
) -> tuple[Ownership, Ownership]:
    """Who holds and who needs the rows of a crossing, from what the ranks of its boundary know. Rows are numbered from
    0 in the order of their ids, padding after them. `sides`: default: all ranks. Raises `UserError`, see
    `Boundary.plan`.
    """
    sources, targets = sides or (ranks, ranks)
    boundary = known[0].boundary
    require_alike("plan", [{"boundary": k.boundary} for k in known], ranks, "plan boundaries in one order on all ranks")
    facts = [{**each.terms, "gradient": each.gradient} for each in known]
    require_alike(f"boundary {boundary}", facts, ranks, "open and plan it alike on all ranks")
    numbers = np.unique(np.concatenate([np.zeros(0, np.int64), *(each.held[each.held != PADDING] for each in known)]))
    for rank, each in zip(ranks, known, strict=True):
        if len(missing := np.setdiff1d(each.needed, numbers)):
            raise UserError.at(
                f"boundary {boundary}: needed",
                found=f"row {missing[0]} on rank {rank}",
                expected=f"one of the {len(numbers)} rows that ranks hold",
                fix="give the rows the same ids on both sides, of the same batch",
            )
    _require_none(boundary, "held", {r: each.held for r, each in zip(ranks, known, strict=True) if r not in sources})
    _require_none(
        boundary, "needed", {r: each.needed for r, each in zip(ranks, known, strict=True) if r not in targets}
    )
    own = dict(zip(ranks, known, strict=True))
    held = _grouped(boundary, "held", sources, [_numbered(own[r].held, numbers) for r in sources], numbers)
    needed = _grouped(boundary, "needed", targets, [np.searchsorted(numbers, own[r].needed) for r in targets], numbers)
    return Ownership.of(_with_numbered_padding(held, len(numbers))), Ownership.of(needed, known[0].gradient)


def _require_none(boundary: str, what: str, ids: Mapping[int, np.ndarray]) -> None:
    """Check that ranks of the other side alone have no rows."""
    for rank, found in ids.items():
        if len(found):
            raise UserError.at(
                f"boundary {boundary}: {what}",
                found=f"{len(found)} rows on rank {rank}",
                expected="none",
                because=f"rows {'leave' if what == 'held' else 'enter'} a stage that is not on that rank",
                fix=f"leave `{what}` out there",
            )


def _numbered(ids: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """The place of each id in `numbers`; padding as it is."""
    return np.where(ids == PADDING, PADDING, np.searchsorted(numbers, ids))


def _with_numbered_padding(held: Mapping[tuple[int, ...], np.ndarray], first: int) -> dict[tuple[int, ...], np.ndarray]:
    """Padding as rows of their own, numbered from `first`, which nobody needs."""
    found = {}
    for ranks, rows in held.items():
        padding = rows == PADDING
        found[ranks] = np.where(padding, first - 1 + np.cumsum(padding), rows)
        first += int(padding.sum())
    return found


def _ids(what: str, values: Any, least: int = 0) -> np.ndarray:
    """The ids as an array, each once but for `PADDING`. Raises `UserError`."""
    try:
        found = np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
    except (TypeError, ValueError, RuntimeError):  # Ragged lists, dtypes that NumPy lacks.
        found = np.zeros((), object)
    if found.size == 0:
        return np.zeros(0, np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iu" or int(found.max()) >= 1 << 63:
        shown = f"{found.dtype} of shape {found.shape}" if found.ndim else f"a {type(values).__name__}"
        raise UserError.at(what, found=shown, expected="int64 of shape [rows]", fix="give the ids of rows")
    if int(found.min()) < least:
        expected = f"ids from 0{', or -1 of rows that do not cross' if least < 0 else ''}"
        raise UserError.at(what, found=f"row {found.min()}", expected=expected, fix="give the ids of rows")
    ids, counts = np.unique(found[found != PADDING], return_counts=True)
    if counts.max(initial=0) > 1:
        twice = ids[counts > 1][0]
        raise UserError.at(what, found=f"row {twice} twice", expected="each row once", fix="index what arrives instead")
    return found.astype(np.int64)


def _grouped(
    boundary: str, what: str, ranks: Sequence[int], rows: Sequence[np.ndarray], numbers: np.ndarray
) -> dict[tuple[int, ...], np.ndarray]:
    """Rows by the ranks that have the same ones, in the same order. Raises `UserError` if two groups share a row."""
    by_rows: dict[bytes, list[int]] = {}
    for place, mine in enumerate(rows):
        by_rows.setdefault(mine.tobytes() if len(mine) else b"of rank %d" % place, []).append(place)
    groups = list(by_rows.values())
    owner = np.full(len(numbers), -1, np.int64)
    for number, group in enumerate(groups):
        mine = rows[group[0]][rows[group[0]] != PADDING]
        if len(taken := mine[owner[mine] >= 0]):
            other = ranks[groups[int(owner[taken[0]])][0]]
            raise UserError.at(
                f"boundary {boundary}: {what}",
                found=f"row {numbers[taken[0]]} on ranks {other} and {ranks[group[0]]}, which differ in rows or order",
                expected="ranks with a common row to have the same rows in the same order",
                fix="give such ranks the union of their rows, and index what arrives",
            )
        owner[mine] = number
    return {tuple(ranks[place] for place in group): rows[group[0]] for group in groups}
