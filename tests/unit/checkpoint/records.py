"""The record of a run, as JSON."""

from __future__ import annotations

from typing import Any

RUN: dict[str, Any] = {
    "step": 4,
    "world_size": 2,
    "layouts": {"vision": "sp:2", "text": "tp:2"},
    "datasets": [{"share": "a%50", "records": 6, "sha256": "0" * 64}],
    "config": {
        "model": {
            "hf_path": "/model",
            "hf_path_vision": None,
            "fresh_projector": False,
            "dtype": "float32",
            "freeze": ["vision"],
        },
        "modules": {"detail": {"hf_path": "/detail", "token": "<x>"}, "text": {"precision": {"master": "split"}}},
        "data": {"shuffle": True},
        "train": {"seed": 0, "global_batch_size": 4},
        "optimizer": {"name": "adamw"},
    },
    "imported_from": None,
    "model_files": {"model.hf_path": {"config.json": "1" * 64}},
}
"""As a run writes it, but for settings that nobody reads."""
