"""Ranks of a run that nobody watches over, in processes that need not import anything: in a second, they are there."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import pretrain_vlm
from megatron_hetero.groups.launch import guarded
from tests.support.pool import forkserver

Program = Callable[..., None]


def pretrain(*flags: str) -> None:
    """The program."""
    guarded(pretrain_vlm.main, list(flags))


class Forked:
    """`program(*arguments)` on as many ranks as there are `arguments`. `own`: a new folder for what the ranks say."""

    def __init__(self, own: Path, program: Program, arguments: Sequence[Sequence[Any]]) -> None:
        own.mkdir()
        self.own = own
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        context = forkserver()
        places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(len(arguments)), "LOCAL_RANK": "0"}
        self.ranks = [
            context.Process(target=_rank, args=(own, places | {"RANK": str(rank)}, program, of_rank), daemon=True)
            for rank, of_rank in enumerate(arguments)
        ]
        for rank in self.ranks:
            rank.start()

    def said(self, rank: int) -> str:
        return (self.own / f"said-{rank}").read_text()

    def require_success(self, timeout_s: float = 90) -> None:
        """Wait for the end of all ranks, which has to be a good one."""
        for rank in self.ranks:
            rank.join(timeout_s)
        assert not any(rank.exitcode for rank in self.ranks), "\n".join(map(self.said, range(len(self.ranks))))
        assert all(rank.exitcode == 0 for rank in self.ranks), "they do not end"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill what is left."""
        for rank in self.ranks:
            with suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGKILL)
            rank.join()


def _rank(own: Path, environ: dict[str, str], program: Program, arguments: Sequence[Any]) -> None:
    os.environ.update(environ)
    said = os.open(own / f"said-{environ['RANK']}", os.O_WRONLY | os.O_CREAT)
    os.dup2(said, 1)
    os.dup2(said, 2)
    program(*arguments)
