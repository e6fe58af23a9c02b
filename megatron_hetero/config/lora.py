"""Low-rank adapters of a module (LoRA, Hu et al. 2021, arXiv 2106.09685)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from megatron_hetero.config.fields import Section, option, unused, wrong


@dataclass(frozen=True, kw_only=True)
class LoraPattern(Section):
    """An entry of `modules.MODULE.lora.patterns`: rank and alpha of the layers that match."""

    r: int | None = option(None, "Rank of the layers that PATTERN matches.", "lora.r", at_least=1)
    alpha: float | None = option(None, "Alpha of the layers that PATTERN matches.", "lora.alpha", above=0)

    def _check(self, section: str) -> None:
        if self.r is None and self.alpha is None:
            raise wrong(section, "neither r nor alpha", "one of them", "", "give one, or remove the pattern")


@dataclass(frozen=True, kw_only=True)
class LoraConfig(Section):
    """Section `modules.MODULE.lora`: low-rank adapters of a module."""

    r: int = option(
        0, "Rank of low-rank adapters (LoRA), which train beside the module's frozen layers; 0: none.", at_least=0
    )
    alpha: float | None = option(None, "Adapters are scaled by alpha / r.", "r", above=0)
    dropout: float = option(
        0.0, "Dropout of the input of adapters; adapters of experts have none.", at_least=0, at_most=0.99
    )
    targets: tuple[str, ...] = option(
        (),
        "Linear layers with adapters: names as in PEFT (`q_proj`, `attn.qkv`, `experts.down_proj`) or patterns "
        "(`*.layers.[0-3].*`). Other layers are frozen too, except the projector if none of its layers is named.",
        "all but projector and head",
    )
    rslora: bool = option(False, "Scale by alpha / sqrt(r) (rsLoRA).")
    patterns: Mapping[str, LoraPattern] = option(
        {}, "Other ranks and alphas of the targets that PATTERN matches, a name or pattern as in targets."
    )
    lr_ratio: float = option(1.0, "Learning rate of B relative to A (LoRA+).", above=0)
    hf_path: Path | None = option(
        None, "PEFT folder of adapters to start from, which also sets their ranks and targets.", "new adapters"
    )

    @property
    def enabled(self) -> bool:
        """Whether the module has adapters: new ones, or adapters from a folder."""
        return self.r > 0 or self.hf_path is not None

    def _check(self, section: str) -> None:
        if self.hf_path is not None:
            for name in ("r", "alpha", "targets", "rslora", "patterns"):
                if name in self.given:
                    because = f"the folder {section}.hf_path sets it"
                    raise unused(f"{section}.{name}", getattr(self, name), because, "remove one of them")
        elif not self.r and self.given:
            because = f"there are no adapters, as {section}.r is 0"
            raise unused(f"{section}.{self.given[0]}", getattr(self, self.given[0]), because, f"set {section}.r")


def matches(entry: str, name: str) -> bool:
    """Return whether an entry of targets or patterns matches the layer `name`: the entry equals the end of `name` after
    a dot, or matches `name` by `fnmatch`.
    """
    return fnmatchcase(name, entry) or name.endswith(f".{entry}")
