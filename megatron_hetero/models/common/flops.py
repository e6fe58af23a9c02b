"""Floating-point operations of a training step, counted from the shapes, and the peak rates of devices.

A multiplication with an addition counts as two operations. Only what the model asks for counts: matrix
products, with attention under its mask. Norms, activations, rotary embeddings, padding and
recomputation do not, so that the utilisation (MFU, arXiv 2204.02311, appendix B) means the same in
every layout.

The encoder is billed per patch: counting its images by the rows that reach the language model would
miss most of its work. A part that is frozen is billed for what the gradients of the others need (`Passes`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class VisionFlopShape:
    """What the encoder's operations depend on; widths in elements.

    `patch_elements` is the input of the patch embedding, `merge` the number of patches in a merged row,
    `full_layers` the number of the layers with attention over the whole image, `out` the merger's output width.
    `gated`: the MLP has a gate. `more_mergers`: how many layers before the last have a merger of their own.
    """

    layers: int
    full_layers: int
    hidden: int
    ffn: int
    patch_elements: int
    merge: int
    out: int
    gated: bool = True
    more_mergers: int = 0


@dataclass(frozen=True)
class TextFlopShape:
    """What the language model's operations depend on; widths in elements, `kv_width` = KV heads · head width."""

    layers: int
    hidden: int
    query_width: int
    kv_width: int
    ffn: int
    vocab: int


@dataclass(frozen=True)
class Passes:
    """Which gradients a part computes, in addition to its forward pass: of its input, of its weights.

    Both for a part that trains behind others that train; `inputs` only for a frozen part behind others that
    train; neither for a frozen part with nothing that trains before it.
    `share`: how much of the weights trains, where not all do.
    """

    inputs: bool = True
    weights: bool = True
    share: float = 1

    @property
    def linear(self) -> float:
        """The cost of products with weights, where a forward pass is 1."""
        return 1 + self.inputs + self.weights * self.share

    @property
    def attention(self) -> int:
        """The cost of products of activations, where a forward pass is 1: both operands need gradients or none."""
        return 3 if self.inputs or self.weights else 1


TRAINED = Passes()


def vision_flops(
    shape: VisionFlopShape,
    images: Iterable[int],
    windows: Iterable[int],
    passes: Passes = TRAINED,
    projector: Passes = TRAINED,
) -> int:
    """Operations of the encoder and its mergers in a step.

    Args:
        shape: of the encoder.
        images: patches of each attention sequence of the full layers (an image or a video frame pair).
        windows: patches of each window.
        passes: of the encoder; the pixels never need a gradient.
        projector: passes of the mergers.
    """
    images, windows = list(images), list(windows)
    patches = sum(images)
    assert patches == sum(windows), f"images hold {patches} patches, windows {sum(windows)}"
    per_patch = 4 * shape.hidden**2 + (3 if shape.gated else 2) * shape.hidden * shape.ffn
    blocks = 2 * patches * per_patch * shape.layers * passes.linear
    embedding = 2 * patches * shape.patch_elements * shape.hidden * (1 + passes.weights * passes.share)
    pairs = shape.full_layers * _squares(images) + (shape.layers - shape.full_layers) * _squares(windows)
    attention = 4 * shape.hidden * pairs * passes.attention
    return int(blocks + embedding + attention) + (1 + shape.more_mergers) * merger_flops(shape, patches, projector)


def merger_flops(shape: VisionFlopShape, patches: int, passes: Passes = TRAINED) -> int:
    """Operations of one merger: `merge` patches side by side through two linear layers to one row."""
    inner = shape.hidden * shape.merge
    return int(2 * (patches // shape.merge) * (inner * inner + inner * shape.out) * passes.linear)


def text_flops(shape: TextFlopShape, lengths: Iterable[int], supervised: int, passes: Passes = TRAINED) -> int:
    """Operations of the language model in a step.

    Args:
        shape: of the model.
        lengths: tokens of each sample, image tokens included; attention is causal within a sample.
        supervised: positions whose logits the loss needs.
        passes: of the model.
    """
    lengths = list(lengths)
    projections = shape.hidden * (2 * shape.query_width + 2 * shape.kv_width)
    per_token = projections + 3 * shape.hidden * shape.ffn
    blocks = 2 * sum(lengths) * per_token * shape.layers * passes.linear
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    attention = 4 * shape.query_width * pairs * shape.layers * passes.attention
    logits = 2 * supervised * shape.hidden * shape.vocab * passes.linear
    return int(blocks + attention + logits)


def _squares(lengths: Iterable[int]) -> int:
    return sum(n * n for n in lengths)


# Dense bfloat16 operations per second, from the vendors' data sheets. The first entry whose words are all
# in the device's name counts, so longer names come first.
_PEAKS = (
    ("GB200", 2.5e15),
    ("B200", 2.25e15),
    ("B100", 1.75e15),
    ("GH200", 989.4e12),
    ("H200 NVL", 835.5e12),
    ("H200", 989.4e12),
    ("H100 NVL", 835.5e12),
    ("H100 PCIe", 756.5e12),
    ("H100", 989.4e12),
    ("H800", 989.4e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("A40", 149.7e12),
    ("A30", 165e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("RTX 6000 Ada", 364.2e12),
    ("RTX 4090", 165.2e12),
    ("RTX 3090", 71e12),
    ("MI300X", 1307.4e12),
    ("MI325X", 1307.4e12),
)


def peak_flops(device_name: str) -> float | None:
    """Peak dense bfloat16 operations per second of a device, by the name that its driver reports.

    None where it is not known, as for CPUs and for slices of a device.
    """
    words = device_name.replace("-", " ").upper().split()
    if "MIG" in words:
        return None
    return next((peak for name, peak in _PEAKS if set(name.upper().split()) <= set(words)), None)


def mfu(flops: int, seconds: float, devices: int, device_name: str) -> float | None:
    """Model FLOPs utilisation: the share of all devices' peak that a step achieved; None where no peak is known."""
    peak = peak_flops(device_name)
    return None if peak is None or seconds <= 0 else flops / (seconds * devices * peak)
