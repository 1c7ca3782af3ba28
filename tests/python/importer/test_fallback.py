"""Operators without an entry of their own: what torch decomposes them to, or an error."""

import io
import itertools

import pytest
import torch
import torch.nn.functional as F
from test_operators import Function, check, tokens

import moe_mlir
from moe_mlir._support import log
from moe_mlir.importer import ImportFailed, fallback
from moe_mlir.importer.registry import TABLE
from moe_mlir.raising import guards

aten = torch.ops.aten


def test_operators_that_torch_decomposes():
    def function(x):
        return (F.elu(x), F.leaky_relu(x, 0.1), F.hardswish(x), F.glu(x), F.mish(x),
                torch.logaddexp(x, -x), x.lerp(x * 2, 0.3), x.std(-1), F.smooth_l1_loss(x, -x),
                torch.tril_indices(3, 4), x.aminmax(dim=1), F.hardtanh(x), x.logsumexp(1))
    assert {aten.elu.default, aten.leaky_relu.default, aten.aminmax.default}.isdisjoint(TABLE)
    check(function, (tokens(),), later=(tokens(1, 7),))


def test_norms_over_groups_of_channels():
    def function(x, weight):
        x = x.mT
        return F.group_norm(x, 2, weight), F.instance_norm(x), torch.var_mean(x, 1)
    check(function, (tokens(),), torch.randn(8), later=(tokens(1, 7),), rtol=1e-4, atol=1e-5)


def test_functions_of_one_and_two_numbers():
    def function(x, y):
        return [f(x / 9) for f in (torch.acos, torch.asin, torch.atan, torch.atanh, torch.asinh,
                                   torch.sinh, torch.cosh, torch.tan, torch.erfc, torch.exp2)] + [
            x.trunc(), x.sign(), x.long().sign(), x.signbit(), x.frac(), torch.acosh(x.abs() + 1),
            x.abs().log10(), torch.atan2(x, y), torch.copysign(x, y), x.long() ** 5, x.long() ** 0,
            x.long().trunc(), F.softshrink(x)]
    x, y = torch.cartesian_prod(*2 * [torch.tensor([
        0.0, -0.0, 1.0, -1.0, 2.5, -7.25, torch.inf, -torch.inf])]).unbind(1)
    nan = torch.tensor([torch.nan])
    x = x.nan_to_num(posinf=8.5, neginf=-8.5)
    check(function, (x.clone(), y.clone()))
    check(lambda x: (x.sign(), x.signbit(), x.trunc()), (torch.cat((nan, y)),))


def test_products_and_diagonals():
    def function(x):
        pairs = x @ x.mT
        return (x.cumprod(1), x.prod(-1), x.prod(), x.long().cumprod(1), pairs.diagonal(0, 1, 2),
                x.diagonal(2, 2, 1), x.diagonal(-1, 1, 2), pairs.diagonal(-1, 1, 2),
                torch.diag_embed(x), x[0].trace())
    check(function, (tokens(),), later=(tokens(1, 7),))


def test_scans():
    def function(x, ids):
        return (x.cummax(1), x.cummin(-1), x.logcumsumexp(1), (x * 100).logcumsumexp(0),
                ids.cummax(0), ids.cummin(-1), x.bfloat16().cummax(1), x.cumsum(1))
    ids = torch.tensor([[3, 3, -1, 3], [-2 ** 63, 2 ** 63 - 1, 0, 0]])
    check(function, (tokens(), ids), later=(tokens(1, 7), ids[:, :2].clone()))
    rows = torch.tensor(list(itertools.permutations([1.0, torch.nan, torch.inf, -torch.inf, 1.0], 4)))
    check(lambda x: (x.cummax(1), x.cummin(1), x.logcumsumexp(1)), (rows,))


def test_a_log_line_names_them():
    stream = io.StringIO()
    log.show("compile", stream)
    moe_mlir.export(Function(lambda x: F.elu(x) + F.elu(-x)), (tokens(),))
    assert "decomposed operators without an entry: aten.elu.default (2)" in stream.getvalue()


def test_equal_layers_stay_equal():
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ELU())
                                  for _ in range(4))).eval()
    compiled = moe_mlir.compile(model, (tokens(),))
    for x in (tokens(), tokens(1, 7)):
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-6)
    plain = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.SiLU())
                                  for _ in range(4))).eval()
    functions = [moe_mlir.export(m, (tokens(),)).text.count("func.func") for m in (model, plain)]
    assert functions[0] == functions[1]


def test_what_a_decomposition_asks_of_sizes_is_a_condition(monkeypatch):
    """Another size takes the other way."""
    monkeypatch.setitem(fallback._OWN, aten.hypot.default,
                        lambda x, y: x * 2 if x.shape[0] > 5 else x * 3)
    compiled = moe_mlir.compile(Function(lambda x: x.hypot(x)), (torch.ones(3, 2),))
    for rows, factor in ((3, 3), (1, 3), (7, 2), (5, 3)):
        assert compiled(torch.ones(rows, 2)).eq(factor).all()
    # Of a function in torch's own files as well.
    monkeypatch.setattr(guards, "_TORCH", __file__)
    module = moe_mlir.export(Function(lambda x: x.hypot(x)), (torch.ones(3, 2),))
    assert [(relation, number) for _, relation, number in module.conditions] == [("<=", 5)]


@pytest.mark.parametrize(("function", "name"), [
    (torch.hypot, "aten.hypot.default"), (lambda x, y: x.erfinv(), "aten.erfinv.default"),
    (lambda x, y: x.unique(), "aten._unique2.default"),
    (lambda x, y: torch.special.bessel_j0(x), "aten.special_bessel_j0.default"),
    (lambda x, y: x.long() ** -1, "integer power -1"),
])
def test_the_error_names_the_operator_of_the_model(function, name):
    """Not what it consists of, which has no entry either."""
    with pytest.raises(ImportFailed, match=f"{name}.*test_operators.py"):
        moe_mlir.export(Function(function), (tokens(), tokens()))
