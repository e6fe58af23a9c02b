"""torchrun with concise output and exit codes: all its flags, the same ranks.

    python -m megatron_hetero.run --nproc-per-node 8 pretrain_vlm.py --config FILE ...

Our programs report once why they exit. The launcher adds nothing to that, nor to a requested stop; for a rank that dies
silently it prints one line. `--max-restarts` applies to ranks that were killed, lost a peer, or failed with an
exception, not to user errors, which would recur. SIGUSR1 is forwarded to the ranks too. The exit status:

    0      the ranks finished
    75     they were asked to stop and have saved: the same command resumes (EX_TEMPFAIL of sysexits.h)
    128+n  ended by signal n: 130 is Ctrl-C
    other  that of the first rank that failed; 128+n if signal n killed it

`LOGLEVEL=WARNING` restores torchrun's own logging.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_hetero.distributed.launch import STOPPED_FILE, ended
from megatron_hetero.environment.ranks import LAUNCHER, require_torch_settings, resolves
from megatron_hetero.errors import UserError

# torch is imported in `main`: it takes seconds that Ctrl-C may interrupt.
if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

STOPPED = 75
"""Exit status of ranks that stopped and saved on request."""
_MOST_SILENT_S = 15.0
_JOIN_S = 600.0
"""Seconds for all hosts to join, unless `--rdzv-conf join_timeout` is given; torch's default."""
_EXPECTED = (
    "Setting OMP_NUM_THREADS",
    "Sending process",
    "death signal, shutting down",
    "has failed to shutdown the rendezvous",
    "has failed to send a keep-alive heartbeat",
)
"""Parts of the messages that torch logs at every exit."""
_LOGGERS = (
    "torch.distributed.run",
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.elastic.rendezvous.dynamic_rendezvous",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    status: list[int] = []
    return ended(lambda: status.append(_launch(arguments))) or status[0]


def _launch(arguments: Sequence[str] | None) -> int:
    """Start the ranks of this host and wait for them. Returns the exit status. Raises `UserError`."""
    require_torch_settings()
    _require_log_level(os.environ.get("LOGLEVEL", "WARNING"))
    torchrun = _import_torchrun()
    parser = torchrun.get_args_parser()
    parser.prog = LAUNCHER
    signals = _signals_to_handle()
    parser.set_defaults(signals_to_handle=signals)
    parser.epilog = f"Unlike torchrun's, the default of --signals-to-handle here is {signals}."
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        if options.redirects == options.tee == "0":  # Nothing of use is written there.
            options.log_dir = options.log_dir or folder
        _require_startable(torchrun, options)
        stopped = Path(folder) / "stopped"
        os.environ[STOPPED_FILE] = str(stopped)
        status = _run(torchrun, options)
        return STOPPED if stopped.exists() and (status == 0 or status > 128) else status


def _signals_to_handle() -> str:
    """The signals forwarded to the ranks: torchrun's own, and a scheduler's warning. nohup ignores SIGHUP, which
    torchrun would undo.
    """
    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    passed = (signal.SIGTERM, signal.SIGINT, *hangup, signal.SIGQUIT, signal.SIGUSR1)
    return ",".join(number.name for number in passed)


def _import_torchrun() -> Any:
    """`torch.distributed.run`, without its expected log messages."""
    # Read when torch is imported. Its C++ code warns with a stack trace when a connection closes; in the ranks, which
    # keep the default, that may be informative.
    with _set_for_a_while("TORCH_CPP_LOG_LEVEL", "ERROR"):
        from torch.distributed import run

    if "LOGLEVEL" not in os.environ:
        for name in _LOGGERS:
            logging.getLogger(name).addFilter(_filter)
    return run


@contextlib.contextmanager
def _set_for_a_while(name: str, value: str) -> Iterator[None]:
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def _filter(record: logging.LogRecord) -> bool:
    """Whether torch logs a record: not if expected, and never with a traceback. A dead rank is reported here, even if
    the ranks are restarted.
    """
    record.exc_info = record.exc_text = None
    if not str(record.msg).startswith("failed (exitcode:"):
        return not any(part in str(record.msg) for part in _EXPECTED)
    match record.args:
        case (int(code), local_rank, pid, *_) if code < 0:
            more = ", possibly out of memory" if code == -signal.SIGKILL else ""
            how = f"was killed by {signal.Signals(-code).name}{more}"
            print(f"rank {local_rank} of {socket.gethostname()} (process {pid}) {how}", file=sys.stderr, flush=True)
    return False


def _require_startable(torchrun: Any, options: argparse.Namespace) -> None:
    """Check the command line. Raises `UserError`."""
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
        fix = "leave out --standalone, and say where the hosts meet (--rdzv-backend c10d --rdzv-endpoint HOST:PORT)"
        found, expected = f"--nnodes {options.nnodes}", "one host"
        raise UserError.at("--standalone", found=found, expected=expected, fix=fix)
    if config.rdzv_backend == "static" and not 0 <= options.node_rank < config.max_nodes:
        found, expected = str(options.node_rank), f"0 to {config.max_nodes - 1}, because --nnodes is {options.nnodes}"
        raise UserError.at("--node-rank", found=found, expected=expected, fix="count the hosts from 0")


def _require_log_level(name: str) -> None:
    """Check the variable `LOGLEVEL`. Raises `UserError`."""
    if name not in (levels := logging.getLevelNamesMapping()):
        found, expected = f"`{name}`", f"one of {', '.join(levels)}"
        fix = "set one of them, or unset it"
        raise UserError.at("environment variable LOGLEVEL", found=found, expected=expected, fix=fix)


def _run(torchrun: Any, options: argparse.Namespace) -> int:
    """Run torchrun. Returns the exit status. Raises `UserError`."""
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError

    from megatron_hetero.distributed.restarts import restarts_that_may_help

    waiting = _Waiting(options)
    try:
        with restarts_that_may_help():
            torchrun.run(options)
    except ChildFailedError as error:
        return _status_of(error)
    except SignalException as error:
        return 128 + error.sigval
    except RendezvousClosedError as error:
        if waiting.is_over():  # Our ranks have run; those of another host have reported why they failed.
            return 1
        raise waiting.problem(error) from None
    except (RendezvousError, DistError) as error:
        raise waiting.problem(error) from None
    except ValueError as error:  # Of an option that is read only now.
        if waiting.is_over():
            raise
        raise waiting.problem(error) from None
    finally:
        waiting.end()
    return 0


def _status_of(error: ChildFailedError) -> int:
    """The exit status of failed ranks. Reports the first one if it has not done so itself."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    rank, failure = error.get_first_failure()
    if isinstance(failure.message, dict):  # The rank has reported its error.
        if "TORCHELASTIC_ERROR_FILE" in os.environ:  # Requested by our parent process.
            get_error_handler().dump_error_file(failure.error_file, failure.exitcode)
    elif failure.exitcode > 0:
        print(f"rank {rank} on {socket.gethostname()} exited with status {failure.exitcode}", file=sys.stderr)
    return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode


class _Waiting:
    """Reports that the launcher waits for other hosts, until the ranks are started."""

    def __init__(self, options: argparse.Namespace):
        self._nodes = options.nnodes
        self._static = options.rdzv_backend == "static"
        self._where = options.rdzv_endpoint or f"{options.master_addr}:{options.master_port or 29500}"
        self._handler = signal.getsignal(signal.SIGTERM)
        self._start, self._ended = time.monotonic(), threading.Event()
        if self._nodes not in ("1", "1:1") and not options.standalone:
            first = min(_MOST_SILENT_S, _join_timeout(options) / 4)
            threading.Thread(target=self._report, args=(first,), name="waiting", daemon=True).start()

    def is_over(self) -> bool:
        """Whether ranks have been started: torch then handles signals."""
        return signal.getsignal(signal.SIGTERM) is not self._handler

    def end(self) -> None:
        """Stop reporting."""
        self._ended.set()

    def _report(self, next_s: float) -> None:
        while not self.is_over() and not self._ended.wait(0.2):
            if (waited := time.monotonic() - self._start) > next_s:
                next_s = 2 * waited
                print(f"waiting for other hosts since {waited:.0f} s: {self._expected()}", file=sys.stderr, flush=True)

    def _expected(self) -> str:
        host = self._where.rpartition(":")[0] or self._where
        unknown = "" if resolves(host.strip("[]")) else " (whose name does not resolve)"
        return f"--nnodes {self._nodes} at {self._where}{unknown}"

    def problem(self, error: Exception) -> UserError:
        """The error if the hosts did not meet, or lost the connection."""
        found = f"{type(error).__name__}, {error}".splitlines()[0].rstrip(".")
        if self.is_over():
            return UserError.at(
                f"rendezvous of the hosts, {self._expected()}",
                problem=f"connection lost ({found})",
                fix="look for the first error on another host",
            )
        address = "--master-addr and --master-port" if self._static else "--rdzv-endpoint and --rdzv-id"
        return UserError.at(
            f"rendezvous of the hosts, {self._expected()}",
            problem=f"not all hosts joined within {time.monotonic() - self._start:.0f} s ({found})",
            fix=f"start the same command on each, with the same {address}, one that all can reach",
        )


def _join_timeout(options: argparse.Namespace) -> float:
    """From `--rdzv-conf`, else torch's default."""
    said = dict(pair.partition("=")[::2] for pair in options.rdzv_conf.split(",")).get("join_timeout", "")
    return float(said) if said.isdecimal() else _JOIN_S


if __name__ == "__main__":
    raise SystemExit(main())
