"""Names of modules, of their roles, and of what leaves their stages."""

from __future__ import annotations

from typing import Literal

Role = Literal["encoder", "text"]
"""What a module does in the graph: items in and rows out, or tokens and rows in and an objective at its end."""
TEXT: Role = "text"
"""The role and the name of the language model. Encoders have the names that their family, or the user, gives them."""

ROWS, HIDDEN = "rows", "hidden"
"""Outputs of pipeline stages with several outputs: rows that replace embeddings, and hidden states."""
