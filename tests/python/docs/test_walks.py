"""The walks of docs/Contributing.md are real: their patches apply, touch no more files than the
page promises, and, in a long run, build and pass the tests that they add."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests/walks"))
import replay  # noqa: E402

PAGE = (ROOT / "docs/Contributing.md").read_text()
# | [a new chip](#a-new-chip) | 1 | `new-chip.patch` |
ROWS = re.findall(r"^\| \[.*\]\(#.*\) \| (\d+) \| `([\w-]+)\.patch` \|$", PAGE, re.M)
PROMISED = {walk: int(files) for files, walk in ROWS}


def test_the_page_has_a_row_for_each_patch():
    assert len(ROWS) == len(PROMISED) >= 3
    assert set(PROMISED) == set(replay.WALKS)


@pytest.mark.parametrize("walk", replay.WALKS)
def test_a_walk_applies_to_this_tree(walk):
    replay.git("apply", "--check", replay.WALKS[walk])


@pytest.mark.parametrize("walk", replay.WALKS)
def test_a_walk_touches_as_few_files_as_promised(walk):
    files = replay.product_files(walk)
    assert len(files) == PROMISED[walk], files
    for name in files:
        assert name in PAGE, f"expected docs/Contributing.md to say what {name} is for"
    assert replay.lit_tests(walk)
    assert all(Path(name).suffix == ".mlir" or name in replay.python_tests(walk)
               for name in replay.touched(walk) if name.startswith("tests/"))


@pytest.mark.long
def test_walks_build_and_pass_their_own_tests(tmp_path):
    replay.replay(list(replay.WALKS), tmp_path)
