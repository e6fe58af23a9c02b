"""Exact-match rate of a `transformers` folder on a data set, with greedy decoding.

    python -m megatron_hetero.cli.evaluate HF_DIR --annotations FILE --images DIR [--limit N] [--blank]

`--blank` replaces the pictures by grey ones: the rate of guessing.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

from megatron_hetero.base.errors import UserError
from megatron_hetero.base.terminal import Parser, console
from megatron_hetero.cli.command import a_path, at_least
from megatron_hetero.groups.launch import ended
from megatron_hetero.models.registry import titles

_positive = partial(at_least, 1)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m megatron_hetero.cli.evaluate",
        description="Answer a data set's questions greedily with plain transformers; print the exact-match rate.",
    )
    parser.add_argument("hf_dir", type=a_path, metavar="HF_DIR", help=f"{titles()} folder in transformers format")
    parser.add_argument("--annotations", type=a_path, required=True, help="annotations in LLaVA format")
    parser.add_argument("--images", type=a_path, help="image folder, the base of relative image paths")
    parser.add_argument("--limit", type=_positive, help="maximum number of records (default: all)")
    parser.add_argument("--blank", action="store_true", help="use uniform grey pictures of the same size")
    parser.add_argument("--max-new-tokens", type=_positive, default=8, help="maximum tokens per answer (default 8)")
    parser.add_argument("--batch-size", type=_positive, default=16, help="questions per batch (default 16)")
    parser.add_argument("--min-pixels", type=_positive, help="as data.min_pixels (default: from HF_DIR)")
    parser.add_argument("--max-pixels", type=_positive, help="as data.max_pixels (default: from HF_DIR)")
    parser.add_argument("--device", default="cpu", help="torch device (default cpu)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    return ended(lambda: _evaluate(_parser().parse_args(arguments)))


def _evaluate(options: argparse.Namespace) -> None:
    from transformers.utils.logging import disable_progress_bar

    from megatron_hetero.train.generate import exact_match, result_table

    disable_progress_bar()
    if options.images is not None and not options.images.is_dir():
        problem = f"{options.images} is not a folder"
        raise UserError.at("--images", problem=problem, fix="correct the path, or remove the flag")
    console().print(result_table(exact_match(**vars(options))))


if __name__ == "__main__":
    raise SystemExit(main())
