"""Routers as models spell them: which form, which parameters, or why not."""

import inspect
import re

import pytest
import torch
import torch.nn.functional as F
from support import Selections, tied_rows

import moe_mlir
from moe_mlir.raising import find_routers, raise_routing

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


def f1_in_place_seen_in_views(z):
    """As Mixtral's router before grouped experts, which read flat views of gates and ids."""
    values, indices = F.softmax(z, dim=-1, dtype=torch.float32).topk(K, dim=-1)
    values /= values.sum(dim=-1, keepdim=True)
    return values.reshape(-1), indices.reshape(-1)


def f2_of_a_type(z):
    """The gates take their type from memory that is written."""
    cache = torch.zeros_like(z)
    values, indices = z.topk(K)
    cache[0] = 1.0
    return F.softmax(values, -1).type_as(cache), indices


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


def large_eps(z):
    values, indices = F.softmax(z, -1).topk(K)
    return values / (values.sum(-1, keepdim=True) + 0.1), indices


def sigmoid_with_bias(z):
    scores = z.sigmoid()
    _, indices = (scores + BIAS).topk(K)
    return renormalised(scores.gather(-1, indices), indices)


def softmax_with_bias(z):
    scores = F.softmax(z, -1)
    indices = (BIAS.view(1, -1) + scores).topk(K)[1]
    return scores.gather(-1, indices), indices


def root_of_softplus(z):
    scores = F.softplus(z).sqrt()
    indices = (scores + BIAS).topk(K, sorted=False)[1]
    return renormalised(scores.gather(-1, indices), indices)


def chosen_behind_a_view(z):
    scores = F.softmax(z, -1)
    indices = (scores.view(-1, E) + BIAS.unsqueeze(0)).topk(K, sorted=False)[1]
    return scores.gather(-1, indices), indices


def chosen_from_a_detached_copy(z):
    scores = F.softmax(z, -1)
    indices = (scores.detach().float() + BIAS).topk(K)[1]
    return scores.gather(-1, indices), indices


def group_mask(best, kept):
    groups = best.topk(kept, dim=-1, sorted=False)[1]
    return torch.zeros_like(best).scatter(1, groups, 1).unsqueeze(-1)


def grouped(z):
    scores = z.sigmoid()
    choice = scores + BIAS
    best = choice.view(-1, 4, E // 4).topk(2, dim=-1)[0].sum(-1)
    mask = group_mask(best, 2).expand(-1, 4, E // 4).reshape(-1, E).bool()
    indices = choice.masked_fill(~mask, float("-inf")).topk(K, sorted=False)[1]
    return renormalised(scores.gather(1, indices), indices)


def grouped_as_another(z):
    scores = z.sigmoid()
    choice = scores + BIAS
    groups = choice.view(-1, 4, E // 4)
    mask = group_mask(groups.amax(-1), 2).expand_as(groups).reshape(-1, E).bool()
    indices = choice.masked_fill(~mask, float("-inf")).topk(K)[1]
    return scores.gather(1, indices), indices


def grouped_in_place(z):
    scores = F.softmax(z, -1)
    best = scores.view(-1, 4, E // 4).max(-1).values
    mask = torch.zeros_like(best)
    mask.scatter_(1, best.topk(2)[1], 1)
    mask = mask.repeat_interleave(E // 4, dim=-1)
    return torch.where(mask > 0, scores, 0.0).topk(K)


def dense(z):
    values, indices = z.topk(K, dim=1)
    spread = torch.full_like(z, float("-inf")).scatter_(1, indices, values)
    return torch.sigmoid(spread), indices


def dense_softmax(z):
    values, indices = z.topk(K, dim=1)
    return F.softmax(torch.full_like(z, -torch.inf).scatter(1, indices, values), -1), indices


def sigmoid_of_selected(z):
    values, indices = z.topk(K)
    return values.sigmoid(), indices


def switch(z):
    probabilities = F.softmax(z, -1)
    return probabilities.max(-1).values, probabilities.argmax(-1)


def maximum(z):
    return F.softmax(z, -1).max(-1, keepdim=True)


def mixed_by_similarity(z):
    similarity = F.softmax(z @ z.t() / 2.0, dim=-1)
    return renormalised(*(similarity @ F.softmax(z, -1)).topk(K))


def mixed_by_experts(z):
    return (F.softmax(z, -1) @ ADJACENCY.t()).topk(K)


def bias_on_logits(z):
    """As Kolibri's: the order of biased logits is not that of biased sigmoids."""
    indices = (z + 20 * BIAS).topk(K, dim=-1)[1]
    return renormalised(z.gather(1, indices).sigmoid(), indices)


def softmax_of_others(z):
    indices = z.tanh().topk(K, sorted=False)[1]
    return F.softmax(z.gather(1, indices), -1), indices


def root_of_softplus_late(z):
    values, indices = z.topk(K)
    return F.softplus(values).sqrt(), indices


def zero_fill(z):
    """As A.X-K2's: experts of dropped groups have score 0, which a negative bias loses against."""
    scores = z.sigmoid()
    choice = scores - 3 * BIAS
    mask = group_mask(choice.view(-1, 4, E // 4).amax(-1), 2).expand(-1, 4, E // 4)
    indices = choice.masked_fill(~mask.reshape(-1, E).bool(), 0.0).topk(K)[1]
    return renormalised(scores.gather(1, indices), indices)


def bias_of_tokens(z):
    scores = F.softmax(z, -1)
    indices = (scores + torch.arange(z.shape[1]) * z[:, :1]).topk(K)[1]
    return scores.gather(1, indices), indices


def with_shared(z):
    """As Inkling's: gates of selected and shared experts sum to one."""
    routed, shared = z[..., :-2], z[..., -2:]
    indices = (z.sigmoid()[..., :-2] + BIAS[:-2]).topk(K, sorted=False)[1]
    logarithms = F.logsigmoid(torch.cat([routed.gather(-1, indices), shared], -1))
    return torch.exp(logarithms - logarithms.logsumexp(-1, keepdim=True)) * 2.5, indices


def by_table(z):
    """As DeepSeek-V4's hash router; a token's id is a number here that the logits tell."""
    scores = F.softplus(z).sqrt()
    indices = TABLE[(z > 0).sum(-1)].long()
    gates = scores.gather(1, indices)
    return gates / (gates.sum(-1, keepdim=True) + 1e-20) * 1.5, indices


BIAS = torch.linspace(0.2, -0.1, E)
TABLE = torch.rand(E + 1, E, generator=torch.Generator().manual_seed(1)).argsort(-1)[:, :K]
ADJACENCY = torch.rand(E, E, generator=torch.Generator().manual_seed(0))
# name: the router, its form, score, renorm, scale
RAISED = {"f1": (f1, "F1", "softmax", True, 1.0),
          "f1_in_place": (f1_in_place, "F1", "softmax", True, 1.0),
          "f1_in_place_seen_in_views": (f1_in_place_seen_in_views, "F1", "softmax", True, 1.0),
          "f2_of_a_type": (f2_of_a_type, "F2", "softmax", True, 1.0),
          "f1_tiny_eps": (f1_tiny_eps, "F1", "softmax", True, 1.0),
          "f2": (f2, "F2", "softmax", True, 1.0), "f3": (f3, "F3", "softmax", False, 1.0),
          "scaled": (scaled, "F1", "softmax", True, 2.5),
          "large_eps": (large_eps, "F1", "softmax", True, 1.0),
          "sigmoid_with_bias": (sigmoid_with_bias, "F4", "sigmoid", True, 1.0),
          "softmax_with_bias": (softmax_with_bias, "F5", "softmax", False, 1.0),
          "root_of_softplus": (root_of_softplus, "F4", "sqrtsoftplus", True, 1.0),
          "chosen_behind_a_view": (chosen_behind_a_view, "F5", "softmax", False, 1.0),
          "chosen_from_a_detached_copy": (chosen_from_a_detached_copy, "F5", "softmax", False, 1.0),
          "grouped": (grouped, "F4", "sigmoid", True, 1.0),
          "grouped_as_another": (grouped_as_another, "F4", "sigmoid", False, 1.0),
          "grouped_in_place": (grouped_in_place, "F6", "softmax", False, 1.0),
          "dense": (dense, "F7", "sigmoid", False, 1.0),
          "dense_softmax": (dense_softmax, "F7", "softmax", True, 1.0),
          "sigmoid_of_selected": (sigmoid_of_selected, "topk->sigmoid", "sigmoid", False, 1.0),
          "switch": (switch, "F8", "softmax", False, 1.0),
          "maximum": (maximum, "F8", "softmax", False, 1.0),
          "root_of_softplus_late": (root_of_softplus_late, "topk->sigmoid", "sqrtsoftplus", False, 1.0),
          "bias_on_logits": (bias_on_logits, "F10", "sigmoid", True, 1.0),
          "softmax_of_others": (softmax_of_others, "F10", "softmax", True, 1.0),
          "zero_fill": (zero_fill, "F10", "sigmoid", True, 1.0),
          "bias_of_tokens": (bias_of_tokens, "F10", "softmax", False, 1.0),
          "with_shared": (with_shared, "F10", "sigmoid", True, 2.5),
          "by_table": (by_table, "F11", "sqrtsoftplus", True, 1.5),
          "mixed_by_similarity": (mixed_by_similarity, "P1", "probs", True, 1.0),
          "mixed_by_experts": (mixed_by_experts, "P3", "probs", False, 1.0)}


def explain_one(select):
    matches = moe_mlir.explain(Router(select), (torch.randn(4, 16),))
    assert len(matches) == 1
    return matches[0]


@pytest.mark.parametrize("name", RAISED)
def test_forms_that_are_raised(name):
    select, form, score, renorm, scale = RAISED[name]
    match = explain_one(select)
    assert match.recognised and match.reason == ""
    # An argmax takes the first of equal probabilities, which unequal logits may have.
    assert match.left == ("the softmax, which is rounded to float32" if form == "F8" else "")
    k = 1 if form == "F8" else K
    experts = E - 2 if name == "with_shared" else E
    assert (match.form, match.score, match.k, match.num_experts) == (form, score, k, experts)
    assert (match.renorm, match.scale, match.bias) == (renorm, scale, name in BIASED)
    assert match.eps == {"large_eps": 0.1, "by_table": 1e-20}.get(name, 0.0)
    assert (match.score_dtype, match.gate_dtype) == ("float32", "float32")


BIASED = ("sigmoid_with_bias", "softmax_with_bias", "grouped", "grouped_as_another",
          "root_of_softplus", "chosen_behind_a_view", "chosen_from_a_detached_copy")


@pytest.mark.parametrize("name, kind", [("grouped", "top2"), ("grouped_as_another", "max"),
                                        ("grouped_in_place", "max")])
def test_groups_are_parameters_of_their_router(name, kind):
    match = explain_one(RAISED[name][0])
    assert (match.groups, match.topk_group, match.group_score) == (4, 2, kind)


def test_the_location_is_the_line_of_the_module_that_selects():
    match = explain_one(f2)
    source, first = inspect.getsourcelines(Router.forward)
    line = first + next(i for i, s in enumerate(source) if "select" in s)
    assert match.location == f"{__file__}:{line}"


def smallest(z):
    return F.softmax(z, -1).topk(K, largest=False)


def no_router(z):
    return z.topk(K)


def biased_gates(z):
    return (z.sigmoid() + BIAS).topk(K)


def half_fill(z):
    """The gates are the values themselves, so that no other scores have them."""
    scores = z.sigmoid()
    mask = group_mask(scores.view(-1, 4, E // 4).amax(-1), 2).expand(-1, 4, E // 4)
    return scores.masked_fill(~mask.reshape(-1, E).bool(), 0.5).topk(K)


def smallest_of_others(z):
    indices = (z + BIAS).topk(K, largest=False)[1]
    return z.gather(1, indices).sigmoid(), indices


def other_function(z):
    indices = (z + BIAS).topk(K)[1]
    return z.gather(1, indices).tanh(), indices


def at_other_places(z):
    indices = (z + BIAS).topk(K)[1]
    return z.gather(1, indices.flip(1)).sigmoid(), indices


def along_tokens(z):
    indices = (z + BIAS).topk(K)[1]
    return z.t().gather(1, indices.t()).sigmoid(), indices


def other_groups(z):
    """The mask goes to experts 0, 4, 1, 5, .., not to neighbours."""
    scores = F.softmax(z, -1)
    mask = group_mask(scores.view(-1, 4, E // 4).amax(-1), 2).squeeze(-1)
    mask = mask.unsqueeze(1).expand(-1, E // 4, 4).reshape(-1, E).bool()
    return scores.masked_fill(~mask, 0.0).topk(K)


def worst_groups(z):
    scores = F.softmax(z, -1)
    mask = group_mask(scores.view(-1, 4, E // 4).amax(-1), 2).expand(-1, 4, E // 4)
    return scores.masked_fill(mask.reshape(-1, E).bool(), 0.0).topk(K)


KEPT = {"smallest": (smallest, "topk", "takes the smallest scores"),
        "no_router": (no_router, "topk", "no score function"),
        "biased_gates": (biased_gates, "F4", "the gates contain the bias"),
        "half_fill": (half_fill, "F4", "experts of dropped groups are filled with 0.5"),
        "smallest_of_others": (smallest_of_others, "topk", "takes the smallest scores"),
        "other_function": (other_function, "topk", "no score function"),
        "at_other_places": (at_other_places, "topk", "no score function"),
        "along_tokens": (along_tokens, "topk", "no score function"),
        "other_groups": (other_groups, "F6", "not that of the best groups of neighbours"),
        "worst_groups": (worst_groups, "F6", "not that of the best groups of neighbours")}


@pytest.mark.parametrize("name", KEPT)
def test_forms_that_are_kept_say_why(name):
    select, form, reason = KEPT[name]
    match = explain_one(select)
    assert match.form == form and not match.recognised
    assert match.reason.startswith("not recognised: ") and reason in match.reason


@pytest.mark.parametrize("select, form, why", [
    (lambda z: z.tanh().argmax(-1), "argmax", "an argmax of tanh of linear; expected the position"),
    (lambda z: F.softmax(z, -1).sort(-1, descending=True)[1][:, :K], "sort",
     "a sort of softmax.*; expected torch.topk instead for a router"),
    (lambda z: F.softmax(z, -1).argsort(-1, descending=True)[:, :K], "sort",
     "a sort of softmax.*; expected torch.topk instead")])
def test_selections_without_a_top_k_say_why_they_stay(select, form, why):
    match = explain_one(select)
    assert (match.form, match.recognised) == (form, False)
    assert re.search(why, match.reason), match.reason


@pytest.mark.parametrize("select, found", [
    (lambda z: F.softplus(z).topk(K), "softplus"), (lambda z: F.log_softmax(z, -1).topk(K), "log_softmax"),
    (lambda z: (z / 2.0).exp().topk(K), "exp.* of div")])
def test_a_score_function_that_is_not_known_is_named(select, found):
    match = explain_one(select)
    assert not match.recognised
    assert re.search(f"it selects from .*{found}.*, where a softmax or a sigmoid", match.reason), match


def half_softmax(z):
    return renormalised(*F.softmax(z.to(torch.bfloat16), -1).topk(K))


def half_sigmoid_with_bias(z):
    scores = z.to(torch.bfloat16).sigmoid()
    indices = (scores + BIAS).topk(K)[1]
    return scores.gather(-1, indices), indices


def half_renorm(z):
    values, indices = F.softmax(z, -1).topk(K)
    return renormalised(values.to(torch.bfloat16), indices)


def clamped(z):
    scores = F.softmax(z, -1)
    indices = (scores + BIAS).topk(K)[1]
    gates = scores.gather(-1, indices)
    return gates / gates.sum(-1, keepdim=True).clamp(min=1e-12), indices


def other_user(z):
    values, indices = F.softmax(z, -1).topk(K)
    return values / values.sum(-1, keepdim=True), indices, values.square()


@pytest.mark.parametrize("select, form, left", [
    (half_softmax, "F1", "the softmax, which is computed in bfloat16"),
    (half_sigmoid_with_bias, "F4", "the sigmoid, which is computed in bfloat16"),
    (half_renorm, "F1", "the renormalisation, which is computed from rounded scores"),
    (clamped, "F5", "the renormalisation, whose sum is clamped at 1e-12"),
    (other_user, "F1", "the renormalisation, since other code reads the selected scores")])
def test_what_would_round_otherwise_stays(select, form, left):
    match = explain_one(select)
    assert match.recognised and not match.renorm
    assert match.form == form and left in match.left
    model, x = Router(select), torch.randn(16, 16)
    raised = torch.export.export(model, (x,)).module()
    assert raise_routing(raised) == 1
    with Selections(settle=True):
        wanted = model(x)
    for ours, eager in zip(raised(x), wanted):
        torch.testing.assert_close(ours, eager, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("score", [lambda v: F.softmax(v, -1), torch.sigmoid])
def test_a_score_of_few_bits_is_rounded_before_it_is_scaled(score):
    """Cast to float32 it has no more bits than it had."""
    def select(z):
        values, indices = z.to(torch.bfloat16).topk(K)
        return 2.5 * score(values).float(), indices
    model, x = Router(select), torch.randn(16, 16)
    raised = torch.export.export(model, (x,)).module()
    assert raise_routing(raised) == 1
    with Selections(settle=True):
        wanted = model(x)[0]
    # One rounding to bfloat16 of a score in float32, which may differ in its last bit.
    assert torch.equal((raised(x)[0] / 2.5).bfloat16().float() * 2.5, raised(x)[0])
    torch.testing.assert_close(raised(x)[0], wanted, rtol=2**-7, atol=0)


@pytest.mark.parametrize("name", RAISED)
def test_a_raised_program_computes_the_same_and_trains(name):
    model = Router(RAISED[name][0], bias=True)
    x = torch.randn(5, 16)
    raised = torch.export.export(model, (x,)).module()
    # The choice of groups whose scores are then filled with 0 stays as it is.
    assert raise_routing(raised) == 1 and len(find_routers(raised.graph)) == (name == "zero_fill")
    with Selections(settle=True) as selections:
        gates, indices = model(x)
    ours, chosen = raised(x)
    torch.testing.assert_close(ours, gates, rtol=1e-6, atol=1e-7)
    # torch may take another product for the logits where a mode watches it.
    near = tied_rows(selections, len(x), ulps=4)
    mine, theirs = (ids.reshape(len(x), -1) for ids in (chosen, indices))
    assert torch.equal(mine[~near], theirs[~near]), selections.found
    cotangent = torch.randn_like(gates).reshape(len(x), -1)
    cotangent[near] = 0  # another expert learns
    cotangent = cotangent.reshape(gates.shape)
    gates.backward(cotangent)
    expected = model.gate.weight.grad.clone()
    model.zero_grad()
    # The program's parameters are the model's own.
    ours.backward(cotangent)
    torch.testing.assert_close(model.gate.weight.grad, expected, rtol=1e-5, atol=1e-6)


def assert_trains_alike(model, caplog, loss):
    """The backend's gradients are eager's."""
    x = torch.randn(5, 16)
    compiled = torch.compile(model, backend="moe", options={"rest": "eager"})
    gradients = []
    with caplog.at_level("INFO", logger="moe_mlir.backend"):
        for run in (model, compiled):
            model.zero_grad()
            loss(*run(x)).backward()
            gradients.append(model.gate.weight.grad.clone())
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-6)


def test_gates_beside_a_choice_without_gradients_have_theirs(caplog):
    """Dynamo's graph has the bounds of `no_grad`, and the op must not lie between them."""
    class Chooses(Router):
        def forward(self, x):
            scores = F.softmax(self.gate(x), -1)
            with torch.no_grad():
                indices = (scores + BIAS).topk(K)[1]
            return scores.gather(-1, indices), indices
    assert_trains_alike(Chooses(None), caplog, lambda gates, indices: gates.square().sum())
    assert "recognised: softmax + bias, top-k" in caplog.text


@pytest.mark.parametrize("cast", [lambda x: x.float(), lambda x: x.contiguous(), lambda x: x.type_as(x),
                                  lambda x: F.dropout(x, 0.5, training=False), lambda x: x.clone(),
                                  lambda x: x.to(x.dtype, copy=True), lambda x: x.view_as(x)])
def test_what_a_choice_without_gradients_hands_on_has_its_argument_s(cast, caplog):
    """A cast that changes nothing returns its argument, whose gradient is not lost."""
    class Chooses(Router):
        def forward(self, x):
            logits = self.gate(x)
            with torch.no_grad():
                same = cast(logits)
                indices = (F.softmax(same, -1) + BIAS).topk(K)[1]
            return F.softmax(logits, -1).gather(-1, indices), same + logits
    assert_trains_alike(Chooses(None), caplog,
                        lambda gates, handed: gates.square().sum() + handed.square().sum())
    assert "recognised: " in caplog.text


def test_gates_without_gradients_get_none(caplog):
    class Detaches(Router):
        def forward(self, x):
            scores = F.softmax(self.gate(x), -1).detach()
            indices = (scores + BIAS).topk(K)[1]
            return scores.gather(-1, indices), indices
    compiled = torch.compile(Detaches(None), backend="moe", options={"rest": "eager"})
    with caplog.at_level("INFO", logger="moe_mlir.backend"):
        gates, _ = compiled(torch.randn(5, 16))
    assert "recognised: top-k of other scores" in caplog.text
    assert not gates.requires_grad


def test_the_selection_may_have_other_users():
    def select(z):
        values, indices = F.softmax(z, -1).topk(K)
        return values / values.sum(-1, keepdim=True), indices, values.sum()
    model, x = Router(select), torch.randn(5, 16)
    compiled = moe_mlir.compile(model, (x,))
    for ours, eager in zip(compiled(x), model(x)):
        torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("select, edge", [
    (bias_on_logits, "a NaN in what is selected from is chosen last"),
    (by_table, "an id that is no expert's has gate 0, where torch raises an error")])
def test_edges_of_ids_that_other_numbers_chose_are_told(select, edge):
    assert any(edge in text for text in explain_one(select).edges)


def test_an_op_with_given_experts_is_described_as_one():
    def select(z):
        given = torch.zeros(4, K, dtype=torch.int64)
        return moe_mlir.grouped_topk(z, K, forced=given, renorm=False)[0]
    match = explain_one(select)
    assert match.description == "2 given experts, weighed by a sigmoid" and not match.ties


def test_a_top_k_of_all_is_no_choice():
    match = explain_one(lambda z: z.topk(E))
    assert not match.recognised and "takes all 8, which is a sort" in match.reason
