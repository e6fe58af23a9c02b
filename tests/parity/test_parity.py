"""Loss, every gradient and the weights after three steps equal plain `transformers` in one process, whatever the
layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_hetero.schedule.settings import ScheduleSettings
from tests.parity import jobs
from tests.support.folders import ModelChoice, write_data, write_model
from tests.support.oracle import Oracle, TwoTowers, stored_name
from tests.support.pool import Pool

GLOBAL_BATCH = 8
RATES = {"adamw": 1e-3, "sgd": 1e-1}
OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=RATES["adamw"], weight_decay=0.0),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=RATES["sgd"]),
}
BASE = ModelChoice()
MODELS = {
    "untied": BASE,
    "tied": replace(BASE, tied=True, seed=1),
    "one-kv-head": replace(BASE, kv_heads=1, seed=2, full_layers=(0, 2)),
    "deep": replace(BASE, text_layers=4, vision_layers=4, full_layers=(1, 3), seed=4),
    "deep-tied": replace(BASE, text_layers=4, vision_layers=4, full_layers=(1, 3), tied=True, seed=5),
    "two-encoders": replace(BASE, seed=6),
    "two-encoders-deep": replace(BASE, text_layers=4, seed=7),
    "twelve-heads": replace(BASE, heads=12, kv_heads=4, head_dim=8, vision_heads=12, vision_head_dim=4, seed=3),
}


DETAIL = replace(BASE, vision_layers=2, vision_heads=2, vision_head_dim=12, vision_ffn=40, full_layers=(0,), seed=8)
"""The second encoder of models with two."""


@dataclass(frozen=True)
class Case:
    """One row of the matrix: layouts (`detail`: of a second encoder), model, samples per micro-batch, what else is set,
    and the global batch.
    """

    vision: str
    text: str
    ranks: int
    model: str = "untied"
    micro: int = 1
    flags: tuple[str, ...] = ()
    given_batch: int | None = None
    detail: str | None = None

    @property
    def batch(self) -> int:
        """Samples of a step; fewer where each is a micro-batch of its own."""
        alone = self.micro == 1 and "dp" not in self.text
        return self.given_batch or (GLOBAL_BATCH // 2 if alone else GLOBAL_BATCH)

    def __str__(self) -> str:
        extra = " whole activations" if self.flags == WHOLE else f" {self.flags[0].split('.')[1]}" if self.flags else ""
        encoders = self.vision if self.detail is None else f"{self.vision}+{self.detail}"
        return f"{encoders}|{self.text} {self.model} micro {self.micro}{extra}"


RECOMPUTE = ("--model.recompute.vision", "full", "--model.recompute.text", "full")
RECOMPUTED = ("--schedule.kind", "recompute")
UNEVEN = ("--parallel_layers.text", "1", "3", "--parallel_layers.vision", "3", "1")
VIRTUAL = ("--schedule.virtual_stages", "2")
NOT_AHEAD = ("--schedule.run_ahead", "0")
IN_ORDER = ("--data.balance", "off")
WHOLE = ("--model.sequence_parallel.vision", "false", "--model.sequence_parallel.text", "false")
WAVES = [ScheduleSettings(waves=waves) for waves in (1, 2, GLOBAL_BATCH)]
AHEAD = [ScheduleSettings(run_ahead=ahead) for ahead in (0, 1, 3)]
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
    Case("tp:2,dp:2", "tp:2,dp:2", 4, micro=2),
    Case("tp:2,dp:2", "tp:2,dp:2", 4, model="tied", flags=WHOLE),
    Case("dp:4", "dp:4", 4, micro=2),
    Case("dp:4", "dp:4", 4, model="tied"),
    Case("sp:4", "tp:2,dp:2", 4, model="tied", micro=2),
    Case("sp:4", "tp:2,dp:2", 4, flags=("--model.recompute.vision", "full")),
    Case("sp:2,tp:2", "tp:4", 4, micro=2),
    Case("sp:2,tp:2", "dp:4", 4, model="tied", flags=WHOLE),
    Case("cp:2", "dp:2", 2, micro=2),
    Case("sp:2", "cp:2", 2, micro=2),
    Case("sp:2", "cp:2", 2, model="tied"),
    Case("cp:2", "tp:2", 2, micro=4),
    Case("sp:2", "sp:2", 2, micro=2),
    Case("cp:4", "cp:2,tp:2", 4, micro=2),
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
]


@dataclass
class Trained:
    """Three steps of one optimizer by the oracle."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]


@dataclass
class Expected:
    """What the oracle found for one model: the folder, and per kind of run the numbers."""

    folder: Path
    loss: float
    gradients: dict[str, torch.Tensor]
    before: dict[str, torch.Tensor]
    runs: dict[str, Trained]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Case], Expected]]:
    found: dict[tuple[str, int], Expected] = {}

    def get(case: Case) -> Expected:
        key = case.model, case.batch
        if key not in found:
            folder, choice = tmp_path_factory.mktemp(case.model), MODELS[case.model]
            found[key] = _ask_oracle(folder, choice, case.batch, two_towers=case.detail is not None)
        return found[key]

    yield get


def _ask_oracle(folder: Path, choice: ModelChoice, batch: int, *, two_towers: bool) -> Expected:
    write_model(folder / "model", choice)
    if two_towers:
        write_model(folder / "detail", DETAIL)
    details = (1, 0, 0, 2) if two_towers else (0,)
    data = write_data(folder, 3 * batch, seed=choice.seed, turns=2, details=details)
    load = partial((TwoTowers if two_towers else Oracle).load, folder / "model", data)
    oracle = load()
    loss, gradients = oracle.step(range(batch))
    before = oracle.weights()
    return Expected(folder, loss, gradients, before, {name: _train(load(), name, batch) for name in OPTIMIZERS})


def _train(oracle: Oracle, name: str, batch: int) -> Trained:
    optimizer = OPTIMIZERS[name](oracle.model.parameters())
    losses, norms = [], []
    for step in range(3):
        loss, gradients = oracle.step(range(step * batch, (step + 1) * batch))
        for parameter_name, parameter in oracle.model.named_parameters():
            parameter.grad = gradients[stored_name(parameter_name)]
        norms.append(float(torch.nn.utils.clip_grad_norm_(oracle.model.parameters(), 1.0)))
        optimizer.step()
        losses.append(loss)
    return Trained(losses, norms, oracle.weights())


def _flags(case: Case, folder: Path, *more: str) -> list[str]:
    text = f"--model.hf_path {folder}/model --model.dtype float32 --data.registry.d.annotations {folder}/data.jsonl "
    text += f"--data.registry.d.images {folder}/images --data.datasets d --data.shuffle false --data.workers 0 "
    text += f"--train.global_batch_size {case.batch} --train.micro_batch_size {case.micro} --log.dir {folder}/log "
    text += f"--vision-parallel {case.vision} --text-parallel {case.text}"
    if case.detail is not None:
        text += f" --model.encoders.detail.hf_path {folder}/detail --model.encoders.detail.token <|video_pad|>"
        text += f" --detail-parallel {case.detail}"
    return [*text.split(), *case.flags, *more]


def _norm(tensors: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float((t.double() ** 2).sum()) for t in tensors.values()))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients(case: Case, expected: Callable[[Case], Expected], pools: Callable[[int], Pool]) -> None:
    want = expected(case)
    got = pools(case.ranks).run(jobs.gradients, _flags(case, want.folder))[0]
    assert got["loss"] == pytest.approx(want.loss, rel=1e-5)
    assert got["gradients"].keys() == want.gradients.keys()
    everything = _norm(want.gradients)
    wrong = {}
    for name, gradient in want.gradients.items():
        difference = np.linalg.norm(got["gradients"][name].astype(np.float64) - gradient.double().numpy())
        if not difference <= 1e-4 * gradient.norm() + 1e-7 * everything:
            wrong[name] = f"{difference / float(gradient.norm()):.1e}"
    assert not wrong
    assert got["norm"] == pytest.approx(everything, rel=1e-4)


def three_steps(case: Case, optimizer: str, want: Expected, pool: Pool) -> None:
    flags = (
        f"--train.iters 3 --optimizer.lr {RATES[optimizer]} --optimizer.schedule constant --optimizer.name {optimizer}"
    )
    results = pool.run(jobs.train, _flags(case, want.folder, *flags.split()))
    got, trained = results[0], want.runs[optimizer]
    assert all(result["replicas_equal"] for result in results)
    assert got["losses"] == pytest.approx(trained.losses, rel=1e-5)
    assert got["norms"] == pytest.approx(trained.norms, rel=1e-4)
    update = {name: trained.weights[name] - want.before[name] for name in want.before}
    wrong = {name: torch.from_numpy(got["weights"][name]) - trained.weights[name] for name in want.before}
    assert _norm(wrong) <= 1e-3 * _norm(update)


def test_rounded_transport(expected: Callable[[Case], Expected], pools: Callable[[int], Pool]) -> None:
    """Rows sent as bfloat16 give nearly the same gradients, and not the very same ones."""
    case = Case("dp:2", "tp:2", 2)
    want = expected(case)
    found = [
        pools(2).run(jobs.gradients, _flags(case, want.folder, "--boundary.transport", transport))[0]["gradients"]
        for transport in ("exact", "bfloat16")
    ]
    difference = {name: torch.from_numpy(found[0][name] - found[1][name]) for name in found[0]}
    assert 1e-5 < _norm(difference) / _norm(want.gradients) < 2e-2


@pytest.mark.parametrize(
    "case, others",
    [
        (Case("sp:2", "pp:2", 2, model="deep", given_batch=8), [*WAVES, ScheduleSettings("recompute")]),
        (Case("sp:2@0-1", "pp:2@1-2", 3, model="deep", given_batch=8), [*WAVES, ScheduleSettings("recompute")]),
        (Case("dp:1@0", "pp:2@1-2", 3, model="deep", given_batch=8), AHEAD),
        (
            Case("sp:2", "pp:2", 2, model="deep", flags=VIRTUAL, given_batch=8),
            [replace(s, virtual_stages=2) for s in WAVES],
        ),
        (
            Case("dp:1@0", "pp:2@1-2", 3, model="deep", flags=VIRTUAL, given_batch=8),
            [replace(s, virtual_stages=2) for s in AHEAD],
        ),
    ],
    ids=["colocated", "mixed", "disjoint", "colocated, virtual stages", "disjoint, virtual stages"],
)
def test_no_schedule_changes_the_loss(
    case: Case, others: list[ScheduleSettings], expected: Callable[[Case], Expected], pools: Callable[[int], Pool]
) -> None:
    want = expected(case)
    found = pools(case.ranks).run(jobs.losses, _flags(case, want.folder), others)[0]
    assert len(found) == 1 + len(others)
    for loss, norm in found:
        assert loss == pytest.approx(want.loss, rel=1e-5)
        assert (loss, norm) == pytest.approx(found[0], rel=1e-6)


def _covering(cases: Sequence[Case]) -> list[Case]:
    """Cases in which every layout of every module occurs: an optimizer knows its own module's only, and what else
    differs between cases shows in the gradients.
    """
    seen: set[tuple[str, str | None]] = set()
    kept = []
    for case in cases:
        mine = {("vision", case.vision), ("detail", case.detail), ("text", case.text)}
        if not mine <= seen:
            kept.append(case)
            seen |= mine
    return kept


@pytest.mark.parametrize("case", _covering(CASES), ids=str)
def test_three_adamw_steps(case: Case, expected: Callable[[Case], Expected], pools: Callable[[int], Pool]) -> None:
    three_steps(case, "adamw", expected(case), pools(case.ranks))


# Plain SGD shows what the distributed optimizer hides: whole gradients of tied weights on every rank.
@pytest.mark.parametrize("case", [case for case in CASES if case.model == "tied"][:6:2], ids=str)
def test_three_sgd_steps(case: Case, expected: Callable[[Case], Expected], pools: Callable[[int], Pool]) -> None:
    three_steps(case, "sgd", expected(case), pools(case.ranks))
