"""Two hosts, each with a launcher of its own: ranks that die on either are started again on both."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

HOSTS = (("torch.distributed.run", "2"), ("megatron_hetero.run", "1"))
"""What starts the ranks of each host, and how many."""
DEATHS = (2, 0)
"""Which rank dies in each attempt; in the one after these none does."""
PROGRAM = f"""
import os, signal, sys
from pathlib import Path
import torch
import torch.distributed as dist
from megatron_hetero.distributed.launch import guarded, process_group, rank

def main(argv):
    with process_group() as platform:
        group = platform.host_group("all")
        total = torch.full((1,), rank() + 1.0)
        dist.all_reduce(total, group=group)
        deaths = [(Path(argv[0]) / str(number), victim) for number, victim in enumerate({DEATHS})]
        for file, victim in deaths:
            if not file.exists():
                if rank() == victim:
                    file.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                dist.barrier()  # with a dead rank: this one ends, or torchrun ends it
        if rank() == 0:
            print("sum", total.item(), flush=True)

if __name__ == "__main__":
    guarded(main, sys.argv[1:])
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def test_ranks_that_die_on_either_host_are_started_again(tmp_path: Path) -> None:
    """Each host counts only the restarts for ranks of its own."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    meeting = f"--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{free_port()} --rdzv-id test".split()
    flags = ["--nnodes", "2", "--max-restarts", "2", *meeting, str(program), str(tmp_path)]
    hosts = [
        subprocess.Popen(
            [sys.executable, "-m", launcher, "--nproc-per-node", ranks, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()},
        )
        for launcher, ranks in HOSTS
    ]
    try:
        outputs = [host.communicate(timeout=240)[0] for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    assert [host.returncode for host in hosts] == [0, 0], "\n".join(outputs)
    assert "".join(outputs).count("sum 6.0\n") == 1
    assert all((tmp_path / str(number)).exists() for number in range(len(DEATHS)))
