"""Calls like an earlier one skip the search for their program, and stay right when the model changes."""

import copy
import gc
import pickle
import weakref

import pytest
import torch

import moe_mlir


class Gated(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = torch.nn.Linear(8, 4, bias=False)
        self.register_buffer("bias", torch.randn(4))

    def forward(self, x, y=None, double=False):
        z = self.gate(x) + self.bias
        if y is not None:
            z = z - self.gate(y)
        return 2 * z if double else z


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Gated().eval()


@pytest.fixture
def compiled(model):
    return moe_mlir.compile(model, (torch.randn(3, 8),))


def check(compiled, model, *args, **kwargs):
    with torch.no_grad():
        torch.testing.assert_close(compiled(*args, **kwargs), model(*args, **kwargs))


def test_a_call_like_an_earlier_one_is_not_searched(compiled, model, searches):
    for n in (3, 5, 3, 5, 3):
        check(compiled, model, torch.randn(n, 8))
    assert len(searches) == 2


def test_constants_and_structure_are_part_of_what_is_alike(compiled, model):
    x, y = torch.randn(3, 8), torch.randn(3, 8)
    for _ in range(2):
        check(compiled, model, x)
        check(compiled, model, x, double=True)
        check(compiled, model, x, y)
        check(compiled, model, x, y=y)
        check(compiled, model, x, None, True)


def test_one_tensor_twice_says_nothing_of_two(model):
    x = torch.randn(3, 8)
    compiled = moe_mlir.compile(model, (x, torch.randn(3, 8)))
    for _ in range(2):
        check(compiled, model, x, x)
        check(compiled, model, x, torch.randn(3, 8))
        check(compiled, model, torch.randn(3, 8), x)


def test_inputs_are_read_as_they_lie(compiled, model):
    check(compiled, model, torch.randn(3, 8))
    check(compiled, model, torch.randn(8, 3).T)
    check(compiled, model, torch.randn(3, 16)[:, ::2])
    negated = torch.randn(3, 8, dtype=torch.complex64).conj().imag
    assert negated.is_neg()
    check(compiled, model, negated)
    check(compiled, model, negated)


@pytest.mark.parametrize("change", [
    lambda m: m.gate.weight.data.mul_(3),
    lambda m: setattr(m.gate, "weight", torch.nn.Parameter(torch.randn(4, 8))),
    lambda m: setattr(m, "gate", torch.nn.Linear(8, 4, bias=False)),
    lambda m: setattr(m, "bias", torch.randn(4)),
    lambda m: m.load_state_dict(copy.deepcopy(m.state_dict()), assign=True),
    lambda m: setattr(m.gate.weight, "data", torch.randn(8, 4).T.contiguous()),
    lambda m: m.train(),
], ids=["in place", "parameter", "module", "buffer", "assign", "data", "mode"])
def test_the_model_is_read_as_it_is_now(compiled, model, change):
    x = torch.randn(3, 8)
    check(compiled, model, x)
    check(compiled, model, x)
    change(model)
    check(compiled, model, x)
    check(compiled, model, x)


def test_another_dtype_is_another_program(compiled, model):
    x = torch.randn(3, 8)
    check(compiled, model, x)
    model.bfloat16()
    check(compiled, model, x.bfloat16())
    check(compiled, model, x.bfloat16())
    model.float()
    check(compiled, model, x)


def test_weights_that_are_no_longer_tied():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    model[1].weight = model[0].weight
    compiled, x = moe_mlir.compile(model, (torch.randn(3, 8),)), torch.randn(3, 8)
    check(compiled, model, x)
    check(compiled, model, x)
    model[1].weight = torch.nn.Parameter(torch.randn(8, 8))
    check(compiled, model, x)
    check(compiled, model, x)


def test_a_weight_that_was_replaced_is_forgotten(compiled, model):
    x = torch.randn(3, 8)
    compiled(x)
    compiled(x)
    old = weakref.ref(model.gate.weight)
    model.gate.weight = torch.nn.Parameter(torch.randn(4, 8))
    gc.collect()
    assert old() is None


def test_refusals_stay_as_they_are(compiled):
    x = torch.randn(3, 8)
    compiled(x)
    with pytest.raises(Exception, match=r"torch\.func"):
        torch.func.vmap(compiled)(torch.randn(2, 3, 8))
    with pytest.raises(TypeError, match="CPU"):
        compiled(torch.randn(3, 8, device="meta"))


def test_results_have_no_gradients(compiled):
    x = torch.randn(3, 8, requires_grad=True)
    for _ in range(2):
        assert not compiled(x).requires_grad


def test_copies_know_no_calls(compiled, model):
    x = torch.randn(3, 8)
    compiled(x)
    for other in (copy.deepcopy(compiled), pickle.loads(pickle.dumps(compiled))):
        with torch.no_grad():
            other.model.gate.weight.mul_(2)
        check(other, other.model, x)
        check(compiled, model, x)


def test_a_default_device_does_not_move_results(compiled):
    x = torch.randn(3, 8)
    compiled(x)
    with torch.device("meta"):
        assert compiled(x).device.type == "cpu"


def test_a_weight_that_becomes_a_negated_view_is_read_as_it_is(compiled, model):
    x = torch.randn(3, 8)
    check(compiled, model, x)
    model.gate.weight.data = torch._neg_view(torch.randn(4, 8))
    check(compiled, model, x)
    check(compiled, model, x)


@pytest.mark.parametrize("change", [
    lambda m: m.options.append(3.0),
    lambda m: m.options.__setitem__(0, 3.0),
    lambda m: m.table.__setitem__("scale", 3.0),
    lambda m: setattr(m, "__dict__", {**vars(m), "scale": 3.0}),
    lambda m: setattr(m, "__class__", type("Other", (type(m),), {"forward": lambda _, x: 3 * x})),
    lambda m: setattr(m, "flag", True),
    lambda m: m.register_forward_hook(lambda module, args, result: 3 * result),
], ids=["append", "list", "dict", "attributes", "class", "new attribute", "hook"])
def test_what_the_code_of_a_model_reads_is_looked_at_in_each_call(change, searches):
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.options, self.table, self.scale = [2.0], {"scale": 2.0}, 2.0

        def forward(self, x):
            return x * sum(self.options) * self.table["scale"] * self.scale

    model = Scaled()
    compiled, x = moe_mlir.compile(model, (torch.randn(3),)), torch.randn(3)
    for _ in range(3):
        check(compiled, model, x)
    assert len(searches) == 1
    change(model)
    for _ in range(3):
        check(compiled, model, x)
    assert len(searches) > 1


def test_a_model_with_the_same_values_in_other_objects_is_the_same(compiled, model, searches):
    x = torch.randn(3, 8)
    check(compiled, model, x)
    vars(model)["_buffers"] = dict(model._buffers)
    for _ in range(3):
        check(compiled, model, x)
    # One to compare by value, after which the objects of now are known.
    assert len(searches) == 2


def test_weights_may_be_packed_and_unpacked_between_calls():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).eval()
    compiled, x = moe_mlir.compile(model, (torch.randn(3, 64),)), torch.randn(3, 64)
    expected = model(x).detach()
    for change in (moe_mlir.pack_linears, moe_mlir.unpack_linears) * 2:
        for _ in range(2):
            torch.testing.assert_close(compiled(x), expected)
        change(model)
    with torch.no_grad():
        model[0].weight.mul_(2)
    for _ in range(2):
        check(compiled, model, x)


@pytest.mark.parametrize("outputs", [
    lambda x: (x, x + 1), lambda x: [x + 1, x], lambda x: (x + 1,), lambda x: {"a": x + 1, "b": x - 1},
    lambda x: ((x + 1, [x - 1]), None, 2), lambda x: (x + 1, None, 2.5),
    lambda x: (x + 1, {"a": x - 1}), lambda x: [[x + 1], [x - 1]],
], ids=["pair", "list", "one", "dict", "nested", "constants", "dict in a pair", "lists in a list"])
def test_outputs_have_their_structure_in_each_call(outputs):
    class Model(torch.nn.Module):
        def forward(self, x):
            return outputs(x)

    model = Model()
    compiled = moe_mlir.compile(model, (torch.randn(3),))
    for _ in range(3):
        x = torch.randn(3)
        found, expected = compiled(x), model(x)
        assert type(found) is type(expected)
        torch.testing.assert_close(found, expected)


def test_a_model_that_holds_what_is_compiled_of_it_can_be_collected():
    model = Gated().eval()
    model.compiled = moe_mlir.compile(model, (torch.randn(3, 8),))
    for _ in range(3):
        model.compiled(torch.randn(3, 8))
    weights = weakref.ref(model.gate.weight)
    del model
    gc.collect()
    assert weights() is None


def test_an_error_of_the_code_is_raised_as_it_is(searches):
    class Picks(torch.nn.Module):
        def forward(self, table, index):
            return table[index]

    compiled = moe_mlir.compile(Picks(), (torch.randn(5, 2), torch.tensor([1, 2, 3])))
    table = torch.randn(5, 2)
    for _ in range(2):
        torch.testing.assert_close(compiled(table, torch.tensor([0, 1, 2])), table[:3])
        with pytest.raises(IndexError):
            compiled(table, torch.tensor([0, 9, 2]))
    assert len(searches) == 1
