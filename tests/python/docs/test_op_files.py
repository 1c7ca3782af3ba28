"""docs/Architecture.md: the table of files is what the sources say."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "utils"))

import op_files  # noqa: E402

PAGE = (ROOT / "docs" / "Architecture.md").read_text()
ROWS = {name: where for name, *where in op_files.rows()}


def test_the_page_shows_what_the_sources_say():
    assert op_files.TABLE.on_page(PAGE) == PAGE, (
        "run `PYTHONPATH=build/python python utils/op_files.py --write docs/Architecture.md`")


@pytest.mark.parametrize("name", sorted(ROWS))
def test_an_op_has_code_somewhere(name):
    assert name == "assert" or ROWS[name][0]


def test_kernels_are_found_in_all_ways_of_writing_a_pattern():
    assert ROWS["softmax_mix"] == ["DecomposeMixing.cpp", "Mixing/SoftmaxMix.cpp",
                                   "Mixing/SoftmaxMix.cpp"]
    assert ROWS["combine"][1:] == ["Experts/Combine.cpp", "Experts/Combine.cpp"]
    assert ROWS["similarity_inform"] == ["softmax_mix, DecomposeMixing.cpp", "", ""]
    assert ROWS["grouped_linear"][1] == "Experts/GroupedLinear.cpp"
