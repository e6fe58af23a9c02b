"""The layouts that are run on a GPU that computes nothing, one rank of each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MODELS = Path(__file__).parents[2] / "examples" / "models"


@dataclass(frozen=True)
class Case:
    """One rank of a layout of `model` of a family. `more`: further flags; those given here win."""

    model: str
    vision: str
    text: str
    world: int
    rank: int = 0
    more: str = ""
    family: str = "qwen2_5_vl"

    def __str__(self) -> str:
        settings = " ".join(self.more.replace("--", "").split())
        model = self.model if self.family == Case.family else f"{self.family} {self.model}"
        return f"{model} {self.vision}|{self.text} rank {self.rank} of {self.world} {settings}".strip()

    @property
    def flags(self) -> list[str]:
        """The command line of a run in bfloat16: in each sample a picture of 72 by 72 patches, or of 64 by 64 where a
        patch has 16 pixels, and 6,912 tokens besides.
        """
        usual = {
            "model.hf_path": MODELS / f"{self.family}_{self.model}",
            "model.dtype": "bfloat16",
            "model.backend": "torch",
            "vision-parallel": self.vision,
            "text-parallel": self.text,
            "data.registry.d.annotations": "/none.json",
            "data.datasets": "d",
            "train.global_batch_size": 2,
            "plan.images": 1,
            "plan.image_side": 1008 if self.family == Case.family else 1024,
            "plan.tokens": 6912,
            "plan.supervised": 0.5,
        }
        mine = self.more.split()
        left = {f"--{name}": str(value) for name, value in usual.items() if f"--{name}" not in mine}
        return [*(part for flag in left.items() for part in flag), *mine]


RECOMPUTED = "--model.recompute.text full"
SELECTIVE = "--model.recompute.text selective --model.recompute.vision selective"
SPLIT = "--train.global_batch_size 4 --parallel_layers.text 1"
SMALL = " ".join(
    f"--precision.{m}.master split --precision.{m}.moments bfloat16 --precision.{m}.gradients bfloat16"
    for m in ("vision", "text")
)
HOST = "--offload.vision.states true"
OFFLOADED = "--offload.text.activations true --offload.vision.activations true"
LONG_SAMPLE = "--plan.image_side 3584 --plan.tokens 114688 --data.max_seq_length 131072 --data.max_pixels 13000000"
"""A picture of 65,536 patches, and 131,072 tokens in all."""
SMALL_PICTURES = "--schedule.waves 4 --train.global_batch_size 8 --plan.image_side 224 --plan.tokens 256"
"""Of 256 patches, four micro-batches in one call."""
CASES = (
    Case("7b", "sp:8", "tp:4,dp:2", 8),
    Case("7b", "sp:8", "tp:4,dp:2", 8, 0, f"{RECOMPUTED} --model.recompute.vision full --train.global_batch_size 4"),
    Case("7b", "tp:4,dp:2", "tp:4,dp:2", 8, 5),
    Case("7b", "sp:8", "sp:4,dp:2", 8, 3, RECOMPUTED),
    Case("7b", "cp:4,dp:2", "tp:2,cp:4", 8, 7, "--train.global_batch_size 1"),
    Case("7b", "dp:4@0-3", "tp:4@4-7", 8, 6, "--train.global_batch_size 4 --model.tp_overlap.text 4"),
    Case("7b", "dp:4@0-3", "tp:4@4-7", 8, 2, "--plan.images 4"),
    Case("7b", "sp:4,dp:2", "tp:2,pp:4", 8, 0, "--train.global_batch_size 4 --schedule.virtual_stages 2"),
    Case("32b", "sp:8", "tp:8", 8, 0, f"{RECOMPUTED} --train.global_batch_size 1"),
    Case("32b", "sp:8,dp:2", "tp:8,dp:2", 16, 9, RECOMPUTED),
    Case("7b", "sp:8", "tp:4,dp:2", 8, 1, f"{RECOMPUTED} --model.recompute.vision full {SMALL} {LONG_SAMPLE} {HOST}"),
    Case("32b", "sp:8,dp:4", "tp:8,pp:4", 32, 31, f"--model.freeze vision {RECOMPUTED} --train.global_batch_size 4"),
    Case("8b", "sp:8", "tp:4,dp:2", 8, 0, RECOMPUTED, "qwen3_vl"),
    Case("8b", "sp:4,dp:2", "tp:2,pp:4", 8, 2, f"{SPLIT} 11 12 12 --schedule.waves 2", "qwen3_vl"),
    Case("8b", "pp:2@0-1", "tp:2,pp:3@2-7", 8, 4, f"{SPLIT} 17 18 --schedule.run_ahead 1", "qwen3_vl"),
    Case("8b", "pp:2@0-1", "tp:2,pp:3@2-7", 8, 0, f"{SPLIT} 17 18 --schedule.run_ahead 1", "qwen3_vl"),
    Case("32b", "dp:8@0-7", "tp:8,pp:2@8-23", 24, 8, "--train.global_batch_size 8 --schedule.run_ahead 1"),
    Case("8b", "sp:8", "tp:4,dp:2", 8, 0, SELECTIVE, "qwen3_vl"),
    Case("7b", "sp:4,dp:2", "tp:2,pp:4", 8, 0, "--model.recompute.text 3 --model.recompute.vision 16"),
    Case("7b", "sp:8", "tp:4,dp:2", 8, 0, f"{SELECTIVE} --model.chunk.text 1024 --model.chunk.vision 1024"),
    Case("7b", "sp:8", "tp:4,dp:2", 8, 0, f"--zero.vision 2 --zero.text 3 {RECOMPUTED} --train.global_batch_size 4"),
    Case("7b", "sp:8", "dp:8", 8, 3, "--zero.vision 3 --zero.text 3 --train.global_batch_size 8"),
    Case("7b", "sp:8", "tp:4,dp:2", 8, 0, f"{RECOMPUTED} {OFFLOADED}"),
    Case("7b", "sp:8", "tp:4,dp:2", 8, 0, SMALL_PICTURES),
)
LONG = tuple(CASES[number] for number in (3, 6, 8, 9, 11, 12, 14, 15, 16, 17, 18, 21, 23))
"""For `make matrix`: what these have, others have beside something else. 32B has the kernels of 7B, and more of them;
modules that are apart are those of 7B and 8B. Calls of several micro-batches are those of stages.
"""
