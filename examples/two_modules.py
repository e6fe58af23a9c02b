"""Two modules with a layout each: torchrun --nproc-per-node 2 examples/two_modules.py"""

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import megatron_hetero as mh

with mh.process_group() as platform:  # NCCL on GPUs, gloo on CPUs
    graph = mh.Graph({"vision": ["text"]}, width=64, dtype=torch.float32)
    topology = mh.build(graph, vision="dp:2", text="tp:2")  # two layouts of the same two ranks
    torch.manual_seed(0)  # the same weights and pictures on both ranks
    vision = nn.Linear(48, 64).to(platform.device)
    text = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1)).to(platform.device)
    pictures = torch.randn(6, 48).to(platform.device)
    (expected,) = torch.autograd.grad(text(vision(pictures)).sum() / 6, vision.weight)  # in one process

    parallelize_module(text, topology.mesh("text")["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    boundary = mh.Boundary.open(topology, "vision", "text")
    with mh.micro_batch(boundary):  # rows (embeddings) go from dp to tp, and gradients back at the end of the block
        plan = boundary.plan(samples=6, rows_per_sample=1)
        rows = boundary(plan, vision(topology.shard("vision", pictures)))  # three on each rank, then six on both
        text(rows).sum().backward()
    mh.finish_gradients(topology, {"vision": vision, "text": text}, tokens=6)
    torch.testing.assert_close(vision.weight.grad, expected)
    print(f"rank {topology.rank}: the gradient is that of one process")
