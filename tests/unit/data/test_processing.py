"""Tokens, supervision, positions and patches, against `transformers` where it has the same."""

from __future__ import annotations

import copy
import json
import pickle
import re
import shutil
import subprocess
import sys
import unicodedata
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

from examples.demo.model import chat_template as demo_template
from megatron_hetero.base.errors import UserError
from megatron_hetero.data import chat
from megatron_hetero.data.packing import TokenizedSample
from megatron_hetero.data.processor import Processor
from megatron_hetero.data.records import Record
from megatron_hetero.data.turns import Turn
from megatron_hetero.data.validation import IMAGES
from megatron_hetero.models.items.pictures import ImageSize, PixelLimits, rope_positions
from megatron_hetero.models.items.types import RowBlock
from tests.support.chat_templates import THINKING
from tests.support.items import IMAGE, whole
from tests.support.sizes import grids

MakeRecord = Callable[..., Record]


def supervised_texts(processor: Processor, sample: TokenizedSample) -> list[str]:
    """The decoded supervised runs."""
    texts, position = [], 0
    for supervised, run in groupby(sample.supervised.tolist()):
        size = sum(1 for _ in run)
        if supervised:
            texts.append(processor.tokenizer.decode(sample.input_ids[position : position + size]))
        position += size
    return texts


def reference_ids(processor: Processor, record: Record, sizes: np.ndarray) -> list[int]:
    """What `transformers` makes of the record: the whole text rendered, image tokens repeated, tokenized at once."""
    text = processor.tokenizer.apply_chat_template(chat.to_messages(record), tokenize=False)
    stretches = text.split("<|image_pad|>")
    for k, grid in enumerate(sizes):
        stretches[k] += "<|image_pad|>" * (int(grid.prod()) // 4)
    return processor.tokenizer("".join(stretches), add_special_tokens=False)["input_ids"]


CONVERSATIONS = {
    "one turn": (("What?", "A disc."), None),
    "several turns": (("What?", "A disc.", "Which colour?", " It is red. ", "Sure?", "assistant\nYes"), None),
    "system": (("What?", "A disc."), "Be brief."),
    "unicode": (("日本語?", "naïve café 🎨👩‍👩‍👧 — 数"), "🎨"),
    "empty answer": (("What?", "", "And?", "x"), ""),
    "blank answer": (("What?", " ", "And?", "\t", "", "y"), None),
    "line breaks at the end": (("What?\n", "A disc.\n\n", "\nWhat?", "x\r\n"), None),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_supervised_are_the_answers_and_their_ends(processor: Processor, make_record: MakeRecord, name: str) -> None:
    texts, system = CONVERSATIONS[name]
    record = make_record(*texts, system=system)
    sample = processor.tokenize(record)
    assert supervised_texts(processor, sample) == [answer + "<|im_end|>" for answer in texts[1::2]]
    if "\t" not in texts:  # a tab before the line break of the prompt is one token with it
        assert sample.input_ids.tolist() == reference_ids(processor, record, grids(sample))


@settings(max_examples=100)
@given(texts=st.lists(st.text(max_size=12), min_size=1, max_size=3), system=st.none() | st.text(max_size=8))
def test_supervision_is_exact_for_any_text(
    processor: Processor, make_record: MakeRecord, texts: list[str], system: str | None
) -> None:
    texts = [unicodedata.normalize("NFC", text.replace("<image>", "")) for text in texts]
    record = make_record(*[text for answer in texts for text in ("What?", answer)], system=system)
    sample = processor.tokenize(record)
    assert supervised_texts(processor, sample) == [answer + "<|im_end|>" for answer in texts]
    if not any(answer[:1].isspace() for answer in texts):
        assert sample.input_ids.tolist() == reference_ids(processor, record, grids(sample))


def test_an_answer_that_begins_with_a_line_break_is_supervised_whole(
    processor: Processor, make_record: MakeRecord
) -> None:
    sample = processor.tokenize(make_record("What?", "\n\nA disc."))
    assert supervised_texts(processor, sample) == ["\n\nA disc.<|im_end|>"]


def test_images_become_tokens(processor: Processor, make_record: MakeRecord, pictures: Path) -> None:
    names = ["200x140.png", "33x90.png", "100x40.png"]
    record = make_record(
        "<image>\nFirst?", "One.", "And <image><image>?", "Two.", images=names, folder=pictures, system="Look."
    )
    sample = processor.tokenize(record)
    assert sample.input_ids.dtype == sample.position_ids.dtype == sample.rows.dtype == np.int64
    assert sample.supervised.dtype == bool
    assert sample.input_ids.tolist() == reference_ids(processor, record, grids(sample))
    assert supervised_texts(processor, sample) == ["One.<|im_end|>", "Two.<|im_end|>"]
    assert len(sample.row_positions) == grids(sample).prod(axis=1).sum() // 4
    assert set(sample.input_ids[sample.row_positions]) == {processor.readers[IMAGE].token_id}


def test_positions_equal_transformers(processor: Processor, make_record: MakeRecord, pictures: Path) -> None:
    model = _rope_model()
    for count in range(4):
        names = ["640x480.png", "33x90.png", "100x40.png"][:count]
        record = make_record("a <image> b " * count + "What?", "One.", images=names, folder=pictures)
        sample = processor.tokenize(record)
        is_image = sample.input_ids == processor.readers[IMAGE].token_id
        expected = _reference_positions(model, is_image, grids(sample))
        np.testing.assert_array_equal(sample.position_ids, expected)


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(1, 6)), max_size=4),
    st.integers(0, 5),
)
def test_positions_equal_transformers_for_any_grids(images: list[tuple[int, int, int]], tail: int) -> None:
    kinds: list[bool] = []
    starts = []
    for text, height, width in images:
        kinds += [False] * text
        starts.append(len(kinds))
        kinds += [True] * (height * width)
    kinds += [False] * (tail or not images)
    sizes = np.array([(1, 2 * h, 2 * w) for _, h, w in images], dtype=np.int64).reshape(-1, 3)
    places = [np.indices((1, h, w)).reshape(3, -1) for _, h, w in images]
    positions = rope_positions(len(kinds), np.array(starts, dtype=np.int64), [RowBlock(each) for each in places])
    np.testing.assert_array_equal(positions, _reference_positions(_rope_model(), np.array(kinds), sizes))


def _rope_model() -> Any:
    """`get_rope_index` needs the configuration alone; building the weights would take seconds."""
    from transformers import Qwen2_5_VLConfig

    class Stub:
        config = Qwen2_5_VLConfig()
        get_rope_index = Qwen2_5_VLModel.get_rope_index
        get_vision_position_ids = Qwen2_5_VLModel.get_vision_position_ids

    return Stub()


def _reference_positions(model: Any, is_image: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    kinds = torch.from_numpy(is_image.astype(np.int64))[None]
    positions, _ = model.get_rope_index(
        input_ids=torch.zeros_like(kinds), mm_token_type_ids=kinds, image_grid_thw=torch.from_numpy(sizes)
    )
    return positions[:, 0].numpy()


def test_patches_equal_transformers(processor: Processor, make_record: MakeRecord, pictures: Path, model_folder: Path):
    reference = AutoImageProcessor.from_pretrained(model_folder, backend="pil")
    for path in sorted(pictures.iterdir()):
        record = make_record("<image>", "x", images=[path.name], folder=pictures)
        sample = processor.tokenize(record)
        [grid] = grids(sample)
        patches = processor.patches(record, 0, whole(sample.sizes[0]))
        expected = reference(images=[Image.open(path).convert("RGB")], return_tensors="np")
        assert grid.tolist() == expected["image_grid_thw"][0].tolist()
        assert patches.dtype == np.float32 and patches.shape == (grid.prod(), 3 * 2 * 14 * 14)
        np.testing.assert_array_equal(patches, expected["pixel_values"])


def test_pixel_limits_override_the_folder(model_folder: Path, make_record: MakeRecord, pictures: Path) -> None:
    record = make_record("<image>", "x", images=["640x480.png"], folder=pictures)
    small = Processor.from_folder(model_folder, PixelLimits(None, 28 * 28 * 4))
    large = Processor.from_folder(model_folder, PixelLimits(28 * 28 * 500, 28 * 28 * 600))
    assert grids(small.tokenize(record)).prod() // 4 <= 4
    assert 500 <= grids(large.tokenize(record)).prod() // 4 <= 600
    for processor in (small, large):
        processor.patches(record, 0, whole(processor.tokenize(record).sizes[0]))


@pytest.mark.parametrize("limits", [(0, 100), (-1, None), (200, 100), (10**9, None)])
def test_bad_pixel_limits_are_named(model_folder: Path, limits: tuple[int, int | None]) -> None:
    with pytest.raises(UserError, match=r"data\.min_pixels and data\.max_pixels: found an area of"):
        Processor.from_folder(model_folder, PixelLimits(*limits))


def test_rotated_pictures_have_rotated_grids(processor: Processor, make_record: MakeRecord, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (280, 56)).save(tmp_path / "a.jpg", exif=exif)
    record = make_record("<image>", "x", images=["a.jpg"], folder=tmp_path)
    sample = processor.tokenize(record)
    assert sample.sizes == (ImageSize(1, 20, 4),)
    assert processor.patches(record, 0, whole(sample.sizes[0])).shape[0] == 80


@pytest.mark.parametrize("size", [{"min_pixels": 3136, "max_pixels": 9999}, None])
def test_older_processor_files_load_without_a_warning(model_folder: Path, tmp_path: Path, size: Any) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "older")
    options = json.loads((folder / "preprocessor_config.json").read_text())
    options |= {"min_pixels": 3136, "max_pixels": 9999} if size is None else {}
    options["size"] = size
    (folder / "preprocessor_config.json").write_text(json.dumps(options))
    (folder / "chat_template.json").write_text(
        json.dumps({"chat_template": (folder / "chat_template.jinja").read_text()})
    )
    (folder / "chat_template.jinja").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        processor = Processor.from_folder(folder)
    reader: Any = processor.readers[IMAGE]
    assert dict(reader.image_processor.size) == {"shortest_edge": 3136, "longest_edge": 9999}
    assert processor.tokenizer.chat_template


def test_the_package_does_not_import_torch() -> None:
    code = "import sys, megatron_hetero.data; raise SystemExit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_loading_says_nothing(model_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Processor.from_folder(model_folder)
    assert capfd.readouterr() == ("", "")


def test_a_processor_survives_pickling(processor: Processor, make_record: MakeRecord) -> None:
    record = make_record("What?", "A disc.")
    copy = pickle.loads(pickle.dumps(processor))
    assert copy.tokenize(record).input_ids.tolist() == processor.tokenize(record).input_ids.tolist()


@pytest.mark.parametrize("token", ["<|im_end|>", "<|image_pad|>", "<|endoftext|>", "<|vision_start|>", "<|video_pad|>"])
@pytest.mark.parametrize("turn", range(3))
def test_special_tokens_in_the_text_are_refused(
    processor: Processor, make_record: MakeRecord, token: str, turn: int
) -> None:
    texts = ["Be brief.", "What?", "A disc."]
    texts[turn] += f" {token}!"
    with pytest.raises(UserError, match=rf"^train\.jsonl:1: turn {turn + 1}: special token {re.escape(token)}"):
        processor.tokenize(make_record(*texts[1:], system=texts[0]))


def test_marks_of_boxes_are_content(processor: Processor, make_record: MakeRecord) -> None:
    sample = processor.tokenize(make_record("Where?", "<|box_start|>(1,2)<|box_end|>"))
    assert supervised_texts(processor, sample) == ["<|box_start|>(1,2)<|box_end|><|im_end|>"]


def test_bad_pictures_name_record_and_file(processor: Processor, make_record: MakeRecord, tmp_path: Path) -> None:
    record = make_record("<image>", "x", images=["a.png"], folder=tmp_path)
    with pytest.raises(UserError, match=r"^train\.jsonl:1: image .*a\.png: cannot be read \(no such file"):
        processor.tokenize(record)
    Image.new("RGB", (3000, 10)).save(tmp_path / "a.png")
    with pytest.raises(
        UserError, match=r"^train\.jsonl:1: image .*a\.png: found a picture of 3000 x 10 .*Crop or split"
    ):
        processor.tokenize(record)
    Image.new("RGB", (56, 56)).save(tmp_path / "a.png")
    [size] = processor.tokenize(record).sizes
    Image.new("RGB", (112, 56)).save(tmp_path / "a.png")
    with pytest.raises(UserError, match=r"a\.png: found a decoded picture of \[1, 4, 8\] .*expected \[1, 4, 4\]"):
        processor.patches(record, 0, whole(size))


TEMPLATES = {
    "{{ raise_exception('no system turn') }}": "fails (TemplateError: no system turn)",
    "{% for m in messages %}{{ m.role }}{% endfor %}": "does not render the text of turn 2",
    "{{ messages | length }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}": "its generation prompt",
    "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}": "0 tokens of images",
    "{% if %}": "fails (TemplateSyntaxError",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}": "fails (SecurityError",
    "{{ messages.append(messages[0]) }}": "fails (SecurityError",
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_unfit_chat_templates_are_named(
    processor: Processor, make_record: MakeRecord, pictures: Path, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor.tokenizer, "chat_template", template)
    record = make_record("<image>", "x", images=["56x56.png"], folder=pictures)
    with pytest.raises(UserError, match="^train.jsonl:1: chat template of model.hf_path") as caught:
        processor.tokenize(record)
    assert TEMPLATES[template] in str(caught.value)


PLAIN = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- generation %}CONTENT{% endgeneration %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
FITTING = {
    "published": None,
    "demo": demo_template("Be brief."),
    "marked": PLAIN.replace("CONTENT", "{{ m.content }}"),
    "trimmed": PLAIN.replace("CONTENT", "{{ m.content | trim }}"),
    "ending": PLAIN.replace("CONTENT", "{{ m.content }}{% if m.role == 'assistant' %}.{% endif %}"),
    "end of text": PLAIN.replace("CONTENT", "{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"),
    "thinking": THINKING,
}
UNFIT = {
    "escaped": (PLAIN.replace("CONTENT", "{{ m.content | tojson }}"), "does not render the text of turn 2"),
    "cut": (PLAIN.replace("CONTENT", "{{ m.content[:12] }}"), "does not render the text of turn 2"),
    "thoughtless": (PLAIN.replace("CONTENT", "{{ m.content.split('</think>')[-1] }}"), "does not render a thought"),
    "counting": (
        "{{ messages | length }}" + PLAIN.replace("CONTENT", "{{ m.content }}"),
        "turn 2 after its generation",
    ),
    "without an end": (PLAIN.replace("CONTENT", "{{ m.content }}").replace("<|im_end|>", ""), "the text of turn 2"),
    "without a prompt": (
        PLAIN.split("{%- if")[0].replace("CONTENT", "{{ m.content }}"),
        r"found <\|im_start\|> in what",
    ),
}
ROUNDS = """{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ ' ' ~ loop.index ~ '\\n' ~ m.content }}
{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant ' ~ (messages | length + 1) ~ '\\n' }}{% endif %}"""
WITHOUT_MARKS = """{% set names = {'system': '', 'user': 'USER: ', 'assistant': ' ASSISTANT: '} %}
{%- for m in messages %}{{ names[m.role] + m.content }}{% if m.role == 'assistant' %}<|im_end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %} ASSISTANT: {% endif %}"""
SAID = st.lists(st.sampled_from(["a", " ", "\n", "</think>", "<think>\n", "assistant\n", "é"]), min_size=1, max_size=3)


@settings(max_examples=30, deadline=None)
@pytest.mark.parametrize("name", FITTING)
@given(texts=st.lists(SAID.map("".join), min_size=1, max_size=4), system=st.none() | st.just("Look."))
def test_answers_are_where_prompts_end(
    processor: Processor, make_record: MakeRecord, name: str, texts: list[str], system: str | None
) -> None:
    tokenizer = copy.copy(processor.tokenizer)
    tokenizer.chat_template = FITTING[name] or tokenizer.chat_template
    assume(name != "thinking" or all(text.count("<think>") == text.count("</think>") for text in texts))
    record = make_record(*[text for answer in texts for text in (answer[::-1], answer)], system=system)
    messages, text = chat.to_messages(record), ""
    answers = iter(k for k, turn in enumerate(record.turns) if turn.role == "assistant")
    for run in chat.render(tokenizer, record):
        if run.supervised:
            k = next(answers)
            prompt = tokenizer.apply_chat_template(messages[:k], tokenize=False, add_generation_prompt=True)
            if not (name == "thinking" and k + 1 < len(messages)):
                assert text == prompt
            else:
                assert text == prompt.removesuffix("<think>\n")
            visible = record.turns[k].text.rpartition("</think>")[2].strip()
            assert visible in run.text and run.text.endswith("<|im_end|>") and run.text.count("<|im_end|>") == 1
            assert name in ("trimmed", "ending", "thinking") or run.text == record.turns[k].text + "<|im_end|>"
        text += run.text
    assert text == tokenizer.apply_chat_template(messages, tokenize=False) and next(answers, None) is None


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("name", [*FITTING, *UNFIT, "rounds", "without marks"])
@given(texts=st.lists(SAID.map("".join), min_size=1, max_size=6), system=st.none() | st.just("Look."))
def test_turns_by_themselves_are_those_of_whole_prompts(
    processor: Processor,
    make_record: MakeRecord,
    name: str,
    texts: list[str],
    system: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = copy.copy(processor.tokenizer)
    others = {"rounds": ROUNDS, "without marks": WITHOUT_MARKS} | {key: text for key, (text, _) in UNFIT.items()}
    tokenizer.chat_template = (FITTING | others)[name] or tokenizer.chat_template
    record = make_record(*[text for answer in texts for text in (answer[::-1], answer)], system=system)
    found = []
    for near in (2, 1000):
        monkeypatch.setattr(chat, "NEAR_TURNS", near)
        try:
            found.append(chat.render(tokenizer, record))
        except UserError as error:
            assert "does not render" in str(error) or "opens a thought" in str(error)
            found.append([])
    assert found[0] == found[1]


TOOL = {"type": "function", "function": {"name": "zoom", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "zoom", "arguments": {"box": [1, 2]}}}


def thoughtful(*answers: Turn) -> Record:
    turns = [turn for answer in answers for turn in (Turn("user", (IMAGES[0], "What?")), answer)]
    return Record("test", 0, "train.jsonl:1", tuple(turns))


def supervised_runs(tokenizer: Any, record: Record, **options: Any) -> list[str]:
    """Also checks that the runs joined are what the template renders of the whole record."""
    runs = chat.render(tokenizer, record, **options)
    full = tokenizer.apply_chat_template(chat.to_messages(record), tools=[*record.tools] or None, tokenize=False)
    assert "".join(run.text for run in runs) == full
    return [run.text for run in runs if run.supervised]


@pytest.fixture
def thinking(processor: Processor) -> Any:
    tokenizer = copy.copy(processor.tokenizer)
    tokenizer.chat_template = THINKING
    return tokenizer


def test_thoughts_are_part_of_the_last_answer(thinking: Any) -> None:
    given = [
        Turn("assistant", "<think>\nRound.\n</think>\n\nA disc."),
        Turn("assistant", "A disc.", further={"reasoning_content": "Round."}),
    ]
    for answer in given:
        runs = supervised_runs(thinking, thoughtful(answer, answer))
        assert runs == ["A disc.<|im_end|>", "Round.\n</think>\n\nA disc.<|im_end|>"]
        assert supervised_runs(thinking, thoughtful(answer, answer), last_only=True) == runs[1:]
        masked = answer._replace(supervised=False)
        assert supervised_runs(thinking, thoughtful(answer, masked)) == runs[:1]
        assert supervised_runs(thinking, thoughtful(answer, masked), last_only=True) == []
        assert supervised_runs(thinking, thoughtful(masked, masked)) == []
    # What would be generated: an answer without a thought ends the one that the prompt begins.
    assert supervised_runs(thinking, thoughtful(Turn("assistant", "A disc."))) == ["\n</think>\n\nA disc.<|im_end|>"]
    assert chat.drops_thoughts(thinking)


@pytest.mark.parametrize("rounds", [1, 2])
def test_calls_of_tools_are_answers(thinking: Any, rounds: int) -> None:
    calls = Turn("assistant", "", further={"tool_calls": [CALL, CALL], "reasoning_content": "Small."})
    turns = [Turn("user", (IMAGES[0], "What?")), calls, Turn("tool", "[3, 4]"), Turn("assistant", "A disc.")]
    record = Record("test", 0, "train.jsonl:1", tuple(turns * rounds), tools=(TOOL,))
    silent = calls._replace(further={"tool_calls": [CALL]})
    call = '<tool_call>\n{"name": "zoom", "arguments": {"box": [1, 2]}}\n</tool_call>'
    last = [f"Small.\n</think>\n\n{call}\n{call}<|im_end|>", "\n</think>\n\nA disc.<|im_end|>"]
    earlier = [f"{call}\n{call}<|im_end|>", "A disc.<|im_end|>"]
    assert supervised_runs(thinking, record) == [*earlier * (rounds - 1), *last]
    record = replace(record, turns=(turns[0], silent, turns[2], calls, *turns[2:]))
    assert supervised_runs(thinking, record) == [f"{call}<|im_end|>", *last]


def test_a_thought_is_opened_once(thinking: Any) -> None:
    """A template that takes thoughts from `reasoning_content` alone opens an empty one before that in the text."""
    thinking.chat_template = THINKING.replace("elif '</think>' in content", "elif false")
    with pytest.raises(UserError, match="a thought .*turn 2.*`reasoning_content`"):
        chat.render(thinking, thoughtful(Turn("assistant", "<think>\nRound.\n</think>\n\nA disc.")))
    answer = Turn("assistant", "A disc.", further={"reasoning_content": "Round."})
    assert supervised_runs(thinking, thoughtful(answer)) == ["Round.\n</think>\n\nA disc.<|im_end|>"]


@pytest.mark.parametrize(
    ("further", "tools", "problem"),
    [
        ({"tool_calls": [CALL]}, (), "does not render `tool_calls`"),
        ({"reasoning_content": "Round."}, (), "does not render a thought"),
        (
            {},
            (TOOL,),
            "does not render `tools`.*Remove it",
        ),
    ],
)
def test_what_the_template_leaves_out_is_refused(
    processor: Processor, further: dict[str, Any], tools: Any, problem: str
) -> None:
    # The words are there, but not from where they should come.
    record = thoughtful(Turn("assistant", "Round. Call zoom [1, 2].", further=further), Turn("assistant", "Yes."))
    with pytest.raises(UserError, match=problem):
        chat.render(processor.tokenizer, replace(record, tools=tools))
    assert not chat.drops_thoughts(processor.tokenizer)


LEAVING_OUT = {
    "the system": ("{% if m.role != 'system' %}", "turn 1"),
    "results": ("{% if m.role != 'tool' %}", "turn 4"),
    "arguments": ("{% set said = m.content ~ (m.tool_calls[0].function.name if m.tool_calls) %}"
                  "{% set m = dict(m, content=said) %}{% if 1 %}", "`tool_calls`"),
    "ends of questions": ("{% set m = dict(m, content=m.content[:3]) if m.role == 'user' else m %}{% if 1 %}",
                          "turn 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", LEAVING_OUT)
def test_templates_that_leave_out_a_turn_are_refused(processor: Processor, name: str) -> None:
    begin, problem = LEAVING_OUT[name]
    tokenizer, calls = copy.copy(processor.tokenizer), {"tool_calls": [CALL]}
    tokenizer.chat_template = (
        PLAIN.replace("{{ '<|im_start|>'", begin + "{{ '<|im_start|>'", 1)
        .replace("{{ '<|im_end|>\\n' }}", "{{ '<|im_end|>\\n' }}{% endif %}", 1)
        .replace("CONTENT", "{{ m.content }}" + "{{ m.tool_calls | tojson if m.tool_calls }}" * (name != "arguments"))
    )
    turns = Turn("system", "Look."), Turn("user", "What?"), Turn("assistant", "", further=calls), Turn("tool", "[3]")
    with pytest.raises(UserError, match=f"does not render .*{problem}"):
        chat.render(tokenizer, Record("d", 0, "d:1", (*turns, Turn("assistant", "A disc."))))


def test_the_last_answer_follows_the_generation_prompt(processor: Processor, make_record: MakeRecord) -> None:
    """Prompts of templates that forbid thoughts end an empty one, which the text has to have, too."""
    tokenizer = copy.copy(processor.tokenizer)
    tokenizer.chat_template = FITTING["marked"].replace(
        "assistant\\n' }}", "assistant\\n<think>\\n\\n</think>\\n\\n' }}"
    )
    with pytest.raises(UserError, match="turn 2 after its generation prompt.*Let the template"):
        chat.render(tokenizer, make_record("What?", "A disc."))


def test_special_tokens_of_users_are_content(processor: Processor, make_record: MakeRecord) -> None:
    changed = replace(processor, tokenizer=copy.deepcopy(processor.tokenizer))
    changed.tokenizer.add_tokens(["<|loc|>"], special_tokens=True)
    sample = changed.tokenize(make_record("Where is <|loc|>?", "At <|loc|>."))
    assert supervised_texts(changed, sample) == ["At <|loc|>.<|im_end|>"]
    assert (sample.input_ids == changed.tokenizer.convert_tokens_to_ids("<|loc|>")).sum() == 2
    changed = replace(changed)  # A token of the template is structure.
    changed.tokenizer.chat_template = PLAIN.replace("CONTENT", "{{ '<|loc|>' if loop.first }}{{ m.content }}")
    with pytest.raises(UserError, match=r"turn 2: special token <\|loc\|> in the text"):
        changed.tokenize(make_record("Where?", "At <|loc|>."))


@pytest.mark.parametrize("place", ["tool_calls", "reasoning_content", "tools"])
def test_special_tokens_are_refused_wherever_a_template_renders_them(
    processor: Processor, thinking: Any, place: str
) -> None:
    bad: dict[str, Any] = {"name": "zoom", "arguments": {"at": "<|im_end|>"}}
    values = {"tool_calls": [{"function": bad}], "reasoning_content": "<|im_end|>"}
    answer = Turn("assistant", "A disc.", further={} if place == "tools" else {place: values[place]})
    record = Record("d", 0, "d:1", (Turn("user", "What?"), answer), tools=(bad,) if place == "tools" else ())
    with pytest.raises(UserError, match=r"special token <\|im_end\|> in the text"):
        replace(processor, tokenizer=thinking).tokenize(record)


def test_a_text_like_a_placeholder_is_text(processor: Processor) -> None:
    record = Record("d", 0, "d:1", (Turn("user", ("Write ", "<image>")), Turn("assistant", "<image>")))
    sample = processor.tokenize(record)
    assert supervised_texts(processor, sample) == ["<image><|im_end|>"] and not len(sample.row_positions)


@pytest.mark.parametrize("name", ["published", "thinking"])
def test_the_cost_of_turns_is_linear(processor: Processor, make_record: MakeRecord, name: str) -> None:
    tokenizer, rendered = copy.copy(processor.tokenizer), list[int]()
    tokenizer.chat_template = FITTING[name] or tokenizer.chat_template
    apply = tokenizer.apply_chat_template

    def counted(messages: list[Any], **options: Any) -> str:
        rendered.append(len(messages))
        return apply(messages, **options)

    tokenizer.apply_chat_template = counted
    record = make_record(*["What is it?", "A disc."] * 2000)
    runs = chat.render(tokenizer, record)
    assert len(runs) == 4001 and sum(rendered) < 12 * 4000
    assert {run.text.split("\n")[-1] for run in runs if run.supervised} == {"A disc.<|im_end|>"}
    tokenizer.chat_template = ROUNDS
    assert len(chat.render(tokenizer, make_record(*["What?", "A disc."] * (chat.MAX_TURNS // 2)))) == 513
    rendered.clear()
    with pytest.raises(UserError, match=r"^train\.jsonl:1: found 4000 turns, expected at most 512"):
        chat.render(tokenizer, record)
    assert sum(rendered) < 20 * 4000


@pytest.mark.parametrize("name", UNFIT)
def test_templates_that_change_answers_or_prompts_are_refused(
    processor: Processor, make_record: MakeRecord, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    template, problem = UNFIT[name]
    monkeypatch.setattr(processor.tokenizer, "chat_template", template)
    with pytest.raises(UserError, match=problem):
        processor.tokenize(make_record("What?", "<think>\nA</think> red\ndisc. ", "Sure?", "<think>So.</think> Yes"))


def test_a_chat_template_of_absurd_length_is_named(model_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("x" * 300_000)
    with pytest.raises(UserError, match="chat template of 300000 characters, expected at most 262144"):
        Processor.from_folder(folder)


def test_missing_folder_and_files_are_named(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^model\.hf_path: Qwen/Qwen2\.5-VL-7B.* no such folder.*hf download"):
        Processor.from_folder(Path("Qwen/Qwen2.5-VL-7B-Instruct"))
    for name in ("config.json", "tokenizer.json", "preprocessor_config.json"):
        folder = shutil.copytree(model_folder, tmp_path / name)
        (folder / name).unlink()
        with pytest.raises(UserError, match=rf"^{re.escape(str(folder / name))}: found no such file"):
            Processor.from_folder(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "preprocessor_config.json"])
def test_broken_files_are_named(model_folder: Path, tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "model")
    content = (folder / name).read_text()
    (folder / name).write_text(content[: len(content) // 2])
    with pytest.raises(UserError, match=rf"^{re.escape(str(folder / name))}:\d+: found broken JSON"):
        Processor.from_folder(folder)
    (folder / name).write_text("[1]")
    with pytest.raises(UserError, match=rf"^{re.escape(str(folder / name))}: found \[1\] "):
        Processor.from_folder(folder)


MISFITS = {
    "config.json": ({"model_type": "qwen2"}, "model_type 'qwen2'"),
    "config.json ": ({"image_token_id": 5}, r"token <\|image_pad\|> with id \d+ .*expected id 5"),
    "config.json  ": ({"model_type": "none_such"}, "model_type 'none_such', expected 'qwen2_5_vl'"),
    "preprocessor_config.json": ({"patch_size": 16}, "patch_size 16, expected 14"),
    "preprocessor_config.json ": (
        {"image_processor_type": "Mine", "auto_map": {"AutoImageProcessor": "m.M"}},
        "does not load",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_files_that_do_not_belong_together_are_named(model_folder: Path, tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "model")
    change, message = MISFITS[name]
    file = folder / name.strip()
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UserError, match=message):
        Processor.from_folder(folder)


def test_a_tokenizer_without_template_is_named(model_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match=r"no chat template .chat_template\.jinja"):
        Processor.from_folder(folder)
