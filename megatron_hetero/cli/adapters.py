"""Command that merges a PEFT folder into its base model, or splits a tuned model into its base and a PEFT folder,
without a GPU or torchrun.

    python -m megatron_hetero.cli.adapters merge BASE ADAPTER OUT [--dtype float32|bfloat16|stored]
    python -m megatron_hetero.cli.adapters split BASE TUNED OUT --r R [--targets NAME ...]

In memory are the adapter, one tensor of each model, and one file of the output.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial

from megatron_hetero.base.terminal import Parser, size_text
from megatron_hetero.cli.command import a_path, add_encoders, at_least, by_name, positive, progress
from megatron_hetero.groups.launch import ended

# Modules that import torch, which takes seconds, are imported where they are used: `--help` does not wait for them, and
# Ctrl-C can interrupt the import.


def merge(options: argparse.Namespace) -> str:
    """Merge a PEFT folder into its base model and return a summary. Raises `UserError`."""
    from megatron_hetero.checkpoint.adapter_tools import merge_adapter
    from megatron_hetero.checkpoint.record import ModelSources

    start = time.perf_counter()
    sources = ModelSources(options.base, options.vision, False, by_name(options.encoder))
    with progress() as advance:
        done = merge_adapter(
            sources, options.adapter, options.out.absolute(), options.dtype, round(options.shard_gb * 10**9), advance
        )
    return (
        f"wrote {options.out}: {done.tensors} tensors, {size_text(done.size)}, {' and '.join(done.dtypes)}, "
        f"in {time.perf_counter() - start:.1f} s{done.notice and '; '}{done.notice}"
    )


def split(options: argparse.Namespace) -> str:
    """Split a tuned model into its base and a PEFT folder and return a summary. Raises `UserError`."""
    from dataclasses import replace

    from megatron_hetero.base.errors import listed
    from megatron_hetero.checkpoint.adapter_tools import split_adapter
    from megatron_hetero.checkpoint.convert import with_own_encoders
    from megatron_hetero.checkpoint.record import ModelSources
    from megatron_hetero.job.module import DTYPES

    start, encoders = time.perf_counter(), by_name(options.encoder)
    sources = ModelSources(options.base, options.vision, False, encoders)
    tuned = with_own_encoders(ModelSources(options.tuned))
    tuned = replace(tuned, encoders={**encoders, **tuned.encoders} if encoders else {})
    with progress() as advance:
        done = split_adapter(
            sources, tuned, options.out.absolute(), options.r, options.targets, DTYPES[options.dtype], advance
        )
    text = (
        f"wrote {options.out}: adapters of {done.layers} layers, {done.values:,} values, "
        f"and {done.whole} whole tensors, in {time.perf_counter() - start:.1f} s\n"
        f"relative error {done.error:.2e} of the difference, at most {done.worst[1]:.2e} in a layer ({done.worst[0]})"
    )
    if done.left_out:
        text += f"\nleft out: {listed(done.left_out)}, which differ but are not in an adapter"
    return text


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m megatron_hetero.cli.adapters", description="Merge and split adapters in PEFT format."
    )
    commands = parser.add_subparsers(required=True, metavar="merge|split", parser_class=Parser)
    merging = commands.add_parser("merge", help="write a model with an adapter merged")
    merging.set_defaults(run=merge)
    merging.add_argument("base", type=a_path, metavar="BASE", help="model folder, as for model.hf_path")
    merging.add_argument("adapter", type=a_path, metavar="ADAPTER", help="PEFT folder")
    merging.add_argument("out", type=a_path, metavar="OUT", help="output folder: new, empty, or an earlier export")
    merging.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "stored"),
        default="stored",
        help="dtype of the weights (default: stored, the base's per tensor)",
    )
    merging.add_argument(
        "--shard-gb",
        type=positive,
        default=5.0,
        metavar="GB",
        help="maximum weight file size, 10^9 bytes (default 5)",
    )
    splitting = commands.add_parser("split", help="write the adapter that is closest to the changes of a tuned model")
    splitting.set_defaults(run=split)
    splitting.add_argument("base", type=a_path, metavar="BASE", help="model folder, as for model.hf_path")
    splitting.add_argument("tuned", type=a_path, metavar="TUNED", help="folder of a model that was tuned from BASE")
    splitting.add_argument("out", type=a_path, metavar="OUT", help="output folder: new, empty, or an earlier export")
    splitting.add_argument("--r", type=partial(at_least, 1), required=True, metavar="R", help="rank of adapters")
    splitting.add_argument(
        "--targets",
        nargs="+",
        default=[],
        metavar="NAME",
        help="layers, as modules.NAME.lora.targets (default: all linear layers that differ)",
    )
    splitting.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of adapters (default float32)"
    )
    for command in (merging, splitting):
        command.add_argument("--vision", type=a_path, metavar="DIR", help="as model.hf_path_vision, of BASE")
        add_encoders(command, "as modules.NAME.hf_path, of BASE")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return ended(lambda: _run(_parser().parse_args(arguments)))


def _run(options: argparse.Namespace) -> str:
    return options.run(options)


if __name__ == "__main__":
    raise SystemExit(main())
