"""Both modules of Qwen3-VL against plain `transformers`: rows and losses, every gradient, in several layouts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen3VLForConditionalGeneration

from megatron_hetero.layout.names import ROWS
from megatron_hetero.models.items.pictures import ImageSize
from megatron_hetero.models.layers.recompute import How
from tests.support.folders import ModelChoice, write_model
from tests.support.oracle import stored_name
from tests.support.pool import Pools
from tests.support.ranks import on_ranks
from tests.support.shapes import shapes_of_folder
from tests.support.stages import Case
from tests.unit.models import qwen3_vl_stages

CHOICE = ModelChoice(
    family="qwen3_vl",
    vision_layers=4,
    vision_head_dim=12,
    text_layers=4,
    text_hidden=64,
    head_dim=24,
    deepstack=(0, 1, 2),
    seed=20,
)
CHOICES = {"untied": CHOICE, "tied": replace(CHOICE, tied=True, deepstack=(1, 2), kv_heads=1, seed=21)}
SIZES: tuple[ImageSize, ...] = (
    ImageSize(1, 4, 6),
    ImageSize(1, 2, 2),
    ImageSize(1, 10, 2),
    ImageSize(2, 2, 4),
    ImageSize(1, 2, 2),
)
WHOLE = {"sequence_parallel": False}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write_model(tmp_path_factory.mktemp(name) / "model", choice) for name, choice in CHOICES.items()}


def load(folder: Path) -> Any:
    model: Any = Qwen3VLForConditionalGeneration
    return model.from_pretrained(folder, dtype=torch.float32)


def gradients_of(model: torch.nn.Module, beginning: str) -> dict[str, Tensor]:
    grads = {stored_name(n): p.grad if p.grad is not None else torch.zeros_like(p) for n, p in model.named_parameters()}
    return {name: grad for name, grad in grads.items() if name.startswith("visual.") == (beginning == "visual.")}


def assert_near(found: dict[str, np.ndarray], expected: dict[str, Tensor]) -> None:
    everything = sum(float(t.double().norm() ** 2) for t in expected.values()) ** 0.5
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        difference = float(np.linalg.norm(found[name].astype(np.float64) - want.double().numpy()))
        assert difference <= 1e-4 * float(want.norm()) + 1e-7 * everything, name


def merged(found: list[dict[str, Any]], what: str) -> dict[str, dict[int, np.ndarray]]:
    """By output and number, over ranks."""
    rows: dict[str, dict[int, np.ndarray]] = {}
    for of_rank in found:
        for name, (numbers, values) in of_rank[what].items():
            rows.setdefault(name, {}).update({int(i): row for i, row in zip(numbers, values, strict=True)})
    return rows


# ------------------------------------------------------------------------------------------------ vision


def vision_by_transformers(folder: Path, sizes: tuple[ImageSize, ...]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model, shape = load(folder), shapes_of_folder(folder).encoders["vision"]
    given = model.model.visual(qwen3_vl_stages.pixels_of(shape, sizes), grid_thw=torch.tensor(sizes))
    rows = {ROWS: given.pooler_output} | {f"deepstack.{i}": r for i, r in enumerate(given.deepstack_features)}
    numbers = np.arange(len(given.pooler_output))
    torch.stack(
        [qwen3_vl_stages.weighted(name, of_output, numbers) for name, of_output in rows.items()]
    ).sum().backward()
    return {name: of_output.detach() for name, of_output in rows.items()}, gradients_of(model, "visual.")


@pytest.mark.parametrize(
    "model, layout, ranks, more",
    [
        ("untied", "dp:1", 1, {}),
        ("tied", "dp:1", 1, {"recompute": "full", "split": (2, 2)}),
        ("untied", "dp:1", 1, {"split": (1, 1, 1, 1)}),
        ("untied", "tp:2", 2, {"split": (1, 3)}),
        ("tied", "tp:2", 2, WHOLE),
        ("tied", "sp:2", 2, {"split": (3, 1)}),
        ("untied", "cp:2", 2, {"recompute": "full"}),
    ],
)
def test_vision_is_that_of_transformers(
    model: str, layout: str, ranks: int, more: dict[str, Any], models: dict[str, Path], pools: Pools
) -> None:
    expected, gradients = vision_by_transformers(models[model], SIZES)
    found = pools(ranks).run(qwen3_vl_stages.vision, Case(models[model], {"vision": layout}, **more), SIZES)
    rows = merged(found, "rows")
    assert rows.keys() == expected.keys()
    for name, want in expected.items():
        np.testing.assert_allclose(np.stack([rows[name][i] for i in range(len(want))]), want, rtol=1e-4, atol=1e-5)
    assert_near(found[0]["gradients"], gradients)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_mergers_train_alone(recompute: How, models: dict[str, Path], pools: Pools) -> None:
    _, gradients = vision_by_transformers(models["untied"], SIZES)
    case = Case(models["untied"], {"vision": "tp:2"}, split=(2, 2), freeze=("vision",), recompute=recompute)
    found = pools(2).run(qwen3_vl_stages.vision, case, SIZES)[0]["gradients"]
    trained = {name: grad for name, grad in gradients.items() if "merger" in name}
    assert len(trained) == 4 * 6
    assert_near({name: found[name] for name in trained}, trained)
    assert not any(found[name].any() for name in gradients.keys() - trained.keys())


# -------------------------------------------------------------------------------------------------- text


def text_by_transformers(folder: Path, outputs: tuple[str, ...]) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    model, shape = load(folder), shapes_of_folder(folder).text
    pack = qwen3_vl_stages.Pack.of(shape.vocab, shape.hidden, outputs)
    rows = {name: of_output.clone().requires_grad_() for name, of_output in pack.rows.items()}
    language: Any = model.model.language_model
    losses, start = [], 0
    for length in pack.lengths:
        tokens, places = slice(start, start + length), pack.places[pack.places < length] if start == 0 else []
        embedded = language.embed_tokens(pack.tokens[tokens])
        mask = torch.zeros(length, dtype=torch.bool)
        mask[places] = True
        if len(places):
            embedded = embedded.masked_scatter(mask[:, None], rows[ROWS])
        deeper = [rows[name] for name in outputs if name != ROWS]
        given = {"visual_pos_masks": mask[None], "deepstack_visual_embeds": deeper} if len(places) else {}
        hidden = language(inputs_embeds=embedded[None], position_ids=pack.positions[:, None, tokens], **given)
        logits = model.lm_head(hidden.last_hidden_state)[0]
        losses.append(torch.nn.functional.cross_entropy(logits, pack.labels[tokens], reduction="sum"))
        start += length
    loss = torch.stack(losses).sum()
    loss.backward()
    grads: dict[str, Any] = {name: of_output.grad for name, of_output in rows.items()}
    return float(loss.detach()), grads, gradients_of(model, "model.")


@pytest.mark.parametrize("outputs", [(ROWS,), (ROWS, "deepstack.0", "deepstack.1", "deepstack.2")], ids=len)
@pytest.mark.parametrize(
    "model, layout, ranks, more",
    [
        ("untied", "dp:1", 1, {}),
        ("tied", "dp:1", 1, {"recompute": "full"}),
        ("tied", "dp:1", 1, {"split": (1, 1, 2)}),
        ("untied", "tp:2", 2, {"split": (2, 2), "recompute": "full"}),
        ("tied", "tp:2", 2, WHOLE),
        ("untied", "cp:2", 2, {}),
        ("tied", "sp:2", 2, {}),
    ],
)
def test_text_is_that_of_transformers(
    model: str, layout: str, ranks: int, more: dict[str, Any], outputs: tuple[str, ...],
    models: dict[str, Path], pools: Pools,
) -> None:  # fmt: skip
    if model == "tied" and more.get("split"):
        model = "untied"  # A tied head on another stage is a copy, which its trainer keeps equal.
    loss, rows, gradients = text_by_transformers(models[model], outputs)
    found = pools(ranks).run(qwen3_vl_stages.text, Case(models[model], {"text": layout}, **more), outputs)
    assert all(of_rank["loss"] == pytest.approx(loss, rel=1e-5) for of_rank in found)
    assert_near(found[0]["gradients"], gradients)
    got = merged(found, "rows")
    assert got.keys() == rows.keys()
    for name, want in rows.items():
        np.testing.assert_allclose(np.stack([got[name][i] for i in range(len(want))]), want, rtol=1e-3, atol=1e-5)


def test_recomputation_changes_no_bit(models: dict[str, Path], pools: Pools) -> None:
    outputs = (ROWS, "deepstack.0", "deepstack.1", "deepstack.2")
    for job, module, given in ((qwen3_vl_stages.vision, "vision", SIZES), (qwen3_vl_stages.text, "text", outputs)):
        case = Case(models["untied"], {module: "tp:2"})
        kept, again = (pools(2).run(job, replace(case, recompute=mode), given) for mode in ("none", "full"))
        for name, gradient in kept[0]["gradients"].items():
            np.testing.assert_array_equal(again[0]["gradients"][name], gradient, name)


@pytest.mark.parametrize("more", [{}, WHOLE], ids=["sharded", "whole"])
@on_ranks(2)
def test_norms_of_heads_are_marked_in_any_activations(more: dict[str, Any], models: dict[str, Path]) -> None:
    """Their gradients are parts that tp ranks sum; those of other norms are where activations are split."""
    parameters = qwen3_vl_stages.AllStagesHere(Case(models["untied"], {"text": "tp:2"}, **more)).module.parameters
    found = {name: bool(getattr(p, "sequence_parallel", False)) for name, p in parameters.items()}
    of_heads = {name for name in found if "q_layernorm" in name or "k_layernorm" in name}
    assert len(of_heads) == 8 and all(found[name] for name in of_heads)
    others = {name for name in found if "norm" in name} - of_heads
    assert all(found[name] == (not more) for name in others)
