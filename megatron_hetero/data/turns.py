"""The turns of a conversation, as chat templates take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from megatron_hetero.data.item_fields import ItemField

ChatRole = Literal["system", "user", "assistant", "tool"]
Content = str | tuple[str | ItemField, ...]
"""A text, or texts and the fields of items in order. A text that looks like a placeholder is a text."""


class Turn(NamedTuple):
    """One speaker's turn.

    Attributes:
        role: the speaker.
        content: text and items; only turns of users and tools have items.
        supervised: whether a turn of the assistant is trained on.
        further: further fields of the chat message as the template takes them: `tool_calls`, `reasoning_content`,
            `name`, `tool_call_id`.
    """

    role: ChatRole
    content: Content
    supervised: bool = True
    further: Mapping[str, Any] = {}

    @property
    def parts(self) -> Sequence[str | ItemField]:
        """Texts and the fields of items, in order."""
        return (self.content,) if isinstance(self.content, str) else self.content

    @property
    def text(self) -> str:
        """The content with a placeholder for each item, for display."""
        if isinstance(self.content, str):
            return self.content
        return "".join([part if isinstance(part, str) else part.placeholder for part in self.content])
