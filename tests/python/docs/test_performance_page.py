"""docs/Performance.md and its chart show figures of the pages that have all rows, and no others."""

import re
from pathlib import Path

import pytest

from moe_mlir_bench.models import chart

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGE = (DOCS / "Performance.md").read_text()
BENCHMARKS = (DOCS / "Benchmarks.md").read_text()
# | [what](Page.md#anchor) .. | machine | 150 | 3,401 eager | 22.6x |
ROWS = re.findall(r"^\| \[\w+\]\((\w+)\.md#[\w-]+\) (.*) \| (.*) \| ([\d.,]+) \| ([\d.,]+) .* \| ([\d.]+)x \|$",
                  PAGE, re.MULTILINE)


def number(text):
    return float(text.replace(",", ""))


def figures(line):
    """Of the cells of a line; those of a table in milliseconds also as microseconds."""
    found = [number(cell) for cell in re.findall(r"(?<![\w.=])[\d,]*\d(?:\.\d+)?(?![\w.])", line)]
    return {*found, *(round(1000 * value, 3) for value in found)}


def test_there_are_eight_rows():
    assert len(ROWS) == 8


@pytest.mark.parametrize("row", ROWS, ids=[f"{what}, {machine}" for _, what, machine, *_ in ROWS])
def test_the_figures_of_a_row_were_measured(row):
    page, _, _, ours, best, ratio = row
    lines = (DOCS / f"{page}.md").read_text().splitlines()
    table = [figures(line) for line in lines if line.startswith("|")]
    ours, best = number(ours), number(best)
    assert any(ours in line for line in table)
    assert any(best in line for line in table)
    assert float(ratio) == pytest.approx(best / ours, rel=0.04)


def groups():
    return chart.groups_of((DOCS / "Models.md").read_text(), BENCHMARKS)


def test_the_chart_is_drawn_from_the_pages():
    assert (DOCS / "decoding.svg").read_text() == chart.draw(groups()), (
        "run `python -m moe_mlir_bench.models.chart docs/decoding.svg`")


def test_the_chart_has_each_model_and_leaves_out_what_was_not_measured():
    bars = {(group.model, group.weights): set(group.bars) for group in groups()}
    ours_and = {chart.OURS, chart.EAGER, chart.INDUCTOR}
    assert bars == {("Granite-1B", "bfloat16"): ours_and,
                    ("Qwen3-MoE", "bfloat16"): ours_and - {chart.INDUCTOR},
                    ("gpt-oss", "bfloat16"): ours_and,
                    ("Granite-1B", "4 bits"): {chart.OURS, chart.LLAMA},
                    ("Qwen3-MoE", "4 bits"): {chart.OURS, chart.LLAMA}}, (
        "say below the chart, in README.md and docs/Performance.md, what has no bar")


def test_bars_are_as_long_as_their_figures():
    svg = chart.draw([chart.Group("a", "f32", {chart.EAGER: 10.0, chart.OURS: 40.0})])
    lengths = [float(width) for width in re.findall(r'y="\d+" width="([\d.]+)" height="13"', svg)]
    assert lengths[1] == pytest.approx(4 * lengths[0], rel=0.01)
    assert ">10</text>" in svg and ">40 (4.0x)</text>" in svg
