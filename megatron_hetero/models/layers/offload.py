"""Which activations leave the device, and how much host memory they take there. Pure.

Keeps what a stage's layers save for their backward pass in host memory: see docs/training.md, "Activations in host
memory".

When layer i + 2 begins, the stream that computes waits until the device has copied layer i, whose memory is free from
then on: however far the host runs ahead, no more than two layers are on the device, and the last one. The method is
that of vDNN (Rhu et al. 2016, arXiv 1602.08124), by the hooks that `torch.autograd.graph.save_on_cpu` is made of, with
streams as torchtune's `OffloadActivations` has them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import finalize

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module, Parameter

from megatron_hetero.groups.platform import Platform
from megatron_hetero.models.layers.recompute import Hooks


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


class ActivationOffload:
    """Of one module on one rank: host memory and streams. All else belongs to one forward pass (`saving`)."""

    def __init__(self, platform: Platform, sizes: OffloadSizes | None = None):
        self.device, self.sizes = platform.device, sizes or OffloadSizes.of(platform.is_cuda)
        self.pool = HostPool(platform, self.sizes.block)
        streams = platform.side_streams(2) or (None, None)
        self.out, self.back = map(_Lane, streams)

    @contextlib.contextmanager
    def saving(
        self, layers: Sequence[Module], after: Iterable[Module] = (), apart: Iterable[Tensor] = ()
    ) -> Iterator[None]:
        """Inside is one forward pass through `layers`, then through `after`, whose activations stay. `apart`: tensors
        that all layers save, and the last one keeps on the device.
        """
        run = _ForwardPass(self, offloaded_layers(len(layers)), apart)
        hooks = [layer.register_forward_pre_hook(run.begin_layer) for layer in layers]
        hooks += [module.register_forward_pre_hook(run.end_layers) for module in after]
        try:
            with saved_tensors_hooks(run.pack, _unpack):
                yield
            run.end_layers()
        finally:
            for hook in hooks:
                hook.remove()
            run.settle()


class _Lane:
    """A stream beside the one that computes. On a CPU there is none: copies are made on the spot."""

    def __init__(self, stream: torch.cuda.Stream | None):
        self._stream = stream

    @contextlib.contextmanager
    def after_compute(self) -> Iterator[None]:
        """What is asked for inside runs here, after all that the computing stream was asked for before."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """The computing stream goes on when everything here is done."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


class Copy:
    """A whole memory that tensors lie in, as it was when it was saved. `device`: its bytes, while they are there."""

    def __init__(self, saved: Tensor):
        # Saved tensors may be views of it, in any number and of any strides.
        count = saved.untyped_storage().nbytes() // saved.itemsize
        self.device: Tensor | None = saved.detach().as_strided((count,), (1,), 0).view(torch.uint8)
        self.version, self.size = saved._version, count * saved.itemsize
        self.host: list[Tensor] = []
        self.overwritten = False

    def send(self, room: HostRoom) -> None:
        """Copy it to the host; the device has it as before."""
        assert self.device is not None, "what is copied out is on the device"
        self.host = room.place(self.size)
        for piece, part in zip(self.host, self._parts(self.device), strict=True):
            piece.copy_(part, non_blocking=True)

    def leave(self) -> None:
        """Let go of the device's."""
        assert self.device is not None, "what leaves the device is on it"
        self.overwritten, self.device = self.device._version != self.version, None

    def bring(self, device: Tensor) -> None:
        """Copy it into `device`, uint8 [size]."""
        for piece, part in zip(self.host, self._parts(device), strict=True):
            part.copy_(piece, non_blocking=True)
        self.device, self.host = device, []

    def _parts(self, device: Tensor) -> Sequence[Tensor]:
        return device.split([len(piece) for piece in self.host])


class _Layer:
    """What a layer saves in one forward pass. `before`: the layer before it, until it has been sent for."""

    def __init__(self, offload: ActivationOffload, before: _Layer | None, moves: bool):
        self.offload, self.before, self.moves = offload, before, moves
        self.copies: dict[tuple[int, int], Copy] = {}
        self.room = HostRoom(offload.pool)
        self.away = self.arriving = False

    def find(self, x: Tensor) -> Copy | None:
        """The copy of the memory of `x`, where this layer has saved it, and still has it on the device: until then no
        other memory can have its address.
        """
        return None if self.away else self.copies.get(_identity(x))

    def save(self, x: Tensor) -> Copy:
        """A copy of the memory of `x`, one for all that lies in it."""
        return self.find(x) or self.copies.setdefault(_identity(x), Copy(x))

    def send(self) -> None:
        """Begin to copy to the host."""
        with self.offload.out.after_compute():
            for copy in self.copies.values():
                copy.send(self.room)

    def leave(self) -> None:
        """Free the memory on the device, for what runs after the copies."""
        self.offload.out.join()
        for copy in self.copies.values():
            copy.leave()
        self.away = True

    def fetch(self) -> None:
        """Begin to copy to the device, where it is not on its way."""
        if not self.away:
            return
        # Of the computing stream's memory, since that is where it is used and freed.
        rooms = [torch.empty(copy.size, dtype=torch.uint8, device=self.offload.device) for copy in self.copies.values()]
        with self.offload.back.after_compute():
            for copy, room in zip(self.copies.values(), rooms, strict=True):
                copy.bring(room)
        self.away, self.arriving = False, True

    def arrive(self) -> None:
        """Let what runs from now on find it on the device."""
        self.fetch()
        if self.arriving:
            self.offload.back.join()
            self.arriving = False
            self.copies.clear()  # Each lives as long as autograd needs it.
            self.room.free()

    def reach(self) -> None:
        """The backward pass has come to this layer."""
        self.arrive()
        before, self.before = self.before, None
        if before is not None:
            before.fetch()

    def __del__(self) -> None:
        if self.arriving:  # The backward pass was given up: nobody may get the memory before the copies are done.
            self.offload.back.join()


def _identity(x: Tensor) -> tuple[int, int]:
    return x.untyped_storage()._cdata, x._version


class _Stays:
    """A saved tensor that stays on the device, in the keeping of outer hooks. `layer`: None after all layers."""

    def __init__(self, layer: _Layer | None, x: Tensor, outer: Hooks):
        self.layer, self.outer = layer, outer
        # Not the tensor itself: one that an operation returns would hold that operation, and so itself. But a parameter
        # as it is, which is known by more than its values.
        given = x if _is_held(x) else x.detach()
        self.kept = outer.pack(given)
        self.version = given._version if self.kept is given is not x else None

    def unpack(self) -> Tensor:
        if self.layer is not None:
            self.layer.reach()
        x = self.outer.unpack(self.kept)
        _require_unchanged(self.version is not None and x._version != self.version, x)
        return x


class _Moves:
    """How a saved tensor lies in a memory that goes to the host. `home`: the layer that takes care of that."""

    def __init__(self, layer: _Layer, home: _Layer, copy: Copy, x: Tensor):
        self.layer, self.home, self.copy, self.dtype = layer, home, copy, x.dtype
        self.geometry = x.size(), x.stride(), x.storage_offset()

    def unpack(self) -> Tensor:
        self.layer.reach()
        self.home.arrive()
        device = self.copy.device
        assert device is not None, "what has arrived is on the device"
        x = device.view(self.dtype).as_strided(*self.geometry)
        _require_unchanged(self.copy.overwritten, x)
        return x


def _unpack(kept: Any) -> Tensor:
    return kept.unpack()


def _require_unchanged(changed: bool, x: Tensor) -> None:
    """What autograd checks itself where there are no hooks."""
    if changed:
        raise RuntimeError(
            f"found a tensor of shape {list(x.shape)} that was modified in place, expected it as it was in the forward "
            "pass, because its backward pass needs that. Do the operation out of place, or on a clone."
        )


class _ForwardPass:
    """One forward pass of a stage."""

    def __init__(self, offload: ActivationOffload, moved: int, apart: Iterable[Tensor]):
        self.offload, self.left, self.outer = offload, moved, Hooks.current()
        self.apart = {x.untyped_storage()._cdata for x in apart}
        self.layer: _Layer | None = None
        self.sent: _Layer | None = None

    def begin_layer(self, module: Module, *_: Any) -> None:
        """A layer is about to run."""
        before = self.layer
        self.end_layers()
        self.layer, self.left = _Layer(self.offload, before, self.left > 0), self.left - 1
        # Other tensors that share a parameter's memory, which a wrapper may free and fill again.
        self.apart |= {p.untyped_storage()._cdata for p in module.parameters()}

    def end_layers(self, *_: Any) -> None:
        """The layer that ran last is done, and the one before it is on the host."""
        self.settle()
        if self.layer is not None and self.layer.moves:
            self.layer.send()
            self.sent = self.layer
        self.layer = None

    def settle(self) -> None:
        """The layer that is being copied leaves the device."""
        if self.sent is not None:
            self.sent.leave()
            self.sent = None

    def pack(self, x: Tensor) -> Any:
        """What autograd keeps of a tensor that it saves."""
        layer = self.layer
        if layer is None or not self._may_move(x):
            return _Stays(layer, x, self.outer)
        if self.sent is not None and (copy := self.sent.find(x)):
            return _Moves(layer, self.sent, copy, x)
        return _Moves(layer, layer, layer.save(x), x) if layer.moves else _Stays(layer, x, self.outer)

    def _may_move(self, x: Tensor) -> bool:
        storage = x.untyped_storage()
        large = storage.nbytes() >= self.offload.sizes.least
        return large and x.device == self.offload.device and not _is_held(x) and storage._cdata not in self.apart


def _is_held(x: Tensor) -> bool:
    """Whether others hold the memory of `x` until the backward pass: of a parameter, or of another leaf, for its
    gradient, such as what a stage received; or of a view of them.
    """
    base = x if x._base is None else x._base
    return isinstance(base, Parameter) or (base.is_leaf and base.requires_grad)


class HostPool:
    """Blocks of equal size in (pinned) host memory. It has as many as were in use at once."""

    def __init__(self, platform: Platform, block: int):
        self.block, self.made = block, 0
        self._platform = platform
        self._free: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """Of all blocks."""
        return self.made * self.block

    @property
    def lent(self) -> int:
        """Blocks in use."""
        return self.made - len(self._free)

    def take(self) -> Tensor:
        """A block, uint8 [block], with anything in it."""
        if self._free:
            return self._free.pop()
        self.made += 1
        return self._platform.host_zeros(self.block, torch.uint8)

    def give_back(self, blocks: list[Tensor]) -> None:
        """Take blocks back, and empty the list of them. Copies that the device still makes must be ordered before
        those that it is asked for later.
        """
        self._free += blocks
        blocks.clear()


class HostRoom:
    """Room in blocks of a pool, filled byte after byte. Without `free` the blocks return when it is dropped."""

    def __init__(self, pool: HostPool):
        self._pool, self._blocks, self._left = pool, list[Tensor](), 0
        finalize(self, pool.give_back, self._blocks).atexit = False

    def place(self, size: int) -> list[Tensor]:
        """The next `size` bytes, in pieces."""
        return list(self._pieces(size))

    def _pieces(self, size: int) -> Iterator[Tensor]:
        block = self._pool.block
        while size:
            if not self._left:
                self._blocks.append(self._pool.take())
                self._left = block
            start, taken = block - self._left, min(size, self._left)
            yield self._blocks[-1][start : start + taken]
            self._left, size = self._left - taken, size - taken

    def free(self) -> None:
        """Return the blocks."""
        self._pool.give_back(self._blocks)
        self._left = 0
