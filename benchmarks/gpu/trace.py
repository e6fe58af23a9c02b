"""What a profiler sees of a piece of work: kernels, the time they take, and what kind they are of."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from heapq import nlargest
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from megatron_hetero.groups.platform import Platform

KINDS = (
    ("attention", r"flash|fmha|attention|sdpa"),
    ("optimizer", r"adam|multi_tensor"),
    ("copy", r"memcpy|memset|copy|CatArray|::(cat|fill_|zero_|clone)$|FillFunctor"),
    ("gemm", r"gemm|nvjet|cutlass|cublas|xmma|splitk|::(mm|addmm|bmm|matmul|linear)$"),
    ("index", r"index|gather|scatter|embedding"),
    ("reduction", r"reduce|softmax|norm|::(sum|mean|amax|aminmax|max)$"),
    ("elementwise", r"elementwise|triton|::(mul|add|sub|div|pow|rsqrt|silu|neg|exp)_?$"),
)
"""Kinds of kernels by their names, the first that fits. What fits none is `other`."""
TOP = 15


def of(work: Callable[[], Any], platform: Platform) -> dict[str, Any]:
    """Runs `work` once. `kernels`: how many ran on the device (on a CPU: operators), `ms` together, `kinds`: by kind
    the milliseconds and how many, `top`: name, milliseconds and number of those that take longest together.
    """
    with profile(activities=[ProfilerActivity.CUDA if platform.is_cuda else ProfilerActivity.CPU]) as found:
        work()
        platform.synchronize()
    return summary(_kernels(found) if platform.is_cuda else _operators(found))


def summary(kernels: Iterable[tuple[str, float]]) -> dict[str, Any]:
    """`kernels`: name and milliseconds of each."""
    counts, times = Counter[str](), defaultdict[str, float](float)
    for name, milliseconds in kernels:
        counts[name] += 1
        times[name] += milliseconds
    kinds: dict[str, list[float]] = {}
    for name, milliseconds in times.items():
        ms, count = kinds.setdefault(kind_of(name), [0.0, 0])
        kinds[kind_of(name)] = [ms + milliseconds, count + counts[name]]
    return {
        "kernels": counts.total(),
        "ms": sum(times.values()),
        "kinds": dict(sorted(kinds.items(), key=lambda kind: -kind[1][0])),
        "top": [[_short(name), times[name], counts[name]] for name in nlargest(TOP, times, key=times.__getitem__)],
    }


def kind_of(name: str) -> str:
    """The kind of a kernel or operator."""
    return next((kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), "other")


def _kernels(found: Any) -> list[tuple[str, float]]:
    return [
        (event.name, event.time_range.elapsed_us() / 1e3)
        for event in found.events()
        # Ranges of `record_function` are shown on the device too.
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    ]


def _operators(found: Any) -> list[tuple[str, float]]:
    return [(e.name, e.self_cpu_time_total / 1e3) for e in found.events() if e.name.startswith("aten::")]


def _short(name: str, length: int = 110) -> str:
    """Without return type and namespaces of all kernels."""
    bare = re.sub(r"^void |at::native::(\(anonymous namespace\)::)?|\(anonymous namespace\)::", "", name)
    return bare if len(bare) <= length else bare[: length - 1] + "…"
