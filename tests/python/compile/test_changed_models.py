"""moe_mlir.compile of a model that changes in what is no weight: attributes, modules, hooks."""

import copy
import pickle
import types

import pytest
import torch

import moe_mlir
from moe_mlir.guards.model_form import same_constant


class Settings:
    """A configuration, as transformers has them."""


class SettingsConfig(Settings):
    def __init__(self):
        self.power, self.inner = 2, types.SimpleNamespace(shift=0.5)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(6, 6)
        self.act = torch.nn.Tanh()
        self.scale, self.flag, self.count = 2.0, False, 3
        self.mode, self.sizes, self.names = "add", [1, 2], {"a": 1.0}
        self.config = SettingsConfig()
        self.function = torch.sin
        self.register_buffer("shift", None)

    def forward(self, x):
        y = self.act(self.first(x)) * self.scale * self.count
        y = -y if self.flag else y
        y = y + 1 if self.mode == "add" else y * 3
        y = self.function(y) ** self.config.power + self.config.inner.shift
        y = y if self.shift is None else y + self.shift
        return y * sum(self.sizes) * self.names["a"]


class Other(Net):
    def forward(self, x):
        return super().forward(x) + 7


def other_dict(net):
    """What Module.__setstate__ does, for one."""
    net.first.__dict__.update(copy.deepcopy(vars(torch.nn.Linear(6, 6))))


def set_state(net):
    net.first.__setstate__(torch.nn.Linear(6, 6).__getstate__())


def replace_dictionaries(net):
    net.first.__dict__ = vars(torch.nn.Linear(6, 6))


CHANGES = {
    "a float": lambda net: setattr(net, "scale", 3.0),
    "a sign": lambda net: setattr(net, "scale", -2.0),
    "an int": lambda net: setattr(net, "count", 4),
    "a flag": lambda net: setattr(net, "flag", True),
    "a text": lambda net: setattr(net, "mode", "multiply"),
    "an item of a list": lambda net: net.sizes.append(5),
    "an item of a dictionary": lambda net: net.names.update(a=2.0),
    "a configuration": lambda net: setattr(net.config, "power", 3),
    "a part of a configuration": lambda net: setattr(net.config.inner, "shift", 1.5),
    "another configuration": lambda net: setattr(
        net, "config", types.SimpleNamespace(power=1, inner=net.config.inner)),
    "a function": lambda net: setattr(net, "function", torch.cos),
    "an activation": lambda net: setattr(net, "act", torch.nn.Sigmoid()),
    "a class": lambda net: setattr(net, "__class__", Other),
    "a forward": lambda net: setattr(net.act, "forward", torch.relu),
    "a buffer that was None": lambda net: setattr(net, "shift", torch.ones(6)),
    "a bias that is None": lambda net: setattr(net.first, "bias", None),
    "a hook": lambda net: net.act.register_forward_hook(lambda module, args, y: y * 2),
    "a hook before": lambda net: net.first.register_forward_pre_hook(lambda m, args: (args[0] + 1,)),
    "the dictionary of a module": other_dict,
    "the state of a module": set_state,
    "the dictionaries themselves": replace_dictionaries,
    "a subclass of a layer": lambda net: setattr(net, "first", Doubled(net.first)),
}


class Doubled(torch.nn.Linear):
    def __init__(self, layer):
        super().__init__(6, 6)
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x):
        return 2 * super().forward(x)


@pytest.fixture(scope="module")
def compiled_net():
    torch.manual_seed(0)
    return moe_mlir.compile(Net().eval(), (torch.randn(2, 6),))


@pytest.mark.drawn(8)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_noticed(compiled_net, change):
    compiled, x = copy.deepcopy(compiled_net), torch.randn(5, 6)
    with torch.no_grad():
        for _ in range(2):
            before = compiled(x)
        torch.testing.assert_close(before, compiled.model(x))
        change(compiled.model)
        for inputs in (x, torch.randn(3, 6)):
            torch.testing.assert_close(compiled(inputs), compiled.model(inputs), rtol=1e-4,
                                       atol=1e-4)
        assert not torch.allclose(compiled(x), before)


@pytest.mark.drawn(8)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_copy_of_a_changed_model_is_as_it_was_changed(compiled_net, change):
    compiled, x = copy.deepcopy(compiled_net), torch.randn(5, 6)
    change(compiled.model)
    other = copy.deepcopy(compiled)
    with torch.no_grad():
        torch.testing.assert_close(other(x), compiled.model(x), rtol=1e-4, atol=1e-4)


def test_what_is_set_back_needs_no_other_program(compiled_net, searches):
    compiled, x = copy.deepcopy(compiled_net), torch.randn(5, 6)
    compiled(x)
    model = compiled.model
    for scale, count in ((2.5, 2), (2.0, 2), (float("2.5"), 2)):
        model.scale = scale
        compiled(x)
        assert len(compiled._programs) == count
    hook = model.act.register_forward_hook(lambda module, args, y: y * 2)
    compiled(x)
    hook.remove()
    compiled(x)
    assert len(compiled._programs) == 3
    # Copies know no calls, but need no other program either.
    for other in (copy.deepcopy(compiled_net), pickle.loads(pickle.dumps(compiled_net))):
        torch.testing.assert_close(other(x), other.model(x))
        assert len(other._programs) == 1
    searches.clear()
    compiled(x)
    assert not searches  # a known call


def test_a_module_that_cannot_be_traced_again_says_what_changed():
    net, x = Net().eval(), torch.randn(5, 6)
    compiled = moe_mlir.compile(moe_mlir.export(net, (x,)))
    compiled(x)
    net.scale = 3.0
    with pytest.raises(ValueError, match=r"as it was exported, found .*scale = 3.0 instead of 2.0; "
                                         "export it again"):
        compiled(x)


def test_a_negative_zero_is_another_number():
    class Divide(torch.nn.Module):
        def forward(self, x, y):
            return x / torch.tensor(y).to(x.dtype)

    x = torch.ones(3)
    compiled = moe_mlir.compile(Divide(), (x,), kwargs=dict(y=0.0))
    assert compiled(x, y=0.0)[0] == float("inf")
    with pytest.raises(ValueError, match="expected 0.0, the value at export, found -0.0"):
        compiled(x, y=-0.0)
    by_position = moe_mlir.compile(Choose(), (x,))
    for _ in range(2):
        for y in (0.0, -0.0):
            torch.testing.assert_close(by_position(x, y), Choose()(x, y))


class Choose(torch.nn.Module):
    def forward(self, x, y=1.0):
        return x / torch.full_like(x, y)


@pytest.mark.parametrize(("old", "new", "same"), [
    (1, 1, True), (1, True, False), (0.0, -0.0, False), (float("nan"), float("nan"), True),
    (complex(0, 0.0), complex(0, -0.0), False), ((1, 0.0), (1, -0.0), False), ("a", "a", True),
    (None, 0, False), ((1, 2.0), (1, 2.0), True), (1.5, 1.5, True), ({1}, {1}, True),
])
def test_same_constant(old, new, same):
    assert same_constant(old, new) is same


def test_torch_compile_of_the_model_changes_nothing():
    """torch.compile writes a mark of its own into the module that it wraps."""
    net, x = Net().eval(), torch.randn(5, 6)
    whole = moe_mlir.compile(net, (x,))
    from_module = moe_mlir.compile(moe_mlir.export(net, (x,)))
    torch.compile(net, backend="eager")(x)
    net._compile_kwargs = {}  # so it does where Lightning is imported
    for compiled in (whole, from_module):
        torch.testing.assert_close(compiled(x), net(x), rtol=1e-4, atol=1e-4)
        assert len(compiled._programs) == 1
