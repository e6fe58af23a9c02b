"""Two hosts, which are network namespaces, between which the network fails."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.functional.programs import CONFIG, PROGRAM
from tests.support.folders import ModelChoice, write_data, write_model

LIMIT_S = 60.0
TIMEOUT_S = 4.0


def ip(words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words.split()], capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two namespaces that reach each other at 10.77.0.1 and 10.77.0.2."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces want iproute2 and root")
    first, second = (f"host{number}-{os.getpid()}" for number in range(2))
    try:
        setup = [
            f"netns add {first}",
            f"netns add {second}",
            f"-n {first} link add eth0 type veth peer eth0 netns {second}",
        ]
        for number, name in enumerate((first, second)):
            setup += [f"-n {name} address add 10.77.0.{number + 1}/24 dev eth0"]
            setup += [f"-n {name} link set {device} up" for device in ("lo", "eth0")]
        for words in setup:
            if (done := ip(words)).returncode:
                pytest.skip(f"no network namespaces here: {done.stderr.strip()}")
        yield first, second
    finally:
        for name in (first, second):
            ip(f"netns delete {name}")


def cut(hosts: tuple[str, str]) -> None:
    """Send what goes from one host to the other to an address that nobody has: it is lost, and nobody learns of it."""
    for number, name in enumerate(hosts):
        done = ip(f"-n {name} neighbour replace 10.77.0.{2 - number} lladdr 02:00:00:00:00:99 dev eth0 nud permanent")
        assert done.returncode == 0, done.stderr


def test_a_network_that_fails_ends_both_hosts(hosts: tuple[str, str], tmp_path: Path) -> None:
    """Within the watchdog's time-out, with a message on each and a status that has the run started again."""
    write_model(tmp_path / "model", ModelChoice(vision_layers=2, text_layers=1))
    write_data(tmp_path, 8)
    (tmp_path / "config.yaml").write_text(CONFIG)
    settings = f"--train.iters 1000000 --schedule.timeout_s {TIMEOUT_S} --export.hf_dir none --log.dir {tmp_path}/log"
    environment = os.environ | {"PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
    outputs = [tmp_path / f"output of host {number}" for number in range(2)]
    with contextlib.ExitStack() as stack:
        launched = []
        for number, name in enumerate(hosts):
            launcher = f"ip netns exec {name} {sys.executable} -m megatron_hetero.run --nnodes 2 --node-rank {number}"
            meeting = f"--master-addr 10.77.0.1 --local-addr 10.77.0.{number + 1}"
            command = f"{launcher} {meeting} {PROGRAM} --config {tmp_path}/config.yaml {settings}"
            with open(outputs[number], "w") as log:
                launched += [subprocess.Popen(command.split(), stdout=log, stderr=log, env=environment)]
            stack.callback(launched[-1].kill)
        while "\nstep " not in outputs[0].read_text():
            assert all(host.poll() is None for host in launched), [output.read_text() for output in outputs]
            time.sleep(0.1)
        cut(hosts)
        begin = time.monotonic()
        assert [host.wait(LIMIT_S + begin - time.monotonic()) for host in launched] == [70, 70]
    for number, output in enumerate(outputs):
        # Behind what rank 0 says of the run: what it waits for, and on host 0, which has the store, what each waits in.
        *before, found = output.read_text().split(f"rank {number}: found ")
        assert len(before) == 1 and found.count("\n") == 2 - number, output.read_text()
        assert "E1" not in before[0] and "Exception" not in before[0]
