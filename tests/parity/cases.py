"""Rows of the parity matrix, what plain `transformers` in one process makes of them, and how a layout is compared."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_hetero.schedule.settings import ScheduleSettings
from tests.parity import runs
from tests.support.folders import ModelChoice, write_data, write_model
from tests.support.oracle import Oracle, TwoTowers
from tests.support.pool import Pool

GLOBAL_BATCH = 8
RATES = {"adamw": 1e-3, "sgd": 1e-1}
OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=RATES["adamw"], weight_decay=0.0),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=RATES["sgd"]),
}
BASE = ModelChoice()
QWEN3 = replace(
    BASE, family="qwen3_vl", text_layers=4, vision_layers=4, deepstack=(0, 1, 2), head_dim=16, text_hidden=48, seed=10
)
MOE = replace(QWEN3, family="qwen3_vl_moe", seed=31)
DELTA = replace(QWEN3, family="qwen3_5", head_dim=32, delta_dims=(32, 24), attention_every=4, seed=41)
DELTA_MOE = replace(DELTA, family="qwen3_5_moe", attention_every=2, seed=70)
MODELS = {
    "untied": BASE,
    "tied": replace(BASE, tied=True, seed=1),
    "one-kv-head": replace(BASE, kv_heads=1, seed=2, full_layers=(0, 2)),
    "deep": replace(BASE, text_layers=4, vision_layers=4, full_layers=(1, 3), seed=4),
    "deep-tied": replace(BASE, text_layers=4, vision_layers=4, full_layers=(1, 3), tied=True, seed=5),
    "two-encoders": replace(BASE, seed=6),
    "two-encoders-deep": replace(BASE, text_layers=4, seed=7),
    "qwen3": QWEN3,
    "qwen3-tied": replace(QWEN3, tied=True, seed=11),
    "qwen3-twelve-heads": replace(
        QWEN3, heads=12, kv_heads=4, head_dim=8, text_hidden=48, vision_heads=12, vision_head_dim=4, seed=12
    ),
    "qwen3-one-kv-head": replace(QWEN3, kv_heads=1, deepstack=(1, 2), seed=13),
    "qwen3-deep": replace(QWEN3, text_layers=6, vision_layers=6, deepstack=(1, 3, 4), seed=14),
    "qwen3-two-encoders": replace(QWEN3, seed=15),
    "qwen3-two-qwen3-encoders": replace(QWEN3, seed=16),
    "moe": MOE,
    "moe-tied": replace(MOE, tied=True, seed=21),
    "moe-one": replace(MOE, experts=5, top_k=1, seed=22),
    "moe-eight": replace(MOE, experts=16, top_k=8, expert_ffn=9, seed=23),
    "moe-mixed": replace(MOE, sparse_step=2, mlp_only_layers=(1,), text_layers=5, seed=24),
    "moe-four": replace(MOE, experts=4, top_k=2, seed=25),
    "delta": DELTA,
    "delta-tied": replace(DELTA, tied=True, attention_every=3, seed=65),
    "delta-deep": replace(DELTA, text_layers=6, vision_layers=6, seed=81),
    "delta-six-heads": replace(DELTA, heads=6, kv_heads=2, delta_heads=(3, 6), attention_every=2, seed=45),
    "delta-one-key-head": replace(DELTA, delta_heads=(1, 4), delta_dims=(24, 32), taps=2, seed=46),
    "delta-two-encoders": replace(DELTA, seed=47),
    "delta-moe": DELTA_MOE,
    "delta-moe-tied": replace(DELTA_MOE, tied=True, experts=5, seed=48),
    "twelve-heads": replace(BASE, heads=12, kv_heads=4, head_dim=8, vision_heads=12, vision_head_dim=4, seed=3),
}


DETAIL = replace(BASE, vision_layers=2, vision_heads=2, vision_head_dim=12, vision_ffn=40, full_layers=(0,), seed=8)
DETAILS = {"qwen3-two-qwen3-encoders": replace(QWEN3, vision_layers=3, vision_heads=2, deepstack=(1,), seed=17)}
"""The second encoder of models with two, which is `DETAIL` where none is named."""


@dataclass(frozen=True)
class Case:
    """One row of the matrix: layouts (`detail`: of a second encoder), model, samples per micro-batch, what else is set,
    the global batch, and how many pictures one sample after the other has.
    """

    vision: str
    text: str
    ranks: int
    model: str = "untied"
    micro: int = 1
    flags: tuple[str, ...] = ()
    given_batch: int | None = None
    detail: str | None = None
    pictures: tuple[int, ...] = (1, 2, 0, 1)

    @property
    def balance(self) -> float:
        """Coefficient of the loss that balances experts."""
        return float(self.flags[self.flags.index(BALANCE) + 1]) if BALANCE in self.flags else 0.0

    @property
    def batch(self) -> int:
        """Samples of a step; fewer where each is a micro-batch of its own."""
        alone = self.micro == 1 and "dp" not in self.text
        return self.given_batch or (GLOBAL_BATCH // 2 if alone else GLOBAL_BATCH)

    def __str__(self) -> str:
        setting = re.split("[-.]", self.flags[0].removeprefix("--"))[1] if self.flags else ""
        extra = " whole activations" if self.flags == WHOLE else f" {setting}" * bool(setting)
        extra += "" if self.pictures == Case.pictures else f" {self.pictures} pictures"
        encoders = self.vision if self.detail is None else f"{self.vision}+{self.detail}"
        return f"{encoders}|{self.text} {self.model} micro {self.micro}{extra}"


BALANCE = "--model.router_aux_loss_coef"
RECOMPUTE = ("--vision-recompute", "full", "--text-recompute", "full")
FRUGAL = (
    *("--vision-recompute", "selective", "--text-recompute", "selective"),
    *("--vision-chunk", "16", "--text-chunk", "16"),
)
RECOMPUTED = ("--schedule.kind", "recompute")
UNEVEN = ("--text-layers", "1", "3", "--vision-layers", "3", "1")
SPLIT, ONE_BY_ONE = ("--text-layers", "1", "3"), ("--text-layers", "1", "1", "1", "1")
VIRTUAL = ("--schedule.virtual_stages", "2")
NOT_AHEAD = ("--schedule.run_ahead", "0")
BUDGET = ("--train.tokens_per_micro_batch", "256", "--data.max_seq_length", "256")
IN_ORDER = ("--data.balance", "off")
WAVES = [ScheduleSettings(waves=waves) for waves in (1, 2, GLOBAL_BATCH)]
AHEAD = [ScheduleSettings(run_ahead=ahead) for ahead in (0, 1, 3)]
OVERLAPPED = ("--vision-tp_overlap", "true", "--text-tp_overlap", "true")
WHOLE = ("--vision-sequence_parallel", "false", "--text-sequence_parallel", "false")


def zero(vision: int, text: int, *flags: str) -> tuple[str, ...]:
    """ZeRO stages of both modules, and what else is set."""
    return ("--vision-zero", str(vision), "--text-zero", str(text), *flags)


@dataclass
class Trained:
    """Three steps of one optimizer by the oracle."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]


class Runs(dict[str, Trained]):
    """By the name of an optimizer; made when it is asked for."""

    def __init__(self, make: Callable[[str], Trained]):
        super().__init__()
        self.make = make

    def __missing__(self, name: str) -> Trained:
        self[name] = self.make(name)
        return self[name]


@dataclass
class Expected:
    """What the oracle found for one model: the folder, and per kind of run the numbers."""

    folder: Path
    loss: float
    gradients: dict[str, torch.Tensor]
    before: dict[str, torch.Tensor]
    runs: Runs

    @property
    def paths(self) -> tuple[Path, Path]:
        """The model's folder, and the data."""
        return self.folder / "model", self.folder / "data.jsonl"


Ask = Callable[[Case], Expected]


def write_case(folder: Path, case: Case) -> Callable[[], Oracle]:
    """Write the model and the data of a case, and return what loads them."""
    choice, batch = MODELS[case.model], case.batch
    detail = DETAILS.get(case.model, DETAIL) if case.detail is not None else None
    write_model(folder / "model", choice)
    if detail is not None:
        write_model(folder / "detail", detail)
    details = (0,) if detail is None else (1, 0, 0, 2)
    data = write_data(folder, 3 * batch, seed=choice.seed, pictures=case.pictures, turns=2, details=details)
    kind = Oracle if detail is None else TwoTowers
    return lambda: replace(kind.load(folder / "model", data), balance=case.balance)


def ask_oracle(folder: Path, case: Case) -> Expected:
    """Write the model and the data of a case, and let the oracle train on them."""
    load, batch = write_case(folder, case), case.batch
    oracle = load()
    loss, gradients = oracle.step(range(batch))
    before = oracle.weights()
    return Expected(folder, loss, gradients, before, Runs(lambda name: train_alone(load(), name, batch)))


def train_alone(oracle: Oracle, name: str, batch: int) -> Trained:
    optimizer = OPTIMIZERS[name](oracle.model.parameters())
    losses, norms = [], []
    for step in range(3):
        loss, _ = oracle.step(range(step * batch, (step + 1) * batch))
        norms.append(float(torch.nn.utils.clip_grad_norm_(oracle.model.parameters(), 1.0)))
        optimizer.step()
        losses.append(loss)
    return Trained(losses, norms, oracle.weights())


def flags_of(case: Case, folder: Path, *more: str) -> list[str]:
    """The configuration of a case, with what else is given."""
    text = f"--model.hf_path {folder}/model --model.dtype float32 --data.registry.d.annotations {folder}/data.jsonl "
    text += f"--data.registry.d.images {folder}/images --data.datasets d --data.shuffle false --data.workers 0 "
    text += f"--train.global_batch_size {case.batch} --train.micro_batch_size {case.micro} --log.dir {folder}/log "
    text += f"--vision-parallel {case.vision} --text-parallel {case.text}"
    if case.detail is not None:
        text += f" --detail-hf_path {folder}/detail --detail-token <|video_pad|>"
        text += f" --detail-parallel {case.detail}"
    return [*text.split(), *case.flags, *more]


def norm_of(tensors: dict[str, torch.Tensor]) -> float:
    """Of all tensors together."""
    return math.sqrt(sum(float((t.double() ** 2).sum()) for t in tensors.values()))


def gradients_equal(case: Case, want: Expected, pool: Pool, frozen: Collection[str] = ()) -> None:
    """Loss and gradients of one step. Those of `frozen` parts of the model are zero."""
    freeze = ("--model.freeze", *frozen) if frozen else ()
    got = pool.run(runs.gradients, flags_of(case, want.folder, *freeze))[0]
    assert got["loss"] == pytest.approx(want.loss, rel=1e-5)
    assert got["gradients"].keys() == want.gradients.keys()
    is_frozen = {name: _part_of(name) in frozen for name in want.gradients}
    expected = {n: torch.zeros_like(g) if is_frozen[n] else g for n, g in want.gradients.items()}
    everything = norm_of(expected)
    assert everything > 0
    wrong = {}
    for name, gradient in expected.items():
        difference = np.linalg.norm(got["gradients"][name].astype(np.float64) - gradient.double().numpy())
        if not difference <= 1e-4 * gradient.norm() + 1e-7 * everything * (not is_frozen[name]):
            wrong[name] = f"{difference / float(gradient.norm() or everything):.1e}"
    assert not wrong
    assert got["norm"] == pytest.approx(everything, rel=1e-4)


def _part_of(name: str) -> str:
    """As `model.freeze` names the parts of a model with one encoder."""
    return "text" if "visual." not in name else "projector" if "merger" in name else "vision"


def schedules_agree(case: Case, others: Sequence[ScheduleSettings], want: Expected, pool: Pool) -> None:
    """Loss and gradient norm under the schedule of the case, and under `others`."""
    found = pool.run(runs.losses, flags_of(case, want.folder), others)[0]
    assert len(found) == 1 + len(others)
    for loss, norm in found:
        assert loss == pytest.approx(want.loss, rel=1e-5)
        assert norm == pytest.approx(norm_of(want.gradients), rel=1e-4)
        # Waves change the sizes of products, and so how these are rounded.
        assert (loss, norm) == pytest.approx(found[0], rel=5e-6)


def three_steps_equal(case: Case, optimizer: str, want: Expected, pool: Pool) -> None:
    """Losses, norms, and weights after three steps."""
    flags = (
        f"--train.iters 3 --optimizer.lr {RATES[optimizer]} --optimizer.schedule constant --optimizer.name {optimizer}"
    )
    results = pool.run(runs.train, flags_of(case, want.folder, *flags.split()))
    got, trained = results[0], want.runs[optimizer]
    assert all(result["replicas_equal"] for result in results)
    assert got["losses"] == pytest.approx(trained.losses, rel=1e-5)
    assert got["norms"] == pytest.approx(trained.norms, rel=1e-4)
    update = {name: trained.weights[name] - want.before[name] for name in want.before}
    wrong = {name: torch.from_numpy(got["weights"][name]) - trained.weights[name] for name in want.before}
    assert norm_of(wrong) <= 1e-3 * norm_of(update)


CASES = [
    Case("dp:1", "dp:1", 1, micro=2),
    Case("dp:1", "dp:1", 1, model="tied"),
    Case("sp:2", "tp:2", 2, model="tied", micro=2),
    Case("sp:2", "tp:2", 2, flags=WHOLE),
    Case("tp:2", "dp:2", 2, model="tied", flags=WHOLE),
    Case("sp:4", "tp:4", 4, micro=2),
    Case("sp:4", "tp:4", 4, model="tied", flags=WHOLE),
    Case("sp:4", "tp:4", 4, model="one-kv-head", micro=2),
    Case("tp:4", "tp:4", 4, micro=2),
    Case("tp:4", "tp:4", 4, model="one-kv-head", flags=WHOLE),
    Case("tp:4", "tp:4", 4, model="tied", flags=RECOMPUTE),
    Case("dp:4", "tp:2,dp:2", 4, model="tied", micro=2),
    Case("dp:4", "tp:2,dp:2", 4, flags=WHOLE),
    Case("sp:2,dp:2", "tp:4", 4, model="one-kv-head"),
    Case("sp:2,dp:2", "tp:4", 4, micro=2, flags=WHOLE),
    Case("tp:2,dp:2", "tp:2,dp:2", 4, micro=2, flags=OVERLAPPED),
    Case("tp:2,dp:2", "tp:2,dp:2", 4, model="tied", flags=WHOLE),
    Case("dp:4", "dp:4", 4, micro=2),
    Case("dp:4", "dp:4", 4, model="tied"),
    Case("sp:4", "tp:2,dp:2", 4, model="tied", micro=2),
    Case("sp:4", "tp:2,dp:2", 4, flags=("--vision-recompute", "full")),
    Case("sp:2,tp:2", "tp:4", 4, micro=2),
    Case("sp:2,tp:2", "dp:4", 4, model="tied", flags=WHOLE),
    Case("cp:2", "dp:2", 2, micro=2),
    Case("sp:2", "cp:2", 2, micro=2),
    Case("sp:2", "cp:2", 2, model="tied"),
    Case("cp:2", "tp:2", 2, micro=4),
    Case("sp:2", "sp:2", 2, micro=2),
    Case("cp:4", "cp:2,tp:2", 4, micro=2, flags=OVERLAPPED[2:]),
    Case("cp:4", "cp:2,tp:2", 4, model="one-kv-head", flags=WHOLE),
    Case("sp:4", "sp:2,tp:2", 4, micro=2),
    Case("sp:4", "sp:2,tp:2", 4, model="one-kv-head", flags=WHOLE),
    Case("sp:2,cp:2", "cp:4", 4, micro=4),
    Case("sp:2,cp:2", "cp:4", 4, model="tied", flags=RECOMPUTE),
    Case("tp:2,cp:2", "sp:2,cp:2", 4, model="tied", micro=2),
    Case("dp:4", "sp:4", 4, model="one-kv-head", micro=2),
    Case("sp:2,dp:3", "tp:3,dp:2", 6, model="twelve-heads", micro=2),
    Case("sp:2,dp:3", "cp:3,dp:2", 6, model="twelve-heads", micro=2),
    Case("sp:6", "tp:2,dp:3", 6, model="twelve-heads", micro=2, given_batch=6),
    Case("tp:2,sp:2,cp:2", "dp:2,cp:2,sp:2", 8, micro=2),
    Case("dp:1@0", "tp:1@1", 2, given_batch=8),
    Case("dp:2@0-1", "tp:2@2-3", 4, micro=2),
    Case("sp:2@0-1", "tp:2,pp:2@2-5", 6, model="deep-tied"),
    Case("dp:3@0-2", "tp:1,dp:2@3-4", 5, model="twelve-heads", micro=2),
    Case("sp:4", "pp:4", 4, model="deep", given_batch=8),
    Case("sp:4", "pp:4", 4, model="deep", flags=RECOMPUTED),
    Case("sp:4", "pp:4", 4, model="deep", micro=4),
    Case("sp:4", "pp:4", 4, model="deep", micro=8),
    Case("sp:4", "tp:2,pp:2", 4, model="deep-tied"),
    Case("dp:4", "pp:2,dp:2", 4, model="deep-tied", micro=2),
    Case("sp:2@0-1", "pp:2@1-2", 3, model="deep", given_batch=8),
    Case("sp:2@0-1", "pp:2@1-2", 3, model="deep", micro=4),
    Case("sp:2@0-1", "pp:2@1-2", 3, model="deep", micro=8),
    Case("pp:2@0-1", "tp:2@2-3", 4, model="deep"),
    Case("pp:2,sp:2", "pp:2,tp:2", 4, model="deep-tied", flags=UNEVEN),
    Case("dp:1@0", "pp:2@1-2", 3, model="deep", flags=VIRTUAL),
    Case("dp:1@0", "dp:1@1", 2, micro=8),
    Case("dp:1@0", "dp:1@1", 2, micro=4, flags=NOT_AHEAD),
    Case("dp:4", "tp:2,dp:2", 4, micro=2, flags=IN_ORDER),
    Case("sp:2,dp:2", "cp:2,dp:2", 4, micro=2, flags=IN_ORDER),
    Case("sp:3", "tp:3", 3, model="twelve-heads", micro=2),
    Case("dp:3", "tp:3", 3, model="twelve-heads", flags=WHOLE),
    Case("sp:2", "tp:2", 2, model="two-encoders", micro=2, detail="dp:2"),
    Case("dp:1@0", "tp:2@2-3", 4, model="two-encoders", detail="dp:1@1"),
    Case("sp:2@1-2", "pp:2@1-2", 3, model="two-encoders-deep", detail="dp:1@0"),
    Case("dp:2@0-1", "tp:2,pp:2@2-5", 6, model="two-encoders-deep", detail="sp:2@2-3"),
    Case("sp:4", "tp:2,dp:2", 4, flags=FRUGAL, micro=2),
    Case("tp:2,cp:2", "sp:2,tp:2", 4, model="one-kv-head", flags=FRUGAL, micro=2),
    Case("sp:2", "pp:2", 2, model="deep", flags=("--text-recompute", "1", "--vision-recompute", "3")),
]
