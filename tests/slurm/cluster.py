"""A Slurm of three nodes on this machine, in namespaces of its own: of processes, mounts and the network. Nothing
listens outside, and the end of its first process ends everything.

Nodes have their own names, which do not resolve, and eight GPUs each, which are files.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

NODES = ("n1", "n2", "n3")
GPUS = 8
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "unshare", "nsenter", "ip")
CONF = """\
ClusterName=scripts
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=16817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=@/munge.socket
StateSaveLocation=@/state
SlurmdSpoolDir=@/spool.%n
SlurmctldPidFile=@/slurmctld.pid
SlurmdPidFile=@/slurmd.%n.pid
SlurmctldLogFile=@/slurmctld.log
SlurmdLogFile=@/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SlurmdTimeout=20
MessageTimeout=10
GresTypes=gpu
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n[1-3] NodeHostname=localhost NodeAddr=10.77.0.[1-3] Port=[16821-16823] CPUs=64 RealMemory=20000 Gres=gpu:8
PartitionName=main Nodes=ALL Default=YES PriorityTier=10 PreemptMode=OFF
PartitionName=spare Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
"""
START = """\
set -eu
ip link set lo up
# Slurm looks up names only where there is an address besides 127.0.0.0/8.
for i in 1 2 3; do ip address add 10.77.0.$i/32 dev lo; done
mount --bind @/hosts /etc/hosts
munged --force --key-file @/munge.key --socket @/munge.socket --pid-file @/munged.pid --log-file @/munged.log \
    --seed-file @/munged.seed
slurmctld -D &
for n in n1 n2 n3; do unshare --uts bash -c "hostname $n.invalid; exec slurmd -D -N $n" & done
wait
"""


def why_not() -> str | None:
    """Why no cluster can be brought up here."""
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"{', '.join(missing)} not installed (Debian: slurmctld, slurmd, slurm-client, munge, iproute2)"
    return None if os.geteuid() == 0 else "namespaces and slurmd want root"


@dataclass(frozen=True)
class Cluster:
    """`folder`: configuration and logs; `work`: where jobs are submitted; `first`: the first process."""

    folder: Path
    work: Path
    first: psutil.Process

    @staticmethod
    @contextlib.contextmanager
    def up(folder: Path, work: Path) -> Iterator[Cluster]:
        """A cluster that is gone after the context."""
        for name in ("state", "dev", *(f"spool.{node}" for node in NODES)):
            (folder / name).mkdir(parents=True)
        files = {"slurm.conf": CONF, "gres.conf": f"Name=gpu File=@/dev/gpu[0-{GPUS - 1}]\n", "start": START}
        for name, text in files.items():
            (folder / name).write_text(text.replace("@/", f"{folder}/"))
        for gpu in range(GPUS):
            (folder / f"dev/gpu{gpu}").touch()
        (folder / "hosts").write_text("127.0.0.1 localhost\n")
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)
        spaces = "--mount --net --pid --fork --kill-child --mount-proc".split()
        with open(folder / "start.log", "w") as log:
            process = subprocess.Popen(
                ["unshare", *spaces, "bash", str(folder / "start")],
                env=os.environ | {"SLURM_CONF": str(folder / "slurm.conf")},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            cluster = Cluster(folder, work, _only_child(process.pid))
            _until(lambda: cluster.call("sinfo", "-h", "-t", "idle", "-o", "%D", check=False).strip() == "3", 30)
            yield cluster
        finally:
            process.kill()
            process.wait()

    @property
    def _entered(self) -> list[str]:
        spaces = "--mount --net --pid".split()
        return ["nsenter", "--target", str(self.first.pid), *spaces, "env", f"--chdir={self.work}"]

    def call(self, *command: str, check: bool = True, environment: Mapping[str, str] | None = None) -> str:
        """What a command prints in the cluster."""
        own = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "HF_", "OMP_"))}
        done = subprocess.run(
            [*self._entered, *command],
            env=own | {"SLURM_CONF": str(self.folder / "slurm.conf"), "OMP_NUM_THREADS": "1"} | dict(environment or {}),
            capture_output=True,
            text=True,
        )
        if check and done.returncode:
            raise AssertionError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
        return done.stdout

    def submit(self, script: str, *flags: str, sbatch: str = "", **environment: str) -> str:
        """The id of a job; `sbatch`: that program's flags."""
        script = f"examples/slurm/{script}"
        return self.call("sbatch", "--parsable", *sbatch.split(), script, *flags, environment=environment).strip()

    def record(self, job: str) -> dict[str, str]:
        """What Slurm knows of a job, or of the task of an array: JobState, Restarts, StdOut …"""
        words = self.call("scontrol", "show", "job", "--oneliner", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def output(self, job: str) -> str:
        """What a job has printed."""
        path = Path(self.record(job)["StdOut"])
        return path.read_text() if path.exists() else ""

    def wait(self, job: str, state: str, restarts: int = 0, timeout_s: float = 400) -> None:
        """Until a job has a state, after `restarts` restarts."""

        ended: list[bool] = []

        def reached() -> bool:
            record = self.record(job)
            found = record["JobState"]
            # A job that is being queued again may look like one that has ended.
            ended.append(found in ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL"))
            if found != state and len(ended) >= 10 and all(ended[-10:]):
                raise AssertionError(f"job {job} is {found}, not {state}:\n{self.output(job)}")
            return found == state and int(record["Restarts"]) == restarts

        _until(reached, timeout_s, lambda: f"{self.record(job)}\n{self.output(job)}")

    def wait_for(self, job: str, text: str, timeout_s: float = 300) -> None:
        """Until a job has printed `text`, a regular expression."""
        _until(lambda: re.search(text, self.output(job)) is not None, timeout_s, lambda: self.output(job))

    def start_again(self, job: str, restarts: int = 1) -> None:
        """A job that was queued again runs now, for long enough; Slurm would have it wait for two minutes."""
        self.wait(job, "PENDING", restarts)
        time.sleep(2.0)  # Slurm counts in seconds: a job that starts in the second of its end is "revoked".
        self.call("scontrol", "update", f"jobid={job}", "StartTime=now", "TimeLimit=60")

    def ranks(self, job: str) -> list[psutil.Process]:
        """The ranks of a job that live, in order."""
        found = {}
        for process in self.first.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                own = process.environ()
                # Workers of a loader have the environment of their rank.
                if own.get("SLURM_JOB_ID") == job and "LOCAL_RANK" in own and "LOCAL_RANK" not in _parent(process):
                    found[int(own["RANK"]), process.pid] = process
        return [found[key] for key in sorted(found)]

    def kill_node(self, node: str) -> None:
        """Kill everything on a node."""
        children = self.first.children(recursive=True)
        slurmd = next(p for p in children if p.cmdline() == ["slurmd", "-D", "-N", node])
        names = os.readlink(f"/proc/{slurmd.pid}/ns/uts")
        for process in children:
            with contextlib.suppress(OSError, psutil.Error):
                if os.readlink(f"/proc/{process.pid}/ns/uts") == names:
                    process.send_signal(signal.SIGKILL)


def _parent(process: psutil.Process) -> dict[str, str]:
    """The environment of a process's parent."""
    parent = process.parent()
    return parent.environ() if parent else {}


def _only_child(pid: int) -> psutil.Process:
    """Of a process that has just been started."""
    found: list[psutil.Process] = []
    _until(lambda: bool(found.extend(psutil.Process(pid).children()) or found), 10)
    return found[0]


def _until(reached: Callable[[], bool], timeout_s: float, found: Callable[[], str] = str) -> None:
    """Wait; `found` is told where that takes too long."""
    end = time.monotonic() + timeout_s
    while not reached():
        if time.monotonic() > end:
            raise AssertionError(f"not reached in {timeout_s:.0f} s; found {found()}")
        time.sleep(0.3)
