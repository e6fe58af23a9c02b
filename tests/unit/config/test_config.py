"""The configuration: where values come from, round trips, and messages about what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_hetero.base.errors import UserError
from megatron_hetero.config.modules import ModuleConfig
from megatron_hetero.config.optimizers import PrecisionConfig
from megatron_hetero.config.schema import Config, load_command, load_config, to_yaml
from megatron_hetero.config.sections import DatasetConfig

MINIMAL = """
model: {hf_path: model}
data: {registry: {demo: {annotations: train.json, images: /pictures}}, datasets: [demo]}
"""


@pytest.fixture
def write(tmp_path: Path):
    """Writes a YAML file, by default over the minimal one, and returns the arguments that load it."""

    def write(text: str, base: str = MINIMAL) -> list[str]:
        file = tmp_path / "config.yaml"
        file.write_text(base + text)
        return ["--config", str(file)]

    return write


def test_a_checkpoint_to_go_on_from_is_a_path_or_a_word(write, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for text, expected in (
        ("auto", "auto"), ("never", "never"), ("./auto", tmp_path / "auto"), ("Auto", tmp_path / "Auto"),
        ("runs/step-1", tmp_path / "runs/step-1"), ("../step-1", tmp_path.parent / "step-1"),
        ("/step-1", Path("/step-1")), ("none", tmp_path / "none"),
    ):  # fmt: skip
        line = write(f"checkpoint: {{dir: saved, resume: {text}}}")
        config = load_config(line)
        assert config.checkpoint.resume == expected
        assert load_config(write(to_yaml(config), base="")) == config
        assert load_config([*write(""), "--checkpoint.resume", "run"]).checkpoint.resume == Path.cwd() / "run"
    for broken in ("[auto]", '""', "{auto: 1}"):
        with pytest.raises(UserError, match=r"checkpoint.resume .*expected auto(, |.)never or (a )?path"):
            load_config(write(f"checkpoint: {{resume: {broken}}}"))


def test_defaults_and_the_minimal_file(write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    config = load_config(write(""))
    assert config.model.hf_path == tmp_path / "model"
    assert config.data.registry == {
        "demo": DatasetConfig(annotations=tmp_path / "train.json", images=Path("/pictures"))
    }
    assert config.data.datasets == ("demo",)
    assert config.modules == {} and config.module("text") == ModuleConfig()
    assert (config.model.dtype, config.optimizer.clip_grad, config.data.shuffle) == ("bfloat16", 1.0, True)
    assert config.export.hf_dir is None
    assert config.log.dir == Path("/runs")


def test_flags_win_over_the_file(write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path / "..")
    modules = "modules: {vision: {parallel: 'sp:2'}, text: {parallel: 'tp:2'}}"
    file = write(f"train: {{iters: 7, seed: 3}}\n{modules}\noptimizer: {{lr: 1e-4}}\n")
    flags = "--train.iters 20 --text-parallel tp:4 --data.shuffle false --optimizer.betas 0.9 0.95"
    held_out = "--eval.datasets demo --eval.interval 3"
    paths = "--export.hf_dir=out --data.registry.more.annotations a.json --data.datasets demo more%50"
    config = load_config([*file, *flags.split(), *paths.split(), *held_out.split()])
    assert (config.train.iters, config.train.seed) == (20, 3)
    assert config.modules == {"vision": ModuleConfig(parallel="sp:2"), "text": ModuleConfig(parallel="tp:4")}
    assert (config.optimizer.lr, config.optimizer.betas) == (1e-4, (0.9, 0.95))
    assert config.data.shuffle is False
    # Paths in flags start from the current directory, those in the file from its folder.
    assert config.export.hf_dir == tmp_path.parent / "out"
    assert config.data.registry["more"] == DatasetConfig(annotations=tmp_path.parent / "a.json")
    assert config.data.registry["demo"].annotations == tmp_path / "train.json"
    assert config.data.datasets == ("demo", "more%50")


def test_mappings_merge_by_name(write) -> None:
    file = write("modules: {vision: {recompute: full}, text: {sequence_parallel: false, precision: {moments: 8bit}}}")
    flags = "--text-recompute full --modules.text.precision.master split"
    config = load_config([*file, *flags.split()])
    precision = PrecisionConfig(master="split", moments="8bit")
    text = ModuleConfig(recompute="full", sequence_parallel=False, precision=precision)
    assert config.modules == {"vision": ModuleConfig(recompute="full"), "text": text}


def test_without_a_file(tmp_path: Path) -> None:
    flags = "--model.hf_path m --data.registry.a.annotations x --data.registry.a.images y --data.datasets a"
    assert load_config(flags.split()).data.datasets == ("a",)


@pytest.mark.parametrize(
    ("text", "expected"), [("1e-4", 1e-4), ("1.0e-4", 1e-4), ("3", 3.0), ("'2e-5'", 2e-5), ("0.5", 0.5)]
)
def test_numbers_as_people_write_them(write, text: str, expected: float) -> None:
    assert load_config(write(f"optimizer: {{lr: {text}}}")).optimizer.lr == expected


def test_plain_words_are_those_of_yaml_1_2(write, tmp_path: Path) -> None:
    """What YAML 1.1 reads as octal numbers, times, booleans and dates."""
    for text, expected in (("0400", 400), ("08", 8), ("1_000", 1000), ("+7", 7), ("'12'", 12)):
        assert load_config(write(f"train: {{iters: {text}}}")).train.iters == expected
    for name in ("on", "no", "y", "4:16", "2024-01-01", "2024-13-45", "1_0", "0x1f", "=", "1:30.5"):
        assert load_config(write(f"log: {{dir: {name}}}")).log.dir == tmp_path / name
        config = load_config(write("", MINIMAL.replace("demo", name)))
        assert config.data.datasets == (name,) and list(config.data.registry) == [name]


@pytest.mark.parametrize("name", "on 0400 4:16 1e5 08 .5 true ~ 2024-01-01 1_0 .inf <<".split())
def test_texts_that_look_like_something_else_are_saved_in_quotes(write, name: str) -> None:
    config = load_config(write("", MINIMAL.replace("demo", f"'{name}'")))
    assert config.data.datasets == (name,)
    assert load_config(write(to_yaml(config), base="")) == config


def test_aliases_do_not_fill_the_memory(write) -> None:
    lines = ["&a0 [x, x]", *(f"&a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 60))]
    nested = f"eval: {{datasets: [{', '.join(lines)}]}}\nmodules: {{vision: {{parallel: *a59}}}}\n"
    with pytest.raises(UserError, match="modules.vision.parallel .*the list"):
        load_config(write(nested))


@pytest.mark.parametrize("more, backend", [
    ("--text-tp_overlap false", "auto"), ("--text-tp_overlap true", "torch"), ("--model.compile layers", "torch"),
    ("--text-tp_overlap true --model.backend te", "te"),
])  # fmt: skip
def test_layers_are_ours_where_a_setting_is_theirs_alone(write, more: str, backend: str) -> None:
    """Unless others are asked for, which says so later."""
    assert load_config([*write(""), *more.split()]).layer_backend == backend


@pytest.mark.parametrize("attention, dtype, allowed", [
    ("auto", "bfloat16", True), ("auto", "float32", False), ("flash", "bfloat16", False),
])  # fmt: skip
def test_cudnn_is_tried_only_where_it_may_compute(write, attention: str, dtype: str, allowed: bool) -> None:
    """So that a run without it does not compute a small pack at its start, or report on it."""
    config = load_config([*write(""), "--model.attention", attention, "--model.dtype", dtype])
    assert config.may_use_cudnn is allowed


def test_empty_sections_and_none(write) -> None:
    config = load_config([*write("train:\nexport: {hf_dir: null}\n"), "--model.freeze", "--log.wandb", "none"])
    assert config.model.freeze == ()
    assert (config.export.hf_dir, config.log.wandb) == (None, None)


def test_the_resolved_configuration_reads_back(write, tmp_path: Path) -> None:
    more = (
        "optimizer: {lr: 1e-4, eps: 1e-10}\n"
        "modules: {vision: {parallel: 'sp:2@0-1', lr: 2e-5}, text: {layers: [1, 3], offload: {states: true}}}\n"
        "eval: {datasets: [demo], interval: 5}\nexport: {hf_dir: out}"
    )
    config = load_config([*write(more), "--model.freeze", "text", "projector", "--data.datasets", "demo%12.5"])
    saved = tmp_path / "elsewhere" / "saved.yaml"
    saved.parent.mkdir()
    saved.write_text(to_yaml(config))
    assert load_config(["--config", str(saved)]) == config


# ----------------------------------------------------------------------- what is wrong

IN_FILE = [
    ("trian: {}", ["config.yaml", "`trian` (did you mean `train`?)"]),
    ("train: {iter: 3}", ["`train.iter` (did you mean `iters`?)", "micro_batch_size"]),
    ("eval: {datasets: [dem]}", ["eval.datasets", "`dem` (did you mean `demo`?)"]),
    ("train: {iters: three}", ["train.iters", "config.yaml", "found `three`", "an integer"]),
    ("train: {iters: 1.5}", ["train.iters", "found `1.5`", "an integer"]),
    ("train: {iters: true}", ["train.iters", "found `true`", "an integer"]),
    ("train: {iters: null}", ["train.iters", "found `null`", "an integer"]),
    ("train: {iters: }", ["train.iters", "found no value", "an integer"]),
    ("train: {iters: [3]}", ["train.iters", "the list `['3']`", "expected integer"]),
    ("train: {iters: {a: 3}}", ["train.iters", "the mapping `{'a': '3'}`"]),
    ("train: 3", ["train (", "found `3`", "a mapping"]),
    ("log: {tensorboard: maybe}", ["log.tensorboard", "true or false"]),
    ("log: {dir: ''}", ["log.dir", "found no value", "a path"]),
    ("modules: {vision: {parallel: [8]}}", ["modules.vision.parallel", "the list `['8']`", "text"]),
    ("modules: {text: {parallel: tp:2,dp:4}}", ["`modules.text.dp:4`", "Quote layouts"]),
    ("modules: {text: {recomput: full}}", ["`modules.text.recomput` (did you mean `recompute`?)"]),
    ("modules: {text: full}", ["modules.text (", "a mapping"]),
    ("eval: {datasets: demo}", ["eval.datasets", "found `demo`", "a list of text"]),
    ("optimizer: {name: adam}", ["optimizer.name", "did you mean `adamw`?", "adamw, sgd"]),
    ("optimizer: {betas: [0.9]}", ["optimizer.betas", "1 values", "expected 2"]),
    ("optimizer: {betas: [0.9, 1]}", ["optimizer.betas", "1.0"]),
    ("optimizer: {lr: .nan}", ["optimizer.lr", "a finite number"]),
    ("optimizer: {lr: 0}", ["optimizer.lr", "> 0"]),
    ("optimizer: {lr: 1e-4, min_lr: 1e-3}", ["optimizer.min_lr", "≤ optimizer.lr = 0.0001"]),
    ("optimizer: {warmup_iters: 200}", ["optimizer.warmup_iters", "Try `--optimizer.warmup_iters 100`"]),
    ("optimizer: {clip_grad: -1}", ["optimizer.clip_grad", "≥ 0"]),
    ("optimizer: {name: sgd, weight_decay: 0.1}", ["optimizer.weight_decay", "optimizer.name is sgd"]),
    ("optimizer: {schedule: constant, min_lr: 1e-6}", ["optimizer.min_lr", "optimizer.schedule is constant"]),
    (
        "modules: {text: {precision: {master: half}}}",
        ["modules.text.precision.master", "float32, split, none"],
    ),
    ("train: {iters: 0}", ["train.iters", "expected ≥ 1. Raise or remove it."]),
    ("train: {micro_batch_size: 3}", ["train.micro_batch_size", "Try `--train.micro_batch_size 2`"]),
    ("train: {tokens_per_micro_batch: 2048}", ["≥ data.max_seq_length = 4096", "Raise it, or try `--data.max_seq_"]),
    ("train: {patches_per_micro_batch: 64}", ["train.patches_per_micro_batch", "train.tokens_per_micro_batch is not"]),
    ("train: {tokens_per_micro_batch: 8192, micro_batch_size: 2}", ["train.micro_batch_size", "Remove one of them"]),
    ("train: {iters: 1, iters: 2}", ["line 4, column 19", "`iters` given twice"]),
    ("train: {}\ntrain: {}", ["line 5, column 1", "`train` given twice"]),
    ("train: [1", ["line 4", "malformed YAML"]),
    ("train:\n\titers: 3", ["line 5, column 1"]),
    ("- 1", ["line 4, column 1"]),
    ("train: {iters: 4:16}", ["train.iters", "found `4:16`", "an integer"]),
    ("train: {iters: 0x100}", ["train.iters", "found `0x100`"]),
    ("train: {iters: !!int 4:16}", ["config.yaml, line 4", "could not determine a constructor"]),
    ("optimizer: {lr: 1:30.5}", ["optimizer.lr", "found `1:30.5`", "a finite number"]),
    ("log: {tensorboard: on}", ["log.tensorboard", "found `on`", "true or false"]),
    ("train: {iters: " + "9" * 5000 + "}", ["train.iters", "an integer below 2^63"]),
    ("train: {\"iters\": 1, 'iters': 2}", ["`iters` given twice"]),
    ("train: {iters: &a [1], seed: 1, <<: {iters: 2}, x: *a}", ["`train.x`"]),
    ('train: {"iters\\e[2J": 3}', ["`train.iters\\x1b[2J`"]),
    ("train: {seed: 9223372036854775808}", ["train.seed", "an integer below 2^63"]),
    ("log: {dir: ~nobody-here/x}", ["log.dir", "home folder"]),
    ('log: {dir: "a\\0b"}', ["log.dir", "a path"]),
    ("train: " + "[" * 5000, ["config.yaml", "recursion"]),
    ("? [a]\n: 3", ["line 4", "unhashable"]),
    ("train: !!python/object:os.system {}", ["line 4", "could not determine a constructor"]),
]


@pytest.mark.parametrize(("text", "parts"), IN_FILE)
def test_what_is_wrong_in_a_file(write, text: str, parts: list[str]) -> None:
    with pytest.raises(UserError) as error:
        load_config(write(text))
    for part in parts:
        assert part in str(error.value)


IN_DATA = [
    ("datasets: []", ["data.datasets", "an empty list"]),
    ("datasets: [dmeo]", ["`dmeo` (did you mean `demo`?)", "data.registry.dmeo"]),
    ("datasets: [demo%0]", ["demo%0"]),
    ("datasets: [demo%x]", ["demo%x"]),
    ("datasets: [demo], min_pixels: 9, max_pixels: 8", ["data.min_pixels", "data.max_pixels = 8"]),
    ("datasets: [demo], workers: -1", ["data.workers"]),
    ("datasets: [demo], too_long: cut", ["data.too_long", "error, skip"]),
    ("datasets: [demo], registry: {demo: {images: b}}", ["twice"]),
]


@pytest.mark.parametrize(("text", "parts"), IN_DATA)
def test_what_is_wrong_with_data(write, text: str, parts: list[str]) -> None:
    with pytest.raises(UserError) as error:
        load_config(write("", MINIMAL.replace("datasets: [demo]", text)))
    for part in parts:
        assert part in str(error.value)


def test_names_with_a_rate_are_refused_in_the_registry(write) -> None:
    with pytest.raises(UserError, match="a name without `%`"):
        load_config(write("", MINIMAL.replace("demo", "demo%5")))


DETAIL = "--detail-hf_path x --detail-token y"
IN_FLAGS = [
    ("--text-patches_per_call 64", ["modules.text.patches_per_call", "text is not an encoder", "modules.text.chunk"]),
    ("--schedule.timeout_s 1e-30", ["schedule.timeout_s", "expected 0 or ≥ 1"]),
    ("--log.dir " + "é" * 200, ["log.dir", "file name too long"]),
    ("--log.dir \ud800", ["log.dir", "surrogates not allowed"]),
    ("--train.iter 3", ["--train.iter", "did you mean `iters`?"]),
    ("--iters 3", ["did you mean `--train.iters`?"]),
    ("--min_lr 0", ["did you mean `--optimizer.min_lr`?"]),
    ("--vision_parallel sp:2", ["--vision_parallel: unknown flag (did you mean `--vision-parallel`?)"]),
    (f"--train.seed {'9' * 20}", ["found `9999", "an integer below 2^63"]),
    (f"--train.seed {'9' * 5000}", ["an integer below 2^63"]),
    ("--train.iters", ["--train.iters: found no value"]),
    ("--train.iters 3 4", ["found 2 values (3 4)"]),
    ("--train.iters x", ["train.iters (--train.iters)", "found `x`"]),
    ("--train.iters 3 --train.iters 4", ["--train.iters: given twice. Remove one."]),
    ("--vision-parallel sp:2 --modules.vision.parallel sp:2", ["modules.vision.parallel given twice"]),
    ("--text-zero 4", ["modules.text.zero (--text-zero)", "1, 2, 3"]),
    ("--text-zeor 3", ["--text-zeor: unknown flag (did you mean `--text-zero`?)"]),
    ("--text-sequence-parallel false", ["did you mean `--text-sequence_parallel`?"]),
    ("--text-precision split", ["a section with --text-precision.master"]),
    ("--plan-zero 3", ["--plan-zero: unknown flag"]),
    ("--train 3", ["a section with --train.iters"]),
    ("--train.iters.x 3", ["unknown flag"]),
    ("--train. 3", ["unknown flag"]),
    ("-- 3", ["unknown flag"]),
    ("--data.registry x", ["--data.registry.NAME.annotations"]),
    ("--data.registry.x.imgs q", ["did you mean `images`?"]),
    (
        "--data.registry.x.images q",
        ["data.registry.x (--data.registry.x.annotations): neither "],
    ),
    ("--data.shuffle yes", ["true or false"]),
    ("--model.freeze text text", ["model.freeze", "each entry once"]),
    ("--model.train *.mlp.* *.mlp.*", ["model.train", "each entry once"]),
    ("--detail-hf_path x", ["modules.detail.token (--detail-token): found no value, expected a placeholder"]),
    ("--text-hf_path x --text-token y", ["the name `text`", "for example `detail`"]),
    ("--visual-hf_path x --visual-token y", ["the name `visual`"]),
    ("--modules.A.hf_path x --modules.A.token y", ["the name `A`"]),
    ("--config-hf_path x", ["--config-hf_path: unknown flag"]),
    ("--modules.config.hf_path x", ["the name `config`"]),
    ("--vision-lr 0", ["modules.vision.lr (--vision-lr)", "> 0"]),
    (f"{DETAIL} --detail-min_pixels 9 --detail-max_pixels 8", ["max_pixels = 8"]),
    (f"{DETAIL} --detail-min_pixels 0", ["modules.detail.min_pixels", "≥ 1"]),
    (f"{DETAIL} --export.hf_dir x/y", ["export.hf_dir", "modules.detail.hf_path"]),
    ("--eval.interval 5", ["eval.interval", "0 without eval.datasets"]),
    ("--eval.interval -1 --eval.datasets demo", ["eval.interval", "≥ 0"]),
    (
        "--vision-recompute ful",
        ["modules.vision.recompute", "did you mean `full`?", "or an integer"],
    ),
    ("--text-recompute 0", ["modules.text.recompute", "expected ≥ 1"]),
    ("--text-recompute -1", ["modules.text.recompute", "found -1", "expected ≥ 1"]),
    ("--text-recompute 1.5", ["modules.text.recompute", "an integer"]),
    ("--text-chunk -8", ["modules.text.chunk", "found -8", "≥ 0"]),
    ("--text-chunk many", ["modules.text.chunk", "an integer"]),
    ("--text-tp_overlap 2", ["modules.text.tp_overlap", "found `2`", "true or false"]),
]

WITHOUT_EFFECT = [
    ("--eval.datasets demo", ["eval.datasets", "eval.interval is 0"]),
    ("--eval.datasets demo demo --eval.interval 3", ["eval.datasets", "each name once"]),
    ("--train.profile.start 101", ["train.profile.start", "found 101", "an end at step 100"]),
    ("--train.profile.start 99 --train.profile.steps 3", ["train.profile.start", "99 with 3 steps"]),
    ("--train.profile.steps 3", ["train.profile.steps", "Set train.profile.start"]),
    (
        "--model.compile layers --model.backend te",
        ["model.compile", "Transformer Engine", "set model.backend to torch"],
    ),
    ("--data.worker_type process --data.workers 0", ["data.worker_type", "data.workers is 0", "Set data.workers"]),
    ("--optimizer.min_lr 1e-6 --optimizer.warmup_iters 100", ["optimizer.min_lr", "all 100 steps are warm-up"]),
    ("--checkpoint.resume never", ["checkpoint.resume", "without checkpoint.dir"]),
    ("--checkpoint.allow_changes train.seed", ["checkpoint.allow_changes", "without checkpoint.dir"]),
    ("--checkpoint.resume step-1 --checkpoint.keep_last 3", ["checkpoint.keep_last", "nothing is written"]),
    ("--plan-svg plan.svg", ["--plan-svg: found it without --plan"]),
    ("--plan.tokens 5", ["--plan.tokens: found it without --plan"]),
    ("--schedule.waves 2 --plan.tokens 5", ["--plan.tokens: found it without --plan"]),
]
WITH_EFFECT = [
    "--schedule.waves auto --plan.memory_gb h100 --plan.tokens 5",
    f"{DETAIL} --eval.datasets demo --eval.interval 5",
    "--train.profile.start 99 --train.profile.steps 2",
    "--train.profile.start 100",
    f"{DETAIL} --detail-lr 1e-3 --detail-parallel dp:2@0-1 --detail-min_pixels 784",
    "--text-recompute 3 --text-chunk 0 --vision-chunk 512 --text-layers 1 3 --vision-zero 3",
    "--checkpoint.resume never --checkpoint.dir saved",
    "--checkpoint.resume step-1 --checkpoint.allow_changes train.seed",
    "--plan --plan-svg plan.svg --plan.tokens 5",
]


@pytest.mark.parametrize(("flags", "parts"), WITHOUT_EFFECT)
def test_settings_without_effect_are_refused(write, flags: str, parts: list[str]) -> None:
    with pytest.raises(UserError) as error:
        load_command([*write(""), *flags.split()])
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize("flags", WITH_EFFECT)
def test_settings_with_an_effect_are_not(write, flags: str) -> None:
    config, _ = load_command([*write("plan: {tokens: 7}"), *flags.split()])
    assert load_config(write(to_yaml(config), base="")) == config


@pytest.mark.parametrize(("flags", "parts"), IN_FLAGS)
def test_what_is_wrong_in_flags(write, flags: str, parts: list[str]) -> None:
    with pytest.raises(UserError) as error:
        load_config([*write(""), *flags.split()])
    for part in parts:
        assert part in str(error.value)


def test_stray_words_and_missing_values() -> None:
    with pytest.raises(UserError, match="command line: found `foo`"):
        load_config(["foo", "--config", "x"])
    with pytest.raises(UserError, match=r"model.hf_path, data.registry, data.datasets: required, but not set"):
        load_config([])


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    missing, binary, listed = tmp_path / "missing.yaml", tmp_path / "binary.yaml", tmp_path / "list.yaml"
    binary.write_bytes(b"\xff\xfe\x00a")
    listed.write_text("- 1\n")
    for file, part in (
        (missing, "no such file"),
        (tmp_path, "is a directory"),
        (binary, "UTF-8"),
        (listed, "a mapping"),
    ):
        with pytest.raises(UserError) as error:
            load_config(["--config", str(file)])
        assert part in str(error.value) and str(file) in str(error.value)


def test_the_long_and_the_short_form_of_a_flag_are_the_same(write) -> None:
    short = "--text-layers 1 3 --vision-precision.moments 8bit --detail-hf_path d --detail-token t"
    long = "--modules.text.layers 1 3 --modules.vision.precision.moments 8bit --modules.detail.hf_path d"
    config = load_config([*write(""), *short.split()])
    assert config == load_config([*write(""), *long.split(), "--modules.detail.token", "t"])
    assert config.further == {"detail": ModuleConfig(hf_path=Path.cwd() / "d", token="t")}


def test_values_are_checked_however_they_are_made(write) -> None:
    config = load_config(write(""))
    with pytest.raises(UserError, match="train.micro_batch_size"):
        Config(model=config.model, data=config.data, train=type(config.train)(global_batch_size=4, micro_batch_size=3))
