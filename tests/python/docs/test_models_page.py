"""docs/Models.md names the form of each router in words, not by the matcher's codes."""

import re
from pathlib import Path

from moe_mlir.raising.words import FORM_NAMES
from moe_mlir_bench.models.families import FAMILIES

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "Models.md").read_text()


def test_each_family_has_its_form_in_words():
    rows = dict(re.findall(r"^\| ([\w.-]+) \| ([^|]+) \| \d+ of \d+ \|", PAGE, re.MULTILINE))
    assert rows == {name: FORM_NAMES[family.form] for name, family in FAMILIES.items()}
    assert not re.search(r"\bF\d\b", PAGE)
