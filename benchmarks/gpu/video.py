"""A video's frames on one rank: time and memory of a step with all of them in one call of the encoder, recomputed or
not, and with few patches per call. The encoder is Qwen3-VL-8B's; of the language model, frozen, three layers are left.
"""

from __future__ import annotations

import gc
import json
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.record import Record
from benchmarks.gpu.share import LEFT, MEMORY, MODELS, RankOnDevice, device_bytes
from megatron_hetero.config.schema import Config, load_config
from megatron_hetero.estimate.estimate import Estimate
from megatron_hetero.groups.launch import process_group
from megatron_hetero.groups.platform import Platform

FRAMES, SIDE, PATCHES = (64, 128, 256), 448, 8192
SMALL_FRAMES, SMALL_SIDE, SMALL_PATCHES = (8, 16), 64, 32
STEPS = 3


def measure(record: Record, folder: Path, *, small: bool) -> None:
    """Each setting with each number of frames that the device has the memory for."""
    model = _model(folder / "model", small=small)
    frames, patches = (SMALL_FRAMES, SMALL_PATCHES) if small else (FRAMES, PATCHES)
    settings = "", "--vision-recompute full", f"--vision-patches_per_call {patches}"
    rows = list[dict[str, Any]]()
    with process_group() as platform:
        for count in frames:
            for setting in settings:
                config = load_config(_flags(model, count, setting, small=small))
                rows.append({"frames": count, "setting": setting or "one call", **_steps(config, platform)})
                record.put("videos", rows)
        if platform.is_cuda:
            errors = [abs(row["peak GB"] / row["planned GB"] - 1) for row in rows if "peak GB" in row]
            record.check("relative difference of the peak memory and the plan's", max(errors), MEMORY)


def _model(folder: Path, *, small: bool) -> Path:
    config = json.loads((MODELS / "qwen3_vl_8b/config.json").read_text())
    config["text_config"]["num_hidden_layers"] = 3
    if small:
        config["text_config"] |= {"hidden_size": 256, "intermediate_size": 64, "num_attention_heads": 2}
        config["text_config"] |= {"num_key_value_heads": 2}
        config["vision_config"] |= {"depth": 4, "deepstack_visual_indexes": [0, 1, 2], "hidden_size": 64}
        config["vision_config"] |= {"intermediate_size": 64, "num_heads": 4, "out_hidden_size": 256}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _flags(model: Path, frames: int, setting: str, *, small: bool) -> list[str]:
    side, dtype = (SMALL_SIDE, "float32") if small else (SIDE, "bfloat16")
    return (
        f"--model.hf_path {model} --model.dtype {dtype} --model.freeze text --vision-parallel dp:1 "
        f"--text-parallel dp:1 --train.global_batch_size 1 --data.max_seq_length 65536 --data.datasets none "
        f"--data.registry.none.annotations {model}/none.json --plan.images 0 --plan.videos 1 --plan.frames {frames} "
        f"--plan.frame_side {side} {setting}"
    ).split()


def _steps(config: Config, platform: Platform) -> dict[str, Any]:
    """Median time of a step, and its peak memory; only the plan where that does not fit the device."""
    planned = int(Estimate.of(config, 1, gpu=platform.is_cuda).memory.sum())
    found: dict[str, Any] = {"planned GB": planned / 1e9}
    if planned > (1 - LEFT) * device_bytes(platform):
        return found
    rank = RankOnDevice.build(config, platform)
    rank.step()
    if platform.is_cuda:
        torch.cuda.reset_peak_memory_stats(platform.device)
    found["ms"] = 1e3 * median(rank.step()["step"] for _ in range(STEPS))
    found["peak GB"] = platform.peak_memory_bytes() / 1e9 if platform.is_cuda else None
    del rank
    gc.collect()
    if platform.is_cuda:
        torch.cuda.empty_cache()
    return found
