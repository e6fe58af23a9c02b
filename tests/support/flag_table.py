"""The table of all flags in docs/configuration.md."""

from __future__ import annotations

from megatron_hetero.config.flags import flag_rows
from megatron_hetero.config.schema import Config


def flag_table_markdown() -> str:
    """All flags as a Markdown table."""
    lines = ["| flag | values | default | meaning |", "|---|---|---|---|"]
    for row in flag_rows(Config):
        flag, values, default, text = (cell.replace("|", "\\|") for cell in row)
        lines.append(f"| `{flag}` | {values} | `{default}` | {text} |")
    return "\n".join(lines) + "\n"
