"""Checks over the default process group's store that all ranks of a run were started with the same settings, before any
group, plan or collective depends on it.

Every rank puts its facts into the store, and rank 0 reads them all once and publishes the verdict: one exchange, whose
work grows with the number of ranks and not with its square.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from megatron_hetero.errors import UserError
from megatron_hetero.layout.grammar import format_ranks

if TYPE_CHECKING:
    from torch.distributed import Store

FIRST = 0
MOST_SHOWN = 8
"""Differences that a message lists."""
_LONGEST = 120
"""Characters of a value, or of a list of ranks, in a message."""
_SOON_S, _NAMED_S = 0.02, 1.0
"""Between two looks at the store, and between two looks at which ranks are missing."""
_FOR_EVER = timedelta(days=20)

Watched = Callable[[Callable[[], str]], AbstractContextManager[None]]
"""A context for waiting on other ranks, given a description of the wait: see `Watchdog.waiting`."""


@dataclass(frozen=True)
class Statement:
    """What a rank was started with: `facts` by name, as users read them. `problem`: what keeps it from starting; some
    facts are then missing.
    """

    facts: Mapping[str, str]
    problem: str | None = None

    def pack(self) -> bytes:
        """For the store, which keeps those of all ranks."""
        return zlib.compress(json.dumps(asdict(self), ensure_ascii=True).encode())

    @classmethod
    def unpack(cls, packed: bytes) -> Statement:
        """What `pack` gave."""
        return cls(**json.loads(zlib.decompress(packed)))


def require_agreement(
    mine: Statement, store: Store, rank: int, ranks: int, watched: Watched = lambda _: nullcontext()
) -> None:
    """Check that all `ranks` were started with the same settings, and that none has a problem. Every rank calls it.

    Raises `UserError`, the same on every rank.
    """
    if ranks == 1:
        verdict = judge([mine])
    else:
        # Counted in the store itself, so that a process may compare more than once.
        place = f"agreement/{store.add(f'agreement/of rank {rank}', 1)}"
        store.set(f"{place}/{rank}", mine.pack())  # pyright: ignore[reportArgumentType] (bytes are what it takes)
        if rank == FIRST:
            statements = _collect(store, [f"{place}/{other}" for other in range(ranks)], watched)
            store.set(f"{place}/verdict", judge(list(map(Statement.unpack, statements))))
        with watched(lambda: "the comparison of what the ranks were started with, by the first rank,"):
            store.wait([f"{place}/verdict"], _FOR_EVER)
        verdict = store.get(f"{place}/verdict").decode()
    if verdict:
        raise UserError(verdict)


def _collect(store: Store, keys: Sequence[str], watched: Watched) -> list[bytes]:
    """The values of all keys, one for each rank, once all are there."""
    missing, looked = list(range(len(keys))), time.monotonic()
    # It looks, and does not wait in the store: so it is known which ranks have not come.
    with watched(lambda: f"the settings of {_ranks(missing)}, which all ranks compare before they begin,"):
        while not store.check([keys[rank] for rank in missing]):
            time.sleep(_SOON_S)
            if time.monotonic() - looked > _NAMED_S:
                missing = [rank for rank in missing if not store.check([keys[rank]])]
                looked = time.monotonic()
    return store.multi_get(list(keys))


# ---------------------------------------------------------------------------------------------- the verdict


def judge(statements: Sequence[Statement]) -> str:
    """What is wrong with what the ranks say, in rank order: where they differ, else the problem of one or all of them;
    empty where nothing is.
    """
    if differences := list(_differences(statements)):
        more = len(differences) - MOST_SHOWN
        shown = "; ".join(differences[:MOST_SHOWN]) + (f"; and {more} more" if more > 0 else "")
        return str(
            UserError.at(
                "ranks of one run",
                found=f"different settings: {shown}",
                expected="the same on every rank",
                because="each rank plans the collectives from its own copy (only log.dir may differ)",
                fix="start all ranks with one command, configuration and environment, on the same files",
            )
        )
    problems: dict[str, list[int]] = {}
    for rank, statement in enumerate(statements):
        if statement.problem is not None:
            problems.setdefault(statement.problem, []).append(rank)
    if not problems:
        return ""
    problem, ranks = next(iter(problems.items()))
    return problem if len(ranks) == len(statements) else f"on {_ranks(ranks)}: {problem}"


def _differences(statements: Sequence[Statement]) -> Iterator[str]:
    """A text for each fact that is not the same everywhere, with its values and where they are found."""
    ranks_of: dict[tuple[tuple[str, str], ...], list[int]] = {}
    known = {}
    for rank, statement in enumerate(statements):
        kind = (*statement.facts.items(), ("", str(statement.problem)))
        ranks_of.setdefault(kind, []).append(rank)
        known[kind] = statement
    if len(known) == 1:
        return
    for name in {name: None for statement in known.values() for name in statement.facts}:
        ranks: dict[str, list[int]] = {}
        for kind, statement in known.items():
            # What a rank with a problem does not say, it did not come to.
            if name in statement.facts or statement.problem is None:
                ranks.setdefault(statement.facts.get(name, "not there"), []).extend(ranks_of[kind])
        if len(ranks) > 1:
            values = (f"{_short(value)} on {_ranks(sorted(those))}" for value, those in ranks.items())
            yield f"{name} is {' and '.join(values)}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {_short(format_ranks(ranks))}"


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
