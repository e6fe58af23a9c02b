"""Command that converts `transformers` folders to a checkpoint from which a run in any layout starts, without a GPU.

    python -m megatron_hetero.cli.import HF_DIR CHECKPOINT

The checkpoint contains only weights, in their stored dtype. Only one tensor is in memory at a time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from megatron_hetero.base.terminal import Parser, size_text
from megatron_hetero.cli.command import a_path, add_encoders, by_name, progress
from megatron_hetero.groups.launch import ended
from megatron_hetero.models.registry import titles


def import_model(options: argparse.Namespace) -> str:
    """Import model folders as a checkpoint and return a summary. Raises `UserError`."""
    from megatron_hetero.checkpoint.convert import UNTRAINED, import_folders, with_own_encoders
    from megatron_hetero.checkpoint.record import ModelSources

    start, target = time.perf_counter(), options.checkpoint.absolute()
    given = ModelSources(options.hf_dir, options.vision, options.fresh_projector, by_name(options.encoder))
    with progress() as advance:
        done = import_folders(with_own_encoders(given), target, options.seed, advance)
    flag = f"--checkpoint.dir {target.parent}" if target.name == UNTRAINED else f"--checkpoint.resume {target}"
    return (
        f"wrote {options.checkpoint}: {done.tensors} tensors, {size_text(done.size)}, {' and '.join(done.dtypes)}, "
        f"in {time.perf_counter() - start:.1f} s; start a run from it with {flag}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m megatron_hetero.cli.import",
        description="Import the weights of a transformers folder as a checkpoint.",
    )
    parser.add_argument("hf_dir", type=a_path, metavar="HF_DIR", help=f"{titles()} folder, as for model.hf_path")
    parser.add_argument("checkpoint", type=a_path, metavar="CHECKPOINT", help="output folder: new or empty")
    parser.add_argument("--vision", type=a_path, metavar="DIR", help="as model.hf_path_vision")
    add_encoders(parser, "as modules.NAME.hf_path (default: those in HF_DIR/encoders)")
    parser.add_argument("--fresh-projector", action="store_true", help="as model.fresh_projector")
    parser.add_argument("--seed", type=int, help="seed of a fresh projector, as train.seed (default 0)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return ended(lambda: import_model(_parser().parse_args(arguments)))


if __name__ == "__main__":
    raise SystemExit(main())
