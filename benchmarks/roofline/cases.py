"""What is predicted: models, layouts of eight GPUs, and steps of one size of picture."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from benchmarks.roofline.devices import Gpu
from megatron_hetero.config.schema import load_config
from megatron_hetero.estimate.estimate import Estimate
from megatron_hetero.estimate.shards import AssumedBatch
from megatron_hetero.job.job import JobSpec
from megatron_hetero.layout.names import TEXT
from megatron_hetero.models.layers.parts import Tokens
from tests.fake_cuda.cases import SMALL, Case

WORLD, PACK, TEXT_TOKENS = 8, 8192, 256
"""GPUs; tokens that micro-batches are filled up to, of samples that are shorter; tokens of a sample besides its
picture, which the published table does not state.
"""
RECOMPUTED = ((), ("vision",), ("text selective",), ("text",), ("vision", "text"))
"""Modules of which all layers are recomputed: the first that leaves enough memory is taken."""
RECOMPUTED_OF_EXPERTS = (
    (),
    ("vision selective",),
    ("text selective",),
    ("vision",),
    ("vision selective", "text selective"),
    ("text experts",),
    ("vision selective", "text experts"),
    ("vision", "text experts"),
    *RECOMPUTED[3:],
)
"""Likewise of models with experts, with the level where it is not `full`: by the time that they take."""
LIMITS = "--data.max_seq_length 131072 --data.max_pixels 13000000"
LEFT = 0.08
"""Share of a device's memory that is left for CUDA's context and fragmentation."""


@dataclass(frozen=True)
class Picture:
    """Samples of one picture of `side` pixels and `tokens` besides; `batch`: samples of a step, as published, where it
    is. `published`: patches per second of 32B on eight H100, by kind of layout.
    """

    side: int
    batch: int
    tokens: int = TEXT_TOKENS
    published: tuple[tuple[str, int], ...] = ()

    @property
    def patches(self) -> int:
        """Before four of them become a row."""
        return (self.side // 14) ** 2

    @property
    def length(self) -> int:
        """Tokens of a sample."""
        return self.patches // 4 + self.tokens

    def __str__(self) -> str:
        return f"{self.patches:,} patches" + (f" + {self.tokens:,} tokens" if self.tokens != TEXT_TOKENS else "")


def _picture(side: int, batch: int, zero: int, tp: int, ours: int) -> Picture:
    published = (("ZeRO-3", zero), ("uniform tp", tp), ("sp|tp", ours))
    return Picture(side, batch, published=tuple((kind, rate) for kind, rate in published if rate))


PICTURES = (
    Picture(1008, 16, 6912),
    _picture(448, 8, 3354, 3108, 4264),
    _picture(896, 8, 13702, 11342, 15464),
    _picture(1344, 8, 26802, 16222, 21296),
    _picture(1792, 8, 0, 18207, 23600),
    _picture(2240, 4, 0, 17207, 22496),
    _picture(3584, 2, 0, 16631, 20985),
)
"""A pack of 8,208 tokens, and the six of Ray's published table (Qwen2.5-VL-32B, 8 H100, bfloat16)."""


@dataclass(frozen=True)
class Layouts:
    """Of both modules, over eight ranks. `kind`: as the published table calls it. `replicas`: of the text module.
    `label`: what the flags `more` do, or what computes. `packages`: see `Case`. `waves`: micro-batches whose pictures
    share a call of the encoder.
    """

    kind: str
    vision: str
    text: str
    replicas: int
    label: str = ""
    more: str = ""
    packages: tuple[str, ...] = ()
    waves: int = 1

    def __str__(self) -> str:
        return f"{self.vision}|{self.text} {self.label}".strip()

    def in_waves_of(self, waves: int) -> Layouts:
        """The same, where so many micro-batches' pictures share a call of the encoder."""
        return replace(self, label=f"{self.label} waves of {waves}".strip(), waves=waves)

    @property
    def overlapped(self) -> Layouts:
        """The same, where exchanges over tp are fused with products."""
        flags = [f"--{name}-tp_overlap true" for name in ("vision", "text") if "tp" in getattr(self, name)]
        label, more = f"{self.label} tp_overlap".strip(), f"{self.more} {' '.join(flags)}".strip()
        return replace(self, label=label, more=more)


FLA = ("fla", "causal_conv1d")
ZERO3 = Layouts("ZeRO-3", "dp:8", "dp:8", 8, "ZeRO-3", "--vision-zero 3 --text-zero 3")
SP_TP4, SP_TP2, SP_TP8 = (Layouts("sp|tp", "sp:8", f"tp:{n}" + f",dp:{8 // n}" * (n < 8), 8 // n) for n in (4, 2, 8))
LAYOUTS = {
    "7b": (
        SP_TP4,
        SP_TP4.in_waves_of(4),
        SP_TP2,
        Layouts("uniform tp", "tp:4,dp:2", "tp:4,dp:2", 2),
        ZERO3,
    ),
    "32b": (
        SP_TP8,
        SP_TP8.in_waves_of(4),
        replace(SP_TP4, label="ZeRO-3", more="--text-zero 3"),
        replace(SP_TP4, label="ZeRO-3", more="--text-zero 3").in_waves_of(4),
        Layouts("uniform tp", "tp:8", "tp:8", 1),
        ZERO3,
    ),
    "30b_a3b": (
        Layouts("sp|tp", "sp:8", "dp:8,ep:8", 8),
        Layouts("sp|tp", "dp:8", "dp:8,ep:8", 8),
        Layouts("uniform tp", "tp:4,dp:2", "tp:4,dp:2,ep:8", 2),
        ZERO3,
    ),
    "9b": (
        Layouts("sp|tp", "sp:8", "tp:4,dp:2", 2, "fla", packages=FLA),
        Layouts("sp|tp", "sp:8", "tp:4,dp:2", 2, "PyTorch"),
        Layouts("uniform tp", "tp:4,dp:2", "tp:4,dp:2", 2, "fla", packages=FLA),
        replace(ZERO3, label="ZeRO-3, fla", packages=FLA),
    ),
}
"""7B has 28 heads: no `tp` of 8."""
TITLES = {"7b": "Qwen2.5-VL-7B", "32b": "Qwen2.5-VL-32B", "30b_a3b": "Qwen3-VL-30B-A3B", "9b": "Qwen3.5-9B"}
STATES = {"7b": "", "32b": SMALL, "30b_a3b": SMALL, "9b": ""}
"""The larger ones have room on eight GPUs with split masters, and moments and gradients in bfloat16."""
FAMILIES = {"30b_a3b": "qwen3_vl", "9b": "qwen3_5"}
"""Families of models whose patches have 16 pixels in place of 14."""


@dataclass(frozen=True)
class Step:
    """A step of a model; its micro-batches are alike, so that one of them is run, or one wave. `recomputed`: modules,
    each with the level where it is not `full`. `packages`: what the device has besides those of the layout.
    """

    model: str
    layouts: Layouts
    picture: Picture
    recomputed: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()

    @property
    def samples(self) -> int:
        """Of a text replica's micro-batch: the most that fit the pack and divide its share of the batch."""
        share = max(1, self.picture.batch // self.layouts.replicas)
        fitting = (n for n in range(1, share + 1) if share % n == 0 and n * self.picture.length <= PACK + 64)
        return max(fitting, default=1)

    @property
    def pictures(self) -> int:
        """Of a micro-batch, or of a wave, over all replicas."""
        return self.samples * self.layouts.replicas * self.layouts.waves

    @property
    def micro_batches(self) -> int:
        """Of a step, or waves; one where replicas are more than samples of the published batch."""
        return max(1, self.picture.batch // self.pictures)

    @property
    def case(self) -> Case:
        """One micro-batch or wave, on the first rank."""
        samples = f"--train.global_batch_size {self.pictures} --train.micro_batch_size {self.samples}"
        samples += f" --schedule.waves {self.layouts.waves}" * (self.layouts.waves > 1)
        side = self.picture.side // 14 * (16 if self.model in FAMILIES else 14)
        sizes = f"--plan.image_side {side} --plan.tokens {self.picture.tokens}"
        levels = (f"{each} full".split()[:2] for each in self.recomputed)
        again = " ".join(f"--{module}-recompute {level}" for module, level in levels)
        more = f"{sizes} {samples} {LIMITS} {STATES[self.model]} {self.layouts.more} {again}"
        family = FAMILIES.get(self.model, Case.family)
        layouts = self.layouts
        packages = layouts.packages + self.packages
        return Case(self.model, layouts.vision, layouts.text, WORLD, 0, more, family, packages=packages)

    @cached_property
    def planned_bytes(self) -> int:
        """What the plan says that the first rank takes."""
        return int(Estimate.of(load_config(self.case.flags), WORLD).memory[0].sum())

    @cached_property
    def flops(self) -> dict[str, int]:
        """Model FLOPs of a micro-batch or wave by module, over all replicas."""
        job = JobSpec.of(load_config(self.case.flags), WORLD)
        assumed, pictures = AssumedBatch.of(job), self.pictures
        text, vision = job.shapes.text, job.shapes.encoders["vision"]
        sizes = assumed.sample.sizes["vision"] * pictures
        tokens = Tokens((assumed.sample.tokens,) * pictures, supervised=assumed.sample.supervised * pictures)
        return {
            "vision": vision.architecture.operations(vision.tokens(sizes)),
            TEXT: text.architecture.operations(tokens),
        }


def overlapped(model: str, picture: Picture) -> list[Layouts]:
    """More layouts of the longest packs, where products take longer than launches, of the published models. Experts
    exchange nothing over tp.
    """
    if model in FAMILIES:
        return []
    return [each.overlapped for each in LAYOUTS[model] if "tp" in each.text and picture is PICTURES[0]]


def steps(gpu: Gpu, models: Iterable[str] = LAYOUTS, sides: Collection[int] = ()) -> list[Step]:
    """All of `models`, with pictures of these `sides` (none: all); modules are recomputed where they would not fit
    into the memory of `gpu` otherwise.
    """
    found = []
    for model in models:
        of_model = PICTURES[:1] if FAMILIES.get(model) == "qwen3_5" else PICTURES
        for picture in (picture for picture in of_model if not sides or picture.side in sides):
            for each in [*LAYOUTS[model], *overlapped(model, picture)]:
                choices = RECOMPUTED_OF_EXPERTS if model.endswith("a3b") else RECOMPUTED
                tried = [Step(model, each, picture, modules, gpu.packages) for modules in choices]
                found.append(next((s for s in tried if s.planned_bytes <= (1 - LEFT) * gpu.usable), tried[-1]))
    return found
