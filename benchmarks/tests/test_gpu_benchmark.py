"""`python -m benchmarks.gpu`, small and on a CPU: every section comes to its end, and its numbers hold together."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from benchmarks.gpu import sections
from benchmarks.gpu.__main__ import _names, _untimed_first
from benchmarks.gpu.honest import honest
from benchmarks.gpu.hopper import attention, spinning
from benchmarks.gpu.record import Check, Record, read
from benchmarks.gpu.trace import Kernel, busy_and_idle, kind_of, summary
from benchmarks.tests.expert_ranks import ROWS
from megatron_hetero.groups.platform import CPU, Platform
from megatron_hetero.models.layers import kernels

ROOT = Path(__file__).parents[2]


def run(*flags: str, timeout_s: float = 900) -> subprocess.CompletedProcess[str]:
    """The command, without a GPU."""
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *flags],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one run of the default sections wrote."""
    return small(tmp_path_factory.mktemp("gpu"), "default")


@pytest.fixture(scope="module")
def hopper(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one run of the sections for Hopper wrote."""
    return small(tmp_path_factory.mktemp("hopper"), "hopper")


def small(folder: Path, names: str) -> dict[str, Any]:
    """What one run wrote. The limit is for machines that others use too."""
    ended = run("--small", "--sections", names, "--out", str(folder), "--time-limit", "3600")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    text = (folder / "gpu.md").read_text()
    assert "No GPU" in text and "FAIL" not in text
    return json.loads((folder / "gpu.json").read_text())


def numbers(found: dict[str, Any], section: str) -> dict[str, Any]:
    return found["sections"][section]["numbers"]


@pytest.mark.long
def test_every_section_passes(found: dict[str, Any]) -> None:
    assert list(found["sections"]) == list(sections.SETS["default"])
    assert all(section["status"] == "ok" and section["passed"] for section in found["sections"].values())
    checked = {name: len(section["checks"]) for name, section in found["sections"].items()}
    assert checked["correctness"] == 6 and checked["sharing"] >= 24 and checked["program"] == 9


@pytest.mark.long
def test_frames_of_a_video_take_steps(found: dict[str, Any]) -> None:
    rows = numbers(found, "video")["videos"]
    assert len({row["setting"] for row in rows}) == 3 and len(rows) == 6
    assert all(row["ms"] > 0 and row["planned GB"] > 0 for row in rows)


@pytest.mark.long
def test_one_rank_equals_transformers(found: dict[str, Any]) -> None:
    fp32, bf16 = (numbers(found, "correctness")[dtype] for dtype in ("fp32", "bf16"))
    kinds = fp32["errors"].keys()
    assert {"visual.blocks.*.attn.qkv.weight", "model.layers.*.self_attn.k_proj.bias", "lm_head.weight"} <= kinds
    assert fp32["loss"] == pytest.approx(fp32["loss of transformers"], rel=1e-5)
    assert 0 < max(fp32["errors"].values()) < 1e-4
    assert 1e-4 < bf16["error of transformers"] < 0.1 and 1e-4 < bf16["error"] < 0.1
    assert bf16["errors"].keys() == bf16["errors of transformers"].keys() == kinds


@pytest.mark.long
def test_layouts_equal_one_rank(found: dict[str, Any]) -> None:
    rows = numbers(found, "sharing")["layouts"]
    assert {row["placement"] for row in rows} == {"colocated", "disjoint", "mixed"}
    assert {row["ranks"] for row in rows} == {2, 4}
    assert all(row["gradient error"] < 1e-5 for row in rows)
    assert any(row["gradient error"] > 0 for row in rows), "sums in another order, so that something was computed"


@pytest.mark.long
def test_the_program_resumes_where_it_was_killed(found: dict[str, Any]) -> None:
    of_program = numbers(found, "program")
    losses = of_program["steps"]["losses"]
    assert len(losses) == 20 and 11 <= len(of_program["killed"]["steps"]) < 20
    before = [line["loss"] for line in of_program["killed"]["steps"]]
    assert losses[: len(before)] == before, "on a CPU every step is the same again"


@pytest.mark.parametrize("section", ["share-7b", "share-32b"])
@pytest.mark.long
def test_shares(section: str, found: dict[str, Any]) -> None:
    of_share = numbers(found, section)
    parts = [f"{module} {way}" for module in ("vision", "text") for way in ("forward", "backward")]
    for steps in of_share["steps"], of_share["more steps"]:
        phases, stand_ins = steps["milliseconds"], steps["stand-ins ms"]
        assert all(phases[part] > 0 for part in [*parts, "gradient sums", "update"])
        assert sum(ms for name, ms in phases.items() if name not in ("step", "issued")) <= 1.5 * phases["step"]
        assert all(0 < stand_ins[part] < phases[part] for part in [*parts, "update"])
        left = honest(of_share | {"steps": steps}, copied_gb_s=1.0)
        assert left["step"] == pytest.approx(phases["step"] - left["stand-ins"]) and left["step"] > 0
    by_phase, host = of_share["trace"]["phases"], of_share["host"]
    assert all(by_phase[part]["idle ms"] >= 0 and host[part]["ms for a layer"] > 0 for part in parts)
    assert sum(phase["kernels"] for phase in by_phase.values()) == of_share["trace"]["kernels"]
    assert of_share["memory"]["planned GB"] == pytest.approx(sum(of_share["planned GB"].values()))
    assert {"gemm", "attention", "elementwise", "copy", "optimizer"} <= of_share["trace"]["kinds"].keys()
    assert of_share["trace"]["kernels"] == sum(count for _, count in of_share["trace"]["kinds"].values())


@pytest.mark.long
def test_what_hopper_is_asked(hopper: dict[str, Any]) -> None:
    """On a CPU, what runs there; of the rest, why not."""
    assert set(hopper["sections"]) == set(sections.SETS["hopper"])
    assert all(section["passed"] for section in hopper["sections"].values())
    assert len(hopper["sections"]["experts"]["checks"]) == 1 + len(ROWS)
    rows = numbers(hopper, "attention")["kernels"]
    assert {row["kernel"] for row in rows} == set(get_args(kernels.KernelName))
    ran = [row for row in rows if "skipped" not in row]
    assert [row["case"] for row in ran] == list(attention.CASES) and {row["kernel"] for row in ran} == {"bucketed"}
    assert all(row["error forward"] < 5e-3 and row["error backward"] < 2e-2 for row in ran)
    assert {row["skipped"] for row in rows if "skipped" in row} == {"needs a GPU"}
    products = numbers(hopper, "spinning")["products"]
    assert {row["carved out"] for row in products} == {0}
    assert sum("by ranks ms" in row for row in products) == 2 * len(spinning.LINEARS)
    assert numbers(hopper, "spinning")["beside a kernel"] == numbers(hopper, "graph")["graph"] == "needs a GPU"
    assert all(row["error backward"] < 5e-3 for row in numbers(hopper, "swiglu")["variants"])
    assert all(row["error backward"] < 1e-2 for row in numbers(hopper, "heads")["variants"])
    before, now = (numbers(hopper, name)["steps"] for name in ("share-7b-before", "share-7b"))
    assert before["loss"] == now["loss"], "on a CPU there is no other kernel"


# ------------------------------------------------------------------------------------- without a whole run


def test_sets_of_sections() -> None:
    assert set(sections.SECTIONS) == {*sections.SETS["default"], *sections.SETS["hopper"]} == {*sections.SETS["all"]}
    assert _names("hopper,video,attention") == [*sections.SETS["hopper"], "video"]
    assert _untimed_first(sections.SETS["all"])[0] == ["correctness", "sharing", "experts"]
    assert _untimed_first(["video", "graph"]) == [["video", "graph"]]
    assert _names("all")[-2:] == ["share-7b-before", "share-32b-before"], "what may be cut off"


@pytest.mark.parametrize("name", ["torch_flash", "bucketed"])
def test_a_kernel_by_name(name: str) -> None:
    """Where PyTorch sees no GPU, the package takes one of the oldest that has all kernels for granted."""
    device = torch.device("cuda")
    assert attention._kernel(name, 128, Platform(device, "nccl")) is getattr(kernels, name)
    assert attention._kernel("bucketed", 128, Platform(CPU, "gloo")) is kernels.bucketed
    with pytest.raises(RuntimeError, match="needs a GPU"):
        attention._kernel("torch_flash", 128, Platform(CPU, "gloo"))


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset:UserWarning")
def test_the_kernel_that_spins_compiles_for_hopper() -> None:
    """It waits in a loop, and its threads have registers enough that no product shares a multiprocessor with it."""
    compiler: Any = pytest.importorskip("triton.compiler", reason="needs Triton")
    backends: Any = importlib.import_module("triton.backends.compiler")
    from benchmarks.gpu.hopper.spin import WARPS, spin

    source = compiler.ASTSource(fn=spin, signature={"ends": "*i64", "nanoseconds": "i32"}, constexprs={})
    made = compiler.compile(source, target=backends.GPUTarget("cuda", 90, 32), options={"num_warps": WARPS})
    assert made.asm["ptx"].count("%globaltimer") == 2 and ".reqntid 512" in made.asm["ptx"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what to do where there is no GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    ended = run("--out", str(tmp_path), timeout_s=120)
    assert ended.returncode == 2
    assert "found no GPU" in ended.stderr and "--small" in ended.stderr
    assert not list(tmp_path.iterdir())


def test_a_section_that_hangs_is_stopped(tmp_path: Path) -> None:
    outcome = sections.run("environment", tmp_path / "section", limit_s=0.01, small=True)
    assert outcome.status == "stopped" and not outcome.passed and outcome.numbers == {}


def test_sections_share_compiled_kernels(tmp_path: Path) -> None:
    of_all = [sections._environment(name, tmp_path) for name in sections.SECTIONS]
    assert len({(each["TORCHINDUCTOR_CACHE_DIR"], each["TRITON_CACHE_DIR"]) for each in of_all}) == 1
    assert all(each["TORCHINDUCTOR_COMPILE_THREADS"] == "2" for each in of_all)


def test_a_section_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = sections.Section("Broken", "nowhere", 60)
    monkeypatch.setitem(sections.SECTIONS, "environment", broken)  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(sections, "_environment", lambda *_: os.environ | {"PYTHONPATH": "/nowhere"})
    monkeypatch.setattr(sections, "ROOT", tmp_path)
    outcome = sections.run("environment", tmp_path / "section", limit_s=60, small=True)
    assert outcome.status == "failed" and "benchmarks" in outcome.said


def test_a_record_is_whole_at_any_time(tmp_path: Path) -> None:
    record = Record(tmp_path / "found.json")
    record.put("a", 1)
    record.check("large", 2.0, 1.0)
    record.check("not a number", float("nan"), 1.0)
    record.add(Check.equal("same", [1], [1]))
    assert read(tmp_path / "found.json")["numbers"] == {"a": 1}
    assert [check["passed"] for check in read(tmp_path / "found.json")["checks"]] == [False, False, True]


@pytest.mark.parametrize(
    "name, kind",
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "gemm"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8>", "gemm"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>", "attention"),
        ("fmha_cutlassB_f32_aligned_64x64_k64_sm80(PyTorchMemEffAttention::AttentionBackwardKernel)", "attention"),
        ("Memcpy DtoD (Device -> Device)", "copy"),
        ("triton_poi_fused__to_copy_cat_clone_0", "copy"),
        ("triton_poi_fused___rshift____to_copy_add_clamp_copy__div_mul_slice_sqrt_sub_unbind_view_0", "optimizer"),
        ("triton_red_fused_add_mean_mul_pow_rsqrt_0", "elementwise"),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>", "copy"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "elementwise"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "reduction"),
        ("void at::native::indexSelectLargeIndex<float, long>", "index"),
    ],
)
def test_kinds_of_kernels(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_summaries_of_kernels() -> None:
    times = [("gemm a", 2.0, ""), ("gemm a", 1.0, ""), ("Memset", 0.5, "update"), ("triton copy", 0.25, "update")]
    made = summary(Kernel(name, 0.0, ms, ms, phase) for name, ms, phase in times)
    assert made["kernels"] == 4 and made["ms"] == 3.75
    assert made["kinds"] == {"gemm": [3.0, 2], "copy": [0.5, 1], "optimizer": [0.25, 1]}
    assert made["top"] == [["gemm a", 3.0, 2], ["Memset", 0.5, 1], ["triton copy", 0.25, 1]]


def test_gaps_count_by_the_phase_of_the_kernel_that_ends_them() -> None:
    times = [(1, 3, "a"), (2, 4, "a"), (5, 6, "a"), (9, 10, "b"), (9.5, 9.75, "b")]
    found = busy_and_idle(Kernel("", start, stop, 0.0, phase) for start, stop, phase in times)
    assert found["a"] == {"kernels": 3, "busy ms": 4.0, "idle ms": 1.0}
    assert found["b"] == {"kernels": 2, "busy ms": 1.0, "idle ms": 3.0}
