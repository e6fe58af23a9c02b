"""Whole runs: what is checked before they start, and what they leave behind."""

from __future__ import annotations

import time
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.profiler import ProfilerActivity, profile

from megatron_hetero.boundary.communicator import BoundaryCommunicator
from megatron_hetero.models.families.common import canonical_name
from megatron_hetero.models.stages import EncoderModel, TextModel
from tests.support import runs as jobs
from tests.support.folders import ModelChoice, write_data, write_model
from tests.support.matrix import thinned
from tests.support.pool import Pools
from tests.support.runs import Arrays, LiveBytes, MakeFlags, build, stored


def encoder_activations(flags: list[str]) -> tuple[int, int]:
    """The most bytes that the encoder saves for backward at a time in one step, and what is left of them after it."""
    run, live, forward = build(flags), LiveBytes(), EncoderModel.forward

    def counted(*args: Any) -> Any:
        with live.saving():
            return forward(*args)

    _, batch, _ = next(iter(run.batches()))
    with mock.patch.object(EncoderModel, "forward", counted):
        run.trainer.gradients(batch)
    return live.peak, live.now


def overlaps(flags: list[str]) -> dict[str, tuple[float, float]]:
    """Intervals, in microseconds, of a profiled step on rank 0, whose crossings wait for the other ranks.

    "forward" and "backward": the all-to-alls of the boundary; "embedding" and "gradient": those of the tokens, made
    slow, since a thread of gloo takes its time to begin.
    """
    run = build(flags)
    _, batch, _ = next(iter(run.batches()))
    run.trainer.gradients(batch)  # Once before, so that nothing is set up in the step that is watched.
    start, embed = BoundaryCommunicator._start, TextModel.embed

    def late_start(*args: Any) -> Any:
        time.sleep(0.0 if run.trainer.topology.rank == 0 else 0.4)
        return start(*args)

    def slow_embed(*args: Any) -> torch.Tensor:
        time.sleep(0.1)
        embedded = embed(*args)
        embedded.register_hook(lambda _: time.sleep(0.1))  # its gradient takes a while too
        return embedded

    with (
        mock.patch.object(BoundaryCommunicator, "_start", late_start),
        mock.patch.object(TextModel, "embed", slow_embed),
        profile(activities=[ProfilerActivity.CPU]) as trace,
    ):
        run.trainer.gradients(batch)
    events = sorted(trace.events() or [], key=lambda event: event.time_range.start)
    forward, backward = [e for e in events if e.name == "gloo:all_to_all"]
    [embedding] = [e for e in events if e.name == "text embedding"]
    [gradient] = [e for e in events if e.name == "EmbeddingBackward0"]
    named = {"forward": forward, "backward": backward, "embedding": embedding, "gradient": gradient}
    return {name: (event.time_range.start, event.time_range.end) for name, event in named.items()}


def export_of(flags: list[str], target: Path) -> Arrays:
    """Train one step and export; returns the weights as they were."""
    run = build(flags)
    _, batch, _ = next(iter(run.batches()))
    run.trainer.train_step(1, batch)
    run.export(target)
    return stored(run)


def mapped_weights(flags: list[str]) -> list[str]:
    """Build a run; returns the files of its weights that are still mapped."""
    run, own = build(flags), flags[flags.index("--model.hf_path") + 1]
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    del run  # It was there until now.
    return [line for line in lines if line.endswith(".safetensors") and own in line]


@pytest.mark.parametrize(
    "layouts, dtype", thinned(product([("sp:2,dp:2", "tp:4"), ("tp:4", "tp:2,dp:2")], ["float32", "bfloat16"]), 3)
)
def test_what_is_exported_is_what_was_trained(
    layouts: tuple[str, str], dtype: str, make_flags: MakeFlags, pools: Pools, tmp_path: Path
) -> None:
    flags = make_flags(*layouts, f"--optimizer.name adamw --optimizer.lr 1e-3 --model.dtype {dtype}")
    weights = pools(4).run(export_of, flags, tmp_path / "export")[0]
    exported = {canonical_name(n): t for n, t in load_file(tmp_path / "export" / "model.safetensors").items()}
    assert exported.keys() == weights.keys()
    for name, tensor in exported.items():
        assert str(tensor.dtype) == f"torch.{dtype}"
        np.testing.assert_array_equal(tensor.float().numpy(), weights[name], err_msg=name)


def test_an_export_can_be_trained_again_in_another_layout(make_flags: MakeFlags, pools: Pools, tmp_path: Path) -> None:
    more = "--optimizer.name adamw --optimizer.lr 1e-3 --train.micro_batch_size 2"
    straight = pools(4).run(jobs.losses, make_flags("sp:4", "tp:4", f"{more} --train.iters 2", batch=8))[0]
    pools(4).run(export_of, make_flags("sp:4", "tp:4", more, batch=8), tmp_path / "export")
    again = make_flags("dp:4", "tp:2,dp:2", f"{more} --model.hf_path {tmp_path / 'export'}", batch=8)
    assert pools(4).run(jobs.losses, again)[0] == [pytest.approx(straight[1], rel=1e-5)]
    assert straight[1] < straight[0]


def test_two_encoders_go_out_as_two_folders(make_flags: MakeFlags, pools: Pools, tmp_path: Path) -> None:
    """A further encoder learns, is written next to the model, and resumes from there as before."""
    other = ModelChoice(vision_layers=1, vision_heads=2, full_layers=(0,), seed=9)
    detail = write_model(tmp_path / "detail", other)
    data = write_data(tmp_path, 8, details=(1, 0, 2, 0))

    def flags(more: str, steps: int) -> list[str]:
        layouts = "--detail-parallel dp:1@1 --model.freeze detail"
        adamw = f"--optimizer.name adamw --optimizer.lr 1e-3 --train.iters {steps}"
        token = "--detail-token <|video_pad|>"
        more = f"--train.micro_batch_size 4 {layouts} {adamw} {token} {more}"
        return make_flags("dp:1@0", "tp:2@2-3", more, data=data, batch=8)

    straight = pools(4).run(jobs.losses, flags(f"--detail-hf_path {detail}", 2))[0]
    target = tmp_path / "export"
    first = flags(f"--detail-hf_path {detail}", 1)
    weights = pools(4).run(export_of, first, target)[0]
    before = load_file(detail / "model.safetensors")
    written = {canonical_name(n): t for n, t in load_file(target / "encoders" / "detail" / "model.safetensors").items()}
    assert {f"detail.{name}" for name in written} == {name for name in weights if name.startswith("detail.")}
    for name, tensor in written.items():
        np.testing.assert_array_equal(tensor.numpy(), weights[f"detail.{name}"], err_msg=name)
    stored = {canonical_name(name): tensor for name, tensor in before.items()}
    changed = {name.startswith("visual.merger.") for name, t in written.items() if not torch.equal(t, stored[name])}
    assert changed == {True}, "the encoder is frozen, its projector learns"
    again = f"--model.hf_path {target} --detail-hf_path {target}/encoders/detail"
    assert pools(4).run(jobs.losses, flags(again, 1))[0] == [pytest.approx(straight[1], rel=1e-5)]
    assert straight[1] < straight[0]


def test_weights_that_are_read_are_closed(make_flags: MakeFlags, pools: Pools) -> None:
    assert pools(2).run(mapped_weights, make_flags("sp:2", "tp:2", "")) == [[], []]


def test_crossings_overlap_the_embedding(make_flags: MakeFlags, pools: Pools) -> None:
    """In a profiler's trace rows travel while tokens are embedded, and their gradients while the embedding's own are
    computed.
    """
    flags = make_flags("dp:2", "dp:2", "--train.micro_batch_size 2")
    found = pools(2).run(overlaps, flags)[0]
    assert found["forward"][0] < found["embedding"][1] < found["forward"][1]
    assert found["backward"][0] < found["gradient"][0] < found["gradient"][1] < found["backward"][1]


@pytest.mark.parametrize(
    "settings, micro_batches", thinned([("--schedule.waves 2", 3), ("--schedule.kind recompute", 1)], 2)
)
def test_encoder_activations_do_not_grow_with_the_number_of_micro_batches(
    settings: str, micro_batches: int, make_flags: MakeFlags, pools: Pools, tmp_path: Path
) -> None:
    """Colocated with text stages: those of as many micro-batches live as the schedule says (a wave and pp - 1), whether
    there are 8, 16 or 32. The last wave of few is one smaller call.
    """
    model = write_model(tmp_path / "model", ModelChoice(vision_layers=2, text_layers=2))
    data = write_data(tmp_path, 1, pictures=(1,))  # one picture over and over

    def peak(batch: int, vision: str, text: str, more: str = "") -> int:
        flags = make_flags(vision, text, f"--model.hf_path {model} {more}", data=data, batch=batch)
        [(most, left), _] = pools(2).run(encoder_activations, flags)
        assert left == 0, "activations are kept after the step"
        return most

    one = peak(2, "dp:2", "dp:2")
    assert len({peak(batch, "sp:2", "pp:2", settings) for batch in (8, 16, 32)}) == 1
    assert peak(8, "dp:2", "pp:2", settings) == micro_batches * one
