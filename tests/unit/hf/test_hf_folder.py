"""Reading and writing `transformers` folders: strictly, a slice at a time, and all or nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_hetero.base.errors import UserError
from megatron_hetero.hf.model_files import INDEX, SINGLE
from megatron_hetero.hf.stored_weights import StoredWeights
from megatron_hetero.hf.weight_map import TensorSlice
from megatron_hetero.models.families.common import canonical_name
from megatron_hetero.models.families.qwen2_5_vl.shapes import TextShape
from megatron_hetero.models.weights import stored_shapes
from megatron_hetero.step.family_module import load_parameters
from tests.support.folders import ModelChoice, write_model
from tests.support.shapes import shapes_of_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untied model folder. Tests copy it before they change it."""
    return write_model(tmp_path_factory.mktemp("untied") / "model", ModelChoice(text_layers=1, vision_layers=2))


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(
        tmp_path_factory.mktemp("tied") / "model", ModelChoice(text_layers=1, vision_layers=1, tied=True)
    )


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "copy"))


def open_checked(folder: Path) -> StoredWeights:
    weights = StoredWeights.open(folder, canonical_name)
    weights.require(stored_shapes(shapes_of_folder(folder)))
    return weights


def change(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / SINGLE)
    edit(tensors)
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})


def shard(folder: Path, files: int = 3) -> dict[str, str]:
    """Split the single file of a folder; returns the index's weight map."""
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    where = {name: f"model-{i % files + 1:05d}-of-{files:05d}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(where.values()):
        save_file({n: t for n, t in tensors.items() if where[n] == file}, folder / file, metadata={"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return where


# ---------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("files", [0, 3], ids=["one file", "three files"])
def test_slices_are_those_of_the_whole_tensors(copy: Path, files: int) -> None:
    whole = {canonical_name(name): tensor for name, tensor in load_file(copy / SINGLE).items()}
    if files:
        shard(copy, files)
    weights = open_checked(copy)
    assert weights.shapes == {name: tuple(tensor.shape) for name, tensor in whole.items()}
    for name, tensor in whole.items():
        rows = (len(tensor) // 3, len(tensor) // 2)
        matrix = tensor.flatten(1) if tensor.dim() > 1 else tensor
        assert torch.equal(weights.read(TensorSlice(name, rows)), matrix[slice(*rows)])
        assert len(weights.read(TensorSlice(name, (1, 1)))) == 0
        drawn = replace(weights, fresh={name: tensor.float()})
        assert torch.equal(drawn.read(TensorSlice(name, rows)), matrix[slice(*rows)].float())
        if tensor.dim() == 2:
            columns = (tensor.shape[1] // 4, tensor.shape[1])
            assert torch.equal(
                weights.read(TensorSlice(name, rows, columns=columns)), tensor[slice(*rows), slice(*columns)]
            )


def refused(folder: Path, match: str) -> None:
    with pytest.raises(UserError, match=match) as error:
        open_checked(folder)
    assert str(folder) in str(error.value)


def test_missing_weights(copy: Path) -> None:
    (copy / SINGLE).rename(copy / "pytorch_model.bin")
    refused(copy, r"found no safetensors weights, expected model\.safetensors or .*pickles")
    refused(copy / "nowhere", "found no safetensors weights|found no .*nowhere")


@pytest.mark.parametrize("keep", [0, 5, 100, -10])
def test_a_truncated_file(copy: Path, keep: int) -> None:
    content = (copy / SINGLE).read_bytes()
    (copy / SINGLE).write_bytes(content[:keep])
    refused(copy, r"model\.safetensors: found a file that is truncated")


def test_a_missing_shard(copy: Path) -> None:
    file = next(iter(shard(copy).values()))
    (copy / file).unlink()
    refused(copy, rf"{file}: found no such file, .*{INDEX}")


def test_a_truncated_shard(copy: Path) -> None:
    file = copy / next(iter(shard(copy).values()))
    file.write_bytes(file.read_bytes()[:-4])
    refused(copy, rf"{file.name}: found a file that is truncated")


def test_faults_are_counted_and_listed(copy: Path) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("norm1.weight")]:
            del tensors[name]
        tensors["visual.blocks.7.norm1.weight"] = torch.zeros(3)
        head = tensors["lm_head.weight"]
        tensors["lm_head.weight"] = head[:-1].clone()

    change(copy, edit)
    rows, width = stored_shapes(shapes_of_folder(copy))["lm_head.weight"]
    refused(
        copy,
        r"\(2 missing: visual\.blocks\.0\.norm1\.weight, visual\.blocks\.1\.norm1\.weight; "
        r"1 unexpected: visual\.blocks\.7\.norm1\.weight; "
        rf"1 of another shape: lm_head\.weight is \({rows - 1}, {width}\), not \({rows}, {width}\)\)",
    )


def test_long_lists_are_cut(copy: Path) -> None:
    change(copy, lambda tensors: [tensors.pop(name) for name in list(tensors) if "blocks" in name])
    refused(copy, r"24 missing: (\S+, ){4}\S+ and 19 more")


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", "..", "a" * 300 + ".safetensors", "\0", 3]
)
def test_an_index_that_leaves_the_folder(copy: Path, name: object) -> None:
    shard(copy)
    index = json.loads((copy / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = name
    (copy / INDEX).write_text(json.dumps(index))
    refused(copy, r"index\.json: weight_map: found .*, expected a file of this folder")


@pytest.mark.parametrize(
    "content", [b"{", b"[]", b"{}", b'{"weight_map": [1]}', b'{"weight_map": {"a": 1}}', b"\xff\xfe{"]
)
def test_a_broken_index(copy: Path, content: bytes) -> None:
    (copy / INDEX).write_bytes(content)
    refused(copy, r"index\.json(:1|: weight_map)?: found .*(Download it again|Restore the file)")


def test_an_index_that_names_a_tensor_that_is_not_there(copy: Path) -> None:
    file = copy / shard(copy)["lm_head.weight"]
    tensors = load_file(file)
    del tensors["lm_head.weight"]
    save_file(tensors, file)
    refused(copy, r"weights do not match config\.json \(1 missing: lm_head\.weight")


def test_a_single_file_beside_shards(copy: Path) -> None:
    """Of the model before, for instance: transformers reads the single file. Either alone will do."""
    single = (copy / SINGLE).read_bytes()
    shards = set(shard(copy).values())
    (copy / SINGLE).write_bytes(single)
    refused(copy, rf"found {SINGLE} beside {INDEX}, which names {min(shards)}, .*Remove {INDEX} if")
    index = (copy / INDEX).read_bytes()
    (copy / INDEX).unlink()
    assert open_checked(copy).files == (copy / SINGLE,)
    (copy / INDEX).write_bytes(index)
    (copy / SINGLE).unlink()
    assert {path.name for path in open_checked(copy).files} == shards


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"])
@pytest.mark.parametrize("weights", ["one file", "shards", "none"])
def test_an_adapter_beside_weights(copy: Path, name: str, weights: str) -> None:
    """transformers applies it where PEFT is installed."""
    beside = {"one file": SINGLE, "shards": INDEX, "none": "no weights of a model"}[weights]
    if weights != "one file":
        shard(copy)
    if weights == "none":
        (copy / INDEX).unlink()
    (copy / name).write_text("{}")
    refused(copy, rf"found an adapter \({name}\) beside {beside}, ")


def test_what_published_folders_have_beside_their_weights(copy: Path) -> None:
    """An index of one file, files of other frameworks, variants and formats, adapters in folders of their own, and
    shards that no index names: transformers reads the same files.
    """
    names = sorted(load_file(copy / SINGLE))
    (copy / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, SINGLE)}))
    (copy / "vision-lora").mkdir()
    for name in (
        *("pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.safetensors", "model.fp16.safetensors"),
        *("model.safetensors.index.fp16.json", "model-00001-of-00002.safetensors", "tf_model.h5", "model.gguf"),
        *("vision-lora/adapter_config.json", "vision-lora/adapter_model.safetensors"),
    ):
        (copy / name).write_bytes(b"{}")
    assert open_checked(copy).files == (copy / SINGLE,)
    where = set(shard(copy).values())
    assert {path.name for path in open_checked(copy).files} == where


def test_a_tensor_stored_twice(copy: Path) -> None:
    change(copy, lambda tensors: tensors.update({"model.visual.merger.ln_q.weight": torch.zeros(1)}))
    if "visual.merger.ln_q.weight" not in load_file(copy / SINGLE):
        change(copy, lambda tensors: tensors.update({"visual.merger.ln_q.weight": torch.zeros(1)}))
    refused(copy, r"found visual\.merger\.ln_q\.weight a second time")


def test_a_tensor_in_two_shards(copy: Path) -> None:
    where = shard(copy)
    name = "lm_head.weight"
    other = copy / next(file for file in where.values() if file != where[name])
    save_file(load_file(other) | {name: torch.zeros(2)}, other)
    refused(copy, r"found lm_head\.weight a second time")


# ------------------------------------------------------------------------------------------ tied folders


def load_embedding(folder: Path, rows: tuple[int, int]) -> None:
    """What a rank that holds these rows of the embedding does."""
    weights = StoredWeights.open(folder, canonical_name)
    name = "model.embed_tokens.weight"
    weights.require(stored_shapes(shapes_of_folder(folder)), frozenset({"lm_head.weight"}))
    layer = torch.nn.Linear(weights.shapes[name][1], rows[1] - rows[0], bias=False)
    load_parameters(layer, {"weight": (TensorSlice(name, rows),)}, weights, None, {"lm_head.weight": name})


def store_head(folder: Path, edit: Callable[[Tensor], Tensor]) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        name = next(name for name in tensors if name.endswith("embed_tokens.weight"))
        tensors["lm_head.weight"] = edit(tensors[name].clone())

    change(folder, add)


def test_a_tied_folder_may_store_its_head_again(tied: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tied, tmp_path / "copy"))
    load_embedding(folder, (0, 10))
    store_head(folder, lambda embedding: embedding)
    load_embedding(folder, (0, 10))


def test_a_tied_folder_with_another_head_is_refused(tied: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tied, tmp_path / "copy"))

    def change_row_12(embedding: Tensor) -> Tensor:
        embedding[12, 3] += 1e-3
        return embedding

    store_head(folder, change_row_12)
    load_embedding(folder, (0, 10))  # this rank reads other rows; the one that holds row 12 refuses
    message = r"found a lm_head\.weight .*model\.embed_tokens\.weight.*tie_word_embeddings"
    with pytest.raises(UserError, match=message):
        load_embedding(folder, (10, 20))
    store_head(folder, lambda embedding: embedding[:-1])
    with pytest.raises(UserError, match=message):
        load_embedding(folder, (0, 10))


def test_shapes_of_untied_and_tied(model: Path, tied: Path) -> None:
    untied_shapes, tied_shapes = (shapes_of_folder(folder) for folder in (model, tied))
    assert not untied_shapes.text.tied and tied_shapes.text.tied
    assert isinstance(untied_shapes.text, TextShape)
    same = replace(untied_shapes, text=replace(untied_shapes.text, tied=True))
    assert stored_shapes(untied_shapes).keys() - stored_shapes(same).keys() == {"lm_head.weight"}
