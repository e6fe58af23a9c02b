"""Megatron's collection of process groups for a module."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_hetero.layout.axes import AXES, MAIN, View, axes_of
from megatron_hetero.layout.communicators import GRADIENT_AXES, REPLICA_AXES


@dataclass(init=False, repr=False)
class ModuleGroups(ProcessGroupCollection):
    """Megatron's collection of process groups, with groups for the two axes of its context-parallel group `cp`.

    `sp` is the axis `sp`, `context` the axis `cp`: among ranks `sp` varies faster, so that member i of `cp` is member
    i mod sp of its `sp` group and member i // sp of its `context` group.

    `along` returns the group along axes of any view of the module's layout.
    """

    sp: dist.ProcessGroup = field(init=False)
    context: dist.ProcessGroup = field(init=False)
    along: Callable[..., dist.ProcessGroup] = field(init=False)


EXPERTS = "experts"
"""The view that says how Megatron's layers of experts are split; without it they are split like dense layers."""


def module_groups(
    group: Callable[..., dist.ProcessGroup], ends: dist.ProcessGroup | None, views: Iterable[View] = ()
) -> ModuleGroups:
    """The collection for a module, given its groups along axes. `ends`: the group of its first and last stage; `views`:
    further views of its layout.
    """
    # There is one instance of the distributed optimizer, so that its `intra` groups are whole and no `inter` group is
    # needed.
    samples = group(*GRADIENT_AXES)
    experts = next((view for view in views if view.name == EXPERTS), MAIN)
    return ModuleGroups(
        along=group,
        tp=group("tp"),
        sp=group("sp"),
        context=group("cp"),
        cp=group(*axes_of("tokens")),
        dp=group("dp"),
        pp=group("pp"),
        dp_cp=samples,
        mp=group("tp", "pp"),
        tp_cp=group(*REPLICA_AXES),
        tp_dp_cp=group(*axes_of("weights", "tokens", "samples")),
        hcp=None,
        ep=group(*experts.axes_of("experts")),
        expt_tp=group(*experts.axes_of("weights")),
        expt_dp=group(*experts.sum_axes),
        tp_ep=group(*experts.part_axes),
        tp_ep_pp=group(*experts.part_axes, "pp"),
        intra_dp_cp=samples,
        intra_expt_dp=group(*experts.sum_axes),
        intra_dist_opt=group(*AXES),
        inter_dist_opt=None,
        embd=ends,
        pos_embd=None,  # for positions that several stages embed, which Megatron's decoders do not
    )
