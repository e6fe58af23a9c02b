"""The `--plan` command."""

from __future__ import annotations

from megatron_hetero.config.flags import PlanRequest
from megatron_hetero.config.schema import Config
from megatron_hetero.planning.estimate import Plan
from megatron_hetero.planning.plot import draw_plan, require_writable_plot
from megatron_hetero.planning.report import print_plan


def show_plan(config: Config, request: PlanRequest) -> None:
    """Print the plan of a configuration, and draw it on request. Raises `UserError`."""
    if request.plot is not None:
        require_writable_plot(request.plot)
    if request.files:
        from megatron_hetero.planning.files import require_files  # Not at the top: it imports torch.

        require_files(config)
    replaced = request.plot is not None and request.plot.exists()
    plan = Plan.of(config, request.world_size)
    print_plan(plan)
    if request.plot is not None:
        draw_plan(plan, request.plot)
        print(f"\nwrote {request.plot}{', replacing the previous file' if replaced else ''}")
