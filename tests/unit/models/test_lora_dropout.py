"""Dropout of adapters: its hash, what it computes and saves, and the ids of tokens in every order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_hetero.data.packing import PackMetadata
from megatron_hetero.data.token_ids import patch_ids, text_ids
from megatron_hetero.layout.layout import Layout
from megatron_hetero.models.layers.dropout import Dropout, TokenIds, ids_of_chunks, mixed_bits
from megatron_hetero.models.layers.low_rank import BRows, LowRank, LowRankShape
from tests.support.stages import lone_site
from tests.unit.data.packs import partitioner, random_packs, step_of

TOKENS, WIDTH = 1536, 1280


def normalised(p: float, layer: str = "a.weight", sample: int = 5, seed: int = 1, first: int = 0) -> Tensor:
    """What is dropped of a sample's tokens, less its mean and divided by its deviation."""
    dropout = Dropout.of(p, seed, layer, first)
    rows = dropout.rows(torch.from_numpy(mixed_bits(sample, np.arange(TOKENS))))
    dropped = dropout.dropped(rows, torch.ones(TOKENS, 1, WIDTH))[0].squeeze(1) == 0
    return (dropped.float() - p) / (p * (1 - p)) ** 0.5


def deviations(products: Tensor) -> float:
    """How far the mean of independent values of variance 1 is from 0."""
    return abs(float(products.double().mean())) * products.numel() ** 0.5


@pytest.mark.parametrize("p", [0.01, 0.05, 0.5, 0.9])
def test_elements_are_dropped_independently(p: float) -> None:
    """All bounds are six deviations or more."""
    mask = normalised(p)
    assert deviations(mask) < 6
    # Sums of rows and columns.
    assert (
        float(mask.mean(dim=0).abs().max()) * TOKENS**0.5 < 8 and float(mask.mean(dim=1).abs().max()) * WIDTH**0.5 < 8
    )
    for lag in (1, 2, 3, 4, 8, 64, 128, 1024):
        assert deviations(mask[lag:] * mask[:-lag]) < 6, f"tokens {lag} apart"
        assert deviations(mask[:, lag:] * mask[:, :-lag]) < 6, f"columns {lag} apart"
    assert deviations(mask[1:, 1:] * mask[:-1, 1:] * mask[1:, :-1] * mask[:-1, :-1]) < 6
    for other in ("b.weight", "a.weight."):
        assert deviations(mask * normalised(p, other)) < 6, "layers"
    assert deviations(mask * normalised(p, sample=6)) < 6 and deviations(mask * normalised(p, sample=5 + 2**31)) < 6
    assert deviations(mask * normalised(p, seed=2)) < 6


def test_no_direction_of_the_mask_is_longer_than_that_of_random_numbers() -> None:
    """Any linear dependence among tokens or columns would be. The largest singular value of a random matrix [m, n] is
    about sqrt(m) + sqrt(n).
    """
    mask = normalised(0.5)
    for other in (torch.ones(1), normalised(0.5, "b.weight"), mask.roll(1, 0), mask.roll(1, 1)):
        some = (mask * other)[:800, :600]
        assert float(torch.linalg.matrix_norm(some, 2)) == pytest.approx(800**0.5 + 600**0.5, rel=0.05)


def test_a_part_of_the_columns_has_the_mask_of_the_whole() -> None:
    parts = [normalised(0.3, first=first) for first in (0, WIDTH)]
    shifted = normalised(0.3, first=WIDTH // 2)
    assert torch.equal(torch.cat(parts, dim=1)[:, WIDTH // 2 : WIDTH // 2 + WIDTH], shifted)


class Counted(TorchDispatchMode):
    """Counts operations that are more than a view."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).split(".")[1]
        if name not in ("view", "select", "t", "detach", "as_strided", "_unsafe_view", "transpose", "alias"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def low_rank(dropout: Dropout | None, inputs: int = 24, outputs: int = 8) -> LowRank:
    torch.manual_seed(0)
    module = LowRank(LowRankShape(inputs, outputs, 4, (0.5,), (BRows((0, outputs), 0),), False, dropout), lone_site())
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


def ids_of(*places: int) -> TokenIds:
    return TokenIds(torch.from_numpy(mixed_bits(1, np.array(places))).view(1, -1))


def test_what_it_computes_and_saves() -> None:
    """Against autograd with the mask as a tensor; only the input and A are saved, once."""
    dropout = Dropout.of(0.4, 3, "x.weight", 0)
    module, places = low_rank(dropout), range(10)
    x = torch.randn(len(places), 1, 24, requires_grad=True)
    ids = ids_of(*places)
    saved = list[Tensor]()
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        out = module.add(torch.zeros(len(places), 1, 8), x, ids)
    cotangent = torch.randn_like(out)
    got = torch.autograd.grad((out * cotangent).sum(), [x, module.A, module.B])
    mask = dropout.dropped(dropout.rows(ids.values[0]), torch.ones_like(x))[0]
    assert 0.2 < float(1 - mask.mean()) < 0.6
    expected = 0.5 * (x * mask / 0.6) @ module.A.t() @ module.B.t()
    torch.testing.assert_close(out, expected)
    for own, other in zip(got, torch.autograd.grad((expected * cotangent).sum(), [x, module.A, module.B]), strict=True):
        torch.testing.assert_close(own, other)
    wide = [each for each in saved if each.shape[-1] == 24]
    assert sorted(each.data_ptr() for each in wide) == sorted([x.data_ptr(), module.A.data_ptr()])
    assert all(each.dtype == torch.float32 for each in saved)


def test_number_of_operations() -> None:
    """Six passes over the elements for the mask and one with it, which a compiler makes one, and three over the tokens.
    Without dropout none.
    """
    x, ids, dropout = torch.randn(6, 1, 24), ids_of(*range(6)), Dropout.of(0.3, 0, "x", 0)

    def operations(dropout: Dropout | None, ids: TokenIds | None) -> list[str]:
        module, out = low_rank(dropout), torch.zeros(6, 1, 8)
        module.add(out, x, ids)  # Columns are computed once.
        with Counted() as counted, torch.no_grad():
            module.add(out, x, ids)
        return counted.names

    without = operations(None, None)
    assert operations(None, ids) == operations(dropout, None) == without
    of_tokens = ["mul", "__rshift__", "_to_copy"]
    of_elements = ["bitwise_xor", "mul_", "__rshift__", "bitwise_xor_", "mul_", "lt", "masked_fill"]
    assert operations(dropout, ids) == [*of_tokens, *of_elements, *without]


@given(st.integers(1, 4), st.integers(0, 20), st.integers(1, 4))
def test_orders_of_ids(ranks: int, tokens: int, size: int) -> None:
    ids = TokenIds(torch.arange(ranks * tokens).view(ranks, tokens))
    for rank in range(ranks):
        assert ids.local(rank).tolist() == list(range(rank * tokens, (rank + 1) * tokens))
    own = torch.zeros(tokens, 1)
    pieces = own.split(size)
    for number, (piece, each) in enumerate(zip(pieces, ids_of_chunks(ids, pieces), strict=True)):
        assert each is not None
        first = number * size
        assert each.values.flatten().tolist() == [
            rank * tokens + first + place for rank in range(ranks) for place in range(len(piece))
        ]
    assert list(ids_of_chunks(None, pieces)) == [None] * len(pieces)


LAYOUTS = ["dp:4", "sp:4", "tp:4", "cp:4", "sp:2,cp:2", "tp:2,sp:2", "tp:2,cp:2", "tp:2,dp:2", "sp:2,dp:2"]


def sources_of(pack: PackMetadata, number: int) -> np.ndarray:
    """The sources of a pack's pictures, all of sample `number`."""
    return np.array([(number, item, 0) for item in range(len(pack.sizes[0]))], np.int64).reshape(-1, 3)


def one(*fields: int) -> int:
    return int(mixed_bits(*fields)[0])


def pictures(packs: list[tuple[PackMetadata, ...]]) -> dict[int, tuple[int, int, int, int]]:
    """By the id of each patch, its sample, picture, row and column."""
    found = dict[int, tuple[int, int, int, int]]()
    for pack in (pack for of_one in packs for pack in of_one):
        for (sample, item, piece), size in zip(pack.sources[0].tolist(), pack.sizes[0], strict=True):
            sides: Any = size
            rows = [(row, column) for row in range(0, sides[1], 2) for column in range(0, sides[2], 2)]
            patches = [(row + i, column + j) for row, column in rows for i in (0, 1) for j in (0, 1)]
            for place, (row, column) in enumerate(patches):
                found[one(sample, item, piece, place)] = sample, item, row, column
    return found


@given(
    st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS), st.booleans(), st.booleans(), st.sampled_from([None, 24]),
    st.sampled_from(["even", "ragged", "some without images", "no tokens"]), st.integers(0, 10**6),
)  # fmt: skip
@settings(max_examples=30)
def test_ids_are_those_of_what_ranks_work_on(
    vision: str, text: str, vision_split: bool, text_split: bool, limit: int | None, batch: str, seed: int
) -> None:
    """Two micro-batches, which the encoder takes in one call."""
    layouts = {"vision": Layout.parse(vision, 4), "text": Layout.parse(text, 4)}
    split = {"vision": vision_split, "text": text_split}
    tp = {name: layout.tp if split[name] else 1 for name, layout in layouts.items()}
    shapes = [tuple(random_packs(batch, layouts["text"], seed + m)) for m in range(2)]
    packs = [
        tuple(replace(pack, sources=(sources_of(pack, 10 * m + replica),)) for replica, pack in enumerate(shapes[m]))
        for m in range(2)
    ]
    deal = [
        [[10**9 * m + 1000 * replica + n for n in range(len(shape.lengths))] for replica, shape in enumerate(shapes[m])]
        for m in range(2)
    ]
    place_of, read, encoded = pictures(packs), set[int](), set[int]()
    for rank in range(4):
        own = partitioner(layouts, split, rank, runs=lambda count: {"vision": (range(count),)})
        own.limits = {} if limit is None else {"vision": limit}
        replica = layouts["text"].replica_of(rank)
        for m, share in enumerate(step_of(own, packs)):
            assert share.text is not None
            lengths = shapes[m][replica].lengths
            of_pack = [one(number, k) for number, n in zip(deal[m][replica], lengths, strict=True) for k in range(n)]
            numbers, places = np.repeat(deal[m][replica], lengths), np.concatenate([[0], *map(np.arange, lengths)])[1:]
            at = share.text.positions
            ids = text_ids(share.text, numbers[at], places[at].astype(np.int64)).values
            assert ids.shape == (tp["text"], share.text.padded // tp["text"])
            mine = ids.flatten()[: share.text.tokens].tolist()
            assert mine == [of_pack[token] for token in at]
            read |= set(mine)
            if not share.vision:
                continue
            packs_of_call = [pack for number in share.vision.micro_batches for pack in packs[number]]
            sources = np.concatenate([pack.sources[0] for pack in packs_of_call])
            for shard, chunk in zip(share.vision.shards, share.vision.everyone.chunks, strict=True):
                ids = patch_ids(shard, chunk, rank, sources).values
                assert ids.shape == (tp["vision"], shard.local)
                mine = ids.flatten()[: shard.tokens].tolist()
                assert [list(place_of[each][2:]) for each in mine] == shard.positions[:2].T.tolist()
                encoded |= set(mine)
    assert len(read) == sum(sum(shape.lengths) for of_one in shapes for shape in of_one)
    assert encoded == place_of.keys()
