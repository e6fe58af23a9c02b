"""`torchrun --nproc-per-node N -m tests.support.fused`: products fused with exchanges on N GPUs against products and
collectives one after the other. Tests run the same on a CPU in emulated symmetric memory.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hetero.models.layers.linear import gathered_product, reserve_symmetric_memory, scattered_product

SIZES = [(4, 8, 16), (1, 16, 8), (256, 2048, 64), (32, 64, 8)]
"""Rows of a rank, inner dim, columns. The memory of the third is larger, that of the last one not."""


def check(group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype) -> None:
    """Compare with products in fp64 of what all ranks have. Raises `AssertionError`."""
    ranks, rank, error = group.size(), group.rank(), 4 * torch.finfo(dtype).eps + 2e-6  # of sums in fp32

    def drawn(*shape: int, seed: int) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)

    def close(found: Tensor, expected: Tensor) -> None:
        assert found.shape == expected.shape
        assert float((found.cpu().double() - expected).norm()) <= error * float(expected.norm())

    for rows, inner, columns in SIZES:
        every = [drawn(rows, 1, inner, seed=of) for of in range(ranks)]
        matrix, bias = drawn(inner, columns, seed=20), drawn(columns, seed=21)
        for added in (None, bias.to(device)):
            whole, out = gathered_product(every[rank].to(device), matrix.to(device), group, added)
            assert torch.equal(whole.cpu(), torch.cat(every)), "what is gathered is copied"
            expected = torch.cat(every).double() @ matrix.double()
            close(out, expected if added is None else expected + bias.double())
        partials = [drawn(ranks * rows, 1, inner, seed=30 + of) for of in range(ranks)]
        own = scattered_product(partials[rank].to(device), matrix.to(device), group)
        total = torch.stack([each.double() @ matrix.double() for each in partials]).sum(dim=0)
        close(own, total.chunk(ranks)[rank])


def main() -> None:
    """See above."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    groups: list[Any] = [dist.new_group(), dist.new_group()]
    for group in groups:
        reserve_symmetric_memory(group)
    for dtype in (torch.bfloat16, torch.float32):
        for group in (*groups, *groups):
            # Beside sums over another group, in a stream of its own.
            works: list[Any] = [dist.all_reduce(torch.ones(2**24, device=device), async_op=True) for _ in range(4)]
            check(group, device, dtype)
            for work in works:
                work.wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
