"""The layouts that are run on a GPU that computes nothing, one rank of each."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

MODELS = Path(__file__).parents[2] / "examples" / "models"
LAYERS = 8
"""Of either module of a shallow model."""
SHALLOW: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"num_hidden_layers": LAYERS, "vision_config": {"depth": LAYERS, "fullatt_block_indexes": [7]}},
    "qwen3_vl": {
        "text_config": {"num_hidden_layers": LAYERS},
        "vision_config": {"depth": LAYERS, "deepstack_visual_indexes": [1, 3, 5]},
    },
}
"""By family, what the configuration of a shallow model says instead."""
KINDS = ["linear_attention"] * 3 + ["full_attention"]
SHALLOW["qwen3_5"] = {
    "text_config": {"num_hidden_layers": LAYERS, "layer_types": KINDS * (LAYERS // len(KINDS))},
    "vision_config": {"depth": LAYERS},
}


@cache
def _shallow(family: str, model: str) -> Path:
    """A folder with a shallow model, for as long as this process lives."""
    config = json.loads((MODELS / f"{family}_{model}" / "config.json").read_text(encoding="utf-8"))
    for name, value in SHALLOW[family].items():
        config[name] = config[name] | value if isinstance(value, dict) else value
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@dataclass(frozen=True)
class Case:
    """One rank of a layout of `model` of a family. `more`: further flags; those given here win. `shallow`: with fewer
    layers, which are as wide. `capability`: that of the GPU. `packages`: modules of the optional packages that it has.
    """

    model: str
    vision: str
    text: str
    world: int
    rank: int = 0
    more: str = ""
    family: str = "qwen2_5_vl"
    shallow: bool = False
    capability: tuple[int, int] = (9, 0)
    packages: tuple[str, ...] = ()

    def __str__(self) -> str:
        settings = " ".join(self.more.replace("--", "").split())
        model = self.model if self.family == Case.family else f"{self.family} {self.model}"
        model += f" of {LAYERS} layers" * self.shallow
        gpu = "" if self.capability == Case.capability else " on {}.{}".format(*self.capability)
        gpu += " with " * bool(self.packages) + " and ".join(self.packages)
        return f"{model} {self.vision}|{self.text} rank {self.rank} of {self.world} {settings}".strip() + gpu

    @property
    def flags(self) -> list[str]:
        """The command line of a run in bfloat16: in each sample a picture of 72 by 72 patches, or of 64 by 64 where a
        patch has 16 pixels, and 6,912 tokens besides.
        """
        whole = MODELS / f"{self.family}_{self.model}"
        usual = {
            "model.hf_path": _shallow(self.family, self.model) if self.shallow else whole,
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


RECOMPUTED = "--text-recompute full"
SELECTIVE = "--text-recompute selective --vision-recompute selective"
SPLIT = "--train.global_batch_size 4 --text-layers 1"
SMALL = " ".join(
    f"--{m}-precision.master split --{m}-precision.moments bfloat16 --{m}-precision.gradients bfloat16"
    for m in ("vision", "text")
)
HOST = "--vision-offload.states true"
OFFLOADED = "--text-offload.activations true --vision-offload.activations true"
LONG_SAMPLE = "--plan.image_side 3584 --plan.tokens 114688 --data.max_seq_length 131072 --data.max_pixels 13000000"
"""A picture of 65,536 patches, and 131,072 tokens in all."""
SMALL_PICTURES = "--schedule.waves 4 --train.global_batch_size 8 --plan.image_side 224 --plan.tokens 256"
"""Of 256 patches, four micro-batches in one call."""
EVEN = "--plan.expert_imbalance 1"
CHUNKED = "--text-chunk 512"
SHORT = "--plan.tokens 1024 --plan.image_side 512"
PACKED = "--train.micro_batch_size 2 --train.global_batch_size 4"
BALANCED = f"{EVEN} --model.router_aux_loss_coef 0.001 --train.global_batch_size 4 --text-layers 3 5"
LORA = "--vision-lora.r 16 --text-lora.r 16"
few = partial(Case, shallow=True)
sparse = partial(few, "30b_a3b", family="qwen3_vl")
"""Qwen3-VL-MoE; a folder with experts is that of the family `qwen3_vl_moe`, but for its name."""
linear = partial(few, family="qwen3_5")
"""Qwen3.5: three delta nets, then attention, twice."""
CASES = (
    few("7b", "sp:8", "tp:4,dp:2", 8),
    few("7b", "sp:8", "tp:4,dp:2", 8, 0, f"{RECOMPUTED} --vision-recompute full --train.global_batch_size 4"),
    few("7b", "tp:4,dp:2", "tp:4,dp:2", 8, 5),
    Case("7b", "sp:8", "sp:4,dp:2", 8, 3, RECOMPUTED),
    few("7b", "cp:4,dp:2", "tp:2,cp:4", 8, 7, "--train.global_batch_size 1"),
    few("7b", "dp:4@0-3", "tp:4@4-7", 8, 6, "--train.global_batch_size 4 --text-tp_overlap true"),
    Case("7b", "dp:4@0-3", "tp:4@4-7", 8, 2, "--plan.images 4"),
    few("7b", "sp:4,dp:2", "tp:2,pp:4", 8, 0, "--train.global_batch_size 4 --schedule.virtual_stages 2"),
    Case("32b", "sp:8", "tp:8", 8, 0, f"{RECOMPUTED} --train.global_batch_size 1"),
    Case("32b", "sp:8,dp:2", "tp:8,dp:2", 16, 9, RECOMPUTED),
    few("7b", "sp:8", "tp:4,dp:2", 8, 1, f"{RECOMPUTED} --vision-recompute full {SMALL} {LONG_SAMPLE} {HOST}"),
    Case("32b", "sp:8,dp:4", "tp:8,pp:4", 32, 31, f"--model.freeze vision {RECOMPUTED} --train.global_batch_size 4"),
    Case("8b", "sp:8", "tp:4,dp:2", 8, 0, RECOMPUTED, "qwen3_vl"),
    few("8b", "sp:4,dp:2", "tp:2,pp:4", 8, 2, f"{SPLIT} 2 2 3 --schedule.waves 2", "qwen3_vl"),
    Case("8b", "pp:2@0-1", "tp:2,pp:3@2-7", 8, 4, f"{SPLIT} 17 18 --schedule.run_ahead 1", "qwen3_vl"),
    Case("8b", "pp:2@0-1", "tp:2,pp:3@2-7", 8, 0, f"{SPLIT} 17 18 --schedule.run_ahead 1", "qwen3_vl"),
    Case("32b", "dp:8@0-7", "tp:8,pp:2@8-23", 24, 8, "--train.global_batch_size 8 --schedule.run_ahead 1"),
    Case("8b", "sp:8", "tp:4,dp:2", 8, 0, SELECTIVE, "qwen3_vl"),
    Case("7b", "sp:4,dp:2", "tp:2,pp:4", 8, 0, "--text-recompute 3 --vision-recompute 16"),
    few("7b", "sp:8", "tp:4,dp:2", 8, 0, f"{SELECTIVE} --text-chunk 1024 --vision-chunk 1024"),
    few("7b", "sp:8", "tp:4,dp:2", 8, 0, f"--vision-zero 2 --text-zero 3 {RECOMPUTED} --train.global_batch_size 4"),
    Case("7b", "sp:8", "dp:8", 8, 3, "--vision-zero 3 --text-zero 3 --train.global_batch_size 8"),
    few("7b", "sp:8", "tp:4,dp:2", 8, 0, f"{RECOMPUTED} {OFFLOADED}"),
    Case("7b", "sp:8", "tp:4,dp:2", 8, 0, SMALL_PICTURES),
    sparse("sp:8", "tp:4,dp:2,ep:8", 8, 0, f"{EVEN} {RECOMPUTED} --train.global_batch_size 4"),
    sparse("sp:8", "tp:1,dp:8,ep:8", 8, 3, f"{EVEN} --train.global_batch_size 8"),
    sparse("sp:8", "tp:4,dp:2,ep:1", 8, 0, f"{EVEN} {RECOMPUTED} --train.global_batch_size 4"),
    sparse("sp:4,dp:2", "tp:2,pp:2,dp:2,ep:4", 8, 7, f"{BALANCED} {SELECTIVE} --schedule.waves 2"),
    sparse("sp:8", "tp:4,dp:2,ep:8", 8, 0, f"{EVEN} {RECOMPUTED} --train.global_batch_size 4", capability=(8, 0)),
    sparse("sp:8", "tp:4,dp:2,ep:1", 8, 0, f"{EVEN} {CHUNKED}", capability=(12, 0)),
    sparse("sp:8", "tp:4,dp:2,ep:1", 8, 0, f"{EVEN} {RECOMPUTED} --train.global_batch_size 4", capability=(8, 9)),
    sparse("sp:8", "tp:1,dp:8,ep:8", 8, 3, f"{EVEN} {CHUNKED} --train.global_batch_size 8"),
    sparse("sp:8", "tp:4,dp:2,ep:1", 8, 0, f"{EVEN} {CHUNKED} --train.global_batch_size 4"),
    linear("9b", "sp:8", "tp:4,dp:2", 8, 0),
    linear("9b", "sp:8", "tp:4,dp:2", 8, 0, packages=("fla", "causal_conv1d")),
    linear("9b", "sp:8", "tp:4,dp:2", 8, 2, f"{SHORT} {SELECTIVE} {PACKED} --text-chunk 512 --text-tp_overlap true"),
    linear("9b", "sp:8", "tp:4,dp:2", 8, 0, f"{SHORT} {RECOMPUTED}", packages=("fla", "causal_conv1d")),
    linear("9b", "dp:6", "tp:2,cp:3", 6, 0, f"{SHORT} --train.global_batch_size 6"),
    linear("9b", "sp:4,dp:2", "tp:2,pp:4", 8, 0, f"{SHORT} --train.global_batch_size 4 --schedule.virtual_stages 2"),
    linear("27b", "dp:10", "sp:2,cp:5", 10, 6, f"{SHORT} {SELECTIVE} --train.global_batch_size 1"),
    linear("27b", "sp:8", "tp:8", 8, 0, f"{OFFLOADED} --train.global_batch_size 1"),
    linear("35b_a3b", "sp:8", "dp:8,ep:8", 8, 3, f"{EVEN} {SHORT} {SELECTIVE} --train.global_batch_size 8"),
    linear("35b_a3b", "sp:8", "tp:2,cp:2,dp:2,ep:4", 8, 7, f"{EVEN} {SHORT} {RECOMPUTED}"),
    few("7b", "sp:8", "tp:4,dp:2", 8, 0, LORA),
    few("7b", "dp:1", "dp:1", 1, 0, f"--text-lora.r 16 --model.freeze vision projector {RECOMPUTED}"),
    sparse("sp:8", "tp:4,dp:2,ep:8", 8, 0, f"{EVEN} {RECOMPUTED} {LORA} --train.global_batch_size 4"),
    few("7b", "sp:8", "tp:4,dp:2", 8, 0, packages=("cudnn ragged",)),
    few("7b", "sp:8", "tp:4,dp:2", 8, 0, f"{RECOMPUTED} {OFFLOADED}", packages=("cudnn dense",)),
    few("8b", "sp:8", "tp:4,dp:2", 8, 0, f"{SELECTIVE} {PACKED}", "qwen3_vl", packages=("cudnn ragged",)),
    few("32b", "sp:8", "sp:8", 8, 0, f"{SELECTIVE} {PACKED}", packages=("cudnn dense",)),
    sparse("sp:8", "tp:1,dp:8,ep:8", 8, 3, f"{EVEN} --text-recompute experts --train.global_batch_size 8"),
)
IN_OTHERS = 0, 1, 2, 7, 19, 25, 27, 30, 31, 32
"""Shallow ones of which others have everything beside something else."""
DELTA_NETS = 33, 34, 35, 37, 38, 40, 42
"""Those of Qwen3.5 that launch most kernels."""
LONG = tuple(case for number, case in enumerate(CASES) if not case.shallow or number in IN_OTHERS + DELTA_NETS)
"""For `make matrix`: whole models, and delta nets on long sequences, take minutes."""
