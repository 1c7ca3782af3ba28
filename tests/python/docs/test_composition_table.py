"""The matrix of docs/Methods.md is what the classes say today."""

import pathlib

import pytest

from moe_mlir import nn
from moe_mlir.nn import composition

PAGE = pathlib.Path(__file__).resolve().parents[3] / "docs" / "Methods.md"


def test_the_page_shows_the_matrix_of_the_classes():
    text = PAGE.read_text()
    assert composition.page_with_table(text) == text, (
        "run `python -m moe_mlir.nn.composition --write docs/Methods.md`"
    )


def test_a_new_router_enters_by_itself(monkeypatch):
    class New(nn.XMoE):
        """Stands nowhere: `refuses_methods` says why."""

        refuses_methods = "it is a test"

    monkeypatch.setattr(nn, "New", New, raising=False)
    monkeypatch.setattr(nn, "__all__", [*nn.__all__, "New"])
    found = composition.table()
    assert "| `New` | no (" in found and "it is a test." in found


def test_a_page_without_marks_is_refused():
    with pytest.raises(ValueError, match="expected a page with the lines"):
        composition.page_with_table("# Methods\n")
