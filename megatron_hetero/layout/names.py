"""Names of modules, of their roles, and of the outputs of their stages."""

from __future__ import annotations

from typing import Literal

Role = Literal["encoder", "text"]
"""The role of a module in the graph: an encoder turns items, such as images, into rows; the text module turns tokens
and rows into a loss.
"""
TEXT: Role = "text"
"""The role and the name of the language model. Encoders are named by their model family or by the user."""

ROWS, HIDDEN = "rows", "hidden"
"""Names of the outputs of a stage with several outputs: rows that replace embeddings, and hidden states."""
