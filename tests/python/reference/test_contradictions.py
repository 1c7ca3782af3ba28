"""How section 7 of docs/Spec.md resolves what the papers contradict; named after its entries."""

import math

import pytest
import torch
from op_judge import assert_close, random

from moe_mlir import metrics, reference


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=random(seed))


def test_c2_outside_of_the_selection_is_zero_for_probabilities():
    """With -inf outside, A.3's renormalisation would divide by -inf."""
    p = normal(6, 5).softmax(-1)
    gates, indices = reference.topk_renorm(p, 2, kind="probs")
    dense = reference.densify(gates, indices, 5)
    kept = torch.where(p >= p.topk(2).values[:, 1:], p, 0.0)
    assert_close(dense, kept / kept.sum(-1, keepdim=True), 1e-15)


def posterior_inputs():
    return dict(
        q=normal(1, 2, 4, 3), k=normal(1, 2, 4, 3, seed=1), attn_output=normal(1, 4, 5, seed=2),
        v=normal(1, 2, 4, 3, seed=3), wo=normal(2, 5, 3, seed=4),
        probs=normal(1, 4, 6, seed=5).softmax(-1), causal=False,
    )  # fmt: skip


def lemma_1(x, sigma):
    """A'_h of Lemma 1 with the covariance sigma^2 I, in loops over Python floats."""
    rows = torch.zeros(2, 4, 4, dtype=torch.float64)
    for h in range(2):
        for i in range(4):
            weight = []
            for j in range(4):
                prior = math.exp(float(x["q"][0, h, i] @ x["k"][0, h, j]) / math.sqrt(3))
                mean = x["wo"][h] @ x["v"][0, h, j]
                square = float((x["attn_output"][0, i] - mean).square().sum())
                weight.append(prior * math.exp(-square / (2 * sigma**2)))
            rows[h, i] = torch.tensor(weight, dtype=torch.float64) / sum(weight)
    return rows


@pytest.mark.parametrize("sigma", [0.8, 2.5])
def test_c3_the_gaussians_have_sigma_squared(sigma):
    x = posterior_inputs()
    for head in (0, 1):
        p, _ = reference.attention_posterior(**x, sigma=sigma, head_mode=head)
        assert_close(p[0], lemma_1(x, sigma)[head] @ x["probs"][0], 1e-12)
    identity, _ = reference.attention_posterior(**x, sigma=1.0, head_mode=0)
    assert float((identity[0] - lemma_1(x, sigma)[0] @ x["probs"][0]).abs().max()) > 1e-3


def test_c5_the_means_carry_the_number_of_heads():
    """u = (1/H) sum_h A_h V_h W_O,h: without the factor the means are H times too small."""
    heads, d, dv = 2, 6, 3
    out, v = normal(d, heads * dv), normal(heads, 4, dv, seed=1)
    weights = normal(heads, 4, 4, seed=2).softmax(-1)
    u = (weights @ v).transpose(0, 1).reshape(4, heads * dv) @ out.T
    wo = heads * out.view(d, heads, dv).transpose(0, 1)
    means = torch.stack([v[h] @ wo[h].T for h in range(heads)])
    assert_close(torch.stack([weights[h] @ means[h] for h in range(heads)]).mean(0), u, 1e-13)


def test_c7_the_hyper_router_renormalises():
    """P2 prints TopK(softmax); its derivation and its code softmax the top k."""
    from moe_mlir import nn

    router = nn.HyperRouter(6, 5, 2, impl="torch").double()
    routing = router(normal(7, 6))
    assert_close(routing.gates.sum(-1), torch.ones(7, dtype=torch.float64), 1e-14)
    assert_close(routing.gates, routing.logits.topk(2).values.softmax(-1), 1e-14)


def test_c11_weights_have_mean_one_in_each_cluster_by_default():
    s, count = normal(4, 7).abs() + 0.05, torch.tensor([3, 1, 4, 2])
    ones = torch.ones(4, dtype=torch.float64)
    assert_close(reference.dispersion_weights(s, count).mean(-1), ones, 1e-14)
    feature = reference.dispersion_weights(s, count, scale="feature")
    assert_close(feature.mean(0), torch.ones(7, dtype=torch.float64), 1e-14)
    whole = reference.dispersion_weights(s, count, scale="global")
    assert_close(whole.mean(), torch.ones((), dtype=torch.float64), 1e-14)
    literal = reference.dispersion_weights(s, count, scale="dispersion")
    assert_close((1 / literal).mean(-1), ones, 1e-14)


def test_c14_the_measure_is_the_deviation_and_pairwise_stays_an_option():
    h, assign = normal(12, 3), torch.zeros(12, dtype=torch.int64)
    mad, _, _ = reference.mad_dispersion(h, assign, 1)
    assert_close(mad[0], (h - h.mean(0)).abs().mean(0), 1e-14)
    pairwise, _, _ = reference.mad_dispersion(h, assign, 1, measure="pairwise")
    assert_close(pairwise[0], (h[:, None] - h[None]).abs().mean((0, 1)), 1e-14)
    variance, _, _ = reference.mad_dispersion(h, assign, 1, measure="variance")
    assert_close((h[:, None] - h[None]).square().mean((0, 1)), 2 * variance[0], 1e-13)


def test_c16_balanced_layers_cannot_be_more_unstable_than_two_over_e():
    for seed in range(5):
        layers = [torch.rand(160, generator=random(seed + 9 * i)).argsort() % 16 for i in range(2)]
        assert float(metrics.router_instability(*layers)) <= 2 / 16
    collapsed = torch.zeros(160, dtype=torch.int64)
    assert float(metrics.router_instability(collapsed, layers[0])) > 0.6


def test_dispersion_weights_e15_zero_dispersion_is_finite():
    s, count = torch.zeros(2, 4, dtype=torch.float64), torch.tensor([1, 3])
    s[1, 0] = 0.5
    m = reference.dispersion_weights(s, count, eps=1e-3)
    assert_close(m[0], torch.ones(4, dtype=torch.float64), 0.0)
    raw = reference.dispersion_weights(s, count, eps=1e-3, scale="none")
    assert_close(raw, 1 / (s + 1e-3), 1e-12)
    capped = reference.dispersion_weights(s, count, eps=1e-3, scale="none", clamp=0.5)
    assert_close(capped, torch.minimum(raw, 0.5 * raw.mean()), 1e-9)
    # eps is Theorem 1's alpha_k: M_k / d is its optimum w_k (3.6).
    d, alpha = 4, 1e-3
    weight = reference.dispersion_weights(s[1:], count[1:], eps=alpha)[0] / d
    lam = d / (1 / (s[1] + alpha)).sum()
    assert_close(weight, lam / d / (s[1] + alpha), 1e-12)
