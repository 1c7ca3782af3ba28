"""The chart of README.md: how fast three models decode, as docs/Models.md and docs/Benchmarks.md say.

    python -m moe_mlir_bench.models.chart docs/decoding.svg
"""

import html
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_mlir._support import files

from .speed_page import Row, read_rows

EAGER, INDUCTOR, LLAMA, OURS = "eager PyTorch", "Inductor", "llama.cpp", "moe-mlir"
COLOURS = {EAGER: "#9aa5b1", INDUCTOR: "#e8963c", LLAMA: "#5b8def", OURS: "#0f7b5f"}
MACHINE = "AMD EPYC (cpu family 25, model 17), AVX-512"
# In bfloat16, by the names of docs/Models.md; how many of its layers ran is said below the chart.
MODELS = ("Granite-1B", "Qwen3-MoE", "gpt-oss")
WAYS = {"eager, grouped_mm": EAGER, "Inductor": INDUCTOR, "moe_mlir.compile, packed": OURS}


@dataclass
class Group:
    """Ways to run one model, and the tokens a second of each; ways without a figure are left out."""

    model: str
    weights: str
    bars: dict[str, float]


def groups_of(models: str, benchmarks: str) -> list[Group]:
    """What the texts of the two pages say."""
    rows = read_rows(models)[MACHINE]
    groups = [Group(model, "bfloat16", _bfloat16_bars(rows, model)) for model in MODELS]
    found = _gguf_bars(benchmarks)
    return groups + [Group(model, "4 bits", found[model]) for model in MODELS if model in found]


def _bfloat16_bars(rows: Sequence[Row], model: str) -> dict[str, float]:
    found = {row.way: row.steps for row in rows if (row.model, row.dtype) == (model, "bf16")}
    return {name: steps for way, name in WAYS.items() if (steps := found.get(way))}


def _gguf_bars(benchmarks: str) -> dict[str, dict[str, float]]:
    """Rows such as `| Granite-1B, 24 layers | Q4_0 | llama.cpp | 98 | 56 | ...`, of Q4_0 alone."""
    bars: dict[str, dict[str, float]] = {}
    pattern = r"^\| ([^|,]+), \d+ layers \| Q4_0 \| (moe_mlir|llama\.cpp) \| [\d.]+ \| ([\d.]+) \|"
    for model, way, steps in re.findall(pattern, benchmarks, re.MULTILINE):
        bars.setdefault(model, {})[LLAMA if way == LLAMA else OURS] = float(steps)
    # The order of the legend, whatever that of the rows.
    return {model: {name: found[name] for name in COLOURS if name in found} for model, found in bars.items()}


# ------------------------------------------------------------------------- drawing

_LEFT, _WIDTH, _RIGHT = 175, 350, 95
_BAR, _STEP, _GAP, _TOP = 13, 15, 9, 62


def draw(groups: Sequence[Group]) -> str:
    """Bars on a white card, so that they are read on a dark page as well."""
    most = max(value for group in groups for value in group.bars.values())
    height = _TOP + sum(_STEP * len(group.bars) + _GAP for group in groups) + 6
    width = _LEFT + _WIDTH + _RIGHT
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="14" fill="#1f2933">',
        f'<rect width="{width}" height="{height}" rx="6" fill="white"/>',
        '<text x="14" y="24" font-size="16" font-weight="bold">Decoding on one core, tokens a '
        "second (longer is faster)</text>",
    ]
    for place, (name, colour) in enumerate(COLOURS.items()):
        x = 14 + 140 * place
        body.append(f'<rect x="{x}" y="37" width="12" height="12" fill="{colour}"/>')
        body.append(f'<text x="{x + 18}" y="47">{name}</text>')
    top = _TOP
    for group in groups:
        body += _draw_group(group, top, most)
        top += _STEP * len(group.bars) + _GAP
    return "\n".join([*body, "</svg>"]) + "\n"


def _draw_group(group: Group, top: int, most: float) -> list[str]:
    middle = top + _STEP * len(group.bars) / 2
    lines = [f'<text x="14" y="{middle + 4:.0f}"><tspan font-weight="bold">{html.escape(group.model)}'
             f"</tspan>, {group.weights}</text>"]
    for place, (name, value) in enumerate(group.bars.items()):
        y, length = top + _STEP * place, _WIDTH * value / most
        weight = ' font-weight="bold"' if name == OURS else ""
        lines.append(f'<rect x="{_LEFT}" y="{y}" width="{length:.1f}" height="{_BAR}" '
                     f'fill="{COLOURS[name]}"/>')
        lines.append(f'<text x="{_LEFT + length + 6:.1f}" y="{y + 11}"{weight}>'
                     f"{_label(group, name, value)}</text>")
    return lines


def _label(group: Group, name: str, value: float) -> str:
    """A figure; that of ours also says how many times the fastest other one it is."""
    figure = f"{value:.0f}" if value >= 10 else f"{value:.1f}"
    others = [other for way, other in group.bars.items() if way != OURS]
    return f"{figure} ({value / max(others):.1f}x)" if name == OURS and others else figure


def main() -> None:
    chart = Path(sys.argv[1])
    pages = chart.parent
    files.write(chart, draw(groups_of((pages / "Models.md").read_text(),
                                      (pages / "Benchmarks.md").read_text())))


if __name__ == "__main__":
    main()
