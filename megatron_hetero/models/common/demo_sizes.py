"""Sizes of the demo's model, whatever its family."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import NoReturn

from megatron_hetero.errors import UserError


@dataclass(frozen=True)
class DemoSizes:
    """Sizes of the demo model. Heads on both sides divide by 4, so `sp:4` and `tp:4` are legal."""

    vision_layers: int = 4
    vision_hidden: int = 64
    vision_heads: int = 4
    text_layers: int = 3
    text_hidden: int = 96
    text_heads: int = 4
    text_kv_heads: int = 2
    # Small models learn in fewer steps from larger weights than the real ones' 0.02, and in pictures of a few tokens
    # they need faster rotations to distinguish positions than the real ones', which serve thousands.
    initializer_range: float = 0.1
    rope_theta: float = 8.0

    def __post_init__(self) -> None:
        for name, size in asdict(self).items():
            if size <= 0:
                _refuse(name, f"{size}", "> 0", "raise it")
        _check_divides("vision_hidden", self.vision_hidden, 4 * self.vision_heads, "4 x vision_heads")
        _check_divides("text_hidden", self.text_hidden, 2 * self.text_heads, "2 x text_heads")
        _check_divides("text_heads", self.text_heads, self.text_kv_heads, "text_kv_heads")


def _check_divides(name: str, size: int, divisor: int, what: str) -> None:
    if size % divisor:
        fix = f"try {_flag(name)} {-(-size // divisor) * divisor}"
        _refuse(name, f"{size}", f"a multiple of {what} = {divisor}", fix)


def _refuse(name: str, found: str, expected: str, fix: str) -> NoReturn:
    raise UserError.at(_flag(name), found=found, expected=expected, because="heads have equal sizes", fix=fix)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
