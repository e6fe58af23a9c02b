"""A rank that leaves out a crossing of a plain loop ends the others, with one message that names it."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.functional.forked import Forked
from tests.support.matrix import thinned


def loop(left_out: str) -> None:
    """Rank 2 goes on without it, as a loop with `if not pictures: continue` would."""
    import torch

    import megatron_hetero as mh

    def train(_: object) -> None:
        with mh.process_group():
            graph = mh.Graph({"vision": ["text"]}, width=4, dtype=torch.float32)
            topology = mh.build(graph, vision="dp:3", text="dp:3")
            link = mh.Boundary.open(topology, "vision", "text", timeout_s=2)
            rank = topology.rank
            for step in range(3):
                while step == 1 and rank == 2 and left_out == "plan":
                    time.sleep(0.1)
                plan = link.plan(held=[rank], needed=[(rank + 1) % 3])
                with mh.micro_batch(link):
                    while step == 1 and rank == 2 and left_out == "crossing":
                        time.sleep(0.1)
                    link(plan, torch.ones(1, 4, requires_grad=True)).sum().backward()
                    while step == 1 and rank == 2:
                        time.sleep(0.1)

    mh.guarded(train, [])


@pytest.mark.parametrize(
    "left_out, said",
    thinned([("crossing", "a crossing of"), ("plan", "a plan of"), ("end", "gradients of")], 3),
)
def test_the_others_end_and_say_who_did_not_come(left_out: str, said: str, tmp_path: Path) -> None:
    with Forked(tmp_path / "ranks", loop, [[left_out]] * 3) as ranks:
        for rank in ranks.ranks[:2]:
            rank.join(60)
        assert [rank.exitcode for rank in ranks.ranks] == [70, 70, None]
        all_said = "".join(map(ranks.said, (0, 1)))
        messages = [line for line in all_said.splitlines() if "unfinished" in line]
    assert len(messages) == 1, messages
    assert f"{said} boundary vision>text" in messages[0]
    assert "timeout_s = 2" in messages[0] and "because rank 2 " in messages[0]
    assert re.search(rf"\n  ranks 0-1: .*{said} boundary vision>text, .* at test_plain_loop_hang.py:", all_said)
    assert re.search(r"\n  rank 2: .* at test_plain_loop_hang.py:", all_said)
