"""PEFT folders that `peft` itself writes, and what `peft` makes of folders."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

BATCH = torch.arange(5, 25)[None]
"""Tokens of text."""


def load(folder: Path) -> Any:
    """The model of a folder, fp32."""
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")


def adapted(base: Path, std: float = 0.2, **options: Any) -> Any:
    """A model with random adapters of `peft`; what it saves whole is random too."""
    import peft

    given: dict[str, Any] = {"r": 4, "lora_alpha": 6, **options}
    with warnings.catch_warnings():  # It looks for patterns in names of modules alone.
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(load(base), peft.LoraConfig(**given))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(5)
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.normal_(std=std)
    return model


def write_adapter(base: Path, folder: Path, **options: Any) -> Path:
    """Write the PEFT folder of a model with random adapters."""
    adapted(base, **options).save_pretrained(folder)
    return folder


@torch.no_grad()
def logits(base: Path, adapter: Path | None = None) -> Tensor:
    """The logits of a model, or of one with a PEFT folder, for `BATCH`."""
    import peft

    model = load(base)
    if adapter is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", "Found missing adapter keys")
            model = peft.PeftModel.from_pretrained(model, adapter)
    return model(input_ids=BATCH).logits
