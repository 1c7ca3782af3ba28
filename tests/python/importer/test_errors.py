"""What a user reads when a model cannot be imported."""

import inspect

import pytest
import torch

import moe_mlir
from moe_mlir.importer import ImportFailed


class Unsupported(torch.nn.Module):
    def forward(self, x):
        a = torch.special.bessel_j0(x)
        b = torch.special.bessel_j0(a)
        return torch.special.bessel_y0(b)


def line_of(model, text):
    source, first = inspect.getsourcelines(model.forward)
    return first + next(i for i, s in enumerate(source) if text in s)


def test_all_unsupported_operations_are_listed_with_counts_and_lines():
    with pytest.raises(ImportFailed) as caught:
        moe_mlir.export(Unsupported(), (torch.randn(2, 4, 4),))
    message = str(caught.value)
    assert "2 unsupported operations" in message
    assert f"{__file__}:{line_of(Unsupported, 'a = ')}" in message
    assert f"{__file__}:{line_of(Unsupported, 'bessel_y0')}" in message
    assert "bessel_j0.default: 2 uses" in message and "bessel_y0.default: 1 use," in message


def test_sizes_that_depend_on_data_are_named():
    class Selected(torch.nn.Module):
        def forward(self, x):
            return torch.nonzero(x)
    with pytest.raises(ImportFailed, match="nonzero"):
        moe_mlir.export(Selected(), (torch.randn(3, 4),))


def test_unsupported_dtype_of_an_input():
    class Identity(torch.nn.Module):
        def forward(self, x):
            return x + x
    with pytest.raises(TypeError, match="input 'x': dtype complex64 is not supported"):
        moe_mlir.export(Identity(), (torch.randn(2, 3, dtype=torch.complex64),))


def test_args_that_are_no_tuple():
    with pytest.raises(TypeError, match=r"expected 'args' to be a tuple.*write \(x,\)"):
        moe_mlir.export(torch.nn.Linear(4, 4), torch.randn(2, 4))


def test_a_model_that_is_no_module():
    with pytest.raises(TypeError, match="expected 'model' to be a torch.nn.Module.*found function"):
        moe_mlir.export(lambda x: x, (torch.randn(2),))


def test_a_refusal_is_a_moe_error():
    with pytest.raises(moe_mlir.MoeError) as caught:
        moe_mlir.export(Unsupported(), (torch.randn(2, 4, 4),))
    assert isinstance(caught.value, ImportFailed) and isinstance(caught.value, ValueError)
