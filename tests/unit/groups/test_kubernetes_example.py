"""examples/kubernetes/jobset.yaml: Kubernetes takes it, and its numbers and names agree with each other."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubeflow_trainer_api import models

from megatron_hetero.config.schema import load_command
from megatron_hetero.layout.modules import resolve
from tests.support.shapes import shapes_of_folder

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def jobset() -> dict[str, Any]:
    return yaml.safe_load((EXAMPLES / "kubernetes/jobset.yaml").read_text(encoding="utf-8"))


def _job(jobset: dict[str, Any]) -> dict[str, Any]:
    (job,) = jobset["spec"]["replicatedJobs"]
    return job


def _container(jobset: dict[str, Any], kind: str) -> dict[str, Any]:
    (container,) = _job(jobset)["template"]["spec"]["template"]["spec"][kind]
    return container


def _read_back(jobset: dict[str, Any]) -> dict[str, Any]:
    """What the classes that are made from JobSet's schema take of it: fields that they do not know are left out."""
    spec = models.JobsetV1alpha2JobSetSpec.from_dict(jobset["spec"])
    metadata = models.IoK8sApimachineryPkgApisMetaV1ObjectMeta.from_dict(jobset["metadata"])
    assert spec is not None and metadata is not None
    head = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet"}
    return head | {"metadata": metadata.to_dict(), "spec": spec.to_dict()}


def test_it_follows_the_schema(jobset: dict[str, Any]) -> None:
    assert _read_back(jobset) == jobset


def test_what_does_not_follow_the_schema_is_noticed(jobset: dict[str, Any]) -> None:
    _container(jobset, "containers")["volumeMount"] = []
    assert _read_back(jobset) != jobset
    _container(jobset, "containers")["env"][0]["value"] = 4
    with pytest.raises(ValueError, match="value"):
        _read_back(jobset)


def test_torchrun_gets_the_numbers_of_the_pods(jobset: dict[str, Any]) -> None:
    job, torchrun = _job(jobset), _container(jobset, "containers")
    shell, flag, script, _ = torchrun["command"]
    assert (shell, flag) == ("bash", "-c")
    subprocess.run(["bash", "-n", "-c", script], check=True)
    words = shlex.split(script)
    flags = dict(zip(words[4::2], words[5::2], strict=False))
    nodes = job["template"]["spec"]["parallelism"]
    assert int(flags["--nnodes"]) == nodes == job["template"]["spec"]["completions"]
    assert int(flags["--nproc-per-node"]) == torchrun["resources"]["limits"]["nvidia.com/gpu"]
    name = jobset["metadata"]["name"]
    assert flags["--master-addr"] == f"{name}-{job['name']}-0-0.{name}"
    grace = job["template"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert int(flags["--shutdown-timeout"]) < grace


def test_the_check_is_of_what_is_trained(jobset: dict[str, Any]) -> None:
    check, torchrun = _container(jobset, "initContainers"), _container(jobset, "containers")
    assert check["args"] == torchrun["args"]
    argv = [re.sub("^--config=", f"--config={EXAMPLES.parent}/", word) for word in check["command"][2:] + check["args"]]
    config, plan = load_command(argv)
    assert plan is not None and plan.world_size == 16
    layouts = {name: row.parallel for name, row in config.modules.items()}
    resolve(layouts, shapes_of_folder(EXAMPLES / "models/qwen2_5_vl_32b").module_shapes(), 16)
    (rule,) = _job(jobset)["template"]["spec"]["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["containerName"] == check["name"]
