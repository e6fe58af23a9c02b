"""Every attention kernel that the package knows, at the sizes of a rank's share: rates, errors, and new plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu import trace
from benchmarks.gpu.hopper.timing import NO_GPU, medians_ms, wall_ms
from benchmarks.gpu.record import Record
from megatron_hetero.groups.platform import Platform
from megatron_hetero.models.layers import kernels
from megatron_hetero.models.layers.segments import PackedSegments

BACKWARD = 2.5
"""FLOPs of a backward pass over those of a forward pass: scores are computed again."""


@dataclass(frozen=True)
class Case:
    """Segments of `lengths` tokens, and the heads of a rank."""

    heads: int
    kv_heads: int
    dim: int
    lengths: tuple[int, ...]
    causal: bool

    @property
    def tflop(self) -> float:
        """Of a forward pass, the half of a causal mask that counts."""
        return 4 * self.heads * self.dim * sum(n * n for n in self.lengths) / (1 + self.causal) / 1e12

    def shorter(self, divisor: int) -> Case:
        """The same with shorter segments, of eight tokens at least."""
        return replace(self, lengths=tuple(max(8, n // divisor) for n in self.lengths))


CASES = {
    **{f"text {heads}/{kv}": Case(heads, kv, 128, (8208,), True) for heads, kv in ((5, 1), (7, 1), (14, 2), (28, 4))},
    "encoder sp:8, windows": Case(16, 16, 80, (64,) * 10 + (8,), False),
    "encoder sp:8, full": Case(2, 2, 80, (5184,), False),
    "encoder dp:8, windows": Case(16, 16, 80, (64,) * 81, False),
    "encoder dp:8, full": Case(16, 16, 80, (5184,), False),
}
"""Text: 32B on tp:8, 7B on tp:4, on tp:2 and whole. Encoder: 5,184 patches of a picture, in windows of 64."""
SHORTER = 64
"""By what segments are divided with `--small`."""


def measure(record: Record, folder: Path, *, small: bool) -> None:
    """Each kernel in each case."""
    platform, rows = Platform.detect(), list[dict[str, Any]]()
    for name, case in CASES.items():
        case = case.shorter(SHORTER) if small else case
        inputs, cotangent = _drawn(case, platform)
        expected = _expected(case, inputs, cotangent, platform)
        for kernel in get_args(kernels.KernelName):
            try:
                found = _measured(_kernel(kernel, case.dim, platform), case, inputs, cotangent, expected, platform)
            except Exception as error:  # A kernel that refuses a case is a result.
                found = {"skipped": str(error).partition("\n")[0][:200] or type(error).__name__}
            rows.append({"case": name, "kernel": kernel, **found})
            record.put("kernels", rows)


def _kernel(name: str, dim: int, platform: Platform) -> kernels.Kernel:
    """The kernel called `name`, as the package builds it once chosen. Raises an error where it cannot be used."""
    if name == "bucketed":
        return kernels.bucketed
    if not platform.is_cuda:
        raise RuntimeError(NO_GPU)
    names, choose = iter([name]), kernels.choose_kernel
    # What a kernel falls back to is chosen as usual.
    with mock.patch.object(kernels, "choose_kernel", lambda *given: next(names, None) or choose(*given)):
        found = kernels.kernel_for.__wrapped__(platform.device, torch.bfloat16, dim)
    if found is kernels.bucketed:
        raise RuntimeError(f"the package does not take {name} here")
    return found


def _drawn(case: Case, platform: Platform) -> tuple[list[Tensor], Tensor]:
    """Queries, keys and values, and a gradient of the output."""
    generator, tokens = torch.Generator(platform.device).manual_seed(0), sum(case.lengths)
    q, k, v, cotangent = (
        torch.randn(tokens, heads, case.dim, device=platform.device, generator=generator).bfloat16()
        for heads in (case.heads, case.kv_heads, case.kv_heads, case.heads)
    )
    return [x.requires_grad_() for x in (q, k, v)], cotangent


def _expected(case: Case, inputs: Sequence[Tensor], cotangent: Tensor, platform: Platform) -> list[Tensor]:
    """Output and gradients in fp32 on the same numbers, one key/value head at a time."""
    segments, found = PackedSegments.of(case.lengths, platform.device), []
    for *local, grad in zip(*(x.detach().float().chunk(case.kv_heads, 1) for x in (*inputs, cotangent)), strict=True):
        local = [x.requires_grad_() for x in local]
        q, k, v = local
        out = kernels.bucketed(q, k, v, segments, causal=case.causal)
        found.append((out.detach(), *torch.autograd.grad(out, local, grad)))
    return [torch.cat(parts, 1) for parts in zip(*found, strict=True)]


def _measured(
    kernel: kernels.Kernel,
    case: Case,
    inputs: list[Tensor],
    cotangent: Tensor,
    expected: list[Tensor],
    platform: Platform,
) -> dict[str, Any]:
    outs, (q, k, v) = list[Tensor](), inputs

    def both(case: Case, inputs: list[Tensor], cotangent: Tensor, segments: PackedSegments) -> list[Tensor]:
        q, k, v = inputs
        out = kernel(q, k, v, segments, causal=case.causal)
        return [out, *torch.autograd.grad(out, inputs, cotangent)]

    def forward() -> None:
        outs[:] = [kernel(q, k, v, segments, causal=case.causal)]

    segments, half = PackedSegments.of(case.lengths, platform.device), case.shorter(2)
    first_ms = wall_ms(lambda: both(case, inputs, cotangent, segments), platform)
    found = both(case, inputs, cotangent, segments)
    times = medians_ms(
        {"forward": forward, "backward": lambda: torch.autograd.grad(outs[0], inputs, cotangent)}, platform
    )
    of_half = half, *_drawn(half, platform), PackedSegments.of(half.lengths, platform.device)
    plans = [wall_ms(lambda: both(*of_half), platform) for _ in range(3)]
    seen = trace.of(lambda: both(case, inputs, cotangent, segments), platform, ())["top"][:2]
    errors = [float((x.float() - y).norm() / y.norm()) for x, y in zip(found, expected, strict=True)]
    return {
        "forward ms": times["forward"], "backward ms": times["backward"],
        "forward TFLOP/s": case.tflop / times["forward"] * 1e3,
        "backward TFLOP/s": BACKWARD * case.tflop / times["backward"] * 1e3,
        "error forward": errors[0], "error backward": max(errors[1:]),
        "first call ms": first_ms, "first call of half the tokens ms": plans[0], "later calls ms": min(plans[1:]),
        "longest on the device": [name for name, *_ in seen],
    }  # fmt: skip
