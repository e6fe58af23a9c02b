"""The demo's training configuration, with empirical values."""

from __future__ import annotations

# Positions are learned last, abruptly, between steps 150 and 300 depending on the seed; the other steps are margin.
# With half of the pictures, the same steps fit the training pictures but generalize less.
ITERS = 450
BATCH = 32
LEARNING_RATE = 2e-3
WARMUP = 20


def run_config(seed: int) -> dict[str, dict[str, object]]:
    """The sections of `config.yaml`; paths are relative to its folder."""
    return {
        "model": {"hf_path": "model", "dtype": "float32"},
        "parallel": {"vision": "sp:2", "text": "tp:2"},
        "data": {
            "registry": {
                "demo-train": {"annotations": "data/train.jsonl", "images": "data/images"},
                "demo-heldout": {"annotations": "data/heldout.jsonl", "images": "data/images"},
            },
            "datasets": ["demo-train"],
            "shuffle": True,
            "max_seq_length": 256,
        },
        "train": {"iters": ITERS, "global_batch_size": BATCH, "micro_batch_size": BATCH, "seed": seed},
        "optimizer": {
            "name": "adamw",
            "lr": LEARNING_RATE,
            "min_lr": 0.0,
            "betas": [0.9, 0.99],
            "eps": 1e-8,
            "weight_decay": 0.0,
            "clip_grad": 1.0,
            "schedule": "cosine",
            "warmup_iters": WARMUP,
        },
        "log": {"dir": "log"},
        "export": {"hf_dir": "trained"},
        "eval": {"datasets": ["demo-heldout"], "limit": 320, "max_new_tokens": 8},
    }
