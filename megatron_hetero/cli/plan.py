"""The `--plan` command."""

from __future__ import annotations

from megatron_hetero.config.flags import PlanRequest
from megatron_hetero.config.schema import Config
from megatron_hetero.planning.estimate import Plan
from megatron_hetero.planning.picture import draw_plan, require_writable_picture
from megatron_hetero.planning.report import print_plan


def show_plan(config: Config, request: PlanRequest) -> None:
    """Print the plan of a configuration, and draw it on request. Raises `UserError`."""
    if request.picture is not None:
        require_writable_picture(request.picture)
    if request.files:
        from megatron_hetero.planning.files import require_files  # Not at the top: it imports torch.

        require_files(config)
    replaced = request.picture is not None and request.picture.exists()
    plan = Plan.of(config, request.world_size)
    print_plan(plan)
    if request.picture is not None:
        draw_plan(plan, request.picture)
        print(f"\nwrote {request.picture}{', replacing the previous file' if replaced else ''}")
