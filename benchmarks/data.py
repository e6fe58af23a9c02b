"""Indexes and loading of data sets by format: `python -m benchmarks.data [--help]`.

Two tables, written with the numbers to `benchmarks/results`, and to docs/data.md:

  - for data sets of many records, of which pictures are not looked at: seconds to compute the index and to open it,
    each in a new process, the private memory that a rank then has for an epoch's order and a thousand random reads, and
    the same for `json.load`, which held all records on each rank;
  - samples per second that are read and whose JPEG pictures (640 x 480) are decoded, with two threads and two
    processes, beside `datasets` (streaming) and `webdataset` with two workers of torch's DataLoader on the same files,
    all in one run, alternately. Both shuffle within a buffer, and resume approximately, or with as many workers only.
    Parquet is read with a cache and windows that are as small beside this set as they are beside one of some GB.

`datasets` and `webdataset` are measured if they are installed. Wants two idle cores.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import random
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import numpy as np
from PIL import Image

from benchmarks.measuring.decoder import Decoder
from benchmarks.measuring.energon import write_energon_index
from megatron_hetero.base.worker_process import Processes
from megatron_hetero.config.fields import Pattern
from megatron_hetero.config.sections import DatasetConfig, SampledDataset
from megatron_hetero.data import mixture as mixtures
from megatron_hetero.data.mixture import Mixture
from megatron_hetero.data.records import Dataset, Reading
from megatron_hetero.data.sources import parquet as parquet_files

RESULTS = Path(__file__).parent / "results"
PAGE, MARKS = Path(__file__).parents[1] / "docs" / "data.md", ("<!-- data:begin -->\n", "<!-- data:end -->")
WORDS = "the picture shows a red disc on table next to person who holds small green box near window".split()
SHARD, GROUP, WORKERS, READS = 10_000, 25, 2, 1_000
CACHED = 4
"""The parquet set with pictures is so many times larger than the cache of row groups."""
FORMATS = ("JSON list", "JSONL", "parquet", "WebDataset", "Energon")


# ---------------------------------------------------------------------------------------------------- the files


def conversations(rng: random.Random) -> list[dict[str, str]]:
    """One to five pairs of turns, some 800 bytes of JSON on average."""
    turns = []
    for k in range(rng.choice((1, 2, 3, 5))):
        question, answer = " ".join(rng.choices(WORDS, k=9)), " ".join(rng.choices(WORDS, k=22))
        turns += [{"from": "human", "value": "<image>\n" * (not k) + question}, {"from": "gpt", "value": answer}]
    return turns


def write(kind: str, folder: Path, count: int, picture: Callable[[int], bytes], embedded: bool) -> DatasetConfig:
    """A data set of so many records. Pictures are in JSON's folder, in tars, and in parquet if they are `embedded`."""
    folder.mkdir(parents=True)
    rng, name = random.Random(0), "{:08}.jpg".format
    if kind in ("JSON list", "JSONL"):
        lines = (json.dumps({"image": name(k), "conversations": conversations(rng)}) for k in range(count))
        with open(folder / "data.json", "w") as file:
            file.write("[" * (kind == "JSON list"))
            file.writelines((",\n" if kind == "JSON list" else "\n") * (k > 0) + line for k, line in enumerate(lines))
            file.write("]" * (kind == "JSON list"))
        for k in range(count if embedded else 0):
            (folder / name(k)).write_bytes(picture(k))
        return DatasetConfig(annotations=folder / "data.json", images=folder)
    if kind == "parquet":
        return _write_parquet(folder, count, picture, embedded, rng)
    shard = min(SHARD, max(1, count // 4))
    names = [f"{k // shard:04}.tar" for k in range(0, count, shard)]
    for number, tar_name in enumerate(names):
        with tarfile.open(folder / tar_name, "w", format=tarfile.USTAR_FORMAT) as tar:
            for k in range(number * shard, min(count, (number + 1) * shard)):
                text = json.dumps({"conversations": conversations(rng)}).encode()
                for part, data in (("json", text), ("jpg", picture(k))):
                    member = tarfile.TarInfo(f"{k:08}.{part}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    if kind == "Energon":
        write_energon_index(folder, names)
        return DatasetConfig(files=Pattern(str(folder)))
    return DatasetConfig(files=Pattern(f"{folder}/*.tar"))


def _write_parquet(
    folder: Path, count: int, picture: Callable[[int], bytes], embedded: bool, rng: random.Random
) -> DatasetConfig:
    import pyarrow as pa
    from pyarrow import parquet

    shard = min(SHARD, max(1, count // 4))
    turn = pa.struct([("from", pa.string()), ("value", pa.string())])
    cell = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    schema = pa.schema([("image", cell), ("conversations", pa.list_(turn))])
    for first in range(0, count, shard):
        rows = range(first, min(count, first + shard))
        cells = [{"bytes": picture(k) if embedded else None, "path": f"{k:08}.jpg"} for k in rows]
        table = pa.table({"image": cells, "conversations": [conversations(rng) for _ in rows]}, schema=schema)
        parquet.write_table(table, folder / f"{first // shard:04}.parquet", row_group_size=GROUP if embedded else 1000)
    return DatasetConfig(files=Pattern(f"{folder}/*.parquet"), images=folder)


# ------------------------------------------------------------------------------------------------- large data sets


def private_bytes() -> int:
    """Private memory of this process."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Private_"))


def measured_here(entry: DatasetConfig, cache: Path) -> dict[str, float]:
    """Seconds to open a data set, which computes an index if there is none, and private bytes of its use."""
    Dataset("warm", DatasetConfig(annotations=_one_record(cache)), Reading())
    if entry.files and entry.files.endswith(".parquet"):
        import pyarrow.parquet  # noqa: F401
    before, began = private_bytes(), time.perf_counter()
    data = Dataset("d", entry, Reading(cache=cache))
    seconds = time.perf_counter() - began
    mixture = Mixture([(data, SampledDataset("d"))], shuffle=True, seed=0)
    for k in range(READS):
        mixture[k]
    return {"seconds": seconds, "private": private_bytes() - before, "records": len(data)}


def _one_record(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "one.json"
    path.write_text('[{"question": "?", "answer": "It."}]')
    return path


def json_load(path: Path) -> dict[str, float]:
    """Seconds and private bytes of decoding a list as a whole."""
    before, began = private_bytes(), time.perf_counter()
    records = json.loads(path.read_bytes())
    return {"seconds": time.perf_counter() - began, "private": private_bytes() - before, "records": len(records)}


def in_a_process(what: str, entry: DatasetConfig, cache: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.data", "--child", what, str(entry.annotations or entry.files)]
    command += [str(entry.images or ""), "annotations" if entry.annotations else "files", str(cache)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def child(what: str, files: str, images: str, setting: str, cache: str) -> None:
    given: dict[str, Any] = {setting: Pattern(files) if setting == "files" else Path(files)}
    entry = DatasetConfig(**given, images=Path(images) if images else None)
    print(json.dumps(json_load(Path(files)) if what == "load" else measured_here(entry, Path(cache))))


def large(folder: Path, counts: Iterable[int], most_tar: int) -> Iterator[dict[str, Any]]:
    for count in counts:
        for kind in FORMATS:
            if kind in ("WebDataset", "Energon") and count > most_tar:
                continue
            place = folder / f"{kind}-{count}".replace(" ", "-")
            entry = write(kind, place, count, lambda _: b"picture", embedded=False)
            if kind == "JSON list":
                loaded = in_a_process("load", entry, place)
                yield {"records": count, "format": "JSON list, `json.load`", "build": None, "open": loaded["seconds"],
                       "private": loaded["private"]}  # fmt: skip
            built = in_a_process("open", entry, place / "cache")
            opened = in_a_process("open", entry, place / "cache")
            size = sum(path.stat().st_size for path in (place / "cache").glob("*.index"))
            yield {"records": count, "format": kind, "build": built["seconds"], "open": opened["seconds"],
                   "private": opened["private"], "index": size}  # fmt: skip
            print(f"{count} {kind}: {built['seconds']:.1f} s, {opened['seconds']:.3f} s", flush=True)


# ------------------------------------------------------------------------------------------------------- loading


@contextlib.contextmanager
def small_cache(size: int) -> Iterator[None]:
    """Inside, parquet has an empty cache of so many bytes, and windows in proportion, as for a set of some GB."""
    window = size * mixtures.WINDOW_BYTES // parquet_files.CACHE_BYTES
    cache = parquet_files.GroupCache(size)
    with mock.patch.object(parquet_files, "_CACHE", cache), mock.patch.object(mixtures, "WINDOW_BYTES", window):
        yield


def ours(data: Dataset, shuffle: Any, kind: str) -> float:
    """Samples per second of an epoch."""
    with small_cache(int(data.blocks.sizes.sum()) // CACHED):
        return _epoch(data, shuffle, kind)


def _epoch(data: Dataset, shuffle: Any, kind: str) -> float:
    mixture, decoder = Mixture([(data, SampledDataset("d"))], shuffle=shuffle, seed=1), Decoder()
    processes = Processes(decoder, WORKERS, "benchmark") if kind == "processes" else None

    def load(k: int) -> int:
        record = mixture[k]
        picture = decoder.decode(record) if processes is None else processes.call(record.where, "decode", record)
        return picture.size

    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(load, range(2 * WORKERS)))  # Processes start.
        began = time.perf_counter()
        for first in range(0, len(data), 32):  # Steps, one of which is read ahead.
            mixture.read_ahead(range(first + 128, first + 160))
            list(pool.map(load, range(first, min(len(data), first + 32))))
        seconds = time.perf_counter() - began
    if processes is not None:
        processes.close()
    return len(data) / seconds


def _rate(loader: Iterable[Any], count: int) -> float:
    """Samples per second, without the start of workers."""
    samples = iter(loader)
    for _ in range(2 * WORKERS):
        next(samples)
    began = time.perf_counter()
    read = sum(1 for _ in samples)
    assert read + 2 * WORKERS == count, "an epoch is all samples"
    return read / (time.perf_counter() - began)


def hugging_face(files: list[str], count: int) -> float:
    import datasets  # pyright: ignore[reportMissingImports]
    from torch.utils.data import DataLoader

    datasets.disable_progress_bars()
    # It sleeps for 5 s where the files of an epoch end, which is nothing beside a long epoch.
    datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0
    stream = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    decoded = stream.shuffle(seed=1, buffer_size=200).map(_picture_of_row, remove_columns=["conversations"])
    return _rate(DataLoader(decoded, batch_size=None, num_workers=WORKERS), count)


def _picture_of_row(row: dict[str, Any]) -> dict[str, Any]:
    image = row["image"]
    picture = Image.open(io.BytesIO(image["bytes"])) if isinstance(image, dict) else image
    return {"image": np.asarray(picture.convert("RGB"))}


def web_dataset(files: list[str], count: int) -> float:
    import webdataset  # pyright: ignore[reportMissingImports]
    from torch.utils.data import DataLoader

    stream = webdataset.WebDataset(files, shardshuffle=100, seed=1).shuffle(200).decode("rgb8").to_tuple("jpg", "json")
    return _rate(DataLoader(stream, batch_size=None, num_workers=WORKERS), count)


def loading(folder: Path, count: int, repeats: int) -> list[dict[str, Any]]:
    small = Image.fromarray(np.random.default_rng(0).integers(0, 256, (120, 160, 3), np.uint8))
    noise = np.asarray(small.resize((1280, 960)))

    def picture(k: int) -> bytes:
        file = io.BytesIO()
        left, top = k * 97 % 641, k * 61 % 481  # Parquet would store equal pictures once.
        Image.fromarray(noise[top : top + 480, left : left + 640]).save(file, "jpeg", quality=85)
        return file.getvalue()

    ways: dict[tuple[str, str], Callable[[], float]] = {}
    for kind in ("JSONL", "parquet", "WebDataset", "Energon"):
        entry = write(kind, folder / kind, count, picture, embedded=True)
        data = Dataset("d", entry, Reading(cache=folder / "cache"))
        for shuffle in (True, "blocks"):
            for workers in ("threads", "processes"):
                name = f"{kind}, shuffle: {str(shuffle).lower()}"
                ways[name, workers] = lambda data=data, shuffle=shuffle, workers=workers: ours(data, shuffle, workers)
    for name, package, rival, suffix in (
        ("`datasets` streaming, parquet", "datasets", hugging_face, "parquet"),
        ("`webdataset`, WebDataset", "webdataset", web_dataset, "tar"),
    ):
        if importlib.util.find_spec(package) is None:
            print(f"{package} is not installed", flush=True)
            continue
        files = sorted(map(str, (folder / name.split(", ")[1]).glob(f"*.{suffix}")))
        ways[name, "processes"] = lambda rival=rival, files=files: rival(files, count)
    rates: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way, run in ways.items():
            rates[way].append(run())
    names = dict.fromkeys(name for name, _ in ways)
    return [
        {
            "data": name,
            **{kind: median(rates[name, kind]) for kind in ("threads", "processes") if (name, kind) in rates},
        }
        for name in names
    ]


# ------------------------------------------------------------------------------------------------------- the page


def page(rows: list[dict[str, Any]], rates: list[dict[str, Any]], samples: int) -> str:
    lines = ["| records | format | index, s | open, s | private memory of a rank, MB |", "|---|---|---|---|---|"]
    for row in rows:
        build = "" if row["build"] is None else f"{row['build']:.1f}"
        lines.append(
            f"| {row['records']:,} | {row['format']} | {build} | {row['open']:.3f} | {row['private'] / 1e6:.0f} |"
        )
    lines += ["", "| samples per second | 2 threads | 2 processes |", "|---|---|---|"]
    for rate in rates:
        cells = [f"{rate[kind]:.0f}" if kind in rate else "" for kind in ("threads", "processes")]
        lines.append(f"| {rate['data']} | {cells[0]} | {cells[1]} |")
    lines += [
        "",
        f"Measured with `benchmarks.data` on two CPU cores; {samples:,} JPEG pictures of 640 x 480 are decoded.",
        f"Parquet: row groups of {GROUP} rows, and a cache of 1/{CACHED} of the set.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--records", type=int, nargs="*", default=[100_000, 1_000_000], help="sizes of large data sets")
    parser.add_argument("--most-tar", type=int, default=100_000, help="largest data set of tars")
    parser.add_argument("--samples", type=int, default=1000, help="samples with pictures")
    parser.add_argument("--repeats", type=int, default=3, help="repeats of each way of loading")
    parser.add_argument("--no-write", action="store_true", help="print alone")
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(*given.child)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as name:
        rows = list(large(Path(name) / "large", given.records, given.most_tar))
        rates = loading(Path(name) / "loading", given.samples, given.repeats)
    text = page(rows, rates, given.samples)
    print(text)
    if not given.no_write:
        (RESULTS / "data.json").write_text(json.dumps({"indexes": rows, "loading": rates}, indent=1) + "\n")
        (RESULTS / "data.md").write_text(text)
        before, rest = PAGE.read_text(encoding="utf-8").split(MARKS[0])
        PAGE.write_text(before + MARKS[0] + text + MARKS[1] + rest.split(MARKS[1])[1], encoding="utf-8")


if __name__ == "__main__":
    main()
