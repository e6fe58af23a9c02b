"""What trains: parts and patterns over stored tensors, and messages for those that cannot be."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

import pytest

from megatron_hetero.base.errors import UserError
from megatron_hetero.models.frozen import Frozen
from megatron_hetero.models.layers.parts import FORWARD, Passes, Tokens
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.models.weights import stored_shapes
from tests.unit.models.test_stages import shapes_of

SHAPES = shapes_of(12, tied=False)
TWO = ModelShapes({**SHAPES.encoders, "detail": shapes_of(1, tied=False).encoders["vision"]}, SHAPES.text)
STORED = frozenset(stored_shapes(TWO))


def frozen(*freeze: str, train: tuple[str, ...] = ()) -> Frozen:
    return Frozen.of(TWO, freeze, train)


def test_parts_are_all_of_their_tensors() -> None:
    found = frozen("vision", "detail_projector")
    assert found.subsets == {"vision", "detail_projector"}
    assert found.shares == {"vision": 0, "projector": 1, "text": 1, "detail": 1, "detail_projector": 0}
    assert {n for n in STORED if n.startswith(("visual.", "detail.visual.merger."))} - found.tensors == {
        n for n in STORED if n.startswith("visual.merger.")
    }
    assert frozen().tensors == frozenset() and frozen().subsets == frozenset()
    assert frozen("vision", "projector", "text").subsets == {"vision", "projector", "text"}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("model.layers.*.mlp.*", r"model\.layers\.\d+\.mlp\..*"),
        ("model.language_model.layers.*.mlp.*", r"model\.layers\.\d+\.mlp\..*"),  # As newer folders nest them.
        ("model.visual.blocks.[0-9].*", r"visual\.blocks\.\d\..*"),
        ("*norm*", r".*norm.*"),
        ("lm_head.weight", r"lm_head\.weight"),
        ("detail.visual.*", r"detail\.visual\..*"),
    ],
)
def test_patterns_are_of_stored_names(pattern: str, expected: str) -> None:
    names = {name for name in STORED if re.fullmatch(expected, name)}
    assert names and frozen(pattern).tensors == names
    assert frozen(train=(pattern,)).tensors == STORED - names
    assert frozen("text", pattern).tensors == frozen("text").tensors | names


@pytest.mark.parametrize(
    "pattern, module", [("*language_model*", "model."), ("*.visual.*", "*visual."), ("model.v*", "visual.")]
)
def test_patterns_of_nested_names(pattern: str, module: str) -> None:
    """They match as in folders that nest the model's modules."""
    assert frozen(pattern).tensors == {name for name in STORED if fnmatchcase(name, module + "*")}


@pytest.mark.parametrize("pattern", ["model.*", "model.[lv]*"])
def test_patterns_that_depend_on_the_folder_are_refused(pattern: str) -> None:
    message = rf"`{re.escape(pattern)}` matches \d+ tensors where folders have .* and \d+ where they nest them"
    with pytest.raises(UserError, match=message):
        frozen(pattern)


@pytest.mark.parametrize(
    "train, first",
    [(("text",), 0), (("*norm*",), 0), (("model.layers.7.*", "lm_head.weight"), 7), (("lm_head.weight",), 12)],
)
def test_the_first_layer_that_gradients_go_back_to(train: tuple[str, ...], first: int) -> None:
    assert frozen(train=train).first_layer(TWO) == first


def test_layers_before_the_first_that_trains_have_no_gradients() -> None:
    text, tokens = TWO.text.architecture, Tokens([9])
    every, from_seven, forward = (
        text.operations(tokens, passes=passes, first=first)
        for passes, first in ((Passes(), 0), (Passes(), 7), (Passes(False, False), 0))
    )
    of_layer = {layer.operations(tokens).of(Passes()) - layer.operations(tokens).of(FORWARD) for layer in text.layers}
    assert every - from_seven == 7 * of_layer.pop() and not of_layer and from_seven > forward


def test_train_selects_and_freeze_excepts() -> None:
    found = frozen("model.layers.0.*", train=("text", "projector"))
    assert found.subsets == {"vision", "detail", "detail_projector"}
    assert not any(name.startswith("model.layers.0.") for name in STORED - found.tensors)
    assert found.tensors == frozen("vision", "detail", "detail_projector", "model.layers.0.*").tensors


def test_parts_that_patterns_freeze_are_frozen() -> None:
    found = frozen("detail.visual.*", "model.norm.weight")
    assert found.subsets == {"detail", "detail_projector"}
    assert found.trains("text") and found.shares["text"] == 1  # A norm multiplies nothing.


def test_operations_of_half_the_layers() -> None:
    """The head and the layers count; the embedding is looked up. A layer takes 4 operations instead of 6."""
    found = frozen("model.layers.[0-5].*", "model.embed_tokens.weight")
    t, tokens = TWO.text, Tokens([9])
    layers = sum(layer.operations(tokens).linear for layer in t.architecture.layers) // (2 * 9)
    assert found.shares["text"] == pytest.approx(1 - layers / 2 / (layers + t.hidden * t.vocab))
    none, half, whole = (t.architecture.operations(tokens, passes=Passes(True, True, x)) for x in (0, 0.5, 1))
    assert half - none == whole - half == 2 * 9 * layers // 2
    assert found.passes("text", inputs=True) == Passes(True, True, found.shares["text"])


@pytest.mark.parametrize(
    ("freeze", "train", "part"),
    [
        (("model.layer.*.mlp.*",), (), "found `model.layer.*.mlp.*` (did you mean `model.layers.*.mlp."),
        (("audio.*",), (), "expected a pattern of tensors: detail.visual.blocks.*.attn.proj.bias, "),
        ((), ("modle.*",), "model.train (--model.train): found `modle.*`"),
        (("*",), (), "freezes all of vision, projector, detail, detail_projector, text"),
        (("text",), ("text",), "model.train (--model.train): freezes all"),
    ],
)
def test_what_cannot_be_is_an_error(freeze: tuple[str, ...], train: tuple[str, ...], part: str) -> None:
    with pytest.raises(UserError) as error:
        Frozen.of(TWO, freeze, train)
    assert part in str(error.value) and len(str(error.value)) < 600


@pytest.mark.parametrize(
    ("freeze", "train"),
    [
        (("model.layers.*.self_attn.q_proj.weight",), ()),
        (("model.layers.3.mlp.gate_proj.weight", "vision"), ()),
        (("model.layers.[0-3].mlp.up_proj.*",), ()),
        (("model.*.q_proj.*", "model.layers.*.gate_proj.*"), ()),
        ((), ("*.q_proj.*",)),
        (("*.q_proj.bias",), ("text",)),
    ],
)
def test_a_part_of_a_parameter_is_refused(freeze: tuple[str, ...], train: tuple[str, ...]) -> None:
    with pytest.raises(
        UserError, match=r"found .*_proj.* frozen without .*_proj.*expected all of them or none"
    ) as error:
        Frozen.of(TWO, freeze, train)
    advised = tuple(str(error.value).rpartition("for all layers ")[2].removesuffix(".").split())
    is_listed = str(error.value).startswith("model.freeze")
    Frozen.of(TWO, (*freeze, *advised) if is_listed else freeze, train if is_listed else (*train, *advised))
