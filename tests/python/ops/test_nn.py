"""Router modules: compiled against plain torch, state, and the graph of Symphony."""

import pytest
import torch
from op_judge import assert_close, random

import moe_mlir
from moe_mlir import nn, reference

OPTIONS = dict(d_model=12, num_experts=8, k=2)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=random(seed))


def pair(router, **options):
    torch.manual_seed(0)
    compiled, plain = (router(**OPTIONS, **options, impl=impl) for impl in ("moe", "torch"))
    plain.load_state_dict(compiled.state_dict())
    return compiled, plain


def compare(a, b, mask=None):
    assert torch.equal(a.indices, b.indices)
    for name in ("gates", "probs", "logits"):
        if getattr(a, name) is not None:
            assert_close(getattr(a, name), getattr(b, name).double(), 1e-5, name)
    if mask is not None:
        assert bool((a.indices[~mask] == -1).all()) and not a.gates[~mask].any()


H = normal(2, 9, 12)
MASK = torch.rand(2, 9, generator=random(5)) > 0.3


@pytest.mark.parametrize(
    "router,options",
    [
        (nn.SMoE, {}),
        (nn.SMoE, dict(renorm=False, bias=False, route_scale=2.0)),
        (nn.SimilaritySMoE, dict(causal=True)),
        (
            nn.SimilaritySMoE,
            dict(causal=False, similarity=True, learn_tau=True, restrict="entropy"),
        ),
        (nn.SymphonySMoE, dict(cold_start="base")),
    ],
)
def test_compiled_router_equals_plain_torch(router, options):
    a, b = pair(router, **options)
    compare(a(H, MASK), b(H, MASK), MASK)
    compare(a(H), b(H))


def test_ac_router_takes_the_state_of_the_previous_layer():
    for mix, source in ((1, "previous"), (2, "current")):
        a, b = pair(nn.ACMoE, mix=mix, stat_source=source)
        first, also = a(H, MASK), b(H, MASK)
        compare(first, also, MASK)  # without a previous layer: plain SMoE
        second = a(2 * H + 1, MASK, **first.state)
        compare(second, b(2 * H + 1, MASK, **also.state), MASK)
        plain = a(2 * H + 1, MASK)
        assert float((second.logits - plain.logits).detach().abs().max()) > 1e-3


def attention(n=9, nk=9):
    return dict(
        q=normal(2, 3, n, 4, seed=1),
        k=normal(2, 3, nk, 4, seed=2),
        attn_output=normal(2, n, 12, seed=3),
        v=normal(2, 3, nk, 4, seed=4),
        wo=0.3 * normal(3, 12, 4, seed=5),
    )


@pytest.mark.parametrize("mode", ("min_entropy", "all"))
def test_attention_router_equals_plain_torch(mode):
    a, b = pair(nn.AttentionSMoE, causal=True, head_mode=mode)
    compare(a(H, MASK, **attention()), b(H, MASK, **attention()), MASK)


def test_attention_router_without_a_visible_key_keeps_its_own_probabilities():
    a, _ = pair(nn.AttentionSMoE, causal=True, exclude_self=True)
    routing = a(H, **attention())
    assert_close(routing.probs[:, 0], a.logits(H)[:, 0].softmax(-1).double(), 1e-6)


def test_attention_router_carries_probabilities_of_cached_keys():
    a, _ = pair(nn.AttentionSMoE, causal=True, head_mode=0)
    x = attention()
    whole = a(H, **x)
    prefix = {name: t[..., :6, :] if name != "wo" else t for name, t in x.items()}
    state = a(H[:, :6], **prefix).state
    rest = dict(x, q=x["q"][..., 6:, :], attn_output=x["attn_output"][:, 6:])
    step = a(H[:, 6:], **rest, **state)
    assert_close(step.probs, whole.probs[:, 6:].double(), 1e-6)


def test_symphony_counts_in_training_and_learns_once_a_step():
    router, _ = pair(nn.SymphonySMoE)
    start = router(H, MASK)
    assert not start.gates.any()  # E17: an untrained graph routes nothing
    router(2 * H, MASK)
    assert not router.adjacency.any()
    base = [moe_mlir.topk_renorm(router.logits(h), 2, mask=MASK)[1] for h in (H, 2 * H)]
    expected = reference.adjacency_update(torch.zeros(8, 8).double(), torch.cat(base))
    moe_mlir.update_routers(torch.nn.Sequential(router))
    assert_close(router.adjacency, expected, 1e-6)
    assert not router.co_selections.any()


def test_symphony_does_not_count_in_evaluation():
    router, _ = pair(nn.SymphonySMoE)
    router.eval()
    router(H)
    assert not router.co_selections.any()


def test_symphony_with_a_graph_of_the_caller():
    router, plain = pair(nn.SymphonySMoE)
    graph = torch.rand(8, 8, generator=random(6))
    a, b = router(H, MASK, adjacency=graph), plain(H, MASK, adjacency=graph)
    compare(a, b, MASK)
    assert_close(a.state["adjacency"], b.state["adjacency"].double(), 1e-6)
    assert not router.co_selections.any()
    again = router(H, MASK, **a.state)
    assert not torch.equal(again.probs, a.probs)


def test_the_graph_is_saved_with_the_model():
    router, _ = pair(nn.SymphonySMoE)
    assert {"adjacency", "co_selections"} <= set(router.state_dict())


def test_wrong_options_are_refused():
    with pytest.raises(ValueError, match=r"SMoE: expected 'k' in \[1, 8\]"):
        nn.SMoE(12, 8, 9)
    with pytest.raises(ValueError, match="expected 'impl' to be 'moe' or 'torch'"):
        nn.SMoE(12, 8, 2, impl="cuda")
    with pytest.raises(ValueError, match="expected 'stat_source'"):
        nn.ACMoE(12, 8, 2, stat_source="next")
