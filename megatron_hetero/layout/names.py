"""Names of modules, of their roles, and of what leaves their stages."""

from __future__ import annotations

from typing import Literal

Role = Literal["encoder", "text"]
"""What a module does in the graph: an encoder turns items into rows; the text module takes tokens and rows and ends in
an objective."""
TEXT: Role = "text"
"""The role and the name of the language model. Encoders have the names that their family, or the user, gives them."""

ROWS, HIDDEN = "rows", "hidden"
"""Outputs of pipeline stages with several outputs: rows that replace embeddings, and hidden states."""
