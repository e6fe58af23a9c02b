"""The video processors of `transformers`, imported without torchvision: what is compared with them here needs none."""

from __future__ import annotations

import importlib
import sys
from functools import cache
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest import mock

PROCESSORS = {
    "qwen2_5_vl": ("transformers.models.qwen2_vl.video_processing_qwen2_vl", "Qwen2VLVideoProcessor"),
    "qwen3_vl": ("transformers.models.qwen3_vl.video_processing_qwen3_vl", "Qwen3VLVideoProcessor"),
}


@cache
def module_of(family: str) -> Any:
    """The module of a family's processor."""
    importlib.import_module("transformers.video_processing_utils")  # Finds no torchvision, and remembers that.
    empty: dict[str, Any] = {}
    for tail in ("", ".io", ".transforms", ".transforms.v2", ".transforms.v2.functional"):
        name = f"torchvision{tail}"
        empty[name] = ModuleType(name)
        empty[name].__path__, empty[name].__spec__ = [], ModuleSpec(name, None)
    empty["torchvision.transforms"].InterpolationMode = None
    with mock.patch.dict(sys.modules, empty):
        return importlib.import_module(PROCESSORS[family][0])


def video_processor(family: str, **settings: Any) -> Any:
    """The processor of a family with these settings."""
    return getattr(module_of(family), PROCESSORS[family][1])(**settings)
