"""What a user reads when a model cannot be imported."""

import inspect

import pytest
import torch

import moe_mlir
from moe_mlir.frontends.trace_errors import TraceFailed
from moe_mlir.importer import ImportFailed
from moe_mlir.importer.registry import TABLE


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


def _refusal(function, *inputs):
    class Model(torch.nn.Module):
        def forward(self, *tensors):
            return function(*tensors)
    with pytest.raises((ImportFailed, TraceFailed, TypeError)) as caught:
        moe_mlir.export(Model(), inputs)
    return str(caught.value)


@pytest.mark.parametrize("function, words", [
    (lambda x: torch.equal(x, x + 1), "found aten.equal.default, whose result is a number that depends"),
    (lambda x: torch.linalg.lstsq(x, x)[0], "found aten.linalg_lstsq.default, whose results have sizes"),
    (lambda x: torch.geqrf(x), "found aten.geqrf.default, which torch.export cannot trace"),
    (lambda x: torch.narrow(x, 1, x.long()[0, 0], 2), "expected sizes that follow from those of the inputs"),
], ids=["a number", "sizes", "no trace", "a start"])
def test_what_torch_cannot_trace_is_told_at_the_line(function, words):
    message = _refusal(function, torch.ones(3, 4))
    assert words in message and message.startswith(f"{__file__}:{function.__code__.co_firstlineno}: ")


def test_a_write_through_data_is_told():
    message = _refusal(lambda x: x.data.mul_(2), torch.ones(3, 4))
    assert message.startswith("expected writes that a trace can see, found a use of '.data'")


def test_outputs_that_are_no_real_tensors_are_told():
    assert "found the size of dim 0 of 'tensors.0'" in _refusal(lambda x: (x, x.shape[0]), torch.ones(3, 4))
    assert "found a number computed at" in _refusal(lambda x: x.sum().item(), torch.ones(3, 4))
    message = _refusal(torch.view_as_complex, torch.ones(3, 2))
    assert "expected real tensors as outputs, found complex64 computed at" in message


def test_positions_of_a_number_are_told():
    assert "aten.nonzero.default: the size u0 depends on data" in _refusal(torch.nonzero, torch.tensor(2.0))


def test_a_fault_of_a_function_of_the_table_is_told_at_the_line(monkeypatch):
    """What one call does to our code is no traceback to the user, who cannot read it."""
    def broken(context, node, arguments):
        return arguments.self.meta["val"].shape[7]
    monkeypatch.setitem(TABLE, torch.ops.aten.exp.default, broken)
    message = _refusal(lambda x: x.exp() + torch.special.bessel_j0(x), torch.ones(3, 4))
    assert "aten.exp.default: IndexError in moe-mlir" in message and f"please report it: 1 use, first at {__file__}:" in message
    assert "2 unsupported operations" in message


def test_a_function_of_torch_that_needs_numbers_is_told_in_a_line():
    message = _refusal(lambda x, counts: torch.cov(x, correction=0, fweights=counts),
                       torch.randn(2, 3), torch.tensor([1, 2, 3], dtype=torch.int32))
    assert "torch.export cannot trace this: Cannot call numel()" in message and "frame #" not in message


@pytest.mark.parametrize("call", [lambda x: x.unsqueeze_(0), lambda x: x.t_()])
def test_an_input_that_gets_another_shape_is_told(call):
    message = _refusal(call, torch.ones(3, 4))
    assert message.startswith("expected inputs that keep their shape, found ") and "tensor 0 of the inputs" in message


def test_gradients_in_a_forward_are_told():
    message = _refusal(torch.func.grad(lambda x: (x**2).sum()), torch.ones(3, 4))
    assert message.startswith("expected a forward without gradients of its own, found one that calls torch.func.grad")


def test_tensors_and_weights_without_a_shape_are_told():
    assert "expected tensors that keep their shape, found resize_" in _refusal(
        lambda x: x.resize_(12) * 1, torch.ones(3, 4))
    with pytest.raises(TraceFailed, match="expected weights with shapes, found 'weight' of a lazy module"):
        moe_mlir.compile(torch.nn.LazyLinear(4), (torch.ones(3, 4),))


def test_a_number_of_a_tensor_is_told():
    message = _refusal(lambda x: x * x[0, 0].item(), torch.ones(3, 4))
    assert "is taken from a tensor or divides sizes" in message and "keep it a tensor" in message
