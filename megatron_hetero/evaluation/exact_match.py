"""Which samples a model would answer exactly, from one teacher-forced forward pass. Pure, on NumPy integers.

Greedy decoding reproduces an answer if and only if, given the answer so far, the most likely token at each of its
positions is the answer's, end of turn included: as long as all tokens agree, both see the same prefix. So the pass that
computes the loss gives the exact match too, in any layout and without generation, for the cost of an argmax.

The tokens of a sample may be on several ranks, each of which counts its own; the counts are then summed.
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
    """For each of `number` samples the supervised tokens, and those predicted correctly: int64 [2, number].

    `samples`: int64 [t], the sample of each supervised token. `hits`: bool [t], whether it was predicted correctly.
    """
    counted = [np.bincount(chosen, minlength=number) for chosen in (samples, samples[hits])]
    return np.stack(counted).astype(np.int64)


def exact_match(counts: np.ndarray) -> tuple[int, int]:
    """The number of samples with all supervised tokens correct, and of those with any supervised token. `counts`: those
    of `answer_counts`, summed over ranks.
    """
    supervised, hits = counts
    asked = supervised > 0
    return int((asked & (hits == supervised)).sum()), int(asked.sum())
