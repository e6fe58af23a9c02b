"""How long training waits for videos: `python -m benchmarks.video [--help]`.

A small model trains on clips of 30 s in 720p (H.264, 30 frames per second, a key frame every 250), of which two frames
per second are taken. One rank; the share of a step's wall-clock time in which it waits for data, by the number and kind
of workers, and with the frames extracted to pictures ahead. Wants two idle cores; writes a table and the numbers to
`benchmarks/results`, and the table to docs/data.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from fractions import Fraction
from pathlib import Path
from statistics import median
from typing import Any

import av
import numpy as np
from PIL import Image

from examples.demo.model import DemoSizes, write_model

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
PAGE, MARKS = ROOT / "docs" / "data.md", ("<!-- video:begin -->\n", "<!-- video:end -->")
SIZE, SECONDS, RATE, FPS = (1280, 720), 30, 30, 2
CLIPS, STEPS, BATCH, SKIPPED = 6, 6, 1, 2
ROWS = (
    ("in the training thread", "clips", 0, None),
    ("1 thread", "clips", 1, "thread"),
    ("2 threads", "clips", 2, "thread"),
    ("1 process", "clips", 1, "process"),
    ("2 processes", "clips", 2, "process"),
    ("1 thread, frames extracted ahead", "frames", 1, "thread"),
)


def write_clip(path: Path) -> None:
    """A noisy picture that moves."""
    noise = np.random.default_rng(0).integers(0, 256, (90, 160, 3), dtype=np.uint8)
    whole = np.asarray(Image.fromarray(noise).resize(SIZE, Image.Resampling.BICUBIC))
    with av.open(str(path), "w") as file:
        stream: Any = file.add_stream("libx264", rate=Fraction(RATE))
        (stream.width, stream.height), stream.pix_fmt = SIZE, "yuv420p"
        stream.codec_context.gop_size, stream.options = 250, {"preset": "veryfast"}
        for k in range(SECONDS * RATE):
            file.mux(stream.encode(av.VideoFrame.from_ndarray(np.roll(whole, 4 * k, axis=1), format="rgb24")))
        file.mux(stream.encode())


def write_data(folder: Path) -> None:
    """The clips, their frames as pictures, and records of each kind."""
    (folder / "videos").mkdir(parents=True)
    write_clip(folder / "videos/0.mp4")
    with av.open(str(folder / "videos/0.mp4")) as file:
        frames = [frame.to_image() for k, frame in enumerate(file.decode(video=0)) if k % (RATE // FPS) == 0]
    kinds: dict[str, list[dict[str, Any]]] = {"clips": [], "frames": []}
    for clip in range(CLIPS):
        if clip:
            shutil.copy(folder / "videos/0.mp4", folder / f"videos/{clip}.mp4")
        names = [f"{clip}-{k}.jpg" for k in range(len(frames))]
        for name, frame in zip(names, frames, strict=True):
            frame.save(folder / "videos" / name, quality=92)
        turns = [{"from": "human", "value": "<video>\nWhat moves?"}, {"from": "gpt", "value": "Noise, to the right."}]
        kinds["clips"].append({"video": f"{clip}.mp4", "conversations": turns})
        kinds["frames"].append({"video": names, "fps": FPS, "conversations": turns})
    for name, records in kinds.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    sizes = DemoSizes(text_hidden=256, text_layers=8, vision_hidden=128)
    write_model(folder / "model", "qwen2_5_vl", ["What moves? Noise, to the right."], sizes, 0)


def run(folder: Path, name: str, data: str, workers: int, kind: str | None) -> dict[str, Any]:
    """One row: the median share and seconds of a step without the first ones, which nobody could load ahead."""
    log = folder / name.replace(" ", "-")
    flags = f"--model.hf_path {folder}/model --model.dtype float32 --data.datasets {data} --data.video.fps {FPS} "
    flags += f"--data.registry.{data}.annotations {folder}/{data}.jsonl --data.registry.{data}.images {folder}/videos "
    flags += f"--data.video.frame_pixels 100352 --data.video.index {folder}/index --data.max_seq_length 8192 "
    flags += f"--data.workers {workers} --train.iters {STEPS} --train.global_batch_size {BATCH} --log.dir {log} "
    flags += f"--train.micro_batch_size 1 {f'--data.worker_type {kind}' if kind else ''}"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, ROOT / "pretrain_vlm.py", *flags.split()], check=True, env=environment, cwd=ROOT)
    steps = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    steps = [step for step in steps if step.get("step", 0) > SKIPPED and "data_share" in step]
    return {
        "row": name,
        **{key: median(step[key] for step in steps) for key in ("data_share", "step_time_s", "tokens")},
    }


def decoding(folder: Path) -> float:
    """Seconds in which a core decodes a clip and takes the frames."""
    start = time.perf_counter()
    with av.open(str(folder / "videos/0.mp4")) as file:
        file.streams.video[0].codec_context.thread_count = 1
        for k, frame in enumerate(file.decode(video=0)):
            if k % (RATE // FPS) == 0:
                frame.to_ndarray(format="rgb24")
    return time.perf_counter() - start


def markdown(rows: list[dict[str, Any]], seconds: float) -> str:
    """The table of a page."""
    lines = ["| loading | waiting for data | seconds per step |", "|---|---|---|"]
    lines += [f"| {row['row']} | {row['data_share']:.0%} | {row['step_time_s']:.1f} |" for row in rows]
    tokens = f"{rows[0]['tokens']:,.0f}"
    lines.append(
        f"\nMeasured with `benchmarks.video` on one rank and two CPU cores: a clip of {SECONDS} s in 720p per\n"
        f"step ({tokens} tokens), {SECONDS * FPS} frames of it; a core decodes it in {seconds:.1f} s."
    )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run all rows, in turn in every round."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=1, help="times that every row is run (default 1)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of video.md and video.json")
    parser.add_argument("--page", type=Path, default=PAGE, help="page with the table")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder)
        seconds = decoding(folder)
        found = [run(folder, f"{row[0]}", *row[1:]) for _ in range(options.rounds) for row in ROWS]
    rows = []
    for label, *_ in ROWS:
        same = [each for each in found if each["row"] == label]
        rows.append({"row": label, **{key: median(e[key] for e in same) for key in same[0] if key != "row"}})
    text = markdown(rows, seconds)
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "video.md").write_text(text, encoding="utf-8")
    result = {"seconds_per_clip": seconds, "rows": found}
    (options.results / "video.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    before, begin, rest = options.page.read_text(encoding="utf-8").partition(MARKS[0])
    options.page.write_text(before + begin + text + MARKS[1] + rest.partition(MARKS[1])[2], encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
