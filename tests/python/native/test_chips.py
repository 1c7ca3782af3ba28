"""One table of chips, include/MoE/Support/Chips.h, is all that names them."""

import ast
import re
import subprocess
from pathlib import Path

import pytest
from support import run_tool

from moe_mlir.compiler.chips import chips, own_chip, runnable_chips, target_chips

ROOT = Path(__file__).parents[3]
TABLE = ROOT / "include/MoE/Support/Chips.h"
# What code may ask for by name: the oldest, the default, and the one that has wgmma.
SPECIAL = {"sm_80", "sm_90", "sm_90a"}
CHIP = re.compile(r"\bsm_\d+[a-z]?\b")


def sources(*suffixes):
    folders = ["include", "lib", "simulator", "tools", "python", "utils"]
    listed = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True)
    return [ROOT / name for name in listed.stdout.split()
            if name.endswith(suffixes) and ROOT / name != TABLE]


def literals(path):
    """The strings of a Python file but for docstrings and other texts."""
    tree = ast.parse(path.read_text())
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return " ".join(node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)
                    and isinstance(node.value, str) and id(node) not in texts)


def code(path):
    if path.suffix == ".py":
        return literals(path)
    return re.sub(r"//.*", "", path.read_text())


def test_no_other_file_lists_chips():
    named = {path.relative_to(ROOT): set(CHIP.findall(code(path))) - SPECIAL
             for path in sources(".py", ".h", ".cpp", ".td")}
    assert len(named) > 100
    assert {path: names for path, names in named.items() if names} == {}


def test_the_rows_are_in_order():
    rows = [*chips().values()]
    assert [row.number for row in rows] == sorted(row.number for row in rows)
    assert set(chips()) == set(re.findall(r'\.name = "(\w+)"', TABLE.read_text()))
    assert SPECIAL <= set(target_chips()) < set(chips())


@pytest.mark.parametrize("tool, options", [("moe-compile", ["--help"]), ("moe-opt", ["--help"])])
def test_help_lists_the_targets(tool, options):
    text = " ".join(run_tool(tool, *options).stdout.split())
    assert ", ".join(target_chips()) in text


def test_documents_name_chips_of_the_table():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    assert {name for page in pages for name in CHIP.findall(page.read_text())} <= set(chips())


def test_what_runs_where():
    assert runnable_chips("sm_89") == ("sm_89", "sm_86", "sm_80")
    assert runnable_chips("sm_100")[:2] == ("sm_100", "sm_90")  # what sm_90a alone has is not there
    assert [own_chip(number) for number in (75, 80, 81, 90, 91)] == [
        None, "sm_80", "sm_80", "sm_90a", "sm_90"]
