"""What layers compile: as the compiler sees it, it is what layers compute otherwise, with its gradients."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.config import cpp

from megatron_hetero.base.errors import UserError
from megatron_hetero.groups.platform import CPU
from megatron_hetero.models import language
from megatron_hetero.models.layers import compiled, dropout
from megatron_hetero.models.layers.compiled import NormWeights, require_compiler
from megatron_hetero.models.layers.mlp import gelu_tanh, swiglu
from megatron_hetero.models.layers.norms import LayerNorm, RMSNorm
from tests.unit.models.hopper import built, graphs, kernels, needs_triton, triton_function
from tests.unit.models.layers import norm_of, with_gradients


def alike(function: Callable[..., Tensor], other: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Both give the same, and so do their gradients."""
    torch.testing.assert_close(with_gradients(function, *inputs), with_gradients(other, *inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind, offset", [(RMSNorm, 0), (RMSNorm, 1), (LayerNorm, 0), (LayerNorm, 1)])
def test_norms_and_residuals(kind: Any, offset: int) -> None:
    norm, inputs = norm_of(kind, 24, torch.float32, offset), [torch.randn(7, 1, 24) for _ in range(2)]
    alike(lambda x: compiled.normed(x, *NormWeights.of(norm)), norm, inputs[0])

    def added_and_normed(part: Tensor, residual: Tensor) -> Tensor:
        return torch.cat(compiled.added_and_normed(part, norm.weight, residual, *NormWeights.of(norm)))

    def one_by_one(part: Tensor, residual: Tensor) -> Tensor:
        return torch.cat((residual + part + norm.weight, norm(residual + part + norm.weight)))

    alike(added_and_normed, one_by_one, *inputs)


def test_gates() -> None:
    out, gate = torch.randn(7, 24), torch.randn(7, 24)
    alike(compiled.gated, lambda out, gate: out * gate.sigmoid(), out, gate)


def test_activations() -> None:
    wide = torch.randn(7, 1, 24)
    alike(lambda x: compiled.activated(x, F.silu, True), swiglu, wide)
    alike(lambda x: compiled.activated(x, F.gelu, False), F.gelu, wide)


def head_gradients(logits: Tensor) -> Tensor:
    highest = logits.amax(dim=-1).float()
    total = compiled.run(language._sum_of_exponentials, logits, highest)
    return compiled.run(language._gradients_, logits.clone(), highest, total, torch.zeros(len(logits)).long())


WIDTH = 384
COMPILED: dict[str, Callable[[Tensor], Any]] = {
    "layers' SwiGLU": lambda x: compiled.run(compiled.activated, x, F.silu, True),
    "layers' GELU": lambda x: compiled.run(compiled.activated, x, gelu_tanh, False),
    "dropout": lambda x: dropout.Dropout(0.5, 7, 0).dropped(torch.arange(len(x), dtype=torch.int32), x[:, None]),
    "head": head_gradients,
}
"""What is compiled of layers, by its name, for [tokens, width]."""


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Inside, layers compile as on a GPU."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(dropout, "compiles_for", return_value=True))
        yield


@pytest.mark.parametrize("name", COMPILED)
def test_all_but_the_number_of_tokens_is_fixed(name: str) -> None:
    """Sizes are numbers in graphs, of which one serves any number of tokens."""
    with compiling(), graphs() as found:
        COMPILED[name](torch.randn(6, WIDTH))
        made = len(found)
        for tokens in (3, 77):
            COMPILED[name](torch.randn(tokens, WIDTH))
    sizes = [
        node.meta["example_value"] for graph in found for node in graph.graph.nodes if "example_value" in node.meta
    ]
    sizes = [value.shape for value in sizes if isinstance(value, Tensor)]
    assert 0 < len(found) == made
    assert any(isinstance(shape[0], torch.SymInt) for shape in sizes)
    assert all(type(size) is int for shape in sizes for size in shape[1:])


@needs_triton
@pytest.mark.parametrize("name", COMPILED)
def test_the_compiler_writes_widths_as_numbers(name: str) -> None:
    """Kernels for GPUs have no argument for a size (`ks0`, ...)."""
    with compiling(), kernels() as found:
        COMPILED[name](torch.randn(64, WIDTH).bfloat16())
    assert found and not [source for source in found if re.search(r"\bks\d", source)]


@needs_triton
@pytest.mark.parametrize("name", ["layers' SwiGLU", "layers' GELU"])
def test_kernels_of_the_compiler_load_16_bytes_at_once(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # The default, about which Triton 3.9 warns.
    with kernels() as found:
        COMPILED[name](torch.randn(64, WIDTH).bfloat16())
    (source,) = found
    types = {"in_ptr0": "*bf16", "out_ptr0": "*bf16", "xnumel": "i32"}
    kernel = built(triton_function(source, tmp_path), types, {"XBLOCK": 1024}, warps=4)
    assert set(kernel.memory) == {"ld.global.v4.b32", "st.global.v4.b32"}
    assert kernel.stack == kernel.shared == 0


@pytest.mark.long  # The compiler takes long.
def test_a_function_is_compiled_once_for_any_number_of_tokens() -> None:
    torch._dynamo.reset()
    counters.clear()
    for tokens in (6, 3, 0, 1, 2, 77, 4096):
        x = torch.randn(tokens, 1, 1)
        torch.testing.assert_close(compiled.run(compiled.activated, x, F.silu, False), F.silu(x))
    assert counters["stats"]["unique_graphs"] == 1


def test_a_machine_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cpp, "cxx", ("/no/compiler",))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    with pytest.raises(
        UserError, match=r"model.compile.*No working C\+\+ compiler .*. Install a C\+\+ compiler on every"
    ):
        require_compiler(CPU)
