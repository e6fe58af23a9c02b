"""Command that exports a checkpoint to a `transformers` folder, or a PEFT folder if it has adapters, without a GPU.

    python -m megatron_hetero.cli.export CHECKPOINT HF_DIR [--merge] [--dtype float32|bfloat16|stored]

Every file of the checkpoint is verified first. Only one shard of the model is in memory at a time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from megatron_hetero.base.terminal import Parser, size_text
from megatron_hetero.cli.command import a_path, add_encoders, by_name, positive, progress
from megatron_hetero.groups.launch import ended

# Modules that import torch, which takes seconds, are imported where they are used: `--help` does not wait for them, and
# Ctrl-C can interrupt the import.


def export(options: argparse.Namespace) -> str:
    """Export a checkpoint and return a summary. Raises `UserError`."""
    from megatron_hetero.checkpoint.convert import OpenCheckpoint, export_checkpoint
    from megatron_hetero.checkpoint.record import ModelSources

    start, target, encoders = time.perf_counter(), options.hf_dir.absolute(), by_name(options.encoder)
    with progress() as advance:
        checkpoint = OpenCheckpoint.open(options.checkpoint, advance)
        sources = ModelSources.recorded(checkpoint.record.config).moved(options.model, options.vision, encoders)
        limit = round(options.shard_gb * 10**9)
        merge = options.merge
        done = export_checkpoint(checkpoint, target, sources, options.dtype, limit, advance, merge=merge)
    newest = f", the newest in {options.checkpoint}" if checkpoint.folder != options.checkpoint else ""
    return (
        f"wrote {options.hf_dir}: {done.tensors} tensors, {size_text(done.size)}, {' and '.join(done.dtypes)}, "
        f"in {time.perf_counter() - start:.1f} s, from {checkpoint.folder}{newest}{done.notice and '; '}{done.notice}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m megatron_hetero.cli.export",
        description="Export a checkpoint in transformers format, adapters in PEFT's.",
    )
    parser.add_argument(
        "checkpoint",
        type=a_path,
        metavar="CHECKPOINT",
        help="checkpoint, or folder of checkpoints: the newest",
    )
    parser.add_argument("hf_dir", type=a_path, metavar="HF_DIR", help="output folder: new, empty, or an earlier export")
    parser.add_argument("--merge", action="store_true", help="write a whole model with the adapters merged")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "stored"),
        help="dtype of the weights (default: model.dtype of the run); stored keeps the checkpoint's dtype per tensor",
    )
    parser.add_argument("--model", type=a_path, metavar="DIR", help="new location of model.hf_path")
    parser.add_argument("--vision", type=a_path, metavar="DIR", help="new location of model.hf_path_vision")
    add_encoders(parser, "new location of modules.NAME.hf_path")
    parser.add_argument(
        "--shard-gb",
        type=positive,
        default=5.0,
        metavar="GB",
        help="maximum weight file size, 10^9 bytes (default 5)",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return ended(lambda: export(_parser().parse_args(arguments)))


if __name__ == "__main__":
    raise SystemExit(main())
