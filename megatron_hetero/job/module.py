"""Binds the configuration of a module to a shape, a layout and pipeline stages in a world of ranks. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch

from megatron_hetero.base.errors import UserError
from megatron_hetero.config.fields import unused, wrong
from megatron_hetero.config.modules import ModuleConfig
from megatron_hetero.config.optimizers import OPTIMIZERS, OptimizerConfig, OptimizerKind
from megatron_hetero.config.schema import Config
from megatron_hetero.hf.weight_map import MAIN, Share, WeightMap
from megatron_hetero.layout.axes import EXPERTS
from megatron_hetero.layout.layout import Layout
from megatron_hetero.layout.names import TEXT, Role
from megatron_hetero.layout.pipeline import PipelineStage, cut_stages
from megatron_hetero.models.frozen import Frozen
from megatron_hetero.models.layers.parts import Backend, Site
from megatron_hetero.models.layers.recompute import Recompute
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.models.weights import prefix_of

# These modules import Megatron-Core, which layouts and schedules do not need.
if TYPE_CHECKING:
    from megatron_hetero.groups.megatron import ModuleGroups
    from megatron_hetero.groups.platform import Platform
    from megatron_hetero.models.layers.offload import ActivationOffload

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Torch dtypes by the values of `model.dtype`."""


@dataclass(frozen=True)
class ModuleJob:
    """The configuration of a module, bound to a shape, a layout and pipeline stages.

    Attributes:
        name: the name of the module in the configuration.
        role: the role of the module in the graph.
        shape: the `EncoderShape` or `TextShape` of the whole module.
        prefix: the prefix of the names of the module's tensors in the whole model.
        layout: the layout of the module on ranks.
        stages: all pipeline stages of the module.
        frozen: the names, in the architecture, of stored tensors that do not train.
        settings: the configuration record of the module.
        dtype: the dtype of weights and activations.
        backend: the value of `model.backend`, with `auto` replaced by `torch` if other settings need it.
        compiled: whether layers are compiled.
        optimizer: the kind of the optimizer.
    """

    name: str
    role: Role
    shape: Any
    prefix: str
    layout: Layout
    stages: tuple[PipelineStage, ...]
    frozen: frozenset[str]
    settings: ModuleConfig
    dtype: torch.dtype
    backend: str = "torch"
    compiled: bool = False
    cudnn: bool = True
    optimizer: OptimizerKind = OPTIMIZERS["adamw"]

    @classmethod
    def of(cls, name: str, config: Config, shapes: ModelShapes, layout: Layout, frozen: Frozen) -> Self:
        """Return the job of module `name`. Raises `UserError` if a setting does not fit, or would have no effect."""
        role, settings, shape, prefix = shapes.role(name), config.module(name), shapes[name], prefix_of(name, shapes)
        per_rank = config.schedule.virtual_stages if role == TEXT else 1
        costs, split = shape.layer_costs(config.data.max_seq_length), settings.layers or None
        module = cls(
            name=name,
            role=role,
            shape=shape,
            prefix=prefix,
            layout=layout,
            stages=cut_stages(shape.layers, layout.pp, per_rank=per_rank, split=split, costs=costs, module=name),
            frozen=frozenset(tensor for tensor in shape.architecture.tensors if prefix + tensor in frozen.tensors),
            settings=settings,
            dtype=DTYPES[config.model.dtype],
            backend=config.layer_backend,
            compiled=config.model.compile == "layers",
            cudnn=config.may_use_cudnn,
            optimizer=OPTIMIZERS[config.optimizer.name],
        )
        module._check_encoder()
        module._check_frozen()
        module._check_states()
        module._check_layers()
        return module

    # --------------------------------------------------------------------------------------------- what trains

    @property
    def trains(self) -> bool:
        """Whether any tensor of the module trains."""
        return len(self.frozen) < len(self.shape.architecture.tensors)

    @property
    def layers_train(self) -> bool:
        """Whether any tensor outside the projector trains."""
        architecture = self.shape.architecture
        return any(name not in self.frozen for name in architecture.tensors if not architecture.is_of_projector(name))

    @property
    def passes_gradients(self) -> bool:
        """Whether layers compute gradients of their inputs. In the text module they always do, for the encoders."""
        return self.role == TEXT or self.layers_train

    # ------------------------------------------------------------------------------------------------ settings

    def peak_lr(self, optimizer: OptimizerConfig, parameter: str) -> float:
        """Return the peak learning rate of the parameter that has this name in the whole module."""
        in_projector = self.shape.architecture.in_projector(parameter)
        peak = optimizer.lr_projector if in_projector else self.settings.lr
        ratio = self.settings.lora.lr_ratio if parameter.endswith("lora.B") else 1.0
        return (optimizer.lr if peak is None else peak) * ratio

    @property
    def sequence_parallel(self) -> bool:
        """Whether activations are split along the sequence over tp ranks."""
        return self.settings.sequence_parallel and self.layout.tp > 1

    @property
    def recompute(self) -> Recompute:
        """The settings of recomputation in the backward pass."""
        return Recompute(self.settings.recompute, self.settings.chunk)

    # ---------------------------------------------------------------------------------------------- torch modules

    def site(self, groups: ModuleGroups, platform: Platform, backend: Backend) -> Site:
        """Return the `Site` with which a rank builds the module: its groups, platform, backend and settings."""
        options = (self.sequence_parallel, self.recompute, self.compiled, self.cudnn)
        return Site(groups, platform, backend, self.dtype, *options)

    def model(self, site: Site, stage: PipelineStage, offload: ActivationOffload | None = None) -> Any:
        """Return the torch module of a stage, with uninitialized weights. `offload`: offloads activations of layers."""
        from megatron_hetero.models.stages import EncoderModel, TextModel

        return (TextModel if self.role == TEXT else EncoderModel)(self.shape, site, stage, offload)

    def weight_map(self, share: Share, stage: PipelineStage, view: str = MAIN) -> WeightMap:
        """Return the parameters of a stage in a view, each with the slices of stored tensors that are in `share`."""
        return self.shape.architecture.weight_map(self.prefix, share, stage, view)

    # -------------------------------------------------------------------------------------------------- checks

    def _unused(self, field: str, because: str, fix: str = "remove it") -> UserError:
        value = self.settings
        for name in field.split("."):
            value = getattr(value, name)
        return unused(f"modules.{self.name}.{field}", value, because, fix)

    def _check_encoder(self) -> None:
        """Check that only further encoders (with `hf_path`) have settings of further encoders. Raises `UserError`."""
        for field in ("token", "min_pixels", "max_pixels"):
            if self.settings.hf_path is None and getattr(self.settings, field) is not None:
                other = "" if field == "token" or self.role == TEXT else f", or use data.{field}"
                raise self._unused(field, "only a further encoder has it", f"remove it{other}")

    def _check_frozen(self) -> None:
        """Check that no setting applies to gradients, states or updates that do not exist. Raises `UserError`."""
        settings, name = self.settings, self.name
        if settings.lr is not None and not self.layers_train:
            raise self._unused("lr", f"model.freeze and model.train leave {name} frozen", "remove it, or train it")
        # A text module without trained weights still passes gradients on to encoders.
        if settings.offload.activations and not self.passes_gradients:
            why, fix = f"{name} is frozen and its layers have no backward pass", f"remove it, or train {name}"
            raise self._unused("offload.activations", why, fix)
        if self.trains:
            return
        for field in settings.precision.given:
            raise self._unused(f"precision.{field}", f"{name} is frozen and not updated")
        if settings.offload.states:
            raise self._unused("offload.states", f"{name} is frozen and not updated")
        if settings.zero == 2:
            raise self._unused("zero", f"{name} is frozen and has no gradients", "remove it, or use 3")
        if settings.recompute != "none" and self.role != TEXT:
            raise self._unused("recompute", f"{name} is frozen and has no backward pass")

    def _check_states(self) -> None:
        """Check that the settings of optimizer states fit the optimizer and the dtype. Raises `UserError`."""
        precision, kind, fp32 = self.settings.precision, self.optimizer, self.dtype == torch.float32
        for field in precision.given:
            if fp32 and field in ("master", "gradients"):
                why, fix = "weights in float32 are their own masters", "remove it, or set model.dtype to bfloat16"
                raise self._unused(f"precision.{field}", why, fix)
            if field == "moments" and not kind.moments:
                why = f"optimizer.name is {kind.name}, which has no moments"
                raise self._unused(f"precision.{field}", why, "remove it, or use adamw")
        if self.settings.offload.states and not kind.moments and (fp32 or precision.master == "none"):
            raise self._unused("offload.states", f"{kind.name} has no states of this module")
        for heads in sorted({layer.attention.kv_heads for layer in self.shape.architecture.layers}):
            if heads % self.layout.tp:
                self._check_copies(heads)

    def _check_copies(self, heads: int) -> None:
        """Check that all copies of a key/value head are rounded in the same way. Raises `UserError`."""
        precision, tp = self.settings.precision, self.layout.tp
        # Copies at the same position on each rank have the same random bits.
        in_place = tp % heads == 0
        rounded = {
            "moments": precision.moments != "float32" and not (in_place and precision.moments == "bfloat16"),
            "master": precision.master == "none" and not in_place,
        }
        for field in (field for field, refused in rounded.items() if refused):
            setting, expected = f"precision.{field}", "float32" if field == "moments" else "float32 or split"
            found = f"{getattr(precision, field)} with {self._layout} and {heads} key/value heads"
            because = "tp ranks hold copies of key/value heads, and would round them differently"
            fix = f"leave it out, or use a tp that divides {heads}"
            raise self._wrong(setting, found, expected, because, fix)

    def _check_layers(self) -> None:
        """Check that the settings of recomputation, ZeRO and overlap have an effect. Raises `UserError`."""
        settings, layout = self.settings, self.layout
        maximum = max(len(stage.layers) for stage in self.stages)
        if isinstance(settings.recompute, int) and settings.recompute > maximum:
            found = f"the first {settings.recompute} layers of each pipeline stage"
            fix = "use `full` to recompute all layers"
            raise self._wrong("recompute", found, f"at most {maximum}", "no stage has more", fix)
        if self.recompute.experts and EXPERTS not in layout.views:
            fix = "use `selective`, which recomputes the same of other layers"
            raise self._wrong("recompute", "experts", "another value", f"{self.name} has no experts", fix)
        if settings.zero > 1 and all(layout.ways("tokens", "samples", view=view) == 1 for view in layout.every_view):
            because = "no two of its ranks hold the same weights: dp, sp and cp are 1"
            fix = "remove it, or give the module dp, sp or cp"
            raise self._wrong("zero", f"{settings.zero} with {self._layout}", "1", because, fix)
        if settings.tp_overlap and not self.sequence_parallel:
            split = "tp 1" if layout.tp == 1 else f"modules.{self.name}.sequence_parallel false"
            because = "its layers exchange no activations"
            raise self._wrong("tp_overlap", f"true with {split}", "false", because, "remove it")
        if settings.tp_overlap and self.backend == "te":
            because, fix = "Transformer Engine's layers exchange activations themselves", "use --model.backend torch"
            raise self._wrong("tp_overlap", "true with model.backend te", "false", because, f"remove it, or {fix}")

    @property
    def _layout(self) -> str:
        return f"{self.name} layout `{self.layout}`"

    def _wrong(self, field: str, found: str, expected: str, because: str, fix: str) -> UserError:
        return wrong(f"modules.{self.name}.{field}", found, expected, because, fix)
