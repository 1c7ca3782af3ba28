"""Every base under every method: each cell of the matrix is its float64 meaning, or is refused.

The matrix comes from the classes of `moe_mlir.nn`, so that a new router enters
it by itself.
"""

import warnings

import pytest
import torch
from composition import (
    METHODS,
    ROUTERS,
    TOWERS,
    choice,
    loss_of,
    make,
    meaning,
    name_of,
    operands,
    stack,
    weights_of,
)
from methods import D, E, K, normal
from op_judge import assert_close, random

import moe_mlir
from moe_mlir import nn

H = normal(2, 9, D)
MASK = torch.rand(2, 9, generator=random(5)) > 0.3
RUNS = {"causal": (True, None), "causal, masked": (True, MASK), "masked": (False, MASK)}


def is_refused(method, base):
    try:
        stack((method, base))
    except ValueError:
        return True
    return False


CELLS = [(m, b) for m in ROUTERS for b in ROUTERS]
COMPUTED = [cell for cell in CELLS if not is_refused(*cell)]


def test_the_matrix_holds_every_method_and_refuses_only_with_a_reason():
    assert {m for m, _ in COMPUTED} == set(METHODS)
    for method, base in CELLS:
        if (method, base) not in COMPUTED:
            with pytest.raises(ValueError, match=rf"{method.__name__}: expected .*: \w+.* \w+"):
                stack((method, base))
    print(f"{len(COMPUTED)} computed, {len(CELLS) - len(COMPUTED)} refused")


def run(classes, causal, mask):
    router = stack(classes, causal=causal)
    h, expected_h = H.clone().requires_grad_(), H.double().requires_grad_()
    weights = weights_of(router)
    routing = router(h, mask, **operands(classes))
    real = expected_h if mask is None else torch.where(mask[..., None], expected_h, 0.0)
    judge = meaning(classes, weights, real, mask, operands(classes), causal=causal)
    return router, routing, h, judge, expected_h


@pytest.mark.parametrize("run_as", RUNS)
@pytest.mark.parametrize("classes", [*COMPUTED, *TOWERS], ids=name_of)
def test_a_cell_is_its_float64_meaning(classes, run_as):
    causal, mask = RUNS[run_as]
    router, routing, h, judge, expected_h = run(classes, causal, mask)
    gates, indices = choice(judge, judge.p, mask)
    assert torch.equal(routing.indices, indices)
    real = slice(None) if mask is None else mask
    assert_close(routing.gates, gates, 1e-5, "gates")
    assert_close(routing.probs[real], judge.p[real], 1e-5, "probs")
    assert_close(routing.logits[real], judge.z[real], 1e-5, "logits")
    check_state(routing, judge, gates, indices, mask)
    check_counters(router, judge, indices)

    loss_of(routing.gates, routing.probs[real]).backward()
    loss_of(gates, judge.p[real]).backward()
    leaves = [(n, p.grad, judge.weights[n].grad) for n, p in router.named_parameters()]
    for name, actual, expected in (("h", h.grad, expected_h.grad), *leaves):
        assert (actual is None) == (expected is None), name
        if expected is not None:
            assert_close(actual, expected, 2e-5 * max(1, float(expected.abs().max())), name)


def check_state(routing, judge, gates, indices, mask):
    expected = dict(judge.state)
    if "prev_h" in expected:
        expected |= dict(prev_indices=indices, prev_gates=gates)
    assert set(routing.state) == set(expected)
    for name, value in expected.items():
        actual = routing.state[name]
        if mask is not None and "probs" in name:
            actual, value = actual[mask], value[mask]
        assert_close(actual.double(), value.double(), 1e-5, name)


def check_counters(router, judge, indices):
    expected = dict(judge.counters)
    load = [n for n, _ in router.named_buffers() if n.endswith("load")]
    for name in load:
        expected[name] = torch.bincount(indices[indices >= 0], minlength=E)
    counted = {n: b for n, b in router.named_buffers() if not b.is_floating_point()}
    assert {n for n, b in counted.items() if b.any()} == set(expected)
    for name, value in expected.items():
        assert torch.equal(counted[name], value), name


@pytest.mark.parametrize("classes", [*COMPUTED, *TOWERS], ids=name_of)
def test_a_cell_depends_on_each_of_its_parts(classes):
    """Another value of any weight, buffer or operand, of any level, is another routing."""
    router, inputs = stack(classes, impl="torch"), operands(classes)

    def result(**changed):
        routing = router(H, **{**inputs, **changed})
        return torch.cat([routing.gates, routing.indices], dim=-1).detach()

    reference = result()
    parts = {n: t for n, t in router.state_dict().items() if t.is_floating_point()}
    for name, part in parts.items():
        before = part.clone()
        with torch.no_grad():
            part.add_(1 + torch.rand(part.shape, generator=random(3)))
        assert not torch.equal(result(), reference), f"{name} is dropped"
        part.copy_(before)
    for name, value in inputs.items():
        if value.is_floating_point():
            other = value + torch.rand(value.shape, generator=random(3))
            assert not torch.equal(result(**{name: other}), reference), f"{name} is dropped"
    assert torch.equal(result(), reference)


@pytest.mark.parametrize("classes", [*COMPUTED, *TOWERS], ids=name_of)
def test_scores_of_a_stack_are_those_that_its_forward_selects_from(classes):
    router, inputs = stack(classes, impl="torch"), operands(classes)
    p, z, state = router.scores(H, MASK, **inputs)
    routing = router(H, MASK, **inputs)
    assert torch.equal(p, routing.probs) and torch.equal(z, routing.logits)
    assert set(state) == set(routing.state) and set(state) <= set(router.inputs)
    # What attention carries is of keys before the next tokens, which are not given here.
    goes_on = {n: v for n, v in state.items() if "cached_" not in n}
    again = router(H, MASK, **{**inputs, **goes_on})
    assert again.gates.shape == routing.gates.shape


@pytest.mark.parametrize("cls", ROUTERS, ids=lambda c: c.__name__)
def test_every_router_keeps_the_contract_of_scores(cls):
    torch.manual_seed(0)
    router, inputs = make(cls, impl="torch"), operands((cls,))
    torch.manual_seed(1)
    p, z, state = router.scores(H, MASK, **inputs)
    torch.manual_seed(1)
    routing = router(H, MASK, **inputs)
    assert p.shape == (2, 9, E)
    for actual, expected in ((z, routing.logits), (p, routing.probs)):
        assert expected is None or torch.equal(actual, expected)
    assert (z is None) == (routing.logits is None)
    assert set(state) == set(routing.state)
    if routing.probs is None and z is not None:
        by_scores = router.select(p, MASK, kind="probs", renorm=True)[1]
        biased = router.choice_bias is not None
        assert biased or torch.equal(by_scores, routing.indices)


# ------------------------------------------------------------------ what used to vanish


@pytest.mark.parametrize("classes", [
    (nn.DynamicTopP, nn.SimilaritySMoE), (nn.SimilaritySMoE, nn.SymphonySMoE),
    (nn.SymphonySMoE, nn.AttentionSMoE),
], ids=name_of)  # fmt: skip
def test_a_method_under_a_method_acts(classes):
    router = stack(classes, impl="torch")
    plain = stack((classes[0], nn.SMoE), impl="torch")
    plain.load_state_dict(router.state_dict(), strict=False)
    routing, other = router(H, **operands(classes)), plain(H)
    assert torch.equal(routing.logits, other.logits)
    assert not torch.equal(routing.gates, other.gates)


@pytest.mark.parametrize("method", [nn.SimilaritySMoE, nn.SymphonySMoE])
def test_a_method_over_acmoe_hands_the_clusters_on(method):
    first, second = stack((method, nn.ACMoE)), stack((method, nn.ACMoE))
    state = first(H).state
    assert set(state) == {"prev_indices", "prev_gates", "prev_h"}
    assert torch.equal(state["prev_indices"], first(H).indices)
    assert not torch.equal(second(H, **state).logits, second(H).logits)


def test_symphony_warns_of_its_first_step_unless_that_was_chosen():
    with pytest.warns(UserWarning, match="gates of zero until the first update_routers") as caught:
        router = nn.SymphonySMoE(D, E, K, impl="torch")
    assert [w.filename for w in caught] == [__file__] and router.cold_start == "literal"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nn.SymphonySMoE(D, E, K, cold_start="literal")
        nn.SymphonySMoE(D, E, K, cold_start="base")
        nn.SymphonySMoE(D, E, K, init="uniform")


def test_symphony_over_deepseek_is_deepseek_with_symphony():
    options = dict(n_group=4, topk_group=2, route_scale=2.5)
    base = nn.DeepSeekV3Router(D, E, K, **options)
    composed = nn.SymphonySMoE(D, E, K, base=base, cold_start="base")
    whole = nn.DeepSeekV3Router(D, E, K, symphony=True, cold_start="base", **options)
    with torch.no_grad():
        whole.weight.copy_(base.weight)
    for step in range(4):
        a, b = (router(normal(2, 9, D, seed=step)) for router in (composed, whole))
        assert torch.equal(a.gates, b.gates) and torch.equal(a.indices, b.indices)
        for router in (composed, whole):
            moe_mlir.update_routers(router)
        assert torch.equal(composed.adjacency, whole.adjacency)
        assert torch.equal(base.bias, whole.bias) and bool(base.bias.any())


def test_deepseek_smooths_the_scores_that_it_is_set_to():
    router = nn.DeepSeekV3Router(D, E, K, symphony=True, cold_start="base", score="softmax",
                                 impl="torch")  # fmt: skip
    routing = router(H)
    assert_close(routing.probs, routing.logits.double().softmax(-1), 1e-6)


def test_a_base_learns_once_a_step_as_it_does_alone():
    tower = stack((nn.SimilaritySMoE, nn.SymphonySMoE, nn.DeepSeekV3Router))
    graph, bias = tower.base.adjacency.clone(), tower.base.base.bias.clone()
    tower(H)
    assert torch.equal(tower.base.adjacency, graph) and torch.equal(tower.base.base.bias, bias)
    moe_mlir.update_routers(tower)
    assert not torch.equal(tower.base.adjacency, graph)
    assert not torch.equal(tower.base.base.bias, bias)
    assert not tower.base.co_selections.any() and not tower.base.base.load.any()
    tower.eval()(H)
    assert not tower.base.co_selections.any() and not tower.base.base.load.any()


def test_a_carried_adjacency_of_two_levels_goes_by_two_names():
    router = stack((nn.SymphonySMoE, nn.SymphonySMoE))
    graphs = dict(adjacency=torch.rand(E, E), base_adjacency=torch.rand(E, E))
    routing = router(H, **graphs)
    assert set(routing.state) == set(graphs)
    for name, graph in graphs.items():
        assert not torch.equal(routing.state[name], graph)
    swapped = router(H, adjacency=graphs["base_adjacency"], base_adjacency=graphs["adjacency"])
    assert not torch.equal(routing.gates, swapped.gates)
    assert not router.co_selections.any() and not router.base.co_selections.any()


def test_scales_of_all_levels_multiply_and_the_base_says_k():
    base = nn.SMoEDropout(D, E, K, k_max=E, total_steps=2, route_scale=3.0, impl="torch")
    router = nn.SimilaritySMoE(D, E, K, causal=True, base=base, route_scale=0.5, impl="torch")
    assert_close(router(H).gates.sum(-1), torch.full((2, 9), 1.5).double(), 1e-6)
    moe_mlir.update_routers(router)
    moe_mlir.update_routers(router)
    assert router(H).indices.shape[-1] == E


def test_raw_gates_of_a_base_stay_raw_unless_told_otherwise():
    switch = nn.Switch(D, E, impl="torch")
    raw = nn.SimilaritySMoE(D, E, 1, causal=True, base=switch, impl="torch")
    raw(H).gates.sum().backward()
    assert bool(switch.weight.grad.any())
    told = nn.SimilaritySMoE(D, E, 1, causal=True, base=switch, renorm=True, impl="torch")
    assert bool((told(H).gates == 1).all())


class OwnForward(nn.SMoE):
    def forward(self, h, mask=None):
        return super().forward(-h, mask)


class OwnLogits(nn.SMoE):
    def logits(self, h):
        return super().logits(-h)


class OwnScores(OwnForward):
    def scores(self, h, mask=None):
        return super().scores(-h, mask)


def test_a_router_of_ones_own_is_not_dropped_either():
    """What it does in its forward alone no method would see."""
    with pytest.raises(ValueError, match="its forward is its own and its scores are not"):
        nn.SymphonySMoE(D, E, K, base=OwnForward(D, E, K))
    torch.manual_seed(0)
    plain = nn.SMoE(D, E, K, impl="torch")
    for cls in (OwnLogits, OwnScores):
        base = cls(D, E, K, impl="torch")
        base.load_state_dict(plain.state_dict())
        router = nn.SimilaritySMoE(D, E, K, causal=True, base=base, impl="torch")
        assert torch.equal(router(H).logits, plain(-H).logits)


class TupleOfScores(nn.SMoE):
    def scores(self, h, mask=None):
        return tuple(super().scores(h, mask))


def test_a_tuple_of_scores_still_works_with_a_warning():
    torch.manual_seed(0)
    plain, old = nn.SMoE(D, E, K, impl="torch"), TupleOfScores(D, E, K, impl="torch")
    old.load_state_dict(plain.state_dict())
    for build in (lambda r: r, lambda r: nn.SimilaritySMoE(D, E, K, causal=True, base=r, impl="torch")):
        with pytest.warns(DeprecationWarning, match="TupleOfScores: .* return nn.Scores"):
            found = build(old)(H, MASK)
        expected = build(plain)(H, MASK)
        assert torch.equal(found.gates, expected.gates)
        assert torch.equal(found.indices, expected.indices)


class ScoresOfItsOwn(nn.SMoE):
    """Its choice goes by scores that no logits tell, and leaves a state."""

    kind = "probs"

    def scores(self, h, mask=None, *, before=None):
        p = self.logits(h).softmax(dim=-1).flip(-1)
        p = p if before is None else (p + before) / 2
        return nn.Scores(None, self.kind, p, {"before": p.detach()})


def test_scores_alone_make_a_router():
    router = ScoresOfItsOwn(D, E, K, impl="torch")
    first = router(H)
    assert first.logits is None and torch.equal(first.probs, router.scores(H).probs)
    assert torch.equal(first.indices, first.probs.topk(K).indices)
    assert not torch.equal(router(-H, **first.state).gates, router(-H).gates)


def test_a_graph_learns_from_a_base_without_logits():
    router = nn.SymphonySMoE(D, E, K, base=ScoresOfItsOwn(D, E, K, impl="torch"), impl="torch")
    chosen = router(H).state["before"].topk(K).indices
    load = torch.bincount(chosen.flatten(), minlength=E)
    assert torch.equal(router.co_selections.diagonal(), load)


def test_scores_of_nothing_are_refused():
    with pytest.raises(ValueError, match="expected 'logits' or 'given', found neither"):
        tuple(nn.Scores(None))


class Slots(nn.SMoE):
    def scores(self, h, mask=None):
        scores = super().scores(h, mask)
        scores.soft = dict(dispatch=scores.logits, combine=scores.logits)
        return scores


def test_slots_of_a_base_are_not_dropped():
    base = Slots(D, E, K, impl="torch")
    router = nn.SimilaritySMoE(D, E, K, causal=True, base=base, impl="torch")
    for _ in range(2):
        with pytest.raises(ValueError, match="Slots, whose dispatch, combine a method would drop"):
            router(H)
        base.register_forward_hook(lambda *_: None)


def test_what_is_no_base_or_no_input_is_refused():
    with pytest.raises(TypeError, match="expected 'base' to be a router or None, found Linear"):
        nn.SymphonySMoE(D, E, K, base=torch.nn.Linear(D, E))
    router = nn.SymphonySMoE(D, E, K, base=nn.ACMoE(D, E, K))
    with pytest.raises(TypeError, match="adjacency, prev_indices.*found 'prev_gate'"):
        router(H, prev_gate=1)
    with pytest.raises(TypeError, match=r"expected inputs among \(none\), found 'x'"):
        nn.SimilaritySMoE(D, E, K, causal=True)(H, x=1)


def test_keys_before_the_tokens_reach_an_attention_under_another_method():
    """Decoding: 4 of 9 keys are the tokens' own; the mask is of all keys."""
    x = operands((nn.AttentionSMoE,))
    late = {n: x[n][..., 5:, :] for n in ("q", "attn_output")}
    before = torch.rand(2, 5, E, generator=random(6)).softmax(-1)
    x = {**x, "cached_probs": before, "cached_entropy": torch.rand(2, 3).double(), **late}
    mask = MASK.clone()
    mask[:, 0] = True
    router = stack((nn.SymphonySMoE, nn.AttentionSMoE), impl="torch")
    routing = router(H[:, 5:], mask, **x)
    assert routing.indices.shape == (2, 4, K)
    assert torch.equal(routing.indices[..., 0] < 0, ~mask[:, 5:])
    alone = router.base(H[:, 5:], mask, **x)
    assert_close(routing.probs, (alone.probs @ router.adjacency.T).double(), 1e-6)
    assert int(router.co_selections.diagonal().sum()) == K * int(mask[:, 5:].sum())
