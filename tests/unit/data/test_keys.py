"""Keys of records, turns and parts: read, refused with advice that works, or counted."""

from __future__ import annotations

import base64
import copy
import io
import json
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from megatron_hetero.base.contents import InMemory
from megatron_hetero.base.errors import UserError
from megatron_hetero.cli.data_statistics import samples_per_epoch
from megatron_hetero.config.fields import Pattern
from megatron_hetero.config.sections import DatasetConfig, SampledDataset
from megatron_hetero.data.item_fields import MAX_DATA_BYTES, SETTINGS
from megatron_hetero.data.keys import READ, REFUSED
from megatron_hetero.data.processor import Processor
from megatron_hetero.data.records import Dataset, Reading
from megatron_hetero.data.turns import Turn
from megatron_hetero.data.validation import Parsed, item_fields, validate_record
from megatron_hetero.models.items.video_sampling import Sampling, given_size
from tests.support.items import annotated, item_of, whole

FIELDS = item_fields({"vision": ("image", "video")})
IMAGE, VIDEO = FIELDS
FOLDER = Path("/images")
DOCS = Path(__file__).parents[3] / "docs/data.md"


def encoded(picture: Image.Image | None = None, kind: str = "png") -> str:
    """A picture as a data URI."""
    file = io.BytesIO()
    (picture or Image.new("RGB", (56, 84), "red")).save(file, kind)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"


def parsed(value: Any, folder: Path | None = FOLDER) -> Parsed:
    return validate_record(value, "d:1", folder=folder, fields=FIELDS)


def asked(*parts: Any, **fields: Any) -> dict[str, Any]:
    """A record of messages whose user says these parts."""
    return {"messages": [{"role": "user", "content": [*parts, "Q"]}, {"role": "assistant", "content": "A"}], **fields}


def talk(*turns: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A record of messages, which begins with a user."""
    return {"messages": [{"role": "user", "content": "Q"}, *turns], **fields}


def said(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


CALL = {"name": "add", "arguments": {"a": 1}}
CALLS = {"tool_calls": [{"type": "function", "function": CALL}]}
RESULT = {"role": "tool", "content": "2"}
LLAMA = [("human", "Q"), ("function_call", json.dumps(CALL)), ("observation", "2"), ("gpt", "It is 2.")]


# ------------------------------------------------------------------------------------------------------- read


@pytest.mark.parametrize(
    "turn, is_trained",
    [({"loss": False}, False), ({"loss": True}, True), ({"loss": 0}, False), ({"weight": 0}, False),
     ({"weight": 1.0}, True), ({"train": False, "weight": 0}, False), ({"loss": None}, True)],
)  # fmt: skip
def test_weights_of_turns(turn: dict[str, Any], is_trained: bool) -> None:
    found = parsed(talk(said("A", **turn), {"role": "user", "content": "R", "loss": False}, said("B")))
    assert [each.supervised for each in found.turns] == [True, is_trained, True, True] and not found.unread
    texts = [{"user": "Q", "assistant": "A", **turn}, {"user": "R", "assistant": "B"}]
    assert [each.supervised for each in parsed({"texts": texts}).turns] == [True, is_trained, True, True]


def test_tools_and_their_calls() -> None:
    record = talk(said(None, **CALLS), RESULT, RESULT | {"name": "add", "tool_call_id": "7"}, said("It is 2."))
    found = parsed(record | {"tools": [{"name": "add"}], "system": "S"})
    call = {"type": "function", "function": CALL}
    assert found.turns == [
        Turn("system", "S"), Turn("user", "Q"), Turn("assistant", "", True, {"tool_calls": [call]}), Turn("tool", "2"),
        Turn("tool", "2", True, {"name": "add", "tool_call_id": "7"}), Turn("assistant", "It is 2."),
    ]  # fmt: skip
    assert found.tools == ({"name": "add"},) and not found.unread
    for calls in (CALLS["tool_calls"], [CALL], [{"function": {**CALL, "arguments": '{"a": 1}'}}], json.dumps([CALL])):
        assert parsed(talk(said("", tool_calls=calls))).turns[1].further["tool_calls"] == [call]
    with_number = parsed(talk(said("Wait.", tool_calls=[{"id": "7", "function": {"name": "now"}}])))
    named = {"type": "function", "function": {"name": "now", "arguments": {}}, "id": "7"}
    assert with_number.turns[1] == Turn("assistant", "Wait.", True, {"tool_calls": [named]})
    llama = {"conversations": [{"from": who, "value": text} for who, text in LLAMA], "tools": '[{"name": "add"}]'}
    assert parsed(llama)[:3] == parsed(talk(said(None, **CALLS), RESULT, said("It is 2."), tools=[{"name": "add"}]))[:3]
    nulls = {"name": "add", "function": None}
    assert parsed(talk(said("A"), tools=[nulls])).tools == ({"name": "add"},)
    assert parsed(talk(said("A"), tools="")).tools == parsed(talk(said("A"), tools="[]")).tools == ()


def test_calls_in_turns_of_their_own() -> None:
    """As ms-swift and LLaMA-Factory write them."""
    call, result = {"role": "tool_call", "content": json.dumps(CALL)}, {"role": "tool_response", "content": "2"}
    for before in ([], [said("<think>So.</think>\n")], [said("So.", **CALLS)]):
        found = parsed(talk(*before, call, call, result, result, said("A")))
        assert [turn.role for turn in found.turns] == ["user", "assistant", "tool", "tool", "assistant"]
        assert found.turns[1].text == (before[0]["content"] if before else "")
        assert len(found.turns[1].further["tool_calls"]) == 2 + ("tool_calls" in str(before))
    thought = parsed(talk({"role": "function_call", "content": f"<think>\nSo.\n</think>\n\n{json.dumps(CALL)}"}))
    assert thought.turns[1].further.keys() == {"reasoning_content", "tool_calls"}
    assert thought.turns[1].further["reasoning_content"] == "So."


def test_thoughts() -> None:
    for name in ("reasoning_content", "reasoning", "thinking"):
        assert parsed(talk(said("A", **{name: "So."}))).turns[1].further == {"reasoning_content": "So."}


@pytest.mark.parametrize("value, text", [(3, "3"), (0.5, "0.5"), (-1e20, "-1e+20"), ([7, 8], "7")])
def test_numbers_are_answers(value: Any, text: str) -> None:
    assert parsed({"question": "Q", "answer": value}).turns[1].text == text
    if not isinstance(value, list):
        for record in (talk(said(value)), {"texts": [{"user": "Q", "assistant": value}]}):
            assert parsed(record).turns[1].text == text


@pytest.mark.parametrize(
    "part, file, given",
    [
        ({"type": "image", "image": "a.png", "max_pixels": 4e4}, "a.png", {"max_pixels": 40000}),
        ({"image": "a.png", "resized_height": 56, "resized_width": 84}, "a.png",
         {"resized_height": 56, "resized_width": 84}),
        ({"type": "image_url", "image_url": {"url": "a.png", "min_pixels": 9}}, "a.png", {"min_pixels": 9}),
        ({"type": "image_url", "image_url": "a.png"}, "a.png", {}),
        ({"type": "image", "url": "a.png"}, "a.png", {}),
        ({"type": "image_url", "image_url": {"url": None}, "image": "a.png"}, "a.png", {}),
        ({"type": "image", "path": "/images/b/a.png"}, "b/a.png", {}),
        ({"type": "video", "video": "a.mp4", "fps": 1, "nframes": None, "max_frames": 8}, "a.mp4",
         {"fps": 1.0, "max_frames": 8}),
        ({"type": "video_url", "video_url": {"url": "a.mp4"}, "video_start": 2}, "a.mp4", {"video_start": 2.0}),
        ({"type": "video", "video": ["0.jpg", "1.jpg"], "sample_fps": 2, "total_pixels": 100}, "0.jpg",
         {"total_pixels": 100, "fps": 2.0}),
    ],
)  # fmt: skip
def test_parts_name_items_and_say_more_of_them(part: dict[str, Any], file: str, given: dict[str, Any]) -> None:
    found = parsed(asked(part))
    assert (found.items[0].file, dict(found.items[0].given), found.unread) == (file, given, [])
    field = "video" if "mp4" in str(part) or "jpg" in str(part) else "image"
    without = {name: each for name, each in part.items() if name in SETTINGS}
    if found.items[0].frames or not isinstance(part.get("image_url", ""), str):
        return
    of_record = parsed(asked({"type": field, **without}, **{field: [file]}))
    assert (of_record.items[0].file, dict(of_record.items[0].given)) == (file, given)


def test_settings_of_a_record_are_of_all_its_items() -> None:
    record = asked({"type": "image"}, {"type": "image", "max_pixels": 9}, images=["a.png", "b.png"], max_pixels=[5, 6])
    assert [dict(ref.given) for ref in parsed(record).items] == [{"max_pixels": 5}, {"max_pixels": 9}]


def test_pictures_in_data_uris(processor: Processor, tmp_path: Path) -> None:
    uri, picture = encoded(), Image.new("RGB", (56, 84), "red")
    picture.save(tmp_path / "a.png")
    wrapped = f"data:image/PNG;charset=utf-8;base64,{uri.partition(',')[2][:40]}\n{uri.partition(',')[2][40:]}"
    records = [
        asked({"type": "image_url", "image_url": {"url": uri}}),
        asked({"type": "image"}, image=wrapped),
        {"conversations": [{"from": "human", "value": "<image>Q"}, {"from": "gpt", "value": "A"}], "images": [uri]},
        asked({"type": "image", "image": "a.png"}),
    ]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, records)))
    found = annotated("d", tmp_path / "d.jsonl", tmp_path)
    patches = [processor.patches(each, 0, whole(processor.tokenize(each).sizes[0])) for each in found]
    assert all((each == patches[-1]).all() for each in patches)
    label = found[0].items[0].file
    assert isinstance(label, InMemory) and len(str(label)) < 50 and label == found[2].items[0].file
    frames = parsed(asked({"type": "video", "video": [encoded(kind="jpeg")] * 2, "fps": 1})).items[0].frames
    assert len(frames) == 2 and str(frames[0]).endswith(".jpeg")
    for start in ("data:image;base64", " data:;base64"):  # As Qwen writes them; the picture tells its format.
        short = f"{start},{uri.partition(',')[2]}"
        of_short = parsed(asked({"type": "image", "image": short})).items[0].file
        assert isinstance(of_short, InMemory) and of_short.data == label.data
        assert len(parsed(asked({"type": "video", "video": [short] * 2, "fps": 1})).items[0].frames) == 2


def test_text_that_looks_like_a_placeholder(tmp_path: Path) -> None:
    text = {"type": "text", "text": "<image> is a tag"}
    found = parsed(asked(text, {"type": "image", "image": "a.png"}))
    assert found.turns[0].content == (text["text"], IMAGE, "Q") and len(found.items) == 1
    answers = {"conversations": [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "<image> <video>"}]}
    assert parsed(answers | {"image": "a.png"}).turns[1].content == "<image> <video>"
    marks = {"messages": [{"role": "system", "content": [text]}, *talk(said([text, "."]))["messages"]]}
    assert [turn.text for turn in parsed(marks).turns] == [text["text"], "Q", "<image> is a tag."]
    write = [asked({"type": "image"}, text, image="a.png"), asked(text, {"type": "image"}, image="a.png"), marks]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, write)))
    read = annotated("d", tmp_path / "d.jsonl", tmp_path, FIELDS)
    assert read[0].turns[0].content == (IMAGE, "<image> is a tagQ")
    assert read[1].turns[0].content == ("<image> is a tag", IMAGE, "Q")
    assert read[2].turns[0] == Turn("system", "<image> is a tag")


def test_pictures_in_results_of_tools() -> None:
    shown = {"role": "tool", "content": [{"type": "image", "image": "a.png"}, "See."]}
    found = parsed(talk(said(None, **CALLS), shown, said("A")))
    assert found.turns[2].content == (IMAGE, "See.") and found.items[0].file == "a.png"


# Height and width of a picture of 640 x 480, and of frames of 1280 x 720 in videos of 4, 16 and 60, from
# qwen-vl-utils 0.0.14 for units of 28 pixels.
OF_PICTURES = [
    ({"max_pixels": 50176}, (168, 252)),
    ({"min_pixels": 200704, "max_pixels": 401408}, (476, 644)),
    ({"min_pixels": 12544, "max_pixels": 12544}, (84, 112)),
    ({"resized_height": 280, "resized_width": 420}, (280, 420)),
    ({"resized_height": 9, "resized_width": 500}, (28, 504)),
    ({"resized_height": 9000, "resized_width": 9000}, (3584, 3584)),
]
OF_VIDEOS = [
    ({"max_pixels": 151200}, [(280, 504), (280, 504), (280, 504)]),
    ({"total_pixels": 16056320, "min_pixels": 12544}, [(560, 1008), (560, 1008), (532, 952)]),
    ({"total_pixels": 4_000_000}, [(560, 1008), (504, 924), (252, 476)]),
    ({"min_pixels": 300_000}, [(560, 1008), (560, 1008), (560, 1008)]),
]


@pytest.mark.parametrize("given, size", OF_PICTURES)
def test_sizes_of_pictures(given: dict[str, Any], size: tuple[int, int], processor: Processor, pictures: Path) -> None:
    reader: Any = processor.readers[IMAGE]
    item = item_of(pictures / "640x480.png", **given)
    found = reader.size(item)
    assert (found.rows * 14, found.columns * 14) == size
    if size[0] == 3584:  # It takes long.
        return
    patches = reader.patches(item, whole(found))
    assert len(patches) == found.rows * found.columns
    if "min_pixels" in given:
        limits = {"shortest_edge": given["min_pixels"], "longest_edge": given["max_pixels"]}
        plain = reader.image_processor(Image.open(pictures / "640x480.png"), size=limits, return_tensors="np")
        np.testing.assert_array_equal(patches, plain["pixel_values"])


SAMPLING = Sampling("transformers", "video", 2.0, 4, 768, 4096, 25165824, None, None, None, 28)


@pytest.mark.parametrize("given, sizes", OF_VIDEOS)
def test_sizes_of_frames(given: dict[str, int], sizes: list[tuple[int, int]]) -> None:
    for sampling in (SAMPLING, replace(SAMPLING, bounded="frame"), replace(SAMPLING, rules="authors")):
        assert [sampling.given(given).size(frames, 720, 1280) for frames in (4, 16, 60)] == sizes
    assert given_size(given, 28) is None and given_size({"resized_height": 280, "resized_width": 275}, 28) == (280, 280)


@pytest.mark.parametrize(
    "given, number",
    [({"nframes": 5}, 4), ({"nframes": 7}, 8), ({"fps": 1}, 10), ({"fps": 1, "min_frames": 12}, 12),
     ({"fps": 4, "max_frames": 8}, 8), ({"max_frames": 2}, 2), ({"fps": None}, 20)],
)  # fmt: skip
def test_numbers_of_frames(given: dict[str, Any], number: int) -> None:
    for sampling in (SAMPLING, replace(SAMPLING, bounded="frame"), replace(SAMPLING, rules="authors")):
        found = sampling.given(given).frames(40, 4.0)
        assert len(found) == number
        if sampling.rules == "authors" or sampling.bounded == "video":
            np.testing.assert_array_equal(found, np.linspace(0, 39, number).round())


# ----------------------------------------------------------------------------------------------------- digests


def digest(folder: Path, record: dict[str, Any]) -> str:
    (folder / "d.jsonl").write_text(json.dumps(record))
    return annotated("d", folder / "d.jsonl", folder, FIELDS).digest


PLAIN = [
    ({"image": "a.png", "id": 7, "conversations": [{"from": "human", "value": "<image>\nQ"},
      {"from": "gpt", "value": "A"}]}, "3b3f1ec1e9e2b910"),
    (asked({"type": "text", "text": "See "}, {"type": "image", "image": "b.png"}), "a1a48b0d94b59e5f"),
    ({"video": ["0.jpg", "1.jpg"], "fps": 2, "messages": talk(said("A"))["messages"]}, "7a9632e47ab587d8"),
    ({"answer": "A", "image": "a.png", "system": "S"}, "5586e52097269d3c"),
]  # fmt: skip


@pytest.mark.parametrize("record, known", PLAIN)
def test_records_of_before_keep_their_digests(record: dict[str, Any], known: str, tmp_path: Path) -> None:
    assert digest(tmp_path, record)[:16] == known


def test_all_that_is_trained_is_in_the_digest(tmp_path: Path) -> None:
    text, picture = {"type": "text", "text": "<image>"}, {"type": "image", "image": "a.png"}
    records = [
        talk(said("A")), talk(said("A"), {"role": "user", "content": "R"}, said("B")),
        talk(said("A", loss=False), {"role": "user", "content": "R"}, said("B")),
        talk(said("A", reasoning="So.")), talk(said("A", name="x")), talk(said("A", **CALLS)), talk(said("", **CALLS)),
        talk(said("A"), tools=[{"name": "add"}]), talk(said("A"), system="S"), asked(picture), asked(text),
        asked(picture, text), asked(text, picture), asked(picture | {"max_pixels": 9}), asked(picture, max_pixels=8),
        asked({"type": "image", "image": encoded()}), asked({"type": "image", "image": encoded(kind="jpeg")}),
    ]  # fmt: skip
    assert len({digest(tmp_path, record) for record in records}) == len(records)
    assert digest(tmp_path, talk(said("A", loss=1, id=3, name=""), x=1)) == digest(tmp_path, records[0])
    absolute = asked({"type": "image", "image": str(tmp_path / "a.png")})
    assert digest(tmp_path, absolute) == digest(tmp_path, asked(picture))


# ------------------------------------------------------------------------------------- refused, with its advice

Change = Callable[[dict[str, Any]], Any]


def without(name: str) -> Change:
    return lambda record: {key: each for key, each in record.items() if key != name}


def turned(k: int, **fields: Any) -> Change:
    """Changes turn `k`; None removes a field."""

    def change(record: dict[str, Any]) -> dict[str, Any]:
        [form] = {"messages", "conversations"} & record.keys()
        turns = copy.deepcopy(record[form])
        turns[k] = {name: each for name, each in {**turns[k], **fields}.items() if each is not None}
        return {**record, form: turns}

    return change


def shown(part: Any) -> Change:
    """Writes another part."""
    return turned(0, content=[part, "Q"])


ADVICE: dict[str, tuple[dict[str, Any], str, Change]] = {
    "weight": (talk(said("A", weight=0.5)), "weight 0.5 in a turn of assistant.*`loss`",
               turned(1, weight=None, loss=True)),
    "two weights": (talk(said("A", weight=1, loss=False)), "loss False, weight 1", turned(1, loss=None)),
    "weight of a user": (turned(0, loss=True)(talk(said("A"))), "loss True in a turn of user", turned(0, loss=None)),
    "nothing trained": (talk(said("A", loss=0)), "no answer .*train on one", turned(1, loss=1)),
    "calls of a user": (turned(0, **CALLS)(talk(said("A"))), "found a turn of user",
                        turned(0, tool_calls=None)),
    "broken call": (talk(said("", tool_calls=[{"function": {"name": "f", "arguments": "{"}}])),
                    r"'arguments': no JSON objects \(Input data was truncated\)",
                    turned(1, tool_calls=[CALL])),
    "call without a name": (talk(said("", tool_calls=[{"arguments": {}}])), "no name of", turned(1, **CALLS)),
    "call of LLaMA-Factory": ({"conversations": [{"from": who, "value": text.strip("{")} for who, text in LLAMA]},
                              "no JSON objects", turned(1, value=json.dumps(CALL))),
    "no result": (talk(said("", **CALLS), {"role": "user", "content": "R"}, said("A")),
                  "expected a turn of tool.*remove the call",
                  turned(1, tool_calls=None, content="A")),
    "two thoughts": (talk(said("A", thinking="a", reasoning="b")), "another text", turned(1, thinking=None)),
    "thought of a user": (turned(0, thinking="a")(talk(said("A"))), "found a turn of user", turned(0, thinking=None)),
    "tools": (talk(said("A"), tools=["x"]), "field 'tools'", without("tools")),
    "tool without a name": (talk(said("A"), tools=[{"x": 1}]), "no name of", without("tools")),
    "empty function": (talk(said("A"), tools=[{"function": {}, "name": "f"}]), "no name of", without("tools")),
    "name of a tool": (talk(said("A"), tools=[{"function": "f"}]), "no name of", without("tools")),
    "function of a call": (talk(said("A", tool_calls=[{"function": "f"}])), "no name of", turned(1, **CALLS)),
    "number of arguments": (talk(said("A", tool_calls=[CALL | {"arguments": 0}])), "'arguments': no JSON objects",
                            turned(1, **CALLS)),
    "arguments in a function": (talk(said("A", tool_calls=[{"function": {"name": "f", "args": {"a": 1}}}])),
                                "'args': not supported.*Rename it `arguments`", turned(1, **CALLS)),
    "call of another weight": (talk(said("So."), {"role": "tool_call", "content": json.dumps(CALL), "loss": False}),
                               "Merge .*the same `loss`",
                               turned(2, loss=True)),
    "answer after a call": (talk(said(None, **CALLS), said("A")), "expected a turn of tool.*Add the tool's answer",
                            lambda record: talk(said(None, **CALLS), RESULT, said("A"))),
    "number of tools": (talk(said("A"), tools=[3]), "field 'tools': no JSON objects .Expected",
                        without("tools")),
    "two systems": ({"messages": [{"role": "system", "content": "S"}, *talk(said("A"))["messages"]], "system": "T"},
                    "a system turn.*Remove the field", without("system")),
    **{f"question {value}": ({"question": value, "answer": "A"}, "for 'question'.*Write the turn's text",
                             lambda record: {**record, "question": "Q"}) for value in (0, False, {})},
    "no text": ({"instruction": "Q", "output": "A"}, "'instruction, output'.*messages.*question.*`fields` of",
                lambda record: {"question": "Q", "answer": "A"}),
    "part without a file": (asked({"type": "image", "source": {"data": "A"}}), "entry 0: found no image.*Write it into "
                            "'image', 'url' or 'path'", shown({"type": "image", "path": "a.png"})),
    "raw base64": (asked(image=encoded().partition(",")[2]), "more characters, expected a path.*data:image/png;base64",
                   lambda _: asked(image=encoded())),
    "long name": (asked(image="a/" + "b" * 256), "218 more characters", lambda _: asked(image="a/b")),
    "number in a part": (asked({"type": "image", "image": 7}), "entry 0: field 'image': found a number",
                         shown({"type": "image", "image": "7"})),
    "truth": (talk(said(True)), "true or false for 'content'.*Write the turn's text", turned(1, content="yes")),
    "null text": (asked({"type": "text", "text": None}), "field 'text': found null, expected a text", shown("x")),
    "nothing": (asked({}), "an object, expected entries of type text, image", shown({"type": "image", "image": "a"})),
    "unknown type": (asked({"type": "input_text", "text": "a"}), "an entry of type 'input_text'.*Write it as one of",
                     shown({"type": "text", "text": "a"})),
    "two in a part": (asked({"type": "image", "image": ["a.png", "b.png"]}), "2 items.*Write an entry for each",
                      turned(0, content=[{"type": "image", "image": name} for name in "ab"])),
    "two names": (asked({"type": "image", "image": "a.png", "url": "b.png"}), "2 items.*Write an entry for each",
                  shown({"type": "image", "image": "a.png"})),
    "http": (asked({"type": "image", "image": "https://x.org/a.png"}),
             "nothing is downloaded.*Copy the file there", shown({"type": "image", "image": "a"})),
    "file": (asked(image="file:///images/a"), "'file:///images/a'.*Copy the file there", lambda _: asked(image="a")),
    "data of a video": (asked(video="data:video/mp4;base64,AAAA"), "data URI 'data:video/mp4;base64,AAAA', .*"
                        "Write it to a file", lambda _: asked(video="a")),
    "broken data": (asked(image="data:image/png;base64,A"), "base64", lambda _: asked(image="a.png")),
    "no base64": (asked(image="data:image/png,A"), "data:image/png;base64", lambda _: asked(image="a.png")),
    "large data": (asked(image="data:image/png;base64," + "AAAA" * (MAX_DATA_BYTES // 3 + 1)),
                   f"1 to {MAX_DATA_BYTES:,}", lambda _: asked(image="a.png")),
    "absolute": (asked(image="/etc/passwd"), "inside /images.*Copy the file there",
                 lambda _: asked(image="passwd")),
    "above": (asked(image="../a.png"), "inside /images.*set `images` .*above it",
              lambda _: asked(image="images/a.png")),
    "one side": (asked(image="a", resized_width=5), "resized_width alone", without("resized_width")),
    "low above high": (asked(image="a", min_pixels=5, max_pixels=4), "min_pixels 5 above max_pixels 4",
                       without("min_pixels")),
    "rate and number": (asked(video="a", fps=5, nframes=4), "both fps and nframes", without("fps")),
    "rate of a list": (asked(video="a.mp4", sample_fps=5), "a rate for the file 'a.mp4'", without("sample_fps")),
    "number of frames": (asked(video="a.mp4", nframes=2.5), "expected a whole number", without("nframes")),
    "plain text": ({"messages": [{"role": "system", "content": "<image>"}, *talk(said("A"))["messages"]]},
                   "what is text is an entry of type text", turned(0, content=[{"type": "text", "text": "<image>"}])),
    "marks without items": (turned(0, content="<image>")(talk(said("A"))), "Add or remove placeholders or images",
                            turned(0, content="Q")),
    "in both": (asked({"type": "image", "image": "a"}, image="b"), "in one of them", without("image")),
    **{f"{level} {name}": (record, f"field '{name}': not supported, because ", change)
       for level, name in REFUSED
       for record, change in [{
           "record": (talk(said("A"), **{name: True}), without(name)),
           "turn": (talk(said("A", **{name: True})), turned(1, **{name: None})),
           "call": (talk(said("A", tool_calls=[CALL | {name: True}])), turned(1, tool_calls=[CALL])),
           "entry": (asked({"type": "image", "image": "a", name: True}), shown({"type": "image", "image": "a"})),
       }[level]]},
}  # fmt: skip


@pytest.mark.parametrize("case", ADVICE)
def test_who_follows_the_advice_can_train(case: str) -> None:
    record, message, advised = ADVICE[case]
    with pytest.raises(UserError, match=f"^d:1: .*{message}") as refused:
        parsed(record)
    assert len(str(refused.value)) < 1000
    assert parsed(advised(record)).turns


def test_null_is_no_value() -> None:
    """Files in columns write all fields in all records."""
    nothing = {**dict.fromkeys(name for level, name in REFUSED if level == "record"), "objects": {}, "label": "cat"}
    assert parsed(talk(said("A", loss=None, tool_calls=None, mask=None), **nothing)).unread == ["label"]
    none = parsed(talk(said("A", loss="", objects={"ref": [], "bbox": None}), system="", image="", video="", fps=""))
    assert none == parsed(talk(said("A")))
    assert parsed({**talk(said("A")), "conversations": []}) == none
    assert parsed({"messages": [], "question": "Q", "answer": "A"}) == none
    systems = {"messages": [{"role": "system", "content": "S"}, *talk(said("A"))["messages"]]}
    assert parsed(systems | {"system": ""}).turns[0] == Turn("system", "S")


# ------------------------------------------------------------------------------------------------------ counted


def test_other_keys_are_counted(tmp_path: Path) -> None:
    records = [talk(said("A", time=k), id=k, **({f"x{k}": 1} if k else {})) for k in range(50)]
    records.append(asked({"type": "image_url", "image_url": {"url": "a.png", "detail": "low"}}))
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, records)))
    entry = DatasetConfig(annotations=tmp_path / "d.jsonl", images=tmp_path)
    for _ in range(2):  # Computed, then read.
        data = Dataset("d", entry, Reading(cache=tmp_path / "cache"))
        assert data.unread.startswith("data set d: ") and ": id (50), turn.time (50)," in data.unread
        assert data.unread.endswith("others (20)") and data.unread.count(",") == 33
        assert data.unread in samples_per_epoch([(data, SampledDataset("d"))])


@pytest.mark.parametrize(
    "record, names",
    [
        (asked({"type": "image", "image": "a.png", "fps": 1, "nframes": 4, "detail": "low"}),
         ["entry.fps", "entry.nframes", "entry.detail"]),
        (asked(image="a.png", video_start=1, max_pixels=9), ["video_start"]),
        (talk(said("A"), max_pixels="abc", fps=2), ["fps", "max_pixels"]),
        (asked({"type": "image", "image": "a.png", "image_url": {"url": None}, "objects": {"ref": []}}), []),
        (talk(said("A", tool_calls=[CALL | {"index": 1, "parameters": {}}])), ["call.index"]),
    ],
)  # fmt: skip
def test_names_of_keys_that_are_not_read(record: dict[str, Any], names: list[str]) -> None:
    assert parsed(record).unread == names


def test_nulls_of_columns_are_no_values(tmp_path: Path) -> None:
    """Structs have the fields of all rows."""
    calls = [{"name": "f", "arguments": {name: 1}} for name in "ab"]
    rows = [talk(said("", tool_calls=[call]), tools=[{"name": "f", "parameters": {str(call): 1}}]) for call in calls]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    data = Dataset("d", DatasetConfig(files=Pattern(f"{tmp_path}/a.parquet")))
    assert [each.turns[1].further["tool_calls"][0]["function"] for each in data] == calls
    assert [each.tools for each in data] == [tuple(row["tools"]) for row in rows]
    rows = [talk(said("A"), objects={"ref": None, "bbox": []}), talk(said("B"), objects={"ref": [], "bbox": None})]
    rows[0]["messages"][0]["content"] = [{"image": {"bytes": b"p", "path": None}, "text": None}, {"text": "Q"}]
    rows[1]["messages"][0]["content"] = [{"image": None, "text": "Q"}]
    for row in rows:
        row["messages"][1]["content"] = [{"text": "A"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert [len(each.items) for each in Dataset("d", DatasetConfig(files=Pattern(f"{tmp_path}/a.parquet")))] == [1, 0]


def test_parts_of_tars_and_columns_of_parquet(tmp_path: Path) -> None:
    record = json.dumps({"x": 1, "qa": {"q": "Q"}, "answer": "A"})
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, text in (("a.jpg", "p"), ("a.json", record), ("a.txt", "T")):
            member = tarfile.TarInfo(name)
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    mapped = DatasetConfig(files=Pattern(f"{tmp_path}/a.tar"), fields={"question": "qa.q", "answer": "txt"})
    assert Dataset("d", mapped).unread.endswith("records: x (1)")
    pq.write_table(pa.table({"question": ["Q"], "answer": ["A"], "x": [1], "rejected": [None]}), tmp_path / "a.parquet")
    assert Dataset("d", DatasetConfig(files=Pattern(f"{tmp_path}/a.parquet"))).unread.endswith("records: x (1)")
    pq.write_table(pa.table({"question": ["Q"], "answer": ["A"], "rejected": ["B"]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="row 1: field 'rejected': not supported"):
        Dataset("d", DatasetConfig(files=Pattern(f"{tmp_path}/a.parquet")))


def test_docs_have_the_same_table() -> None:
    section = DOCS.read_text(encoding="utf-8").partition("### Keys\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")]
    for level, names in READ.items():
        for name in names:
            assert any(f"`{name}`" in row and level in row.split("|")[1] for row in rows), (level, name)
    for level, name in REFUSED:
        row = next((row for row in rows if f"`{name}`" in row and row.split("|")[3].startswith(" refused")), "")
        assert level in row.split("|")[1], (level, name)
