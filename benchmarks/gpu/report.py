"""The sections' results as Markdown and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu.honest import ISSUED, STEP, without
from benchmarks.gpu.sections import SECTIONS, Outcome
from benchmarks.report import table, verdict

Numbers = Mapping[str, Any]


def write(folder: Path, outcomes: Mapping[str, Outcome], *, small: bool, seconds: float) -> None:
    """Write `gpu.md` and `gpu.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    outcomes = {name: outcomes[name] for name in SECTIONS if name in outcomes}
    text = "\n\n".join([_head(outcomes, small, seconds), *(text_of(name, found) for name, found in outcomes.items())])
    (folder / "gpu.md").write_text(text + "\n", encoding="utf-8")
    sections = {name: asdict(found) | {"passed": found.passed} for name, found in outcomes.items()}
    numbers = {"small": small, "seconds": seconds, "sections": sections}
    (folder / "gpu.json").write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")


def _head(outcomes: Mapping[str, Outcome], small: bool, seconds: float) -> str:
    device = outcomes["environment"].numbers.get("device", {}) if "environment" in outcomes else {}
    lines = [f"# One device: {device.get('name', 'not looked at')}", ""]
    if device.get("backend", "").startswith("gloo"):
        lines += ["**No GPU: gloo and the CPU in place of NCCL and CUDA. Times mean nothing.**", ""]
    if small:
        lines += ["Small sizes (`--small`).", ""]
    rows = [
        f"{SECTIONS[name].title} | {found.status if found.passed or found.status != 'ok' else 'checks failed'} | "
        f"{sum(check['passed'] for check in found.checks)} of {len(found.checks)} | {found.seconds:.0f}"
        for name, found in outcomes.items()
    ]
    lines += [f"`python -m benchmarks.gpu`, {seconds:.0f} s.", "", table("section | ended | checks passed | s", rows)]
    return "\n".join(lines)


def text_of(name: str, found: Outcome) -> str:
    """A section: how it ended where it did not end well, its tables, and its checks."""
    parts = [f"## {SECTIONS[name].title}"]
    if found.status != "ok":
        how = f"after its {found.limit_s:.0f} s" if found.status == "stopped" else f"after {found.seconds:.0f} s"
        parts.append(f"FAIL: {found.status} {how}; the last that it said:\n\n```\n{found.said}\n```")
    parts += [part for part in _TABLES[SECTIONS[name].module](found.numbers) if part]
    if found.checks:
        parts.append("\n".join(f"- {verdict(check['passed'], _check(check))}" for check in found.checks))
    return "\n\n".join(parts)


def _check(check: Mapping[str, Any]) -> str:
    if check["what"].endswith(" found"):  # `Check.equal` has said both.
        return check["what"]
    return f"{check['what']}: {check['found']:.2g}, at most {check['bound']:.2g}"


def _environment(numbers: Numbers) -> Iterable[str]:
    for part in ("device", "machine", "libraries", "variables", "at best"):
        if found := numbers.get(part):
            yield table(f"{part} | ", [f"{name} | {_shown(value)}" for name, value in found.items()])


def _correctness(numbers: Numbers) -> Iterable[str]:
    if "arithmetic" in numbers:
        yield ", ".join(f"{name}: {value}" for name, value in numbers["arithmetic"].items()) + "."
    fp32, bf16 = numbers.get("fp32", {}), numbers.get("bf16", {})
    rows = [
        f"`{kind}` | {error:.1e} | {_error(bf16, 'errors', kind)} | {_error(bf16, 'errors of transformers', kind)}"
        for kind, error in fp32.get("errors", {}).items()
    ]
    if rows:
        yield (
            "Largest relative error of a gradient by kind of parameter; those of bf16 against fp32 arithmetic on the "
            "same weights:"
        )
        yield table("parameters | fp32 | bf16 | bf16, transformers' own", rows)
    if bf16:
        yield f"All gradients in bf16: {bf16['error']:.2e}, transformers' own {bf16['error of transformers']:.2e}."


def _error(numbers: Numbers, name: str, kind: str) -> str:
    return f"{numbers[name][kind]:.1e}" if name in numbers else ""


def _sharing(numbers: Numbers) -> Iterable[str]:
    if "device" in numbers:
        yield f"Collectives by way of {numbers['device']}; fp32; errors against one rank on the same device."
    rows = [
        f"{row['placement']} | `{_cell(row['layout'])}` | {row['ranks']} | {row['loss error']:.1e} | "
        f"{row['gradient error']:.1e} | {row['largest of a kind']:.1e} | {row['seconds']:.1f}"
        for row in numbers.get("layouts", [])
    ]
    if rows:
        yield table(
            "placement | layout | ranks | loss | all gradients | worst kind of parameter | s, start included", rows
        )


def _program(numbers: Numbers) -> Iterable[str]:
    if "steps" in numbers:
        steps = numbers["steps"]
        low, high = steps["least and most ms"]
        yield table("of a step | ", [
            f"median | {steps['median ms']:.1f} ms [{low:.1f}, {high:.1f}]",
            f"tokens | {steps['tokens of a step']:.0f}",
            f"peak memory | {steps['peak GB']:.2f} GB",
            f"losses | {', '.join(f'{loss:.3f}' for loss in steps['losses'])}",
        ])  # fmt: skip
    if "killed" in numbers:
        yield f"First step {numbers['killed']['seconds']:.0f} s after the start."


def _video(numbers: Numbers) -> Iterable[str]:
    rows = [
        f"{row['frames']} | {row['setting']} | {_number(row.get('ms'), '.0f')} | "
        f"{_number(row.get('peak GB'), '.1f')} | {row['planned GB']:.1f}"
        for row in numbers.get("videos", [])
    ]
    if rows:
        yield table("frames | encoder | ms per step | peak, GB | planned, GB", rows)


def _share(numbers: Numbers) -> Iterable[str]:
    if "layout" in numbers:
        yield table("layout | ", [f"{name} | {_shown(value)}" for name, value in numbers["layout"].items()])
    if numbers.get("does not fit"):
        yield f"Would not fit: {'; '.join(numbers['does not fit'])}. More replicas share the optimizer's state out."
    if "steps" in numbers:
        yield from _steps_of_share(numbers["steps"], numbers.get("memory", {}), "")
    if more := numbers.get("more steps"):
        yield from _steps_of_share(more, {}, f", {more['micro-batches']} micro-batches")
    if "trace" in numbers:
        yield from _trace(numbers["trace"])
        yield from _device_and_host(numbers["trace"]["phases"], numbers.get("host", {}))


def _steps_of_share(steps: Numbers, memory: Numbers, which: str) -> Iterable[str]:
    times, stand_ins, rates = steps["milliseconds"], steps["stand-ins ms"], steps["TFLOP/s by phase"]
    taken = sum(stand_ins.values())
    left = without(times, stand_ins)
    yield table(f"phase{which} | ms | share of the step | TFLOP/s | besides, stand-ins for collectives, ms", [
        f"{name} | {ms:.2f} | {ms / left[STEP]:.1%} | {_number(rates.get(name), '.1f')} | "
        f"{_number(stand_ins.get(name), '.2f')}"
        for name, ms in left.items() if name not in (STEP, ISSUED)
    ])  # fmt: skip
    low, high = steps["least and most ms"]
    rows = [
        f"time without stand-ins | {left[STEP]:.1f} ms",
        f"time with {taken:.1f} ms of stand-ins | {times['step']:.1f} ms [{low:.1f}, {high:.1f}]",
        f"until the host has issued forward and backward | {times['issued']:.1f} ms",
        f"operations | {steps['TFLOP of a step']:.3g} TFLOP, {steps['TFLOP/s']:.4g} TFLOP/s",
        f"MFU without communication | {_number(steps['MFU without communication'], '.1%')}",
    ]
    if memory:
        rows += [
            f"memory that the plan counts | {_number(memory.get('planned GB'), '.2f')} GB",
            f"peak memory of tensors | {_number(memory.get('peak GB'), '.2f')} GB",
            f"peak memory that PyTorch reserved | {_number(memory.get('reserved GB'), '.2f')} GB",
        ]
    yield table(f"of a step{which} | ", rows)


def _device_and_host(phases: Numbers, host: Numbers) -> Iterable[str]:
    yield (
        "Kernels, and gaps between them, as a profiler saw a step; the host in a step in which the device finishes "
        "each phase before the next, so that only a phase of more than 1,024 kernels can hold the host up."
    )
    rows = []
    for name in dict.fromkeys([*phases, *host]):
        device, issued = phases.get(name, {}), host.get(name, {})
        rows.append(
            f"{name} | {_number(device.get('kernels'), ',')} | {_number(device.get('busy ms'), '.2f')} | "
            f"{_number(device.get('idle ms'), '.2f')} | {_number(issued.get('ms'), '.2f')} | "
            f"{_number(issued.get('µs for a kernel'), '.1f')} | {_number(issued.get('ms for a layer'), '.3f')}"
        )
    yield table("phase | kernels | busy, ms | idle, ms | host, ms | host, µs for a kernel | host, ms for a layer", rows)


def _trace(trace: Numbers) -> Iterable[str]:
    yield f"Kernels of a step: {trace['kernels']:,}, together {trace['ms']:.1f} ms."
    total = trace["ms"] or 1.0
    yield table(
        "kind | ms | share | kernels",
        [f"{kind} | {ms:.2f} | {ms / total:.1%} | {count:,}" for kind, (ms, count) in trace["kinds"].items()],
    )
    rows = [f"`{_cell(name)}` | {ms:.2f} | {ms / total:.1%} | {count:,}" for name, ms, count in trace["top"]]
    yield table("kernel | ms | share | number", rows)


def _rows(key: str, head: str, form: Callable[[Numbers], str]) -> Callable[[Numbers], Iterable[str]]:
    """Tables of a section whose numbers are rows under `key`, and single values."""

    def tables(numbers: Numbers) -> Iterable[str]:
        if rows := numbers.get(key):
            yield table(head, list(map(form, rows)))
        yield from (f"{name}: {value}." for name, value in numbers.items() if isinstance(value, str))

    return tables


def _attention(row: Numbers) -> str:
    cells = f"{row['case']} | {row['kernel']} | "
    if "skipped" in row:
        return f"{cells}skipped: {_cell(row['skipped'])} | | | | | | |"
    rates = " | ".join(f"{row[f'{way} ms']:.3f}, {row[f'{way} TFLOP/s']:.0f}" for way in ("forward", "backward"))
    calls = " | ".join(f"{row[name]:.1f}" for name in ("first call ms", "first call of half the tokens ms"))
    return (
        f"{cells}{rates} | {row['error forward']:.1e} | {row['error backward']:.1e} | {calls} | "
        f"{row['later calls ms']:.1f} | `{_cell(' and '.join(name[:40] for name in row['longest on the device']))}`"
    )


def _variant(row: Numbers) -> str:
    rates = " | ".join(f"{row[f'{way} ms']:.3f}, {row[f'{way} GB/s']:.0f}" for way in ("forward", "backward"))
    return f"{row['size']} | {row['variant']} | {rates} | {row['error forward']:.1e} | {row['error backward']:.1e}"


def _spinning(row: Numbers) -> str:
    names = ("alone ms", "by ranks ms", "spin first, product ms", "product first, product ms", "product first, wait ms")
    return " | ".join([row["product"], str(row["carved out"]), *(_number(row.get(name), ".3f") for name in names)])


def _graph(numbers: Numbers) -> Iterable[str]:
    kernels, runs = numbers.get("kernels", {}), ("kernel by kernel", "graph")
    if "size" in numbers:
        yield ", ".join(f"{name}: {value}" for name, value in numbers["size"].items()) + "."
    rows = [f"{name} | {numbers[name]['ms']:.2f} | {numbers[name]['host ms']:.2f}"
            for name in runs if isinstance(numbers.get(name), dict)]  # fmt: skip
    if rows:
        yield table("both passes | ms | until the host has issued them, ms", rows)
    if kernels:
        yield f"Kernels: {kernels['number']:,}, together {kernels['ms']:.2f} ms."
    if isinstance(numbers.get("graph"), str):
        yield f"No graph: {numbers['graph']}."


def _experts(numbers: Numbers) -> Iterable[str]:
    rows = [
        f"`{row['layout']}` | {', '.join(map(str, row['tokens']))} | {'yes' if row['an expert idle'] else ''} | "
        f"{row['difference']:.1e}"
        for row in numbers.get("blocks", [])
    ]
    if rows:
        yield table("layout | tokens by rank | experts of the last rank idle | largest relative difference", rows)
    if steps := numbers.get("steps"):
        losses = zip(steps["losses"], steps["losses of transformers"], strict=True)
        yield "Losses of steps, and those of `transformers`: " + "; ".join(f"{a:.7f}, {b:.7f}" for a, b in losses) + "."


_TABLES: Mapping[str, Callable[[Numbers], Iterable[str]]] = {
    "environment": _environment,
    "correctness": _correctness,
    "sharing": _sharing,
    "program": _program,
    "video": _video,
    "share": _share,
    "hopper.attention": _rows(
        "kernels",
        "case | kernel | forward, ms, TFLOP/s | backward, ms, TFLOP/s | error forward | error backward | "
        "first call, ms | first of half the tokens, ms | later, ms | longest on the device",
        _attention,
    ),
    "hopper.spinning": _rows(
        "products",
        "product | carved out | alone, ms | by four ranks, ms | after the other kernel has begun, ms | before it, ms | "
        "then it waits, ms",
        _spinning,
    ),
    **dict.fromkeys(
        ("hopper.swiglu", "hopper.heads"),
        _rows(
            "variants",
            "size | variant | forward, ms, GB/s | backward, ms, GB/s | error forward | error backward",
            _variant,
        ),
    ),
    "hopper.graph": _graph,
    "hopper.experts": _experts,
}


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else _cell(str(value))


def _cell(text: str) -> str:
    """Text that does not end a table's cell."""
    return text.replace("|", "\\|")
