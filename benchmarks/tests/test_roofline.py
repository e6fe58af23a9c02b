"""The roofline's arithmetic, and one of its steps from end to end."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.gpu.honest import STAND_INS, STEP
from benchmarks.roofline import __main__ as command
from benchmarks.roofline.cases import FLA, LAYOUTS, PACK, PICTURES, Layouts, Step, steps
from benchmarks.roofline.costs import Ask, Event, ask_of, filled, fused, read_events, written
from benchmarks.roofline.devices import (
    ASSUMED,
    COLLECTIVE,
    CTA,
    EXPANDED,
    FAST,
    GAP,
    GPUS,
    HOST,
    MEMORY,
    PRODUCTS,
    SHORTEST,
    SLOW,
    Assumed,
)
from benchmarks.roofline.measured import read, with_measured
from benchmarks.roofline.prediction import MODULES, PhaseTime, Prediction, _Times, phase_times
from benchmarks.roofline.replay import ENCODER, FITTED, IDLE, recorded
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


def test_attention_of_cudnn_is_counted_in_either_form() -> None:
    """Ragged calls have tokens before heads, dense ones after them."""
    with FakeTensorMode():
        ragged, dense = on_gpu(256, 8, 64), on_gpu(1, 8, 256, 64)
        for query in (ragged, dense):
            given = (query, query, query, None, None, None, 256, 256, True, 0.0, True, False)
            forward = ask_of(aten._cudnn_attention_forward, given, {}, query)
            assert (forward.kind, forward.kernel, forward.blocks) == ("attention", "cudnn forward", 8 * 2)
            assert forward.flops == 2 * 256 * 256 * 8 * 64
            given = (query, query, query, query, query, *[None] * 6, 256, 256, 0.0, True)
            backward = ask_of(aten._cudnn_attention_backward, given, {}, (query,) * 3)
            assert (backward.kernel, backward.blocks) == ("cudnn backward", 8 * 2)
            assert backward.flops == 2.5 * forward.flops


def test_attention_of_few_heads_has_few_blocks() -> None:
    """As it was measured of one causal segment of 8,208 tokens; the rates of 7 heads are fitted, of 5 heads not."""

    def tera(kernel: str, heads: int, assumed: Assumed = FAST) -> float:
        ask = Ask("attention", flops=1e12, kernel=kernel, blocks=heads * 8208 / 128)
        return 1.0 / (ask.seconds(H100, assumed) - GAP)

    assert [tera("flash forward", heads) for heads in (5, 7)] == pytest.approx([186, 212], rel=0.02)
    assert [tera("flash backward", heads) for heads in (5, 7)] == pytest.approx([220, 238], rel=0.02)
    assert 470 < tera("cudnn forward", 5) < tera("cudnn forward", 7) < 550
    assert 370 < tera("cudnn backward", 5) < tera("cudnn backward", 7) < 430
    assert tera("cudnn forward", 5, replace(FAST, flash=True)) == tera("flash forward", 5)


def test_an_operation_takes_as_long_as_what_it_is_slowest_at() -> None:
    def seconds(assumed: Assumed = FAST, **asked: Any) -> float:
        return Ask(**asked).seconds(H100, assumed) - GAP

    assert seconds(kind="product", flops=PRODUCTS * 989.4e12, memory=1.0) == pytest.approx(1.0)
    assert seconds(kind="product", flops=PRODUCTS * 67e12, single=True) == pytest.approx(1.0)
    assert seconds(kind="memory", memory=MEMORY * 3.35e12) == pytest.approx(1.0)
    assert seconds(kind="memory", memory=1.0) == pytest.approx(SHORTEST)
    assert Ask("wire", wire=0.82 * 450e9).seconds(H100) == pytest.approx(1.0 + COLLECTIVE)
    assert Ask("wire", wire=80e9, ctas=4).seconds(H100) == pytest.approx(1.0 + COLLECTIVE), "an edge's"
    assert Ask("wire", wire=0.82 * 450e9, ctas=32).seconds(H100) == pytest.approx(1.0 + COLLECTIVE)
    swiglu = {"kind": "memory", "memory": 0.88e12, "kernel": "swiglu backward"}
    assert seconds(**swiglu) == pytest.approx(0.88 / 3.35 / MEMORY)
    assert seconds(replace(FAST, dynamic=True), **swiglu) == pytest.approx(1.0)


def test_copies_stand_in_for_collectives_of_one_rank_alone() -> None:
    alone = replace(FAST, alone=True)
    gather, scatter = Ask("wire", wire=1.0, memory=1e10, copies=True), Ask("wire", wire=1.0, memory=1e10)
    assert gather.seconds(H100, alone) - GAP == pytest.approx(1e10 / EXPANDED)
    assert scatter.seconds(H100, alone) - GAP == pytest.approx(2 * 1e10 / (MEMORY * 3.35e12)), "read and written"
    assert Ask("wire", wire=1.0).seconds(H100, alone) == 0.0, "nothing stands in for it"


def test_the_range_of_communication() -> None:
    slowest = ASSUMED["slowest"]
    rates = {size: size / Ask("wire", wire=size).seconds(H100, slowest) / 1e9 for size in (30e6, 60e6, 256e6)}
    assert 200 < rates[30e6] < 250 < rates[60e6] < 300 < rates[256e6] < 370
    for wire in (1e6, 30e6, 256e6):
        times = [Ask("wire", wire=wire).seconds(H100, ASSUMED[name]) for name in ("fastest", "middle", "slowest")]
        assert times == sorted(times)
    # 132 tiles fill the device, 133 take two waves; a product may be cut along its inner dimension.
    assert filled(128 * 11, 256 * 12, 132) == 1.0
    assert filled(128 * 133, 256, 132) < 0.95 < filled(128 * 64, 256 * 64, 132)
    one, waves = Ask("product", flops=1e12, shape=(128 * 133, 256)), ASSUMED["products in whole waves of tiles"]
    assert one.seconds(H100, waves) > one.seconds(H100) / 0.95


def _second(phase: str, seconds: float = 1.0) -> Event:
    """A kernel that takes so long."""
    return Event(phase, "kernel", Ask("memory", memory=(seconds - GAP) * MEMORY * H100.memory))


def test_phases_of_micro_batches_are_means_and_others_of_the_step() -> None:
    events = [_second("rest"), _second("vision forward"), _second("text backward", 2.0)]
    events += [_second(within("text backward"), 4.0), _second("text backward", 0.5), _second("update", 3.0)]
    for micro_batches in (1, 2, 3, 8):
        times = phase_times(events, micro_batches, H100, replace(FAST, launch=0.0))
        assert {phase: time.device for phase, time in times.items()} == pytest.approx(
            {"rest": 1.0, "vision forward": 1.0, "text backward": 2.5, within("text backward"): 4.0, "update": 3.0}
        )


def test_only_kernels_that_the_host_has_not_issued_wait_for_it() -> None:
    """It takes 0.5 for each: that of the first waits, and what follows while it issues does not."""
    end = Event("update", "host")
    events = [_second("vision forward"), *[_second("text forward", 0.25)] * 4, end]
    times = phase_times(events, 1, H100, replace(FAST, launch=0.5))
    assert times["vision forward"].by_kind["host"] == pytest.approx(0.5)
    # Issued at 1, 1.5, 2 and 2.5; the first three run until 2.25.
    assert times["text forward"].by_kind["host"] == pytest.approx(0.25)
    # The host waits, and is late again.
    waiting = [events[0], Event("vision forward", "host"), events[1], end]
    assert phase_times(waiting, 1, H100, replace(FAST, launch=0.5))["text forward"].by_kind["host"] == pytest.approx(
        0.5
    )


@pytest.mark.parametrize("end, waits", [("update", True), ("rest", False)])
def test_a_host_that_reads_a_step_late_is_ahead_when_the_next_one_begins(end: str, waits: bool) -> None:
    events = [_second("vision forward"), _second("text backward", 3.0), Event(end, "host")]
    times = phase_times(events, 2, H100, replace(FAST, launch=0.5))
    assert times["vision forward"].by_kind["host"] == pytest.approx(0.5 / 2 if waits else 0.0)
    alone = phase_times(events, 2, H100, replace(FAST, launch=0.5, alone=True))
    assert alone["vision forward"].by_kind["host"] == pytest.approx(0.5 / 2), "the first of all"


def test_the_host_is_ahead_by_what_the_queue_has_room_for() -> None:
    gpu = Timeline(launch=1.0, ahead=2)
    idle = []
    for seconds in (10.0, 10.0, 0.1, 0.1, 0.1):
        idle.append(gpu.launch())
        gpu.compute(seconds)
    # The fourth is issued after the second has begun, at 11, and the fifth after the third has, at 21.
    assert idle == pytest.approx([1.0, 0.0, 0.0, 0.0, 0.8])


def test_all_seconds_of_a_step_are_of_a_phase() -> None:
    events = [_second("vision forward", 0.1), Event("text forward", "beside", Ask("wire", wire=1e9))]
    events += [Event("text forward", "issue", Ask("wire", wire=2e11), 1, "tp"), _second("text forward", 0.2)]
    events += [Event("text forward", "wait", work=1), _second("text backward", 0.3), Event("update", "host")]
    for assumed in ASSUMED.values():
        alone = replace(assumed, launch=0.25)
        times = _Times(H100, alone)
        for event in events:
            times.run(event, 1.0)
        assert sum(sum(kinds.values()) for kinds in times.main.values()) == pytest.approx(times.timeline.now)


def test_events_are_read_as_they_were_written() -> None:
    ask = Ask("product", flops=2.0, shape=(3, 4))
    events = [Event("text forward", "kernel", ask), Event("update", "host"), Event("text forward", "kernel", ask)]
    events.append(Event("text forward", "issue", Ask("wire", wire=1.0, ctas=4), 3, "tp"))
    found = json.loads(json.dumps(written(events)))
    assert len(found["asks"]) == 3 and read_events(found) == events


def test_a_step_is_its_micro_batches_and_its_end() -> None:
    seconds = {"vision forward": 1.0, "vision backward": 2.0, "text forward": 3.0, "text backward": 6.0}
    seconds |= {"boundary": 0.5, "gradient sums": 1.0, "update": 1.0, "rest": 0.5}
    phases = {name: PhaseTime(each, {}) for name, each in seconds.items()}
    flops = {"vision": int(3 * 4 * H100.peak), "text": int(9 * 2 * H100.peak)}
    found = Prediction(phases, micro_batches=2, flops=flops, patches=100, ranks=8, gpu=H100)
    assert (found.micro_batch, found.end, found.step) == (12.5, 2.5, 27.5)
    assert found.patches_per_second == pytest.approx(200 / 27.5)
    assert found.mfu_of_modules == pytest.approx({"vision": 0.5, "text": 0.25})
    assert found.mfu_of_micro_batch == pytest.approx(30 / 8 / 12.5)
    assert found.mfu_of_step == pytest.approx(2 * 30 / 8 / 27.5)


def test_mfu_and_what_is_lost_are_the_whole_step() -> None:
    flops = {"product": 4 * H100.peak, "attention": 0.5 * H100.peak}
    phase = PhaseTime(8.0, {"product": 5.0, "attention": 1.0, "memory": 1.5, "host": 0.5}, flops=flops)
    phases = {"text forward": phase, "update": PhaseTime(2.0, {"memory": 1.5, "wire": 0.5})}
    found = Prediction(phases, 2, {"text": int(4 * 8 * H100.peak)}, 1, 8, H100)
    assert found.step == 18.0 and found.mfu_of_step == pytest.approx(8 / 18)
    expected = {"recomputed": 1, "product": 2, "attention": 1, "memory": 3, "host": 1, "once a step": 1.5, "wire": 0.5}
    assert found.lost == pytest.approx({**{name: each / 18 for name, each in expected.items()}, "beside": 0.0})
    assert found.mfu_of_step + sum(found.lost.values()) == pytest.approx(1.0)


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
"""When the stream that computes would end if each collective were waited for where it is issued."""


@pytest.mark.long
def test_what_the_program_issues_overlaps_with_the_queues_that_it_asks_for() -> None:
    """The order is that of the program's own layers, gathers of weights and sums of gradients."""
    environ: dict[str, str] = {}
    prepare_environment(environ)
    found = _issued(int(environ["CUDA_DEVICE_MAX_CONNECTIONS"]))
    assert all(found[name] <= seconds for name, seconds in WITHOUT.items())
    assert found["weight gathers"] == 7.0
    assert found["gradient sums"] == 7 * 1.5, "nothing waits for them within a backward pass"


@pytest.mark.parametrize("gathers", [True, False])
@pytest.mark.parametrize("n, columns", [(2, 4096), (8, 4096), (8, 16)])
def test_fused_products_take_as_long_as_products_or_as_copies(gathers: bool, n: int, columns: int) -> None:
    """One of 1,024 rows for each of `n` ranks: wide ones hide all copies but the last or first, of narrow ones copies
    are what takes time. Besides, ranks wait for each other, and a gather copies its own rows, a sum adds up.
    """
    sizes = (1024, 8192, columns, 2) if gathers else (1024, columns, 8192, 2)
    events = fused("text forward", 7, gathers, sizes, n, "copies")
    assert [event.work for event in events if event.what == "wait"] == [
        7 + place for place, event in enumerate(events) if event.what == "issue"
    ]
    asks = [event.ask for event in events if event.ask is not None]
    products = sum(ask.seconds(H100) for ask in asks if ask.kind == "product")
    copies = sum(ask.seconds(H100, SLOW) for ask in asks if ask.kind == "wire")
    others = sum(ask.seconds(H100) for ask in asks if ask.kind == "memory")
    assert len([ask for ask in asks if ask.kind == "wire"]) == n - 1
    assert sum(ask.flops for ask in asks) == 2 * 1024 * 8192 * columns * n
    for assumed in (FAST, SLOW):
        times = phase_times(events, 1, H100, replace(assumed, launch=0.0))
        seconds = sum(times["text forward"].by_kind.values())
        last = max(products / n, copies / (n - 1))
        assert max(products, copies) + others <= seconds * 1.0001
        assert seconds <= max(products, copies) + others + last


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
    phases = {"text backward": PhaseTime(2.0, {}), "update": PhaseTime(1.0, {})}
    phases[within("text backward")] = PhaseTime(0.25, {"memory": 0.25}, links=9.0)
    found = Prediction(phases, micro_batches=3, flops={}, patches=1, ranks=8, gpu=H100)
    assert (found.micro_batch, found.end, found.step) == (2.0, 1.25, 7.25)


def _record(folder: Path, device: str, layout: str, **sections: object) -> Path:
    milliseconds = {"step": 900.0, "text forward": 125.0, "text backward": 240.0, "update": 15.0, "boundary": 1.0}
    share = {
        "layout": {
            "model": "qwen2_5_vl_7b", "layout": layout, "micro-batches": 2, "tokens of a pack": 8208,
            "patches of its image": 5184,
        },
        "steps": {"milliseconds": milliseconds, "stand-ins ms": {"text forward": 5.0}},
    }  # fmt: skip
    program = {"steps": {"median ms": 200.0}}
    numbers = {"environment": {"device": {"name": device}}, "program": program, "share-7b": share, **sections}
    file = folder / "gpu.json"
    file.write_text(json.dumps({"sections": {name: {"numbers": of} for name, of in numbers.items()}}))
    return file


def test_what_was_measured_replaces_computing_and_leaves_waiting_for_links(tmp_path: Path) -> None:
    sp_tp, other = Step("7b", LAYOUTS["7b"][0], PICTURES[0]), Step("7b", LAYOUTS["7b"][0], PICTURES[1])
    phase = PhaseTime(5.0, {"product": 4.99, "wire": 0.01})
    predicted = Prediction({"text forward": phase, "update": phase}, 8, {}, 1, 8, H100)
    shares = read(_record(tmp_path, "NVIDIA H100 80GB HBM3", "sp:8|tp:4,dp:2 on 8 ranks"), H100)
    found, seconds = with_measured(sp_tp, predicted, shares)
    assert seconds == pytest.approx({"text forward": 0.06, "update": 0.015})
    assert found.phases["text forward"].device == pytest.approx(0.06 + 0.01)
    assert found.phases["update"].device == pytest.approx(0.015 + 0.01)
    assert "| text forward | 60.0 | 4990.0 | 0.01 |" in compared([(sp_tp, predicted, seconds)])
    assert with_measured(other, predicted, shares) == (predicted, {})
    # More replicas beside it: an update of their own.
    [wider] = read(_record(tmp_path, "NVIDIA H100", "sp:8,dp:2|tp:4,dp:2,dp:2 on 16 ranks"), H100)
    assert set(wider.of(replace(sp_tp, layouts=Layouts("", "sp:8", "tp:4", 1)))) == {"text forward", "text backward"}


def test_shares_with_kernels_of_before_are_left_out(tmp_path: Path) -> None:
    layout = "sp:8|tp:4,dp:2 on 8 ranks"
    share = json.loads(_record(tmp_path, "NVIDIA H100", layout).read_text())["sections"]["share-7b"]["numbers"]
    both = _record(tmp_path, "NVIDIA H100", layout, **{"share-7b-before": share})
    assert len(read(both, H100)) == 1


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
            assert step.pictures == step.samples * layouts.replicas * layouts.waves
            assert step.micro_batches * step.pictures in (picture.batch, step.pictures)


def test_delta_nets_are_predicted_with_and_without_optional_packages() -> None:
    found = steps(GPUS["h200"], ["9b"])
    assert {step.picture for step in found} == {PICTURES[0]}
    assert {step.case.packages for step in found} == {("cudnn dense",), (*FLA, "cudnn dense")}
    assert all(step.recomputed == () and step.case.flags[1].endswith("qwen3_5_9b") for step in found)


@pytest.mark.long
@pytest.mark.skipif(guard.missing() is not None, reason=str(guard.missing()))
def test_the_record_is_predicted() -> None:
    """Both shares of the H100, within a tenth in all that takes a twentieth of a step. Constants are fitted to 7B's,
    except the host's time for an operation, on which the encoder's forward pass depends in the other one.
    """
    shares = recorded("gpu.json")
    for share, counted in zip(shares, command._counted([share.case for share in shares]), strict=True):
        _, first, launch, own = command._replayed(share, counted)
        assert first[STEP] == pytest.approx(share.measured[STEP], rel=0.1)
        assert 0.5 * HOST < launch < 1.5 * HOST
        for phase, measured in share.measured.items():
            if measured > 0.05 * share.measured[STEP] and phase not in (STAND_INS, IDLE):
                assert own[phase] == pytest.approx(measured, rel=0.1), f"{share} {phase}"
                if share.section == FITTED[1] or phase != ENCODER:
                    assert first[phase] == pytest.approx(measured, rel=0.1), f"{share} {phase}"


@pytest.mark.long
@pytest.mark.skipif(guard.missing() is not None, reason=str(guard.missing()))
def test_one_step_from_end_to_end() -> None:
    step = Step("7b", LAYOUTS["7b"][0], PICTURES[1], packages=H100.packages)
    [counted] = command._counted([step.case])
    events = read_events(counted)
    every = {name: command._predicted(step, events, H100, assumed) for name, assumed in ASSUMED.items()}
    found = every["middle"]
    assert every["fastest"].step <= found.step <= every["slowest"].step
    assert every["attention by FlashAttention-2"].step >= found.step
    assert {f"{module} {way}" for module in MODULES for way in ("forward", "backward")} < found.phases.keys()
    # What the model asks for, and what runs: products and attention, forward and backward, over the ranks.
    ran = sum(event.ask.flops for event in events if event.ask is not None)
    assert ran * 8 == pytest.approx(sum(step.flops.values()), rel=0.1)
    assert all(0.01 < share < 0.9 for share in found.mfu_of_modules.values())
    sums = within("text backward")
    of_sums = [event.ask for event in events if event.phase == sums and event.what == "issue" and event.ask is not None]
    seconds = sum(ask.wire for ask in of_sums) / (GRADIENT_CTAS * CTA) + len(of_sums) * COLLECTIVE
    assert every["fastest"].phases[sums].links == pytest.approx(seconds), "by the CTAs of their communicator"
    assert counted["peak"] == pytest.approx(step.planned_bytes, rel=0.05)
    kernels = {event.ask.kernel for event in events if event.ask is not None}
    assert {"flash forward", "swiglu forward", "swiglu backward"} <= kernels
    [record] = numbers_of([(step, every, counted["peak"])])
    assert record["step_s"] == found.step
    assert H100.name in text_of([(s, every, 0.0) for s in all_steps("7b")], H100)


def all_steps(model: str) -> list[Step]:
    return [Step(model, layouts, picture) for layouts in LAYOUTS[model] for picture in PICTURES]
