"""Plans of whole configurations: numbers that follow from the layouts, problems, output, pictures, bad input."""

from __future__ import annotations

import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_hetero.base.errors import UserError
from megatron_hetero.config.schema import load_command, load_config
from megatron_hetero.config.sections import DatasetConfig
from megatron_hetero.estimate.estimate import KINDS, Estimate
from megatron_hetero.estimate.plot import draw_estimate
from megatron_hetero.estimate.problems import problems_of, shortened
from megatron_hetero.estimate.report import assumptions, print_estimate, require_files, show_estimate, size_text
from megatron_hetero.hf.weight_map import split_length
from tests.support.shapes import parameter_count
from tests.support.work import calls
from tests.unit.estimate.conftest import MakePlan

ROOT = Path(__file__).parents[3]


def _found(plan: object) -> str:
    return "\n".join(f"{problem.found} -> {problem.fix}" for problem in problems_of(plan))  # pyright: ignore[reportArgumentType]


# ------------------------------------------------------------------------------------------------ numbers


def test_stages_hold_the_whole_model_once(make_plan: MakePlan) -> None:
    plan = make_plan(8, "pp:2,dp:4", "pp:4,dp:2")
    vision = plan.job.shapes.encoders["vision"]
    (width,) = vision.architecture.layers[0].mlp.widths
    pads = split_length(width, 1) - width
    zeros = vision.layers * pads * (3 * vision.hidden + 2)
    held = sum(of_stage.parameters for of_stage in plan.parameters.values())
    assert pads and held == parameter_count(plan.job.shapes) + zeros


def test_what_a_setting_is_for_shows_in_the_memory(make_plan: MakePlan) -> None:
    layouts = 8, "sp:8", "tp:2,pp:2,dp:2", "--train.global_batch_size 32"
    activations, optimizer = KINDS.index("activations"), KINDS.index("optimizer")
    usual = make_plan(*layouts).memory
    for flag in ("--schedule.waves 1", "--schedule.kind recompute", "--vision-recompute full"):
        found = make_plan(*layouts[:3], f"{layouts[3]} {flag}").memory
        assert (found[:, activations] < usual[:, activations]).all(), flag
        assert (found[:, :activations] == usual[:, :activations]).all(), flag
    sgd = make_plan(*layouts[:3], f"{layouts[3]} --optimizer.name sgd").memory
    assert (sgd[:, optimizer] < usual[:, optimizer]).all()


def test_encoder_activations_do_not_grow_with_the_micro_batches(make_plan: MakePlan) -> None:
    found = [
        make_plan(4, "sp:4", "pp:4", f"--schedule.waves 4 --train.global_batch_size {batch}").memory
        for batch in (16, 32)
    ]
    assert (found[0] == found[1]).all()


@pytest.mark.parametrize(
    "vision, text",
    [("sp:8", "tp:4,pp:16,dp:{}"), ("dp:{}@0-{}", "tp:4,pp:16,dp:{}@{}-{}")],
    ids=["colocated", "disjoint"],
)
def test_16k_ranks_are_hardly_more_work_than_one_thousand(vision: str, text: str, make_plan: MakePlan) -> None:
    def plan_of(replicas: int) -> Estimate:
        world, apart = 64 * replicas, replicas * ("@" in vision)
        layouts = vision.format(replicas, apart - 1), text.format(replicas, apart, world + apart - 1)
        plan = make_plan(world + apart, *layouts, f"--train.global_batch_size {32 * replicas}")
        assert len(plan.memory) == world + apart and (plan.memory[:, 0] > 0).all()
        return plan

    plan_of(8)  # What all plans share is computed once.
    assert calls(plan_of, 256) < 3 * calls(plan_of, 16), "not 16 times as much"


# ----------------------------------------------------------------------------------------------- problems


@pytest.mark.parametrize(
    "world, vision, text, more, words",
    [
        (8, "dp:8", "tp:4,dp:2", "", ("6 of the 8 replicas of vision", "raise train.micro_batch_size")),
        (14, "dp:14", "sp:7,tp:2", "", ("key/value heads for tp:2 and sp:7", "cp")),
        (4, "sp:4", "pp:4", "--schedule.waves 1", ("wait for up to", "--schedule.waves 2")),
        (29, "dp:1@0", "tp:28@1-28", "", ("of text wait ", "give vision more")),
        (9, "dp:8@0-7", "tp:1@8", "--plan.image_side 140", ("of vision wait ", "give it fewer ranks")),
        (4, "sp:4", "pp:4", "--text-layers 10 2 2 2", ("stage 0 of text", "--text-layers")),
        (1, "dp:1", "dp:1", "--plan.memory_gb 0.5", ("is not enough for 1 rank", "needs")),
        (1, "dp:1", "dp:1", "--plan.memory_gb 30 --plan.images 3", ("of the rest ", "--world-size 2")),
        (1, "dp:1", "dp:1", "--plan.tokens 4000", ("more than data.max_seq_length", "raise data.max_seq_length")),
        (1, "dp:1", "dp:1", "--data.min_pixels 900000", ("fewer than data.min_pixels", "--plan.image_side 949")),
        (1, "dp:1", "dp:1", "--data.max_pixels 200704", ("more than data.max_pixels", "--plan.image_side 448")),
        (8, "sp:8", "tp:4,dp:2", "--plan.image_side 112", ("no window of", "lower sp or cp")),
        (1, "dp:1", "dp:1", "--plan.memory_gb 16 --train.tokens_per_micro_batch 16384",
         ("tokens_per_micro_batch",)),
        (8, "dp:8", "tp:4,dp:2", "--train.tokens_per_micro_batch 4096", ("raise train.tokens_per_micro_batch",)),
        (16, "tp:16", "tp:4,dp:4", "", ("the MLP width of vision, 340, is padded to 384", "a tp of vision")),
    ],
)  # fmt: skip
def test_problems_are_found_with_what_to_do(
    world: int, vision: str, text: str, more: str, words: tuple[str, ...], make_plan: MakePlan
) -> None:
    found = _found(make_plan(world, vision, text, more))
    assert all(word in found for word in words), found


def test_a_token_budget_is_planned_as_if_it_were_used_up(make_plan: MakePlan) -> None:
    """Five samples of 1,638 tokens in 8,192, of which 1,024 are rows; of the global batch, as many micro-batches."""
    layouts, batch = (2, "sp:2", "tp:2"), "--train.global_batch_size 40"
    budget = make_plan(*layouts, f"{batch} --train.tokens_per_micro_batch 8192")
    samples = make_plan(*layouts, f"{batch} --train.micro_batch_size 5 --plan.tokens 614")
    assert (budget.job.batch, budget.assumed.sample) == (samples.job.batch, samples.assumed.sample)
    assert budget.job.batch.micro_batches == 8 and (budget.memory == samples.memory).all()
    assert "more than data.max_seq_length" not in _found(budget)
    told = "\n".join(assumptions(budget))
    assert "40 samples, 8 micro-batches of 5 " in told and "full, 8,192 tokens (train.tokens_per_micro_batch)" in told
    fewer = make_plan(*layouts, f"{batch} --train.tokens_per_micro_batch 8192 --train.patches_per_micro_batch 9000")
    assert fewer.job.batch.samples == 2 and fewer.assumed.sample.tokens == 4096


@pytest.mark.parametrize(
    "more, message",
    [
        ("--plan.tokens 9000", "samples of 10024 tokens, expected at most train.tokens_per_micro_batch = 8192"),
        ("--train.patches_per_micro_batch 4000", "4096 patches, expected at most train.patches_per_micro_batch = 4000"),
    ],
)
def test_an_assumed_sample_beyond_the_budget_is_refused(more: str, message: str, make_plan: MakePlan) -> None:
    with pytest.raises(UserError, match=message):
        make_plan(1, "dp:1", "dp:1", f"--train.tokens_per_micro_batch 8192 {more}")


def test_each_text_replica_has_a_sample(make_plan: MakePlan) -> None:
    with pytest.raises(UserError, match="found 2, expected 4 or more, .* Try --train.global_batch_size 4"):
        make_plan(4, "dp:4", "dp:4", "--train.tokens_per_micro_batch 8192 --train.global_batch_size 2")


@pytest.mark.parametrize(
    "samples, vision, more, axes, fix",
    [
        (8, "sp:8", "", "sp:8", "has 8: try --vision-parallel dp:8"),
        (8, "sp:2,dp:4", "", "sp:2", "has 8: try --vision-parallel dp:8"),
        (4, "tp:2,cp:2,dp:2", "", "cp:2", "has 4: try --vision-parallel tp:2,dp:4"),
        (4, "sp:4@0-3", "--text-parallel tp:4@4-7", "sp:4", "has 4: try --vision-parallel dp:4@0-3"),
        (2, "sp:2,cp:2,dp:2", "--schedule.kind recompute", "sp:2,cp:2", "has 2 images, and with 8 or more"),
        (1, "sp:8", "--model.freeze vision", "sp:8", "has 1 image, and with 8 or more"),
        (1, "sp:8", "--vision-recompute full", "sp:8", "for large images"),
    ],
)
def test_an_encoder_without_windows_had_better_get_whole_images(
    samples: int, vision: str, more: str, axes: str, fix: str
) -> None:
    found = _found(_plan_without_windows(vision, f"--train.micro_batch_size {samples} {more}"))
    assert f"each of its 27 layers exchanges tokens over {axes} ->" in found, found
    assert fix in found


@pytest.mark.parametrize(
    "vision, more", [("tp:8", ""), ("tp:2,dp:4", "--train.micro_batch_size 4"), ("sp:8", "--plan.images 0")]
)
def test_an_encoder_without_windows_exchanges_nothing_over_other_axes_or_without_images(vision: str, more: str) -> None:
    assert "has no windows" not in _found(_plan_without_windows(vision, more))


def test_windows_stay_on_their_ranks(make_plan: MakePlan) -> None:
    assert "has no windows" not in _found(make_plan(8, "sp:8", "tp:4,dp:2", "--train.micro_batch_size 4"))


def test_what_is_suggested_in_place_of_exchanges_is_planned_without_them() -> None:
    flags = "--train.micro_batch_size 8"
    fix = next(p.fix for p in problems_of(_plan_without_windows("sp:2,cp:2,tp:2", flags)) if "whole images" in p.fix)
    assert problems_of(_plan_without_windows(fix.split()[-1], flags)) == ()


def _plan_without_windows(vision: str, more: str) -> Estimate:
    """A model of 27 layers of full attention on eight ranks, its text module under tp:8 if `more` does not say else."""
    text = "" if "--text-parallel" in more else "--text-parallel tp:8"
    flags = (
        f"--model.hf_path {ROOT}/examples/models/qwen3_vl_8b --data.registry.d.annotations none.json --data.datasets d "
        f"--train.global_batch_size 32 --vision-parallel {vision} {text} {more}"
    )
    return Estimate.of(load_config(flags.split()), 8)


def test_what_is_computed_again_takes_time(make_plan: MakePlan) -> None:
    def backward(more: str) -> list[float]:
        """Of both text stages, where a forward pass takes 1."""
        work = make_plan(4, "sp:4", "tp:2,pp:2", more).work
        return [work["text", "B", stage] / work["text", "F", stage] for stage in (0, 1)]

    assert backward("") == backward("--text-recompute selective") == [2, 2]
    assert backward("--text-recompute full") == [3, 3]
    assert backward("--text-recompute 4") == [2.5, 2.5]
    assert backward("--text-recompute 5 --text-layers 4 12") == pytest.approx([3, 2 + 5 / 12])
    assert all(2.3 < of_stage < 2.6 for of_stage in backward("--text-chunk 512"))
    assert backward("--text-chunk 1000000") == [2, 2]


def test_chunks_do_not_grow_with_the_sequence() -> None:
    """A text of 131,072 tokens, and a picture of 65,536 patches, in the memory of a GPU."""
    flags = (
        f"--model.hf_path {ROOT}/examples/models/qwen2_5_vl_7b --data.registry.d.annotations d.json --data.datasets d "
        "--train.global_batch_size 1 --vision-parallel sp:8 --text-parallel tp:4,cp:2 --plan.memory_gb 80 "
        "--data.max_seq_length 131072 --data.max_pixels 16777216"
    )
    chunks = "--text-recompute selective --text-chunk 8192 --vision-recompute full"
    for data in ("--plan.tokens 129708", "--plan.image_side 3584 --vision-chunk 4096"):
        usual, frugal = (
            Estimate.of(load_config([*flags.split(), *data.split(), *more.split()]), 8) for more in ("", chunks)
        )
        peaks = [plan.memory.sum(axis=1).max() for plan in (usual, frugal)]
        assert peaks[1] < 0.8 * peaks[0]
        assert not [problem for problem in problems_of(frugal) if "memory" in problem.found]


def test_a_good_plan_has_no_problems(make_plan: MakePlan) -> None:
    assert not problems_of(make_plan(4, "sp:4", "tp:4", "--train.global_batch_size 16 --plan.memory_gb 80"))


# ------------------------------------------------------------------------------------------------- output


def test_the_table_of_edges_in_the_docs_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs/boundaries.md").read_text(encoding="utf-8")
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in re.findall(r"^\| `.*", text, re.MULTILINE)]
    assert [row[:2] for row in rows] == [
        ["vision", "text"], ["text", "vision"], ["vision.0", "text.1"], ["text.1", "vision.0"]
    ]  # fmt: skip
    flags = (
        f"--config {ROOT}/examples/qwen3_vl_8b.yaml --model.hf_path {ROOT}/examples/models/qwen3_vl_8b "
        "--vision-parallel dp:4@0-3 --text-parallel tp:2,pp:2,dp:2@4-11 --text-layers 1 35"
    )
    print_estimate(Estimate.of(load_config(flags.split()), 12))
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert all(row in lines for row in rows)


def test_output_has_every_part(plan_flags: Callable[[str], list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--vision-parallel dp:2@0-1 --text-parallel tp:2,pp:2@2-5 --plan --world-size 6"
    show_estimate(*_with_plan(load_command(plan_flags(flags))))
    shown = capsys.readouterr().out
    for part in (
        "bfloat16 with adamw on 6 ranks", "1 image of 896x896 pixels (4,096 patches, 1,024 rows)", "512 further tokens",
        "Modules", "tp:2,pp:2", "Boundaries, in a step", "messages in all", "Memory of a rank", "Allowance of the rank",
        "Not counted:", "Problems",
        "Communicators", "text forward from stages 0", "Created by 6 calls", "2-3 text.0", "vF0", "Ranks wait",
    ):  # fmt: skip
        assert part in shown, part


# By layouts: the outputs that cross from one end to the other, and which part of their bytes ranks receive.
EDGES_OF_QWEN3 = [
    ("pp:2@0-1", "tp:2,pp:2@2-5", "1 15", 6, {
        ("vision", "text"): 1, ("vision.0", "text.0"): 1, ("vision.0", "text.1"): 1, ("vision.1", "text.1"): 1,
    }, 1),
    ("sp:4", "pp:4", "1 1 1 13", 4, {
        ("vision", "text"): 2, ("vision.0", "text.1"): 1, ("vision.0", "text.2"): 1,
    }, 3 / 4),
    ("dp:1@0", "tp:2@1-2", "", 3, {("vision", "text"): 4}, 1),
]  # fmt: skip


@pytest.mark.parametrize("vision, text, layers, world, edges, part", EDGES_OF_QWEN3)
def test_rows_that_enter_several_stages_are_listed_by_edge(
    vision: str, text: str, layers: str, world: int, edges: dict[tuple[str, str], int], part: float,
    qwen3_folder: Path, plan_flags: Callable[[str], list[str]], capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Of an encoder with four outputs, in a step of eight pictures of 784 rows of 4,096 elements."""
    more = f"--plan --world-size {world} --vision-parallel {vision} --text-parallel {text}"
    flags = plan_flags(f"{more} --text-layers {layers}" if layers else more)
    flags[flags.index("--model.hf_path") + 1] = str(qwen3_folder)
    show_estimate(*_with_plan(load_command(flags)))
    shown = capsys.readouterr().out
    [table] = re.findall(r"^Boundaries, in a step.*?\n\n", shown, re.MULTILINE | re.DOTALL)
    lines = [[cell.strip() for cell in line.strip("│").split("│")] for line in table.splitlines() if "│" in line]
    expected = {}
    for (source, target), outputs in edges.items():
        rows = 8 * 784 * outputs
        bytes_text = size_text(int(rows * 4096 * 2 * part))
        expected[source, target] = expected[target, source] = [f"{rows:,}", bytes_text]
    assert {(line[0], line[1]): line[2:4] for line in lines} == expected
    for source, target in expected:
        assert re.search(rf"│ {re.escape(f'{source}>{target}')} ", shown), "no communicator of its own"


def _with_plan(command: tuple) -> tuple:
    assert command[1] is not None
    return command


def test_samples_without_images_can_be_planned(
    plan_flags: Callable[[str], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    show_estimate(*_with_plan(load_command(plan_flags("--plan --plan.images 0"))))
    assert "Nothing crosses" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["plan.svg", "plan.png"])
def test_pictures_are_drawn(name: str, make_plan: MakePlan, tmp_path: Path) -> None:
    draw_estimate(make_plan(6, "sp:2@0,5", "tp:2,pp:2@1-4", "--train.global_batch_size 4"), tmp_path / name)
    assert (tmp_path / name).stat().st_size > 5000


def test_the_share_of_a_gpus_memory_is_printed(make_plan: MakePlan, capsys: pytest.CaptureFixture[str]) -> None:
    print_estimate(make_plan(1, "dp:1", "dp:1", "--plan.memory_gb b300"))
    shown = " ".join(capsys.readouterr().out.split())
    assert re.search(r"\d\d% of the 287\.43 GB .*\(plan\.memory_gb\)", shown), shown


def test_a_picture_that_cannot_be_written_is_refused(
    plan_flags: Callable[[str], list[str]], make_plan: MakePlan, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="text layout"):
        show_estimate(*_with_plan(load_command(plan_flags(f"--plan --plan-svg {tmp_path}/a.svg --text-parallel tp:3"))))
    plan, full = make_plan(2, "sp:2", "tp:2"), tmp_path / "full.svg"
    draw_estimate(plan, full)  # which loads fonts
    handler, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        with pytest.raises(UserError, match="full.svg: found file too large"):
            draw_estimate(plan, full)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert [path.name for path in tmp_path.iterdir()] == ["full.svg"]


def test_a_plot_that_is_replaced_is_reported(
    plan_flags: Callable[[str], list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = _with_plan(load_command(plan_flags(f"--plan --plan-svg {tmp_path}/a.png")))
    for _ in range(2):
        show_estimate(*planned)
    first, second = capsys.readouterr().out.split("\nwrote ")[1:]
    assert "replacing the previous file" not in first and "replacing the previous file" in second


def test_the_program_plans_without_processes_data_or_weights(plan_flags: Callable[[str], list[str]]) -> None:
    argv = plan_flags("--plan --world-size 2 --vision-parallel sp:2 --text-parallel tp:2")
    code = (
        "import pretrain_vlm, torch; from torch import distributed as dist; asked = torch.cuda.current_device; "
        f"pretrain_vlm.main({argv!r}); assert not dist.is_initialized() and torch.cuda.current_device is asked"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "No problems found." in done.stdout


def test_sizes_and_ranks_are_short() -> None:
    assert [size_text(n) for n in (0, 999, 1000, 2_500_000, 10**10)] == ["0", "999 B", "1.00 kB", "2.50 MB", "10.00 GB"]
    assert shortened(tuple(range(100))) == "0-99"
    assert shortened(tuple(range(0, 100, 2))).endswith(",…") and len(shortened(tuple(range(0, 100, 2)))) <= 28


# ---------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--plan --world-size 0", "--world-size: found `0`, "),
        ("--plan --world-size many", "--world-size: found `many`"),
        ("--plan --world-size", "--world-size: found no value"),
        ("--world-size 8", "--world-size: found it without --plan"),
        ("--plan-svg plan.svg", "--plan-svg: found it without --plan"),
        ("--plan-svg plan.svg --world-size 8", "without --plan"),
        ("--plan.images 2", "--plan.images: found it without --plan"),
        ("--plan yes", "--plan: found `yes`, expected no value"),
        ("--plan --plan-svg plan.gif", "plan.gif"),
        ("--plan --plan-svg /nowhere/plan.svg", "plot /nowhere/plan.svg: found no such file"),
        ("--plan --plan.image_side 0", "plan.image_side"),
        ("--plan --plan.supervised 2", "plan.supervised"),
        ("--plan --plan.memory_gb h10", "found `h10` (did you mean `h100`?), expected a10, a100, a100-40,"),
        ("--plan --plan.memory_gb 0", "plan.memory_gb (--plan.memory_gb): found 0.0, expected > 0"),
        ("--plan --world-size 4 --text-parallel tp:3", "text layout `tp:3`"),
        ("--plan --world-size 1000000", "--world-size: found `1000000`"),
        ("--plan --train.global_batch_size 1000000", "1000000 micro-batches "),
        ("--plan --train.global_batch_size 8000", "expected 4096 or less, 4096 micro-batches"),
        (
            "--plan --plan.images 1000000000000",
            "plan.images (--plan.images): found 1000000000000, expected ≥ 0 and ",
        ),
        ("--plan --plan.image_side 1000000000", "rows of images in a micro-batch"),
        (
            "--plan --plan.images 0 --train.global_batch_size 4000000 --train.micro_batch_size 1000000",
            "tokens in a pack",
        ),
        ("--plan --plan.tokens 1000000000000", "plan.tokens (--plan.tokens): found 1000000000000"),
        ("--plan --world-size 4 --vision-parallel dp:1@0", "global_batch_size"),
    ],
)
def test_bad_input_is_one_message(flags: str, message: str, plan_flags: Callable[[str], list[str]]) -> None:
    more = " --train.global_batch_size 6" if "dp:1@0" in flags else ""
    with pytest.raises(UserError, match=re.escape(message)):
        show_estimate(*_with_plan(load_command(plan_flags(flags + more))))


def test_files_are_looked_for_where_that_is_asked(
    plan_flags: Callable[[str], list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the job scripts do, before they start a rank."""
    config, request = _with_plan(load_command(plan_flags("--plan --plan-files")))
    held_out = DatasetConfig(annotations=tmp_path / "held.jsonl", images=tmp_path)
    config = replace(
        config,
        model=replace(config.model, hf_path=tmp_path / "model"),
        data=replace(config.data, registry={"a": DatasetConfig(annotations=tmp_path / "a.jsonl"), "h": held_out},
                     datasets=("a%50",)),
        eval=replace(config.eval, datasets=("h",), interval=1),
    )  # fmt: skip

    def refused() -> str:
        with pytest.raises(UserError) as error:
            require_files(config)
        return str(error.value)

    (tmp_path / "model").mkdir()
    assert "found no safetensors weights" in refused()
    (tmp_path / "model/model.safetensors").touch()
    assert refused().startswith("data.registry.a.annotations (--data.registry.a.annotations): found ")
    (tmp_path / "a.jsonl").touch()
    assert "data.registry.h.annotations" in refused() and "nothing there" in refused()
    (tmp_path / "held.jsonl").touch()
    require_files(config)
    assert request.files and not capsys.readouterr().out


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    flags = f"--plan --model.hf_path {tmp_path} --data.registry.d.annotations x --data.datasets d"
    with pytest.raises(UserError, match=r"config\.json"):
        show_estimate(*_with_plan(load_command(flags.split())))


def test_programs_that_make_no_plan_say_so(plan_flags: Callable[[str], list[str]]) -> None:
    with pytest.raises(UserError, match=r"use pretrain_vlm\.py|Use pretrain_vlm\.py"):
        load_config(plan_flags("--plan"))
