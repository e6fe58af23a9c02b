"""The configuration of a run: what can be set, and the defaults. Its values are checked in `config_checks`.

Values come from the defaults, over which a YAML file wins, over which flags win. The sentence at each
field is its help text and its row in the README.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_hetero.config.checks import check
from megatron_hetero.config.flags import (
    CommandLine,
    PlanRequest,
    markdown_table,
    print_help,
    read_flags,
    without_plan,
)
from megatron_hetero.config.load import build, merge, option, read_yaml, required, shown_name, yaml_of
from megatron_hetero.errors import UserError
from megatron_hetero.layout.grammar import did_you_mean
from megatron_hetero.names import TEXT, VISION, parts_of

Overridable = Literal["data.datasets", "data.shuffle", "train.seed", "train.global_batch_size", "model.hf_path"]
"""What may differ from a checkpoint's configuration where `checkpoint.allow_changes` names it."""


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """One further encoder in `model.encoders`, beside that of `model.hf_path`."""

    hf_path: Path = required("Folder of a Qwen2.5-VL model whose vision encoder becomes a further encoder NAME.")
    token: str = required("Token that stands for one of its rows, such as `<|video_pad|>`.")
    min_pixels: int | None = option(None, "Fewest pixels of one of its images.", "its folder's")
    max_pixels: int | None = option(None, "Most pixels of one of its images.", "its folder's")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Section `model`."""

    hf_path: Path = required("Folder of a Qwen2.5-VL model in `transformers` format; training starts from its weights.")
    hf_path_vision: Path | None = option(
        None,
        "Folder of a Qwen2.5-VL model whose vision encoder takes the place of that of `model.hf_path`, which may then "
        "be a Qwen2 or Qwen2.5 language model alone.",
    )
    fresh_projector: bool = option(
        False, "Whether the projector of the vision encoder starts anew; one that does not fit always does."
    )
    dtype: Literal["float32", "bfloat16"] = option(
        "bfloat16", "Type of weights and activations; with bfloat16, gradients and master weights are float32."
    )
    encoders: Mapping[str, EncoderConfig] = option(
        {}, "Further encoders by name; `<NAME>` in a human turn shows one an image of the field NAME of the record."
    )
    freeze: tuple[str, ...] = option(
        (), "Parts whose weights do not change: vision, projector, text; of a further encoder NAME, NAME_projector."
    )
    recompute: Mapping[str, Literal["none", "full"]] = option(
        {}, "Activations of a module that are computed again in the backward pass instead of kept.", "none"
    )
    sequence_parallel: Mapping[str, bool] = option(
        {}, "Whether a module splits its activations along the sequence over its tp ranks.", "true"
    )
    backend: Literal["auto", "torch", "te"] = option(
        "auto", "Where layers come from: plain PyTorch, Transformer Engine, or the latter where it is installed."
    )

    @property
    def encoder_names(self) -> tuple[str, ...]:
        """All encoders, that of `hf_path` first."""
        return (VISION, *self.encoders)

    @property
    def parts(self) -> tuple[str, ...]:
        """What can be frozen."""
        return tuple(part for module in (*self.encoder_names, TEXT) for part in parts_of(module))


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """One data set in `data.registry`."""

    annotations: Path = required("File with the data set's samples in LLaVA's format, JSON or JSONL.")
    images: Path | None = option(None, "Folder that the data set's image names are relative to; none for text alone.")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Section `data`."""

    registry: Mapping[str, DatasetConfig] = required("Data sets by name.")
    datasets: tuple[str, ...] = required("Data sets to train on; `name%50` takes half of its samples in an epoch.")
    shuffle: bool = option(True, "Whether every epoch goes through the samples in a new random order.")
    max_seq_length: int = option(4096, "Longest sample, in tokens, image tokens included.")
    too_long: Literal["error", "skip"] = option("error", "What happens to a sample that is longer; none is ever cut.")
    min_pixels: int | None = option(None, "Fewest pixels of an image; smaller ones are enlarged.", "the model's")
    max_pixels: int | None = option(None, "Most pixels of an image; larger ones are reduced.", "the model's")
    balance: Literal["off", "replica"] = option(
        "replica", "How images are dealt to the encoder's replicas: in order, or so that predicted work is even."
    )
    workers: int = option(
        2, "Threads per rank that tokenise and decode the next step in the background; 0 does it between the steps."
    )


@dataclass(frozen=True, kw_only=True)
class BoundaryConfig:
    """Section `boundary`."""

    transport: Literal["exact", "bfloat16"] = option(
        "exact", "What rows and their gradients are sent as between modules: as they are, or rounded to bfloat16."
    )


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Section `schedule`."""

    kind: Literal["auto", "waves", "recompute", "ahead"] = option(
        "auto",
        "How an encoder takes turns with the text module: on shared ranks in waves, or with recompute (it keeps only "
        "the rows and runs again before its backward pass); on ranks of its own ahead.",
    )
    waves: int | None = option(
        None, "Micro-batches that an encoder on shared ranks encodes at a time.", "1, near 3 pp with text stages"
    )
    run_ahead: int | None = option(
        None, "Micro-batches that an encoder on its own ranks may be ahead of the text module.", "1"
    )
    virtual_stages: int = option(1, "Stages of the text module on each of its pp ranks; several are interleaved.")
    timeout_s: float = option(
        1800.0,
        "Seconds after which a rank gives up what it does with others, and says what: an action of a step or "
        "evaluation, or a start, save or export in which no rank is at work by itself; 0 is never.",
    )


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Section `train.profile`."""

    start: int = option(0, "First step that is traced, into a file per rank in log.dir; 0 traces none.")
    steps: int = option(1, "Number of steps that are traced.")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Section `train`."""

    iters: int = option(100, "Number of training steps.")
    global_batch_size: int = option(8, "Samples per step, over all replicas.")
    micro_batch_size: int = option(1, "Samples that one replica of the text module packs into one sequence.")
    seed: int = option(0, "Seed of everything random.")
    profile: ProfileConfig = field(default_factory=ProfileConfig)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Section `optimizer`."""

    name: Literal["adamw", "sgd"] = option("adamw", "AdamW, or plain SGD without momentum or decay.")
    lr: float = option(1e-5, "Highest learning rate.")
    min_lr: float = option(0.0, "Learning rate of the last step under the linear and cosine schedules.")
    lr_vision: float | None = option(None, "Highest learning rate of the encoders, min_lr scaled alike.", "lr")
    lr_projector: float | None = option(None, "Highest learning rate of the projectors, min_lr scaled alike.", "lr")
    betas: tuple[float, float] = option((0.9, 0.999), "Decay rates of AdamW's two moments.")
    eps: float = option(1e-8, "Added to the denominator of AdamW.")
    weight_decay: float = option(0.0, "Decay of AdamW; biases and one-dimensional parameters are exempt.")
    clip_grad: float = option(1.0, "Largest norm of all gradients together; larger ones are scaled down. 0 is off.")
    schedule: Literal["constant", "linear", "cosine"] = option("cosine", "How the learning rate goes on after warm-up.")
    warmup_iters: int = option(0, "Steps in which the learning rate rises to its highest value.")


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Section `log`."""

    dir: Path = option(
        Path("runs"),
        "Folder for metrics.jsonl, the resolved configuration and TensorBoard's files; those of an earlier run are set "
        "aside in it.",
    )
    tensorboard: bool = option(False, "Whether metrics are written for TensorBoard too.")

    def __post_init__(self) -> None:
        # The default starts from the current directory, as paths in flags do.
        object.__setattr__(self, "dir", self.dir.absolute())


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Section `checkpoint`."""

    dir: Path | None = option(None, "Folder that checkpoints are written to, if any.")
    interval: int = option(1000, "Steps between checkpoints; one is written after the last step too.")
    async_: bool = option(
        False, "Whether training goes on while a checkpoint is written, from a copy in the host's memory."
    )
    keep_last: int | None = option(None, "Newest checkpoints that are kept; older ones are removed.", "all")
    on_failure: Literal["stop", "continue"] = option(
        "stop", "What happens where a checkpoint cannot be written: training stops, or says so and goes on."
    )
    resume: Literal["auto", "never"] | Path = option(
        "auto", "What training goes on from: `auto`, the newest checkpoint in dir if any; `never`; or one's path."
    )
    allow_changes: tuple[Overridable, ...] = option(
        (),
        "Settings that may differ from the checkpoint's, though the data goes on elsewhere with them: data.datasets, "
        "data.shuffle, train.seed, train.global_batch_size; model.hf_path allows other configuration, tokenizer and "
        "processor files of all the model's folders.",
    )


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Section `export`."""

    hf_dir: Path | None = option(
        None,
        "Folder that the trained model is written to in `transformers` format, if any; an earlier export is replaced, "
        "nothing else.",
    )


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Section `eval`."""

    datasets: tuple[str, ...] = option(
        (), "Held-out data sets: measured during training, and their questions are put to the exported model."
    )
    interval: int = option(
        0, "Steps after which their loss and exact match are measured, and once more after the last step; 0 is never."
    )
    limit: int | None = option(None, "Most samples of each of these data sets that the exported model answers.", "all")
    max_new_tokens: int = option(16, "Most tokens of an answer.")


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Section `plan`: what `--plan` assumes of the data."""

    images: int = option(1, "Images of each sample, for each encoder, that `--plan` assumes.")
    image_side: int = option(896, "Width and height of these images in pixels, as they are encoded.")
    tokens: int = option(512, "Tokens of each sample besides its image tokens.")
    supervised: float = option(0.5, "Share of these tokens that the loss counts: the last ones.")
    memory_gb: float | None = option(
        None, "Memory of a device in GB (10^9 bytes); ranks that need more are listed as problems.", "unknown"
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that can be set. Its values are checked when it is made.

    Raises:
        UserError: a value makes no sense, alone or with the others.
    """

    model: ModelConfig
    parallel: Mapping[str, str] = option(
        {}, "Layout of a module, such as `sp:8` or `tp:4,dp:2@0-7`.", "dp over all ranks"
    )
    parallel_layers: Mapping[str, tuple[int, ...]] = option(
        {}, "Layers of each pipeline stage of a module, in order, such as `10 18`.", "even"
    )
    data: DataConfig
    boundary: BoundaryConfig = field(default_factory=BoundaryConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    log: LogConfig = field(default_factory=LogConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)

    @property
    def answers(self) -> bool:
        """Whether the exported model answers the questions of `eval.datasets` after training, which plain
        `transformers` can where there is one encoder.
        """
        return bool(self.eval.datasets) and self.export.hf_dir is not None and not self.model.encoders

    def __post_init__(self) -> None:
        check(self)


def load_command(argv: Sequence[str]) -> tuple[Config, PlanRequest | None]:
    """The configuration that a command line (without the program's name) asks for, and the plan if it asks for one;
    ``--help`` prints and exits.

    Raises:
        UserError: a file, name or value is wrong; the message names it and says what to do.
    """
    line = _read_command(argv)
    if line.plan is None and "plan" in line.settings:  # In a file the section is there for later plans.
        raise without_plan(f"--plan.{next(iter(line.settings['plan']))}")
    return _config_of(line), line.plan


def load_config(argv: Sequence[str]) -> Config:
    """The configuration of a command line that asks for no plan, whatever it says of one. Raises `UserError`, as
    `load_command` does.
    """
    line = _read_command(argv)
    if line.plan is not None:
        why = "this program makes none"
        raise UserError.at("--plan", found="it", expected="no plan", because=why, fix="use pretrain_vlm.py")
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
    """Every setting with its value, as text, by the name that users know: `optimizer.lr`."""
    return dict(_flat(_plain(config), ""))


def _flat(value: Any, name: str) -> Iterator[tuple[str, str]]:
    if not isinstance(value, dict):
        yield name, "none" if value is None else str(value)
        return
    for part, below in value.items():
        yield from _flat(below, f"{name}.{part}" if name else part)


def flag_table_markdown() -> str:
    """The README's table of every flag."""
    return markdown_table(Config)


def require_modules(config: Config, modules: Iterable[str]) -> None:
    """Checks that settings by module name modules of the model.

    Raises:
        UserError: a setting names another module.
    """
    known = list(modules)
    by_module = {
        "parallel": config.parallel,
        "parallel_layers": config.parallel_layers,
        "model.recompute": config.model.recompute,
        "model.sequence_parallel": config.model.sequence_parallel,
    }
    for where, names in by_module.items():
        for name in names:
            if name not in known:
                raise UserError.at(
                    f"{where}.{name}",
                    found=f"module `{name}`{did_you_mean(name, known)}",
                    expected=f"one of {', '.join(known)}",
                    because="the model has no other",
                    fix="rename or remove it",
                )


def _plain(value: Any) -> Any:
    """Values as YAML has them: lists for tuples, text for paths."""
    if is_dataclass(value):
        return {shown_name(f): _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
