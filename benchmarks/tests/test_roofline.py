"""The roofline's arithmetic, and one of its steps from end to end."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.roofline import __main__ as command
from benchmarks.roofline.cases import LAYOUTS, PACK, PICTURES, Step
from benchmarks.roofline.costs import Ask, ask_of
from benchmarks.roofline.devices import COLLECTIVE, GPUS, LAUNCH
from benchmarks.roofline.prediction import MODULES, PhaseTime, Prediction, phase_times
from benchmarks.roofline.report import numbers_of, text_of
from tests.fake_cuda import guard
from tests.fake_cuda.rank import within

aten, H100 = torch.ops.aten, GPUS["h100"]


def on_gpu(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def test_what_a_kernel_asks_for() -> None:
    with FakeTensorMode():
        a, b, table = on_gpu(64, 32), on_gpu(32, 16), on_gpu(1000, 32)
        assert ask_of(aten.mm, (a, b), {}, on_gpu(64, 16)) == Ask(
            "product", flops=2 * 64 * 32 * 16, memory=2 * (64 * 32 + 32 * 16 + 64 * 16)
        )
        # The gradient of a weight, added in fp32.
        total = on_gpu(64, 16, dtype=torch.float32)
        given = (total, a, b, torch.float32), {"out": total}
        assert ask_of(aten.addmm, *given, total) == Ask(
            "product", flops=2 * 64 * 32 * 16, memory=2 * (64 * 32 + 32 * 16) + 2 * 4 * 64 * 16
        )
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
    assert Ask("memory", memory=0.78 * 3.35e12).seconds(H100) == pytest.approx(1.0)
    assert Ask("wire", wire=0.82 * 450e9).seconds(H100) == pytest.approx(1.0 + COLLECTIVE)


def test_a_phase_takes_as_long_as_the_slowest_of_its_streams_and_the_host() -> None:
    def found(seconds: float, kernels: int) -> dict[str, object]:
        return {"seconds": {"h100": seconds}, "kernels": kernels}

    times = phase_times(
        [
            ["text forward", "main", "product", found(3.0, 1)],
            ["text forward", "main", "memory", found(1.0, 2)],
            ["text forward", "side", "wire", found(2.0, 3)],
            ["vision forward", "main", "memory", found(0.0, 1000)],
        ],
        H100,
    )
    assert (times["text forward"].seconds, times["text forward"].kernels) == (4.0, 6)
    assert times["vision forward"].seconds == 1000 * LAUNCH


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


def test_sums_within_a_backward_pass_take_what_it_does_not_hide() -> None:
    kinds = {"text": {"wire": 5.0, "memory": 0.25}, "vision": {"wire": 1.0}}
    phases = {f"{name} backward": PhaseTime(2.0, 0, {}) for name in kinds} | {"update": PhaseTime(1.0, 0, {})}
    phases |= {within(f"{name} backward"): PhaseTime(sum(of.values()), 0, of) for name, of in kinds.items()}
    found = Prediction(phases, micro_batches=3, flops={}, patches=1, ranks=8, gpu=H100)
    assert (found.micro_batch, found.end, found.step) == (4.0, 1.0 + 3.25, 3 * 4.0 + 4.25)


def test_micro_batches_hold_the_published_batch() -> None:
    for layouts in (each for of_model in LAYOUTS.values() for each in of_model):
        for picture in PICTURES:
            step = Step("7b", layouts, picture)
            assert step.samples == 1 or step.samples * picture.length <= PACK + 64
            assert step.micro_batches * step.samples * layouts.replicas in (picture.batch, layouts.replicas)


@pytest.mark.long
@pytest.mark.skipif(guard.missing() is not None, reason=str(guard.missing()))
def test_one_step_from_end_to_end() -> None:
    step = Step("7b", LAYOUTS["7b"][0], PICTURES[1])
    [counted] = command._counted([step.case])
    found = command._predicted(step, counted["costs"], H100)
    assert {f"{module} {way}" for module in MODULES for way in ("forward", "backward")} < found.phases.keys()
    # What the model asks for, and what runs: products and attention, forward and backward, over the ranks.
    ran = sum(costs["flops"] for *_, costs in counted["costs"])
    assert ran * 8 == pytest.approx(sum(step.flops.values()), rel=0.1)
    assert all(0.05 < share < 0.9 for share in found.mfu_of_modules.values())
    assert counted["peak"] == pytest.approx(step.planned_bytes, rel=0.05)
    [record] = numbers_of([(step, found, counted["peak"])])
    assert record["step_s"] == found.step
    assert H100.name in text_of([(s, found, 0.0) for s in all_steps("7b")], H100)


def all_steps(model: str) -> list[Step]:
    return [Step(model, layouts, picture) for layouts in LAYOUTS[model] for picture in PICTURES]
