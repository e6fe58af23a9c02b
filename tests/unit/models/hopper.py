"""What Triton compiles for an H100, and what PyTorch's compiler writes for one, without a GPU: nothing runs.

Triton's wheel has all it takes (`pip install --no-deps triton`), up to ptxas and cuobjdump. PyTorch for CPUs has the
compiler's back end for GPUs, which asks for a device here and there.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import contextlib
import copy
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from megatron_hetero.groups import platform

HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton (pip install --no-deps triton)")
Backend = Callable[[torch.fx.GraphModule, list[Any]], Any]


class Built(NamedTuple):
    """A compiled kernel. `memory`: how often each kind of access to global memory is in it, such as
    `ld.global.v4.b32`. `registers`: of a thread. `stack`: bytes of a thread, where registers spill. `shared`: bytes of
    a program.
    """

    memory: Counter[str]
    registers: int
    stack: int
    shared: int


@pytest.fixture
def triton_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Triton compiles into a folder of its own."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # The default, about which Triton 3.9 warns.


def errors_by_the_interpreter(module: str) -> dict[str, float]:
    """What `python -m module` prints of its errors, where Triton interprets."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    root = Path(__file__).parents[3]
    found = subprocess.run([sys.executable, "-m", module], env=environment, cwd=root, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


def built(kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int) -> Built:
    """Compile `kernel`, whose arguments have these Triton `types` and are multiples of 16; others are `constants`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names: list[str] = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in types},
    )
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    tools = Path(str(triton.__file__)).parent / "backends" / "nvidia" / "bin"
    with NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(found.asm["cubin"])
        cubin.flush()
        usage = subprocess.check_output([tools / "cuobjdump", "-res-usage", cubin.name], text=True)
    memory = Counter(re.findall(r"(?:ld|st)\.global[.:\w]*", found.asm["ptx"]))
    registers, stack = (int(re.findall(rf"{what}:(\d+)", usage)[0]) for what in ("REG", "STACK"))
    return Built(memory, registers, stack, found.metadata.shared)


def triton_function(source: str, folder: Path) -> Any:
    """The kernel with this source, as PyTorch's compiler writes it, from a module in `folder`."""
    names = "import triton, triton.language as tl\nfrom torch._inductor.runtime.triton_helpers import libdevice\n"
    (folder / "kernel.py").write_text(f"{names}\n@triton.jit\n{source}\n")
    return next(each for each in runpy.run_path(str(folder / "kernel.py")).values() if hasattr(each, "arg_names"))


@contextlib.contextmanager
def compiled_by(backend: Backend) -> Iterator[None]:
    """Inside, what the package compiles is compiled by `backend`."""
    with mock.patch.object(torch, "compile", partial(torch.compile, backend=backend)):
        for clear in (platform.compiled.cache_clear, torch._dynamo.reset):
            clear()
        yield
    for clear in (platform.compiled.cache_clear, torch._dynamo.reset):
        clear()


@contextlib.contextmanager
def graphs() -> Iterator[list[torch.fx.GraphModule]]:
    """Inside, the graphs that PyTorch makes of what is compiled are added to the list; its operators run them."""
    found = list[torch.fx.GraphModule]()

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        found.append(graph)
        return graph.forward

    with compiled_by(backend):
        yield found


@contextlib.contextmanager
def kernels() -> Iterator[list[str]]:
    """Likewise, with the source of each Triton kernel that PyTorch's compiler writes for an H100."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    found = list[str]()

    def compiler(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        found.extend(re.findall(r"@triton.jit\n(def .*?)\n'''", _written(copy.deepcopy(graph), inputs), re.DOTALL))
        return graph.forward

    with compiled_by(aot_autograd(fw_compiler=compiler, decompositions=select_decomp_table())):
        yield found


def _written(graph: torch.fx.GraphModule, inputs: list[Any]) -> str:
    """The module that the compiler writes for a graph of fake tensors of the host, as if these were on an H100."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._guards import detect_fake_mode
    from torch._inductor import scheduler
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.runtime.hints import DeviceProperties
    from torch._inductor.virtualized import V
    from torch.utils import _triton

    mode: Any = detect_fake_mode(inputs)

    def moved(x: Any) -> Any:
        with mode:
            return x.new_empty_strided(x.shape, x.stride(), device="cuda") if isinstance(x, Tensor) else x

    for node in graph.graph.nodes:
        node.meta["val"] = tree_map(moved, node.meta.get("val"))
        if "device" in node.kwargs:
            node.kwargs = node.kwargs | {"device": torch.device("cuda", 0)}
    inputs = list(map(moved, inputs))
    lowering = GraphLowering(graph, example_inputs=inputs, shape_env=mode.shape_env)
    h100 = DeviceProperties("cuda", 0, 132, 90, 9, 65536, 2048)
    answers: list[tuple[Any, str, Any]] = [
        (scheduler, "has_triton", True), (_triton, "triton_hash_with_backend", ""), (DeviceProperties, "create", h100),
        (CudaInterface.Worker, "get_device_properties", h100), (torch.cuda, "get_device_capability", (9, 0)),
    ]  # fmt: skip
    with contextlib.ExitStack() as stack:
        for where, name, answer in answers:
            stack.enter_context(mock.patch.object(where, name, return_value=answer))
        for context in (V.set_fake_mode(mode), V.set_graph_handler(lowering), V.set_debug_handler(DebugContext())):
            stack.enter_context(context)
        lowering.run(*inputs)
        code, _ = lowering.codegen()
    return code if isinstance(code, str) else code.value
