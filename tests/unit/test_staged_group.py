"""Groups that stage their tensors on the host do what gloo does."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.support.pool import Pool
from tests.unit import jobs_staged_group as jobs


def test_every_operation_gives_what_gloo_gives(pools: Callable[[int], Pool]) -> None:
    for results in pools(3).run(jobs.both):
        for name, staged, gloo in results:
            assert gloo.any(), name
            assert torch.equal(staged, gloo), name
