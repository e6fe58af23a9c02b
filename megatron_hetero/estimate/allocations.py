"""Measures the memory that torch code allocates, on PyTorch's device `meta`: tensors have shapes and lifetimes, but no
storage.

Autograd's hooks report saved tensors, and a dispatch mode reports every allocation and its end. Kernels that do not run
on `meta`, or run slowly there, have substitutes that use the same memory:

  * the backward pass of attention allocates a workspace (`flash_workspace`, `cudnn_workspace`);
  * a compiled function allocates only its results and saved tensors (`Memory.run_compiled`);
  * the gated delta rule runs block by block and saves the state between blocks. Of successive blocks with equal sizes
    only the first is run; for the others only the states are allocated (`measured_rule`). On a GPU the memory is that
    of PyTorch's rule or of flash-linear-attention, whichever is larger, because the planning host may not have this
    package.
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
from megatron_hetero.models.layers.cudnn_attention import Call
from megatron_hetero.models.layers.delta_rule import delta_rule
from megatron_hetero.models.layers.offload import OffloadSizes
from megatron_hetero.models.layers.sequences import Sequences

META = torch.device("meta")
FP32 = 4
FLA_CHUNK = 64
"""Number of tokens in a chunk of flash-linear-attention."""


@dataclass(frozen=True)
class SubmoduleBytes:
    """Device memory of a submodule, such as a layer.

    `saved`: tensors that live from the forward to the backward pass; `stays`: saved tensors that are not offloaded,
    because they are too small or not saved by autograd. `passed`: the hidden output. `forward`: the peak of the forward
    pass above `saved`; `again`: tensors that the backward pass recomputes; `backward`: the peak of the backward pass
    above `saved` and `again`. `memo`: tensors of the forward pass that a recomputation uses.
    """

    saved: int
    stays: int = 0
    passed: int = 0
    forward: int = 0
    backward: int = 0
    again: int = 0
    memo: int = 0


class Memory(TorchDispatchMode):
    """A dispatch mode that tracks the storages of tensors on `meta`. `gpu`, `cudnn`: on a GPU, and with cuDNN."""

    def __init__(self, gpu: bool, cudnn: bool = True) -> None:
        super().__init__()
        self.gpu, self.cudnn = gpu, cudnn
        self.live = self.peak = 0
        self._sizes, self._ends = dict[int, int](), dict[int, Any]()
        self._saved = WeakTensorKeyDictionary()
        self._packed: list[Tensor] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and record the storages that it allocates."""
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.native_layer_norm.default and not self.gpu:
            # A CPU saves mean and scale in the dtype of the input.
            out = (out[0], *(x.to(out[0].dtype) for x in out[1:]))
        self._record(out, args, kwargs)
        if func is torch.ops.aten._flash_attention_backward.default:
            query, key, ends = args[1], args[2], args[6]
            sizes = len(query), len(key), len(ends) - 1, query.shape[1], key.shape[1], query.shape[2]
            work = max(flash_workspace(*sizes), args[11] and self.cudnn and cudnn_workspace(*sizes, args[8]))
            self.peak = max(self.peak, self.live + work)
        return out

    def run_compiled(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Return `function(*inputs)`, and record the memory of compiled code: only results and saved tensors."""
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
        """Run a submodule forward and backward, and return its memory. The first output of `run` is the input of the
        next submodule. `memo`: the mapping in which `run` stores tensors for a recomputation; it is cleared.
        """
        with self, saved_tensors_hooks(self._pack, lambda saved: saved):
            outs = run(given)
            saved_addresses, out_addresses = set(map(address_of, self._saved)), set(map(address_of, outs))
            memo_bytes = self._bytes_at(_addresses_in(list(map(vars, memo.values()))))
            memo.clear()
            saved = [self._sizes[address] for address in saved_addresses if address in self._sizes]
            passed = outs[0].nbytes if outs[0].dim() == 3 else 0
            # Tensors that functions save without autograd, and caches, which outlive the backward pass.
            others = self._sizes.keys() - saved_addresses - out_addresses
            unseen = [(self._ends[address], self._sizes[address]) for address in others]
            base = sum(saved) + self._bytes_at(out_addresses - saved_addresses) - passed
            forward, self.peak = self.peak - base, self.live
            end = _GradientsOnDemand.apply(*outs) if any(out.requires_grad for out in outs) else None
            del outs
            if end is not None:
                end.backward()
            backward = self.peak - base
            # Tensors that outlive the backward pass are caches shared by all layers and calls.
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
        self._saved[saved] = None  # The weak key disappears when autograd frees the tensor.
        if self._packed is not None:
            self._packed.append(saved)
        return saved

    def _record(self, out: Any, *given: Any) -> None:
        """Record the storages of output tensors that are not views of inputs."""
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
    """Return a number that identifies the storage of a tensor."""
    return tensor.untyped_storage()._cdata


def _addresses_in(tree: Any) -> set[int]:
    return {address_of(x) for x in tree_leaves(tree) if isinstance(x, Tensor)}


class _GradientsOnDemand(torch.autograd.Function):
    """A scalar function of all outputs whose backward pass allocates the gradient of each output."""

    @staticmethod
    def forward(ctx: Any, *outs: Tensor) -> Tensor:
        ctx.like = [(out.shape, out.dtype) for out in outs]
        return outs[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tuple(grad.new_empty(shape, dtype=dtype) for shape, dtype in ctx.like)


# ---------------------------------------------------------------------------------------------- stand-ins


def _with_compiled_backward(function: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with the saved tensors and backward pass of compiled code. `run` runs this backward pass."""
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
        with warnings.catch_warnings(action="ignore"):  # Tracing warns when it reads gradients of non-leaf tensors.
            out = traced(*(x for x in inputs if not callable(x)))
        return tuple(out) if isinstance(out, list) else out

    return call


def flash_workspace(queries: int, keys: int, segments: int, heads: int, kv_heads: int, head_dim: int) -> int:
    """Return the bytes that FlashAttention-2's backward pass allocates: fp32 sums of query gradients with head dims
    rounded up to 32, one number per query and head, padding of 128 queries per segment, and, if heads share keys and
    values, their half-precision gradients per head (`mha_varlen_bwd` in flash_api.cpp).
    """
    sums = FP32 * (queries + 128 * segments) * heads * (-(-head_dim // 32) * 32 + 1)
    return sums + 2 * 2 * keys * heads * head_dim * (heads != kv_heads)


def cudnn_workspace(
    queries: int, keys: int, segments: int, heads: int, kv_heads: int, head_dim: int, longest: int
) -> int:
    """Return the maximum of bytes that a backward pass of `cudnn_attention` allocates: padded inputs, padding of the
    results, fp32 sums of query gradients, one number per query and head, and, if heads share keys and values, their
    half-precision gradients per head (`CompositeSDPABackwardNode` in scaled_dot_product_flash_attention.h of
    cudnn-frontend).
    """
    call = Call.ragged(queries, segments, longest)
    if queries != keys or not call.is_compact:  # cuDNN does not compute the pack.
        return 0
    padded = 2 * head_dim * (4 * call.tokens * (heads + kv_heads) - queries * (heads + 2 * kv_heads))
    return padded + call.rows * heads * (FP32 * (head_dim + 1) + 2 * 2 * head_dim * (heads != kv_heads))


def measured_rule(device: str) -> Callable[..., Tensor]:
    """Return a substitute of `delta_rule` for tensors on `meta` that allocates the memory of the rule on `device`,
    "cuda" or "cpu". Its run time does not grow with the lengths of sequences.
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
    """Return the blocks of at most `places` tokens of sequences of these lengths, without blocks that have the sizes of
    the preceding block; and the number of sequences of each omitted block that begins with a saved state.
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
    """Return the bytes that the backward pass of fla-core's `chunk_gated_delta_rule` allocates besides its inputs.
    `keys`, `values`: the shapes [tokens, heads, width].

    In half precision, per token and value head: a share of two states of a chunk, a row of its inverse, scales, six
    tensors as wide as keys, and four as wide as values; per key head, four more tensors as wide as keys. All of them
    are live until the pass ends (`chunk_gated_delta_rule_bwd` in fla/ops/gated_delta_rule/chunk.py).
    """
    (tokens, key_heads, key), (_, heads, value) = keys, values
    per_head = 2 * key * value // FLA_CHUNK + FLA_CHUNK + 11 + 6 * key + 4 * value
    return 2 * tokens * (heads * per_head + 4 * key_heads * key)


class _Saving(torch.autograd.Function):
    """An identity function of `out` that saves `states` for the backward pass, and allocates `work` bytes in it."""

    @staticmethod
    def forward(ctx: Any, work: int, out: Tensor, *states: Tensor) -> Tensor:
        ctx.save_for_backward(*states)
        ctx.work = work
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        torch.empty(ctx.work, dtype=torch.uint8, device=META)
        return None, grad, *(None for _ in ctx.saved_tensors)
