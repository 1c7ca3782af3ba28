"""The table of docs/Integrations.md: versions are those of requirements.txt, tests and pages exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "Integrations.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("| \n").split(" | ")]
        for line in re.findall(r"^\|.*\|$", PAGE[:PAGE.index("\n## ")], re.MULTILINE)[2:]]
PINS = dict(re.findall(r"^([\w-]+)==(\d+\.\d+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE))
# Versions that other places name.
ELSEWHERE = {"vLLM": "docs/Serving.md", "IREE": "tests/python/integrations/test_iree.py"}


def test_there_is_a_row_for_each_package():
    assert len(ROWS) >= 12 and all(len(row) == 5 for row in ROWS)


@pytest.mark.parametrize("package, version, works, page, test", ROWS, ids=[row[0] for row in ROWS])
def test_a_row(package, version, works, page, test):
    if package in ELSEWHERE:
        assert version in (ROOT / ELSEWHERE[package]).read_text()
    else:
        # "gguf 0.19", "torch 2.13, g++ 12": the package's own name, or one that is said.
        found = re.match(r"(?:([\w-]+) )?(\d+\.\d+)", version)
        assert PINS[(found[1] or package).lower()] == found[2]
    (link,) = re.findall(r"\]\(([\w./]*)(?:#([\w-]+))?\)", page)
    path, anchor = link
    assert (ROOT / "docs" / path).is_file() if path else f"\n## {anchor}\n" in PAGE.lower()
    tests = re.findall(r"`([\w/.]+)`", test)
    assert tests and all((ROOT / path).exists() for path in tests)
