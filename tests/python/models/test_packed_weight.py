"""Packed weights are the model's weights: read, written, tied, copied, trained as torch does it."""

import copy
import io
import pickle
import random

import pytest
import seeds
import torch

import moe_mlir
from moe_mlir.experts import packed_weight
from moe_mlir.nn import MoELayer, SMoE


class Linears(torch.nn.Module):
    """Square layers, whose panels a weight could be broadcast to."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 96)

    def forward(self, x):
        return self.second(self.first(x).tanh())

    @property
    def weight(self):
        return self.first.weight

    key = "first.weight"


class Experts(torch.nn.Module):
    """A layer of experts without what it returns beside its outputs."""

    def __init__(self):
        super().__init__()
        self.layer = MoELayer(SMoE(64, 4, 2), 64)

    def forward(self, x):
        return self.layer(x)[0]

    @property
    def weight(self):
        return self.layer.w_out

    key = "layer.w_out"


def pack(model):
    return moe_mlir.pack_linears(model) + moe_mlir.pack_experts(model)


def unpack(model):
    return moe_mlir.unpack_linears(model) + moe_mlir.unpack_experts(model)


def build(kind):
    torch.manual_seed(0)
    return kind()


KINDS = pytest.mark.parametrize("kind", [Linears, Experts])
X = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))


def same(model, eager):
    with torch.no_grad():
        torch.testing.assert_close(model(X), eager(X), rtol=1e-4, atol=1e-5)
    for name, weight in eager.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), name


def delta(model):
    return torch.randn(model.state_dict()[model.key].shape,
                       generator=torch.Generator().manual_seed(2))


def scale_view_of_state(model):
    model.state_dict()[model.key][1].mul_(2)


def average_into_state(model):
    for value in model.state_dict().values():
        value.mul_(0.9).add_(torch.ones_like(value), alpha=0.1)


def assign_element(model):
    model.weight[0] = 3.0


def add_to_data(model):
    model.weight.data += delta(model)


def write_into_data_of_a_view(model):
    model.weight.data.view(-1)[5:9].zero_()


def write_rows(model):
    for row in model.weight.detach():
        row.mul_(1.5)


def give_data(model):
    model.weight.data = delta(model)


def load(model):
    model.load_state_dict({n: w + 1 for n, w in copy.deepcopy(model.state_dict()).items()})


def assign(model):
    model.load_state_dict({n: w + 1 for n, w in copy.deepcopy(model.state_dict()).items()},
                          assign=True)


def step_foreach(model):
    torch._foreach_mul_(list(model.parameters()), 0.5)


def initialise(model):
    torch.manual_seed(3)
    torch.nn.init.kaiming_uniform_(model.weight)


def to_half_and_back(model):
    model.half()
    model.float()


CHANGES = [scale_view_of_state, average_into_state, assign_element, add_to_data,
           write_into_data_of_a_view, write_rows, give_data, load, assign, step_foreach, initialise,
           to_half_and_back,
           lambda model: model.weight.copy_(delta(model)),
           lambda model: model.weight.lerp_(delta(model), 0.25),
           lambda model: torch.add(model.weight, 1, out=model.weight.data)]


@KINDS
@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_what_is_written_arrives(kind, change):
    model, eager = build(kind), build(kind)
    assert pack(model) >= 1
    change(model)
    change(eager)
    same(model, eager)
    assert unpack(model) >= 1
    same(model, eager)


@torch.no_grad()
def test_another_parameter_takes_the_place_of_a_packed_one():
    model, eager = build(Linears), build(Linears)
    pack(model)
    for one in (model, eager):
        one.first.weight = torch.nn.Parameter(delta(one))
    same(model, eager)
    assert pack(model) == 1  # the new one
    same(model, eager)
    assert unpack(model) == 2 and type(model.first) is torch.nn.Linear
    same(model, eager)


@KINDS
def test_values_of_a_state_dict_stay_those_of_the_model(kind):
    model, eager = build(kind), build(kind)
    pack(model)
    states = model.state_dict(), eager.state_dict()
    for change in (scale_view_of_state, add_to_data, load):
        for one, state in zip((model, eager), states):
            change(one)
            state[one.key].add_(1)
        same(model, eager)
        assert torch.equal(states[0][model.key], states[1][model.key])
    unpack(model)
    for one, state in zip((model, eager), states):
        state[one.key].mul_(0.5)
        add_to_data(one)
    same(model, eager)
    assert torch.equal(states[0][model.key], states[1][model.key])
    with pytest.raises(ValueError, match="read-only"):
        pack(model)
        model.state_dict()[model.key].numpy()[...] = 0


@KINDS
def test_reading_is_reading_the_weight(kind):
    model, eager = build(kind), build(kind)
    pack(model)
    ours, theirs = model.weight, eager.weight.detach()
    for read in (lambda w: w + 1, lambda w: w.norm(), lambda w: w.clone(), lambda w: w[0],
                 lambda w: torch.stack([w, w]), lambda w: w.mT @ w, torch.zeros_like):
        with torch.no_grad():
            found = read(ours)
        assert type(found.clone()) is torch.Tensor and torch.equal(found, read(theirs))
    assert repr(eager.weight.data)[8:40] in repr(model.weight.data)
    assert len(ours) == len(theirs) and ours.tolist() == theirs.tolist()


@KINDS
def test_copies_and_files(kind):
    model, eager = build(kind), build(kind)
    pack(model)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = build(kind)
    loaded = torch.load(file, weights_only=True)
    assert all(type(w) is torch.Tensor for w in loaded.values())
    other.load_state_dict(loaded, assign=True)
    same(other, eager)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        add_to_data(other)
        same(model, eager)
        add_to_data(eager)
        same(other, eager)
        eager = build(kind)
        assert type(other.weight) is packed_weight.PackedWeight
        unpack(other)
        assert other.weight.requires_grad


def test_the_parameter_remains_the_same():
    """Optimizers and ties to modules that are not packed keep it."""
    model, eager = build(Linears), build(Linears)
    outside = []
    for one in (model, eager):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)
        embedding = torch.nn.Embedding(64, 64)
        embedding.weight = one.first.weight
        outside.append((optimizer, embedding))
    before = dict(model.named_parameters())
    pack(model)
    assert all(dict(model.named_parameters())[n] is w for n, w in before.items())
    ids = torch.arange(3)
    with torch.no_grad():
        assert torch.equal(outside[0][1](ids), outside[1][1](ids))
    unpack(model)
    for one, (optimizer, embedding) in zip((model, eager), outside):
        for _ in range(2):
            optimizer.zero_grad()
            (one(X).square().sum() + embedding(ids).sum()).backward()
            optimizer.step()
    same(model, eager)


def test_gradients_from_before_are_applied():
    model, eager = build(Linears), build(Linears)
    for one in (model, eager):
        optimizer = torch.optim.AdamW(one.parameters(), lr=0.1)
        one(X).square().sum().backward()
        if one is model:
            pack(one)
        optimizer.step()
    same(model, eager)


@KINDS
def test_a_model_with_gradients_from_before_is_compiled(kind):
    model, eager = build(kind), build(kind)
    for one in (model, eager):
        one(X).square().sum().backward()
    pack(model)
    compiled = moe_mlir.compile(model, (X,))
    same(compiled, eager)
    compiled.eval()  # another program
    same(compiled, eager.eval())
    unpack(model)
    for mine, other in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)


@pytest.mark.filterwarnings("ignore:.*other tensors have the memory")
def test_a_backward_of_a_forward_before_is_right():
    model, eager = build(Linears), build(Linears)
    for one in (model, eager):
        y = one(X).sum()
        if one is model:
            pack(one)  # but the layer whose weight is kept for the backward
        y.backward()
    assert torch.equal(model.second.weight.grad, eager.second.weight.grad)
    assert torch.equal(model.first.bias.grad, eager.first.bias.grad)


@pytest.mark.parametrize("hold", [
    lambda layer: torch.nn.Parameter(layer.weight.detach()),
    lambda layer: layer.state_dict(),
    lambda layer: layer.weight.data[3],
])
def test_memory_that_others_have_is_not_packed(hold):
    layer = torch.nn.Linear(64, 64)
    other = hold(layer)
    with pytest.warns(UserWarning, match="other tensors have the memory of its weights"):
        assert moe_mlir.pack_linears(layer) == 0
    del other
    assert moe_mlir.pack_linears(layer) == 1


@KINDS
def test_moving_averages(kind):
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    model, eager = build(kind), build(kind)
    pack(model)
    both = [AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.5)) for m in (model, eager)]
    for _ in range(2):
        for one, average in zip((model, eager), both):
            with torch.no_grad():
                add_to_data(one)
            average.update_parameters(one)
    same(both[0].module.eval(), both[1].module.eval())
    # Of a model that was packed since.
    later = AveragedModel(build(kind))
    later.update_parameters(model)
    same(later.module, eager)


class LowRank(torch.nn.Module):
    """What PEFT puts around a layer: beside it, or merged into its weight."""

    def __init__(self, layer):
        super().__init__()
        torch.manual_seed(4)
        self.base_layer = layer
        self.lora_A = torch.nn.Linear(layer.in_features, 8, bias=False)
        self.lora_B = torch.nn.Linear(8, layer.out_features, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x.to(self.lora_A.weight.dtype)))

    def merge(self, sign=1):
        self.base_layer.weight.data += sign * self.lora_B.weight @ self.lora_A.weight


@pytest.mark.filterwarnings("ignore:.*as many outputs as a panel has columns")
@pytest.mark.parametrize("first", [False, True])
def test_low_rank_adapters(first):
    model, eager = build(Linears), build(Linears)
    if first:
        pack(model)
    for one in (model, eager):
        one.first = LowRank(one.first)
    if not first:
        pack(model)
    optimizers = [torch.optim.SGD(m.first.lora_A.parameters(), lr=0.1) for m in (model, eager)]
    for one, optimizer in zip((model, eager), optimizers):
        one(X).square().sum().backward()
        optimizer.step()
    for sign in (1, -1):
        with torch.no_grad():
            torch.testing.assert_close(model(X), eager(X), rtol=1e-4, atol=1e-4)
            for one in (model, eager):
                one.first.merge(sign)
    torch.testing.assert_close(model.state_dict(), eager.state_dict())


class ParamWrapper(torch.nn.Module):
    """PEFT's, which parametrizes a weight while the layer runs."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer


def test_experts_that_an_adapter_parametrizes_stay_as_they_are():
    model = ParamWrapper(build(Experts))
    with pytest.warns(UserWarning, match="an adapter of PEFT adds to its weights in each call"):
        assert moe_mlir.pack_experts(model) == 0


@KINDS
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("after", [0, 1])
def test_an_exception_in_the_middle(kind, error, after, monkeypatch):
    model, eager = build(kind), build(kind)
    real, calls = packed_weight.pack_weight, []

    def interrupted(*args, **kwargs):
        calls.append(None)
        if len(calls) > after:
            raise error
        return real(*args, **kwargs)

    monkeypatch.setattr(packed_weight, "pack_weight", interrupted)
    with pytest.raises(error):
        pack(model)
    monkeypatch.undo()
    for name, weight in eager.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight)
    other = copy.deepcopy(model)
    assert pack(model) >= 1
    same(model, eager)
    assert unpack(model) >= 1
    same(model, eager)
    unpack(other)
    same(other, eager)
    assert all(type(w) is torch.nn.Parameter and w.requires_grad for w in other.parameters())


def test_an_exception_between_the_steps_of_a_swap(monkeypatch):
    """Ctrl-C may come between any two of them."""
    layer, eager = torch.nn.Linear(64, 64), None
    eager = copy.deepcopy(layer)

    def interrupted(*_):
        raise KeyboardInterrupt
    monkeypatch.setattr(torch.nn.Parameter, "requires_grad_", interrupted, raising=False)
    with pytest.raises(KeyboardInterrupt):
        moe_mlir.pack_linears(layer)
    monkeypatch.undo()
    assert torch.equal(layer(X), eager(X))
    assert moe_mlir.pack_linears(layer) + moe_mlir.unpack_linears(layer) >= 1
    assert torch.equal(layer.weight, eager.weight) and type(layer) is torch.nn.Linear


def copied(model):
    return copy.deepcopy(model)


def pickled(model):
    return pickle.loads(pickle.dumps(model))


@KINDS
@pytest.mark.filterwarnings("ignore:.*other tensors have the memory")
@pytest.mark.parametrize("steps", [60, pytest.param(5000, marks=pytest.mark.long)])
@torch.no_grad()
def test_random_sequences_of_changes(kind, steps):
    model, eager = build(kind), build(kind)
    generator = random.Random(seeds.run_seed())
    done = []
    for _ in range(steps):
        change = generator.choice([*CHANGES, pack, unpack, copied, pickled])
        done.append(change.__name__)
        if change in (copied, pickled):
            model, eager = change(model), change(eager)
        elif change in (pack, unpack):
            change(model)
        else:
            change(model)
            change(eager)
        for one in (model, eager):  # stays in the range of float32, and of float16
            torch._foreach_clamp_max_(list(one.parameters()), 1.0)
            torch._foreach_clamp_min_(list(one.parameters()), -1.0)
        try:
            same(model, eager)
        except AssertionError as error:
            raise AssertionError(f"after {done[-8:]}: {error}") from error
