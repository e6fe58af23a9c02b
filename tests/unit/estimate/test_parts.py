"""The parts that plans are made of, each against what it stands for."""

from __future__ import annotations

import pytest

from megatron_hetero.boundary.plan import plan_boundary
from megatron_hetero.config.optimizers import OPTIMIZERS, PrecisionConfig
from megatron_hetero.estimate.allocations import SubmoduleBytes, flash_workspace
from megatron_hetero.estimate.allowance import NVLS_BYTES, PEER_BYTES, RING_BYTES, bytes_by_rank, kind_bytes
from megatron_hetero.estimate.lifetimes import StageBytes, combined
from megatron_hetero.estimate.parameters import Parameter, parameter_bytes
from megatron_hetero.estimate.traffic import traffic_of
from megatron_hetero.layout.communicators import communicators
from megatron_hetero.layout.graph import Edge
from megatron_hetero.layout.layout import Layout
from megatron_hetero.models.layers.offload import OffloadSizes
from tests.support.sizes import received_rows, sent_rows
from tests.unit.estimate.conftest import MakePlan

SIZES = (7, 300, 64, 1, 129)


def _parameters(frozen: int) -> list[Parameter]:
    return [Parameter(f"p{i}", size, size, i != frozen) for i, size in enumerate(SIZES)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_ranks_share_the_optimizer(ranks: int) -> None:
    found = parameter_bytes(_parameters(frozen=2), ranks, 2, OPTIMIZERS["adamw"])
    trained = sum(SIZES) - SIZES[2]
    assert (found.optimizer, found.trained, found.parameters) == (12 * -(-trained // ranks), trained, sum(SIZES))
    assert (found.weights, found.gradients) == (2 * sum(SIZES), 4 * trained)


def test_updates_on_a_gpu_take_what_they_bring_together() -> None:
    elements = 1 << 30
    parameters = [Parameter("p", elements // 1024, elements, True)]

    def of(ranks: int, precision: PrecisionConfig, *, on_host: bool = False, zero: int = 1) -> int:
        found = parameter_bytes(parameters, ranks, 2, OPTIMIZERS["adamw"], precision, on_host=on_host, zero=zero)
        return found.update * 32 // (elements // ranks)

    small = PrecisionConfig(master="split", moments="bfloat16", gradients="bfloat16")
    assert of(4, PrecisionConfig()) == of(2, small) == 0, "updated where they lie"
    assert of(2, small, on_host=True) == 2 * 6
    assert of(4, small, zero=3) == 2 * 2 and of(4, PrecisionConfig(), zero=2) == 2 + 4
    assert of(4, PrecisionConfig(moments="8bit"), on_host=True) == 2 * 48


def test_sgd_keeps_master_weights_of_bfloat16_alone() -> None:
    parameters = _parameters(frozen=0)
    assert parameter_bytes(parameters, 4, 4, OPTIMIZERS["sgd"]).optimizer == 0
    halves = parameter_bytes(parameters, 4, 2, OPTIMIZERS["sgd"])
    assert halves.optimizer == 4 * (sum(SIZES) - 7)
    assert halves.weights == 2 * sum(SIZES) and halves.gradients == 4 * (sum(SIZES) - 7)


@pytest.mark.parametrize(
    "world, vision, text, more",
    [
        (8, "sp:2,dp:4", "tp:4,dp:2", "--plan.images 3 --plan.image_side 200"),
        (8, "dp:8", "cp:2,tp:2,dp:2", "--plan.images 2 --plan.image_side 140"),
        (8, "tp:4,dp:2", "tp:2,dp:4", "--vision-sequence_parallel false --text-sequence_parallel false"),
        (7, "dp:3@0-2", "tp:2,pp:2@3-6", "--text-sequence_parallel false --plan.image_side 140"),
        (6, "sp:2@0,5", "tp:4@1-4", ""),
    ],
)
def test_traffic_is_that_of_each_ranks_plan(world: int, vision: str, text: str, more: str, make_plan: MakePlan) -> None:
    assumed = make_plan(world, vision, text, more).assumed
    boundary = plan_boundary(*assumed.sides(Edge("vision", "text"), 1)[0], 8)
    for name, traffic in traffic_of(boundary).items():
        for i, rank in enumerate(traffic.ranks.tolist()):
            direction = getattr(boundary.rank(rank), name)
            assert (traffic.held[i], traffic.needed[i]) == (direction.held, direction.needed)
            received, sent = traffic.received[:, i], traffic.sent[:, i]
            assert (received.sum(), sent.sum()) == (received_rows(direction), sent_rows(direction))
            assert traffic.kept[i] == len(direction.local_from)
            for number, phase in enumerate(traffic.phases):
                exchange = direction.exchange(phase)
                assert (sent[number], received[number]) == (len(exchange.send), len(exchange.receive))
        moves = [move for move in boundary.moves() if move.direction == name]
        assert traffic.messages == len(moves)


def test_memory_of_communicators() -> None:
    rings = 3 * RING_BYTES  # and trees
    layouts = {"vision": Layout.parse("sp:8", 8), "text": Layout.parse("tp:4,dp:2", 8)}
    kinds = communicators(layouts, edges=[("vision", "text")])
    found = {str(kind): kind_bytes(kind) for kind in kinds}
    assert found["vision>text"] == 7 * PEER_BYTES * 4 // 32, "as many channels as CTAs"
    assert found["text tp"] == rings + 4 * NVLS_BYTES and found["text sp,cp,dp"] == rings
    assert found["vision sp"] == 7 * PEER_BYTES and found["vision sp,cp,dp"] == rings + 8 * NVLS_BYTES
    first = bytes_by_rank(kinds, 8)[0]
    assert first == sum(found.values()) + rings + 8 * NVLS_BYTES, "the world's, which is that of `vision sp`"
    wide = {"vision": Layout.parse("dp:16@0-15", 48), "text": Layout.parse("pp:2,dp:16@16-47", 48)}
    kinds = communicators(wide, edges=[("vision", "text")])
    found = {str(kind): kind_bytes(kind) for kind in kinds}
    assert found["vision>text"] == 8 * PEER_BYTES // 8, "seven others of the node, and one for those of other nodes"
    assert found["text forward from stages 0"] == PEER_BYTES // 8
    of_ranks = bytes_by_rank(kinds, 48)
    assert of_ranks[0] == 2 * (rings + 8 * NVLS_BYTES) + 2 * PEER_BYTES
    assert of_ranks[16] == of_ranks[0] + 2 * (PEER_BYTES // 8), "a stage sends on one link and receives on another"
    assert bytes_by_rank((), 1).tolist() == [0], "a rank alone has no communicator"


LAYERS = [[SubmoduleBytes(10, 1)], [SubmoduleBytes(30)], [SubmoduleBytes(20, 2, again=100)], [SubmoduleBytes(5)]]


def bytes_of(saved: int, passing: int, again: int, host: int) -> StageBytes:
    return StageBytes(saved, passing, again, host, forward=passing, backward=0)


def test_layers_that_stay_add_up() -> None:
    # The third is recomputed when the fourth is gone.
    assert combined(LAYERS) == bytes_of(65, 0, 95, 0)
    assert combined([]) == bytes_of(0, 0, 0, 0)


def test_layers_that_are_offloaded_are_on_the_device_two_at_a_time() -> None:
    """In both passes most with the third: 1 of the first, 30 and 20, in place of 1 + 0 + 2 + 5."""
    assert combined(LAYERS, offload=OffloadSizes(least=1, block=8)) == bytes_of(8, 43, 143, 16 + 32 + 24)
    # A single layer is offloaded too.
    assert combined(LAYERS[:1], offload=OffloadSizes(least=1, block=8)) == bytes_of(1, 9, 9, 16)


def test_workspace_is_that_of_the_part_that_takes_most_with_what_is_kept_then() -> None:
    """Backward the second layer has most: 10 and 20 are there, 30 more for its time, when 5 and 7 are gone."""
    layers = [
        [SubmoduleBytes(10, forward=3, backward=20)],
        [SubmoduleBytes(20, forward=8, backward=30)],
        [SubmoduleBytes(5)],
    ]
    found = combined(layers, before=[SubmoduleBytes(1, 1)], after=[SubmoduleBytes(7, forward=9, backward=4)])
    assert (found.saved, found.forward, found.backward) == (43, 9, 30 - 12)
    assert combined(layers).backward == 30 - 5


@pytest.mark.parametrize("recompute, moved", [("none", 4.91), ("selective", 3.27), ("full", 0.25)])
def test_offloaded_activations_leave_the_device_for_the_host(recompute: str, moved: float, make_plan: MakePlan) -> None:
    """Of 15 of 16 layers, in GB; the more is kept, the longer work takes."""
    flags = f"--plan.image_side 1792 --plan.tokens 4096 --data.max_seq_length 8192 --text-recompute {recompute}"
    kept, away = (make_plan(4, "sp:4", "tp:4", flags + more) for more in ("", " --text-offload.activations true"))
    saved = (kept.memory - away.memory)[:, 3]
    assert (away.host_activations > 0).all() and not kept.host_activations.any()
    assert away.host_activations[0] / 1e9 == pytest.approx(moved, rel=0.01)
    assert (saved > 0).all() and (saved <= away.host_activations).all()
    slower = away.simulation.seconds / kept.simulation.seconds
    assert slower == pytest.approx(1, abs=1e-9) if recompute == "full" else slower > 1.05


def test_attention_goes_backward_in_three_times_the_memory_for_small_windows() -> None:
    """Of 16,384 patches in windows of 64, 16 heads of 80 elements: fp32 sums of 96 elements and one, of each head."""
    windows = flash_workspace(16384, 16384, 256, 16, 16, 80)
    assert windows == 4 * 3 * 16384 * 16 * 97 == 305_135_616
    assert flash_workspace(16384, 16384, 1, 16, 16, 80) == 4 * (16384 + 128) * 16 * 97
    shared = flash_workspace(4096, 4096, 1, 7, 1, 128) - 4 * (4096 + 128) * 7 * 129
    assert shared == 2 * 2 * 4096 * 7 * 128, "keys and values of each head"
