"""Names of Megatron-Core, and private names of PyTorch, that the package uses.

    python -m tools.names              # names that the installed versions lack
    python -m tools.names --list       # all names, with the files that use them
    python -m tools.names --package DIR --list

A release that renames one breaks this package, so `make test-versions` looks for each name in each row.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megatron_hetero"
ADAPTER = "megatron_hetero.groups.megatron"
CORE = "megatron.core"

_FSDP = "torch.distributed.fsdp._fully_shard"
# Attributes of objects and keyword arguments that the package uses: syntax does not show whose they are.
MEMBERS = {
    f"{CORE}.distributed.DistributedDataParallel": "ddp_config finish_grad_sync zero_grad_buffer",
    f"{CORE}.extensions.transformer_engine_spec_provider.TESpecProvider": (
        "column_parallel_linear core_attention layer_norm row_parallel_linear"
    ),
    f"{CORE}.hyper_comm_grid.HyperCommGrid": "dim_names rank_offset shape",
    f"{CORE}.models.common.language_module.language_module.LanguageModule": "compute_language_model_loss",
    f"{CORE}.optimizer.optimizer.MegatronOptimizer": (
        "config get_grads_for_grad_norm get_main_grads_for_grad_norm get_parameters param_groups prepare_grads "
        "reload_model_params step_with_ready_grads zero_grad"
    ),
    f"{CORE}.optimizer.optimizer.ChainedOptimizer": "chained_optimizers",
    f"{CORE}.optimizer.optimizer_config.OptimizerConfig": (
        "use_distributed_optimizer use_precision_aware_optimizer_no_fp8_or_ds_fp8"
    ),
    f"{CORE}.packed_seq_params.PackedSeqParams": ("cu_seqlens_q cu_seqlens_kv max_seqlen_q max_seqlen_kv qkv_format"),
    f"{CORE}.parallel_state": (
        "get_context_parallel_group get_data_parallel_group get_expert_model_parallel_world_size "
        "get_pipeline_model_parallel_group get_tensor_model_parallel_group model_parallel_is_initialized"
    ),
    f"{CORE}.process_groups_config.ProcessGroupCollection": (
        "cp dp dp_cp dp_cp_ag dp_cp_gtp_remat embd ep expt_dp expt_dp_ag expt_dp_gtp_remat expt_gtp_remat expt_tp "
        "gtp_remat hcp inter_dist_opt intra_dist_opt intra_dp_cp intra_expt_dp mp pos_embd pp tp tp_cp tp_dp_cp tp_ep "
        "tp_ep_pp tp_ep_pp_with_egtp_remat"
    ),
    f"{CORE}.tensor_parallel.ColumnParallelLinear": "allreduce_dgrad sequence_parallel tp_group",
    f"{CORE}.tensor_parallel.RowParallelLinear": "input_size_per_partition sequence_parallel tp_group",
    f"{CORE}.tensor_parallel.cross_entropy": (
        "get_tensor_model_parallel_group get_tensor_model_parallel_rank get_tensor_model_parallel_world_size"
    ),
    f"{CORE}.tensor_parallel.random.CudaRNGStatesTracker": "add fork get_states reset set_states states_",
    f"{CORE}.transformer.transformer_config.TransformerConfig": (
        "attention_dropout bf16 gradient_accumulation_fusion hidden_size kv_channels normalization num_attention_heads "
        "num_query_groups params_dtype perform_initialization sequence_parallel tensor_model_parallel_size "
        "use_cpu_initialization"
    ),
    "torch._C._distributed_c10d": "_dump_nccl_trace",
    "torch.distributed.distributed_c10d._world": "group_count pg_group_ranks pg_map pg_names",
    "torch.distributed.fsdp.FSDPModule": "_get_fsdp_state",
    f"{_FSDP}._fsdp_param.FSDPParam": "_unsharded_param sharded_param unsharded_accumulated_grad",
    f"{_FSDP}._fsdp_param_group.FSDPParamGroup": (
        "_partial_reduce_output _post_forward_indices comm_ctx fsdp_params post_backward"
    ),
    f"{_FSDP}._fsdp_state.FSDPState": "_fsdp_param_group _fsdp_param_groups",
}


def names(package: Path) -> dict[str, list[str]]:
    """Each full name, such as ``megatron.core.tensor_parallel.all_to_all``, with the files that use it."""
    found: dict[str, set[str]] = {}
    trees = {path: ast.parse(path.read_text("utf-8")) for path in sorted(package.rglob("*.py"))}
    adapter = next((dict(_imports(tree)) for path, tree in trees.items() if _module(package, path) == ADAPTER), {})
    for path, tree in trees.items():
        known = dict(_imports(tree))
        for local, full in known.items():
            of_adapter = full.removeprefix(f"{ADAPTER}.")
            known[local] = adapter.get(of_adapter, full) if full.startswith(f"{ADAPTER}.") else full
        used = [full for full in known.values() if _counts(full)]
        for full in [*used, *_attributes(tree, known)]:
            found.setdefault(full, set()).add(str(path.relative_to(package)))
    for owner, members in MEMBERS.items():
        for name in members.split():
            found.setdefault(f"{owner}.{name}", set())
    # A module or class is left out if only its members are used.
    return {full: sorted(found[full]) for full in sorted(found) if not any(n.startswith(f"{full}.") for n in found)}


def missing(wanted: list[str]) -> list[str]:
    """The full names that the installed packages lack."""
    return [name for name in wanted if not _exists(name)]


def is_private(name: str) -> bool:
    """Whether a component of a dotted name begins with an underscore."""
    return any(component.startswith("_") for component in name.split("."))


def _counts(full: str) -> bool:
    return full.startswith(f"{CORE}.") or (full.startswith("torch.") and is_private(full))


def _module(package: Path, path: Path) -> str:
    return ".".join(path.relative_to(package.parent).with_suffix("").parts)


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield local and full names of everything that a file imports, at its top or in functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                top = name.name.partition(".")[0]
                yield (name.asname, name.name) if name.asname else (top, top)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for name in node.names:
                yield (name.asname or name.name), f"{node.module}.{name.name}"


def _attributes(tree: ast.AST, known: dict[str, str]) -> Iterator[str]:
    for node in ast.walk(tree):
        parts: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            parts, inner = [inner.attr, *parts], inner.value
        if parts and isinstance(inner, ast.Name) and inner.id in known:
            full = ".".join([known[inner.id], *parts])
            if _counts(full):
                yield full


@cache
def _exists(name: str) -> bool:
    owner, _, member = name.rpartition(".")
    try:
        importlib.import_module(name)
    except ImportError:
        pass
    else:
        return True
    value = _value(owner)
    if value is None:
        return False
    if hasattr(value, member) or member in getattr(value, "__dataclass_fields__", {}):
        return True
    return isinstance(value, type) and any(re.search(rf"self\.{member}\b", _source(cls)) for cls in value.__mro__[:-1])


def _value(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        owner, _, member = name.rpartition(".")
        return getattr(_value(owner), member, None) if owner else None


def _source(cls: type) -> str:
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):
        return ""


def main() -> int:
    """Print names; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="all names, with the files that use them")
    parser.add_argument("--package", type=Path, default=PACKAGE, metavar="DIR", help="package to read")
    options = parser.parse_args()
    used = names(options.package)
    if options.list:
        print(*(f"{name}: {', '.join(files)}" for name, files in used.items()), sep="\n")
        return 0
    lacking = missing(list(used))
    print(*lacking, sep="\n")
    return 1 if lacking else 0


if __name__ == "__main__":
    raise SystemExit(main())
