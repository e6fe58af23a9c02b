"""What a part of a module keeps for its backward pass, and what it takes while it runs: measured. Pure.

A part is a layer, what merges the output of one, or what comes before or after the layers. The torch module that trains
runs forward and backward once on tensors without values (`built`), for each different part, setting and shard. Hooks of
autograd see what it saves; a dispatch mode sees every memory that is allocated, and when that is freed.

What these cannot see is added: the memory that FlashAttention's kernel allocates for itself (`flash_workspace`), and
that a compiled function allocates its results alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from megatron_hetero.distributed.platform import instead_of_compiled
from megatron_hetero.planning.memory.parts import LAST, MeasuredModule, Part, first_alike, is_windowed
from megatron_hetero.planning.shards import SequenceShard

FP32 = 4


@dataclass(frozen=True)
class PartBytes:
    """What a part takes of the device. `given`: its input, where autograd saves that, else 0. `saved`: each memory that
    it saves besides. `passed`: the hidden states that it gives. `forward`: the most that it takes in its forward pass
    besides what it saves and passes on; `backward`: in its backward pass besides what it has saved.
    """

    given: int
    saved: tuple[int, ...]
    passed: int
    forward: int
    backward: int


def measure(module: MeasuredModule, part: Part, shard: SequenceShard) -> PartBytes:
    """Measure a part of `module` on a rank that works on `shard`, as one that is not recomputed as a whole."""
    inside = module.recompute if module.recompute.selective else replace(module.recompute, how="none")
    part, unused = part._replace(layer=first_alike(module, part.layer)), {"segments": (), "windows": ()}
    if part.kind == "layer":
        unused.pop("windows" if is_windowed(module, part.layer) else "segments")
    supervised = shard.supervised * (part == LAST)
    return _measured(replace(module, recompute=inside), part, replace(shard, supervised=supervised, **unused))


@lru_cache(maxsize=4096)
def _measured(module: MeasuredModule, part: Part, shard: SequenceShard) -> PartBytes:
    # Not at the top: they import Megatron-Core.
    from megatron_hetero.distributed.megatron import without_processes
    from megatron_hetero.planning.memory.built import META, part_of

    memory = Memory(module.gpu)
    with without_processes(META), instead_of_compiled(memory.run_compiled):
        return memory.measure(*part_of(module, part, shard))


class Memory(TorchDispatchMode):
    """The memories that tensors are allocated in. `gpu`: on a GPU, else on a CPU."""

    def __init__(self, gpu: bool) -> None:
        super().__init__()
        self.gpu = gpu
        self.live = self.peak = 0
        self._sizes, self._ends = dict[int, int](), dict[int, Any]()
        self._saved = WeakSet[_Saved]()
        self._packed: list[Tensor] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and note what it allocates."""
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.native_layer_norm.default and not self.gpu:
            # Mean and scale, which a CPU keeps in the dtype of the input.
            out = (out[0], *(x.to(out[0].dtype) for x in out[1:]))
        self._hold(out, args, kwargs)
        if func is torch.ops.aten._flash_attention_backward.default:
            query, key, ends = args[1], args[2], args[6]
            work = flash_workspace(len(query), len(key), len(ends) - 1, query.shape[1], key.shape[1], query.shape[2])
            self.peak = max(self.peak, self.live + work)
        return out

    def run_compiled(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """`function(*inputs)`, of which a compiler allocates only the results and what a backward pass needs."""
        tensors = [x for x in tree_leaves(inputs) if isinstance(x, Tensor)]
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            function = partitioned(function, self.run_compiled)
        outer, self._packed = self._packed, []
        with _disable_current_modes():
            out = function(*inputs)
        self._hold((out, self._packed), inputs)
        self._packed = outer
        return out

    def measure(self, run: Callable[[Tensor], Sequence[Tensor]], given: Tensor) -> PartBytes:
        """Run a part forward and backward on its input. Of what `run` gives the first is passed on."""
        with self, saved_tensors_hooks(self._pack, _Saved.unpack):
            outs = run(given)
            kept = {address_of(saved.tensor) for saved in self._saved}
            sizes = [self._sizes.get(address, 0) for address in {address_of(out) for out in outs} - kept]
            passed = outs[0].nbytes if outs[0].dim() == 3 else 0
            saved = tuple(sorted(self._sizes[address] for address in kept if address in self._sizes))
            forward, self.peak = self.peak - sum(saved) - sum(sizes), self.live
            end = _Outcome.apply(*outs) if any(out.requires_grad for out in outs) else None
            del outs
            if end is not None:
                end.backward()
            backward = self.peak - sum(saved) - sum(sizes) + passed
            # What outlives the backward pass is cached, for all layers and calls, and is there before the next one.
            del end
            given.grad = None
            forward, backward = forward - self.live, backward - self.live
        held = given.untyped_storage().nbytes()
        is_saved = address_of(given) in kept
        return PartBytes(held * is_saved, saved, passed, forward + held * (not is_saved), backward)

    def _pack(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor.detach())
        self._saved.add(saved)
        if self._packed is not None:
            self._packed.append(saved.tensor)
        return saved

    def _hold(self, out: Any, *given: Any) -> None:
        """Note the memories of what an operation gives that are not those of what it was given."""
        for tensor in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.is_meta and address_of(tensor) not in self._sizes:
                found = (address_of(x) for x in tree_leaves(given) if isinstance(x, Tensor))
                if address_of(tensor) not in found:
                    self._add(tensor.untyped_storage())

    def _add(self, storage: Any) -> None:
        address, size = storage._cdata, storage.nbytes()
        self._sizes[address], self._ends[address] = size, ref(storage, partial(self._end, address))
        self.live += size
        self.peak = max(self.peak, self.live)

    def _end(self, address: int, _: Any) -> None:
        self.live -= self._sizes.pop(address)
        del self._ends[address]


class _Saved:
    """A tensor that autograd saves."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor

    def unpack(self) -> Tensor:
        return self.tensor


class _Outcome(torch.autograd.Function):
    """What asks for the gradients of all outputs, each of which is allocated when it is needed."""

    @staticmethod
    def forward(ctx: Any, *outs: Tensor) -> Tensor:
        ctx.like = [(out.shape, out.dtype) for out in outs]
        return outs[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tuple(grad.new_empty(shape, dtype=dtype) for shape, dtype in ctx.like)


def partitioned(function: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with the backward pass that a compiler gives it, and what that chooses to save. `run`: runs that."""
    from functorch.compile import aot_function, make_boxed_func, min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    def call(*inputs: Any) -> Any:
        def without_functions(*others: Any) -> Any:
            rest = iter(others)
            return function(*(x if callable(x) else next(rest) for x in inputs))

        traced = aot_function(
            without_functions,
            fw_compiler=lambda gm, example_inputs: make_boxed_func(gm),
            bw_compiler=lambda gm, example_inputs: make_boxed_func(partial(run, gm)),
            partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table(),
        )
        with warnings.catch_warnings(action="ignore"):  # It looks for gradients of tensors that are no leaves.
            out = traced(*(x for x in inputs if not callable(x)))
        return tuple(out) if isinstance(out, list) else out

    return call


def address_of(tensor: Tensor) -> int:
    """What a tensor's memory is known by."""
    return tensor.untyped_storage()._cdata


def flash_workspace(queries: int, keys: int, segments: int, heads: int, kv_heads: int, head_dim: int) -> int:
    """What FlashAttention-2 allocates in its backward pass besides the gradients that it returns: sums of queries'
    gradients in fp32, of heads whose dim is a multiple of 32, and a number for each, with room for 128 more queries in
    each segment; and the gradients of half-precision keys and values of each head, where heads share them
    (`mha_varlen_bwd` in flash_api.cpp).
    """
    sums = FP32 * (queries + 128 * segments) * heads * (-(-head_dim // 32) * 32 + 1)
    return sums + 2 * 2 * keys * heads * head_dim * (heads != kv_heads)
