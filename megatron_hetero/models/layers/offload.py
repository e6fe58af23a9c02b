"""Offload of saved activations to host memory (docs/training.md, "Activations in host memory").

When layer i + 2 begins, the compute stream waits for the copy of layer i, whose device memory is then free. So the
activations of at most two offloaded layers and of the last layer are on the device, however far the host runs ahead.
The method is vDNN (Rhu et al. 2016, arXiv 1602.08124), with the hooks of `torch.autograd.graph.save_on_cpu` and the
streams of torchtune's `OffloadActivations`.
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
    """Sizes in bytes for the offload of activations."""

    least: int
    """Minimum size of a storage that is offloaded."""
    block: int
    """Size of the blocks of host memory, which tensors of any shape reuse in later steps."""

    @classmethod
    def of(cls, gpu: bool) -> OffloadSizes:
        """Return the sizes for a GPU, such that copies take longer than their launch; or for a CPU, where everything is
        copied so that small models run the same code.
        """
        return cls(1 << 20, 8 << 20) if gpu else cls(1, 4 << 10)

    def on_host(self, size: int) -> int:
        """Return the bytes of host memory, in whole blocks, for `size` bytes of one layer."""
        return -(-size // self.block) * self.block


def offloaded_layers(layers: int) -> int:
    """Return the number of a stage's first layers that are offloaded: all except the last layer, whose backward pass
    comes first, often immediately. A single layer is offloaded too.
    """
    return max(layers - 1, min(layers, 1))


class ActivationOffload:
    """Offload of the activations of one module on one rank, with its host memory and copy streams."""

    def __init__(self, platform: Platform, sizes: OffloadSizes | None = None):
        self.device, self.sizes = platform.device, sizes or OffloadSizes.of(platform.is_cuda)
        self.pool = HostPool(platform, self.sizes.block)
        streams = platform.side_streams(2) or (None, None)
        self.out, self.back = map(_Lane, streams)

    @contextlib.contextmanager
    def saving(
        self, layers: Sequence[Module], after: Iterable[Module] = (), apart: Iterable[Tensor] = ()
    ) -> Iterator[None]:
        """Offload the activations of one forward pass through `layers`, followed by the modules `after`, whose
        activations stay on the device. `apart`: tensors that all layers save, which also stay.
        """
        run = _ForwardPass(self, offloaded_layers(len(layers)), apart)
        hooks = [layer.register_forward_pre_hook(run.begin_layer) for layer in layers]
        hooks += [module.register_forward_pre_hook(run.end_layers) for module in after]
        try:
            with saved_tensors_hooks(run.pack, lambda saved: saved.unpack()):
                yield
            run.end_layers()
        finally:
            for hook in hooks:
                hook.remove()
            run.settle()


class _Lane:
    """A copy stream next to the compute stream. On a CPU there is no stream, and copies are synchronous."""

    def __init__(self, stream: torch.cuda.Stream | None):
        self._stream = stream

    @contextlib.contextmanager
    def after_compute(self) -> Iterator[None]:
        """Issue the work of this context to this stream, after all work issued to the compute stream so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Let the compute stream wait for all work on this stream."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


class SavedStorage:
    """A storage of saved tensors, which can move to the host. `device`: its bytes on the device, if they are there."""

    def __init__(self, saved: Tensor):
        # View the whole storage: a saved tensor may be a view of the storage with any strides.
        count = saved.untyped_storage().nbytes() // saved.itemsize
        self.device: Tensor | None = saved.detach().as_strided((count,), (1,), 0).view(torch.uint8)
        self.version, self.size = saved._version, count * saved.itemsize
        self.host: list[Tensor] = []
        self.overwritten = False

    def send(self, room: HostRoom) -> None:
        """Start to copy the storage to the host."""
        assert self.device is not None, "a storage is sent from the device"
        self.host = room.place(self.size)
        for host, device in zip(self.host, self._split(self.device), strict=True):
            host.copy_(device, non_blocking=True)

    def leave(self) -> None:
        """Release the device memory, and record whether the storage was modified after it was saved."""
        assert self.device is not None, "a storage leaves once"
        self.overwritten, self.device = self.device._version != self.version, None

    def bring(self, device: Tensor) -> None:
        """Start to copy the storage back into `device`, uint8 [size]."""
        for host, segment in zip(self.host, self._split(device), strict=True):
            segment.copy_(host, non_blocking=True)
        self.device, self.host = device, []

    def _split(self, device: Tensor) -> Sequence[Tensor]:
        return device.split([len(host) for host in self.host])


class _Layer:
    """The storages that a layer saves in one forward pass. `before`: the previous layer, until it is fetched."""

    def __init__(self, offload: ActivationOffload, before: _Layer | None, moves: bool):
        self.offload, self.before, self.moves = offload, before, moves
        self.copies: dict[tuple[int, int], SavedStorage] = {}
        self.room = HostRoom(offload.pool)
        self.away = self.arriving = False

    def find(self, x: Tensor) -> SavedStorage | None:
        """Return the saved storage of `x` if it is on the device; later, another storage may have its address."""
        return None if self.away else self.copies.get(_identity(x))

    def save(self, x: Tensor) -> SavedStorage:
        """Return the saved storage of `x`; tensors in the same storage share it."""
        return self.find(x) or self.copies.setdefault(_identity(x), SavedStorage(x))

    def send(self) -> None:
        """Start to copy all storages to the host."""
        with self.offload.out.after_compute():
            for copy in self.copies.values():
                copy.send(self.room)

    def leave(self) -> None:
        """Release the device memory once the copies to the host are done."""
        self.offload.out.join()
        for copy in self.copies.values():
            copy.leave()
        self.away = True

    def fetch(self) -> None:
        """Start to copy all storages back to the device, unless the copy has already started."""
        if not self.away:
            return
        # Allocate the buffers on the compute stream, which uses and frees them.
        buffers = [
            torch.empty(copy.size, dtype=torch.uint8, device=self.offload.device) for copy in self.copies.values()
        ]
        with self.offload.back.after_compute():
            for copy, buffer in zip(self.copies.values(), buffers, strict=True):
                copy.bring(buffer)
        self.away, self.arriving = False, True

    def arrive(self) -> None:
        """Let the compute stream wait until all storages are on the device."""
        self.fetch()
        if self.arriving:
            self.offload.back.join()
            self.arriving = False
            self.copies.clear()  # From now on, only autograd owns the storages.
            self.room.free()

    def reach(self) -> None:
        """Wait for the storages of this layer, whose backward pass starts, and start to fetch the previous layer."""
        self.arrive()
        before, self.before = self.before, None
        if before is not None:
            before.fetch()

    def __del__(self) -> None:
        if self.arriving:  # The backward pass was abandoned: memory must not be reused before the copies are done.
            self.offload.back.join()


def _identity(x: Tensor) -> tuple[int, int]:
    return x.untyped_storage()._cdata, x._version


class _Stays:
    """A saved tensor that stays on the device and passes through outer hooks. `layer`: None after the last layer."""

    def __init__(self, layer: _Layer | None, x: Tensor, outer: Hooks):
        self.layer, self.outer = layer, outer
        # Detach `x`, since the output of an operation would reference the operation and thereby itself. Do not detach a
        # parameter, which has attributes.
        given = x if _is_owned(x) else x.detach()
        self.saved = outer.pack(given)
        self.version = given._version if self.saved is given is not x else None

    def unpack(self) -> Tensor:
        if self.layer is not None:
            self.layer.reach()
        x = self.outer.unpack(self.saved)
        _require_unchanged(self.version is not None and x._version != self.version, x)
        return x


class _Moves:
    """A saved tensor in a storage that the layer `home` offloads, represented by its geometry."""

    def __init__(self, layer: _Layer, home: _Layer, copy: SavedStorage, x: Tensor):
        self.layer, self.home, self.copy, self.dtype = layer, home, copy, x.dtype
        self.geometry = x.size(), x.stride(), x.storage_offset()

    def unpack(self) -> Tensor:
        self.layer.reach()
        self.home.arrive()
        device = self.copy.device
        assert device is not None, "an arrived storage is on the device"
        x = device.view(self.dtype).as_strided(*self.geometry)
        _require_unchanged(self.copy.overwritten, x)
        return x


def _require_unchanged(changed: bool, x: Tensor) -> None:
    """Raise an error if `x` was modified in place since it was saved. Autograd checks this only without hooks."""
    if changed:
        raise RuntimeError(
            f"found a tensor of shape {list(x.shape)} that was modified in place, expected it as it was in the forward "
            "pass, because the backward pass needs its values. Do the operation out of place, or on a clone."
        )


class _ForwardPass:
    """State of one forward pass through a stage whose activations are offloaded."""

    def __init__(self, offload: ActivationOffload, moved: int, apart: Iterable[Tensor]):
        self.offload, self.left, self.outer = offload, moved, Hooks.current()
        self.apart = {x.untyped_storage()._cdata for x in apart}
        self.layer: _Layer | None = None
        self.sent: _Layer | None = None

    def begin_layer(self, module: Module, *_: Any) -> None:
        """Start the layer `module`; called before the forward pass of the layer."""
        before = self.layer
        self.end_layers()
        self.layer, self.left = _Layer(self.offload, before, self.left > 0), self.left - 1
        # Exclude the memory of parameters, which a wrapper may free and refill.
        self.apart |= {p.untyped_storage()._cdata for p in module.parameters()}

    def end_layers(self, *_: Any) -> None:
        """Release the device memory of the previous layer, and send the layer that has just run to the host."""
        self.settle()
        if self.layer is not None and self.layer.moves:
            self.layer.send()
            self.sent = self.layer
        self.layer = None

    def settle(self) -> None:
        """Release the device memory of the layer that has been sent."""
        if self.sent is not None:
            self.sent.leave()
            self.sent = None

    def pack(self, x: Tensor) -> Any:
        """Return the object that autograd saves in place of `x`."""
        layer = self.layer
        if layer is None or not self._may_move(x):
            return _Stays(layer, x, self.outer)
        if self.sent is not None and (copy := self.sent.find(x)):
            return _Moves(layer, self.sent, copy, x)
        return _Moves(layer, layer, layer.save(x), x) if layer.moves else _Stays(layer, x, self.outer)

    def _may_move(self, x: Tensor) -> bool:
        storage = x.untyped_storage()
        large = storage.nbytes() >= self.offload.sizes.least
        return large and x.device == self.offload.device and not _is_owned(x) and storage._cdata not in self.apart


def _is_owned(x: Tensor) -> bool:
    """Return whether `x` is (a view of) a parameter or another leaf with a gradient, such as the input of a stage,
    whose memory lives until the backward pass anyway.
    """
    base = x if x._base is None else x._base
    return isinstance(base, Parameter) or (base.is_leaf and base.requires_grad)


class HostPool:
    """Pool of equally large blocks of (pinned) host memory, which grows to the maximum number in use at once."""

    def __init__(self, platform: Platform, block: int):
        self.block, self.allocated = block, 0
        self._platform = platform
        self._free: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """Size of all blocks in bytes."""
        return self.allocated * self.block

    def take(self) -> Tensor:
        """Return an uninitialised block, uint8 [block]."""
        if self._free:
            return self._free.pop()
        self.allocated += 1
        return self._platform.host_zeros(self.block, torch.uint8)

    def give_back(self, blocks: list[Tensor]) -> None:
        """Return blocks to the pool and clear the list. Copies in flight must be ordered before any later use."""
        self._free += blocks
        blocks.clear()


class HostRoom:
    """Host memory in blocks of a pool, filled contiguously. `free`, or the deletion of this object, returns the blocks
    to the pool.
    """

    def __init__(self, pool: HostPool):
        self._pool, self._blocks, self._left = pool, list[Tensor](), 0
        finalize(self, pool.give_back, self._blocks).atexit = False

    def place(self, size: int) -> list[Tensor]:
        """Return the next `size` bytes as a list of tensors, one per block."""
        segments, block = [], self._pool.block
        while size:
            if not self._left:
                self._blocks.append(self._pool.take())
                self._left = block
            start, taken = block - self._left, min(size, self._left)
            segments.append(self._blocks[-1][start : start + taken])
            self._left, size = self._left - taken, size - taken
        return segments

    def free(self) -> None:
        """Give all blocks back to the pool."""
        self._pool.give_back(self._blocks)
        self._left = 0
