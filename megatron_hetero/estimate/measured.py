"""Modules as ranks run them, and their parts: what is measured. Pure.

Parts of modules on PyTorch's device `meta`, and the calls that run them as the interpreter does.

Tensors on `meta` have shapes and lifetimes, no memory and no values. Groups have sizes and exchange nothing.

What a part of a module keeps for its backward pass, and what it takes while it runs: measured. Pure.

A part is a layer, what merges the output of one, or what comes before or after the layers. The torch module that trains
runs forward and backward once on tensors without values (`built`), for each different part, setting and shard. Hooks of
autograd see what it saves; a dispatch mode sees every memory that is allocated, and when that is freed.

What these cannot see is added: the memory that FlashAttention's kernel allocates for itself (`flash_workspace`), and
that a compiled function allocates its results alone.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple
from weakref import WeakSet, ref

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from megatron_hetero.base.errors import ROWS, TEXT
from megatron_hetero.estimate.shards import SequenceShard, Spans
from megatron_hetero.groups.local_group import SilentGroup
from megatron_hetero.groups.platform import Platform, instead_of_compiled
from megatron_hetero.groups.topology import module_groups
from megatron_hetero.hf.weight_map import Share
from megatron_hetero.layout.axes import MAIN, Fold
from megatron_hetero.layout.context import AttentionSegments
from megatron_hetero.layout.stages import PipelineStage
from megatron_hetero.models.layers.attention import AttentionParams, TorchAttention
from megatron_hetero.models.layers.backend import TORCH
from megatron_hetero.models.layers.kernels import FLASH_CAPABILITY, bucketed, choose_kernel, torch_flash
from megatron_hetero.models.layers.overlapped import overlap_exchanges
from megatron_hetero.models.layers.parts import Site
from megatron_hetero.models.layers.recompute import Recompute
from megatron_hetero.models.layers.segments import PackedSegments
from megatron_hetero.models.stages import EncoderInput, EncoderModel, TextInput, TextModel


class Part(NamedTuple):
    """A part of a module; a merger is that of a layer before the last."""

    kind: Literal["first", "layer", "merger", "last"]
    layer: int = 0


FIRST, LAST = Part("first"), Part("last")


@dataclass(frozen=True)
class MeasuredModule:
    """A module as a rank runs it.

    Attributes:
        name: of the module.
        shape: of the whole module, with its `architecture`.
        tp: degree.
        sp: degree.
        cp: degree.
        sequence_parallel: whether activations between layers are split over tp.
        dtype: of weights and activations.
        recompute: what is computed again.
        frozen: the stored tensors that do not train, as the architecture names them.
        trains: whether layers pass gradients on: always in the text module, for the modules before it.
        parts: in which linear layers exchange over tp.
        compiled: whether layers are.
        gpu: whether a GPU computes it, where attention takes segments in any order, in half precision.
        folds: the further views of its layout.
    """

    name: str
    shape: Any
    tp: int
    sp: int
    cp: int
    sequence_parallel: bool
    dtype: torch.dtype
    recompute: Recompute
    frozen: frozenset[str] = frozenset()
    trains: bool = True
    parts: int = 1
    compiled: bool = False
    gpu: bool = True
    folds: tuple[Fold, ...] = ()

    @property
    def is_text(self) -> bool:
        """Whether it is the text module."""
        return self.name == TEXT


def is_merged(module: MeasuredModule, layer: int) -> bool:
    """Whether a merger follows a layer, other than that behind the last."""
    return not module.is_text and layer in (at for output, at in module.shape.outputs.items() if output != ROWS)


def is_windowed(module: MeasuredModule, layer: int) -> bool:
    """Whether a layer attends inside windows."""
    return module.shape.architecture.layers[layer].attention.windowed


def first_alike(module: MeasuredModule, layer: int) -> int:
    """The first layer that is like it: of its kind, merged, and frozen in the same tensors."""
    return _first_alike(module)[layer]


@lru_cache(maxsize=256)
def _first_alike(module: MeasuredModule) -> tuple[int, ...]:
    architecture, first = module.shape.architecture, dict[Any, int]()
    found = []
    for n, layer in enumerate(architecture.layers):
        stored = f"{architecture.stored}{n}."
        frozen = frozenset(name for name in layer.tensors() if stored + name in module.frozen)
        found.append(first.setdefault((layer, is_merged(module, n), frozen), n))
    return tuple(found)


META = torch.device("meta")
_tensor = partial(torch.empty, device=META)

Run = Callable[[Tensor], Sequence[Tensor]]
"""From the input of a part to what it passes on, and the rows that it gives besides."""


def part_of(module: MeasuredModule, part: Part, shard: SequenceShard) -> tuple[Run, Tensor]:
    """What runs a part of a module on a rank that works on `shard`, and its input: hidden states, tokens or patches."""
    made, run = _built(module, part), partial
    if part == FIRST and module.is_text:
        return run(_embed, made), _tensor(shard.padded, dtype=torch.int64)
    if part == FIRST:
        patches = _tensor(shard.local, module.shape.patch_elements, dtype=module.dtype)
        return run(_embed_patches, made, shard), patches
    hidden = _tensor(shard.local, 1, module.shape.hidden, dtype=module.dtype, requires_grad=module.trains)
    if part == LAST:
        return (run(_loss, made, shard) if module.is_text else run(_merge, made)), hidden
    if part.kind == "merger":
        return run(_merge_between, made), hidden
    table = _tensor(2, shard.tokens, module.shape.rotary.head_dim)
    return run(_run_layer, made, _attention(module, shard), table), hidden


def _embed(made: Any, tokens: Tensor) -> list[Tensor]:
    none = _tensor(0, dtype=torch.int64)
    batch = TextInput(tokens, none, none, none, {ROWS: none}, _NO_ATTENTION)
    embedded = made.embed(batch)
    return [made.enter(batch, embedded, embedded.new_empty(0, embedded.shape[-1]))]


def _embed_patches(made: Any, shard: SequenceShard, patches: Tensor) -> list[Tensor]:
    positions = _tensor(made.shape.position_dims, shard.tokens, dtype=torch.int64)
    return [made.enter(EncoderInput(patches, positions, _NO_ATTENTION, 0))]


def _run_layer(made: Any, plan: AttentionParams, table: Tensor, hidden: Tensor) -> list[Tensor]:
    return [made.layers[0](hidden, table, plan)]


def _merge_between(made: Any, hidden: Tensor) -> list[Tensor]:
    return [made.get_submodule(end.name)(hidden) for end in made.outputs]


def _loss(made: Any, shard: SequenceShard, hidden: Tensor) -> list[Tensor]:
    places = _tensor(shard.supervised, dtype=torch.int64)
    batch = TextInput(places, places, places, places, {}, _NO_ATTENTION)
    normed = made.final_layernorm(hidden)  # Held during the loss, as by the model's own forward pass.
    return [made.loss(batch, normed)]


def _merge(made: Any, hidden: Tensor) -> list[Tensor]:
    return [made.get_submodule(end.name)(hidden) for end in made.outputs]


@lru_cache(maxsize=256)
def _built(module: MeasuredModule, part: Part) -> Any:
    """The pipeline stage that has the part alone."""
    shape, architecture = module.shape, module.shape.architecture
    degrees = {"tp": module.tp, "sp": module.sp, "cp": module.cp}
    degrees |= {axis: degree for view, of in module.folds for axis, degree in zip(view.stated, of, strict=True)}
    ends = {FIRST: PipelineStage(0, 0, True, False), LAST: PipelineStage(shape.layers, shape.layers, False, True)}
    stage = ends[part] if part in ends else PipelineStage(part.layer, part.layer + 1, False, False)
    site = Site(
        module_groups(
            lambda *axes: SilentGroup(math.prod(degrees.get(axis, 1) for axis in axes)),
            None,
            [fold.view for fold in module.folds],
        ),
        Platform(META, "local"),
        TORCH,
        module.dtype,
        module.sequence_parallel,
        module.recompute,
        module.compiled,
    )
    with META:
        made = (TextModel if module.is_text else EncoderModel)(shape, site, stage)
    stored = {
        name: slices
        for view in (MAIN, *(fold.view for fold in module.folds))
        for name, slices in architecture.weight_map(
            "", Share(0, math.prod(degrees.get(axis, 1) for axis in view.part_axes)), stage, view.name
        ).items()
    }
    for name, parameter in made.named_parameters():
        if stored[stage.global_name(name)][0].name in module.frozen:
            parameter.requires_grad_(False)
        else:  # Gradients are added to those of earlier micro-batches, elsewhere.
            parameter.register_post_accumulate_grad_hook(_drop_gradient)
    for each in made.modules():
        if isinstance(each, TorchAttention):
            each.kernel = _kernel(module)
    if module.parts > 1:
        overlap_exchanges(made, module.parts)
    return made


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _kernel(module: MeasuredModule) -> Any:
    """The kernel of attention on the device that is planned for, without optional packages."""
    device = "cuda" if module.gpu else "cpu"
    name = choose_kernel(device, module.dtype, module.shape.rotary.head_dim, FLASH_CAPABILITY, ())
    return torch_flash if name == "torch_flash" else partial(bucketed, attend=_fused)


def _fused(q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None, is_causal: bool, **_: Any) -> Tensor:
    """PyTorch's fused attention, which it does not choose by itself on `meta`. Boolean masks are converted to the dtype
    of the queries.
    """
    mask = None if attn_mask is None else attn_mask.to(q.dtype)
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return fused(q, k, v, 0.0, is_causal, attn_mask=mask)[0]


def _attention(module: MeasuredModule, shard: SequenceShard) -> AttentionParams:
    """What the layers of a rank attend to. It is the first of its groups here; the second has all other tokens."""
    sp_lengths = (shard.tokens, shard.member - shard.tokens, *(0,) * module.sp)[: module.sp]
    cp_lengths = (shard.member,) * module.cp
    return AttentionParams(_segments(shard.segments, cp_lengths), sp_lengths, cp_lengths, _segments(shard.windows))


def _segments(spans: Spans, cp_lengths: tuple[int, ...] = ()) -> PackedSegments:
    queries, keys = zip(*spans, strict=True) if spans else ((), ())
    index = np.zeros(sum(keys), np.int64) if len(cp_lengths) > 1 else None
    return PackedSegments.of_segments(AttentionSegments(queries, keys, index), META, cp_lengths)


_NO_ATTENTION = AttentionParams(_segments(()), (), ())


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
    from megatron_hetero.groups.megatron import without_processes
    # MERGED

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
