"""Gradients on random and adversarial inputs, against float64 autograd through the reference."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from inputs import (
    SEEDS,
    choice,
    examples,
    features,
    generator,
    normal,
    op,
    padding,
    score_rows,
    selections,
    uniform,
    with_garbage,
)  # fmt: skip
from op_judge import assert_close, gradient_tolerance, largest, score_tolerance

from moe_mlir import reference

N = st.sampled_from((0, 1, 2, 5, 17))
# Gradients that all but cancel are judged as if they were this large: the
# cotangents are of size 1, and so is what rounds before it cancels.
SMALL = 0.05
FINITE = ("normal", "wide", "ties", "equal", "zeros", "masked", "empty")


def gradients(function, leaves, dtype, constants):
    """{name: gradient} for cotangents that depend on the shapes alone."""
    operands = {n: t.detach().clone().to(dtype).requires_grad_() for n, t in leaves.items()}
    results = function(**operands, **constants)
    results = results if isinstance(results, tuple) else (results,)
    loss = 0
    for position, result in enumerate(r for r in results if r.requires_grad):
        cotangent = torch.randn(result.shape, generator=generator(position)).to(dtype)
        # A row without support has an infinite log-sum-exp and no gradient.
        loss = loss + (torch.where(result.isfinite(), result, 0.0) * cotangent).sum()
    loss.backward()
    return {n: t.grad for n, t in operands.items()}


def check(name, leaves, logit=10.0, clean=None, **constants):
    """`clean` replaces operands that hold garbage which must not be seen (E11)."""
    actual = gradients(op(name), leaves, torch.float32, constants)
    wide = {**leaves, **(clean or {})}
    expected = gradients(getattr(reference, name), wide, torch.float64, constants)
    for leaf, wanted in expected.items():
        found = actual[leaf]
        wanted = torch.zeros_like(leaves[leaf], dtype=torch.float64) if wanted is None else wanted
        found = torch.zeros_like(leaves[leaf]) if found is None else found
        tol = gradient_tolerance(score_tolerance(logit), wanted.abs() + SMALL)
        assert_close(found, wanted, tol, f"d{leaf}")


@given(st.sampled_from(((1, 1, "logits", True), (7, 3, "probs", True), (16, 2, "logits", False),
                        (17, 17, "logits", True), (257, 8, "probs", False))), N, SEEDS)  # fmt: skip
@examples
def test_topk_renorm(form, n, seed):
    experts, k, kind, renorm = form
    g = generator(seed)
    scores, mask = score_rows(n, experts, g, FINITE), padding(n, g)
    if kind == "probs":
        scores = scores.softmax(-1).nan_to_num(0.0)
    logit = largest(scores)
    check("topk_renorm", dict(scores=scores), logit, k=k, kind=kind, renorm=renorm, mask=mask)


@given(st.sampled_from((("sigmoid", 1, True), ("softmax", 2, True), ("sqrtsoftplus", 1, False),
                        ("none", 2, True))), N, SEEDS)  # fmt: skip
@examples
def test_grouped_topk(form, n, seed):
    score, topk_group, renorm = form
    g = generator(seed)
    x, mask = score_rows(n, 12, g, ("normal",)), padding(n, g)
    x = x.softmax(-1) if score == "none" else x
    check("grouped_topk", dict(scores=x), k=3, score=score, renorm=renorm, mask=mask,
          n_group=2 if topk_group == 2 else 1, topk_group=topk_group)  # fmt: skip


@given(st.sampled_from(((1, True), (16, True), (7, False))), N, SEEDS)
@examples
def test_threshold_renorm(form, n, seed):
    experts, renorm = form
    g = generator(seed)
    p = score_rows(n, experts, g, ("normal", "equal", "ties")).softmax(-1)
    leaves = dict(probs=p, theta=torch.tensor(0.0625))
    check("threshold_renorm", leaves, renorm=renorm, mask=padding(n, g))


@given(st.sampled_from(((1, 1), (7, 3), (33, 17), (64, 257))), N, SEEDS)
@examples
def test_router_logits(sizes, n, seed):
    d, experts = sizes
    g = generator(seed)
    leaves = dict(h=features(n, d, g), weight=normal(experts, d, g=g), bias=normal(experts, g=g))
    check("router_logits", leaves)


@given(st.sampled_from(((7, 3, 4, True), (16, 8, 17, True), (5, 5, 1, False))), N, SEEDS)
@examples
def test_cosine_logits(sizes, n, seed):
    d, width, experts, norm_token = sizes
    g = generator(seed)
    leaves = dict(
        h=features(n, d, g), omega=normal(width, d, g=g), emb=normal(experts, width, g=g),
        tau=torch.tensor(choice((1.0, 0.3), g)),
    )  # fmt: skip
    check("cosine_logits", leaves, norm_token=norm_token)


@given(st.sampled_from(((3, 5, 4, 2), (8, 16, 7, 33), (1, 1, 1, 1))), SEEDS)
@examples
def test_hyper_router(sizes, seed):
    width, hidden, experts, d = sizes
    g = generator(seed)
    rows = experts * (d + 1)
    shapes = dict(w1=(hidden, width), b1=(hidden,), w2=(rows, hidden), b2=(rows,))
    frozen = {name: normal(*shape, g=g) for name, shape in shapes.items()}
    leaves = dict(embedding=normal(width, g=g))
    # A unit at the kink of relu has no derivative to compare.
    if (frozen["w1"] @ leaves["embedding"] + frozen["b1"]).abs().min() > 1e-4:
        check("hyper_router", leaves, num_experts=experts, **frozen)


@given(st.sampled_from(((7, 3, 1), (33, 16, 2))), N, SEEDS)
@examples
def test_ac_logits(sizes, n, seed):
    d, experts, r = sizes
    g = generator(seed)
    leaves = dict(h=features(n, d, g), emb=normal(experts, d, g=g))
    gates = uniform(n, r, g=g) if r > 1 else None
    check("ac_logits", leaves, metric=normal(experts, d, g=g).exp(), prev_gates=gates,
          prev_indices=selections(n, experts, r, g))  # fmt: skip


# (features, experts, causal, ws)
SIMILARITY = ((1, 1, True, False), (7, 3, True, False), (16, 8, False, True), (12, 17, True, True))


@given(st.sampled_from(SIMILARITY), N, SEEDS)
@examples
def test_similarity_inform(form, n, seed):
    d, experts, causal, matrix = form
    g = generator(seed)
    u, e = features(n, d, g)[None], normal(1, n, experts, g=g).softmax(-1)
    mask = padding(n, g)[None]
    dirty = dict(h=with_garbage(u, mask, g), probs=with_garbage(e, mask, g))
    tau = torch.tensor(choice((1.0, 12.0), g))
    ws = normal(d, d, g=g, scale=d**-0.5) if matrix else None
    leaves = dict(**dirty, tau=tau, **({} if ws is None else dict(weight=ws)))
    size = largest((u if ws is None else u @ ws) @ u.mT) / float(tau)
    if score_tolerance(size) < 1e-3:
        check("similarity_inform", leaves, size, dict(h=u, probs=e), causal=causal, mask=mask)


# (heads, head width, features, experts, causal, mode)
POSTERIOR = ((1, 4, 7, 3, True, 0), (3, 4, 8, 16, False, "all"))


@given(st.sampled_from(POSTERIOR), N, SEEDS)
@examples
def test_attention_posterior(form, n, seed):
    heads, dh, d, experts, causal, mode = form
    g = generator(seed)
    mask = padding(n, g)[None]
    leaves = {name: normal(1, heads, n, dh, g=g) for name in ("q", "k", "v")}
    leaves["attn_output"], leaves["wo"] = normal(1, n, d, g=g), normal(heads, d, dh, g=g, scale=0.5)
    leaves["probs"] = normal(1, n, experts, g=g).softmax(-1)
    leaves["sigma"] = torch.tensor(choice((1.0, 0.7), g))
    dirty = dict(leaves)
    for name in ("q", "k", "v"):
        dirty[name] = with_garbage(leaves[name], mask[:, None].expand(1, heads, n), g)
    for name in ("attn_output", "probs"):
        dirty[name] = with_garbage(leaves[name], mask, g)
    clean = {name: leaves[name] for name in ("q", "k", "v", "attn_output", "probs")}
    check("attention_posterior", dirty, 60.0, clean, causal=causal, mask=mask, head_mode=mode)


@given(st.sampled_from(((1, 0.0), (7, 0.25), (65, 0.0))), N, SEEDS)
@examples
def test_adjacency_gate(form, n, seed):
    experts, threshold = form
    g = generator(seed)
    p = score_rows(n, experts, g, ("normal",)).softmax(-1)
    a = uniform(experts, experts, g=g) * choice((1.0, 0.0), g)
    check("adjacency_gate", dict(probs=p), adjacency=a, threshold=threshold)


@given(st.sampled_from(((7, 3, 1, False), (16, 8, 2, True))), N, SEEDS)
@examples
def test_soft_dispatch(sizes, n, seed):
    d, experts, slots, metric = sizes
    g = generator(seed)
    x, mask = normal(1, n, d, g=g), padding(n, g)[None]
    leaves = dict(
        h=with_garbage(x, mask, g),
        phi=normal(d, experts, slots, g=g),
        scale=torch.tensor(2.0),
    )
    m = normal(1, n, d, g=g).exp() if metric else None
    check("soft_dispatch", leaves, clean=dict(h=x), mask=mask, metric=m)


@given(st.sampled_from(((1, 1, 3), (8, 3, 5))), N, SEEDS)
@examples
def test_combine_and_densify(sizes, n, seed):
    experts, k, d = sizes
    g = generator(seed)
    idx = selections(n, experts, k, g)
    slots, _, _ = reference.dispatch(idx, experts, capacity=2)
    gates = normal(n, k, g=g)
    check("combine", dict(expert_out=normal(max(1, n * k), d, g=g), gates=gates), slots=slots)
    check("densify", dict(gates=gates), indices=idx, num_experts=experts)


@given(st.sampled_from(((1, 1), (16, 2))), N, SEEDS)
@examples
def test_losses(sizes, n, seed):
    experts, k = sizes
    g = generator(seed)
    z, mask = score_rows(n, experts, g, ("normal", "ties", "masked")), padding(n, g)
    idx = selections(n, experts, k, g)
    check("balance_loss", dict(probs=z.softmax(-1).nan_to_num(0.0)), indices=idx, mask=mask)
    check("z_loss", dict(logits=z), largest(z), mask=mask)
