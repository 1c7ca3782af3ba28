"""Routers as models spell them: which form, which parameters, or why not."""

import inspect

import pytest
import torch
import torch.nn.functional as F

import moe_mlir
from moe_mlir.fx import find_routers, raise_routing

E, K = 8, 2


class Router(torch.nn.Module):
    """A linear layer and a selection given as a function of its logits."""

    def __init__(self, select, bias=False):
        super().__init__()
        self.gate = torch.nn.Linear(16, E, bias=bias)
        self.select = select

    def forward(self, x):
        return self.select(self.gate(x))


def renormalised(values, indices):
    return values / values.sum(-1, keepdim=True), indices


def f1(z):
    return renormalised(*F.softmax(z, -1).topk(K))


def f1_in_place(z):
    values, indices = F.softmax(z, dim=-1, dtype=torch.float32).topk(K, dim=-1)
    values /= values.sum(dim=-1, keepdim=True)
    return values.to(z.dtype), indices


def f1_tiny_eps(z):
    values, indices = F.softmax(z, -1).topk(K)
    return values / (values.sum(-1, keepdim=True) + 1e-20), indices


def f2(z):
    values, indices = z.topk(K, dim=-1)
    return F.softmax(values, dim=values.dim() - 1), indices


def f3(z):
    return F.softmax(z, -1).topk(K)


def scaled(z):
    values, indices = f1(z)
    return values * 2.5, indices


RAISED = {"f1": (f1, "F1", True, 1.0), "f1_in_place": (f1_in_place, "F1", True, 1.0),
          "f1_tiny_eps": (f1_tiny_eps, "F1", True, 1.0), "f2": (f2, "F2", False, 1.0),
          "f3": (f3, "F3", False, 1.0), "scaled": (scaled, "F1", True, 2.5)}


def explain_one(select):
    matches = moe_mlir.explain(Router(select), (torch.randn(4, 16),))
    assert len(matches) == 1
    return matches[0]


@pytest.mark.parametrize("name", RAISED)
def test_forms_that_are_raised(name):
    select, form, renorm, scale = RAISED[name]
    match = explain_one(select)
    assert match.recognised and match.reason == ""
    assert (match.form, match.score, match.k, match.num_experts) == (form, "softmax", K, E)
    assert (match.renorm, match.scale, match.bias, match.groups) == (renorm, scale, False, 1)


def test_the_location_is_the_line_of_the_module_that_selects():
    match = explain_one(f2)
    source, first = inspect.getsourcelines(Router.forward)
    line = first + next(i for i, s in enumerate(source) if "select" in s)
    assert match.location == f"{__file__}:{line}"


def sigmoid_with_bias(z):
    scores = z.sigmoid()
    _, indices = (scores + torch.ones(E)).topk(K)
    return renormalised(scores.gather(-1, indices), indices)


def grouped(z):
    scores = z.sigmoid()
    choice = scores + torch.ones(E)
    best = choice.view(-1, 4, E // 4).topk(2, dim=-1)[0].sum(-1)
    groups = best.topk(2, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(best).scatter(1, groups, 1).unsqueeze(-1)
    mask = mask.expand(-1, 4, E // 4).reshape(-1, E).bool()
    indices = choice.masked_fill(~mask, 0.0).topk(K, sorted=False)[1]
    return renormalised(scores.gather(1, indices), indices)


def large_eps(z):
    values, indices = F.softmax(z, -1).topk(K)
    return values / (values.sum(-1, keepdim=True) + 0.1), indices


def half_precision(z):
    return renormalised(*F.softmax(z.to(torch.bfloat16), -1).topk(K))


def smallest(z):
    return F.softmax(z, -1).topk(K, largest=False)


def no_router(z):
    return z.topk(K)


KEPT = {"sigmoid_with_bias": (sigmoid_with_bias, "F4", "has no rewrite yet"),
        "large_eps": (large_eps, "F1", "eps 0.1 in the renormalisation changes gates"),
        "half_precision": (half_precision, "F1", "softmax is computed in bfloat16"),
        "smallest": (smallest, "topk", "takes the smallest scores"),
        "no_router": (no_router, "topk", "no score function")}


@pytest.mark.parametrize("name", KEPT)
def test_forms_that_are_kept_say_why(name):
    select, form, reason = KEPT[name]
    match = explain_one(select)
    assert match.form == form and not match.recognised
    assert match.reason.startswith("not raised: ") and reason in match.reason


def test_the_selections_of_groups_belong_to_their_router():
    match = explain_one(grouped)
    assert (match.form, match.score, match.groups, match.bias) == ("F4", "sigmoid", 4, True)


@pytest.mark.parametrize("name", RAISED)
def test_a_raised_program_computes_the_same_and_trains(name):
    model = Router(RAISED[name][0], bias=True)
    x = torch.randn(5, 16)
    raised = torch.export.export(model, (x,)).module()
    assert raise_routing(raised) == 1 and not find_routers(raised.graph)
    gates, indices = model(x)
    ours, chosen = raised(x)
    torch.testing.assert_close(ours, gates, rtol=1e-6, atol=1e-7)
    assert torch.equal(chosen, indices)
    cotangent = torch.randn_like(gates)
    gates.backward(cotangent)
    expected = model.gate.weight.grad.clone()
    model.zero_grad()
    # The program's parameters are the model's own.
    ours.backward(cotangent)
    torch.testing.assert_close(model.gate.weight.grad, expected, rtol=1e-5, atol=1e-6)


def test_the_selection_may_have_other_users():
    def select(z):
        values, indices = F.softmax(z, -1).topk(K)
        return values / values.sum(-1, keepdim=True), indices, values.sum()
    model, x = Router(select), torch.randn(5, 16)
    compiled = moe_mlir.compile(model, (x,))
    for ours, eager in zip(compiled(x), model(x)):
        torch.testing.assert_close(ours, eager)
