"""Functions that share the outcome of work with all ranks, or check that facts are the same on all ranks.

Each function begins with `meet`: if ranks make different calls on a group, they raise an error that names both calls.
Otherwise their collectives would receive each other's values.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_hetero.base.errors import SharedError, UserError, main_place

T = TypeVar("T")
R = TypeVar("R")
FIRST = 0
"""The rank that does work for all ranks of a group."""
Working = Callable[[], AbstractContextManager[None]]
"""A context for work of one rank that others wait for: see `Watchdog.working`."""
Watched = Callable[[Callable[[], str]], AbstractContextManager[None]]
"""A context for waiting on other ranks, given a description of the wait: see `Watchdog.waiting`."""
Facts = Mapping[str, str | None]
"""Values that must be the same on all ranks, by name; None for a value that a rank does not know."""
_MAX_SHOWN = 120
"""Maximum characters of a fact in a message."""
_NUMBERS = 62
"""Maximum numbers that `meet` compares."""
_LOCALS = ".<locals>"
_LOWEST = torch.iinfo(torch.int64).min


def meet(group: dist.ProcessGroup, call: str, numbers: Sequence[int] = ()) -> list[int]:
    """Return the maximum over a group's ranks of each of up to `_NUMBERS` numbers, by one small all-reduce of a fixed
    size. Raises `SharedError` if another rank makes another `call`.
    """
    tag = zlib.crc32(call.encode())
    padded = [tag, -tag, *numbers, *[_LOWEST] * (_NUMBERS - len(numbers))]
    maxima = torch.tensor(padded, device=dist.distributed_c10d._get_object_coll_device(group))
    dist.all_reduce(maxima, dist.ReduceOp.MAX, group=group)
    highest_tag, lowest_tag, *result = maxima.tolist()
    if highest_tag != -lowest_tag:
        calls: list[Any] = [None] * group.size()
        dist.all_gather_object(calls, (call, main_place()), group=group)
        places = {name.partition(_LOCALS)[0]: place for name, place in reversed(calls)}
        because, fix = "they would receive each other's values", "make each call on all ranks, in the same order"
        outer = [name.partition(_LOCALS)[0] for name, _ in calls]
        facts = [
            {"call": f"`{each}`{places[each]}", "step": name} for each, (name, _) in zip(outer, calls, strict=True)
        ]
        require_same_facts("calls of all ranks", facts, dist.get_process_group_ranks(group), fix, because)
    return result[: len(numbers)]


def on_every(group: dist.ProcessGroup | None, work: Callable[[], T], working: Working = nullcontext) -> list[T]:
    """Do `work` on all ranks and return all results, by rank. The first `UserError` is raised on every rank, as a
    `SharedError`. Without a group, this process is the only rank.
    """
    if group is None:
        return [work()]
    outcome = _attempt(work, working)
    meet(group, _call(on_every, work))
    outcomes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, outcome, group=group)
    for _, problem in outcomes:
        if problem is not None:
            raise SharedError(problem)
    return [result for result, _ in outcomes]


def on_first(group: dist.ProcessGroup | None, work: Callable[[], T], working: Working = nullcontext) -> T:
    """Do `work` on the first rank alone and return its result on every rank. Its `UserError` is raised on every rank,
    as a `SharedError`. Without a group, this process is the only rank.
    """
    if group is None:
        return work()
    outcome: list[Any] = [_attempt(work, working) if dist.get_rank(group) == FIRST else None]
    meet(group, _call(on_first, work))
    dist.broadcast_object_list(outcome, src=FIRST, group=group)
    result, problem = outcome[0]
    if problem is not None:
        raise SharedError(problem)
    return result


def on_first_of_all(
    group: dist.ProcessGroup | None, work: Callable[[], T], then: Callable[[list[T]], R], working: Working = nullcontext
) -> R:
    """Do `work` on all ranks, call `then` with all results on the first rank, and return its result on every rank. The
    first `UserError` is raised on every rank, as a `SharedError`. Without a group, this process is the only rank.
    """
    if group is None:
        return then([work()])
    outcome, is_first = _attempt(work, working), dist.get_rank(group) == FIRST
    meet(group, _call(on_first_of_all, work))
    outcomes: list[Any] = [None] * dist.get_world_size(group)
    dist.gather_object(outcome, outcomes if is_first else None, dst=FIRST, group=group)

    def finish() -> R:
        _raise(next((problem for _, problem in outcomes if problem is not None), None))
        return then([result for result, _ in outcomes])

    return on_first(group, finish, working)


def all_or_none(group: dist.ProcessGroup, work: Callable[[], T], working: Working = nullcontext) -> T:
    """Return the result of `work` on this rank once it has succeeded on all ranks. The first `UserError` is raised on
    every rank; success costs one small all-reduce. `work` may communicate, provided that either all or none of the
    communicating ranks raise.
    """
    result: Any
    result, problem = _attempt(work, working)
    if any(meet(group, _call(all_or_none, work), [problem is not None])):
        raise_first(group, problem)
    return result


def raise_first(group: dist.ProcessGroup, problem: str | None) -> None:
    """Raise the first `problem` on every rank, as a `SharedError`. All ranks call it, with a problem or None."""
    if group.size() > 1:  # The only rank may have a `LocalGroup`.
        on_every(group, lambda: _raise(problem))
    elif problem is not None:
        raise SharedError(problem)


def require_equal(group: dist.ProcessGroup, where: str, facts: Facts, fix: str) -> None:
    """Check that each fact is the same on all ranks of a host group that know it. All ranks call it with the same
    names. Equal facts cost one small all-reduce. Raises `SharedError`.
    """
    digests = [None if fact is None else zlib.crc32(fact.encode()) for fact in facts.values()]
    ends = [end for each in digests for end in ([_LOWEST, _LOWEST] if each is None else [each, -each])]
    maxima = [each for at in range(0, len(ends), _NUMBERS) for each in meet(group, where, ends[at : at + _NUMBERS])]
    if not all(high in (-low, _LOWEST) for high, low in zip(maxima[::2], maxima[1::2], strict=True)):
        require_same_facts(where, on_every(group, lambda: dict(facts)), dist.get_process_group_ranks(group), fix)


def require_same(group: dist.ProcessGroup | None, where: str, facts: Facts, fix: str, because: str = "") -> None:
    """Check that facts are the same on all ranks of a host or device group. Raises `SharedError`."""
    if facts_by_rank := differing_facts(group, where, facts):
        require_same_facts(where, facts_by_rank, dist.get_process_group_ranks(group), fix, because)


def differing_facts(group: dist.ProcessGroup | None, where: str, facts: Facts) -> list[Facts]:
    """Return the facts of all ranks by rank, or an empty list if the digests of facts are equal on all ranks."""
    digest = zlib.crc32(repr(list(facts.items())).encode())
    high, low = (digest, -digest) if group is None else meet(group, where, [digest, -digest])
    return on_every(group, lambda: facts) if high != -low else []


def require_same_facts(
    where: str,
    facts_by_rank: Sequence[Facts],
    ranks: Sequence[int],
    fix: str,
    because: str = "",
    absent: str | None = "nothing",
) -> None:
    """Check that each fact is the same on all `ranks`, whose facts are `facts_by_rank`. `absent`: value of a missing
    fact; None excludes it. Raises `SharedError` with the first fact that differs and two of its values.
    """
    kinds: dict[tuple[tuple[str, str | None], ...], int] = {}  # The first rank with each set of facts.
    for rank, facts in zip(ranks, facts_by_rank, strict=True):
        kinds.setdefault(tuple(facts.items()), rank)
    distinct = [(rank, dict(facts)) for facts, rank in kinds.items()]
    for name in dict.fromkeys(name for _, facts in distinct for name in facts):
        having = [(rank, fact) for rank, facts in distinct if (fact := facts.get(name, absent)) is not None]
        for rank, fact in having:
            if fact != having[0][1]:
                found = f"{_short(having[0][1])} on rank {having[0][0]} and {_short(fact)} on rank {rank}"
                expected = "the same on all ranks"
                raise SharedError.at(f"{where}: {name}", found=found, expected=expected, because=because, fix=fix)


def _attempt(work: Callable[[], T], working: Working) -> tuple[T | None, str | None]:
    try:
        with working():
            return work(), None
    except UserError as error:
        return None, str(error)


def _call(kind: Callable[..., Any], work: Callable[..., Any]) -> str:
    """Return the name of a call: the function in which `work` is defined, and the step in this function."""
    return f"{getattr(work, '__qualname__', type(work).__name__)}{_LOCALS}.{kind.__name__}"


def _raise(problem: str | None) -> None:
    if problem is not None:
        raise UserError(problem)


def _short(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
