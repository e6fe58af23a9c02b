"""What a profiler sees of a piece of work: kernels, the time they take, what kind they are of, and when none runs."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import nlargest
from typing import Any, NamedTuple

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.phases import BETWEEN, MARKS
from megatron_hetero.groups.platform import Platform

KINDS = (
    ("attention", r"flash|fmha|attention|sdpa"),
    # AdamW's own kernel converts, too. Only an optimizer takes square roots: norms take their reciprocals.
    ("optimizer", r"adam|multi_tensor|triton\w*_sqrt(?![a-z])"),
    ("copy", r"memcpy|memset|copy|CatArray|::(cat|fill_|zero_|clone)$|FillFunctor"),
    ("gemm", r"gemm|nvjet|cutlass|cublas|xmma|splitk|::(mm|addmm|bmm|matmul|linear)$"),
    ("index", r"index|gather|scatter|embedding"),
    ("reduction", r"reduce|softmax|norm|::(sum|mean|amax|aminmax|max)$"),
    ("elementwise", r"elementwise|triton|swiglu|::(mul|add|sub|div|pow|rsqrt|silu|neg|exp)_?$"),
)
"""Kinds of kernels by their names, the first that fits. What fits none is `other`."""
UPDATE, MEMORY = "update", r"^mem(cpy|set)"
"""All kernels of this phase are the optimizer's, except plain copies."""
TOP = 15


class Kernel(NamedTuple):
    """A kernel of the device, or an operator on a CPU, in milliseconds; `own`: without operators that it calls."""

    name: str
    start: float
    stop: float
    own: float
    phase: str = BETWEEN

    @property
    def kind(self) -> str:
        """What kind of kernel it is."""
        updates = self.phase == UPDATE and not re.search(MEMORY, self.name, re.IGNORECASE)
        return "optimizer" if updates else kind_of(self.name)


def of(work: Callable[[], Any], platform: Platform, marks: Sequence[str]) -> dict[str, Any]:
    """Run `work` once. `kernels`: how many ran on the device (on a CPU: operators), `ms` together, `kinds`: by kind the
    milliseconds and how many, `top`: name, milliseconds and number of those that take longest together, `phases`: by
    phase the number of kernels, the milliseconds in which some ran, and those in which none ran (`idle ms`). `marks`:
    the phases of the marks that `work` issues (`Phases.marks`).
    """
    with profile(activities=[ProfilerActivity.CUDA if platform.is_cuda else ProfilerActivity.CPU]) as found:
        work()
        platform.synchronize()
    kernels = sorted(_kernels(found) if platform.is_cuda else _operators(found), key=lambda kernel: kernel.start)
    of_phases = list(_in_phases(kernels, marks))
    return summary(of_phases) | {"phases": busy_and_idle(of_phases)}


def summary(kernels: Iterable[Kernel]) -> dict[str, Any]:
    """Sums over kernels, by kind and by name."""
    counts, times = Counter[str](), defaultdict[str, float](float)
    kinds = defaultdict[str, list[float]](lambda: [0.0, 0])
    for kernel in kernels:
        counts[kernel.name] += 1
        times[kernel.name] += kernel.own
        kind = kinds[kernel.kind]
        kind[:] = kind[0] + kernel.own, kind[1] + 1
    return {
        "kernels": counts.total(),
        "ms": sum(times.values()),
        "kinds": dict(sorted(kinds.items(), key=lambda kind: -kind[1][0])),
        "top": [[_short(name), times[name], counts[name]] for name in nlargest(TOP, times, key=times.__getitem__)],
    }


def busy_and_idle(kernels: Iterable[Kernel]) -> dict[str, dict[str, float]]:
    """By phase the number of kernels, and milliseconds with and without any. `kernels` are in the order of their start;
    a gap counts as the phase of the kernel that ends it.
    """
    phases, last = dict[str, dict[str, float]](), None
    for kernel in kernels:
        found = phases.setdefault(kernel.phase, {"kernels": 0, "busy ms": 0.0, "idle ms": 0.0})
        last = kernel.start if last is None else last
        found["kernels"] += 1
        found["idle ms"] += max(0.0, kernel.start - last)
        found["busy ms"] += max(0.0, kernel.stop - max(kernel.start, last))
        last = max(last, kernel.stop)
    return phases


def kind_of(name: str) -> str:
    """The kind of a kernel or operator."""
    return next((kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), "other")


def _in_phases(kernels: Iterable[Kernel], marks: Sequence[str]) -> Iterator[Kernel]:
    """The kernels without marks, each with the phase of the last mark before it."""
    phase, left = BETWEEN, iter(marks)
    for kernel in kernels:
        if any(mark in kernel.name for mark in MARKS):
            phase = next(left)
        else:
            yield kernel._replace(phase=phase)


def _kernels(found: Any) -> list[Kernel]:
    return [
        Kernel(event.name, start := event.time_range.start / 1e3, stop := event.time_range.end / 1e3, stop - start)
        for event in found.events()
        # Ranges of `record_function` are shown on the device too.
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    ]


def _operators(found: Any) -> list[Kernel]:
    return [
        Kernel(event.name, event.time_range.start / 1e3, event.time_range.end / 1e3, event.self_cpu_time_total / 1e3)
        for event in found.events()
        if event.name.startswith("aten::") or event.name in MARKS
    ]


def _short(name: str, length: int = 110) -> str:
    """Without return type and namespaces of all kernels."""
    bare = re.sub(r"^void |at::native::(\(anonymous namespace\)::)?|\(anonymous namespace\)::", "", name)
    return bare if len(bare) <= length else bare[: length - 1] + "…"
