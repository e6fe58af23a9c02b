"""Input that is taken: what is mutated."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import torch
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file

import pretrain_vlm
from megatron_hetero.hf.peft_folders import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PREFIX, Target, config_text
from tests.support.folders import ModelChoice, write_data, write_model
from tests.support.formats import FORMATS, write_as

LAYOUTS = (
    ("sp:4,dp:2", "tp:2,dp:4"), ("dp:8", "cp:2,tp:2,dp:2"), ("tp:2,dp:4", "pp:2,dp:4"), ("sp:2,dp:4", "pp:2,tp:2,dp:2"),
    ("dp:4@0-3", "tp:2,dp:2@4-7"), ("pp:2@0,1", "tp:2,pp:2,dp:1@2-5"), ("tp:2@0-1", "cp:8"), ("dp:1", "dp:1"),
)  # fmt: skip
"""Of the encoder and of the language model, on 8 ranks."""
RECORDS: list[dict[str, Any]] = [
    {
        "id": "7",
        "image": ["good.png", "good.jpg"],
        "conversations": [
            {"from": "system", "value": "Be brief."},
            {"from": "human", "value": "<image>\nWhat is <image>?"},
            {"from": "gpt", "value": "A disc."},
            {"from": "human", "value": "Sure?"},
            {"from": "gpt", "value": "Yes, it is 3.5 m wide. 🎨"},
        ],
    },
    {"image": "good.webp", "conversations": [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "Red."}]},
]


def model(folder: Path) -> Path:
    """A model, data and a configuration in one folder."""
    write_model(folder / "model", ModelChoice(text_layers=2, vision_layers=2))
    write_data(folder, 6)
    for name, suffix, options in PICTURES:
        _picture(name).save(folder / "images" / f"good.{suffix}", **options)
    (folder / "config.yaml").write_text(yaml.safe_dump(_settings(folder), sort_keys=False))
    return folder


def adapter(folder: Path) -> Path:
    """The same with an adapter of both towers."""
    model(folder)
    paths = [f"model.language_model.layers.{n}.self_attn.q_proj" for n in range(2)]
    paths += [f"model.visual.blocks.{n}.attn.proj" for n in range(2)]
    targets = [Target(path, 2 + n % 2, 1.0 + n) for n, path in enumerate(paths)]
    config = json.loads(config_text(targets, [], "base", "CAUSAL_LM"))
    config |= {"rank_pattern": {**config["rank_pattern"], "q_proj": 2}, "layers_to_transform": [0, 1]}
    stored = load_file(folder / "model" / "model.safetensors")
    tensors = dict[str, torch.Tensor]()
    for each in targets:
        tail = each.path.replace("language_model.", "").partition("model.")[2]
        out, inputs = next(values.shape for key, values in stored.items() if key.endswith(f"{tail}.weight"))
        tensors[f"{PREFIX}{each.path}.lora_A.weight"] = torch.ones(each.r, inputs)
        tensors[f"{PREFIX}{each.path}.lora_B.weight"] = torch.ones(out, each.r)
    (folder / "adapter").mkdir()
    (folder / "adapter" / ADAPTER_CONFIG).write_text(json.dumps(config))
    save_file(tensors, folder / "adapter" / ADAPTER_WEIGHTS)
    return folder


def _settings(folder: Path) -> dict[str, Any]:
    """What a user's configuration has in it, with a bit of everything."""
    return {
        "model": {"hf_path": f"{folder}/model", "freeze": ["vision"], "dtype": "float32"},
        "data": {
            "registry": {
                "a": {"annotations": f"{folder}/data.jsonl", "images": f"{folder}/images"},
                "b": {"annotations": f"{folder}/data.jsonl", "images": f"{folder}/images"},
            },
            "datasets": ["a", "b%50"],
            "index": f"{folder}/index",
            "max_seq_length": 4096,
            "workers": 0,
            "max_pixels": 50176,
        },
        "modules": {"vision": {"parallel": "sp:4,dp:2"}, "text": {"parallel": "tp:2,dp:4", "recompute": "selective"}},
        "train": {"iters": 2, "global_batch_size": 32, "micro_batch_size": 2, "seed": 0},
        "optimizer": {"name": "adamw", "lr": 1.0e-3, "lr_projector": 2.0e-3, "betas": [0.9, 0.95], "warmup_iters": 1},
        "schedule": {"waves": 2, "timeout_s": 60.0},
        "log": {"dir": f"{folder}/log"},
        "checkpoint": {"dir": f"{folder}/checkpoints", "interval": 1},
        "eval": {"datasets": ["b"], "interval": 1},
    }


PICTURES: list[tuple[str, str, dict[str, Any]]] = [
    ("RGB", "png", {}), ("RGBA", "webp", {}), ("RGB", "jpg", {"quality": 90}), ("P", "gif", {}), ("RGB", "bmp", {}),
    ("RGB", "tiff", {"compression": "jpeg"}), ("I;16", "tif", {}), ("RGB", "ppm", {}), ("RGB", "jp2", {}),
    ("LA", "apng", {"format": "PNG"}), ("CMYK", "jpeg", {"progressive": True}), ("RGB", "avif", {}),
    ("L", "lzw", {"format": "TIFF", "compression": "tiff_lzw"}),
]  # fmt: skip


def _picture(mode: str) -> Image.Image:
    drawn = Image.linear_gradient("L").resize((61, 45))
    return drawn.convert("I").convert(mode) if mode == "I;16" else drawn.convert("RGB").convert(mode)


def sources(folder: Path) -> Path:
    """The same samples in each format."""
    write_data(folder, 6)
    for name in FORMATS:
        write_as(name, folder / "data.jsonl", folder / "images", folder / "formats" / name)
    return folder


def run(folder: Path) -> Path:
    """The same, and a run of two steps by one process, with its checkpoints."""
    model(folder)
    line = f"--config {folder}/config.yaml --vision-parallel dp:1 --text-parallel dp:1"
    with contextlib.redirect_stdout(io.StringIO()):
        pretrain_vlm.main(line.split())
    return folder
