"""Editors and type checkers read the ops' annotations, which py.typed tells them of."""

import inspect
from pathlib import Path

import pytest

import moe_mlir
from moe_mlir import ops


def test_the_package_says_that_it_is_typed():
    assert (Path(moe_mlir.__file__).parent / "py.typed").exists()


@pytest.mark.parametrize("name", ops.__all__)
def test_an_op_is_annotated(name):
    signature = inspect.signature(getattr(moe_mlir, name))
    assert signature.return_annotation is not inspect.Signature.empty
    missing = [p.name for p in signature.parameters.values() if p.annotation is p.empty]
    assert not missing
    # None is allowed where it is the default.
    for parameter in signature.parameters.values():
        if parameter.default is None:
            assert "None" in str(parameter.annotation), parameter.name
