"""FLOPs: against a count by hand, and against PyTorch's own counter on a model of the same shape."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_hetero.models.common.flops import (
    Passes,
    TextFlopShape,
    VisionFlopShape,
    merger_flops,
    mfu,
    peak_flops,
    text_flops,
    vision_flops,
)

VISION = VisionFlopShape(layers=4, full_layers=1, hidden=8, ffn=16, patch_elements=12, merge=4, out=6)
TEXT = TextFlopShape(layers=2, hidden=8, query_width=8, kv_width=4, ffn=16, vocab=32)
FORWARD = Passes(inputs=False, weights=False)


def test_vision_by_hand() -> None:
    embedding = 2 * 24 * 12 * 8
    blocks = 4 * 2 * 24 * (8 * 24 + 8 * 8 + 3 * 8 * 16)
    full = 1 * 2 * 2 * 8 * (16 * 16 + 8 * 8)
    windowed = 3 * 2 * 2 * 8 * (3 * 8 * 8)
    merger = 2 * 6 * (32 * 32 + 32 * 6)
    found = vision_flops(VISION, images=[16, 8], windows=[8, 8, 8], passes=FORWARD, projector=FORWARD)
    assert found == embedding + blocks + full + windowed + merger
    # In training every product is computed three times, but pixels need no gradient.
    assert vision_flops(VISION, [16, 8], [8, 8, 8]) == 3 * found - embedding


def test_vision_without_gates_and_with_more_mergers() -> None:
    other = replace(VISION, gated=False, more_mergers=2)
    found, gated = (vision_flops(shape, [16, 8], [8, 8, 8], FORWARD, FORWARD) for shape in (other, VISION))
    assert found == gated - 4 * 2 * 24 * 8 * 16 + 2 * merger_flops(VISION, 24, FORWARD)


def test_text_by_hand() -> None:
    blocks = 2 * 2 * 8 * (8 * (8 + 4 + 4) + 8 * 8 + 3 * 8 * 16)
    attention = 2 * 2 * 2 * 8 * (1 + 2 + 3 + 1 + 2 + 3 + 4 + 5)
    logits = 2 * 4 * 8 * 32
    assert text_flops(TEXT, [3, 5], supervised=4, passes=FORWARD) == blocks + attention + logits
    assert text_flops(TEXT, [3, 5], supervised=4) == 3 * (blocks + attention + logits)


def test_frozen_parts_cost_what_the_gradients_of_others_need() -> None:
    linear = TextFlopShape(layers=1, hidden=8, query_width=0, kv_width=0, ffn=16, vocab=32)
    forward = text_flops(linear, [5], 5, FORWARD)
    assert text_flops(linear, [5], 5, Passes(inputs=True, weights=False)) == 2 * forward
    assert merger_flops(VISION, 8, Passes(inputs=False, weights=True)) == 2 * merger_flops(VISION, 8, FORWARD)


def test_nothing_costs_nothing() -> None:
    assert vision_flops(VISION, [], []) == text_flops(TEXT, [], 0) == 0


def test_windows_must_hold_what_the_images_hold() -> None:
    with pytest.raises(AssertionError, match="16 patches, windows 8"):
        vision_flops(VISION, [16], [8])


def test_text_against_pytorch() -> None:
    """Causal attention is half of what PyTorch counts for one that is not, so it is taken out and put back."""
    length, heads = 6, 2
    x = torch.randn(length, 8, requires_grad=True)
    weights = [torch.randn(shape, requires_grad=True) for shape in ((8, 8), (8, 4), (8, 4), (8, 8))]
    gate, up, down = (torch.randn(shape, requires_grad=True) for shape in ((8, 16), (8, 16), (16, 8)))
    head = torch.randn(8, 32, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        q, k, v = (x @ w for w in weights[:3])
        k, v = (t.view(length, heads, 2).repeat_interleave(2, dim=-1) for t in (k, v))
        q = q.view(length, heads, 4)
        scores = torch.einsum("qhd,khd->hqk", q, k).softmax(-1)
        y = torch.einsum("hqk,khd->qhd", scores, v).reshape(length, 8) @ weights[3]
        logits = ((torch.relu(y @ gate) * (y @ up)) @ down) @ head
        logits.sum().backward()
    one = TextFlopShape(layers=1, hidden=8, query_width=8, kv_width=4, ffn=16, vocab=32)
    causal = 3 * 4 * 8 * (length * (length + 1) // 2)
    whole = 3 * 4 * 8 * length * length
    assert text_flops(one, [length], length) - causal + whole == counter.get_total_flops()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756.5e12),
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA B200", 2.25e15),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("cpu", None),
        ("", None),
        ("Some GPU of tomorrow", None),
    ],
)
def test_peaks(name: str, expected: float | None) -> None:
    assert peak_flops(name) == expected


def test_utilisation() -> None:
    assert mfu(312 * 10**12, seconds=2.0, devices=2, device_name="NVIDIA A100-SXM4-40GB") == pytest.approx(0.25)
    assert mfu(10**12, seconds=2.0, devices=2, device_name="cpu") is None
