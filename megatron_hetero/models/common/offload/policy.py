"""Which activations leave the device, and how much host memory they take there. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OffloadSizes:
    """`least`: bytes of the smallest memory that is worth a copy; smaller ones stay. `block`: host memory is taken in
    blocks of so many bytes, which serve tensors of any shape in later steps.
    """

    least: int
    block: int

    @classmethod
    def of(cls, gpu: bool) -> OffloadSizes:
        """Where a GPU computes: copies that keep the bus busy for longer than it takes to start them. On a CPU, which
        saves nothing by it: everything, so that small models go through the same code.
        """
        return cls(1 << 20, 8 << 20) if gpu else cls(1, 4 << 10)

    def on_host(self, size: int) -> int:
        """Bytes of the blocks that hold `size` bytes of one layer."""
        return -(-size // self.block) * self.block


def offloaded_layers(layers: int) -> int:
    """How many layers of a stage that has so many are offloaded; they are its first. The backward pass begins with the
    last one, often at once, and would wait for it: it stays, unless it is the only one.
    """
    return max(layers - 1, min(layers, 1))
