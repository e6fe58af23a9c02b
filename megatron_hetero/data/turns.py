"""Turns of a conversation in the form that chat templates take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from megatron_hetero.data.item_fields import ItemField

ChatRole = Literal["system", "user", "assistant", "tool"]
Content = str | tuple[str | ItemField, ...]
"""A text, or a sequence of texts and item fields. A placeholder inside a text is not an item."""


class Turn(NamedTuple):
    """A turn of one speaker in a conversation.

    Attributes:
        role: the speaker.
        content: the text, with items in turns of users and tools only.
        supervised: whether a turn of the assistant is trained on.
        further: further fields of the chat message for the chat template: `tool_calls`, `reasoning_content`, `name`,
            `tool_call_id`.
    """

    role: ChatRole
    content: Content
    supervised: bool = True
    further: Mapping[str, Any] = {}

    @property
    def entries(self) -> Sequence[str | ItemField]:
        """Texts and item fields of the content, in order."""
        return (self.content,) if isinstance(self.content, str) else self.content

    @property
    def text(self) -> str:
        """The content with a placeholder for each item, for display."""
        if isinstance(self.content, str):
            return self.content
        return "".join([entry if isinstance(entry, str) else entry.placeholder for entry in self.content])
