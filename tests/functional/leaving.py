"""`pretrain_vlm.py` that says where it ended well: `-m tests.functional.leaving FOLDER FLAGS...`.

Each rank that comes to its end, and would exit with 0, leaves FOLDER/ended-RANK behind.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pretrain_vlm
from megatron_hetero.groups.launch import guarded, rank


def main(folder: str, *flags: str) -> None:
    """Run the program, and say so."""

    def run(argv: Sequence[str]) -> None:
        pretrain_vlm.main(argv)
        (Path(folder) / f"ended-{rank()}").touch()

    guarded(run, flags)


if __name__ == "__main__":
    main(*sys.argv[1:])
