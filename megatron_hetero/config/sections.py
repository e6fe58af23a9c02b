"""The sections of a configuration: settings with defaults, and the checks of each section.

The help text of each field is also in docs/configuration.md.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from fractions import Fraction
from pathlib import Path
from typing import Literal

from megatron_hetero.base.contents import is_url
from megatron_hetero.base.errors import UserError
from megatron_hetero.config.fields import Pattern, Section, check_pixels, option, required, shown_name, unused, wrong
from megatron_hetero.layout.grammar import did_you_mean


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """Section `model`: model folders, dtype, trained tensors, and implementation of layers."""

    hf_path: Path = required("Folder of a supported model, in `transformers` format, to start from.")
    hf_path_vision: Path | None = option(
        None,
        "Folder to take the vision encoder from, if it fits; `model.hf_path` may then be a language model.",
    )
    fresh_projector: bool = option(
        False, "Reinitialize the vision projector, as is always done if its width does not match."
    )
    dtype: Literal["float32", "bfloat16"] = option("bfloat16", "Dtype of weights and activations.")
    freeze: tuple[str, ...] = option(
        (),
        "Modules and projectors to freeze (vision, projector, text; NAME and NAME_projector of a further encoder), or "
        "patterns of tensor names, such as `model.layers.*.mlp.*`.",
    )
    train: tuple[str, ...] = option((), "Modules, projectors and patterns that train, and no others. Empty: all.")
    router_aux_loss_coef: float = option(
        0.0,
        "Coefficient of the loss that balances experts, as in transformers for each sample, weighted by supervised "
        "tokens.",
        at_least=0,
    )
    backend: Literal["auto", "torch", "te"] = option(
        "auto",
        "Layers: PyTorch, Transformer Engine, or auto (Transformer Engine if installed, without model.compile "
        "and tp_overlap).",
    )
    attention: Literal["auto", "flash"] = option(
        "auto", "Kernels of attention: auto (the fastest, on Hopper also cuDNN's), or flash (FlashAttention alone)."
    )
    compile: Literal["none", "layers"] = option(
        "none",
        "Compile (torch.compile) what layers compute between matrix products, attention and communication.",
    )

    def _check(self, section: str) -> None:
        for where, entries in ((f"{section}.freeze", self.freeze), (f"{section}.train", self.train)):
            if len(set(entries)) != len(entries):
                raise wrong(where, ", ".join(entries), "each entry once", "", "remove the duplicate")
        if self.compile != "none" and self.backend == "te":
            why, fix = "Transformer Engine has its own kernels", "remove it, or set model.backend to torch"
            raise wrong(f"{section}.compile", self.compile, "none with model.backend te", why, fix)


@dataclass(frozen=True, kw_only=True)
class DatasetConfig(Section):
    """Settings of one data set in `data.registry`."""

    annotations: Path | None = option(None, "Annotation file, JSON or JSONL.")
    files: Pattern | None = option(
        None,
        "Files of records in place of `annotations`, such as `data/*.parquet`, `shard-{0000..0099}.tar`, or an Energon "
        "folder.",
    )
    format: Literal["auto", "json", "parquet", "webdataset", "energon"] = option(
        "auto", "Format of `files`; auto: by suffix."
    )
    fields: Mapping[str, str] = option(
        {},
        "Column, tar field or key (`json.caption`) that is the records' field FIELD, such as image, conversations, "
        "messages, question or answer.",
        "as named",
    )
    split: str = option("train", "Split of an Energon folder.")
    images: Path | None = option(
        None, "Folder of images and videos, the base of their relative paths; none if `files` contain them."
    )
    video_placeholder: Literal["<video>", "<image>"] = option(
        "<video>", "Mark of a video in human turns; `<image>` where a data set uses it for both, as LLaVA-Video does."
    )

    @property
    def folder_of_files(self) -> Path | None:
        """The folder above all wildcards of `files`; None for an object store or without `files`."""
        if self.files is None or is_url(self.files):
            return None
        parts = Path(self.files).parts
        wild = next((k for k, part in enumerate(parts) if any(sign in part for sign in "{*?[")), len(parts))
        return Path(*parts[:wild])

    def _check(self, section: str) -> None:
        if (self.annotations is None) == (self.files is None):
            problem = f"{'neither' if self.files is None else 'both'} of annotations and files given"
            fix = f"set {section}.annotations to a JSON or JSONL file, or {section}.files"
            raise UserError.at(f"{section} (--{section}.annotations)", problem=problem, fix=fix)
        if self.files is None and self.format not in ("auto", "json"):
            why, fix = "annotations are JSON or JSONL", f"give {section}.files instead, or remove it"
            raise unused(f"{section}.format", self.format, why, fix)


_RATE = re.compile(r"\d+(\.\d+)?")
_MAX_PERCENT = 1_000_000


@dataclass(frozen=True)
class SampledDataset:
    """A data set and its sampling rate per epoch, written ``name%percent``."""

    name: str
    """The key of the data set in `data.registry`."""
    rate: Fraction = Fraction(1)
    """Number of passes over the data set per epoch of the mixture."""

    @classmethod
    def parse(cls, text: str) -> SampledDataset:
        """Parse ``name`` or ``name%percent``.

        Raises:
            UserError: the percentage is not a positive number.
        """
        name, mark, percent = text.rpartition("%")
        if not mark:
            return cls(text)
        if not _RATE.fullmatch(percent) or not 0 < Fraction(percent) <= _MAX_PERCENT or not name:
            expected = f"`name` or `name%rate` with a percentage > 0 and ≤ {_MAX_PERCENT}, in digits"
            fix = f"write {name or 'name'}%50 for half of the data set per epoch"
            raise UserError.at("data.datasets", found=repr(text), expected=expected, fix=fix)
        return cls(name, Fraction(percent) / 100)

    def __str__(self) -> str:
        return self.name if self.rate == 1 else f"{self.name}%{float(self.rate * 100):g}"

    def count(self, records: int) -> int:
        """Return the number of samples per epoch from a data set of `records` records, rounded up."""
        return math.ceil(self.rate * records)


def cache_folder(name: str) -> Path | None:
    """Return a subfolder of the user's cache folder; None if the user has none, as in some containers."""
    with contextlib.suppress(RuntimeError):
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron_hetero" / name
    return None


@dataclass(frozen=True, kw_only=True)
class VideoConfig(Section):
    """Section `data.video`: sampling of frames. None stands for the setting of the model's video processor."""

    rules: Literal["transformers", "authors"] = option(
        "transformers", "Rules that choose frames and sizes: of `transformers`, or of the model's authors."
    )
    fps: float | None = option(
        None, "Frames per second to sample; a record's `fps` overrides it.", "the model's", above=0
    )
    min_frames: int | None = option(None, "Minimum frames to sample.", "the model's", at_least=1)
    max_frames: int | None = option(None, "Maximum frames to sample.", "the model's", at_least=2)
    frame_pixels: int | None = option(None, "Maximum area of a frame in pixels.", "the model's", at_least=1)
    total_pixels: int | None = option(
        None, "Maximum area of all sampled frames of a video together, in pixels.", "the model's", at_least=1
    )
    text_after: Literal["max", "transformers"] = option(
        "max",
        "Position of the text after a Qwen2.5-VL video: after its largest position, as in pretraining, or "
        "overlapping, as in transformers 5.3 and later.",
    )
    marks: Literal["video", "pairs"] = option(
        "video", "Marks of a Qwen3-VL video: around it and its pairs (video), or its pairs only (pairs), as in vLLM."
    )
    timeout_s: float = option(120.0, "Timeout in seconds of reading one video; 0 disables.", at_least=0)
    index: Path | None = option(
        None, "Cache folder of videos' frame times, which are read once per file.", "in the user's cache"
    )

    @property
    def index_folder(self) -> Path | None:
        """The folder for cached frame times; None if `index` is not set and the user has no cache folder."""
        return self.index or cache_folder("videos")

    def _check(self, section: str) -> None:
        if self.min_frames is not None and self.max_frames is not None and self.min_frames > self.max_frames:
            expected, fix = f"≤ {section}.max_frames = {self.max_frames}", f"lower it, or raise {section}.max_frames"
            raise wrong(f"{section}.min_frames", self.min_frames, expected, "no video could fit", fix)


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """Section `data`: data sets, and the reading, filtering and distribution of samples."""

    registry: Mapping[str, DatasetConfig] = required("Data sets by name.")
    datasets: tuple[str, ...] = required("Data sets to train on; `name%50` samples half of it per epoch.")
    shuffle: Literal["blocks"] | bool = option(
        True,
        "Reshuffle the samples every epoch; blocks: blocks of consecutive samples, then samples of a few blocks, for "
        "slow disks and parquet.",
    )
    index: Path | None = option(
        None, "Cache folder of data sets' indexes, which are computed once for all ranks.", "in the user's cache"
    )
    scan: bool = option(
        False, "Store the sizes of all images and the frame times of all videos with the index, which checks them too."
    )
    max_seq_length: int = option(4096, "Maximum sample length in tokens, image tokens included.", at_least=1)
    too_long: Literal["error", "skip"] = option(
        "error", "Action on a longer sample: fail or skip; samples are never truncated."
    )
    bad_records: Literal["stop", "skip"] = option(
        "stop", "Action on a malformed record or a damaged image or video: stop, or skip its sample."
    )
    max_bad_share: float = option(
        0.01, "Maximum share of skipped bad samples among those drawn; 10 are always allowed.", at_least=0, at_most=1
    )
    supervised_turns: Literal["all", "last"] = option(
        "all",
        "Answers of a conversation to train on; last suits chat templates that drop the thoughts of earlier ones.",
    )
    min_pixels: int | None = option(
        None, "Minimum image area in pixels; smaller images are upscaled.", "the model's", at_least=1
    )
    max_pixels: int | None = option(
        None, "Maximum image area in pixels; larger images are downscaled.", "the model's", at_least=1
    )
    video: VideoConfig = field(default_factory=VideoConfig)
    balance: Literal["off", "replica"] = option(
        "replica",
        "Assignment of images to encoder replicas: in order (off), or balanced by predicted compute (replica).",
    )
    workers: int = option(
        2,
        "Background workers per rank that load the next step; 0 loads between steps.",
        at_least=0,
    )
    worker_type: Literal["thread", "process"] = option(
        "thread",
        "Workers are threads of the rank, or processes.",
    )

    @property
    def index_folder(self) -> Path | None:
        """The folder for cached indexes; None if `index` is not set and the user has no cache folder."""
        return self.index or cache_folder("records")

    def require_registered(self, where: str, names: Iterable[str]) -> None:
        """Check that the data sets that setting `where` names are registered. Raises `UserError`."""
        for name in names:
            if name not in self.registry:
                found, known = f"`{name}`{did_you_mean(name, self.registry)}", ", ".join(self.registry) or "empty"
                fix = f"correct the name, or add data.registry.{name} with its files"
                raise wrong(where, found, f"a name from data.registry ({known})", "", fix)

    def _check(self, section: str) -> None:
        for name in self.registry:
            if "%" in name or not name:
                why, fix = "`%` separates a name from its rate", "rename the data set"
                raise wrong(f"{section}.registry", f"the name `{name}`", "a name without `%`", why, fix)
        if not self.datasets:
            why, fix = "there is nothing to train on", "add one"
            raise wrong(f"{section}.datasets", "an empty list", "at least one name", why, fix)
        self.require_registered(f"{section}.datasets", (SampledDataset.parse(text).name for text in self.datasets))
        check_pixels(section, self.min_pixels, self.max_pixels)
        if self.bad_records == "stop" and self.max_bad_share != DataConfig.max_bad_share:
            why, fix = "the first bad record stops the run", f"set {section}.bad_records to skip, or remove it"
            raise unused(f"{section}.max_bad_share", self.max_bad_share, why, fix)
        if self.worker_type != "thread" and not self.workers:
            why, fix = "data.workers is 0, which loads in the training thread", "set data.workers, or remove it"
            raise unused(f"{section}.worker_type", self.worker_type, why, fix)


@dataclass(frozen=True, kw_only=True)
class BoundaryConfig(Section):
    """Section `boundary`: the exchange of rows between modules."""

    transport: Literal["exact", "bfloat16"] = option(
        "exact", "Dtype of rows and gradients between modules: unchanged (exact), or rounded to bfloat16."
    )


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Section):
    """Section `schedule`: the schedules of encoders and pipelines, and timeouts."""

    kind: Literal["auto", "waves", "recompute", "ahead"] = option(
        "auto",
        "Encoder schedule: waves or recompute (repeat each forward pass before its backward pass) on ranks "
        "shared with the text module, ahead on separate ranks.",
    )
    waves: Literal["auto"] | int | None = option(
        None,
        "Micro-batches per wave of an encoder on shared ranks; auto: without text stages, up to four if the planned "
        "memory fits into plan.memory_gb.",
        "1; near 3*pp with text stages",
        at_least=1,
    )
    run_ahead: int | None = option(
        None,
        "Micro-batches that an encoder on separate ranks may run ahead of the text module.",
        "1",
        at_least=0,
    )
    virtual_stages: int = option(
        1, "Virtual pipeline stages per pp rank of the text module (interleaved 1F1B).", at_least=1
    )
    timeout_s: float = option(
        1800.0,
        "Timeout in seconds of an action, and of a start, save or export without progress; 0 disables.",
        at_least=0,
    )

    def _check(self, section: str) -> None:
        if 0 < self.timeout_s < 1:
            why, fix = "actions may take that long", "raise it, or set 0 to disable the watchdog"
            raise wrong(f"{section}.timeout_s", self.timeout_s, "0 or ≥ 1", why, fix)


@dataclass(frozen=True, kw_only=True)
class ProfileConfig(Section):
    """Section `train.profile`: the steps to profile."""

    start: int = option(0, "First step to profile, one trace per rank in log.dir; 0 disables.", at_least=0)
    steps: int = option(1, "Number of steps to profile.", at_least=1)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Section):
    """Section `train`: the number of steps, batch sizes, and profiling."""

    iters: int = option(100, "Number of training steps.", at_least=1)
    global_batch_size: int = option(8, "Samples per step, over all data-parallel replicas.", at_least=1)
    micro_batch_size: int = option(1, "Samples packed into one sequence, per text replica and micro-batch.", at_least=1)
    tokens_per_micro_batch: int | None = option(
        None,
        "Maximum tokens packed into one sequence, in place of micro_batch_size; micro-batches are balanced.",
        "micro_batch_size samples",
        at_least=1,
    )
    patches_per_micro_batch: int | None = option(
        None,
        "Maximum patches per encoder and sequence, with train.tokens_per_micro_batch.",
        "unlimited",
        at_least=1,
    )
    seed: int = option(0, "Random seed.", at_least=0)
    profile: ProfileConfig = field(default_factory=ProfileConfig)

    def _check(self, section: str) -> None:
        self._check_batch(section)
        self._check_profile(f"{section}.profile")

    def _check_batch(self, section: str) -> None:
        batch, micro, tokens = self.global_batch_size, self.micro_batch_size, self.tokens_per_micro_batch
        if batch % micro:
            best = max(n for n in range(1, min(micro, batch) + 1) if batch % n == 0)
            expected = f"a divisor of train.global_batch_size = {batch}"
            why, fix = "a step is a whole number of micro-batches", f"try `--train.micro_batch_size {best}`"
            raise wrong(f"{section}.micro_batch_size", micro, expected, why, fix)
        if tokens is None and self.patches_per_micro_batch is not None:
            why, fix = "train.tokens_per_micro_batch is not set", "set it too, or remove this"
            raise unused(f"{section}.patches_per_micro_batch", self.patches_per_micro_batch, why, fix)
        if tokens is not None and micro != 1:
            why, fix = "train.tokens_per_micro_batch bounds a micro-batch", "remove one of them"
            raise unused(f"{section}.micro_batch_size", micro, why, fix)

    def _check_profile(self, section: str) -> None:
        start, steps, iters = self.profile.start, self.profile.steps, self.iters
        if not start and steps != 1:
            why, fix = "train.profile.start is 0, which disables profiling", "set train.profile.start, or remove it"
            raise unused(f"{section}.steps", steps, why, fix)
        if start and start + steps - 1 > iters:
            found, expected = f"{start} with {steps} steps", f"an end at step {iters} = train.iters or earlier"
            why, fix = "the trace is written after its last step", "lower one of them, or raise train.iters"
            raise wrong(f"{section}.start", found, expected, why, fix)


@dataclass(frozen=True, kw_only=True)
class LogConfig(Section):
    """Section `log`: where metrics are written."""

    dir: Path = option(
        Path("runs"),
        "Folder for metrics and the resolved configuration; files of an earlier run move to a subfolder.",
    )
    tensorboard: bool = option(False, "Also write metrics for TensorBoard.")
    wandb: str | None = option(None, "Weights & Biases project to log metrics to as well.")

    def __post_init__(self) -> None:
        # The default is relative to the current directory, as paths in flags are.
        object.__setattr__(self, "dir", self.dir.absolute())


Overridable = Literal[
    "data.datasets", "data.shuffle", "data.max_seq_length", "data.too_long", "data.bad_records",
    "data.supervised_turns", "data.min_pixels", "data.max_pixels", "data.video.rules", "data.video.fps",
    "data.video.min_frames", "data.video.max_frames", "data.video.frame_pixels", "data.video.total_pixels",
    "data.video.text_after", "data.video.marks", "train.seed", "train.global_batch_size",
    "train.patches_per_micro_batch", "model.router_aux_loss_coef", "modules", "model.hf_path",
]  # fmt: skip
"""Settings that change what is trained, and may differ from a checkpoint's with `checkpoint.allow_changes`."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section):
    """Section `checkpoint`: saving of checkpoints, and the checkpoint to resume from."""

    dir: Path | None = option(None, "Checkpoint folder; none writes no checkpoints.")
    interval: int = option(1000, "Steps between checkpoints; the last step is always saved.", at_least=1)
    async_: bool = option(False, "Save in the background, from a copy in host memory.")
    keep_last: int | None = option(
        None, "Number of newest checkpoints to keep; older ones are deleted.", "all", at_least=1
    )
    resume: Literal["auto", "never"] | Path = option(
        "auto", "Resume from the newest checkpoint in dir (auto), from the checkpoint at a path, or never."
    )
    allow_changes: tuple[Overridable, ...] = option(
        (),
        "Settings that may differ from the checkpoint's; model.hf_path allows changed configuration, "
        "tokenizer and processor files; modules, other further encoders, or scales and dropout of adapters.",
    )

    def _check(self, section: str) -> None:
        if self.dir is not None:
            return
        # A run may resume from a checkpoint without a folder for new checkpoints.
        reads = self.resume not in ("auto", "never")
        for f in fields(self):
            value = getattr(self, f.name)
            if value != f.default and not (reads and f.name in ("resume", "allow_changes")):
                found = ", ".join(value) if isinstance(value, tuple) else str(value).lower()
                why = f"nothing is {'written' if reads else 'written or read'} without checkpoint.dir"
                raise unused(f"{section}.{shown_name(f)}", found, why, "set checkpoint.dir, or remove it")


@dataclass(frozen=True, kw_only=True)
class ExportConfig(Section):
    """Section `export`: the folder for the trained model."""

    hf_dir: Path | None = option(
        None,
        "Export the trained model to this folder in `transformers` format, with adapters in PEFT's; only an earlier "
        "export is overwritten.",
    )
    merge: bool = option(False, "Export a whole model with its adapters merged, in place of a PEFT folder.")

    def _check(self, section: str) -> None:
        if self.merge and self.hf_dir is None:
            why, fix = f"{section}.hf_dir is not set, so that nothing is exported", f"set {section}.hf_dir"
            raise unused(f"{section}.merge", self.merge, why, fix)


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Section):
    """Section `eval`: evaluation during training."""

    datasets: tuple[str, ...] = option((), "Held-out data sets, evaluated during training.")
    interval: int = option(
        0,
        "Steps between evaluations of loss and exact match; the last step is always evaluated. 0 disables.",
        at_least=0,
    )


GpuName = Literal[
    "a10", "a100", "a100-40", "a100-80", "b200", "b300", "gb200", "h100", "h200", "l4", "l40s", "rtx-4090"
]
# As reported by `torch.cuda.mem_get_info`: less than on NVIDIA's data sheets, since the driver and error correction use
# some. Figures differ by 0.3 % between drivers; these are the smallest that PyTorch printed in issue reports ("GPU
# 0 has a total capacity of ...").
USABLE_GIB: Mapping[GpuName, float] = {
    "a10": 22.03,  # A10G; 22.03 to 22.09 reported
    "a100": 79.14,  # 80 GB; 79.14 to 79.25
    "a100-40": 39.38,  # 39.38 to 39.56
    "a100-80": 79.14,
    "b200": 178.35,  # 178.35 and 178.36
    "b300": 267.69,
    "gb200": 184.31,
    "h100": 79.10,  # SXM; 79.10 to 79.18 (vllm-project/vllm#27508: 79.11)
    "h200": 139.72,  # 139.72 to 139.81
    "l4": 22.03,
    "l40s": 44.34,  # 44.34 to 44.42 (QwenLM/Qwen3-VL#2097: 44.40)
    "rtx-4090": 23.63,  # 23.63 to 23.68 (zai-org/CogVideo#36: 23.68, 3DTopia/Phidias-Diffusion#8: 23.64)
}
"""GiB of memory that a process can use on each GPU that `plan.memory_gb` can name."""


@dataclass(frozen=True, kw_only=True)
class EstimateConfig(Section):
    """Section `plan`: the data and the GPU that `--plan` assumes."""

    images: int = option(1, "Assumed images per sample and encoder.", at_least=0, at_most=1 << 16)
    image_side: int = option(896, "Assumed image width and height in pixels, as encoded.", at_least=1)
    videos: int = option(0, "Assumed videos per sample.", at_least=0, at_most=1 << 16)
    frames: int = option(64, "Assumed sampled frames per video.", at_least=1, at_most=1 << 16)
    frame_side: int = option(448, "Assumed frame width and height in pixels, as encoded.", at_least=1)
    tokens: int = option(512, "Assumed tokens per sample, image tokens excluded.", at_least=1, at_most=1 << 23)
    supervised: float = option(0.5, "Assumed share of these tokens that is supervised.", above=0, at_most=1)
    expert_imbalance: float = option(
        1.5,
        "Assumed tokens of the rank whose experts get most, relative to the mean of its `ep` ranks; no token is "
        "dropped. The default is a guess, with a margin, for routers that were trained to balance.",
        at_least=1,
    )
    memory_gb: GpuName | float | None = option(
        None,
        "Memory of a GPU: its name, or GB (10^9 bytes). Ranks that need more are reported, with settings that fit.",
        "unknown",
        above=0,
    )

    @property
    def memory_bytes(self) -> int | None:
        """The memory of the assumed GPU in bytes; None if unknown."""
        if isinstance(self.memory_gb, str):
            return round(USABLE_GIB[self.memory_gb] * 2**30)
        return None if self.memory_gb is None else round(self.memory_gb * 1e9)
