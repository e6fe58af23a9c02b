"""Which samples a model would answer exactly, from one forward pass over them. Pure, on NumPy integers.

Greedy decoding writes exactly the tokens of an answer if and only if, with the answer so far given, the likeliest token
at each of its places is the answer's, the end of the turn included: as long as all tokens agree, both have read the
same. So the pass that gives the loss says it too, in any layout and without generating, at the cost of an argmax.

The tokens of a sample may lie on several ranks, each of which counts its own; the counts are then added.
"""

from __future__ import annotations

import numpy as np

from megatron_hetero.data.packing import IGNORED, PackedBatch


def supervised_samples(pack: PackedBatch, tokens: np.ndarray) -> np.ndarray:
    """The sample of the pack, from 0, of each supervised token among `tokens`, in their order: int64 [t].

    `tokens`: int64 [n], positions in the pack.
    """
    supervised = tokens[pack.labels[tokens] != IGNORED]
    return np.searchsorted(pack.cu_seqlens[1:], supervised, side="right")


def answer_counts(samples: np.ndarray, hits: np.ndarray, number: int) -> np.ndarray:
    """For each of `number` samples the supervised tokens, and those predicted right: int64 [2, number].

    `samples`: int64 [t], of each supervised token. `hits`: bool [t], whether it was predicted right.
    """
    counted = [np.bincount(chosen, minlength=number) for chosen in (samples, samples[hits])]
    return np.stack(counted).astype(np.int64)


def exact_match(counts: np.ndarray) -> tuple[int, int]:
    """How many samples are right, all of their supervised tokens being so, and how many have any. `counts`: as
    `answer_counts` gives them, of all ranks together.
    """
    supervised, hits = counts
    asked = supervised > 0
    return int((asked & (hits == supervised)).sum()), int(asked.sum())
