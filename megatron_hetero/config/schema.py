"""GPUs by name, for `plan.memory_gb`.

The optimizers: what each keeps of a parameter, and which settings mean something to it. Pure.

The configuration of a run: all settings with their defaults. `checks` validates the values.

Flags override the YAML file, which overrides the defaults. The sentence at each field is its help text and its row in
docs/configuration.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Literal

from megatron_hetero.base.errors import TEXT, VISION, UserError, parts_of
from megatron_hetero.config.checks import check
from megatron_hetero.config.flags import CommandLine, PlanRequest, print_help, read_flags, without_plan
from megatron_hetero.config.load import build, merge, option, read_yaml, required, shown_name, yaml_of
from megatron_hetero.layout.grammar import did_you_mean

GpuName = Literal[
    "a10", "a100", "a100-40", "a100-80", "b200", "b300", "gb200", "h100", "h200", "l4", "l40s", "rtx-4090"
]
"""The GPUs that `plan.memory_gb` names."""

# As `torch.cuda.mem_get_info` sees them: less than on the data sheet, since the driver and error correction keep some
# (NVIDIA's data sheets say 24, 40, 48, 80, 141, 180, 186 and 288 GB). It differs by 0.3 % between drivers; this is the
# least of what PyTorch printed in reports ("GPU 0 has a total capacity of ...").
USABLE_GIB: Mapping[GpuName, float] = {
    "a10": 22.03,  # A10G; 22.03 to 22.09 reported
    "a100": 79.14,  # the one of 80 GB; 79.14 to 79.25
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
"""Memory that a process can use, in GiB."""


def usable_bytes(memory: float | GpuName) -> int:
    """Of a GPU by its name, or of a number of GB (10^9 bytes)."""
    return round(USABLE_GIB[memory] * 2**30) if isinstance(memory, str) else round(memory * 1e9)


Overridable = Literal["data.datasets", "data.shuffle", "train.seed", "train.global_batch_size", "model.hf_path"]
"""Settings that `checkpoint.allow_changes` lets differ from the checkpoint's."""


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """One entry of `model.encoders`: an encoder in addition to that of `model.hf_path`."""

    hf_path: Path = required("Vision-language model folder whose encoder becomes the additional encoder NAME.")
    token: str = required("Placeholder token of its rows, such as `<|video_pad|>`.")
    min_pixels: int | None = option(None, "Minimum image area in pixels; smaller images are upscaled.", "its folder's")
    max_pixels: int | None = option(None, "Maximum image area in pixels; larger images are downscaled.", "its folder's")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Section `model`."""

    hf_path: Path = required("Qwen2.5-VL or Qwen3-VL folder in `transformers` format to start training from.")
    hf_path_vision: Path | None = option(
        None,
        "Folder of the same family to take the vision encoder from; `model.hf_path` may then be a language model.",
    )
    fresh_projector: bool = option(
        False, "Reinitialize the vision projector, as is always done if its width does not match."
    )
    dtype: Literal["float32", "bfloat16"] = option("bfloat16", "Dtype of weights and activations.")
    encoders: Mapping[str, EncoderConfig] = option(
        {}, "Additional encoders by name; `<NAME>` in a human turn stands for an image from the record's field NAME."
    )
    freeze: tuple[str, ...] = option(
        (),
        "Parts to freeze (vision, projector, text; NAME and NAME_projector of an additional encoder), or patterns of "
        "tensor names, such as `model.layers.*.mlp.*`.",
    )
    train: tuple[str, ...] = option((), "Parts and patterns that train, all others being frozen. Empty: all.")
    recompute: Mapping[str, Literal["none", "selective", "full"] | int] = option(
        {},
        "Activation recomputation: selective (no matrix product), full (all layers), or the number of layers to "
        "recompute at the start of each pipeline stage.",
        "none",
    )
    chunk: Mapping[str, int] = option(
        {},
        "Tokens of a rank per MLP call; the backward pass recomputes the first matrix product. 0: all at once.",
        "0",
    )
    tp_overlap: Mapping[str, int] = option(
        {},
        "Parts in which layers exchange activations over tp, overlapped with matrix products. 1: no overlap.",
        "1",
    )
    sequence_parallel: Mapping[str, bool] = option(
        {}, "Megatron sequence parallelism: split activations along the sequence over tp.", "true"
    )
    backend: Literal["auto", "torch", "te"] = option(
        "auto",
        "Layers: PyTorch, Transformer Engine, or auto (Transformer Engine if installed, without model.compile and "
        "model.tp_overlap).",
    )
    compile: Literal["none", "layers"] = option(
        "none",
        "Compile (torch.compile) what layers compute between matrix products, attention and communication.",
    )

    @property
    def layer_backend(self) -> str:
        """`backend`, where it chooses among what is installed only if that goes with `compile` and `tp_overlap`."""
        ours = self.compile != "none" or any(parts > 1 for parts in self.tp_overlap.values())
        return "torch" if self.backend == "auto" and ours else self.backend

    @property
    def encoder_names(self) -> tuple[str, ...]:
        """All encoders; that of `hf_path` comes first."""
        return (VISION, *self.encoders)

    @property
    def encoder_folders(self) -> dict[str, Path]:
        """The folders of additional encoders, by name."""
        return {name: encoder.hf_path for name, encoder in self.encoders.items()}

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that can be frozen."""
        return tuple(part for module in (*self.encoder_names, TEXT) for part in parts_of(module))

    def is_frozen(self, module: str) -> bool:
        """Whether nothing of a module trains."""
        return set(self.freeze).issuperset(parts_of(module))


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Section `precision.MODULE`: numbers of the optimizer and of gradients, with bfloat16 weights."""

    master: Literal["float32", "split", "none"] = option(
        "float32",
        "Master weights: float32, split (equal results, 2 bytes less), or none (bfloat16 weights with stochastic "
        "rounding).",
    )
    moments: Literal["float32", "bfloat16", "8bit"] = option(
        "float32", "Moments: float32, bfloat16 with stochastic rounding, or 8 bits with a scale per 256 elements."
    )
    gradients: Literal["float32", "bfloat16"] = option("float32", "Dtype of accumulated and reduced gradients.")


FP32 = PrecisionConfig()
"""Everything in fp32: the default."""


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Section `offload.MODULE`: what a module keeps in host memory."""

    states: bool = option(False, "Keep master weights and moments in host memory; updates stream them.")
    activations: bool = option(
        False,
        "Keep activations in host memory between forward and backward pass; copies overlap with neighboring layers.",
    )


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """One data set in `data.registry`."""

    annotations: Path = required("Annotation file in LLaVA format, JSON or JSONL.")
    images: Path | None = option(None, "Image folder, the base of relative image paths; none for text-only data.")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Section `data`."""

    registry: Mapping[str, DatasetConfig] = required("Data sets by name.")
    datasets: tuple[str, ...] = required("Data sets to train on; `name%50` samples half of it per epoch.")
    shuffle: bool = option(True, "Reshuffle the samples every epoch.")
    max_seq_length: int = option(4096, "Maximum sample length in tokens, image tokens included.")
    too_long: Literal["error", "skip"] = option(
        "error", "Action on a longer sample: fail or skip; samples are never truncated."
    )
    min_pixels: int | None = option(None, "Minimum image area in pixels; smaller images are upscaled.", "the model's")
    max_pixels: int | None = option(None, "Maximum image area in pixels; larger images are downscaled.", "the model's")
    balance: Literal["off", "replica"] = option(
        "replica",
        "Assignment of images to encoder replicas: in order (off), or balanced by predicted compute (replica).",
    )
    workers: int = option(2, "Background workers per rank that load the next step; 0 loads between steps.")
    worker_type: Literal["thread", "process"] = option(
        "thread",
        "Workers are threads of the rank, or processes.",
    )


@dataclass(frozen=True, kw_only=True)
class BoundaryConfig:
    """Section `boundary`."""

    transport: Literal["exact", "bfloat16"] = option(
        "exact", "Dtype of rows and gradients between modules: unchanged (exact), or rounded to bfloat16."
    )


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Section `schedule`."""

    kind: Literal["auto", "waves", "recompute", "ahead"] = option(
        "auto",
        "Encoder schedule: waves or recompute (repeat each forward pass before its backward pass) on ranks shared with "
        "the text module, ahead on separate ranks.",
    )
    waves: int | None = option(
        None, "Micro-batches per wave of an encoder on shared ranks.", "1; near 3*pp with text stages"
    )
    run_ahead: int | None = option(
        None, "Micro-batches that an encoder on separate ranks may run ahead of the text module.", "1"
    )
    virtual_stages: int = option(1, "Virtual pipeline stages per pp rank of the text module (interleaved 1F1B).")
    timeout_s: float = option(
        1800.0,
        "Timeout in seconds of an action, and of a start, save or export without progress; 0 disables.",
    )


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Section `train.profile`."""

    start: int = option(0, "First step to profile, one trace per rank in log.dir; 0 disables.")
    steps: int = option(1, "Number of steps to profile.")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Section `train`."""

    iters: int = option(100, "Number of training steps.")
    global_batch_size: int = option(8, "Samples per step, over all data-parallel replicas.")
    micro_batch_size: int = option(1, "Samples packed into one sequence, per text replica and micro-batch.")
    tokens_per_micro_batch: int | None = option(
        None,
        "Maximum tokens packed into one sequence, in place of micro_batch_size; micro-batches are balanced.",
        "micro_batch_size samples",
    )
    patches_per_micro_batch: int | None = option(
        None, "Maximum patches per encoder and sequence, with train.tokens_per_micro_batch.", "unlimited"
    )
    seed: int = option(0, "Random seed.")
    profile: ProfileConfig = field(default_factory=ProfileConfig)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Section `optimizer`."""

    name: Literal["adamw", "sgd"] = option("adamw", "AdamW, or plain SGD without momentum and weight decay.")
    lr: float = option(1e-5, "Peak learning rate.")
    min_lr: float = option(0.0, "Final learning rate of the linear and cosine schedules.")
    lr_vision: float | None = option(None, "Peak learning rate of the encoders; min_lr scales with it.", "lr")
    lr_projector: float | None = option(None, "Peak learning rate of the projectors; min_lr scales with it.", "lr")
    betas: tuple[float, float] = option((0.9, 0.999), "AdamW betas.")
    eps: float = option(1e-8, "AdamW epsilon.")
    weight_decay: float = option(0.0, "AdamW weight decay; biases and 1-D parameters are exempt.")
    clip_grad: float = option(1.0, "Maximum global gradient norm; 0 disables clipping.")
    schedule: Literal["constant", "linear", "cosine"] = option("cosine", "Learning-rate schedule after warm-up.")
    warmup_iters: int = option(0, "Warm-up steps.")


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Section `log`."""

    dir: Path = option(
        Path("runs"),
        "Folder for metrics and the resolved configuration; files of an earlier run move to a subfolder.",
    )
    tensorboard: bool = option(False, "Also write metrics for TensorBoard.")
    wandb: str | None = option(None, "Weights & Biases project to log metrics to as well.")

    def __post_init__(self) -> None:
        # The default is relative to the current directory, as paths in flags are.
        object.__setattr__(self, "dir", self.dir.absolute())


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Section `checkpoint`."""

    dir: Path | None = option(None, "Checkpoint folder; none writes no checkpoints.")
    interval: int = option(1000, "Steps between checkpoints; the last step is always saved.")
    async_: bool = option(False, "Save in the background, from a copy in host memory.")
    keep_last: int | None = option(None, "Number of newest checkpoints to keep; older ones are deleted.", "all")
    on_failure: Literal["stop", "continue"] = option(
        "stop", "Action if a checkpoint cannot be written: stop, or warn and continue."
    )
    resume: Literal["auto", "never"] | Path = option(
        "auto", "Resume from the newest checkpoint in dir (auto), from the checkpoint at a path, or never."
    )
    allow_changes: tuple[Overridable, ...] = option(
        (),
        "Settings that may differ from the checkpoint's; model.hf_path allows changed configuration, tokenizer and "
        "processor files.",
    )


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Section `export`."""

    hf_dir: Path | None = option(
        None,
        "Export the trained model to this folder in `transformers` format; only an earlier export is overwritten.",
    )


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Section `eval`."""

    datasets: tuple[str, ...] = option(
        (), "Held-out data sets, evaluated during training and answered by the exported model."
    )
    interval: int = option(
        0, "Steps between evaluations of loss and exact match; the last step is always evaluated. 0 disables."
    )
    limit: int | None = option(None, "Maximum samples per data set that the exported model answers.", "all")
    max_new_tokens: int = option(16, "Maximum tokens per answer of the exported model.")


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Section `plan`: the data and the GPU that `--plan` assumes."""

    images: int = option(1, "Assumed images per sample and encoder.")
    image_side: int = option(896, "Assumed image width and height in pixels, as encoded.")
    tokens: int = option(512, "Assumed tokens per sample, image tokens excluded.")
    supervised: float = option(0.5, "Assumed share of these tokens that is supervised.")
    memory_gb: GpuName | float | None = option(
        None,
        "Memory of a GPU: its name, or GB (10^9 bytes). Ranks that need more are reported, with settings that fit.",
        "unknown",
    )

    @property
    def memory_bytes(self) -> int | None:
        """What `memory_gb` comes to, where it is known."""
        return None if self.memory_gb is None else usable_bytes(self.memory_gb)


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings, validated on construction.

    Raises:
        UserError: a value is invalid, alone or combined with others.
    """

    model: ModelConfig
    parallel: Mapping[str, str] = option(
        {}, "Layout of a module, such as `sp:8` or `tp:4,dp:2@0-7`.", "dp over all ranks"
    )
    parallel_layers: Mapping[str, tuple[int, ...]] = option(
        {}, "Layers per pipeline stage of a module, in order, such as `10 18`.", "even"
    )
    data: DataConfig
    boundary: BoundaryConfig = field(default_factory=BoundaryConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: Mapping[str, PrecisionConfig] = option({}, "Optimizer states and gradients of a module.")
    offload: Mapping[str, OffloadConfig] = option({}, "What a module keeps in host memory.")
    zero: Mapping[str, Literal[1, 2, 3]] = option(
        {},
        "ZeRO stage of a module: what its dp, sp and cp ranks shard. 1: AdamW's states; 2: also gradients; 3: also "
        "weights, gathered layer by layer (FSDP2).",
        "1",
    )
    log: LogConfig = field(default_factory=LogConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)

    def precision_of(self, module: str) -> PrecisionConfig:
        """The numbers of a module's optimizer and gradients."""
        return self.precision.get(module, FP32)

    def offload_of(self, module: str) -> OffloadConfig:
        """What a module keeps in host memory."""
        return self.offload.get(module, OffloadConfig())

    def zero_of(self, module: str) -> int:
        """The ZeRO stage of a module."""
        return self.zero.get(module, 1)

    @property
    def answers(self) -> bool:
        """Whether the exported model answers the questions of `eval.datasets` after training. Plain `transformers`
        supports this with one encoder only.
        """
        return bool(self.eval.datasets) and self.export.hf_dir is not None and not self.model.encoders

    def __post_init__(self) -> None:
        check(self)


def load_command(argv: Sequence[str]) -> tuple[Config, PlanRequest | None]:
    """The configuration of a command line (without the program's name), and the plan request if there is one;
    ``--help`` prints and exits.

    Raises:
        UserError: a file, name or value is invalid; the message names it and the fix.
    """
    line = _read_command(argv)
    if line.plan is None and "plan" in line.settings:  # In a file the section may wait for a later plan.
        raise without_plan(f"--plan.{next(iter(line.settings['plan']))}")
    return _config_of(line), line.plan


def load_config(argv: Sequence[str]) -> Config:
    """The configuration of a command line without ``--plan``.

    Raises:
        UserError: as `load_command`, or the command line asks for a plan.
    """
    line = _read_command(argv)
    if line.plan is not None:
        raise UserError.at("--plan", problem="not supported by this program", fix="use pretrain_vlm.py")
    return _config_of(line)


def _read_command(argv: Sequence[str]) -> CommandLine:
    line = read_flags(argv, Config)
    if line.help:
        print_help(Config)
        raise SystemExit(0)
    return line


def _config_of(line: CommandLine) -> Config:
    settings = read_yaml(line.config, Config) if line.config else {}
    return build(Config, merge(settings, line.settings))


def to_yaml(config: Config) -> str:
    """The whole configuration as YAML that `load_config` reads back to an equal value."""
    return yaml_of(_plain(config))


def flat_settings(config: Config) -> dict[str, str]:
    """Every setting as text, by its dotted name: `optimizer.lr`."""
    return dict(_flat(_plain(config), ""))


def _flat(value: object, name: str) -> Iterator[tuple[str, str]]:
    if not isinstance(value, dict):
        yield name, "none" if value is None else str(value)
        return
    for part, below in value.items():
        yield from _flat(below, f"{name}.{part}" if name else part)


def require_modules(config: Config, modules: Iterable[str]) -> None:
    """Check that per-module settings name modules of the model.

    Raises:
        UserError: a setting names an unknown module.
    """
    known = list(modules)
    by_module = {
        "parallel": config.parallel,
        "parallel_layers": config.parallel_layers,
        "model.recompute": config.model.recompute,
        "model.chunk": config.model.chunk,
        "model.tp_overlap": config.model.tp_overlap,
        "model.sequence_parallel": config.model.sequence_parallel,
        "precision": config.precision,
        "offload": config.offload,
        "zero": config.zero,
    }
    for where, names in by_module.items():
        for name in names:
            if name not in known:
                raise UserError.at(
                    f"{where}.{name}",
                    found=f"module `{name}`{did_you_mean(name, known)}",
                    expected=f"one of {', '.join(known)}",
                    because="the model has no other modules",
                    fix="rename or remove it",
                )


def _plain(value: object) -> object:
    """Values as YAML types: lists for tuples, text for paths."""
    if is_dataclass(value):
        return {shown_name(f): _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
