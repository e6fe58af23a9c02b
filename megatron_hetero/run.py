"""torchrun with concise output and exit codes: its flags, the same ranks, one meeting of all hosts and no restarts.

    python -m megatron_hetero.run --nproc-per-node 8 pretrain_vlm.py --config FILE ...

One host meets on its loopback interface, several at `--master-addr` and `--master-port`. A run that fails ends on all
hosts; a scheduler starts it again (examples/slurm/requeue.sbatch). Our programs report once why they exit. The launcher
adds nothing to that, nor to a requested stop; for a rank that dies silently it prints one line. SIGUSR1 is forwarded to
the ranks too. The exit status:

    0      the ranks finished
    70     a rank failed with an exception, hung, or lost another one: another start may fare better (EX_SOFTWARE)
    75     they were asked to stop and have saved: the same command resumes (EX_TEMPFAIL of sysexits.h)
    128+n  ended by signal n: 130 is Ctrl-C
    other  that of the first rank that failed, 1 for a user error; 128+n if signal n killed it

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

from megatron_hetero.base.environment import LAUNCHER, MOST_PORT
from megatron_hetero.base.errors import UserError
from megatron_hetero.groups.launch import FINAL, STOPPED_FILE, ended, hide_stack_traces

# torch is imported in `main`: it takes seconds that Ctrl-C may interrupt.
if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

FAILED = 70
"""Exit status of ranks that failed for a reason that may be gone at the next start."""
STOPPED = 75
"""Exit status of ranks that stopped and saved on request."""
_JOIN_S = 600
"""Seconds for all hosts to join, unless `--rdzv-conf timeout` is given; torch's default."""
_PORT = 29500
"""Of the first of several hosts, unless given; torch's default."""
_LOGGERS = (
    "torch.distributed.run",
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.multiprocessing.api",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    status: list[int] = []
    return ended(lambda: status.append(_launch(arguments))) or status[0]


def _launch(arguments: Sequence[str] | None) -> int:
    """Start the ranks of this host and wait for them. Returns the exit status. Raises `UserError`."""
    torchrun = _import_torchrun()
    parser = torchrun.get_args_parser()
    parser.prog = LAUNCHER
    signals = _signals_to_handle()
    parser.set_defaults(signals_to_handle=signals)
    parser.epilog = (
        f"Unlike torchrun's, the default of --signals-to-handle here is {signals}; hosts meet by static rendezvous "
        "alone, and ranks are not restarted."
    )
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        if options.redirects == options.tee == "0":  # Nothing of use is written there.
            options.log_dir = options.log_dir or folder
        config = _checked(torchrun, options)
        stopped = Path(folder) / "stopped"
        os.environ[STOPPED_FILE] = str(stopped)
        # Until the end: the store lives as long as somebody holds it.
        store = _serve(options) if config.max_nodes == 1 else _meet(options, config)
        status = _run(torchrun, options)
        if stopped.exists() and (status == 0 or status > 128):
            status = STOPPED
        del store
        return status


def _signals_to_handle() -> str:
    """The signals forwarded to the ranks: torchrun's own, and a scheduler's warning. nohup ignores SIGHUP, which
    torchrun would undo.
    """
    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    passed = (signal.SIGTERM, signal.SIGINT, *hangup, signal.SIGQUIT, signal.SIGUSR1)
    return ",".join(number.name for number in passed)


def _import_torchrun() -> Any:
    """`torch.distributed.run`, without its log messages: how ranks end is reported here."""
    hide_stack_traces()
    from torch.distributed import run

    if "LOGLEVEL" not in os.environ:
        for name in _LOGGERS:
            logging.getLogger(name).setLevel(logging.CRITICAL)
    return run


def _checked(torchrun: Any, options: argparse.Namespace) -> Any:
    """torchrun's configuration from the command line. Raises `UserError`."""
    script = options.training_script
    if not (options.module or options.no_python or Path(script).is_file()):
        raise UserError.at(script, problem="no such file", fix="correct the path of the training program")
    try:
        config, *_ = torchrun.config_from_args(options)
    except (AssertionError, OSError, RuntimeError, ValueError) as error:
        raise UserError.at(LAUNCHER, problem=str(error).rstrip("."), fix="see --help") from None
    if config.nproc_per_node < 1:
        found, expected = str(config.nproc_per_node), "1 or more ranks on this host"
        raise UserError.at("--nproc-per-node", found=found, expected=expected, fix="correct or remove it")
    if options.standalone and config.max_nodes > 1:
        found, fix = f"--nnodes {options.nnodes}", "leave out --standalone"
        raise UserError.at("--standalone", found=found, expected="one host", fix=fix)
    _require_static(options, config)
    return config


def _require_static(options: argparse.Namespace, config: Any) -> None:
    """Check that hosts meet once, and that ranks are started once. Raises `UserError`."""
    if config.max_restarts > 0:
        raise UserError.at(
            "--max-restarts",
            found=str(config.max_restarts),
            expected="none",
            because="a run that fails ends on all hosts, and its next start resumes from the newest checkpoint",
            fix="leave it out, and have a scheduler start the command again, as examples/slurm/requeue.sbatch does",
        )
    if config.rdzv_backend != "static" or config.min_nodes != config.max_nodes:
        raise UserError.at(
            "--rdzv-backend and --nnodes",
            found=f"{config.rdzv_backend} and {options.nnodes}",
            expected="static and one number",
            because="hosts meet once",
            fix="leave both out on one host; give each of several --nnodes N --node-rank I --master-addr HOST",
        )
    if not 0 <= options.node_rank < config.max_nodes:
        found, expected = str(options.node_rank), f"0 to {config.max_nodes - 1}, because --nnodes is {options.nnodes}"
        raise UserError.at("--node-rank", found=found, expected=expected, fix="count the hosts from 0")


def _serve(options: argparse.Namespace) -> dist.Store:
    """The store of a run on this host alone, which torchrun finds in this process. It listens at one address, by
    default of the loopback interface; torch's own listens on all interfaces. Raises `UserError`.
    """
    from torch.distributed import TCPStore

    where, host, port = _place(options, 0)
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        server = socket.create_server(address[:2], family=family)
    except (OSError, OverflowError, UnicodeError) as error:
        # Python adds the address to what the system says.
        number = getattr(error, "errno", None) or 0
        why = os.strerror(number).lower() if number > 0 else str(error)
        fix = "choose another port or an address of this host, or leave it out"
        raise UserError.at(where, problem=f"cannot be opened ({why})", fix=fix) from None
    host, port = server.getsockname()[:2]
    options.standalone, options.rdzv_endpoint = False, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return TCPStore(host, port, 1, True, multi_tenant=True, master_listen_fd=server.detach())


def _meet(options: argparse.Namespace, config: Any) -> dist.Store:
    """The store of a run on several hosts, once all have come. Raises `UserError`."""
    from megatron_hetero.groups.launch import Place, gather

    where, host, port = _place(options, _PORT)
    if not port:
        raise UserError.at(where, found="port 0", expected="one that all hosts know", fix="choose a port")
    try:
        timeout_s = float(config.rdzv_configs.get("timeout", _JOIN_S))
    except ValueError as error:
        raise UserError.at("--rdzv-conf timeout", problem=str(error), fix="give seconds") from None
    store = Place(host, port, where, "host 0", timeout_s).connect(serves=options.node_rank == 0)
    gather(store, "host", options.node_rank, config.max_nodes, timeout_s)
    return store


def _place(options: argparse.Namespace, port: int) -> tuple[str, str, int]:
    """Where the store is, for messages, and its host and port; `port` unless the user gives one. Raises `UserError`."""
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    host, named = options.master_addr.strip("[]"), "--master-addr and --master-port"
    port = port if options.master_port is None else options.master_port
    try:
        if options.rdzv_endpoint:
            named = "--rdzv-endpoint"
            host, port = parse_rendezvous_endpoint(options.rdzv_endpoint, port)
    except ValueError as error:
        raise UserError.at(named, problem=str(error).rstrip("."), fix="write HOST:PORT") from None
    if not 0 <= port <= MOST_PORT:  # The system would take another.
        raise UserError.at(named, found=str(port), expected=f"a port of at most {MOST_PORT}", fix="choose another port")
    return f"{named}, {host}:{port}", host, port


def _run(torchrun: Any, options: argparse.Namespace) -> int:
    """Run torchrun. Returns the exit status. Raises `UserError`."""
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
    except ValueError as error:  # Of an option that is read only now.
        raise UserError.at(LAUNCHER, problem=str(error).rstrip("."), fix="see --help") from None
    return 0


def _status_of(error: ChildFailedError) -> int:
    """The exit status of failed ranks. Reports the first one if it has not done so itself."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    rank, failure = error.get_first_failure()
    if isinstance(failure.message, dict):  # The rank has reported its error.
        if "TORCHELASTIC_ERROR_FILE" in os.environ:  # Requested by our parent process.
            get_error_handler().dump_error_file(failure.error_file, failure.exitcode)
        if failure.exitcode == 1 and not failure.message.get("extraInfo", {}).get(FINAL):
            return FAILED
    else:
        how = f"exited with status {failure.exitcode}"
        if failure.exitcode < 0:
            more = ", possibly out of memory" if failure.exitcode == -signal.SIGKILL else ""
            how = f"was killed by {signal.Signals(-failure.exitcode).name}{more}"
        print(f"rank {rank} of {socket.gethostname()} (process {failure.pid}) {how}", file=sys.stderr)
    return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode


if __name__ == "__main__":
    raise SystemExit(main())
