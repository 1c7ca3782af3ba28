"""Equal layers are decomposed once: the program is the one that torch makes of all of them."""

import copy

import pytest
import torch

import moe_mlir
from moe_mlir.frontends.export import decompose
from moe_mlir.graph.locations import module_path
from moe_mlir.raising.fold_layers import fold_layers


class Layers(torch.nn.Module):
    def __init__(self, kind, count=4):
        super().__init__()
        self.layers = torch.nn.ModuleList(kind() for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return torch.tanh(x)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)


class Plain(Layer):
    def forward(self, x):
        n = x.shape[0]
        chosen = torch.zeros_like(x).scatter_(1, self.norm(x).topk(2, dim=-1)[1], 1.0)
        return x + self.linear(self.norm(x) * chosen).reshape(n * 2, 4).view(n, 8)


class WritesInput(Layer):
    def forward(self, x):
        return x.mul_(2.0) + self.linear(x)


class WritesReshaped(Layer):
    """reshape returns its argument here, without saying so."""

    def forward(self, x):
        x.reshape(x.shape).add_(1.0)
        return self.linear(x)


class Narrows(Layer):
    """The first result has the type of no input."""

    def forward(self, x):
        return self.linear(x)[:, :3].sum(dim=0), x + 1


class Collects(Layers):
    """Uses both results of its layers."""

    def forward(self, x):
        sums = []
        for layer in self.layers:
            sum, x = layer(x)
            sums.append(sum)
        return torch.stack(sums), x


def _program(model, x):
    return torch.export.export(model, (x,), dynamic_shapes=((torch.export.Dim.AUTO, torch.export.Dim.STATIC),))


def _folded(program):
    return [n for n in fold_layers(program).graph.nodes if "folded_layer" in str(n.target)]


def _calls(program):
    """Every call with its module and its arguments by place: names of nodes do not matter."""
    place = {node: i for i, node in enumerate(program.graph.nodes)}
    return [(str(node.target), module_path(node), str(node.meta["val"]),
             repr(torch.fx.node.map_arg((node.args, node.kwargs), lambda n: place[n])))
            for node in program.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("count", [2, 4])
def test_the_program_is_that_of_torch(count):
    program = _program(Layers(Plain, count), torch.randn(6, 8))
    assert len(_folded(program)) == count - 1
    table = torch.export.default_decompositions()
    for kept in (torch.ops.aten.linear.default, torch.ops.aten.matmul.default):
        table.pop(kept)
    expected = _calls(program.run_decompositions(table))
    assert _calls(decompose(program)) == [c for c in expected if "_assert" not in c[0]]
    assert any(f"layers.{count - 1}" in path for _, path, _, _ in expected)


def test_the_users_program_stays_as_it_was():
    program = _program(Layers(Plain), torch.randn(6, 8))
    before = str(program.graph)
    fold_layers(program)
    assert str(program.graph) == before


@pytest.mark.parametrize("model", [Layers(WritesInput), Layers(WritesReshaped), Collects(Narrows)])
def test_what_one_call_cannot_stand_for_is_not_folded(model):
    assert not _folded(_program(model, torch.randn(6, 8)))


@pytest.mark.parametrize("kind", [Plain, WritesInput, WritesReshaped])
def test_results_equal_eager(kind):
    torch.manual_seed(0)
    model = Layers(kind)
    compiled = moe_mlir.compile(model, (torch.randn(6, 8),))
    for n in (1, 5):
        x = torch.randn(n, 8)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x.clone()), model(x.clone()), rtol=1e-5, atol=1e-5)


class Counts(Layer):
    """Keeps rows in a state of its own, at a place that it counts."""

    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.zeros(16, 8))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x):
        places = torch.arange(x.shape[0]) + self.count
        self.count.add_(x.shape[0])
        self.rows.index_copy_(0, places, self.norm(x))
        return x + self.linear(self.rows)[:x.shape[0]] + self.rows.sum(0)


class Shifts(Counts):
    """Writes its state twice, and reads it before, in between and after."""

    def forward(self, x):
        first = self.rows[:3].sum(0)
        rolled = self.rows.roll(1, 0)
        self.rows.copy_(rolled)
        middle = self.rows.mean(0)
        self.rows.mul_(0.5)
        return x + self.linear(self.rows)[:x.shape[0]] + first - middle


class ReadsAView(Counts):
    """A view that was made before a write, and is read after it."""

    def forward(self, x):
        view = self.rows[:2]
        self.rows.add_(1.0)
        return x + self.linear(view).sum(0)


class WritesAView(Counts):
    def forward(self, x):
        self.rows[1].add_(x.sum(0))
        return x + self.linear(self.rows).sum(0)


class Returned(Layers):
    """The states are outputs, too."""

    def __init__(self):
        super().__init__(Counts)

    def forward(self, x):
        return super().forward(x), [layer.rows for layer in self.layers]


@pytest.mark.parametrize("model", [Layers(Counts), Layers(Shifts)])
def test_layers_that_update_states_are_folded(model):
    assert len(_folded(_program(model, torch.randn(6, 8)))) == 3


@pytest.mark.parametrize("model", [
    Layers(ReadsAView), Layers(WritesAView), Returned()])
def test_layers_whose_states_are_seen_as_they_were_are_not_folded(model):
    assert not _folded(_program(model, torch.randn(6, 8)))


@pytest.mark.parametrize("make", [
    lambda: Layers(Counts), lambda: Layers(Shifts), lambda: Layers(ReadsAView),
    lambda: Layers(WritesAView), Returned])
def test_states_are_those_of_eager(make):
    torch.manual_seed(0)
    model = make()
    other = copy.deepcopy(model)
    compiled = moe_mlir.compile(model, (torch.randn(6, 8),))
    for n in (2, 3, 1, 2):
        x = torch.randn(n, 8)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), other(x), rtol=1e-5, atol=1e-5)
        for (name, mine), (_, theirs) in zip(model.named_buffers(), other.named_buffers()):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
