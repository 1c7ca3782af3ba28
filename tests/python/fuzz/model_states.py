"""Random histories of compiled models: each change is made to a twin, too, which runs eagerly.

    python tests/python/fuzz/model_states.py SEED STEPS

A step is a call or a change: of weights, buffers, modules, hooks, attributes, dtypes, the packing,
or a copy of the whole. After each call the values, the buffers and the inputs must be eager's.
Where eager refuses a call, compiled code must; where only compiled code refuses one, it must be for
a reason of `LIMITS`. Every few hundred steps a new model begins. Prints the numbers of steps, calls
and refusals, and ends with status 1 at the first difference, after the last steps.
"""

import collections
import copy
import pickle
import random
import re
import sys
import warnings

import torch
from torch.nn.utils import parametrize

import moe_mlir
from moe_mlir.nn import MoELayer, SMoE

_WIDTH = 64  # of a panel at least, so that layers can be packed
_STEPS_OF_A_MODEL = 800
_REFUSALS = (TypeError, ValueError, RuntimeError, IndexError, ArithmeticError)
# What compiled code refuses and eager does not; docs/Limits.md, and the texts of compile.
LIMITS = {
    "strides of a weight": r"to be contiguous, found strides",
    "shared memory": r"in memory of its own, found it shared",
    "no rows": r"expected .* (>=|!=|>) \d",
    "another number of dims": r"expected \d+ dims",
    "another width of an input": r"expected shape .* = \[(?:.*, )?(\d+)\], found "
                                 r"\[(?:.*, )?(?!\1\])\d+\]",
    "a number for a tensor": r"expected a tensor, found int",
    "a sparse input": r"expected a dense tensor",
    "float64 in a packed layer": r"float32 or bfloat16 or float16, found float64",
}


class Running(torch.nn.Module):
    """Statistics that a forward in training updates in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(_WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        if self.training:
            self.mean.mul_(0.9).add_(x.sum(0), alpha=0.01)
            self.calls.add_(1)
        return x - self.mean


class Settings:
    """A plain object as configurations are."""

    def __init__(self):
        self.gain, self.active = 1.0, True


class SettingsConfig(Settings):
    pass


class Net(torch.nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.first, self.second = torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.Linear(_WIDTH, _WIDTH)
        self.act, self.running = torch.nn.Tanh(), Running()
        self.experts = MoELayer(SMoE(_WIDTH, 4, 2), 32) if experts else None
        self.register_buffer("shift", torch.zeros(_WIDTH))
        self.plain = torch.ones(_WIDTH)
        self.scale, self.kind, self.sizes = 1.0, "sum", [1, 2]
        self.options, self.config = {"clip": 2.0}, SettingsConfig()

    def forward(self, x, extra=None, twice=False):
        x = self.running(self.first(x))
        if self.experts is not None:
            x = x + self.experts(x)[0]
        x = self.second(self.act(x)) * self.scale * self.config.gain
        if extra is not None:
            x = x + extra
        if twice:
            x = x * 2
        if self.kind == "sum":
            x = x + self.sizes[0]
        if self.shift is not None:
            x = x + self.shift
        return x.clamp(-self.options["clip"], self.options["clip"]) * self.plain


class OtherNet(Net):
    def forward(self, x, extra=None, twice=False):
        return super().forward(x, extra, twice) + 1


class Half(torch.nn.Module):
    """A parametrization."""

    def forward(self, weight):
        return weight / 2


def double_output(_, __, output):
    return output * 2


def shift_input(_, inputs):
    return (inputs[0] + 0.5,)


def refuse(*_):
    raise ArithmeticError("a hook that refuses the call")


def _tensor(draw, like, scale=0.2, shape=None):
    generator = torch.Generator().manual_seed(draw.randrange(2 ** 31))
    return (torch.randn(like.shape if shape is None else shape, generator=generator) * scale).to(
        like.dtype)


def _matrix(draw, weight):
    """A weight of a layer; the shape of a packed one is that of its panels."""
    return _tensor(draw, weight, shape=(_WIDTH, _WIDTH))


def _layer(model, draw):
    return draw.choice([model.first, model.second])


def _train(model, draw, optimizer):
    optimizer = optimizer(model.parameters(), lr=0.01)
    x = torch.randn(3, _WIDTH, generator=torch.Generator().manual_seed(draw.randrange(2 ** 31)))
    with torch.enable_grad():
        model(x.to(model.first.bias.dtype)).square().mean().backward()
    optimizer.step()
    if draw.random() < 0.5:
        model.zero_grad()


def step_sgd(model, draw):
    _train(model, draw, torch.optim.SGD)


def step_adamw(model, draw):
    _train(model, draw, torch.optim.AdamW)


def give_data(model, draw):
    weight = _layer(model, draw).weight
    weight.data = _matrix(draw, weight)


def give_strided_data(model, draw):
    weight = _layer(model, draw).weight
    weight.data = _matrix(draw, weight).t()


def copy_into(model, draw):
    weight = _layer(model, draw).weight
    weight.copy_(_matrix(draw, weight))


def scale_rows(model, draw):
    _layer(model, draw).weight[draw.randrange(8)] *= draw.choice([0.5, -1.0])


def write_buffer(model, draw):
    model.running.mean.copy_(_tensor(draw, model.running.mean))


def write_plain(model, draw):
    model.plain.mul_(draw.choice([0.5, 1.5, -1.0])).clamp_(-2, 2)


def _other_state(model, draw):
    return {name: value if not value.is_floating_point() else _tensor(draw, value)
            for name, value in copy.deepcopy(model.state_dict()).items()}


def load(model, draw):
    model.load_state_dict(_other_state(model, draw))


def assign(model, draw):
    model.load_state_dict(_other_state(model, draw), assign=True)


def average(model, draw):
    torch._foreach_mul_(list(model.parameters()), draw.choice([0.9, 0.5]))


def add_rows_of_state(model, draw):
    model.state_dict()["second.weight"][2].add_(0.1)


def replace_parameter(model, draw):
    layer = _layer(model, draw)
    layer.bias = torch.nn.Parameter(_tensor(draw, layer.bias))


def replace_buffer(model, draw):
    model.shift = _tensor(draw, model.running.mean)


def replace_plain(model, draw):
    model.plain = _tensor(draw, model.plain, 1.0)


CHEAP = [step_sgd, step_adamw, give_data, copy_into, scale_rows, write_buffer, write_plain, load,
         assign, average, add_rows_of_state, replace_parameter, replace_buffer, replace_plain]


def tie(model, draw):
    model.second.weight = model.first.weight


def untie(model, draw):
    model.second.weight = torch.nn.Parameter(model.second.weight.detach().clone())


def replace_layer(model, draw):
    name = draw.choice(["first", "second"])
    layer = torch.nn.Linear(_WIDTH, _WIDTH, dtype=getattr(model, name).bias.dtype)
    with torch.no_grad():
        layer.weight.copy_(_tensor(draw, layer.weight))
        layer.bias.zero_()
    setattr(model, name, layer)


def replace_activation(model, draw):
    model.act = draw.choice([torch.nn.Tanh, torch.nn.ReLU, torch.nn.Identity])()


def share_layer(model, draw):
    model.second = model.first


def add_hook(model, draw):
    module = draw.choice([model, model.act, model.second])
    if draw.random() < 0.7:
        module.register_forward_hook(double_output)
    else:
        model.act.register_forward_pre_hook(shift_input)


def remove_hooks(model, draw):
    for module in model.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()


def train(model, draw):
    model.train()


def evaluate(model, draw):
    model.eval()


def train_a_part(model, draw):
    model.running.train(draw.random() < 0.5)


def require_gradients(model, draw):
    model.requires_grad_(draw.random() < 0.5)


def set_attribute(model, draw):
    name, values = draw.choice([("scale", [0.5, 1.0, 2]), ("kind", ["sum", "none"])])
    setattr(model, name, draw.choice(values))


def set_inside(model, draw):
    match draw.randrange(4):
        case 0:
            model.options["clip"] = draw.choice([1.0, 2.0])
        case 1:
            model.sizes[0] = draw.choice([1, 3])
        case 2:
            model.config.gain = draw.choice([1.0, 0.5])
        case _:
            model.sizes = [model.sizes[0], draw.choice([2, 4])]


def update_dict(model, draw):
    model.__dict__.update(scale=draw.choice([0.5, 1.0]), kind=draw.choice(["sum", "none"]))


def swap_dict(model, draw):
    module = draw.choice([model, model.first, model.running])
    module.__dict__ = dict(module.__dict__)


def swap_parameters(model, draw):
    layer = _layer(model, draw)
    layer._parameters = {name: torch.nn.Parameter(_tensor(draw, value)) if name == "bias" else value
                         for name, value in layer._parameters.items()}


def swap_modules(model, draw):
    model._modules = dict(model._modules)


def exchange_layers(model, draw):
    model.first, model.second = model.second, model.first


def drop_buffer(model, draw):
    model.shift = None


def drop_bias(model, draw):
    _layer(model, draw).bias = None


def give_bias(model, draw):
    for layer in (model.first, model.second):
        if layer.bias is None:
            layer.bias = torch.nn.Parameter(torch.zeros_like(layer.weight[0]))


def change_class(model, draw):
    model.__class__ = draw.choice([Net, OtherNet])


def parametrize_layer(model, draw):
    layer = _layer(model, draw)
    if not parametrize.is_parametrized(layer):
        parametrize.register_parametrization(layer, "weight", Half())


def remove_parametrizations(model, draw):
    for layer in (model.first, model.second):
        if parametrize.is_parametrized(layer):
            parametrize.remove_parametrizations(layer, "weight")


def to_double(model, draw):
    model.double()
    model.plain = model.plain.double()


def to_float(model, draw):
    model.float()
    model.plain = model.plain.float()


RETRACED = [tie, untie, replace_layer, replace_activation, share_layer, add_hook, remove_hooks, remove_hooks, train, evaluate, evaluate, train_a_part, require_gradients,
            set_attribute, set_inside, update_dict, swap_dict, swap_parameters, swap_modules,
            exchange_layers, drop_buffer, drop_bias, give_bias, give_bias, change_class,
            parametrize_layer, remove_parametrizations, remove_parametrizations, to_double,
            to_float, to_float, give_strided_data]


def pack(model):
    moe_mlir.pack_linears(model)
    moe_mlir.pack_experts(model)


def unpack(model):
    moe_mlir.unpack_linears(model)
    moe_mlir.unpack_experts(model)


def pickled(value):
    return pickle.loads(pickle.dumps(value))


COPIES = [copy.deepcopy, pickled]


def draw_call(model, draw, variety):
    """(args, kwargs) for a forward, mostly ones that it takes."""
    dtype = next(model.parameters()).dtype
    rows = draw.choice([1, 2, 3, 3, 3, 5, 17]) if draw.random() < 1 - 0.05 * variety else 0
    generator = torch.Generator().manual_seed(draw.randrange(2 ** 31))
    x = torch.randn(rows, _WIDTH, generator=generator).to(dtype)
    kwargs = {}
    kind = draw.random() / variety
    if kind < 0.03:
        x = draw.choice([x[:, :32], x.long(), x.half(), x.sum(), x.to("meta"), None, [x], 3,
                         x.to_sparse(), x.sum(0)])
    elif kind < 0.2 and draw.random() < 0.5 or draw.random() < 0.05:
        x = draw.choice([x.t().contiguous().t(), x.sum(0).expand(3, -1), x.clone().requires_grad_(),
                         torch.stack([x, x], 1)[:, 0], torch._neg_view(x), x.flip(0)])
    elif kind < 0.26:
        kwargs["extra"] = draw.choice([x, x[:1], x + 1, x.sum(0), None, x[:, :1]])
    elif kind < 0.3:
        kwargs["twice"] = draw.choice([True, False])
    elif kind < 0.31:
        kwargs[draw.choice(["other", "x", "extra"])] = draw.choice([1, x])
    if draw.random() < 0.1 * variety and "x" not in kwargs:
        return (), {"x": x, **kwargs}
    return (x,), kwargs


def outcome(function, call):
    args, kwargs = call
    try:
        with torch.no_grad():
            return function(*args, **kwargs), None
    except _REFUSALS as error:
        return None, error


class Difference(Exception):
    pass


class Pair:
    """A compiled model, its twin, and what was done to them."""

    def __init__(self, draw, counts):
        self.draw, self.counts, self.done = draw, counts, []
        # Each trace takes a second. Most models see few: their calls are what is remembered.
        self.variety = draw.choice([1, 0.05, 0.05, 0.05, 0.05])
        torch.manual_seed(draw.randrange(2 ** 31))
        model = Net(experts=draw.random() < 0.3).eval()
        self.twin = copy.deepcopy(model)
        self.compiled = moe_mlir.compile(model, (torch.randn(3, _WIDTH),))

    def step(self):
        if self.draw.random() < 0.02 * self.variety:
            self.draw.choice([self.rebuild] * 7 + [self.call_refused_within, self.pack, self.copy])()
        elif self.draw.random() < 0.6:
            self.call()
        else:
            self.change(self.draw.choice(CHEAP))

    def rebuild(self):
        self.change(self.draw.choice(RETRACED))

    def change(self, change):
        self.done.append(change.__name__)
        packed = any(type(p) is not torch.nn.Parameter for p in self.compiled.model.parameters())
        if packed and change in (step_sgd, step_adamw, parametrize_layer):
            return  # packed weights have no gradient, and the shape of their panels
        seed, errors = self.draw.randrange(2 ** 31), []
        for model in (self.compiled.model, self.twin):
            try:
                with torch.no_grad():
                    change(model, random.Random(seed))
                    for parameter in model.parameters():
                        parameter.clamp_(-1, 1)
                errors.append(None)
            except (*_REFUSALS, AttributeError, KeyError) as error:
                errors.append(error)
        if type(errors[0]) is not type(errors[1]):
            raise Difference(f"the model {errors[0]!r}, the twin {errors[1]!r}")

    def pack(self):
        change = self.draw.choice([pack, unpack, unpack])
        self.done.append(change.__name__)
        change(self.compiled.model)

    def copy(self):
        make = self.draw.choice(COPIES)
        self.done.append(make.__name__)
        try:
            twin = make(self.twin)
        except RuntimeError:
            return  # torch does not pickle parametrized modules
        self.twin, self.compiled = twin, make(self.compiled)

    def call(self):
        call = draw_call(self.twin, self.draw, self.variety)
        others = copy.deepcopy(call) if self.draw.random() < 0.2 else call
        self.done.append(f"call{[tuple(x.shape) if isinstance(x, torch.Tensor) else x for x in call[0]]}"
                         f"{list(call[1])}")
        self.counts["calls"] += 1
        wanted, refusal = outcome(self.twin, call)
        found, error = outcome(self.compiled, others)
        if refusal is not None:
            self.counts["refused by both"] += 1
            if error is None:
                raise Difference(f"eager refuses: {refusal!r}")
            if type(error) is not type(refusal):
                self.counts[f"eager's {type(refusal).__name__} as {type(error).__name__}"] += 1
            self.follow()
        elif error is not None:
            limit = next((n for n, text in LIMITS.items() if re.search(text, str(error))), None)
            if limit is None:
                raise Difference(f"only compiled code refuses: {error!r}") from error
            self.counts[f"limit: {limit}"] += 1
            self.follow()
        else:
            same(found, wanted, "result")
            self.compare_states()

    def call_refused_within(self):
        """A call that ends behind the first layers, where buffers have been updated already."""
        self.done.append("a refusing hook")
        hooks = [model.act.register_forward_pre_hook(refuse)
                 for model in (self.compiled.model, self.twin)]
        self.call()
        for hook in hooks:
            hook.remove()

    def follow(self):
        """Gives the twin the buffers; eager may have updated them before it refused a call."""
        ours = self.compiled.model
        with torch.no_grad():
            for (_, mine), (_, other) in zip(ours.named_buffers(), self.twin.named_buffers(),
                                             strict=True):
                other.copy_(mine)

    def compare_states(self):
        for (name, mine), (_, other) in zip(self.compiled.model.named_buffers(),
                                            self.twin.named_buffers(), strict=True):
            same(mine, other, name)
        self.follow()  # so that rounding in one dtype is not told of in another


def same(found, wanted, name):
    tolerance = 1e-9 if wanted.dtype == torch.float64 else 2e-4
    torch.testing.assert_close(found, wanted.detach(), rtol=tolerance, atol=tolerance,
                               msg=lambda text: f"{name}: {text}")


def main():
    seed, steps = map(int, sys.argv[1:])
    warnings.simplefilter("ignore")
    counts, draw = collections.Counter(), random.Random(seed)
    for step in range(steps):
        if step % _STEPS_OF_A_MODEL == 0:
            pair = Pair(draw, counts)
            print(f"step {step}: {dict(counts)}", file=sys.stderr, flush=True)
        try:
            pair.step()
        except (Difference, AssertionError) as error:
            print(f"seed {seed}, step {step}, after {pair.done[-30:]}:\n{error}", file=sys.stderr)
            raise
    print(f"{steps} steps, {counts.pop('calls')} calls, {dict(counts)}")


if __name__ == "__main__":
    main()
