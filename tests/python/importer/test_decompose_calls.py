"""Programs decomposed call by call compute what eager computes, and are those that torch makes."""

import copy

import pytest
import torch
from support import Function
from torch.export.graph_signature import OutputKind

import moe_mlir
from moe_mlir.frontends.export import decompose
from moe_mlir.raising.decompose_calls import NeedsTrace, decompose_calls

F = torch.nn.functional
KEPT = frozenset({torch.ops.aten.linear.default, torch.ops.aten.matmul.default})


def part(x, y):
    buffer = x.new_empty(x.shape[0], 8)
    buffer[:, :3] = y
    buffer[:, 3:] = 2.0
    buffer[0].add_(1.0)
    return buffer + x.sum()


def weights_in_place(x, y):
    values, chosen = x.topk(2)
    values /= values.sum(-1, keepdim=True)
    return values, chosen


def several_in_place(x, y):
    z = x.clone()
    other = z.detach_().to(torch.float32)
    z.mul_(2.0).add_(1.0)
    return other + z, z


def converted_before_a_write(x, y):
    z = x * 2
    double = z.double()
    z += 1
    return double.float() - z


def updates(x, y):
    y.mul_(2.0)
    part = y[1:]
    y[0] = x[0, :3]
    return part.sum(), y


def sizes(x, y):
    rows = x.repeat(2, 1).reshape(x.shape[0] * 2, 4, 2)
    return F.pad(rows, (1, 1)).flatten(1)[: x.shape[0] + 1]


def composites(x, y):
    x = F.dropout(F.layer_norm(x, (8,)).to(torch.float32).contiguous(), training=False)
    return F.gelu(x), F.softmax(x, -1).type_as(x), x.chunk(2, -1), F.one_hot(x.argmax(-1), 8)


def attention(x, y):
    heads = x.view(1, x.shape[0], 2, 4).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


def itself(x, y):
    return y, x.to(torch.float32), x


def other_orders_of_dims(x, y):
    buffer = torch.zeros(4, 3) + y.sum()
    buffer.view(-1)[2:7].mul_(2.0)
    buffer.t()[1].add_(x[0, :4])
    buffer.transpose(0, 1)[:, 2:].neg_()
    buffer.unsqueeze(0).select(1, 3).copy_(y[:1])
    buffer.view(2, 6)[1, 2:5] = 7.0
    return buffer


CALL_BY_CALL = [part, other_orders_of_dims, weights_in_place, several_in_place, converted_before_a_write, sizes, composites,
                attention, itself]


def inputs():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, 8, generator=generator), torch.randn(6, 3, generator=generator)


def program_of(function):
    open_rows = {0: torch.export.Dim.AUTO}
    return torch.export.export(Function(function), inputs(), dynamic_shapes=((open_rows, open_rows),))


def table():
    found = torch.export.default_decompositions()
    for kept in KEPT:
        found.pop(kept)
    return found


def require_equal(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("function", CALL_BY_CALL, ids=lambda f: f.__name__)
def test_programs_compute_what_torchs_compute(function):
    """The same bits, at the example's sizes and at others, in the same operators."""
    program = program_of(function)
    found = decompose_calls(program, dict(table().items()), KEPT)
    expected = program.run_decompositions(table())
    for rows in (6, 9):
        given = [x[:1].repeat(rows, 1) * torch.arange(1, rows + 1)[:, None] for x in inputs()]
        require_equal(found.module()(*map(torch.clone, given)), expected.module()(*map(torch.clone, given)))
    ops = [{str(n.target) for n in p.graph.nodes if "aten" in str(n.target)} for p in (found, expected)]
    assert ops[0] <= ops[1] | {"aten.sym_size.int"}


def test_updates_are_results():
    program = decompose_calls(program_of(lambda x, y: y.mul_(2.0) + x[:, :3]), dict(table().items()), KEPT)
    (update, result) = program.graph_signature.output_specs
    assert update.kind is OutputKind.USER_INPUT_MUTATION and update.target == "args_1"
    assert result.kind is OutputKind.USER_OUTPUT
    x, y = inputs()
    expected = y * 2
    require_equal(program.module()(x, y), expected + x[:, :3])
    require_equal(y, expected)


class Counts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x):
        self.count.add_(x.sum(0))
        self.count[1] = 7.0
        return x * self.count


def test_updates_of_buffers_are_results():
    model, x = Counts(), inputs()[1]
    program = decompose_calls(torch.export.export(copy.deepcopy(model), (x,)), dict(table().items()), KEPT)
    assert [*program.graph_signature.buffers_to_mutate.values()] == ["count"]
    module = program.module()
    for _ in range(2):
        require_equal(module(x), model(x))
    require_equal(dict(module.named_buffers())["count"], model.count)


class Named(torch.nn.Module):
    """Inputs with names of builtins, which a copy of a graph would rename."""

    def forward(self, input, len):
        input.add_(len)
        return torch.nn.functional.silu(input)


def test_inputs_keep_their_names():
    """torch's `module()` of such a program fails where it writes: its own copy renames them."""
    x, _ = inputs()
    traced = torch.export.export(Named(), (x.clone(), x))
    program = decompose_calls(traced, dict(table().items()), KEPT)
    assert [*program.graph_signature.user_inputs] == ["input", "len"]
    assert [*program.graph_signature.user_inputs_to_mutate.values()] == ["input"]
    given = x.clone()
    compiled = moe_mlir.compile(Named(), (x.clone(), x))
    torch.testing.assert_close(compiled(input=given, len=x), torch.nn.functional.silu(x + x))
    require_equal(given, x + x)


class Several(torch.nn.Module):
    """Updates through views, one of them with what another became: torch's decomposition fails."""

    def __init__(self):
        super().__init__()
        self.register_buffer("p", torch.arange(48.0).view(6, 8))
        self.register_buffer("q", torch.zeros(6, 8))

    def forward(self, x):
        self.p.view(-1)[:7].zero_()
        self.q.copy_(self.p)
        self.p.copy_(torch.cat([x[:2], self.q[2:]]))
        return x * 2


def test_updates_of_several_buffers_through_views():
    model, (x, _) = Several(), inputs()
    compiled = moe_mlir.compile(copy.deepcopy(model), (x,))
    for _ in range(2):
        require_equal(compiled(x), model(x))
    for name, buffer in model.named_buffers():
        require_equal(compiled.model.get_buffer(name), buffer)


def through_a_view(x, y):
    z = x.clone()
    z.view(-1)[0] = 5.0
    return z


def seen_by_a_view(x, y):
    z = x.clone()
    row = z[1]
    z.add_(1.0)
    return z + row




class Regions(torch.nn.Module):
    """Each kind of region in the other, updates in one, and one that returns its input."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        with torch.no_grad():
            a = self.layer(x).relu()
            self.count += 1
            with torch.enable_grad():
                b = self.layer(a) * self.count
        with torch.enable_grad():
            values, ids = b.topk(2)
            same = x
        return a, b.detach(), values, ids, same


@pytest.mark.parametrize("gradients", [False, True])
def test_regions_of_gradients_are_written_in_their_place(gradients):
    torch.manual_seed(0)
    eager = Regions().eval()
    with torch.set_grad_enabled(gradients):
        program = torch.export.export(eager, (torch.randn(3, 8),))
    before = str(program.graph)
    found = decompose_calls(program, dict(table().items()), KEPT)
    assert not any(node.op == "get_attr" for node in found.graph.nodes)
    assert str(program.graph) == before and "wrap_with_set_grad_enabled" in before
    model = copy.deepcopy(eager)
    compiled = moe_mlir.compile(model, (torch.randn(3, 8),))
    for count in (3, 5):
        x = torch.randn(count, 8)
        torch.testing.assert_close(compiled(x), eager(x))
        assert model.count == eager.count


@pytest.mark.parametrize("function", [through_a_view, seen_by_a_view, updates])
def test_what_views_show_is_traced(function):
    program = program_of(function)
    with pytest.raises(NeedsTrace, match="views show"):
        decompose_calls(program, dict(table().items()), KEPT)
    given, other = inputs(), inputs()
    require_equal(decompose(program).module()(*given), function(*other))
    require_equal(given, other)


def test_equal_calls_are_run_once():
    """torch's function for an operator is asked once for each kind of call."""
    asked = []
    silu = table()[torch.ops.aten.silu.default]

    def count(x):
        asked.append(tuple(x.shape))
        return silu(x)
    own = {**dict(table().items()), torch.ops.aten.silu.default: count}
    program = program_of(lambda x, y: F.silu(F.silu(F.silu(x))).sum() + F.silu(y))
    decompose_calls(program, own, KEPT)
    assert [shape[1] for shape in asked] == [8, 3]


def test_the_users_program_stays_as_it_was():
    program = program_of(part)
    before, signature = str(program.graph), str(program.graph_signature)
    decompose_calls(program, dict(table().items()), KEPT)
    assert (str(program.graph), str(program.graph_signature)) == (before, signature)


_COMPARED = ["eq_", "ne_", "lt_", "le_", "gt_", "ge_", "logical_and_", "logical_or_", "logical_xor_"]


def test_comparisons_in_place_keep_the_dtype():
    """Where they write nothing, they give bools; and torch has a ldexp of numbers beside that of tensors."""
    def function(x, y, i):
        for name in _COMPARED:
            getattr(x[_COMPARED.index(name)], name)(y)
        i.gt_(2)
        return x.clone().logical_not_(), i * 3, y.clone().ldexp_(i)
    model, generator = Function(function), torch.Generator().manual_seed(0)

    def inputs():
        x = torch.randint(0, 3, (len(_COMPARED), 6), generator=generator).float()
        return x, torch.arange(6.0) % 3, torch.arange(6)
    compiled = moe_mlir.compile(model, inputs())
    for _ in range(2):
        given = inputs()
        other = [x.clone() for x in given]
        require_equal(compiled(*given), model(*other))
        require_equal(given, other)
