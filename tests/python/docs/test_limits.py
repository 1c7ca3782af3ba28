"""docs/Limits.md: the table of ops is that of the registered ops, and its times are measured ones."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "utils"))

import op_support  # noqa: E402

PAGE = (ROOT / "docs" / "Limits.md").read_text()
MEASURED = (ROOT / "docs" / "Benchmarks.md").read_text()
ROWS = re.findall(r"^\| (?:AVX2|AVX-512) \| (`[^`]+`) \| (.*) \|$", PAGE, re.MULTILINE)


def numbers(cells):
    return [float(cell.replace(",", "")) for cell in re.findall(r"(?<![\w.])[\d,]+(?:\.\d+)?(?= )",
                                                                cells + " ")]


def test_the_page_shows_what_the_ops_say():
    assert op_support.page_with_table(PAGE) == PAGE, (
        "run `PYTHONPATH=build/python python utils/op_support.py --write docs/Limits.md`")


def test_narrow_and_wide_arguments_are_told_apart():
    assert op_support.narrow_arguments("combine") == ["expert_out", "shared"]
    assert op_support.narrow_arguments("balance_loss") == []
    assert op_support.differentiated("dispersion_weights") == []


@pytest.mark.parametrize("row, quoted", ROWS, ids=[row.strip("`") for row, _ in ROWS])
def test_a_quoted_time_is_near_a_measured_one(row, quoted):
    """A later measurement moves by some percent; a larger change belongs on the page."""
    lines = [line for line in MEASURED.splitlines() if line.startswith(f"| {row} |")]
    assert lines, "expected a row of docs/Benchmarks.md"

    def holds(line):
        measured = numbers(line.removeprefix(f"| {row} |"))
        return all(any(abs(m - q) <= 0.25 * q for m in measured) for q in numbers(quoted))

    assert any(map(holds, lines))


def test_rows_were_found():
    assert len(ROWS) >= 8
    assert numbers("1,192 | 5.8 |  | 22") == [1192.0, 5.8, 22.0]


def test_a_page_without_marks_is_refused():
    with pytest.raises(ValueError, match="expected a page with the lines"):
        op_support.page_with_table("# Limits\n")
