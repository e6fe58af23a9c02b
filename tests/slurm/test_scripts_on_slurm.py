"""The job scripts in examples/slurm on a Slurm: `make slurm`, some minutes. Not part of `make test`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.slurm.cluster import Cluster, why_not
from tests.support.folders import ModelChoice, write_data, write_model

ROOT = Path(__file__).parents[2]
CONFIG = """\
model: {{hf_path: model, dtype: float32}}
data:
  registry: {{d: {{annotations: data.jsonl, images: images}}}}
  datasets: [d]
train: {{iters: {iters}, global_batch_size: 24}}
optimizer: {{name: adamw, lr: 1e-3, schedule: constant}}
"""
ENDLESS = 1_000_000
pytestmark = [pytest.mark.slurm, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder, work = tmp_path_factory.mktemp("slurm"), tmp_path_factory.mktemp("work")
    for name in (".venv", "pretrain_vlm.py", "examples", "megatron_hetero"):
        (work / name).symlink_to(ROOT / name)
    write_model(work / "model", ModelChoice(vision_layers=2, text_layers=1))
    write_data(work, 24)
    with Cluster.up(folder, work) as cluster:
        yield cluster


@dataclass(frozen=True)
class Training:
    """A configuration of its own, and what a run of it writes. It ends where `end_after` says: so that a job cannot be
    over before it is stopped.
    """

    cluster: Cluster
    name: str

    def flags(self, log: bool = True) -> list[str]:
        return ["--config", f"{self.name}.yaml", *(["--log.dir", f"{self.name}/log"] if log else [])]

    def end_after(self, iters: int) -> None:
        (self.cluster.work / f"{self.name}.yaml").write_text(CONFIG.format(iters=iters))

    def losses(self, log: str = "") -> list[float]:
        """One for each step."""
        path = self.cluster.work / (log or f"{self.name}/log") / "metrics.jsonl"
        records = [json.loads(line) for line in path.read_text().splitlines()]
        assert [record["step"] for record in records] == list(range(1, len(records) + 1))
        return [record["loss"] for record in records]

    def wait_for(self, job: str, step: int) -> None:
        """Until a job has a checkpoint of that step or a later one."""
        end = time.monotonic() + 300
        while self.newest() < step:
            assert time.monotonic() < end, self.cluster.output(job)
            time.sleep(0.1)

    def newest(self, folder: str = "") -> int:
        """The step of the newest checkpoint."""
        latest = self.cluster.work / (folder or f"{self.name}/checkpoints") / "latest"
        return int(latest.read_text().removeprefix("step-")) if latest.exists() else 0


def untouched(training: Training, iters: int, nodes: int, *flags: str) -> list[float]:
    """The losses of a run of the same configuration that is left alone."""
    whole = Training(training.cluster, f"{training.name}-untouched")
    whole.end_after(iters)
    sbatch = f"--nodes {nodes} --gpus-per-node 1 --cpus-per-task 8"
    whole.cluster.wait(whole.cluster.submit("many_nodes.sbatch", *whole.flags(), *flags, sbatch=sbatch), "COMPLETED")
    return whole.losses()


def requeueing(training: Training, sbatch: str, *flags: str, interval: int = ENDLESS, **environment: str) -> str:
    """A job that trains until it is stopped."""
    training.end_after(ENDLESS)
    environment = {"CHECKPOINTS": f"{training.name}/checkpoints"} | environment
    sbatch = f"--gpus-per-node 1 --cpus-per-task 8 {sbatch}"
    own = [*training.flags(log="SWEEP" not in environment), "--checkpoint.interval", str(interval)]
    return training.cluster.submit("requeue.sbatch", *own, *flags, sbatch=sbatch, **environment)


# ------------------------------------------------------------------------------------------------ starting, refusing


def test_jobs_start_on_one_two_and_three_nodes(cluster: Cluster) -> None:
    losses = []
    for script, flags in (
        ("one_node.sbatch", "--gpus-per-node 2"),
        ("many_nodes.sbatch", "--nodes 2 --gpus-per-node 1"),
        ("disjoint.sbatch", "--nodes 3 --gpus-per-node 1"),
        ("many_nodes.sbatch", "--nodes 3 --gpus-per-node 0"),
    ):
        training = Training(cluster, f"started-{len(losses)}")
        training.end_after(2)
        settings = {"VISION": "dp:1", "TEXT": "dp:2", "RANKS_PER_NODE": "1" if flags.endswith("0") else ""}
        job = cluster.submit(script, *training.flags(), sbatch=f"{flags} --cpus-per-task 8", **settings)
        cluster.wait(job, "COMPLETED")
        losses.append(training.losses())
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-5)


def test_jobs_that_cannot_run_end_at_once_with_a_sentence(cluster: Cluster) -> None:
    training = Training(cluster, "refused")
    training.end_after(2)
    rows = {
        ("one_node.sbatch", "--nodes 2"): "sbatch --nodes: found 2, expected 1",
        ("many_nodes.sbatch", "--nodes 2 --ntasks-per-node 2"): "found 4 tasks on 2 nodes, expected one on each",
        ("many_nodes.sbatch", "--nodes 2 --gpus-per-node 0 --gpus 8"): "sbatch --gpus: found nodes of 1,7 GPUs",
        ("requeue.sbatch", "--time 10"): "sbatch --time: found ",
        ("requeue.sbatch", "--nodes 3"): "global_batch_size",
    }
    jobs = {}
    for script, flags in rows:
        more = ["--train.global_batch_size", "7"] if flags == "--nodes 3" else []
        jobs[script, flags] = cluster.submit(
            script, *training.flags(), *more, sbatch=f"--cpus-per-task 8 {flags}", CHECKPOINTS="refused/checkpoints"
        )
    for row, job in jobs.items():
        cluster.wait(job, "FAILED")
        output = cluster.output(job)
        assert rows[row] in output and len(output.splitlines()) <= 10, output


def test_steps_have_the_environment_and_the_cores_of_the_job(cluster: Cluster) -> None:
    show = cluster.work / "show"
    said = "on $SLURM_NODEID: $SLURM_CPUS_PER_TASK cores, $OMP_NUM_THREADS, $HF_HUB_OFFLINE"
    show.write_text(f'#!/bin/bash\necho "{said}"\n')
    show.chmod(0o755)
    flags = "--nodes 2 --gpus-per-node 1 --cpus-per-task 6 --export=PATH,PYTHON,SLURM_CONF"
    job = cluster.submit("many_nodes.sbatch", sbatch=flags, PYTHON="./show")
    cluster.wait(job, "COMPLETED")
    assert sorted(cluster.output(job).splitlines()) == [f"on {node}: 6 cores, 4, 1" for node in (0, 1)]


# ------------------------------------------------------------------------------------------- stopping and going on


def test_a_job_resumes_after_its_time_is_up(cluster: Cluster) -> None:
    """Slurm warns up to a minute early."""
    training = Training(cluster, "time")
    job = requeueing(training, "--nodes 2 --time 2 --signal=B:USR1@50", WARNING_S="50")
    cluster.wait(job, "PENDING", restarts=1)
    steps = training.newest() + 3
    training.end_after(steps)
    cluster.start_again(job)
    cluster.wait(job, "COMPLETED", restarts=1)
    assert training.losses() == untouched(training, steps, nodes=2)


def test_a_job_resumes_after_a_rank_was_killed(cluster: Cluster) -> None:
    training = Training(cluster, "rank")
    job = requeueing(training, "--nodes 2", interval=5)
    training.wait_for(job, step=5)
    cluster.ranks(job)[1].kill()
    cluster.wait(job, "PENDING", restarts=1)
    assert "was killed by SIGKILL" in cluster.output(job) and "failed with status 137 at step-" in cluster.output(job)
    training.end_after(steps := training.newest() + 3)
    cluster.start_again(job)
    cluster.wait(job, "COMPLETED", restarts=1)
    assert training.losses() == untouched(training, steps, nodes=2)


def test_steps_that_are_asked_to_stop_queue_the_job_again(cluster: Cluster) -> None:
    """`scancel --signal` without `--batch`: Slurm signals the ranks and not the script."""
    training = Training(cluster, "asked")
    job = requeueing(training, "--nodes 2")
    cluster.wait_for(job, "(?m)^step +1/")
    cluster.call("scancel", "--signal=USR1", job)
    cluster.wait(job, "PENDING", restarts=1)
    assert "\nstopped at step-" in cluster.output(job) and "\nerror: " not in cluster.output(job)
    training.end_after(steps := training.newest() + 2)
    cluster.start_again(job)
    cluster.wait(job, "COMPLETED", restarts=1)
    assert training.losses() == untouched(training, steps, nodes=2)


def test_an_error_of_the_user_ends_the_job_with_it_alone(cluster: Cluster) -> None:
    """On two nodes, after checkpoints that another start would resume from; Slurm then ends the other node's ranks."""
    training = Training(cluster, "broken")
    records = (cluster.work / "data.jsonl").read_text().splitlines()
    (cluster.work / "broken.jsonl").write_text("\n".join(records).replace("23_0.png", "lost.png") + "\n")
    flags = "--data.registry.d.annotations broken.jsonl --data.shuffle false --train.global_batch_size 4"
    job = requeueing(training, "--nodes 2", *flags.split(), interval=1)
    cluster.wait(job, "FAILED")
    output = cluster.output(job)
    told = [line for line in output.splitlines() if "error: " in line and not line.startswith(("srun:", "slurmstepd-"))]
    assert len(told) == 1 and told[0].startswith("error: step 6, ") and "lost.png" in told[0], output
    assert cluster.record(job)["ExitCode"] == "1:0" and cluster.record(job)["Restarts"] == "0", output


def test_of_an_array_only_the_task_that_is_asked_is_queued_again(cluster: Cluster) -> None:
    training = Training(cluster, "array")
    rates = ["--optimizer.lr 1e-3", "--optimizer.lr 2e-3"]
    (cluster.work / "sweep").write_text("\n".join(rates))
    array = requeueing(training, "--array 1-2", SWEEP="sweep")
    tasks = [f"{array}_{task}" for task in (1, 2)]
    for task in tasks:
        cluster.wait_for(task, "(?m)^step +1/")
    # The task whose id is that of the array.
    asked = next(task for task in tasks if cluster.record(task)["JobId"] == array)
    other = next(task for task in tasks if task != asked)
    cluster.call("scancel", "--batch", "--signal=USR1", asked)
    cluster.wait(asked, "PENDING", restarts=1)
    assert cluster.record(other)["JobState"] == "RUNNING" and cluster.record(other)["Restarts"] == "0"
    number = asked.partition("_")[2]
    steps = training.newest(f"array/checkpoints/{number}") + 2
    training.end_after(steps)
    cluster.start_again(asked)
    cluster.wait(asked, "COMPLETED", restarts=1)
    cluster.call("scancel", other)
    left_alone = untouched(training, steps, 1, *rates[int(number) - 1].split())
    assert training.losses(f"runs/{array}/{number}") == left_alone


def test_a_preempted_job_saves_and_resumes(cluster: Cluster) -> None:
    training = Training(cluster, "preempted")
    job = requeueing(training, "--nodes 2 --partition spare --exclusive")
    cluster.wait_for(job, "(?m)^step +1/")
    stronger = cluster.call("sbatch", "--parsable", "--nodes=3", "--exclusive", "--wrap", "sleep 1").strip()
    cluster.wait(job, "PENDING", restarts=1)
    assert "preempted at step-" in cluster.output(job)
    cluster.wait(stronger, "COMPLETED")
    training.end_after(steps := training.newest() + 2)
    assert steps > 2
    cluster.start_again(job)
    cluster.wait(job, "COMPLETED", restarts=1)
    assert training.losses() == untouched(training, steps, nodes=2)


def test_nothing_is_left_of_a_job_that_is_cancelled(cluster: Cluster) -> None:
    training = Training(cluster, "cancelled")
    job = requeueing(training, "--nodes 2")
    cluster.wait_for(job, "(?m)^step +1/")
    ranks = cluster.ranks(job)
    assert len(ranks) == 2
    cluster.call("scancel", job)
    cluster.wait(job, "CANCELLED")
    assert not psutil.wait_procs(ranks, timeout=40)[1]
    time.sleep(1.0)
    assert cluster.record(job)["JobState"] == "CANCELLED"


def test_a_job_resumes_after_a_node_failed(cluster: Cluster) -> None:
    """The last test: the node stays dead."""
    training = Training(cluster, "node")
    job = requeueing(training, "--nodes 2", interval=5)
    training.wait_for(job, step=5)
    nodes = cluster.call("scontrol", "show", "hostnames", cluster.record(job)["NodeList"]).split()
    cluster.kill_node(nodes[1])
    cluster.wait(job, "PENDING", restarts=1)
    training.end_after(steps := training.newest() + 3)
    cluster.start_again(job)
    cluster.wait(job, "COMPLETED", restarts=1)
    assert nodes[1] not in cluster.call("scontrol", "show", "hostnames", cluster.record(job)["NodeList"]).split()
    assert training.losses() == untouched(training, steps, nodes=2)
