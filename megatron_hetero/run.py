"""A launcher with torchrun's flags and ranks, but concise output and informative exit statuses.

    python -m megatron_hetero.run --nproc-per-node 8 pretrain_vlm.py --config FILE ...

Our programs report once why they exit. The launcher adds one line only for a rank that dies silently. Restarts are left
to the scheduler (examples/slurm/requeue.sbatch). SIGUSR1 is forwarded to the ranks too. Exit status:

    0      the ranks finished
    70     a rank failed with an exception, hung, or lost another one: the next start may succeed (EX_SOFTWARE)
    75     the ranks stopped and saved on request: the same command resumes (EX_TEMPFAIL of sysexits.h)
    128+n  ended by signal n: 130 is Ctrl-C
    other  status of the first rank that failed: 1 for a user error, 128+n if signal n killed it

`LOGLEVEL=WARNING` restores torchrun's own logging.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_hetero.base.environment import LAUNCHER
from megatron_hetero.base.errors import UserError
from megatron_hetero.groups.launch import FAILED, STOPPED_FILE, connect, ended, hide_stack_traces, join

# Functions import torch, so that Ctrl-C may interrupt the import, which takes seconds.
if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

STOPPED = 75
"""Exit status of ranks that stopped and saved on request."""
_JOIN_S = 600
"""Default time-out in seconds for all hosts to join, as in torch (`--rdzv-conf timeout`)."""
_PORT = 29500
"""Default port on the first host of a run on several hosts, as in torch."""
_LOGGERS = (
    "torch.distributed.run",
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.multiprocessing.api",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    status: list[int] = []
    return ended(lambda: status.append(_launch(arguments))) or status[0]


def _launch(arguments: Sequence[str] | None) -> int:
    """Start the ranks of this host and wait for them. Returns the exit status. Raises `UserError`."""
    torchrun = _import_torchrun()
    parser = torchrun.get_args_parser()
    parser.prog = LAUNCHER
    signals = _signals_to_handle()
    parser.set_defaults(signals_to_handle=signals)
    parser.epilog = f"Unlike torchrun's, the default of --signals-to-handle here is {signals}."
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        if options.redirects == options.tee == "0":  # torchrun would leave empty folders behind.
            options.log_dir = options.log_dir or folder
        stopped = Path(folder) / "stopped"
        os.environ[STOPPED_FILE] = str(stopped)
        # The store must exist until the ranks have ended.
        store = _store(torchrun, options)
        status = _run(torchrun, options)
        if stopped.exists() and (status == 0 or status > 128):
            status = STOPPED
        del store
        return status


def _signals_to_handle() -> str:
    """Return the names of signals to forward to the ranks: torchrun's, and SIGUSR1, with which schedulers warn. Under
    nohup SIGHUP is omitted, since torchrun would no longer ignore it.
    """
    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    passed = (signal.SIGTERM, signal.SIGINT, *hangup, signal.SIGQUIT, signal.SIGUSR1)
    return ",".join(number.name for number in passed)


def _import_torchrun() -> Any:
    """Import `torch.distributed.run` and silence its log messages."""
    hide_stack_traces()
    from torch.distributed import run

    if "LOGLEVEL" not in os.environ:
        for name in _LOGGERS:
            logging.getLogger(name).setLevel(logging.CRITICAL)
    return run


def _store(torchrun: Any, options: argparse.Namespace) -> dist.Store | None:
    """Return the store of all hosts once they have joined, or None if torchrun creates a store. Raises `UserError`."""
    from torch.distributed import TCPStore
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    try:
        config, *_ = torchrun.config_from_args(options)
        timeout_s = float(config.rdzv_configs.get("timeout", _JOIN_S))
        host, port = parse_rendezvous_endpoint(config.rdzv_endpoint.replace(":None", ""), _PORT)
    except (AssertionError, OSError, RuntimeError, ValueError) as error:
        raise UserError.at(LAUNCHER, problem=str(error).rstrip("."), fix="see --help") from None
    if config.nproc_per_node < 1:
        found, expected = str(config.nproc_per_node), "1 or more ranks on this host"
        raise UserError.at("--nproc-per-node", found=found, expected=expected, fix="correct or remove it")
    named = options.rdzv_endpoint or options.master_port is not None or options.master_addr != "127.0.0.1"
    if config.max_nodes == 1 and not named:
        # Listen on a free port of the loopback interface: torchrun's store would listen on all interfaces.
        server = socket.create_server(("127.0.0.1", 0))
        port = server.getsockname()[1]
        options.standalone, options.rdzv_endpoint = False, f"127.0.0.1:{port}"
        return TCPStore("127.0.0.1", port, 1, True, multi_tenant=True, master_listen_fd=server.detach())
    if config.rdzv_backend != "static":
        return None
    setting = "--rdzv-endpoint" if options.rdzv_endpoint else "--master-addr and --master-port"
    store = connect(host, port, setting, serves=options.node_rank == 0, timeout_s=timeout_s)
    join(store, "host", options.node_rank, config.max_nodes, timeout_s)
    return store


def _run(torchrun: Any, options: argparse.Namespace) -> int:
    """Run torchrun and return the exit status. Raises `UserError`."""
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        torchrun.run(options)
    except ChildFailedError as error:
        return _status_of(error)
    except SignalException as error:
        return 128 + error.sigval
    except DistError as error:
        found = f"{type(error).__name__}, {error}".splitlines()[0].rstrip(".")
        print(f"{socket.gethostname()} lost the store of the hosts: {found}", file=sys.stderr)
        return FAILED
    except ValueError as error:  # The value of an option is wrong.
        raise UserError.at(LAUNCHER, problem=str(error).rstrip("."), fix="see --help") from None
    return 0


def _status_of(error: ChildFailedError) -> int:
    """Return the exit status of the first rank that failed, and report the failure if that rank has not."""
    rank, failure = error.get_first_failure()
    if not isinstance(failure.message, dict):  # The rank has not reported its error.
        how = f"exited with status {failure.exitcode}"
        if failure.exitcode < 0:
            more = ", possibly out of memory" if failure.exitcode == -signal.SIGKILL else ""
            how = f"was killed by {signal.Signals(-failure.exitcode).name}{more}"
        print(f"rank {rank} of {socket.gethostname()} (process {failure.pid}) {how}", file=sys.stderr)
    return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode


if __name__ == "__main__":
    raise SystemExit(main())
