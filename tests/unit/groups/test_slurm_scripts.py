"""The job scripts in examples/slurm: what they start, and what they refuse. Slurm's programs and the interpreter are
stood in for; `make slurm` runs the scripts on a Slurm.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_hetero.config.schema import load_config
from megatron_hetero.layout.modules import resolve
from tests.support.shapes import shapes_of_folder

EXAMPLES = Path(__file__).parents[3] / "examples"
SCRIPTS = ("disjoint.sbatch", "many_nodes.sbatch", "one_node.sbatch", "requeue.sbatch")
NODES = {"disjoint.sbatch": 3, "many_nodes.sbatch": 2, "one_node.sbatch": 1, "requeue.sbatch": 2}
MEETING = "--master-addr 10.0.0.0 --master-port 20007"
"""What torchrun is told on each of several nodes of where they meet."""
SRUN = """\
worst=0 nodes=$SLURM_JOB_NUM_NODES
while [[ $1 == -* ]]; do echo "$1" >>FOLDER/srun_flags; [[ $1 != --nodes=1 ]] || nodes=1; shift; done
gpus=($GPUS_OF_NODES)
for ((i = 0; i < nodes; i++)); do
    here="SLURM_NODEID=$i SLURM_GPUS_ON_NODE=${gpus[i]:-$SLURM_GPUS_ON_NODE}"
    status=0
    if [[ ${SLURM_EXPORT_ENV:-ALL} == ALL ]]; then env $here "$@"; else env -i PATH="$PATH" $here "$@"; fi || status=$?
    ((status <= worst)) || worst=$status
done
exit $worst
"""
"""On one node after the other, with what `sbatch --export` lets through."""
SCONTROL = """\
case "$1 $2" in
    "show hostnames") for ((i = 0; i < SLURM_JOB_NUM_NODES; i++)); do echo node$i; done ;;
    "show node") for ((i = 0; i < SLURM_JOB_NUM_NODES; i++)); do
        echo "NodeName=node$i Arch=x86_64 NodeAddr=10.0.0.$i NodeHostName=node$i.cluster Version=22.05.8"
    done ;;
    "show job") cat FOLDER/job ;;
    *) echo "$@" >>FOLDER/asked ;;
esac
"""
PYTHON = """\
if [[ " $* " == *" --plan "* ]]; then echo a long plan; exec bash FOLDER/plan "$@"; fi
printf '%s\\n' "$@" >FOLDER/node$SLURM_NODEID
env >FOLDER/environment
exec bash FOLDER/train
"""


@dataclass(frozen=True)
class Cluster:
    """A folder that jobs are submitted from. `plan` and `train` in it are bash scripts, for what the program does with
    `--plan` and what torchrun does; `job` is what Slurm knows of the job.
    """

    folder: Path

    def run(self, script: str, *flags: str, **job: str) -> subprocess.CompletedProcess[str]:
        """A job, in the end."""
        given = {
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NUM_NODES": str(NODES[script]),
            "SLURM_JOB_NODELIST": "node[0-9]",
            "SLURM_GPUS_ON_NODE": "8",
            "SLURM_SUBMIT_DIR": str(self.folder),
            "CHECKPOINTS": "runs/first",
            "PATH": f"{self.folder}:{os.environ['PATH']}",
        }
        own = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "HF_", "OMP_"))}
        return subprocess.run(
            ["bash", str(EXAMPLES / "slurm" / script), *flags],
            env={name: value for name, value in (own | given | job).items() if value},
            capture_output=True,
            text=True,
        )

    def started(self, script: str, *flags: str, **job: str) -> list[str]:
        """The command line of a job's first torchrun."""
        done = self.run(script, *flags, **job)
        assert done.returncode == 0, done.stderr
        return self.node(0)

    def refused(self, script: str, *flags: str, **job: str) -> str:
        """What a job says that does not start any rank."""
        done = self.run(script, *flags, **job)
        assert done.returncode == 1 and not (self.folder / "node0").exists()
        return done.stderr

    def node(self, number: int) -> list[str]:
        """The command line of the torchrun on a node."""
        return (self.folder / f"node{number}").read_text().splitlines()


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, ".venv/bin/python": PYTHON}.items():
        (tmp_path / name).write_text("#!/bin/bash\n" + text.replace("FOLDER", str(tmp_path)))
        (tmp_path / name).chmod(0o755)
    for name in ("plan", "train", "job"):
        (tmp_path / name).touch()
    (tmp_path / "examples").symlink_to(EXAMPLES)
    return Cluster(tmp_path)


def after(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def own_flags(words: list[str]) -> list[str]:
    """Those of pretrain_vlm.py."""
    return words[words.index("pretrain_vlm.py") + 1 :]


def in_seconds(seconds: int) -> str:
    """A time from now, as Slurm writes it."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + seconds))


def test_every_script_is_tested() -> None:
    assert sorted(path.name for path in EXAMPLES.glob("slurm/*.sbatch")) == sorted(SCRIPTS)


# -------------------------------------------------------------------------------------------------------- starting


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_torchrun_starts_on_every_node(script: str, cluster: Cluster) -> None:
    """Nodes meet at the address that Slurm has for the first one, and no host name needs to resolve."""
    cluster.started(script, "--train.iters", "5")
    for number in range(NODES[script]):
        words = cluster.node(number)
        assert after(words, "--nnodes") == str(NODES[script]) and after(words, "--nproc-per-node") == "8"
        assert after(words, "--local-addr") == f"10.0.0.{number}"
        assert after(words, "--node-rank") == str(number) and (MEETING in " ".join(words)) == (NODES[script] > 1)
        assert "--train.iters 5" in " ".join(own_flags(words))
    assert not (cluster.folder / f"node{NODES[script]}").exists()


def test_the_disjoint_job_gives_modules_nodes_of_their_own(cluster: Cluster) -> None:
    flags = "--config", str(EXAMPLES / "qwen2_5_vl_32b.yaml")
    words = cluster.started("disjoint.sbatch", *flags, SLURM_JOB_NUM_NODES="6", VISION_NODES="2", TEXT="tp:8,pp:2")
    config = load_config(own_flags(words))
    shapes = shapes_of_folder(EXAMPLES / "models/qwen2_5_vl_32b").module_shapes()
    layouts = resolve({name: row.parallel for name, row in config.modules.items()}, shapes, 48)
    assert str(layouts["vision"]) == "sp:8,dp:2@0-15"
    assert str(layouts["text"]) == "tp:8,dp:2,pp:2@16-47"


@pytest.mark.parametrize("script", SCRIPTS)
def test_steps_get_the_environment_and_the_cores_of_the_job(script: str, cluster: Cluster) -> None:
    """After `sbatch --export=CHECKPOINTS` too."""
    cluster.started(script, SLURM_EXPORT_ENV="CHECKPOINTS", SLURM_CPUS_PER_TASK="64")
    environment = (cluster.folder / "environment").read_text().splitlines()
    assert {"SRUN_CPUS_PER_TASK=64", "HF_HUB_OFFLINE=1", "OMP_NUM_THREADS=4"} <= set(environment)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_cluster_without_gpus(script: str, cluster: Cluster) -> None:
    said = cluster.refused(script, SLURM_GPUS_ON_NODE="")
    assert "RANKS_PER_NODE: found it unset and no GPUs" in said and said.count("\n") == 1
    assert after(cluster.started(script, SLURM_GPUS_ON_NODE="", RANKS_PER_NODE="3"), "--nproc-per-node") == "3"


def test_flags_of_srun_and_the_interpreter_are_open_to_a_container(cluster: Cluster) -> None:
    shutil.move(cluster.folder / ".venv/bin/python", cluster.folder / "contained")
    cluster.started(
        "many_nodes.sbatch", SRUN_FLAGS="--container-image=a.sqsh --container-mounts=/d", PYTHON="contained"
    )
    flags = (cluster.folder / "srun_flags").read_text().split()
    assert flags.count("--container-image=a.sqsh") == flags.count("--container-mounts=/d") == 2, "with the check"


# -------------------------------------------------------------------------------------------------------- refusing


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    "job, said",
    [
        ({"SLURM_NTASKS": "16"}, "sbatch --ntasks, --ntasks-per-node: found 16 tasks on "),
        ({"RANKS_PER_NODE": "four"}, "RANKS_PER_NODE: found four, expected a number"),
        ({"SWEEP": "sweep"}, "SWEEP: found sweep without an array"),
        ({"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "1", "SWEEP": "sweep"}, "sweep, "),
        ({"SLURM_SUBMIT_DIR": "/"}, "not from /"),
    ],
    ids=["tasks", "ranks", "no array", "no file", "elsewhere"],
)
def test_a_job_that_cannot_run_is_refused_in_a_sentence(
    script: str, job: dict[str, str], said: str, cluster: Cluster
) -> None:
    told = cluster.refused(script, **job)
    assert said in told and told.startswith("error: ") and told.count("\n") == 1


def test_one_node_is_one(cluster: Cluster) -> None:
    said = cluster.refused("one_node.sbatch", SLURM_JOB_NUM_NODES="2")
    assert said.startswith("error: sbatch --nodes: found 2, expected 1") and "many_nodes.sbatch" in said


def test_the_disjoint_job_leaves_nodes_for_both_modules(cluster: Cluster) -> None:
    assert "found 1 of 1 nodes" in cluster.refused("disjoint.sbatch", SLURM_JOB_NUM_NODES="1")
    assert "found 2 of 2 nodes" in cluster.refused("disjoint.sbatch", SLURM_JOB_NUM_NODES="2", VISION_NODES="2")


@pytest.mark.parametrize("script, variable", [("requeue.sbatch", "WARNING_S"), ("disjoint.sbatch", "VISION_NODES")])
def test_numbers_are_whole_ones(script: str, variable: str, cluster: Cluster) -> None:
    for wrong in ("abc", "1.5", "-5"):
        said = cluster.refused(script, **{variable: wrong})
        assert said.startswith(f"error: {variable}: found {wrong}, expected") and said.count("\n") == 1


def test_a_missing_interpreter_is_no_fault_of_the_configuration(cluster: Cluster) -> None:
    said = cluster.refused("one_node.sbatch", PYTHON="nowhere/python")
    assert said.startswith("error: PYTHON: found nowhere/python, ") and said.count("\n") == 1


def test_gpus_that_slurm_spread_unevenly_are_refused(cluster: Cluster) -> None:
    said = cluster.refused("many_nodes.sbatch", SLURM_GPUS="8", SLURM_GPUS_ON_NODE="7", GPUS_OF_NODES="7 1")
    assert "sbatch --gpus: found nodes of 1,7 GPUs" in said and "--gpus-per-node" in said
    # As after --exclusive --gpus-per-node 4 on nodes of eight.
    assert after(cluster.started("many_nodes.sbatch", GPUS_OF_NODES="4 4"), "--nproc-per-node") == "4"


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_bad_configuration_is_reported_once_before_any_rank_starts(script: str, cluster: Cluster) -> None:
    (cluster.folder / "plan").write_text(f'echo "$@" >{cluster.folder}/planned; echo "error: no such flag" >&2; exit 1')
    said = cluster.refused(script, "--nonsense", "1")
    assert said.startswith("error: no such flag\n") and said.count("\n") == 2
    planned = (cluster.folder / "planned").read_text()
    assert f"--nonsense 1 --plan --plan-files --world-size {8 * NODES[script]}\n" in planned
    assert not (cluster.folder / "asked").exists(), "nor is the job queued again"


# ---------------------------------------------------------------------------------------------------------- arrays

TASK = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2"}


@pytest.mark.parametrize("script", SCRIPTS)
def test_tasks_of_an_array_write_into_folders_of_their_own(script: str, cluster: Cluster) -> None:
    words = own_flags(cluster.started(script, "--export.hf_dir", "models/%a", **TASK))
    assert after(words, "--log.dir") == "runs/5/2" and after(words, "--export.hf_dir") == "models/2"
    assert ("--checkpoint.dir" in words) == (script == "requeue.sbatch")
    assert script != "requeue.sbatch" or after(words, "--checkpoint.dir") == "runs/first/2"
    words = own_flags(cluster.started(script, "--log.dir=logs/%a", **TASK))
    assert "--log.dir=logs/2" in words and "--log.dir" not in words


@pytest.mark.parametrize("flags", ["--log.dir logs", "--log.dir=logs", "--export.hf_dir logs"])
def test_one_folder_for_all_tasks_is_refused(flags: str, cluster: Cluster) -> None:
    said = cluster.refused("many_nodes.sbatch", *flags.split(), **TASK)
    assert "found logs, expected %a in it" in said and "logs/%a" in said


def test_a_sweep_has_a_line_for_each_task(cluster: Cluster) -> None:
    (cluster.folder / "sweep").write_text("--optimizer.lr 1e-4\n--optimizer.lr 2e-4 --log.dir tried/%a")
    words = own_flags(cluster.started("requeue.sbatch", "--train.iters", "5", SWEEP="sweep", **TASK))
    assert words[-6:] == "--train.iters 5 --optimizer.lr 2e-4 --log.dir tried/2".split()
    (cluster.folder / "node0").unlink()
    for task in ("0", "3"):
        said = cluster.refused("requeue.sbatch", SWEEP="sweep", **TASK | {"SLURM_ARRAY_TASK_ID": task})
        assert f"found no flags in line {task} of sweep" in said and "--array 1-2" in said


# ------------------------------------------------------------------------------------------------------- requeueing


def test_a_job_shorter_than_its_warning_is_refused(cluster: Cluster) -> None:
    (cluster.folder / "job").write_text(f"JobId=7 StartTime={in_seconds(0)} EndTime={in_seconds(600)} Deadline=N/A\n")
    said = cluster.refused("requeue.sbatch")
    assert "s, expected more than 660" in said and "raise --time" in said and said.count("\n") == 1
    cluster.started("requeue.sbatch", WARNING_S="300")
    (cluster.folder / "job").write_text("JobId=7 StartTime=Unknown EndTime=Unknown Deadline=N/A\n")
    cluster.started("requeue.sbatch")


@pytest.mark.parametrize("task, name", [({}, "7"), (TASK, "5_2")], ids=["job", "task"])
def test_a_preempted_job_is_queued_again(task: dict[str, str], name: str, cluster: Cluster) -> None:
    """Only its steps are signalled. Of an array, the task alone: its first one has the id of all."""
    (cluster.folder / "job").write_text(
        f"JobId=7 EndTime={in_seconds(7200)} PreemptTime={in_seconds(1)} Deadline=N/A\n"
    )
    (cluster.folder / "train").write_text("exit 1")
    done = cluster.run("requeue.sbatch", **task)
    assert done.returncode == 0 and "preempted at none; queued again" in done.stdout
    assert (cluster.folder / "asked").read_text() == f"requeue {name}\n"


SAVED = "echo step-00000005 >runs/first/latest; "
ENDS = {
    "a stop": (SAVED + "exit 75", 0, "stopped at step-00000005; queued again"),
    "a stop before a checkpoint": ("exit 75", 75, "status 75; the newest checkpoint is none; not queued again"),
    "a killed rank": (SAVED + "exit 137", 0, "failed with status 137 at step-00000005; queued again"),
    "an exception, seen on both nodes": (SAVED + "exit 70", 0, "failed with status 70 at step-00000005; queued again"),
    "an exception before a checkpoint": ("exit 70", 70, "status 70; the newest checkpoint is none; not queued again"),
    "an error of the user": (SAVED + "exit 1", 1, "failed with status 1; the newest checkpoint is step-00000005\n"),
    "one that srun answers": (SAVED + "exit $((SLURM_NODEID ? 143 : 1))", 1, "failed with status 1; the newest"),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_job_is_queued_again_where_that_may_help(name: str, cluster: Cluster) -> None:
    """Preempted long ago, if at all."""
    train, status, said = ENDS[name]
    times = f"EndTime={in_seconds(7200)} PreemptTime={in_seconds(-600)}"
    (cluster.folder / "job").write_text(f"JobId=7 {times} Deadline=N/A\n")
    (cluster.folder / "runs/first").mkdir(parents=True)
    (cluster.folder / "train").write_text(train)
    done = cluster.run("requeue.sbatch")
    assert done.returncode == status and said in done.stdout + done.stderr
    assert (cluster.folder / "asked").exists() == ("queued again" in said and status == 0)


def test_a_signal_to_the_check_of_the_configuration_queues_the_job_again(cluster: Cluster) -> None:
    (cluster.folder / "plan").write_text("kill -USR1 $$")
    done = cluster.run("requeue.sbatch")
    assert done.returncode == 0 and "stopped before its start at none; queued again" in done.stdout, done.stderr
    assert (cluster.folder / "asked").read_text() == "requeue 7\n"


def test_a_job_that_slurm_does_not_queue_again_says_so(cluster: Cluster) -> None:
    (cluster.folder / "job").write_text(f"JobId=7 PreemptTime={in_seconds(1)} Deadline=N/A\n")
    (cluster.folder / "train").write_text("exit 1")
    scontrol = cluster.folder / "scontrol"
    scontrol.write_text(scontrol.read_text().replace("*) echo", "requeue*) exit 1 ;; *) echo"))
    done = cluster.run("requeue.sbatch")
    assert done.returncode == 1 and "job 7 " in done.stderr
