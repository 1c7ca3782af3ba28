"""The manual builds without a warning, and has what it promises; one build serves all tests."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import moe_mlir
from moe_mlir import distributed, hf, metrics, nn, plots, reference, sim

ROOT = Path(__file__).resolve().parents[3]
BUILD = Path(moe_mlir.__file__).absolute().parents[1]


@pytest.fixture(scope="module")
def manual(tmp_path_factory):
    """The folder of the pages."""
    pytest.importorskip("furo", reason="the manual's theme is not installed; requirements.txt "
                        "pins it")
    pages = tmp_path_factory.mktemp("manual")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html",
         "-d", pages.with_name("doctrees"), ROOT / "docs", pages],
        capture_output=True, text=True, env=dict(os.environ, PYTHONPATH=str(BUILD)))
    assert done.returncode == 0, done.stderr
    return pages


def inventory(manual):
    """Kind -> names of all that has an anchor."""
    from sphinx.util.inventory import InventoryFile

    with open(manual / "objects.inv", "rb") as file:
        return {kind: set(names) for kind, names in
                InventoryFile.load(file, "", os.path.join).items()}


def public_names():
    for module in (moe_mlir, nn, hf, metrics, plots, distributed, sim, reference):
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isroutine(value) or inspect.isclass(value):
                yield f"{module.__name__}.{name}"


def test_the_manual_has_every_public_function_and_class(manual):
    found = set().union(*(names for kind, names in inventory(manual).items()
                          if kind.startswith("py:")))
    names = set(public_names())
    assert len(names) > 100
    # The same function under two names is on one page.
    assert sorted(names - found - {"moe_mlir.update_routers"}) == []


def test_the_manual_has_every_op_of_the_dialect(manual):
    found = inventory(manual)["std:label"]
    for name in ("moe.topk_renorm", "moe.softmax_mix_backward_dq", "moe.assert",
                 "pass-moe-tile-and-fuse", "pass-convert-moe-to-gpu"):
        assert name in found
    assert {f"moe.{op}" for op in moe_mlir.ops.__all__} - found == {
        "moe.attention", "moe.grouped_topk"}  # other names of softmax_mix and topk_renorm


def test_code_of_mlir_has_colours(manual):
    page = (manual / "reference" / "dialect" / "Selection.html").read_text()
    assert '<span class="nf">moe.topk_renorm</span>' in page
