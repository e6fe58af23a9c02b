"""What is mutated, and what is run on it."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import random
import resource
import shutil
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch.distributed as dist
import yaml

import pretrain_vlm
from megatron_hetero.base.environment import require_ranks
from megatron_hetero.base.errors import UserError
from megatron_hetero.base.outputs import MANIFEST, record_file
from megatron_hetero.checkpoint.record import ModelSources
from megatron_hetero.checkpoint.resume import choose
from megatron_hetero.cli import export
from megatron_hetero.cli import inspect_data as inspect
from megatron_hetero.config.fields import Pattern
from megatron_hetero.config.flags import flag_rows
from megatron_hetero.config.lora import LoraConfig
from megatron_hetero.config.modules import ModuleConfig
from megatron_hetero.config.schema import Config, load_command
from megatron_hetero.config.sections import DatasetConfig
from megatron_hetero.data.mixture import open_held_out, open_mixture
from megatron_hetero.data.processor import Processor, open_processor
from megatron_hetero.data.records import Dataset, Reading, Record
from megatron_hetero.data.sources import parquet_groups
from megatron_hetero.data.turns import Turn
from megatron_hetero.data.validation import IMAGES
from megatron_hetero.hf.peft_folders import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from megatron_hetero.job.job import JobSpec
from megatron_hetero.models.adapters import with_adapters
from megatron_hetero.models.items.image_files import load_picture
from megatron_hetero.models.weights import added_shapes, open_modules
from tests.fuzz import good_input, words
from tests.support.items import pictures, whole
from tests.support.mutations import ODD, SMALL, changed_index, mutated_bytes, mutated_json, mutated_text, mutated_value

LONGEST = 8000
"""Characters of a message. A path alone may have half of them."""


class Odd(Exception):
    """What a case did that is neither to take its input nor to refuse it with a sentence."""


@dataclass(frozen=True)
class Target:
    """`make` writes good input to a folder that is not there yet; `run` mutates it in one that is empty, gives it to
    the program, and returns whether it was refused.
    """

    name: str
    make: Callable[[Path], Path]
    run: Callable[[Path, random.Random, Path], bool]


# -------------------------------------------------------------------------------------------------- programs


def _refused(work: Callable[[], object]) -> bool:
    """Whether it raises `UserError`, of which the message is fit to be shown."""
    try:
        work()
    except UserError as error:
        _require_message(str(error))
        return True
    return False


def _require_message(text: str) -> None:
    if len(text) > LONGEST or not all(line.isprintable() for line in text.splitlines()) or not text.strip():
        raise Odd(f"a message of {len(text)} characters: {text[:LONGEST]!r}")


def _told(main: Callable[[Sequence[str]], object], argv: Sequence[str]) -> bool:
    """The same for a command."""
    said, wrong = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(wrong):
        try:
            status = main(argv)
        except SystemExit as end:  # argparse
            status = end.code
    if not status:
        return False
    text = wrong.getvalue()
    if "Traceback" in text or status not in (1, 2):
        raise Odd(f"status {status}: {text}")
    _require_message(text)
    return True


def _start(argv: Sequence[str], world_size: int) -> None:
    """The plan that a command line asks for, or what a run does before there are any groups."""
    config, plan = load_command(argv)
    if plan is not None:
        with contextlib.redirect_stdout(io.StringIO()):
            pretrain_vlm.main(argv)
    else:
        _open(config, world_size)


def _open(config: Config, world_size: int) -> None:
    shapes = JobSpec.of(config, world_size).shapes
    sources = ModelSources(config.model.hf_path, config.model.hf_path_vision, config.model.fresh_projector)
    open_modules(sources.read()[0], shapes, config.train.seed)
    processor = open_processor(config)
    mixture = open_mixture(config, processor)
    open_held_out(config, processor)
    processor.tokenize(mixture[0])


# ------------------------------------------------------------------------------------------- layouts and flags


def _layouts(rng: random.Random) -> list[str]:
    """Of the encoder and of the language model."""
    good = rng.choice(good_input.LAYOUTS)
    return [mutated_text(rng, layout, words.LAYOUT) if rng.random() < 0.4 else layout for layout in good]


def _run_layouts(good: Path, rng: random.Random, case: Path) -> bool:
    vision, text = _layouts(rng)
    argv = [
        "--config", f"{good}/config.yaml", "--vision-parallel", vision, "--text-parallel", text,
        "--log.dir", f"{case}/log", "--plan", "--world-size", rng.choice(words.WORLDS),
    ]  # fmt: skip
    if rng.random() < 0.2:
        argv += ["--schedule.virtual_stages", rng.choice(("1", "2", "3", "0"))]
    if rng.random() < 0.2:
        argv += ["--train.global_batch_size", rng.choice(("8", "12", "64", "0", "1000000"))]
    return _refused(lambda: _start(argv, 8))


def _odd_values(good: Path) -> list[str]:
    return [*words.VALUES, f"{good}/model", f"{good}/config.yaml", f"{good}/data.jsonl"]


FLAGS = [(row.flag, row.values) for row in flag_rows(Config) if row.flag not in ("--config", "--help")]


def _run_flags(good: Path, rng: random.Random, case: Path) -> bool:
    argv = ["--config", f"{good}/config.yaml", "--log.dir", f"{case}/log", "--checkpoint.dir", f"{case}/checkpoints"]
    if rng.random() < 0.5:
        argv += ["--plan", "--world-size", "8"]
    values = _odd_values(good)
    for _ in range(rng.randint(1, 3)):
        flag = rng.choice(FLAGS)[0].replace("NAME", rng.choice(("a", "b", "c", "detail", "vision", "", "x.y")))
        flag = mutated_text(rng, flag, ("-", ".", "x", "--")) if rng.random() < 0.1 else flag
        argv += [flag, *rng.choices(values, k=rng.choice((0, 1, 1, 1, 1, 2)))]
    argv = _inside(argv, case)
    return _refused(lambda: _start(argv, 8))


def _fitting(rng: random.Random, kind: str, others: Sequence[str]) -> str:
    """A value of the kind that a flag takes, as its help describes it."""
    for word, values in words.FITTING.items():
        if word in kind:
            return rng.choice(values)
    return rng.choice(kind.split("|") if "|" in kind else others)


def _run_runs(good: Path, rng: random.Random, case: Path) -> bool:
    """One process trains, saves, exports and evaluates; another goes on where there is a checkpoint."""
    argv = [
        "--config", f"{good}/config.yaml", "--vision-parallel", "dp:1", "--text-parallel", "dp:1",
        "--train.global_batch_size", "4", "--checkpoint.dir", f"{case}/checkpoints", "--log.dir", f"{case}/log",
    ]  # fmt: skip
    argv += ["--export.hf_dir", f"{case}/export"] if rng.random() < 0.3 else []
    if rng.random() < 0.5:
        shutil.copytree(good / "checkpoints", case / "checkpoints")
    given = set(argv)
    flags = [row for row in FLAGS if row[0] not in (*given, *words.NOT_RUN) and not row[0].startswith("--plan")]
    odd = [value for value in _odd_values(good) if value not in words.ENDLESS]
    for flag, kind in rng.sample(flags, k=rng.choice((1, 1, 2, 3))):
        name = flag.replace("NAME", rng.choice(("a", "b"))).replace("MODULE", rng.choice(("vision", "text")))
        argv += [name, rng.choice(odd) if rng.random() < 0.2 else _fitting(rng, kind, odd)]
    odd_environment = {rng.choice(words.ENVIRONMENT): rng.choice(odd[:30])} if rng.random() < 0.2 else {}
    environment = {name: value for name, value in odd_environment.items() if "\0" not in value}

    def run() -> None:
        with mock.patch.dict(os.environ, environment), contextlib.redirect_stdout(io.StringIO()):
            require_ranks()
            try:
                pretrain_vlm.main(_inside(argv, case))
            finally:
                if dist.is_initialized():  # After an error the program leaves without.
                    dist.destroy_process_group()

    return _refused(run)


def _inside(argv: list[str], case: Path) -> list[str]:
    """Where to write is in the case's folder: it is no fault to write where one is told to."""
    written = {"--log.dir", "--checkpoint.dir", "--export.hf_dir", "--plan-svg", "--data.index", "--data.video.index"}
    return [
        f"{case}/{value}"
        if flag in written and value.startswith(("/", ".", "~")) and not value.startswith("/dev")
        else value
        for flag, value in zip(["", *argv], argv, strict=False)
    ]


def _run_tools(good: Path, rng: random.Random, case: Path) -> bool:
    """What is written, if anything, is written to the case's folder."""
    name = rng.choice(list(words.TOOLS))
    values = [*_odd_values(good), f"{good}/checkpoints", f"{good}/images", f"x={good}/model", "=", "x=", f"{case}/new"]
    odd = [value for value in values if value not in ("1e9", "999999999999999999999")]  # To be tried takes that long.
    argv = [rng.choice(odd), f"{case}/{rng.choice(odd)}"] if "tools" in name else ["--config", f"{good}/config.yaml"]
    argv = argv[1:] if name.endswith("make_demo") else argv
    argv += words.SMALL.get(name, ())
    for flag in rng.choices(words.TOOLS[name], k=rng.randint(0, 2)):
        argv += [flag, rng.choice(odd)]
    argv = argv[1:] if rng.random() < 0.1 else argv
    return _told(importlib.import_module(name).main, argv)


# --------------------------------------------------------------------------------------------- configurations


def _run_configurations(good: Path, rng: random.Random, case: Path) -> bool:
    text = (good / "config.yaml").read_text()
    if rng.random() < 0.6:
        value = mutated_value(rng, yaml.safe_load(text), (*ODD, *_odd_values(good)))
        text = yaml.safe_dump(value, sort_keys=False, allow_unicode=rng.random() < 0.5)
    else:
        text = mutated_text(rng, text, words.YAML)
    (case / "config.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))
    where = ["--log.dir", f"{case}/log", "--checkpoint.dir", f"{case}/checkpoints"] if rng.random() < 0.7 else []
    plan = ["--plan", "--world-size", "8"] if rng.random() < 0.5 else []
    return _refused(
        lambda: _start(["--config", f"{case}/config.yaml", "--data.index", f"{case}/index", *where, *plan], 8)
    )


# ----------------------------------------------------------------------------------------------- annotations


def _run_annotations(good: Path, rng: random.Random, case: Path) -> bool:
    odd = (*ODD, *words.RECORD)
    values = [mutated_value(rng, rng.choice(good_input.RECORDS), odd), *good_input.RECORDS[: rng.choice((0, 1))]]
    ascii_only = rng.random() < 0.5
    texts = [json.dumps(value, ensure_ascii=ascii_only) for value in values]
    text = "[" + ",".join(texts) + "]" if rng.random() < 0.5 else "\n".join(texts)
    if rng.random() < 0.4:
        text = mutated_text(rng, text, words.JSON)
    path = case / rng.choice(("data.json", "data.jsonl"))
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    flags = ["--data.datasets", "a", "--data.registry.a.annotations", f"{path}", "-n", "1"]
    return _told(inspect.main, ["--config", f"{good}/config.yaml", *flags])


# ------------------------------------------------------------------------------------------------- data sets


def _run_sources(good: Path, rng: random.Random, case: Path) -> bool:
    """One file of a data set is not as it was."""
    name = rng.choice(("json", "parquet", "parquet", "webdataset", "energon", "energon"))
    shutil.copytree(good / "formats" / name, case / "data")
    files = sorted(path for path in (case / "data").rglob("*") if path.is_file())
    path = rng.choice(files)
    if name == "energon" and rng.random() < 0.5:
        _change_meta(case / "data" / ".nv-meta", rng)
    else:
        path.write_bytes(mutated_bytes(rng, path.read_bytes()))
    pattern = {"json": "data/*.json", "parquet": "data/*.parquet", "webdataset": "data/*.tar", "energon": "data"}[name]
    entry = DatasetConfig(files=Pattern(f"{case}/{pattern}"), images=good / "images")

    def read() -> None:
        for record in Dataset("d", entry):
            for k in range(len(record.items)):
                item = record.item(k)
                load_picture(item.content, item.where)

    return _refused(read)


def _change_meta(meta: Path, rng: random.Random) -> None:
    """Other names in the split of a folder of Energon."""
    split = yaml.safe_load((meta / "split.yaml").read_text())
    for names in (split["split_parts"]["train"], split["exclude"]):
        names += ["".join(rng.choices(words.NAMES, k=rng.randint(1, 5))) for _ in range(rng.choice((0, 1, 1, 2)))]
    (meta / "split.yaml").write_text(json.dumps(split))


def _run_crafted(good: Path, rng: random.Random, case: Path) -> bool:
    """Files that no program writes: small, and decoded large."""
    kind = rng.choice(("parquet", "tar", "index", "turns"))
    path = case / {"parquet": "a.parquet", "tar": "a.tar"}.get(kind, "a.jsonl")
    figures = min(rng.choice((1, 10, 1000, 20_000)), {"index": 10, "turns": 300}.get(kind, 20_000))
    if kind == "parquet":
        _write_dictionary(path, rng, figures)
    elif kind == "tar":
        keys = ("path", "size", "GNU.sparse.map", "mtime", "a", "1 path=", "path\0")
        headers = {
            f"{rng.choice(keys)}{'' if rng.random() < 0.5 else k}": rng.choice(
                ("1", "a.txt", "../a.txt", "-1", "x" * 5000, "\u20ac.jpg")
            )
            for k in range(figures)
        }
        data = bytearray(tarfile.TarInfo.create_pax_global_header(headers))
        data[156:157] = rng.choice((b"g", b"x", b"x"))
        data[148:156] = b"%06o\0 " % (256 + sum(data[:148]) + sum(data[156:512]))
        path.write_bytes(
            data * rng.choice((1, 2, 50)) + next((good / "formats" / "webdataset").glob("*.tar")).read_bytes()
        )
    else:
        turns = [
            {"from": ("human", "gpt")[k % 2], "value": rng.choice(("Yes", "a b", "\n", "assistant\n"))}
            for k in range(2 * figures)
        ]
        path.write_text(
            "".join(json.dumps({"conversations": turns[: rng.choice((2, 2 * figures))]}) + "\n" for _ in range(3))
        )
    entry = DatasetConfig(
        files=Pattern(str(path)), fields={"answer": "txt"} if kind == "tar" and rng.random() < 0.5 else {}
    )

    def change(arrays: dict[str, np.ndarray], header: dict[str, Any]) -> None:
        column = arrays[rng.choice(list(arrays))]
        if len(column):
            column[rng.randrange(len(column))] = rng.choice((-(2**63), -1, 0, 1, 7, 2**31, 2**62))
        if rng.random() < 0.3:
            name = rng.choice(list(header))
            header[name] = mutated_value(rng, header[name])

    def read() -> None:
        data = Dataset("d", entry, Reading(cache=case / "index"))
        if kind == "index":
            changed_index(next((case / "index").glob("*.index")), change)
            data = Dataset("d", entry, Reading(cache=case / "index"))
        for record in data:
            if kind == "turns":
                _processor(good).tokenize(record)

    with mock.patch.object(parquet_groups, "MAX_GROUP_BYTES", 1 << 28):
        refused = _refused(read)
    if (peak := resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 20) > 3:
        raise Odd(f"{peak} GiB of memory")
    return refused


def _model_and_sources(folder: Path) -> Path:
    good_input.sources(folder / "sources")
    (folder / "formats").symlink_to("sources/formats")
    return good_input.model(folder)


def _write_dictionary(path: Path, rng: random.Random, count: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    values = ["x" * rng.choice((1, 1000, 1 << 16)) for _ in range(rng.choice((1, 2, 5)))]
    texts: Any = pa.DictionaryArray.from_arrays(
        pa.array([k % len(values) for k in range(count)], pa.int32()), pa.array(values)
    )
    if rng.random() < 0.5:
        ends = sorted(rng.choices(range(count + 1), k=rng.choice((0, 1, 50))))
        texts = pa.ListArray.from_arrays([0, *ends, count], texts)
    options = {
        "store_schema": rng.random() < 0.5,
        "dictionary_pagesize_limit": 1 << 30,
        "data_page_version": rng.choice(("1.0", "2.0")),
    }
    pq.write_table(pa.table({"answer": texts}), path, compression="zstd", **options)
    path.write_bytes(mutated_bytes(rng, path.read_bytes()) if rng.random() < 0.5 else path.read_bytes())


# -------------------------------------------------------------------------------------------------- pictures

_TURNS = (Turn("user", (IMAGES[0], "What?")), Turn("assistant", "A disc."))


def _run_pictures(good: Path, rng: random.Random, case: Path) -> bool:
    files = sorted((good / "images").glob("good.*"))
    content = mutated_bytes(rng, rng.choice(files).read_bytes())
    if rng.random() < 0.3:  # The header is where sizes and offsets are.
        content = mutated_bytes(rng, content[:100]) + content[100:]
    (case / f"a.{rng.choice(('png', 'jpg', 'tif', 'eps', 'x'))}").write_bytes(content)
    [path] = case.iterdir()
    record = Record("d", 0, f"{case}/train.jsonl:1", _TURNS, pictures(path.name), case)
    processor = _processor(good)

    def read() -> None:
        sample = processor.tokenize(record)
        if not np.isfinite(processor.patches(record, 0, whole(sample.sizes[0]))).all():
            raise Odd("pixels that are not finite")

    return _refused(read)


_PROCESSORS: dict[Path, Processor] = {}


def _processor(folder: Path) -> Processor:
    """That of a model folder, read once in a process."""
    if folder not in _PROCESSORS:
        _PROCESSORS[folder] = Processor.from_folder(folder / "model")
    return _PROCESSORS[folder]


# --------------------------------------------------------------------------------------------- model folders

MODEL_FILES = ("config.json", "preprocessor_config.json", "tokenizer_config.json", "tokenizer.json",
               "chat_template.jinja", "model.safetensors")  # fmt: skip


def _mutated_model(good: Path, rng: random.Random, folder: Path, names: Sequence[str] = MODEL_FILES) -> None:
    """A copy of the model of which one or two files are not as they were."""
    shutil.copytree(good, folder, copy_function=os.link)
    there = [name for name in names if (folder / name).is_file()]
    for name in rng.sample(there, k=rng.choice((1, 1, 1, 2))):
        path = folder / name
        old = path.read_bytes()
        path.unlink()
        path.write_bytes(_mutated_file(rng, name, old))
    if rng.random() < 0.1:
        (folder / (name := rng.choice(there))).unlink(missing_ok=True)
        if rng.random() < 0.5:  # What it links to is good, and must not be read.
            (folder / name).symlink_to(good / name)


def _mutated_file(rng: random.Random, name: str, old: bytes) -> bytes:
    if name.endswith(".json"):
        return mutated_json(rng, old.decode(), (*SMALL, *words.TEMPLATES)).encode("utf-8", "replace")
    if name.endswith(".jinja"):
        return mutated_text(rng, old.decode(), (*words.TEMPLATES, "{{", "}}", "{%", "%}", "|")).encode(
            "utf-8", "replace"
        )
    size = int.from_bytes(old[:8], "little")  # of the header of a safetensors file
    header, data = old[8 : 8 + size], old[8 + size :]
    if rng.random() < 0.3:
        return mutated_bytes(rng, old[: 8 + size]) + data
    text = mutated_json(rng, header.decode(), (*ODD, "F8_E4M3", "I8", "C64", "BOOL", [0, 0], [2, 1], [0, 2**63]))
    changed = text.encode("utf-8", "replace")
    cut = data[: rng.randint(0, len(data))] if rng.random() < 0.1 else data
    return len(changed).to_bytes(8, "little") + changed + cut


def _run_models(good: Path, rng: random.Random, case: Path) -> bool:
    _mutated_model(good / "model", rng, case / "model")
    shutil.copyfile(good / "images/good.png", case / "a.png")

    def read() -> None:
        folders, shapes = ModelSources(case / "model").read()
        open_modules(folders, shapes, 0)
        processor = Processor.from_folder(case / "model")
        record = Record("d", 0, f"{case}/train.jsonl:1", _TURNS, pictures("a.png"), case)
        sample = processor.tokenize(record)
        processor.patches(record, 0, whole(sample.sizes[0]))

    return _refused(read)


def _run_adapters(good: Path, rng: random.Random, case: Path) -> bool:
    shutil.copytree(good / "adapter", case / "adapter")
    path = case / "adapter" / ADAPTER_CONFIG
    for pattern in rng.sample(words.PATTERNS, k=rng.choice((0, 1, 2))):
        path.write_text(path.read_text().replace('"q_proj"', f'"{pattern}": 2, "q_proj"'))
    for name in rng.sample((ADAPTER_CONFIG, ADAPTER_WEIGHTS), k=rng.choice((0, 1, 1, 2))):
        path = case / "adapter" / name
        path.write_bytes(_mutated_file(rng, name, path.read_bytes()))
    row = ModuleConfig(lora=LoraConfig(hf_path=case / "adapter"))

    def read() -> None:
        folders, plain = ModelSources(good / "model").read()
        weights = open_modules(folders, shapes := with_adapters(plain, {"vision": row, "text": row}), 0)
        for name in added_shapes(shapes):
            weights["vision" if name.startswith("visual") else "text"].whole(name)

    return _refused(read)


def _run_imports(good: Path, rng: random.Random, case: Path) -> bool:
    names = ("config.json", "model.safetensors", "tokenizer.json")
    _mutated_model(good / "model", rng, case / "model", names)
    tool = importlib.import_module("megatron_hetero.cli.import")
    return _told(tool.main, [f"{case}/model", f"{case}/checkpoint"])


# ----------------------------------------------------------------------------------------------- checkpoints


def _run_checkpoints(good: Path, rng: random.Random, case: Path) -> bool:
    folder = case / "checkpoints"
    shutil.copytree(good / "checkpoints", folder, copy_function=os.link, symlinks=True)
    newest = folder / "step-00000002"
    names = sorted(path.name for path in newest.iterdir())
    for name in rng.sample(names, k=rng.choice((1, 1, 2))):
        path = newest / name
        old = path.read_bytes()
        path.unlink()
        path.write_bytes(_mutated_part(rng, name, old))
    if rng.random() < 0.1:
        newest.rename(folder / rng.choice(("step-00000009", "step-2", "latest2", ".step-00000002.partial")))
    newest = newest if newest.is_dir() else next(path for path in folder.iterdir() if path.is_dir())
    if rng.random() < 0.8 and (newest / MANIFEST).is_file():
        _seal(newest)
    (folder / "latest").unlink()
    (folder / "latest").write_bytes(
        mutated_bytes(rng, b"step-00000002\n") if rng.random() < 0.1 else b"step-00000002\n"
    )
    config, _ = load_command(["--config", f"{good}/config.yaml", "--checkpoint.dir", f"{folder}"])

    def begin() -> None:
        choose(config.checkpoint)

    refused = _refused(begin)
    where = rng.choice((folder, newest))
    return _told(export.main, [f"{where}", f"{case}/export"]) or refused


def _mutated_part(rng: random.Random, name: str, old: bytes) -> bytes:
    if name.endswith(".json"):
        return mutated_json(rng, old.decode()).encode("utf-8", "replace")
    return mutated_bytes(rng, old)


def _seal(checkpoint: Path) -> None:
    """Write the manifest of what lies there, as anyone can: what is behind it is read then."""
    records = {path.name: record_file(path) for path in checkpoint.iterdir() if path.name != MANIFEST}
    files = {name: {"size": record.size, "sha256": record.sha256} for name, record in records.items()}
    (checkpoint / MANIFEST).unlink()
    (checkpoint / MANIFEST).write_text(json.dumps({"files": files}))


TARGETS = {
    target.name: target
    for target in (
        Target("layouts", good_input.model, _run_layouts),
        Target("flags", good_input.model, _run_flags),
        Target("runs", good_input.run, _run_runs),
        Target("tools", good_input.run, _run_tools),
        Target("configurations", good_input.model, _run_configurations),
        Target("annotations", good_input.model, _run_annotations),
        Target("sources", good_input.sources, _run_sources),
        Target("crafted", _model_and_sources, _run_crafted),
        Target("pictures", good_input.model, _run_pictures),
        Target("models", good_input.model, _run_models),
        Target("adapters", good_input.adapter, _run_adapters),
        Target("imports", good_input.model, _run_imports),
        Target("checkpoints", good_input.run, _run_checkpoints),
    )
}
