"""Makes `nccl_rules` and `host_rules` backends of `torch.distributed` in this process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_hetero.groups.watchdog import Watchdog
from megatron_hetero.train.trainer import Trainer
from tests.support.nccl_rules.client import DEVICE, HOST, Client
from tests.support.nccl_rules.group import CPU, WORLD, RulesGroup


def install(connection: Connection, store: dist.Store, rank: int, ranks: int) -> Client:
    """Register the backends. The client begins jobs, and ends them."""
    client = Client(connection, store, rank, ranks)
    # PyTorch's recorder, from 2.15 on of every backend, does not know groups of Python.
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
    # That of 2.14 takes no group of Python to split from.
    dist.distributed_c10d._DistributedBackendOptions = SimpleNamespace  # pyright: ignore[reportAttributeAccessIssue]
    dist.Backend.register_backend(DEVICE, _creator(client, on_device=True), extended_api=True, devices=["cpu"])
    dist.Backend.register_backend(HOST, _creator(client, on_device=False), extended_api=True, devices=["cpu"])
    for name, replaced in {"split_group": _with_accelerator(dist.split_group), "batch_isend_irecv": _batch}.items():
        for module in (dist, dist.distributed_c10d):
            setattr(module, name, replaced)
    _follow_actions(client)
    _follow_steps(client)
    return client


def _creator(client: Client, *, on_device: bool) -> Callable[[Any, Any], RulesGroup]:
    def create(options: Any, _: Any) -> RulesGroup:
        ranks = tuple(options.global_ranks_in_group) or client.ranks
        if not dist.is_initialized():
            return RulesGroup(client, WORLD, ranks, options.store)
        key, world = f"{options.group_id}:{','.join(map(str, ranks))}", dist.group.WORLD
        assert isinstance(world, RulesGroup)
        if on_device:
            return RulesGroup(client, key, ranks, options.store, parent=world)
        return RulesGroup(client, key, ranks, options.store, on_device=False).make()

    return create


def _with_accelerator(split_group: Callable[..., Any]) -> Callable[..., Any]:
    """`dist.split_group` asks for the backend of an accelerator."""

    def split(*args: Any, **options: Any) -> Any:
        with (
            mock.patch.object(torch.accelerator, "is_available", lambda: True),  # noqa: PT008 (called with what it ignores)
            mock.patch.object(torch.accelerator, "current_accelerator", lambda: CPU),  # noqa: PT008 (called with what it ignores)
        ):
            return split_group(*args, **options)

    return split


def _batch(operations: list[dist.P2POp]) -> list[Any]:
    """`dist.batch_isend_irecv`, which coalesces on process groups that are not of Python only."""
    group: Any = operations[0].group or dist.group.WORLD
    with dist.distributed_c10d._coalescing_manager(group, CPU, async_ops=True) as manager:
        for operation in operations:
            peer = "group_dst" if operation.op is dist.isend else "group_src"
            operation.op(operation.tensor, group=group, **{peer: operation.group_peer})
    return manager.works


def _follow_actions(client: Client) -> None:
    """Know what the runner does, which it tells its watchdog."""
    real = Watchdog.doing

    @contextlib.contextmanager
    def doing(self: Watchdog, described: Callable[[], str], timeout_s: float | None = None) -> Iterator[None]:
        client.actions.described = described
        try:
            with real(self, described, timeout_s):
                yield
        finally:
            client.actions.described = None

    Watchdog.doing = doing


def _follow_steps(client: Client) -> None:
    """Know when the program is in a step, or in what a step does first."""

    def within(real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **options: Any) -> Any:
            outside, client.in_step = client.in_step, True
            try:
                return real(*args, **options)
            finally:
                client.in_step = outside

        return step

    Trainer.issue_step = within(Trainer.issue_step)
    Trainer.read_step = within(Trainer.read_step)
    Trainer.gradients = within(Trainer.gradients)
