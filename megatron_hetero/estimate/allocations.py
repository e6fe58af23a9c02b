"""The memory that torch code allocates, measured on PyTorch's device `meta`: tensors have shapes and lifetimes, but no
memory.

Autograd's hooks report saved tensors, and a dispatch mode every allocation and its end. Kernels that do not run on
`meta`, or would take long there, have stand-ins of the same memory:

  * FlashAttention's backward pass allocates a workspace (`flash_workspace`);
  * a compiled function allocates its results and saved tensors alone (`Memory.run_compiled`);
  * the gated delta rule runs block after block and saves the state between two of them. Of blocks in a row with the
    same sizes one is run, and the states before the others are allocated only (`measured_rule`). On a GPU it has the
    memory of the PyTorch rule or of flash-linear-attention, whichever is larger, as the planning host need not have
    that package.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from megatron_hetero.models.layers.chunks import BLOCK, Chunks, TokenBlock, blocks_of, chunk_length
from megatron_hetero.models.layers.delta_rule import delta_rule
from megatron_hetero.models.layers.offload import OffloadSizes
from megatron_hetero.models.layers.sequences import Sequences

META = torch.device("meta")
FP32 = 4
FLA_CHUNK = 64
"""Tokens of a chunk of flash-linear-attention."""


@dataclass(frozen=True)
class SubmoduleBytes:
    """Device memory of a submodule, such as a layer.

    `saved`: tensors that live from its forward to its backward pass; `stays`: those of them that are not offloaded,
    because they are too small or not autograd's. `passed`: its hidden output. `forward`: the peak of its forward pass
    above `saved`; `backward`: of its backward pass above `saved` and `again`, which is what the backward pass
    recomputes. `memo`: what a recomputation takes from the forward pass, see `LayerCall`.
    """

    saved: int
    stays: int = 0
    passed: int = 0
    forward: int = 0
    backward: int = 0
    again: int = 0
    memo: int = 0


class Memory(TorchDispatchMode):
    """Tracks the storages that tensors on `meta` allocate. `gpu`: whether they stand for tensors on a GPU."""

    def __init__(self, gpu: bool) -> None:
        super().__init__()
        self.gpu = gpu
        self.live = self.peak = 0
        self._sizes, self._ends = dict[int, int](), dict[int, Any]()
        self._saved = WeakTensorKeyDictionary()
        self._packed: list[Tensor] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and record what it allocates."""
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.native_layer_norm.default and not self.gpu:
            # A CPU saves mean and scale in the dtype of the input.
            out = (out[0], *(x.to(out[0].dtype) for x in out[1:]))
        self._record(out, args, kwargs)
        if func is torch.ops.aten._flash_attention_backward.default:
            query, key, ends = args[1], args[2], args[6]
            work = flash_workspace(len(query), len(key), len(ends) - 1, query.shape[1], key.shape[1], query.shape[2])
            self.peak = max(self.peak, self.live + work)
        return out

    def run_compiled(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Run `function(*inputs)` as compiled code, which allocates results and saved tensors only."""
        tensors = [x for x in tree_leaves(inputs) if isinstance(x, Tensor)]
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            function = _with_compiled_backward(function, self.run_compiled)
        outer, self._packed = self._packed, []
        with _disable_current_modes():
            out = function(*inputs)
        self._record((out, self._packed), inputs)
        self._packed = outer
        return out

    def measure(self, run: Callable[[Tensor], Sequence[Tensor]], given: Tensor, memo: dict[str, Any]) -> SubmoduleBytes:
        """Run a submodule forward and backward. The first output of `run` is the input of the next one. `memo`: gets
        what `run` stores for a recomputation, see `LayerCall`.
        """
        with self, saved_tensors_hooks(self._pack, lambda saved: saved):
            outs = run(given)
            saved_addresses, out_addresses = set(map(address_of, self._saved)), set(map(address_of, outs))
            memo_bytes = self._bytes_at(_addresses_in(list(map(vars, memo.values()))))
            memo.clear()
            saved = [self._sizes[address] for address in saved_addresses if address in self._sizes]
            passed = outs[0].nbytes if outs[0].dim() == 3 else 0
            # What our own functions save without autograd, and caches, which outlive the backward pass.
            others = self._sizes.keys() - saved_addresses - out_addresses
            unseen = [(self._ends[address], self._sizes[address]) for address in others]
            base = sum(saved) + self._bytes_at(out_addresses - saved_addresses) - passed
            forward, self.peak = self.peak - base, self.live
            end = _GradientsOnDemand.apply(*outs) if any(out.requires_grad for out in outs) else None
            del outs
            if end is not None:
                end.backward()
            backward = self.peak - base
            # What outlives the backward pass is a cache shared by all layers and calls.
            del end
            given.grad = None
            stays = sum(size for storage, size in unseen if storage() is None)
            forward, backward = forward - self.live - stays, backward - self.live - stays
        given_bytes = given.untyped_storage().nbytes()
        if address_of(given) in saved_addresses:
            saved.append(given_bytes)
        else:
            forward += given_bytes
        least = OffloadSizes.of(self.gpu).least
        small = sum(size for size in saved if size < least)
        return SubmoduleBytes(sum(saved) + stays, small + stays, passed, forward, backward, memo=memo_bytes)

    def _bytes_at(self, addresses: set[int]) -> int:
        return sum(self._sizes.get(address, 0) for address in addresses)

    def _pack(self, tensor: Tensor) -> Tensor:
        saved = tensor.detach()
        self._saved[saved] = None  # until autograd frees it
        if self._packed is not None:
            self._packed.append(saved)
        return saved

    def _record(self, out: Any, *given: Any) -> None:
        """Record the storages of outputs that are not views of inputs."""
        for tensor in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            is_new = isinstance(tensor, Tensor) and tensor.is_meta and address_of(tensor) not in self._sizes
            if is_new and address_of(tensor) not in _addresses_in(given):
                self._add(tensor.untyped_storage())

    def _add(self, storage: Any) -> None:
        address, size = storage._cdata, storage.nbytes()
        self._sizes[address], self._ends[address] = size, ref(storage, partial(self._end, address))
        self.live += size
        self.peak = max(self.peak, self.live)

    def _end(self, address: int, _: Any) -> None:
        self.live -= self._sizes.pop(address)
        del self._ends[address]


def address_of(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage."""
    return tensor.untyped_storage()._cdata


def _addresses_in(tree: Any) -> set[int]:
    return {address_of(x) for x in tree_leaves(tree) if isinstance(x, Tensor)}


class _GradientsOnDemand(torch.autograd.Function):
    """Starts the backward pass of all outputs, and allocates the gradient of each when it is needed."""

    @staticmethod
    def forward(ctx: Any, *outs: Tensor) -> Tensor:
        ctx.like = [(out.shape, out.dtype) for out in outs]
        return outs[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tuple(grad.new_empty(shape, dtype=dtype) for shape, dtype in ctx.like)


# ---------------------------------------------------------------------------------------------- stand-ins


def _with_compiled_backward(function: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with the backward pass and saved tensors of a compiler; `run` executes that pass."""
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
        with warnings.catch_warnings(action="ignore"):  # It reads gradients of non-leaf tensors.
            out = traced(*(x for x in inputs if not callable(x)))
        return tuple(out) if isinstance(out, list) else out

    return call


def flash_workspace(queries: int, keys: int, segments: int, heads: int, kv_heads: int, head_dim: int) -> int:
    """Return the bytes that FlashAttention-2's backward pass allocates: fp32 sums of query gradients with head dims
    rounded up to 32, one number per query and head, room for 128 more queries per segment, and per-head gradients of
    half-precision keys and values where heads share them (`mha_varlen_bwd` in flash_api.cpp).
    """
    sums = FP32 * (queries + 128 * segments) * heads * (-(-head_dim // 32) * 32 + 1)
    return sums + 2 * 2 * keys * heads * head_dim * (heads != kv_heads)


def measured_rule(device: str) -> Callable[..., Tensor]:
    """Return a function with the memory of `delta_rule` on a type of device, "cuda" or "cpu", for tensors on `meta`.
    Its time does not grow with the length of sequences.
    """
    places = BLOCK[device == "cpu"]

    def rule(
        q_nhK: Tensor, k_nhK: Tensor, v_nHV: Tensor, decay_nH: Tensor, beta_nH: Tensor, sequences: Sequences
    ) -> Tensor:
        chunks, others = abridged(sequences.lengths, places)
        (H, V), K = v_nHV.shape[1:], q_nhK.shape[2]
        states = [v_nHV.new_empty(members * H, K, V, dtype=torch.float32) for members in others]
        some: Any = SimpleNamespace(chunks=chunks)
        out = delta_rule(q_nhK, k_nhK, v_nHV, decay_nH, beta_nH, some)
        work = fla_workspace(q_nhK.shape, v_nHV.shape) if device == "cuda" and v_nHV.itemsize == 2 else 0
        return _Saving.apply(work, out, *states)  # pyright: ignore[reportReturnType]

    return rule


@lru_cache(maxsize=64)
def abridged(lengths: tuple[int, ...], places: int) -> tuple[Chunks, tuple[int, ...]]:
    """Return the blocks of at most `places` tokens of sequences of these lengths, without blocks of the same sizes as
    the one before them; and the number of sequences of each omitted block that begins with a saved state.
    """
    length, blocks, others = chunk_length(lengths), list[TokenBlock](), list[int]()
    for steps, starts, follows, tokens in blocks_of(lengths, length, places // length):
        if blocks and blocks[-1][:3] == (steps, starts, follows):
            others += [] if starts else [steps[0]]
            continue
        rows = torch.empty(tokens.size, dtype=torch.int64, device=META)
        mask = torch.empty(*tokens.shape, 1, device=META)
        blocks.append(TokenBlock(steps, starts, follows, length, rows, rows, mask))
    return Chunks(length, tuple(blocks)), tuple(others)


def fla_workspace(keys: tuple[int, ...], values: tuple[int, ...]) -> int:
    """Return the bytes that the backward pass of fla-core's `chunk_gated_delta_rule` allocates besides its inputs, of
    shapes [tokens, heads, width].

    In half precision, per token and value head: shares of two states of a chunk, a row of its inverse, scales, and six
    and four tensors as wide as keys and as values; per key head four more. Its functions hold them to their end
    (`chunk_gated_delta_rule_bwd` in fla/ops/gated_delta_rule/chunk.py).
    """
    (tokens, key_heads, key), (_, heads, value) = keys, values
    per_head = 2 * key * value // FLA_CHUNK + FLA_CHUNK + 11 + 6 * key + 4 * value
    return 2 * tokens * (heads * per_head + 4 * key_heads * key)


class _Saving(torch.autograd.Function):
    """Returns `out`, saves `states` for its backward pass, and allocates `work` bytes in that pass."""

    @staticmethod
    def forward(ctx: Any, work: int, out: Tensor, *states: Tensor) -> Tensor:
        ctx.save_for_backward(*states)
        ctx.work = work
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        torch.empty(ctx.work, dtype=torch.uint8, device=META)
        return None, grad, *(None for _ in ctx.saved_tensors)
