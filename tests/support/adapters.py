"""PEFT folders that `peft` itself writes, and what `peft` makes of folders."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText


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
    """The logits of a model, or of one with a PEFT folder, for some text and a picture."""
    import peft

    model = load(base)
    if adapter is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", "Found missing adapter keys")
            model = peft.PeftModel.from_pretrained(model, adapter)
    vision, picture = model.config.vision_config, [model.config.image_token_id] * 4
    elements = 3 * vision.temporal_patch_size * vision.patch_size**2
    ids = torch.tensor([[*range(5, 15), *picture, *range(15, 25)]])
    return model(
        input_ids=ids,
        mm_token_type_ids=(ids == picture[0]).int(),
        pixel_values=torch.randn(16, elements, generator=torch.Generator().manual_seed(1)),
        image_grid_thw=torch.tensor([[1, 4, 4]]),
    ).logits
