"""The results as a page: a part of docs/Benchmarks.md for each CPU, and its chart."""

import html
import math
import platform
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from moe_mlir._support import files

from .machine import Machine

_BEGIN = "<!-- cpu: {}; written by ./bench --page -->"
_END = "<!-- cpu: end -->"

_HEAD = """# Benchmarks

All rows that were measured on CPUs, with the goals that each has; [Performance](Performance.md) is a summary. Each row compares
moe-mlir with what a torch user could pick instead, on the same machine and in the same process. `./bench --rows 'TITLE'` measures
a row again; any part of a title will do. There is a section for each CPU and instruction set:
`./bench --page docs/Benchmarks.md` writes that of the machine it runs on, and `--records FILE.. --page docs/Benchmarks.md` those of
earlier runs with `--json`.

"""


def write_page(path: str | Path, records: Sequence[dict[str, Any]]) -> None:
    """Writes the part of each machine between its marks; other parts of an existing page stay.

    Of a row that was measured several times on a machine, the last counts.
    """
    path = Path(path)
    text = path.read_text() if path.exists() else _HEAD
    for machine, rows in _by_machine(records):
        label = re.sub(r"[^a-z0-9]+", "-", machine.name.lower()).strip("-")
        chart = path.with_name(f"{path.stem.lower()}-{label}.svg")
        files.write(chart, draw_chart(rows))
        begin = _BEGIN.format(machine.name)
        part = f"{begin}\n{_render(rows, machine, chart.name)}{_END}\n"
        if begin in text:
            before, _, rest = text.partition(begin)
            text = before + part + rest.partition(_END)[2].removeprefix("\n")
        else:
            # Behind the other machines, if there are any.
            before, last, rest = text.rpartition(f"{_END}\n")
            text = f"{before}{last}\n{part}{rest}" if last else f"{text.rstrip()}\n\n{part}"
    files.write(path, text)


def _by_machine(records):
    """The rows of each machine, with its peaks as they were measured last."""
    machines: dict[str, Machine] = {}
    rows: dict[str, dict[tuple[str, int], dict[str, Any]]] = {}
    for record in records:
        machine = Machine(**record["machine"])
        machines[machine.name] = machine
        rows.setdefault(machine.name, {})[record["title"], record["threads"]] = record
    return [(machine, list(rows[name].values())) for name, machine in machines.items()]


def _render(records, machine, chart):
    lines = [
        f"## CPU: {machine.name}",
        textwrap.fill(f"Measured on {machine.sentence()}; torch {torch.__version__}, Linux "
        f"{platform.release()}. Times are microseconds, the least of all rounds; one thread is "
        "timed by its own CPU time, several by the wall clock. Inputs are random, fresh for every "
        "call and rotated past the last-level cache; each result was checked against float64 "
        f"first. `ratio` is {_rivals_in(records)} over ours. The limit is "
        "`max(bytes / read bandwidth, flops / peak, exponentials / peak)` with the peaks above, "
        f"its binding term beside it. {_about_library(machine)}", 120),
        "",
        f"![ours beside torch]({chart})",
        "",
        *_side_by_side([r for r in records if _is_side_by_side(r)]),
        *_gated_experts([r for r in records if r["op"] == "gated_experts"]),
        *_layers([r for r in records if r["op"] == "layer"]),
        *_calls([r for r in records if r["op"] in ("call", "compile")]),
        *_missed(records),
    ]
    return "\n".join(lines) + "\n"


def _about_library(machine):
    """Why rows of products have the goals that they have."""
    share = 100 * machine.gemm_gflops / machine.fma_gflops
    if machine.has_slow_library():
        return (
            f"Torch's GEMM uses {share:.0f} % of the FMA peak here, which is why rows of products "
            "have the goals of 2x and more."
        )
    return (
        f"Torch's GEMM uses {share:.0f} % of the FMA peak here: rows of products, which cannot "
        "pass the peak, have the goal of 1.3x instead of the 2x and more of machines where it "
        "leaves half of the core unused."
    )


def _rivals_in(records):
    if any(r["inductor_us"] for r in records):
        return "the better of eager and Inductor"
    return "eager (Inductor was left out of this run)"


def _table(header, rows):
    yield "| " + " | ".join(header) + " |"
    yield "|---|" + "---:|" * (len(header) - 1)
    for row in rows:
        yield "| " + " | ".join(row) + " |"
    yield ""


def _number(value, digits=0):
    return "" if value is None else f"{value:,.{digits}f}"


def _goals(record):
    return "; ".join(
        g["goal"] + (" **missed**" if is_missed(g) else "" if g["met"] else " (not measured)")
        for g in record["goals"]
    )


def is_missed(goal: Mapping[str, Any]) -> bool:
    """A goal that nothing was held against is not missed."""
    return goal["found"] is not None and not goal["met"]


def _is_side_by_side(record):
    return record["eager_us"] and record["op"] not in ("call", "gated_experts")


def _side_by_side(records):
    def row(r):
        peer = f"{_number(r['peer_us'])} ({r['peer']})" if r["peer"] else ""
        limit = f"{_number(r['limit_us'])} {r['bound']}" if r["bound"] else ""
        threads = "" if r["threads"] == 1 else f", {r['threads']} threads"
        return (
            f"`{r['title']}`{threads}",
            _number(r["ours_us"]),
            _number(r["eager_us"]),
            _number(r["inductor_us"]),
            peer,
            _number(r["ratio"], 2),
            limit,
            _number(r["percent_of_limit"]),
            f"{_number(r['peak_mb'], 1)} / {_number(r['eager_peak_mb'], 1)}",
            _goals(r),
        )

    header = ("row", "ours", "eager", "Inductor", "peer", "ratio", "limit", "% of limit",
              "MB ours / eager", "goals")  # fmt: skip
    return _table(header, map(row, records)) if records else ()


_PEERS = ("eager", "grouped_mm", "batched_mm", "inductor", "vllm", "onnxruntime")


def _gated_experts(records):
    if not records:
        return
    yield (
        "The experts of a layer in transformers' layout, gated by SiLU. Ours is what "
        "`set_experts_implementation(\"moe\")` gives on weights that `pack_experts` packed, "
        "`unpacked` on weights as they lie; `eager`, `grouped_mm` and `batched_mm` are "
        "transformers' own, Inductor compiles `grouped_mm`, `vllm` and `onnxruntime` are their "
        "kernels on weights that they packed before. All get the same weights, ids and gates. "
        "`ratio` is the best of them over ours. Each call needs other experts than the one "
        "before, and their weights are in no cache: GB/s counts each expert that was chosen once."
    )
    yield ""
    header = ("row", "ours us", "unpacked us", *(f"{name} us" for name in _PEERS), "ratio", "GB/s", "GFLOP/s",
              "limit", "% of limit", "goals")  # fmt: skip
    yield from _table(
        header,
        (
            (
                f"`{r['title']}`" + ("" if r["threads"] == 1 else f", {r['threads']} threads"),
                _number(r["ours_us"]),
                _number(r["unpacked_us"]),
                *(_number(r["rivals_us"].get(name)) for name in _PEERS),
                _number(r["ratio"], 2),
                _number(r["read_gbytes"], 1),
                _number(r["gflops"], 1),
                f"{_number(r['limit_us'])} {r['bound']}",
                _number(r["percent_of_limit"]),
                _goals(r),
            )
            for r in records
        ),
    )
    yield from _missing_peers(records)


def _missing_peers(records):
    """Which peers ran, and each reason why one did not, with how many rows it holds for."""
    ran = [name for name in _PEERS if any(name in r["rivals_us"] for r in records)]
    yield f"Measured beside ours: {', '.join(ran)}."
    reasons: dict[tuple[str, str], int] = {}
    for record in records:
        for name, reason in record["missing"].items():
            # The sizes in a reason differ from row to row.
            key = name, re.sub(r"\b\d+\.\d GB", "some GB", reason)
            reasons[key] = reasons.get(key, 0) + 1
    for (name, reason), count in sorted(reasons.items()):
        yield f"- `{name}` is missing in {count} of {len(records)} rows: {reason}."
    yield ""


def _layers(records):
    if not records:
        return
    yield (
        "What a method adds to the whole layer (causal attention and experts of the model's "
        "width) over plain SMoE, beside the papers' own ratios for their models and beside what "
        "pairs of tokens alone would cost a core at its peaks. `layer` is the time of the layer "
        "with SMoE, whose attention is torch's SDPA; in the row `attention`, on both sides, it is "
        "the same kernel of ours, once with the entropies of its rows and once without, which is "
        "part of `ours` and of `SMoE's`. `attention_prefix` chooses a head for each token, by "
        "the rows up to its own, and mixes by all heads. `attention_beside_torch` keeps SDPA, "
        "which has no entropies: they take a pass of their own over the keys of all heads."
    )
    yield ""
    header = ("row", "ours us", "SMoE's us", "layer us", "ratio", "at the peaks", "paper",
              "memory ratio", "goals")  # fmt: skip
    yield from _table(
        header,
        (
            (
                f"`{r['title']}`",
                _number(r["ours_us"]),
                _number(r["smoe_us"]),
                _number(r["layer_us"]),
                _number(r["overhead"], 4),
                _number(r["limit_overhead"], 4),
                _number(r["paper_overhead"], 3),
                _number(r["memory_overhead"], 4),
                _goals(r),
            )
            for r in records
        ),
    )


def _calls(records):
    if not records:
        return
    yield (
        "Call overhead and compile time: an op on one token, beside an op of torch.library that "
        "returns its argument (`empty op`), and compilations."
    )
    yield ""
    header = ("row", "us", "median", "eager", "empty op", "goals")
    yield from _table(
        header,
        (
            (
                f"`{r['title']}`",
                _number(r["ours_us"], 1),
                _number(r["ours_median_us"], 1),
                _number(r["eager_us"], 1),
                # Records of before it was measured lack it.
                _number(r.get("floor_us"), 1),
                _goals(r),
            )
            for r in records
        ),
    )


def _missed(records):
    missed = [(r, g) for r in records for g in r["goals"] if is_missed(g)]
    if not missed:
        yield "Every goal that was measured is met."
        return
    yield "### Goals that are missed"
    for record, goal in missed:
        why = f" {record['why']}" if record["why"] else ""
        possible = record["ratio_at_limit"]
        if goal["goal"].startswith(("ratio", "peer / ours")) and possible:
            why += f" At the limit the ratio would be {possible:.2f}."
        yield f"- `{record['title']}`: {goal['goal']}, found {goal['found']:.4g}.{why}"


# ----------------------------------------------------------------------- chart

_COLOURS = {"eager": "#9aa5b1", "inductor": "#f0a04b", "peer": "#5b8def"}
_ROW, _LEFT, _WIDTH = 44, 330, 520


def draw_chart(records: Sequence[dict[str, Any]]) -> str:
    """Rivals' times over ours on a logarithmic axis, as SVG; the line at 1 is ours."""
    shown = [r for r in records if _is_side_by_side(r)]
    most = max([2.0, *(t / r["ours_us"] for r in shown for _, t in _rivals(r))])
    least = min([0.5, *(t / r["ours_us"] for r in shown for _, t in _rivals(r))])
    low, high = math.log2(least), math.log2(most)

    def x(ratio):
        return _LEFT + _WIDTH * (math.log2(ratio) - low) / (high - low)

    height = 40 + _ROW * len(shown)
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 70}" '
        f'height="{height}" font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for i, (name, colour) in enumerate(_COLOURS.items()):
        body.append(f'<rect x="{_LEFT + 90 * i}" y="8" width="12" height="10" fill="{colour}"/>')
        body.append(f'<text x="{_LEFT + 90 * i + 16}" y="17">{name}</text>')
    body.append('<text x="8" y="17">times slower than ours</text>')
    for i, record in enumerate(shown):
        top = 32 + _ROW * i
        body.append(f'<text x="8" y="{top + 18}">{html.escape(record["title"])}</text>')
        for place, (name, time) in enumerate(_rivals(record)):
            ratio = time / record["ours_us"]
            begin, end = sorted((x(1), x(ratio)))
            y = top + 11 * place
            body.append(
                f'<rect x="{begin:.1f}" y="{y}" width="{end - begin:.1f}" height="9" '
                f'fill="{_COLOURS[name]}"/>'
            )
            body.append(f'<text x="{end + 4:.1f}" y="{y + 8}">{ratio:.2g}</text>')
    body.append(
        f'<line x1="{x(1):.1f}" y1="26" x2="{x(1):.1f}" y2="{height}" stroke="#c0392b"/>'
    )
    return "\n".join([*body, "</svg>"]) + "\n"


def _rivals(record):
    times = ((name, record[f"{name}_us"]) for name in _COLOURS)
    return [(name, time) for name, time in times if time]
