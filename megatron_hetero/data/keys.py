"""Keys of records, of their turns, and of entries in the content of messages: those that are read, those that are
refused because they would change what is trained, and all others, which are counted. docs/data.md has the same table.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from megatron_hetero.base.errors import UserError
from megatron_hetero.data.item_fields import PLURALS, SETTINGS, is_content, is_empty

FORMS = ("conversations", "messages", "texts", "question", "answer")
"""Keys of records that have text."""
WEIGHTS = ("loss", "weight", "train")
"""Keys of a turn that say whether the turn is trained on."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of the thoughts of the assistant before an answer."""
READ: Mapping[str, tuple[str, ...]] = {
    "record": (*PLURALS, *PLURALS.values(), *FORMS, "system", "tools", *SETTINGS),
    "turn": (*WEIGHTS, *THOUGHTS, "tool_calls", "tool_call_id", "name"),
    "call": ("type", "id", "function", "name", "arguments"),
    "entry": ("type", "url", "path"),
}
"""Keys that are read, by level. Also read are a record's fields of further encoders, a turn's speaker and text, an
entry's text or item, and the settings in `ItemField.settings`.
"""
_ROWS = (
    ("record turn entry", "rejected rejected_response rejected_messages rejected_images chosen kto_tag label",
     "rejected answers are not trained on", "keep the wanted answer as the last turn, and remove this field"),
    ("record turn entry", "objects bbox bboxes bbox_2d boxes boxes_seq ref refs quad",
     "a text is not filled from fields", "write the boxes into the text, and remove this field"),
    ("record turn entry", "audio audios input_audio", "models have no sound", "remove the field, or the record"),
    ("record turn entry call", "loss_weight loss_scale loss_mask sample_weight train_detail",
     "an answer is trained on whole or not at all", "write `loss` of its turn, true or false, and remove this field"),
    ("call", "parameters args input", "templates take `arguments`", "rename it `arguments`"),
    ("record entry call", "loss weight train", "a turn has it", "write `loss` of its turn, true or false, instead"),
    ("record entry", "raw_fps num_frames", "frames are sampled by `fps`, `times` or `nframes`",
     "write one of these instead"),
    ("record", "chat_template chat_template_kwargs enable_thinking", "records are rendered as the model's folder says",
     "change the template in the folder, and remove this field"),
    ("record", "history", "its turns would be left out", "write all turns into `messages`, and remove this field"),
    ("record", "functions", "templates take `tools`", "rename it `tools`"),
    ("turn", "mask", "it may mean either", "write `loss`, true or false, instead"),
    ("turn", "image images video videos", "a turn's items are in its text",
     'write an entry such as {"type": "image", "image": ...} instead'),
    ("turn", "tools functions", "a record has them", "write `tools` beside the turns instead"),
    ("turn", "function_call refusal", "templates take no such field", "write it into `tool_calls` or the text instead"),
    ("entry", "base64 bytes", "an item's file is named", "write data:image/png;base64,... in its place"),
)  # fmt: skip
"""Levels, refused keys, reason and fix. A `label` is refused only if it is true or false, which marks a preference."""
REFUSED = {(level, name): why for levels, names, *why in _ROWS for level in levels.split() for name in names.split()}
MAX_NAMES, _MAX_CHARACTERS = 32, 64
"""Maximum number of keys that are counted by name, and maximum characters of such a key."""


def unread(value: Mapping[str, Any], level: str, known: Collection[str], place: str) -> list[str]:
    """Return names of keys that have a value and are not `known`, such as `turn.time`. Raises `UserError` for a refused
    key.
    """
    names = []
    for name in value:
        if name in known or (each := value[name]) is None or is_content(each) or is_empty(each):
            continue
        if (level, name) in REFUSED and (name != "label" or isinstance(each, bool)):
            because, fix = REFUSED[level, name]
            raise UserError.at(f"{place}: field '{name}'", problem="not supported", because=because, fix=fix)
        names.append(name if level == "record" else f"{level}.{name}")
    return names


def count_names(counts: dict[str, int], more: Mapping[str, int]) -> None:
    """Add the numbers in `more` to `counts`, by name. Beyond `MAX_NAMES` names, the rest are counted as `others`."""
    for name, number in more.items():
        short = name[:_MAX_CHARACTERS]
        key = short if short in counts or len(counts) < MAX_NAMES else "others"
        counts[key] = counts.get(key, 0) + number
