"""The settings of one module, except which tensors are frozen."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megatron_hetero.base.errors import UserError
from megatron_hetero.config.fields import MODULES, Section, check_pixels, option, unused, wrong
from megatron_hetero.config.lora import LoraConfig
from megatron_hetero.config.optimizers import OffloadConfig, PrecisionConfig
from megatron_hetero.layout.names import TEXT

MODULE_NAME = re.compile(r"[a-z][a-z0-9_]*")
NO_MODULES = frozenset(
    {"world", "config", "help", "model", "modules", "data", "boundary", "schedule", "train", "optimizer", "log"}
    | {"checkpoint", "export", "eval", "plan"}
)
"""Words that begin other flags, and so cannot name modules: sections, and flags that are not settings."""
_RESERVED = NO_MODULES | {
    *(TEXT, "projector", "image", "images", "video", "videos", "conversations", "id", "pipeline", "visual", "lm_head"),
}
"""Words that cannot name encoders: they have other meanings in flags, records, metrics or tensor names."""


def require_encoder_name(name: str, where: str) -> None:
    """Check that a further encoder's name is well-formed and not reserved. Raises `UserError`."""
    if not MODULE_NAME.fullmatch(name) or name in _RESERVED or name.endswith("_projector"):
        because, fix = "flags and records use it", "rename the encoder, for example `detail`"
        expected = "an unreserved name of a-z, 0-9 and _"
        raise UserError.at(where, found=f"the name `{name}`", expected=expected, because=because, fix=fix)


@dataclass(frozen=True, kw_only=True)
class ModuleConfig(Section):
    """An entry of `modules`: a module of the model, `vision` or `text`, or a further encoder with an `hf_path`."""

    parallel: str = option(
        "",
        "Layout, such as `sp:8` or `tp:4,dp:2@0-7`; `ep` divides experts: `tp:4,dp:2,ep:8`.",
        "dp over all ranks",
    )
    layers: tuple[int, ...] = option((), "Layers per pipeline stage, in order, such as `10 18`.", "even")
    sequence_parallel: bool = option(
        True, "Megatron sequence parallelism: split activations along the sequence over tp."
    )
    zero: Literal[1, 2, 3] = option(
        1,
        "ZeRO stage: what dp, sp and cp ranks shard. 1: AdamW's states; 2: also gradients; 3: also weights, gathered "
        "layer by layer (FSDP2).",
    )
    recompute: Literal["none", "selective", "experts", "full"] | int = option(
        "none",
        "Activation recomputation: selective (no matrix product), experts (also their first matrix product), full "
        "(all layers), or the number of layers to recompute at the start of each pipeline stage.",
        at_least=1,
    )
    chunk: int = option(
        0,
        "Tokens of a rank per MLP call; the backward pass recomputes the first matrix product. 0: all at once.",
        at_least=0,
    )
    patches_per_call: int = option(
        0,
        "Maximum patches per call of an encoder for each of a replica's sp * cp ranks, on average; more take several "
        "calls, which the backward pass repeats. 0: unlimited.",
        at_least=0,
    )
    tp_overlap: bool = option(
        False,
        "Fuse matrix products with the exchanges over tp before and after them. On GPUs, tp must be inside a host.",
    )
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    lr: float | None = option(
        None, "Peak learning rate, projectors excluded; optimizer.min_lr scales with it.", "optimizer.lr", above=0
    )
    hf_path: Path | None = option(
        None, "Vision-language model folder whose encoder becomes the further encoder MODULE.", "a module of the model"
    )
    token: str | None = option(
        None, "Placeholder token of a further encoder's rows, such as `<|video_pad|>`.", "required with hf_path"
    )
    min_pixels: int | None = option(
        None, "Minimum image area of a further encoder in pixels; smaller images are upscaled.", "its folder's",
        at_least=1,
    )  # fmt: skip
    max_pixels: int | None = option(
        None, "Maximum image area of a further encoder in pixels; larger images are downscaled.", "its folder's",
        at_least=1,
    )  # fmt: skip

    def _check(self, section: str) -> None:
        name = section.removeprefix(f"{MODULES}.")
        if self.hf_path is not None:
            require_encoder_name(name, f"{section}.hf_path (--{name}-hf_path)")
            if self.token is None:
                why, fix = "its rows replace placeholders of that token", "set it to a token of the tokenizer"
                raise wrong(f"{section}.token", "no value", "a placeholder token with hf_path", why, fix)
            check_pixels(section, self.min_pixels, self.max_pixels)
        if name == TEXT and self.patches_per_call:
            why, fix = f"{TEXT} is not an encoder", f"set {section}.chunk to bound its memory, and remove it"
            raise unused(f"{section}.patches_per_call", self.patches_per_call, why, fix)
