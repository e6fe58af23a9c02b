"""Gradients of whole steps on real groups: faults, freezing, micro-batches without images or without samples."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks.measuring.actions import parsed
from megatron_hetero.base.errors import UserError
from megatron_hetero.schedule import gathering
from megatron_hetero.schedule.contract import StepResult
from megatron_hetero.schedule.program import Schedule
from megatron_hetero.step.buffers import BufferedGradients
from megatron_hetero.step.gradients import GradientSummary, GradientTable, clip_factor
from megatron_hetero.train.run import Run
from tests.functional.train.checks import EMPTY, assert_equal_gradients
from tests.support import runs as jobs
from tests.support.folders import ModelChoice, write_data, write_long, write_model
from tests.support.matrix import thinned
from tests.support.oracle import Oracle
from tests.support.pool import Pools
from tests.support.ranks import on_ranks
from tests.support.runs import MakeFlags

LAYOUTS = [
    ("sp:2,dp:2", "tp:4"),
    ("tp:2,dp:2", "tp:2,dp:2"),
    ("cp:2,dp:2", "sp:2,cp:2"),
    ("sp:2,cp:2", "cp:2,dp:2"),
    ("dp:2@0-1", "tp:2@2-3"),
]
PARTS = {"vision": "visual.", "projector": "visual.merger.", "text": ("model.", "lm_head.")}


def part_of(name: str) -> str:
    """The parameter group of a stored tensor."""
    return "projector" if name.startswith(PARTS["projector"]) else "vision" if name.startswith("visual.") else "text"


# ---------------------------------------------------------------------------------------------- clipping


def test_clip_factor() -> None:
    def factor(norm: float, limit: float) -> float:
        return clip_factor(torch.tensor(norm, dtype=torch.float64), limit).item()

    assert factor(5.0, 0.0) == factor(1.0, 1.0) == factor(0.0, 1.0) == factor(9.0, -1.0) == 1.0
    assert factor(4.0, 1.0) == 1.0 / (4.0 + 1e-6) and factor(4.0, 1.0) * 4.0 <= 1.0


FINE = [[1.5, 1.0, 1.0, 1.0, 4.0, 1.0, 1.0, 9.0], [2.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 7.0]]
"""Two ranks: a loss that counts and one that does not; two modules, of which the second rank trains one."""
FAULTS = [(0, 0, np.nan), (1, 0, -np.inf), (0, 3, 0.0), (1, 6, 0.0), (0, 4, np.inf), (1, 7, np.nan)]
"""Rank, column and value: losses, gradients that are not finite, and squares."""


@pytest.mark.parametrize("limit", [0.0, 0.7, 1e6])
def test_the_factor_on_the_device_is_that_of_the_summary(limit: float) -> None:
    table = GradientTable(torch.tensor(FINE, dtype=torch.float64), ("vision", "text"))
    summary = table.read()
    assert summary.faults == () and summary.norm == pytest.approx(20**0.5)
    norm = summary.norm / 3
    expected = (limit / (norm + 1e-6) if limit == 0.7 else 1.0) / 3
    assert table.scale(3, limit).float().item() == np.float32(expected)


@pytest.mark.parametrize("limit", [0.0, 0.7])
@pytest.mark.parametrize("rank, column, value", FAULTS)
def test_the_factor_is_nan_where_the_summary_has_faults(rank: int, column: int, value: float, limit: float) -> None:
    rows = torch.tensor(FINE, dtype=torch.float64)
    rows[rank, column] = value
    table = GradientTable(rows, ("vision", "text"))
    assert table.read().faults and table.scale(3, limit).isnan()


def test_the_norm_is_over_all_modules() -> None:
    assert GradientSummary(0.0, {"vision": 3.0, "text": 4.0}, ()).norm == 5.0


def test_clipping_scales_all_modules_equally(make_flags: MakeFlags, pools: Pools) -> None:
    flags = make_flags("sp:2,dp:2", "tp:4", "--optimizer.name sgd --optimizer.lr 0.1")
    whole = pools(4).run(jobs.step, flags)[0]
    limit = whole["norm"] / 3
    clipped = pools(4).run(
        jobs.step, make_flags("sp:2,dp:2", "tp:4", f"--optimizer.name sgd --optimizer.clip_grad {limit}")
    )[0]
    assert clipped["norm"] == pytest.approx(whole["norm"], rel=1e-6), "what is reported is the norm before clipping"
    total = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in clipped["gradient"].values()))
    assert total == pytest.approx(limit, rel=1e-4)
    for name, gradient in whole["gradient"].items():
        np.testing.assert_allclose(clipped["gradient"][name], gradient / 3, rtol=1e-3, atol=1e-6 * limit)


# ------------------------------------------------------------------------------------------------ faults


@pytest.fixture
def flags(request: pytest.FixtureRequest, make_flags: MakeFlags) -> list[str]:
    """A command line; its parameter are the arguments of `make_flags`."""
    return make_flags(*request.param)


@pytest.mark.parametrize(
    "where, rank, value",
    thinned(
        [("vision", 2, np.nan), ("text", 3, np.inf), ("text", 0, -np.inf), ("loss", 1, np.nan), ("loss", 2, np.inf)], 2
    ),
)
@pytest.mark.parametrize("flags", [("sp:4", "tp:2,dp:2", "--optimizer.name adamw")], ids=str, indirect=True)
@on_ranks(4)
def test_faults_name_module_rank_and_step(where: str, rank: int, value: float, flags: list[str]) -> None:
    """`value` is in one gradient of a module, or in the loss, on one rank."""
    run = jobs.build(flags)
    models: dict[str, Any] = {module.name: module.chunks[0] for module in run.trainer.optimizer.modules}
    here = run.trainer.topology.rank == rank

    def edit(module: str) -> None:
        if here and module == where:
            next(p for p in models[where].parameters() if p.requires_grad).main_grad.view(-1)[3] = value

    _, batch, _ = next(iter(run.batches()))
    before = jobs.stored(run)
    kind = "loss" if where == "loss" else f"gradient of module {where}"
    found = f"step 5: found a {kind} that is NaN or infinite on rank {rank}, expected"
    with _before_last_backward(run, edit, value if here and where == "loss" else 0.0):
        assert run.trainer.gradients(batch).faults == ((where, rank),)
        with pytest.raises(UserError, match=f"^{found}"):
            run.trainer.train_step(5, batch)
    after = jobs.stored(run)
    assert all((before[name] == after[name]).all() for name in before), "weights were updated"


@contextmanager
def _before_last_backward(run: Run, edit: Callable[[str], None], loss_too: float) -> Iterator[None]:
    """Let `edit(module)` change gradients before the last backward pass, in which sums over ranks begin; add
    `loss_too`.
    """
    real_run, real_expect = run.trainer.runner.run, run.trainer.optimizer.expect

    def with_loss(schedule: Schedule, load: Any) -> StepResult:
        result = real_run(schedule, load)
        return replace(result, loss=result.loss + loss_too)

    def expect(module: str, stage: int) -> None:
        edit(module)
        real_expect(module, stage)

    with (
        mock.patch.object(run.trainer.runner, "run", with_loss),
        mock.patch.object(run.trainer.optimizer, "expect", expect),
    ):
        yield


@pytest.fixture
def deep_flags(request: pytest.FixtureRequest, make_flags: MakeFlags, tmp_path: Path) -> list[str]:
    """A command line for two vision layers and four text layers. Its parameter: layouts, further flags, and numbers of
    pictures.
    """
    vision, text, more, pictures = request.param
    data = write_data(tmp_path, 8, seed=4, pictures=pictures)
    model = write_model(tmp_path / "model", ModelChoice(vision_layers=2, text_layers=4))
    return make_flags(vision, text, f"--model.hf_path {model} {more} --train.global_batch_size 4", data=data)


@pytest.mark.parametrize(
    "ranks, deep_flags",
    thinned(
        [
            (4, ("sp:2,dp:2", "pp:2,dp:2", "--schedule.virtual_stages 2", (0, 0, 1))),
            (2, ("sp:2", "tp:2", "", (1,))),
            (4, ("dp:4", "tp:2,dp:2", "--optimizer.name adamw", (0, 1))),
            (4, ("dp:2@0-1", "tp:2,dp:2@0-3", "--train.micro_batch_size 2", (0, 2))),
            (3, ("dp:1@0", "dp:2@1-2", "--schedule.run_ahead 1", (0, 1))),
        ],
        2,
    ),
    ids=str,
    indirect=["deep_flags"],
)
@on_ranks("ranks")
def test_sums_over_ranks_begin_within_the_last_backward_pass(ranks: int, deep_flags: list[str]) -> None:
    """Bucket by bucket, in one order; after it if a rank has no image in it, and before anything else; with the same
    bits as at the end of the step.
    """
    order, gradients, norm = _sums_and_runs(deep_flags, overlaps=True)
    late, expected, norm_later = _sums_and_runs(deep_flags, overlaps=False)
    within = Counter[str]()
    runs = [event for event in order if not event.startswith("+")]
    assert late[: len(runs)] == runs, "without overlap all sums begin at the end"
    for module in {event for event in runs if not event.startswith("/")}:
        sums = [place for place, event in enumerate(order) if event.startswith(f"+{module} ")]
        assert [order[place] for place in sums] == [f"+{module} {number}" for number in range(len(sums))]
        end = len(order) - 1 - order[::-1].index(f"/{module}")
        behind = [next(place for place in range(at, -1, -1) if not order[place].startswith("+")) for at in sums]
        assert {order[place] for place in behind} <= {module, f"/{module}"}
        assert all(order[place] == module or place == end for place in behind)
        within[module] += sum(order[place] == module for place in behind)
    assert norm == norm_later and all(np.array_equal(gradients[name], expected[name]) for name in expected)
    of_ranks: list[Any] = [None] * ranks
    dist.all_gather_object(of_ranks, within)
    assert all(any(found[module] for found in of_ranks) for module in ("text", "vision"))


def _sums_and_runs(flags: list[str], *, overlaps: bool) -> tuple[list[str], dict[str, Any], float]:
    """Run a step with small buckets. Returns where backward passes of modules on this rank begin and end ("text",
    "/text"), and where sums of buckets begin ("+text 0"); gradients, not scaled, and their norm. `overlaps`: whether
    sums begin before the end of the step.
    """
    with mock.patch.object(gathering, "BUCKET", 1000):
        run, order = jobs.build(flags), list[str]()
    if not overlaps:
        run.trainer.runner.optimizer = None
    real_lap, real_start = run.trainer.runner.watch.lap, BufferedGradients._start

    @contextmanager
    def lap(name: str, label: str = "") -> Iterator[None]:
        backward = parsed(label).kind == "B" and name in run.trainer.topology.layouts
        order.extend([name] * backward)
        with real_lap(name, label):
            yield
        order.extend([f"/{name}"] * backward)

    def start(sums: BufferedGradients, place: int) -> None:
        order.append(f"+{sums.name} {place}")
        real_start(sums, place)

    _, batch, _ = next(iter(run.batches()))
    with mock.patch.object(run.trainer.runner.watch, "lap", lap), mock.patch.object(BufferedGradients, "_start", start):
        summary = run.trainer.gradients(batch)
    return order, jobs.gradient(run), summary.norm


@pytest.mark.parametrize("flags", [("sp:2", "tp:1,dp:2", "--train.global_batch_size 2")], ids=str, indirect=True)
@pytest.mark.parametrize("overlaps", [True, False])
@on_ranks(2)
def test_a_trace_shows_sums_within_the_backward_pass(overlaps: bool, flags: list[str]) -> None:
    """Inside the nodes of autograd that accumulate gradients."""
    with mock.patch.object(gathering, "BUCKET", 1000):
        run = jobs.build(flags)
    if not overlaps:
        run.trainer.runner.optimizer = None
    _, batch, _ = next(iter(run.batches()))
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        run.trainer.gradients(batch)
    events = sorted(trace.events() or [], key=lambda event: event.time_range.start)
    found, inside = set[str](), set[str]()
    for event in (event for event in events if event.name.endswith("gradient sums")):
        found.add(event.name)
        around = [e.name for e in events if e.time_range.start <= event.time_range.start < e.time_range.end]
        if any("AccumulateGrad" in name for name in around):
            inside.add(event.name)
    if run.trainer.topology.rank == 0:
        assert found == {"text gradient sums", "vision gradient sums"}
        assert inside == (found if overlaps else set())


# ---------------------------------------------------------------------------------------------- freezing


FROZEN = ["vision", "projector", "text", "vision projector", "vision text", "projector text"]


@pytest.mark.parametrize("layouts, frozen", thinned(product(LAYOUTS[::2], FROZEN), 7))
def test_frozen_parts_stay_and_the_others_do_not_notice(
    layouts: tuple[str, str], frozen: str, make_flags: MakeFlags, pools: Pools
) -> None:
    common = "--optimizer.name sgd --optimizer.lr 0.1 --train.micro_batch_size 4"
    whole = pools(4).run(jobs.step, make_flags(*layouts, common, batch=8))[0]
    got = pools(4).run(jobs.step, make_flags(*layouts, f"{common} --model.freeze {frozen}", batch=8))[0]
    trained = {n: g for n, g in whole["gradient"].items() if part_of(n) not in frozen.split()}
    assert_equal_gradients({n: got["gradient"][n] for n in trained}, trained)
    norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in trained.values()))
    assert got["norm"] == pytest.approx(norm, rel=1e-5) and got["loss"] == pytest.approx(whole["loss"], rel=1e-6)
    for name, before in got["before"].items():
        assert (got["after"][name] == before).all() == (name not in trained), name


def test_freezing_with_adamw_and_recomputation(make_flags: MakeFlags, pools: Pools) -> None:
    common = "--optimizer.name adamw --optimizer.lr 0.01 --text-recompute full"
    for frozen in ("vision", "text", "vision projector"):
        how = "none" if frozen == "vision projector" else "full"  # A whole encoder that is frozen has no backward pass.
        more = f"{common} --vision-recompute {how} --model.freeze {frozen}"
        got = pools(4).run(jobs.step, make_flags("sp:4", "tp:2,dp:2", more))[0]
        for name, before in got["before"].items():
            assert (got["after"][name] == before).all() == (part_of(name) in frozen.split()), (frozen, name)


PATTERNS = {
    "--model.freeze model.layers.*.mlp.* visual.blocks.0.*": r"model\.layers\.\d+\.mlp|visual\.blocks\.0\.",
    "--model.freeze vision model.layers.0.* model.embed_tokens.weight lm_head.weight": (
        r"visual\.(?!merger)|model\.layers\.0\.|model\.embed|lm_head"
    ),
    "--model.train *norm* visual.merger.mlp.*": r"(?!.*norm)(?!visual\.merger\.mlp)",
    "--model.train model.layers.1.self_attn.* --model.freeze *.o_proj.*": r"(?!model\.layers\.1\.self_attn\.[qkv])",
}
"""And what they freeze, as a regular expression."""


PARTLY_FROZEN_IN = [
    ("sp:2,dp:2", "tp:4", "--train.micro_batch_size 4"),
    ("tp:2,dp:2", "tp:2,dp:2", "--text-zero 2"),
    ("dp:4", "cp:2,dp:2", "--text-zero 3 --vision-zero 3 --text-recompute full"),
    ("pp:2@0-1", "pp:2@2-3", "--schedule.run_ahead 1"),
    ("pp:2,dp:2", "pp:2,tp:2", "--schedule.kind recompute"),
]


@pytest.mark.parametrize(
    "setting, vision, text, more",
    thinned([(setting, *layout) for layout in PARTLY_FROZEN_IN for setting in PATTERNS], 7),
)
def test_tensors_frozen_one_by_one_stay_and_the_others_do_not_notice(
    setting: str, vision: str, text: str, more: str, make_flags: MakeFlags, pools: Pools, tmp_path: Path
) -> None:
    """A stage may have nothing that trains, and a layer may train in part."""
    model = write_model(tmp_path / "model", ModelChoice(vision_layers=2, text_layers=2))
    common = f"--model.hf_path {model} --optimizer.name sgd --optimizer.lr 0.1"
    whole = pools(1).run(jobs.step, make_flags("dp:1", "dp:1", common, batch=8))[0]
    got = pools(4).run(jobs.step, make_flags(vision, text, f"{common} {more} {setting}", batch=8))[0]
    trained = {n: g for n, g in whole["gradient"].items() if not re.match(PATTERNS[setting], n)}
    assert trained and len(trained) < len(whole["gradient"])
    assert_equal_gradients({n: got["gradient"][n] for n in trained}, trained)
    norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in trained.values()))
    assert got["norm"] == pytest.approx(norm, rel=1e-5) and got["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    for name, before in got["before"].items():
        assert (got["after"][name] == before).all() == (name not in trained), name


TABLE_ALONE = ["--model.freeze model.embed_tokens.weight", "--model.train model.embed_tokens.*"]


@pytest.mark.parametrize("setting, optimizer", thinned(product(TABLE_ALONE, ["adamw", "sgd"]), 5))
def test_a_tied_embedding_frozen_or_alone(
    setting: str, optimizer: str, make_flags: MakeFlags, pools: Pools, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model", ModelChoice(vision_layers=2, text_layers=2, tied=True))
    more = f"--model.hf_path {model} --optimizer.name {optimizer} --optimizer.lr 0.01 --train.iters 3 {setting}"
    expected = pools(1).run(jobs.losses, make_flags("dp:1", "dp:1", more, batch=8))[0]
    for vision, text, how in (("dp:2", "pp:2", ""), ("dp:2", "tp:2", "--text-recompute full --vision-zero 1")):
        found = pools(2).run(jobs.losses, make_flags(vision, text, f"{more} {how}", batch=8))[0]
        assert found == pytest.approx(expected, rel=1e-5)


# --------------------------------------------------------------------------------- nothing to encode, or to read


def steps_of_oracle(model: Path, data: Path, steps: list[list[int]]) -> list[tuple[float, dict[str, torch.Tensor]]]:
    oracle = Oracle.load(model, data)
    return [oracle.step(numbers) for numbers in steps]


PICTURES = [(0, 1), (0, 0, 2, 0), (0,)]


@pytest.mark.parametrize("layouts, pictures", thinned(product([*LAYOUTS, ("dp:4", "dp:4")], PICTURES), 7), ids=str)
def test_micro_batches_without_images(
    layouts: tuple[str, str], pictures: tuple[int, ...], make_flags: MakeFlags, pools: Pools, small_model: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    data = write_data(tmp_path, 8, seed=4, pictures=pictures)
    flags = make_flags(*layouts, "--train.iters 2", data=data)
    expected = steps_of_oracle(small_model, data, [list(range(4)), list(range(4, 8))])
    got = pools(4).run(jobs.gradients_of_steps, flags)[0]
    for step, (loss, gradients) in zip(got, expected, strict=True):
        assert step["loss"] == pytest.approx(loss, rel=1e-5)
        assert_equal_gradients(step["gradient"], gradients)
        if pictures == (0,):
            assert all(not g.any() for n, g in step["gradient"].items() if n.startswith("visual."))


def test_a_step_without_images_updates_no_vision_weight(make_flags: MakeFlags, pools: Pools, tmp_path: Path) -> None:
    data = write_data(tmp_path, 4, pictures=(0,))
    for frozen in ("", "--model.freeze text", "--model.freeze vision projector"):
        flags = make_flags("sp:4", "tp:2,dp:2", f"--optimizer.name adamw --optimizer.lr 0.01 {frozen}", data=data)
        got = pools(4).run(jobs.step, flags)[0]
        assert got["images"] == 0
        changed = {part_of(n) for n, before in got["before"].items() if (got["after"][n] != before).any()}
        assert changed == (set() if frozen == "--model.freeze text" else {"text"})


@pytest.mark.parametrize("frozen", thinned(["vision", "vision projector", "text", "text projector"], 3))
@pytest.mark.parametrize("vision, text, more", [
    ("pp:2@0-1", "pp:2@1-2", ""),
    ("pp:2", "pp:2", "--schedule.kind recompute"),
])  # fmt: skip
def test_frozen_parts_of_modules_with_stages(
    frozen: str, vision: str, text: str, more: str, make_flags: MakeFlags, pools: Pools, tmp_path: Path
) -> None:
    """A stage may be frozen as a whole, and others of its module not."""
    model = write_model(tmp_path / "model", ModelChoice(vision_layers=2, text_layers=2))

    def step(ranks: int, vision: str, text: str, more: str) -> dict[str, Any]:
        flags = make_flags(vision, text, f"--model.hf_path {model} --model.freeze {frozen} {more}")
        return pools(ranks).run(jobs.gradients_of_steps, flags)[0][0]

    expected, got = step(1, "dp:1", "dp:1", ""), step(3 if "@" in vision else 2, vision, text, more)
    assert got["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert_equal_gradients(got["gradient"], expected["gradient"])


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_stages_update_next_to_frozen_ones(optimizer: str, make_flags: MakeFlags, pools: Pools, tmp_path: Path) -> None:
    """A stage that is frozen as a whole has no optimizer; those of the other stages wait for it nowhere."""
    model = write_model(tmp_path / "model", ModelChoice(vision_layers=2, text_layers=2))
    more = f"--model.hf_path {model} --model.freeze vision --optimizer.name {optimizer} --optimizer.lr 0.01"
    more += " --optimizer.clip_grad 1.0 --train.iters 2"
    expected = pools(1).run(jobs.losses, make_flags("dp:1", "dp:1", more, batch=8))[0]
    for vision, text, ranks in (("pp:2", "dp:2", 2), ("pp:2@0-1", "pp:2@1-2", 3)):
        found = pools(ranks).run(jobs.losses, make_flags(vision, text, more, batch=8))[0]
        assert found == pytest.approx(expected, rel=1e-5)


LEFT_EMPTY = [
    ("sp:2,dp:2", "tp:2,dp:2", ""),
    ("dp:2@0-1", "dp:2@2-3", ""),
    ("dp:4", "tp:2,dp:2", "--text-sequence_parallel false"),
    ("cp:2,dp:2", "cp:2,dp:2", ""),
    ("sp:2,cp:2", "sp:2,dp:2", ""),
    ("tp:4", "tp:2,dp:2", "--text-recompute full"),
]


@pytest.mark.parametrize("layouts, empty", thinned(product(LEFT_EMPTY, EMPTY), 5), ids=str)
def test_long_samples_are_skipped_and_packs_may_be_empty(
    layouts: tuple[str, str, str], empty: tuple[set[int], int], make_flags: MakeFlags, pools: Pools, small_model: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    (vision, text, more), (long, micro) = layouts, empty
    data = write_data(tmp_path, 4, seed=8, pictures=(2, 1, 0, 1))
    write_long(data, long)
    kept = [i for i in range(4) if i not in long]
    more += f" --data.max_seq_length 200 --data.too_long skip --train.micro_batch_size {micro}"
    got = pools(4).run(jobs.gradients_of_steps, make_flags(vision, text, more, data=data))[0][0]
    [(loss, gradients)] = steps_of_oracle(small_model, data, [kept])
    assert got["loss"] == pytest.approx(loss, rel=1e-5)
    assert len(got["lengths"]) == 2 and got["tokens"] == sum(got["lengths"])
    assert_equal_gradients(got["gradient"], gradients)


@pytest.mark.parametrize("iters, trained, skipped", [(1, 0, 4), (5, 1, 8)])
def test_a_run_without_a_sample_that_is_short_enough_is_refused(
    iters: int, trained: int, skipped: int, make_flags: MakeFlags, pools: Pools
) -> None:
    """After as many in a row as an epoch has, which are two steps, or all of the run."""
    more = f"--train.iters {iters} --data.max_seq_length 3 --data.too_long skip"
    for done, message in pools(4).run(jobs.error_of, make_flags("sp:4", "tp:2,dp:2", more)):
        assert done == trained and f"all of {skipped} samples" in message
        assert message.startswith(f"data.max_seq_length (--data.max_seq_length), step {trained + 1}: ")
