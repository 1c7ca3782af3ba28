"""Triangular systems, and the loop that chunked delta rules write them as."""

import importlib
import inspect
import linecache

import pytest
import torch
import torch.nn.functional as F
from test_operators import Function, check

import moe_mlir
from moe_mlir.importer import ImportFailed
from moe_mlir.patching import substitution
from moe_mlir.patching.substitution import substitutions_as_ops


def inverse(attn, chunk_size: int = 8):
    attn = attn * 1
    for i in range(1, chunk_size):
        row = attn[..., i, :i].clone()
        sub = attn[..., :i, :i].clone()
        attn[..., i, :i] = row + (row.unsqueeze(-1) * sub).sum(-2)
    for i in range(2):
        attn = attn + i
    return attn


def reads_a_row_behind(attn, chunk_size: int = 8):
    attn = attn * 1
    for i in range(1, chunk_size):
        row = attn[..., i, :i].clone()
        sub = attn[..., :i, :i].clone()
        attn[..., i, :i] = row + (row.unsqueeze(-1) * sub).sum(-2)
    return attn, row


def differs(attn, chunk_size: int = 8):
    attn = attn * 1
    for i in range(1, chunk_size):
        row = attn[..., i, :i].clone()
        sub = attn[..., :i, :i].clone()
        attn[..., i, :i] = row - (row.unsqueeze(-1) * sub).sum(-2)
    return attn


class Rule(torch.nn.Module):
    """Calls a function of this file by its name, as models do."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, x):
        return globals()[self.name](x)


def matrices(*shape):
    # Not triangular: the loop reads all of the rows above, and so does the op.
    return torch.randn(*shape, 8, 8) / 4


@pytest.mark.parametrize(("name", "is_op"), [("inverse", True), ("reads_a_row_behind", False),
                                             ("differs", False)])
def test_the_loop_is_one_op_where_it_is_that_loop(name, is_op):
    model, function = Rule(name).eval(), globals()[name]
    code = function.__code__
    with substitutions_as_ops(model):
        assert (function.__code__ is not code) == is_op
        inside = model(matrices(2)[0])
    assert function.__code__ is code
    compiled = moe_mlir.compile(model, (matrices(2, 3),))
    for x in (matrices(2, 3), matrices(5, 1)):
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)
    assert ("scf.for" in compiled.module.text) == is_op
    assert torch.utils._pytree.tree_leaves(inside)[0].shape == (8, 8)


def test_the_op_is_the_loop_to_the_last_bit():
    x = matrices(3)
    assert torch.equal(torch.ops.moe.forward_substitution(x, 8) + 1, inverse(x))
    check(lambda x: torch.ops.moe.forward_substitution(x, 5), (x,), later=(matrices(1),))


def test_the_code_comes_back_after_an_error():
    code = inverse.__code__
    with pytest.raises(KeyError), substitutions_as_ops(Rule("inverse")):
        raise KeyError
    assert inverse.__code__ is code


def test_a_file_that_was_changed_after_its_import_is_left_alone(tmp_path, monkeypatch):
    head = "import torch\n\n\n" + inspect.getsource(inverse)
    (tmp_path / "delta_rule.py").write_text(head)
    monkeypatch.syspath_prepend(tmp_path)
    file = importlib.import_module("delta_rule")
    model = Rule("inverse")
    model.__class__ = type("Rule", (Rule,), {"__module__": "delta_rule"})
    code = file.inverse.__code__
    (tmp_path / "delta_rule.py").write_text(head.replace("attn * 1", "attn * 2"))
    linecache.checkcache()
    with substitutions_as_ops(model):
        assert file.inverse.__code__ is code
    (tmp_path / "delta_rule.py").write_text(head)
    linecache.checkcache()
    substitution._rewritten.clear()
    with substitutions_as_ops(model):
        assert file.inverse.__code__ is not code


def test_systems():
    def function(a, b):
        solve = torch.linalg.solve_triangular
        a = a + 4 * torch.eye(8)
        return [solve(a, b, upper=upper, unitriangular=unit) for upper in (True, False)
                for unit in (True, False)] + [solve(a[0], b, upper=False), solve(a, b[:1], upper=True)]
    check(function, (matrices(2), torch.randn(2, 8, 5)), later=(matrices(3), torch.randn(3, 8, 5)),
          rtol=1e-4, atol=1e-5)


def test_a_pivot_of_zero_and_what_lies_on_the_other_side():
    """Division by 0 is infinite, as in eager; the other triangle is not read."""
    def function(a, b):
        return torch.linalg.solve_triangular(a, b, upper=False)
    a = torch.eye(3) * torch.tensor([1.0, 0.0, 2.0]) + torch.full((3, 3), torch.nan).triu(1)
    check(function, (a, torch.ones(3, 2)))


def test_from_the_right_is_told():
    with pytest.raises(ImportFailed, match="left=False; transpose both sides"):
        moe_mlir.export(Function(lambda a, b: torch.linalg.solve_triangular(
            a, b, upper=True, left=False)), (matrices(2), torch.randn(2, 5, 8)))


def test_a_delta_rule_of_transformers():
    """Of two chunks of 16 rows."""
    import transformers.models.qwen3_next.modeling_qwen3_next as file

    class Delta(torch.nn.Module):
        def forward(self, q, k, v, decay, beta):
            return file.torch_chunk_gated_delta_rule(q, k, v, g=F.logsigmoid(decay),
                                                     beta=beta.sigmoid(), chunk_size=16)[0]
    Delta.__module__ = file.__name__
    model = Delta().eval()

    def inputs(batch, tokens):
        q, k, v = torch.randn(3, batch, tokens, 2, 4).unbind()
        return q, F.normalize(k, dim=-1), v, *torch.randn(2, batch, tokens, 2).unbind()
    assert substitution._rewrite(inspect.unwrap(file.torch_chunk_gated_delta_rule))
    compiled = moe_mlir.compile(model, inputs(2, 18))
    for shape in ((2, 18), (1, 32)):
        x = inputs(*shape)
        torch.testing.assert_close(compiled(*x), model(*x), rtol=1e-4, atol=1e-4)
