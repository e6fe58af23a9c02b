"""The roofline's arithmetic, and one of its steps from end to end."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.roofline import __main__ as command
from benchmarks.roofline.cases import FLA, LAYOUTS, PACK, PICTURES, Layouts, Step, steps
from benchmarks.roofline.costs import Ask, ask_of, filled
from benchmarks.roofline.devices import ASSUMED, COLLECTIVE, CTA, GPUS
from benchmarks.roofline.measured import read, with_measured
from benchmarks.roofline.prediction import MODULES, PhaseTime, Prediction, phase_times
from benchmarks.roofline.report import compared, numbers_of, text_of
from benchmarks.roofline.timeline import Timeline
from megatron_hetero.base.environment import prepare_environment
from megatron_hetero.layout.communicators import GRADIENT_CTAS
from tests.fake_cuda import guard
from tests.fake_cuda.rank import within

aten, H100 = torch.ops.aten, GPUS["h100"]
ROOT = command.ROOT


def on_gpu(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def test_what_a_kernel_asks_for() -> None:
    with FakeTensorMode():
        a, b, table = on_gpu(64, 32), on_gpu(32, 16), on_gpu(1000, 32)
        assert ask_of(aten.mm, (a, b), {}, on_gpu(64, 16)) == Ask(
            "product", flops=2 * 64 * 32 * 16, memory=2 * (64 * 32 + 32 * 16 + 64 * 16), shape=(64, 16)
        )
        # The gradient of a weight, added in fp32.
        total = on_gpu(64, 16, dtype=torch.float32)
        given = (total, a, b, torch.float32), {"out": total}
        assert ask_of(aten.addmm, *given, total) == Ask(
            "product", flops=2 * 64 * 32 * 16, memory=2 * (64 * 32 + 32 * 16) + 2 * 4 * 64 * 16, shape=(64, 16)
        )
        # In the dtype of the weights, in place.
        total = on_gpu(64, 16)
        assert ask_of(aten.addmm_, (total, a, b), {}, total) == Ask(
            "product", flops=2 * 64 * 32 * 16, memory=2 * (64 * 32 + 32 * 16) + 2 * total.nbytes, shape=(64, 16)
        )
        # In single precision, in place and not.
        wide = [on_gpu(4, *shape, dtype=torch.float32) for shape in ((64, 16), (64, 32), (32, 16))]
        for given in ((aten.bmm, wide[1:]), (aten.baddbmm, wide), (aten.baddbmm_, wide)):
            ask = ask_of(given[0], tuple(given[1]), {}, wide[0])
            assert (ask.kind, ask.flops, ask.single) == ("product", 2 * 4 * 64 * 32 * 16, True)
        # Written once; a row that is expanded is read once.
        assert ask_of(aten.add, (a, on_gpu(32).expand(64, 32)), {}, on_gpu(64, 32)).memory == 2 * (2 * 64 * 32 + 32)
        assert ask_of(aten.add_, (a, a), {}, a).memory == 3 * a.nbytes
        assert ask_of(aten.copy_, (on_gpu(64, 32, dtype=torch.float32), a), {}, None).memory == a.nbytes * 3
        assert ask_of(aten.zero_, (a,), {}, a).memory == a.nbytes
        # Of a large table only what is asked for.
        assert ask_of(aten.embedding, (table, on_gpu(8, dtype=torch.int64)), {}, on_gpu(8, 32)).memory == 2 * 2 * 8 * 32
        flat = [on_gpu(100, dtype=torch.float32) for _ in range(4)]
        states = [[tensor] for tensor in flat]
        assert ask_of(aten._fused_adamw_, (*states, [], []), {}, None).memory == 7 * flat[0].nbytes


def test_attention_is_counted_by_its_segments_and_mask() -> None:
    with FakeTensorMode():
        q, k = on_gpu(300, 8, 64), on_gpu(300, 2, 64)
        forward = [ask_of(aten._flash_attention_forward, (q, k, k, None, None, 100, 100, 0.0, causal, False), {}, q)
                   for causal in (False, True)]  # fmt: skip
        assert [ask.flops for ask in forward] == [4 * 300 * 100 * 8 * 64, 2 * 300 * 100 * 8 * 64]
        given = (q, q, k, k, q, None, None, None, 100, 100, 0.0, False)
        assert ask_of(aten._flash_attention_backward, given, {}, (q, k, k)).flops == 2.5 * forward[0].flops


def test_a_kernel_takes_as_long_as_what_it_is_slowest_at() -> None:
    second = Ask("product", flops=0.69 * 989.4e12, memory=1.0)
    assert second.seconds(H100) == pytest.approx(1.0)
    assert Ask("product", flops=0.69 * 67e12, single=True).seconds(H100) == pytest.approx(1.0)
    assert Ask("memory", memory=0.78 * 3.35e12).seconds(H100) == pytest.approx(1.0)
    assert Ask("wire", wire=0.82 * 450e9).seconds(H100) == pytest.approx(1.0 + COLLECTIVE)
    assert Ask("wire", wire=80e9, ctas=4).seconds(H100) == pytest.approx(1.0 + COLLECTIVE), "an edge's"
    assert Ask("wire", wire=0.82 * 450e9, ctas=32).seconds(H100) == pytest.approx(1.0 + COLLECTIVE)


def test_what_the_pessimistic_end_assumes() -> None:
    least = ASSUMED["pessimistic"]
    rates = {size: size / Ask("wire", wire=size).seconds(H100, least) / 1e9 for size in (30e6, 60e6, 256e6)}
    assert 200 < rates[30e6] < 250 < rates[60e6] < 300 < rates[256e6] < 370
    # 132 tiles fill the device, 133 take two waves; a product may be cut along its inner dimension.
    assert filled(128 * 11, 256 * 12, 132) == 1.0
    assert filled(128 * 133, 256, 132) < 0.95 < filled(128 * 64, 256 * 64, 132)
    one = Ask("product", flops=1e12, shape=(128 * 133, 256))
    assert one.seconds(H100, least) > one.seconds(H100) / (least.products * 0.95)


def test_a_phase_takes_as_long_as_the_slowest_of_its_streams_and_the_host() -> None:
    def found(seconds: float, kernels: int) -> dict[str, object]:
        return {"seconds": {"pessimistic": seconds}, "kernels": kernels}

    times = phase_times(
        [
            ["text forward", "main", "product", found(3.0, 1)],
            ["text forward", "main", "memory", found(1.0, 2)],
            ["text forward", "side", "wire", found(2.0, 3)],
            ["vision forward", "main", "memory", found(0.0, 1000)],
        ],
        "pessimistic",
    )
    assert (times["text forward"].seconds, times["text forward"].kernels) == (4.0, 6)
    assert times["vision forward"].seconds == 1000 * ASSUMED["pessimistic"].launch


def test_a_step_is_its_micro_batches_and_its_end() -> None:
    seconds = {"vision forward": 1.0, "vision backward": 2.0, "text forward": 3.0, "text backward": 6.0}
    seconds |= {"boundary": 0.5, "gradient sums": 1.0, "update": 1.0, "rest": 0.5}
    phases = {name: PhaseTime(each, 0, {}) for name, each in seconds.items()}
    flops = {"vision": int(3 * 4 * H100.peak), "text": int(9 * 2 * H100.peak)}
    found = Prediction(phases, micro_batches=2, flops=flops, patches=100, ranks=8, gpu=H100)
    assert (found.micro_batch, found.end, found.step) == (12.5, 2.5, 27.5)
    assert found.patches_per_second == pytest.approx(200 / 27.5)
    assert found.mfu_of_modules == pytest.approx({"vision": 0.5, "text": 0.25})
    assert found.mfu_of_micro_batch == pytest.approx(30 / 8 / 12.5)
    assert found.mfu_of_step == pytest.approx(2 * 30 / 8 / 27.5)


def test_faster_attention_saves_its_own_time_alone() -> None:
    phase = PhaseTime(5.0, 0, {"attention": 2.0, "product": 3.0})
    phases = {"text forward": phase, "text backward": phase}
    found = Prediction(phases, 1, {}, 1, 8, H100).with_attention(forward=2.0, backward=4.0).phases
    assert [found[name].device for name in phases] == [4.0, 3.5]
    assert found["text backward"].by_kind == {"attention": 0.5, "product": 3.0}


def test_collectives_run_beside_kernels_until_they_are_waited_for() -> None:
    gpu = Timeline()
    gpu.compute(1.0)
    first, second = gpu.issue(2.0), gpu.issue(1.0)
    gpu.compute(1.5)
    another = gpu.issue(4.0, "another", communicator="another")
    assert [gpu.wait(first), gpu.wait(second), gpu.wait(first), gpu.now] == [0.5, 1.0, 0.0, 4.0]
    assert gpu.wait(another) == 2.5 + 4.0 - 4.0


@pytest.mark.parametrize("queues, ends", [(1, 9.0), (32, 7.0)])
def test_with_one_queue_collectives_of_one_communicator_hold_up_what_follows(queues: int, ends: float) -> None:
    """Four gathers of 1, each for a product of 1.5."""
    gpu = Timeline(queues)
    for gather in [gpu.issue(1.0) for _ in range(4)]:
        gpu.wait(gather)
        gpu.compute(1.5)
    assert gpu.now == ends


@pytest.mark.parametrize("queues", [1, 32])
def test_issued_one_ahead_a_gather_holds_nothing_up(queues: int) -> None:
    gpu = Timeline(queues)
    gather = gpu.issue(1.0)
    for following in (True, True, True, False):
        gpu.wait(gather)
        gather = gpu.issue(1.0) if following else gather
        gpu.compute(1.5)
    assert gpu.now == 7.0


@pytest.mark.parametrize("between, shared", [(0, False), (31, True), (32, False)])
def test_the_33rd_communicator_has_the_stream_of_the_first(between: int, shared: bool) -> None:
    gpu = Timeline()
    gpu.issue(5.0, "a", communicator="first")
    for number in range(between):
        gpu.issue(0.0, "b", communicator=str(number))
    assert gpu.wait(gpu.issue(1.0, "c", communicator="last")) == (6.0 if shared else 1.0)


def test_streams_share_queues_where_there_are_fewer() -> None:
    """The eighth communicator has that of the stream that computes: what it waits for holds up kernels."""
    ends = []
    for queues in (8, 32):
        gpu = Timeline(queues)
        for number in range(8):
            gpu.issue(0.0, str(number), communicator=str(number))
        gpu.issue(2.0, "7", communicator="7")
        gpu.issue(2.0, "7", communicator="7")
        gpu.compute(1.0)
        ends.append(gpu.now)
    assert ends == [3.0, 1.0]


WITHOUT = {"weight gathers": 10.0, "gradient sums": 30.5, "column forward": 10.0, "column backward": 12.0}
WITHOUT |= {"column in parts forward": 10.0, "column in parts backward": 12.0}
WITHOUT |= {"row in parts forward": 10.0, "row in parts backward": 16.0}
"""When the stream that computes would end if each collective were waited for where it is issued, or, of a layer that is
split by column, if its tokens were exchanged at once.
"""


@pytest.mark.long
def test_what_the_program_issues_overlaps_with_the_queues_that_it_asks_for() -> None:
    """The order is that of the program's own layers, gathers of weights and sums of gradients."""
    environ: dict[str, str] = {}
    prepare_environment(environ)
    found = _issued(int(environ["CUDA_DEVICE_MAX_CONNECTIONS"]))
    assert all(found[name] <= seconds for name, seconds in WITHOUT.items())
    assert (found["weight gathers"], found["column in parts forward"], found["row in parts forward"]) == (7.0, 7.0, 7.0)
    assert found["gradient sums"] == 7 * 1.5, "nothing waits for them within a backward pass"
    one = _issued(1)
    assert (one["column in parts forward"], one["column in parts backward"]) == (9.0, 15.0)


def _issued(queues: int) -> dict[str, float]:
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.tests.issued", str(queues)], capture_output=True, text=True, cwd=ROOT
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_what_the_program_waits_for_is_what_it_issued() -> None:
    """In a process of its own, for the default group is of the backend `fake`."""
    program = """
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from benchmarks.roofline.timeline import works_noted
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
numbers, waited, x = iter(range(100)), [], torch.ones(4)
with works_noted(lambda _: next(numbers), waited.append):
    late = dist.all_reduce(x, async_op=True)
    dist.all_gather_into_tensor(x.new_empty(16), x)
    dist.reduce_scatter_tensor(x.new_empty(1), x)
    dist.all_to_all_single(x.new_empty(4), x)
    sent = dist.isend(x, 1)
    late.wait()
    sent.wait()
    late.wait()
    dist.broadcast(x, 0)
    dist.batch_isend_irecv([dist.P2POp(dist.irecv, x, 1)])[0].wait()
print(waited)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert ran.stdout == "[1, 2, 3, 0, 4, 5, 6]\n"


def test_sums_within_a_backward_pass_are_made_once_in_a_step() -> None:
    phases = {"text backward": PhaseTime(2.0, 0, {}), "update": PhaseTime(1.0, 0, {})}
    phases[within("text backward")] = PhaseTime(0.25, 0, {"memory": 0.25}, links=9.0)
    found = Prediction(phases, micro_batches=3, flops={}, patches=1, ranks=8, gpu=H100)
    assert (found.micro_batch, found.end, found.step) == (2.0, 1.25, 7.25)


def _record(folder: Path, device: str, layout: str, **sections: object) -> Path:
    milliseconds = {"step": 900.0, "text forward": 120.0, "text backward": 240.0, "update": 15.0, "boundary": 1.0}
    share = {
        "layout": {
            "model": "qwen2_5_vl_7b", "layout": layout, "micro-batches": 2, "tokens of a pack": 8208,
            "patches of its image": 5184,
        },
        "steps": {"milliseconds": milliseconds},
    }  # fmt: skip
    program = {"steps": {"median ms": 200.0}}
    numbers = {"environment": {"device": {"name": device}}, "program": program, "share-7b": share, **sections}
    file = folder / "gpu.json"
    file.write_text(json.dumps({"sections": {name: {"numbers": of} for name, of in numbers.items()}}))
    return file


def test_what_was_measured_replaces_computing_and_leaves_waiting_for_links(tmp_path: Path) -> None:
    sp_tp, other = Step("7b", LAYOUTS["7b"][0], PICTURES[0]), Step("7b", LAYOUTS["7b"][0], PICTURES[1])
    phase = PhaseTime(0.05, 10**6, {"product": 0.04, "wire": 0.01})
    predicted = Prediction({"text forward": phase, "update": phase}, 8, {}, 1, 8, H100)
    shares = read(_record(tmp_path, "NVIDIA H100 80GB HBM3", "sp:8|tp:4,dp:2 on 8 ranks"), H100)
    found, seconds = with_measured(sp_tp, predicted, shares)
    assert seconds == pytest.approx({"text forward": 0.06, "update": 0.015})
    assert found.phases["text forward"].seconds == pytest.approx(0.06 + 0.01)
    assert found.phases["update"].seconds == pytest.approx(0.015 + 0.01)
    assert "| text forward | 60.0 | 4990.0 | 0.01 |" in compared([(sp_tp, predicted, seconds)])
    assert with_measured(other, predicted, shares) == (predicted, {})
    # More replicas beside it: an update of their own.
    [wider] = read(_record(tmp_path, "NVIDIA H100", "sp:8,dp:2|tp:4,dp:2,dp:2 on 16 ranks"), H100)
    assert set(wider.of(replace(sp_tp, layouts=Layouts("", "sp:8", "tp:4", 1)))) == {"text forward", "text backward"}


def test_a_record_of_another_device_is_refused(tmp_path: Path) -> None:
    layout = "sp:8|tp:4,dp:2 on 8 ranks"
    with pytest.raises(ValueError, match="is of the device 'NVIDIA A100-SXM4-80GB', not of --gpu h100"):
        read(_record(tmp_path, "NVIDIA A100-SXM4-80GB", layout), H100)
    with pytest.raises(ValueError, match="no section that ended among share-7b and share-32b"):
        read(_record(tmp_path, "NVIDIA H100", layout, **{"share-7b": {}}), H100)
    with pytest.raises(ValueError, match="is no record of benchmarks.gpu"):
        read(tmp_path / "missing.json", H100)


def test_micro_batches_hold_the_published_batch() -> None:
    for layouts in (each for of_model in LAYOUTS.values() for each in of_model):
        for picture in PICTURES:
            step = Step("7b", layouts, picture)
            assert step.samples == 1 or step.samples * picture.length <= PACK + 64
            assert step.micro_batches * step.samples * layouts.replicas in (picture.batch, layouts.replicas)


def test_delta_nets_are_predicted_with_and_without_optional_packages() -> None:
    found = steps(GPUS["h200"].usable, ["9b"])
    assert {step.picture for step in found} == {PICTURES[0]}
    assert {step.case.packages for step in found} == {(), FLA}
    assert all(step.recomputed == () and step.case.flags[1].endswith("qwen3_5_9b") for step in found)


@pytest.mark.long
@pytest.mark.skipif(guard.missing() is not None, reason=str(guard.missing()))
def test_one_step_from_end_to_end() -> None:
    step = Step("7b", LAYOUTS["7b"][0], PICTURES[1])
    [counted] = command._counted([step.case], H100)
    every = {name: command._predicted(step, counted["costs"], H100, name) for name in ASSUMED}
    found = every["optimistic"]
    assert all(each.step >= found.step for each in every.values()), "each assumption costs something, or nothing"
    assert every["pessimistic"].step > 1.05 * found.step
    assert {f"{module} {way}" for module in MODULES for way in ("forward", "backward")} < found.phases.keys()
    # What the model asks for, and what runs: products and attention, forward and backward, over the ranks.
    ran = sum(costs["flops"] for *_, costs in counted["costs"])
    assert ran * 8 == pytest.approx(sum(step.flops.values()), rel=0.1)
    assert all(0.05 < share < 0.9 for share in found.mfu_of_modules.values())
    sums = within("text backward"), "links", "wire"
    [of_sums] = [costs for *key, costs in counted["costs"] if tuple(key) == sums]
    seconds = of_sums["wire"] / (GRADIENT_CTAS * CTA) + of_sums["kernels"] * COLLECTIVE
    assert of_sums["seconds"]["optimistic"] == pytest.approx(seconds), "by the CTAs of their communicator"
    assert counted["peak"] == pytest.approx(step.planned_bytes, rel=0.05)
    [record] = numbers_of([(step, every, counted["peak"])])
    assert record["step_s"] == found.step
    assert H100.name in text_of([(s, every, 0.0) for s in all_steps("7b")], H100)


def all_steps(model: str) -> list[Step]:
    return [Step(model, layouts, picture) for layouts in LAYOUTS[model] for picture in PICTURES]
