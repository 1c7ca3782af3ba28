"""The judge itself: identities that docs/Spec.md marks as verified, and hand-made cases."""

import math

import pytest
import torch
from op_judge import assert_close, random

from moe_mlir import reference


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=random(seed), dtype=torch.float64)


def test_order_is_value_descending_then_index_ascending():
    scores = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0]])
    assert reference.rank_experts(scores).tolist() == [[1, 2, 4, 3, 0]]


def test_order_puts_nan_below_minus_infinity():
    scores = torch.tensor([[math.nan, -math.inf, 0.0, math.inf, -math.inf]])
    assert reference.rank_experts(scores).tolist() == [[3, 2, 1, 4, 0]]


def test_order_holds_both_zeros_equal():
    scores = torch.tensor([[-0.0, 0.0, -0.0]])
    assert reference.rank_experts(scores).tolist() == [[0, 1, 2]]


def test_renormalised_logits_equal_renormalised_probabilities():
    z = normal(64, 17)
    gates, indices = reference.topk_renorm(z, 4)
    of_probs, same = reference.topk_renorm(z.softmax(-1), 4, kind="probs")
    assert torch.equal(indices, same)
    assert_close(gates, of_probs, 1e-14)


def test_one_selected_expert_renormalised_gets_no_gradient():
    z = normal(8, 5).requires_grad_()
    gates, _ = reference.topk_renorm(z, 1)
    assert torch.equal(gates, torch.ones_like(gates))
    (gates * normal(8, 1, seed=1)).sum().backward()
    assert float(z.grad.abs().max()) < 1e-15


def test_similarity_is_attention_with_expert_probabilities_as_values():
    u, ws, e = normal(2, 9, 5), normal(5, 5, seed=1), normal(2, 9, 3, seed=2).softmax(-1)
    p, _ = reference.similarity_inform(u, e, causal=True, weight=ws, tau=2.0)
    attention = torch.nn.functional.scaled_dot_product_attention(
        u @ ws, u, e, is_causal=True, scale=0.5
    )
    assert_close(p, attention, 1e-13)


def test_similarity_obeys_the_entropy_bound_of_proposition_1():
    u, e = normal(1, 12, 4), normal(1, 12, 6, seed=1).softmax(-1)
    p, lse = reference.similarity_inform(u, e, causal=False)
    weights = (u @ u.mT - lse[..., None]).exp()
    bound = weights @ reference.entropy(e)[..., None]
    assert bool((reference.entropy(p) <= bound[..., 0] + reference.entropy(weights) + 1e-12).all())


def test_causal_similarity_does_not_see_the_future():
    u, e = normal(1, 8, 4), normal(1, 8, 3, seed=1).softmax(-1)
    changed = u.clone()
    changed[:, -1] += 1.0
    before, _ = reference.similarity_inform(u, e, causal=True)
    after, _ = reference.similarity_inform(changed, e, causal=True)
    assert torch.equal(before[:, :-1], after[:, :-1])
    literal, _ = reference.similarity_inform(changed, e, causal=False)
    assert not torch.allclose(
        literal[:, 0], reference.similarity_inform(u, e, causal=False)[0][:, 0]
    )


def posterior_operands(n=7, heads=3, d=5, experts=4):
    return dict(
        q=normal(2, heads, n, 4),
        k=normal(2, heads, n, 4, seed=1),
        attn_output=normal(2, n, d, seed=2),
        probs=normal(2, n, experts, seed=3).softmax(-1),
        v=normal(2, heads, n, 4, seed=4),
        wo=normal(heads, d, 4, seed=5),
    )


def densities(x):
    """A'_h and H' by the products of probabilities of Lemma 1, without logarithms."""
    prior = (x["q"] @ x["k"].mT / 2).softmax(-1)
    means = x["v"] @ x["wo"].mT
    squared = ((x["attn_output"][:, None, :, None] - means[:, :, None]) ** 2).sum(-1)
    joint = prior * (-squared / 2).exp()
    total = joint.sum(-1, keepdim=True)
    return prior, joint / total, (total / total.sum(1, keepdim=True))[..., 0]


def test_posterior_of_all_heads_is_lemma_1():
    x = posterior_operands()
    _, posterior, heads = densities(x)
    p, head = reference.attention_posterior(**x, causal=False, head_mode="all")
    expected = (heads[..., None] * (posterior @ x["probs"][:, None])).sum(1)
    assert_close(p, expected, 1e-12)
    assert head.tolist() == [-1, -1]


def test_posterior_of_all_heads_needs_the_prior_normaliser():
    x = posterior_operands()
    _, posterior, heads = densities(x)
    prior_logits = x["q"] @ x["k"].mT / 2
    wrong = (heads.log() + prior_logits.logsumexp(-1)).softmax(1)
    p, _ = reference.attention_posterior(**x, causal=False, head_mode="all")
    without = (wrong[..., None] * (posterior @ x["probs"][:, None])).sum(1)
    assert float((p - without).abs().max()) > 1e-3


def test_posterior_chooses_the_head_of_least_prior_entropy():
    x = posterior_operands()
    prior, posterior, _ = densities(x)
    expected = reference.entropy(prior).mean(-1).argmin(-1)
    p, head = reference.attention_posterior(**x, causal=False)
    assert torch.equal(head, expected)
    assert_close(p, torch.stack([posterior[b, h] @ x["probs"][b] for b, h in enumerate(head)]), 1e-12)
    ent, _ = reference.attention_entropy(x["q"], x["k"], causal=False)
    assert_close(ent, reference.entropy(prior).mean(-1), 1e-12)


def test_attention_output_is_the_mean_of_the_gaussians():
    """With wo = heads * slices of torch's out_proj, u = (1/H) sum_h A_h v'_h."""
    torch.manual_seed(0)
    mha = torch.nn.MultiheadAttention(8, 2, bias=False, batch_first=True, dtype=torch.float64)
    x = normal(1, 6, 8)
    u, _ = mha(x, x, x)
    q, k, v = (x @ mha.in_proj_weight.T).view(1, 6, 3, 2, 4).permute(2, 0, 3, 1, 4)
    wo = 2 * mha.out_proj.weight.view(8, 2, 4).permute(1, 0, 2)
    means = (q @ k.mT / 2).softmax(-1) @ (v @ wo.mT)
    assert_close(means.mean(1), u, 1e-13)


def test_dispersion_lies_between_half_and_whole_pairwise():
    h = normal(40, 6)
    assign = torch.arange(40) % 3
    mad, mean, count = reference.mad_dispersion(h, assign, 3)
    pairwise, _, _ = reference.mad_dispersion(h, assign, 3, measure="pairwise")
    variance, _, _ = reference.mad_dispersion(h, assign, 3, measure="variance")
    assert bool(((mad <= pairwise) & (pairwise <= 2 * mad)).all())
    for expert in range(3):
        rows = h[assign == expert]
        assert_close(mean[expert], rows.mean(0), 1e-14)
        assert_close(mad[expert], (rows - rows.mean(0)).abs().mean(0), 1e-14)
        assert_close(variance[expert], rows.var(0, correction=0), 1e-14)
        assert int(count[expert]) == len(rows)


def test_cluster_weights_are_inverse_dispersions_of_mean_one():
    s, eps = normal(1, 9).abs(), 0.05
    m = reference.dispersion_weights(s, torch.ones(1), eps=eps)
    expected = (1 / (s + eps)) / (1 / (s + eps)).mean()
    assert_close(m, expected, 1e-14)
    assert_close(m.mean(-1), torch.ones(1, dtype=torch.float64), 1e-14)


@pytest.mark.parametrize("scale", ["cluster", "feature", "global", "global_preclamp", "none"])
def test_weights_e14_an_empty_cluster_is_one_and_leaves_the_others_alone(scale):
    s = normal(3, 5).abs() + 0.1
    without = reference.dispersion_weights(s[:2], torch.tensor([4, 2]), scale=scale, clamp=3.0)
    s[2] = 0
    m = reference.dispersion_weights(s, torch.tensor([4, 2, 0]), scale=scale, clamp=3.0)
    assert_close(m[:2], without, 1e-15)
    assert torch.equal(m[2], torch.ones(5, dtype=torch.float64))


def test_public_lm_preset_lets_an_empty_cluster_shrink_the_others():
    s = torch.cat([normal(3, 5).abs() + 0.1, torch.zeros(1, 5, dtype=torch.float64)])
    preset = dict(eps=1e-4, clamp=10, scale="feature")
    m = reference.dispersion_weights(s, torch.tensor([4, 2, 3, 0]), include_empty=True, **preset)
    own = reference.dispersion_weights(s, torch.tensor([4, 2, 3, 0]), **preset)
    assert float(m[:3].max()) < 0.2 * float(own[:3].max())


def test_ac_logits_are_plain_logits_without_a_previous_layer():
    h, emb = normal(6, 4), normal(3, 4, seed=1)
    m = normal(3, 4, seed=2).exp()
    none = torch.full((6, 1), -1)
    assert_close(reference.ac_logits(h, m, none, emb), h @ emb.T, 1e-15)
    prev = torch.tensor([[0], [1], [2], [0], [1], [2]])
    expected = torch.stack([(h[i] * m[prev[i, 0]]) @ emb.T for i in range(6)])
    assert_close(reference.ac_logits(h, m, prev, emb), expected, 1e-14)


def test_ac_logits_are_linear_in_the_mixture_of_clusters():
    h, emb, m = normal(6, 4), normal(3, 4, seed=1), normal(3, 4, seed=2).exp()
    prev = torch.tensor([[0, 1]] * 6)
    gates = torch.tensor([[0.6, 0.2]] * 6, dtype=torch.float64)
    mixed = reference.ac_logits(h, m, prev, emb, prev_gates=gates)
    first, second = (reference.ac_logits(h, m, prev[:, i : i + 1], emb) for i in (0, 1))
    assert_close(mixed, 0.75 * first + 0.25 * second, 1e-13)


def test_row_norm_needs_only_the_loads():
    k = 3
    idx = normal(50, 8).topk(k).indices
    a = reference.adjacency_update(torch.zeros(8, 8, dtype=torch.float64), idx, beta=0.0)
    used = torch.bincount(idx.reshape(-1), minlength=8) > 0
    assert_close(a.diagonal()[used], torch.full((8,), 1 / k, dtype=torch.float64)[used], 1e-15)
    assert_close(a.sum(1)[used], torch.ones(8, dtype=torch.float64)[used], 1e-15)
    col = reference.adjacency_update(a * 0, idx, beta=0.0, norm="col")
    assert_close(col, a.T, 1e-15)
    eq7 = reference.adjacency_update(a * 0, idx, beta=0.0, norm="eq7")
    assert_close(eq7.sum(0)[used], torch.full((8,), float(k), dtype=torch.float64)[used], 1e-14)


def test_live_rows_of_the_average_sum_to_one_minus_beta_to_the_t():
    idx = normal(200, 4).topk(2).indices
    a = torch.zeros(4, 4, dtype=torch.float64)
    for step in range(1, 5):
        a = reference.adjacency_update(a, idx, beta=0.9)
        assert_close(a.sum(1), torch.full((4,), 1 - 0.9**step, dtype=torch.float64), 1e-14)


def test_similarity_and_symphony_commute():
    u, e = normal(1, 9, 4), normal(1, 9, 3, seed=1).softmax(-1)
    a = normal(3, 3, seed=2).abs()
    mixed, _ = reference.similarity_inform(u, e, causal=False)
    smoothed, _ = reference.similarity_inform(u, reference.adjacency_gate(e, a), causal=False)
    assert_close(reference.adjacency_gate(mixed, a), smoothed, 1e-13)
