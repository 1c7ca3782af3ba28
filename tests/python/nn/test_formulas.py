"""Each method against its paper's formula, written out in float64."""

import math
import re

import pytest
import torch
from methods import D, E, K, attention, normal, previous
from op_judge import assert_close, random

import moe_mlir
from moe_mlir import nn, reference

H = normal(2, 9, D).double()



def make(cls, *args, **options):
    torch.manual_seed(0)
    return cls(D, E, *args, impl="torch", **options).double()


def top(scores, k=K):
    """Values and indices of the k best; the inputs have no ties."""
    return scores.topk(k, dim=-1)


def test_smoe_is_the_softmax_of_the_top_k():
    router = make(nn.SMoE, K)
    values, indices = top(H @ router.weight.T + router.bias)
    routing = router(H)
    assert torch.equal(routing.indices, indices)
    assert_close(routing.gates, values.softmax(-1), 1e-14)


@pytest.mark.parametrize("cls,k", [(nn.Switch, 1), (nn.VMoE, 2)])
def test_switch_and_vmoe_take_the_top_k_of_the_softmax(cls, k):
    router = make(cls, k).eval()
    z = H @ router.weight.T + (0 if router.bias is None else router.bias)
    values, indices = top(z.softmax(-1), k)
    routing = router(H)
    assert torch.equal(routing.indices, indices)
    assert_close(routing.gates, values, 1e-14)


def test_switch_with_renorm_would_not_train_its_router():
    grads = []
    for cls in (nn.Switch, nn.SMoE):
        router = make(cls, 1)
        router(H).gates.square().sum().backward()
        grads.append(float(router.weight.grad.abs().max()))
    assert grads[0] > 1e-3 and grads[1] == 0


def test_vmoe_noise_is_an_operand_and_training_draws_it():
    router = make(nn.VMoE, K)
    noise = normal(2, 9, E).double() / E
    assert_close(router(H, noise=noise).logits, H @ router.weight.T + noise, 1e-14)
    drawn = router(H).logits.detach() - H @ router.weight.detach().T
    assert 0.7 / E < float(drawn.std()) < 1.3 / E
    assert not (router.eval()(H).logits - H @ router.weight.T).any()


def test_xmoe_is_the_cosine_in_a_small_space_over_tau():
    router = make(nn.XMoE, K, d_embedding=5, tau=0.3)
    token = H @ router.omega.T
    cosine = torch.nn.functional.cosine_similarity(token[..., None, :], router.emb, dim=-1)
    values, indices = top(cosine / 0.3)
    routing = router(H)
    assert torch.equal(routing.indices, indices)
    assert_close(routing.gates, values.softmax(-1), 1e-13)


def test_xmoe_of_the_public_code_normalises_the_experts_alone():
    router = make(nn.XMoE, K, norm_token=False, finite="tensor")
    emb = router.emb / router.emb.norm(dim=-1, keepdim=True)
    assert_close(router(H).logits, H @ router.omega.T @ emb.T, 1e-13)
    h = H.clone()
    h[0, 0, 0] = math.inf
    least = router(H.flatten(0, 1)[1:]).logits.min()
    assert_close(router(h).logits[0, 0], least.expand(E).detach(), 1e-12)


def test_stablemoe_as_benchmarked_normalises_the_centroids():
    router = make(nn.StableMoE, K)
    z = H @ (router.emb / router.emb.norm(dim=-1, keepdim=True)).T
    values, indices = top(z)
    assert torch.equal(router(H).indices, indices)
    assert_close(router(H).gates, values.softmax(-1), 1e-14)


def test_stablemoe_of_its_paper_freezes_the_distilled_choice():
    router = make(nn.TwoStageStableMoE, 1, vocabulary=20)
    tokens = torch.arange(18).reshape(2, 9)
    first = router(H, tokens=tokens)
    z = H @ router.centroids.T
    assert torch.equal(first.indices, z.argmax(-1, keepdim=True))
    assert_close(first.gates, z.amax(-1, keepdim=True).sigmoid(), 1e-14)

    optimizer = torch.optim.Adam([router.token_embedding, router.distilled], lr=0.05)
    for _ in range(60):
        optimizer.zero_grad()
        loss = router.distill_loss(tokens, first.indices)
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 0.1
    router.freeze()
    second = router(H, tokens=tokens)
    assert torch.equal(second.indices, first.indices)
    assert not router.distilled.requires_grad and router.centroids.requires_grad
    other = router(-H, tokens=tokens)
    assert torch.equal(other.indices, first.indices)
    chosen = (-H @ router.centroids.T).gather(-1, first.indices).sigmoid()
    assert_close(other.gates, chosen, 1e-14)
    with pytest.raises(ValueError, match="expected 'tokens' in stage 2"):
        router(H)


def test_hyper_router_makes_its_weights_and_folds_them():
    router = make(nn.HyperRouter, K, d_embedding=5, d_hidden=7)
    with torch.no_grad():
        out = torch.relu(router.w1 @ router.embedding + router.b1)
        out = (router.w2 @ out + router.b2).reshape(E, D + 1)
    z = H @ out[:, :-1].T + out[:, -1]
    assert_close(router(H).logits, z, 1e-13)
    router.eval()
    assert_close(router(H).logits, z, 1e-13)
    assert_close(router.weight, out[:, :-1], 1e-14)


def test_hyper_router_recomputes_in_training_and_refolds_at_eval():
    router = make(nn.HyperRouter, K).eval().train()
    before = router.weight.clone()
    with torch.no_grad():
        router.embedding += 1
    assert float((router(H).logits - (H @ before.T + router.bias)).detach().abs().max()) > 1e-3
    assert torch.equal(router.weight, before)  # until eval
    assert not torch.equal(router.eval().weight, before)


def test_c9_hyper_router_has_1122576_frozen_parameters_a_layer():
    """The paper's 1,112,576 has a wrong digit; four layers are 4,490,304."""
    router = nn.HyperRouter(256, 16, 2)
    frozen = sum(getattr(router, name).numel() for name in ("w1", "b1", "w2", "b2"))
    assert frozen == 1_122_576 and 4 * frozen == 4_490_304
    assert sum(p.numel() for p in router.parameters()) == 256


class OutputsOnly(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, h):
        return self.layer(h)[0]


def test_hyper_router_in_evaluation_is_an_smoe_op_for_op():
    targets, ops = [], []
    for router in (nn.HyperRouter(D, E, K), nn.SMoE(D, E, K)):
        layer = nn.MoELayer(router.eval(), 10)
        program = torch.export.export(layer, (H.float(),))
        targets.append([str(n.target) for n in program.graph.nodes if n.op == "call_function"])
        text = moe_mlir.export(OutputsOnly(layer), (H.float(),)).text
        # What makes the weights stays an argument that nothing reads.
        body = text[text.index("-> ("):]
        ops.append(re.findall(r"\b(?:moe|linalg|tensor|arith|scf|math)\.\w+", body))
    assert targets[0] == targets[1]
    assert ops[0] == ops[1] and "moe.router_logits" in ops[0] and "moe.hyper_router" not in ops[0]


def test_c8_k_grows_between_the_schedules_ends():
    router = make(nn.SMoEDropout, 2, k_max=8, total_steps=4)
    seen = [router.k]
    for _ in range(5):
        moe_mlir.update_routers(torch.nn.Sequential(router))
        seen.append(router.k)
    assert seen == [2, 4, 5, 6, 8, 8]  # 3.5 and 6.5 round to even
    assert router(H).indices.shape[-1] == 8
    composed = nn.SimilaritySMoE(D, E, 8, causal=True, base=router, impl="torch")
    router.set_step(0)
    assert composed.k == 2


def test_thor_is_a_random_choice_with_equal_gates():
    random_scores = torch.rand(2, 9, E, generator=random(0))
    routing = make(nn.THOR, K)(H, random=random_scores)
    assert torch.equal(routing.indices, top(random_scores)[1])
    assert routing.gates.unique().tolist() == [0.5]
    a, b = normal(6, 10).double(), normal(6, 10, seed=1).double()
    targets, p, q = torch.arange(6), a.softmax(-1), b.softmax(-1)
    kl = (p * (p / q).log()).sum(-1).mean() + (q * (q / p).log()).sum(-1).mean()
    ce = torch.nn.functional.cross_entropy
    expected = (ce(a, targets) + ce(b, targets)) / 2 + 3 * kl / 2
    assert_close(nn.thor_loss(a, b, targets, alpha=3), expected, 1e-12)


def test_similarity_mixes_the_base_routers_probabilities():
    for base in (None, make(nn.XMoE, K), make(nn.SMoEDropout, K), make(nn.GLaM, K)):
        options = dict(causal=False, tau=3.0, base=base, impl="torch")
        router = nn.SimilaritySMoE(D, E, K, **options).double()
        e = (router.logits(H)).softmax(-1)
        p = (H @ H.mT / 3).softmax(-1) @ e
        values, indices = top(p)
        routing = router(H)
        assert torch.equal(routing.indices, indices)
        assert_close(routing.gates, values / values.sum(-1, keepdim=True), 1e-13)


def test_attention_router_equals_lemma_1_and_the_full_posterior():
    x = {name: t.double() for name, t in attention().items()}
    prior = (x["q"] @ x["k"].mT / 2).softmax(-1)
    means = x["v"] @ x["wo"].mT
    density = (-(x["attn_output"][:, None, :, None] - means[:, :, None]).square().sum(-1) / 2 / 1.7**2).exp()
    joint = prior * density
    for mode in ("all", 1):
        router = make(nn.AttentionSMoE, K, causal=False, sigma=1.7, head_mode=mode)
        e = router.logits(H).softmax(-1)
        weight = joint if mode == "all" else joint[:, 1:2]
        weight = weight / weight.sum((1, 3), keepdim=True)
        assert_close(router(H, **x).probs, (weight @ e[:, None]).sum(1), 1e-12)


def test_ac_router_stretches_the_features_its_cluster_agrees_on():
    router = make(nn.ACMoE, K, mix=2)
    state = previous()
    state = {n: t.double() if t.is_floating_point() else t for n, t in state.items()}
    label = state["prev_indices"][..., 0]
    m = torch.ones(E, D, dtype=torch.float64)
    for e in range(E):
        rows = state["prev_h"][label == e]
        if len(rows):
            mad = (rows - rows.mean(0)).abs().mean(0)
            m[e] = (1 / (mad + 1e-4)) / (1 / (mad + 1e-4)).mean()
    share = state["prev_gates"] / state["prev_gates"].sum(-1, keepdim=True)
    metric = (share[..., None] * m[state["prev_indices"]]).sum(-2)
    assert_close(router(H, **state).logits, (H * metric) @ router.weight.T, 1e-10)


def test_c12_the_statistics_come_from_the_previous_layers_tokens_by_default():
    state = previous()
    state["prev_h"] = state["prev_h"].double()
    previous_source = make(nn.ACMoE, K)(H, **state).logits
    current = make(nn.ACMoE, K, stat_source="current")(H, **state).logits
    by_hand = make(nn.ACMoE, K)(H, **{**state, "prev_h": H}).logits
    assert torch.equal(current, by_hand)
    assert float((previous_source - current).detach().abs().max()) > 1e-2


def test_c13_experts_see_h_and_not_the_stretched_h():
    layer = nn.MoELayer(make(nn.ACMoE, K), 10).double()
    y, routing = layer(H, **{**previous(), "prev_h": previous()["prev_h"].double()})
    flat = H.reshape(-1, D)
    expected = torch.zeros_like(flat)
    for t in range(18):
        for gate, e in zip(routing.gates.reshape(18, K)[t], routing.indices.reshape(18, K)[t]):
            hidden = torch.nn.functional.gelu(layer.w_in[e] @ flat[t])
            expected[t] += gate * (layer.w_out[e] @ hidden)
    assert_close(y.reshape(-1, D), expected.detach(), 1e-12)


def test_ac_presets_are_those_of_the_public_code_trap2():
    s, count = normal(4, D).double().abs() + 0.1, torch.tensor([3, 0, 5, 2])
    s[1] = 0  # an empty cluster enters the means
    w = 1 / (s + 1e-4)
    swin = reference.dispersion_weights(s, count, **reference.DISPERSION_PRESETS["swin"])
    assert_close(swin, torch.minimum(w, 1.5 * w.mean()) / w.mean(), 1e-12)
    lm = reference.dispersion_weights(s, count, **reference.DISPERSION_PRESETS["lm"])
    capped = torch.minimum(w, 10 * w.mean())
    assert_close(lm, capped / capped.mean(0), 1e-12)
    w = 1 / (s + 0.35)
    soft = reference.dispersion_weights(s, count, **reference.DISPERSION_PRESETS["softmoe"])
    capped = torch.minimum(w, 5 * w.mean())
    assert_close(soft, capped / capped.mean(), 1e-12)
    assert make(nn.ACMoE, K, preset="swin").weights == reference.DISPERSION_PRESETS["swin"]
    with pytest.raises(ValueError, match="expected 'preset'"):
        make(nn.ACMoE, K, preset="vit")


def test_dynamic_top_p_takes_what_passes_the_threshold():
    router = make(nn.DynamicTopP, theta=0.15)
    p = (H @ router.weight.T + router.bias).softmax(-1)
    routing = router(H)
    for row, gates, indices, count in zip(
        p.reshape(-1, E), routing.gates.reshape(-1, E), routing.indices.reshape(-1, E),
        routing.count.reshape(-1), strict=True,
    ):  # fmt: skip
        passed = {e for e in range(E) if row[e] > 0.15} or {int(row.argmax())}
        assert {int(i) for i in indices if i >= 0} == passed and int(count) == len(passed)
        for gate, e in zip(gates[:count], indices[:count]):
            assert abs(float((gate - row[e] / sum(row[j] for j in passed)).detach())) < 1e-14
        assert not gates[count:].any()


def test_dynamic_top_p_straight_through_moves_theta():
    options = dict(theta=0.15, learn_theta=True)
    weight = normal(2, 9, E).double()
    for renorm in (True, False):
        router = make(nn.DynamicTopP, straight_through=True, renorm=renorm, **options)
        routing = router(H)
        (routing.gates * weight).sum().backward()
        # d(mask) of a selected expert is gate dgate.
        expected = -(routing.gates * weight).sum()
        assert_close(router.theta.grad, expected.detach(), 1e-12)
    fixed = make(nn.DynamicTopP, **options)
    fixed(H).gates.sum().backward()
    assert fixed.theta.grad is None
    with pytest.raises(ValueError, match="expected learn_theta=True"):
        make(nn.DynamicTopP, straight_through=True)


def soft_layer(router):
    torch.manual_seed(1)
    return nn.MoELayer(router, 10).double()


def test_soft_moe_runs_every_expert_on_averages():
    router = make(nn.SoftMoE, slots=3)
    layer = soft_layer(router)
    y, routing = layer(H)
    phi = router.phi / router.phi.norm(dim=0)
    logits = torch.einsum("bnd,dep->bnep", H / H.norm(dim=-1, keepdim=True), phi)
    dispatch = logits.softmax(1)
    combine = logits.flatten(-2).softmax(-1).unflatten(-1, (E, 3))
    assert_close(routing.dispatch, dispatch, 1e-13)
    expected = torch.zeros_like(H)
    for e in range(E):
        for p in range(3):
            slot = torch.einsum("bn,bnd->bd", dispatch[..., e, p], H)
            out = torch.nn.functional.gelu(slot @ layer.w_in[e].T) @ layer.w_out[e].T
            expected = expected + combine[..., e, p, None] * out[:, None]
    assert_close(y, expected.detach(), 1e-12)


def test_soft_ac_logits_use_the_metric_of_the_eight_best_slots():
    first, second = make(nn.SoftACMoE, slots=3), make(nn.SoftACMoE, slots=3)
    state = first(H).state
    phi = first.phi / first.phi.norm(dim=0)
    logits = torch.einsum("bnd,dep->bnep", H / H.norm(dim=-1, keepdim=True), phi).flatten(-2)
    values, slots = logits.topk(8, dim=-1)
    assert torch.equal(state["prev_indices"], slots // 3)
    assert_close(state["prev_gates"], values.softmax(-1), 1e-13)
    label = (slots // 3)[..., 0]
    s, _, count = reference.mad_dispersion(H, label, E)
    m = reference.dispersion_weights(s, count, **reference.DISPERSION_PRESETS["softmoe"])
    mt = (values.softmax(-1)[..., None] * m[slots // 3]).sum(-2)
    logits = torch.einsum("bnd,dep->bnep", mt * H / H.norm(dim=-1, keepdim=True), phi)
    routing = second(H + 0, **state)
    assert_close(routing.combine, logits.flatten(-2).softmax(-1).unflatten(-1, (E, 3)), 1e-12)


def test_symphony_soft_mixes_combine_weights_over_the_graph():
    router, plain = make(nn.SymphonySoftMoE, slots=3, init="uniform"), make(nn.SoftMoE, slots=3)
    plain.load_state_dict({n: v for n, v in router.state_dict().items() if n in ("phi", "scale")})
    combine = plain(H).combine
    expected = torch.einsum("jk,bnkp->bnjp", router.adjacency, combine)
    assert_close(router(H).combine, expected, 1e-13)
    marginal = top(combine.sum(-1))[1]
    counts = torch.zeros(E, E, dtype=torch.int64)
    for pair in marginal.reshape(-1, K).tolist():
        for a in pair:
            for b in pair:
                counts[a, b] += 1
    assert torch.equal(router.co_selections, counts)


def algorithm_1(a, p, beta):
    """Lines 3 to 16 of P4's Algorithm 1 for base probabilities p [tokens, E]."""
    g = torch.stack([a @ row for row in p])
    counts = torch.zeros(E, E, dtype=torch.float64)
    for row in top(p)[1]:
        s = torch.zeros(E, dtype=torch.float64)
        s[row] = 1
        counts += torch.outer(s, s)
    total = counts.sum(1, keepdim=True)
    norm = torch.where(total > 0, counts / total.clamp(min=1), 0.0)
    return g, beta * a + (1 - beta) * norm


@pytest.mark.parametrize("similar", [False, True])
def test_symphony_follows_algorithm_1_over_steps(similar):
    base = make(nn.SimilaritySMoE, K, causal=True) if similar else None
    router = nn.SymphonySMoE(D, E, K, beta=0.7, base=base, impl="torch").double()
    a = torch.zeros(E, E, dtype=torch.float64)
    for step in range(4):
        h = normal(2, 9, D, seed=step).double()
        p, _, _ = router.base_scores(h)
        g, updated = algorithm_1(a, p.reshape(-1, E), 0.7)
        routing = router(h)
        assert_close(routing.probs.reshape(-1, E), g, 1e-13)
        if step:
            values, indices = top(g)
            assert torch.equal(routing.indices.reshape(-1, K), indices)
            assert_close(routing.gates.reshape(-1, K), values, 1e-13)  # not renormalised
        moe_mlir.update_routers(router)
        assert_close(router.adjacency, updated, 1e-7)
        a = router.adjacency.clone()


def test_c21_the_graph_counts_the_base_scores_and_not_the_smoothed_ones():
    router = make(nn.SymphonySMoE, 1)
    with torch.no_grad():
        router.adjacency[:] = 0
        router.adjacency[3] = 1  # everything goes to expert 3
    routing = router(H)
    assert bool((routing.indices == 3).all())
    base = router.logits(H).argmax(-1)
    loads = torch.bincount(base.reshape(-1), minlength=E)
    assert torch.equal(router.co_selections.diagonal(), loads)


def test_c17_row_norm_is_the_default_and_no_symmetry_is_assumed():
    router = make(nn.SymphonySMoE, K)
    router(H)
    counts = router.co_selections.double()
    moe_mlir.update_routers(router)
    row = counts / counts.sum(1, keepdim=True).clamp(min=1)
    assert_close(router.adjacency, 0.1 * row, 1e-7)
    assert float((router.adjacency - router.adjacency.T).abs().max()) > 1e-3
    with pytest.raises(ValueError, match="expected diagonal=True"):
        make(nn.SymphonySMoE, K, norm="eq7", diagonal=False)


def test_c18_the_diagonal_counts_unless_told_otherwise():
    for diagonal in (True, False):
        router = make(nn.SymphonySMoE, K, diagonal=diagonal)
        router(H)
        moe_mlir.update_routers(router)
        assert bool(router.adjacency.diagonal().any()) == diagonal
    alone = make(nn.SymphonySMoE, 1, diagonal=False)
    alone(H)
    moe_mlir.update_routers(alone)
    assert not alone.adjacency.any()  # it never learns


def test_e17_a_zero_graph_routes_nothing_and_base_starts_like_its_base():
    router = make(nn.SymphonySMoE, K)
    y, routing = nn.MoELayer(router, 10).double()(H)
    assert not routing.gates.any() and not y.any()
    assert bool((routing.indices == torch.arange(K)).all())
    warm = make(nn.SymphonySMoE, K, cold_start="base")
    values, indices = top(warm.logits(H).softmax(-1))
    assert torch.equal(warm(H).indices, indices)
    assert_close(warm(H).gates, values, 1e-13)


def test_e18_a_batch_without_tokens_teaches_the_graph_nothing():
    router = make(nn.SymphonySMoE, K, init="uniform")
    before = router.adjacency.clone()
    router(H, torch.zeros(2, 9, dtype=torch.bool))
    moe_mlir.update_routers(router)
    assert torch.equal(router.adjacency, before)


def test_e21_the_threshold_acts_at_use_and_the_stored_graph_stays_dense():
    router = make(nn.SymphonySMoE, K, init="uniform", threshold=0.5)
    router.adjacency[0, 0] = 0.5
    a = router.adjacency.clone()
    kept = torch.where(a >= 0.5, a, 0.0)
    p = router.logits(H).softmax(-1)
    assert_close(router(H).probs, p @ kept.T, 1e-13)
    assert torch.equal(router.adjacency, a) and bool((a < 0.5).any())


def test_shared_experts_add_with_weight_one_outside_of_the_graph():
    layer = nn.MoELayer(make(nn.SymphonySMoE, K, init="uniform"), 10, shared=1).double()
    y, routing = layer(H)
    bare, _ = nn.MoELayer(layer.router, 10).double(), None
    with torch.no_grad():
        bare.w_in.copy_(layer.w_in), bare.w_out.copy_(layer.w_out)
    shared = torch.nn.functional.gelu(H @ layer.shared_in.T) @ layer.shared_out.T
    assert_close(y, (bare(H)[0] + shared).detach(), 1e-13)
    assert layer.router.adjacency.shape == (E, E) and int(routing.indices.max()) < E


def test_deepseek_router_moves_its_bias_once_a_step():
    router = make(nn.DeepSeekV3Router, K, n_group=4, topk_group=2, route_scale=2.5, gamma=0.01)
    seen = torch.zeros(E, dtype=torch.int64)
    for seed in (0, 1):
        indices = router(normal(2, 9, D, seed=seed).double()).indices
        seen += torch.bincount(indices.reshape(-1), minlength=E)
    assert not router.bias.any()
    moe_mlir.update_routers(router)
    expected = 0.01 * torch.sign(seen.double().mean() - seen)
    assert_close(router.bias, expected, 1e-15)
    assert not router.load.any()
    s = router.logits(H).sigmoid()
    routing = router(H)
    chosen = s.gather(-1, routing.indices)
    assert_close(routing.gates, 2.5 * chosen / chosen.sum(-1, keepdim=True), 1e-13)


def test_deepseek_with_symphony_smooths_the_sigmoids():
    router = make(nn.DeepSeekV3Router, K, symphony=True)
    torch.nn.init.uniform_(router.adjacency, generator=random(0))
    g = router.logits(H).sigmoid() @ router.adjacency.T
    values, indices = top(g)
    routing = router(H)
    assert torch.equal(routing.indices, indices)
    assert_close(routing.gates, values / values.sum(-1, keepdim=True), 1e-13)
    base = top(router.logits(H))[1]
    loads = torch.bincount(base.reshape(-1), minlength=E)
    assert torch.equal(router.co_selections.diagonal(), loads)


@pytest.mark.parametrize("priority", ["position", "gate"])
def test_capacity_drops_the_last_or_the_least_sure(priority):
    router = make(nn.VMoE, 1).eval()
    with torch.no_grad():
        router.weight[1:] = 0
    layer = nn.MoELayer(router, 10, capacity_factor=1.0, priority=priority).double()
    h = H.abs() * router.weight[0].detach().sign()  # everyone wants expert 0
    y, routing = layer(h)
    assert not routing.indices.any()
    room = math.ceil(18 / E)
    gates = routing.gates.reshape(-1)
    order = torch.arange(18) if priority == "position" else gates.argsort(descending=True)
    served = y.reshape(18, D).abs().sum(-1) > 0
    assert sorted(served.nonzero().reshape(-1).tolist()) == sorted(order[:room].tolist())


def test_glam_routes_every_other_layer():
    assert [nn.GLaM.is_moe_layer(i) for i in range(6)] == [False, True] * 3
    assert make(nn.GLaM).k == 2


def test_wrong_options_are_refused():
    for cls, options, message in (
        (nn.ACMoE, dict(stat_source="next"), "expected 'stat_source'"),
        (nn.ACMoE, dict(mix=0), "expected 'mix'"),
        (nn.SymphonySMoE, dict(beta=1.5), "expected 'beta'"),
        (nn.SymphonySMoE, dict(norm="both"), "expected 'norm'"),
        (nn.SymphonySMoE, dict(init="normal"), "expected 'init'"),
        (nn.SMoEDropout, dict(k_max=4), "'k_max' and 'total_steps' together"),
        (nn.SMoEDropout, dict(k_max=1, total_steps=3), "expected 'k_max' in"),
        (nn.SimilaritySMoE, dict(causal=True, base=nn.SMoE(D, 4, 2)), "expected 'base' with"),
    ):
        with pytest.raises(ValueError, match=message):
            cls(D, E, K, **options)
    with pytest.raises(ValueError, match="expected 'priority'"):
        nn.MoELayer(nn.SMoE(D, E, K), 10, priority="age")
