"""Prints an estimate to the terminal: the `--plan` command."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from megatron_hetero.base.errors import UserError
from megatron_hetero.base.terminal import size_text
from megatron_hetero.config.flags import EstimateRequest
from megatron_hetero.config.schema import Config
from megatron_hetero.estimate.allowance import ALLOWANCES, FRAGMENTATION, NODE, kind_bytes
from megatron_hetero.estimate.estimate import KINDS, Estimate
from megatron_hetero.estimate.experts import expert_mlps, experts_of_ranks, ranks_of_experts
from megatron_hetero.estimate.plot import draw_estimate
from megatron_hetero.estimate.problems import problems_of, shortened
from megatron_hetero.estimate.traffic import BoundaryTraffic
from megatron_hetero.layout.names import TEXT
from megatron_hetero.models.adapters import adapters_text
from megatron_hetero.models.shapes import item_types
from megatron_hetero.schedule.drawing import require_plot, timeline

NOT_COUNTED = (
    "Not counted: micro-batches that wait to be used (except the pixels that the patch embedding saves), and messages "
    "between stages in transit. Logits are counted: as probabilities of the supervised tokens in fp32 with the "
    "activations, and what else the loss needs with the workspace. Activations are those of plain PyTorch layers on a "
    "GPU; Transformer Engine saves less."
)
SHOWN_ROLES = (8, 4)
"""Number of first and number of last roles whose lines of the schedule are shown."""
SHOWN_KINDS = 24
"""Maximum number of rows of the full memory table; a longer table is reduced to the largest row of each role."""
WIDTH = 150
"""Width of the output in columns if it is not a terminal."""


def print_estimate(estimate: Estimate) -> None:
    """Print an estimate to the terminal."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    console.print(Group(*_described(estimate, console.width)), highlight=False)


def _described(estimate: Estimate, width: int) -> Iterator[RenderableType]:
    yield from (Text(line) for line in assumptions(estimate))
    yield from ("", _modules(estimate), "")
    yield _boundaries(estimate) if estimate.boundaries else "Nothing crosses the boundaries: no images."
    if estimate.experts:
        yield from ("", _experts(estimate), Text(_experts_text(estimate), style="dim"))
    yield from ("", _memory(estimate))
    yield from (Text(f"{_host_text(estimate)}{_allowance_text(estimate)} {NOT_COUNTED}", style="dim"), "")
    if estimate.communicators:
        yield from (_communicators(estimate), Text(_communicators_text(estimate), style="dim"), "")
    yield from (Text(line, no_wrap=True, overflow="ellipsis") for line in _schedule(estimate, width))
    yield ""
    problems = problems_of(estimate)
    yield Text("Problems" if problems else "No problems found.", style="bold")
    for number, problem in enumerate(problems, 1):
        yield Text(f"{number}. {problem.found[:1].upper()}{problem.found[1:]}.\n   -> {problem.fix}.")


def assumptions(estimate: Estimate) -> list[str]:
    """Return sentences that describe the job and the assumptions about its data."""
    config, batch, sample = estimate.job.config, estimate.job.batch, estimate.assumed.sample
    texts = "replica" if batch.replicas == 1 else "replicas"
    lines = [
        f"Plan of {config.model.hf_path} in {config.model.dtype} with {config.optimizer.name} on "
        f"{estimate.world_size:,} ranks",
        f"A step: {config.train.global_batch_size:,} samples, {batch.micro_batches:,} micro-batches of "
        f"{batch.samples:,} for each of {batch.replicas:,} {texts} of {TEXT}{estimate.job.waves_text}.",
    ]
    if (budget := estimate.job.budget) is not None:
        lines.append(
            f"Assumed of every micro-batch: full, {budget.tokens:,} tokens (train.tokens_per_micro_batch), for which "
            "samples get more text. In training the data decides how many micro-batches there are."
        )
    for name, shape in estimate.job.shapes.encoders.items():
        types = item_types(estimate.job.shapes, name)
        for each in [each for each in types if each.assumed_pieces(config.plan)] or types[:1]:
            (what, settings), size = each.assumed_items(config.plan), each.assumed(shape, config.plan)
            if each.assumed_pieces(config.plan):
                patches = sum(shape.sequences(size))
                what += f" of {each.measures(shape, size)} ({patches:,} patches, {shape.rows(size):,} rows)"
            lines.append(f"Assumed of every sample, for {name}: {what} ({settings}).")
    lines.append(
        f"Assumed of every sample: {sample.text:,} further tokens (plan.tokens), {sample.supervised:,} of them "
        f"supervised (plan.supervised), {sample.tokens:,} in all."
    )
    return [*lines, *adapters_text(estimate.job.shapes)]


# ------------------------------------------------------------------------------------------------- tables


def _table(title: str, *columns: str, left: int = 1) -> Table:
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < left else "right")
    return table


def _modules(estimate: Estimate) -> Table:
    columns = ("module", "layout", "ranks", "stages", "parameters per rank", "trained per rank")
    table = _table("Modules", *columns, left=4)
    for name, layout in estimate.job.layouts.items():
        sizes = [len(stage.layers) for stage in estimate.job.stages[name]]
        stages = f"{len(sizes)} of {_between(sizes)} layers" if len(sizes) > 1 else f"{sizes[0]} layers"
        by_coordinate = [estimate.parameters[name, coordinate] for coordinate in range(layout.pp)]
        table.add_row(
            name, layout.degrees_text, shortened(layout.ranks), stages,
            _between([each.parameters for each in by_coordinate]), _between([each.trained for each in by_coordinate]),
        )  # fmt: skip
    return table


def _between(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _boundaries(estimate: Estimate) -> Table:
    table = _table(
        "Boundaries, in a step", "from", "to", "rows", "bytes received", "most by a rank", "most sent by a rank",
        "operations of a rank", left=2,
    )  # fmt: skip
    samples = estimate.job.batch.step_samples
    for boundary in estimate.boundaries:
        rows, unit = estimate.assumed.sample.rows[boundary.edge.source] * boundary.outputs, boundary.row_bytes
        for direction in boundary.directions:
            received = boundary.in_step(direction, lambda traffic: traffic.received.sum(axis=0))
            sent = boundary.in_step(direction, lambda traffic: traffic.sent.sum(axis=0))
            ends = boundary.edge.ends if direction == "forward" else boundary.edge.ends[::-1]
            table.add_row(
                *ends, f"{rows * samples:,}", size_text(int(received.sum()) * unit),
                size_text(int(received.max(initial=0)) * unit),
                size_text(int(sent.max(initial=0)) * unit), _operations(boundary, direction),
            )  # fmt: skip
    return table


def _operations(boundary: BoundaryTraffic, direction: str) -> str:
    if boundary.point_to_point:
        return f"{boundary.in_step(direction, lambda traffic: traffic.messages):,} messages in all"
    count = boundary.in_step(direction, lambda traffic: len(traffic.phases))
    return f"{count:,} collective{'s' * (count != 1)}"


def _experts(estimate: Estimate) -> Table:
    table = _table(
        "Experts, in a step", "module", "split", "experts of a rank", "rows received",
        "bytes received by a rank", "all-to-alls of a rank", "waits of its host", left=2,
    )  # fmt: skip
    layout, traffic = estimate.job.layouts[TEXT], estimate.experts
    ranks, sparse = ranks_of_experts(layout), expert_mlps(estimate.job.shapes.text.architecture.layers)
    table.add_row(
        TEXT, f"ep:{ranks}", _between(experts_of_ranks(sparse[0].experts, ranks)), _between([t.rows for t in traffic]),
        size_text(max(t.received for t in traffic)), _between([t.exchanges for t in traffic]),
        _between([t.waits for t in traffic]),
    )  # fmt: skip
    return table


def _experts_text(estimate: Estimate) -> str:
    imbalance = estimate.job.config.plan.expert_imbalance
    return (
        f"Memory and time are those of a rank whose experts get {imbalance:g} times the mean of tokens "
        "(plan.expert_imbalance). Rows, from other ranks, are those of a layer in a micro-batch; rows and bytes are "
        "averages. On GPUs of compute capabilities other than 9 and 10 the host waits once more per sparse layer and "
        "micro-batch."
    )


def _memory(estimate: Estimate) -> Table:
    table = _table("Memory of a rank", "ranks", "number", "holds", *KINDS, "allowance", "total", left=1)
    table.columns[2].justify = "left"
    schedule = estimate.job.schedule
    ranks_by_row: dict[tuple[str, ...], list[int]] = {}
    largest: dict[str, tuple[int, tuple[str, ...]]] = {}  # for each role, the largest total and its row
    sizes = np.column_stack([estimate.memory, estimate.allowance.sum(axis=1), estimate.totals])
    for rank, rank_sizes in enumerate(sizes.tolist()):
        name, total = schedule.roles[schedule.role_index[rank]].name, rank_sizes[-1]
        row = (name, *map(size_text, rank_sizes))
        ranks_by_row.setdefault(row, []).append(rank)
        largest[name] = max(largest.get(name, (0, row)), (total, row), key=lambda pair: pair[0])
    shown = list(ranks_by_row) if len(ranks_by_row) <= SHOWN_KINDS else [row for _, row in largest.values()]
    for row in shown:
        ranks = ranks_by_row[row]
        table.add_row(shortened(ranks), f"{len(ranks):,}", *row)
    if left := len(ranks_by_row) - len(shown):
        table.caption = f"{left} further kinds of ranks, each smaller than one that is shown and holds the same"
    return table


def _allowance_text(estimate: Estimate) -> str:
    """Return sentences about the entries of the allowance and the share of a GPU's memory in use."""
    worst, limit = int(estimate.totals.argmax()), estimate.job.config.plan.memory_bytes
    context, communicators, fragments = map(size_text, estimate.allowance[worst].tolist())
    text = (
        f"Allowance of the rank that needs most: {context} for the CUDA context and libraries, about "
        f"{communicators} for communicators, and {fragments} for fragmentation, {FRAGMENTATION:.3g} of the tensors."
    )
    if limit is None:
        return text
    return f"{text} It needs {estimate.totals[worst] / limit:.0%} of the {size_text(limit)} of a GPU (plan.memory_gb)."


def _host_text(estimate: Estimate) -> str:
    """Return a sentence about the host memory of ranks and nodes; "" if no host memory is used."""
    kinds = {"optimizer states": estimate.host_states, "activations": estimate.host_activations}
    peaks = [f"{size_text(int(sizes.max()))} of {what}" for what, sizes in kinds.items() if sizes.any()]
    if not peaks:
        return ""
    node = max(estimate.host_memory[start : start + NODE].sum() for start in range(0, estimate.world_size, NODE))
    return (
        f"In host memory (--MODULE-offload): up to {' and '.join(peaks)} for a rank, {size_text(int(node))} on a node "
        f"of {NODE} ranks. "
    )


def _communicators(estimate: Estimate) -> Table:
    table = _table("Communicators", "used for", "number", "ranks of each", "memory of a rank, about", left=1)
    table.columns[2].justify = "left"
    for kind in estimate.communicators:
        first, *more = kind.groups
        ranks = f"{shortened(first)}{f'; {shortened(more[0])}' if more else ''}{'; …' if len(more) > 1 else ''}"
        table.add_row(str(kind), f"{len(kind.groups):,}", ranks, size_text(kind_bytes(kind)))
    return table


def _communicators_text(estimate: Estimate) -> str:
    ranks = [role.ranks[0] for role in estimate.job.schedule.roles]
    count = max(sum(bool(kind.uses_of(rank)) for kind in estimate.communicators) for rank in ranks)
    buffers = estimate.allowance[:, ALLOWANCES.index("communicators")]
    worst = int(buffers.argmax())
    return (
        f"Created by {len(estimate.communicators)} calls of all ranks, in addition to the world's. A rank has at most "
        f"{count}, and about {size_text(int(buffers[worst]))} of NCCL's buffers once all have been used (rank "
        f"{worst}), by figures from eight H100 with NVLink; NCCL_MAX_P2P_NCHANNELS and NCCL_MAX_CTAS lower it."
    )


# ----------------------------------------------------------------------------------------------- schedule


def _schedule(estimate: Estimate, width: int) -> Iterator[str]:
    simulation = estimate.simulation
    lengths = [span.end - span.start for spans in simulation.spans for span in spans if span.action.op == "run"]
    lengths = [length for length in lengths if length > 0]
    unit = max(min(lengths), max(lengths) / 4) if lengths else 1.0
    columns = max(10, width // 5)
    lines = timeline(simulation, unit=unit, columns=columns).splitlines()
    yield f"Schedule; work takes as long as it has operations, a cell is {unit / 1e12:,.3g} TFLOP of a rank"
    first, last = SHOWN_ROLES
    if len(lines) > first + last + 1:
        lines[first:-last] = [f"… {len(lines) - first - last} more roles"]
    yield from lines
    shares = {role.label: simulation.bubble(role.ranks[0]) for role in estimate.job.schedule.roles}
    low, high = min(shares, key=shares.__getitem__), max(shares, key=shares.__getitem__)
    cells = round(simulation.seconds / unit)
    if cells > columns:
        yield f"These are {columns} of {cells:,} cells; --plan-svg FILE draws all."
    yield (
        f"Ranks wait {simulation.mean_bubble:.1%} of the step on average; the least {shares[low]:.1%} ({low}), "
        f"the most {shares[high]:.1%} ({high}); of each line's ranks those that have most to do"
    )


def show_estimate(config: Config, request: EstimateRequest) -> None:
    """Print the estimate of a configuration, and draw the estimate if `request` has a plot file. Raises `UserError`."""
    plot = request.plot
    if plot is not None:
        require_plot(plot)
    if request.files:
        require_files(config)
    estimate = Estimate.of(config, request.world_size)
    print_estimate(estimate)
    if plot is not None:
        replaced = ", replacing the previous file" if plot.exists() else ""
        draw_estimate(estimate, plot)
        print(f"\nwrote {plot}{replaced}")


def require_files(config: Config) -> None:
    """Check that the weight files and data sets of a configuration exist. Raises `UserError`."""
    from megatron_hetero.data.sources.patterns import require_matches
    from megatron_hetero.hf.model_files import weight_files

    model = config.model
    folders = [model.hf_path, model.hf_path_vision, *config.further_folders.values()]
    adapters = [row.lora.hf_path for row in config.modules.values()]
    for file in (file for folder in folders if folder is not None for file in weight_files(folder, adapters)):
        if not file.is_file():
            expected, fix = "weights, which the folder's index names", "download or copy the folder again"
            raise UserError.at(file, found=_found(file), expected=expected, fix=fix)
    names = [text.split("%")[0] for text in config.data.datasets]
    for name in dict.fromkeys([*names, *config.eval.datasets]):
        entry, setting = config.data.registry[name], f"data.registry.{name}"
        if entry.files is not None:
            require_matches(entry.files, f"{setting}.files (--{setting}.files)")
        for field, path, exists, expected in (
            ("annotations", entry.annotations, Path.is_file, "a file of records"),
            ("images", entry.images, Path.is_dir, "the folder that image paths are relative to"),
        ):
            if path is not None and not exists(path):
                where, found = f"{setting}.{field} (--{setting}.{field})", f"{path}: {_found(path)}"
                raise UserError.at(where, found=found, expected=expected, fix="correct the path")


def _found(path: Path) -> str:
    return "a folder" if path.is_dir() else "something else" if path.exists() else "nothing there"
