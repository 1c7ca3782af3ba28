"""Every router of docs/Spec.md section 4: how to make it and what its forward needs."""

import torch
from op_judge import random

from moe_mlir import nn

D, E, K = 12, 8, 2


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=random(seed))


def attention(n=9):
    return dict(
        q=normal(2, 3, n, 4, seed=1),
        k=normal(2, 3, n, 4, seed=2),
        attn_output=normal(2, n, D, seed=3),
        v=normal(2, 3, n, 4, seed=4),
        wo=0.3 * normal(3, D, 4, seed=5),
    )


def previous(n=9):
    """The state of a previous ACMoE layer."""
    gates = torch.rand(2, n, K, generator=random(7))
    indices = torch.rand(2, n, E, generator=random(8)).argsort(-1)[..., :K]
    return dict(prev_indices=indices, prev_gates=gates, prev_h=normal(2, n, D, seed=9))


def soft_previous(n=9):
    gates = torch.rand(2, n, 8, generator=random(7)).softmax(-1)
    indices = torch.randint(0, E, (2, n, 8), generator=random(8))
    return dict(prev_indices=indices, prev_gates=gates, prev_h=normal(2, n, D, seed=9))


def over(base, *args, **options):
    """A base router of the same sizes and implementation."""
    return lambda impl: dict(base=base(D, E, K, *args, impl=impl), **options)


# name -> (class, options or a function of impl that gives them, inputs of forward)
METHODS = {
    "smoe": (nn.SMoE, {}, dict),
    "switch": (nn.Switch, {}, dict),
    "glam": (nn.GLaM, {}, dict),
    "vmoe": (nn.VMoE, {}, lambda: dict(noise=normal(2, 9, E, seed=3) / E)),
    "xmoe": (nn.XMoE, dict(tau=0.3, learn_tau=True), dict),
    "xmoe_public": (nn.XMoE, dict(norm_token=False, finite="tensor"), dict),
    "stablemoe": (nn.StableMoE, {}, dict),
    "stablemoe_two_stages": (
        nn.TwoStageStableMoE,
        dict(k=1, vocabulary=20),
        lambda: dict(tokens=torch.arange(18).reshape(2, 9)),
    ),
    "smoe_dropout": (nn.SMoEDropout, dict(k_max=8, total_steps=10), dict),
    "hyper_router": (nn.HyperRouter, dict(d_embedding=5, d_hidden=7), dict),
    "thor": (nn.THOR, {}, lambda: dict(random=torch.rand(2, 9, E, generator=random(4)))),
    "similarity": (nn.SimilaritySMoE, dict(causal=True, similarity=True, learn_tau=True), dict),
    "similarity_xmoe": (nn.SimilaritySMoE, over(nn.XMoE, causal=True), dict),
    "similarity_smoe_dropout": (nn.SimilaritySMoE, over(nn.SMoEDropout, causal=True), dict),
    "similarity_glam": (nn.SimilaritySMoE, over(nn.GLaM, causal=True), dict),
    "attention_head": (nn.AttentionSMoE, dict(causal=True), attention),
    "attention_full": (nn.AttentionSMoE, dict(causal=True, head_mode="all"), attention),
    "attention_xmoe": (nn.AttentionSMoE, over(nn.XMoE, causal=True), attention),
    "ac_mad": (nn.ACMoE, {}, previous),
    "ac_variance": (nn.ACMoE, dict(measure="variance", preset="lm"), previous),
    "ac_mix": (nn.ACMoE, dict(mix=2, stat_source="current"), previous),
    "ac_xmoe": (nn.ACMoE, dict(d_embedding=4), previous),
    "top_p": (nn.DynamicTopP, dict(k=E, theta=0.1), dict),
    "top_p_ac": (nn.DynamicTopP, over(nn.ACMoE, theta=0.1), previous),
    "soft": (nn.SoftMoE, dict(slots=3), dict),
    "soft_ac": (nn.SoftACMoE, dict(slots=3), soft_previous),
    "symphony": (nn.SymphonySMoE, dict(cold_start="base"), dict),
    "symphony_threshold": (nn.SymphonySMoE, dict(init="uniform", threshold=0.05), dict),
    "symphony_xmoe": (nn.SymphonySMoE, over(nn.XMoE, init="uniform"), dict),
    "symphony_similarity": (
        nn.SymphonySMoE,
        lambda impl: dict(base=nn.SimilaritySMoE(D, E, K, causal=True, impl=impl), init="uniform"),
        dict,
    ),
    "symphony_soft": (nn.SymphonySoftMoE, dict(slots=3, init="uniform"), dict),
    "deepseek": (nn.DeepSeekV3Router, dict(n_group=4, topk_group=2, route_scale=2.5), dict),
    "deepseek_symphony": (nn.DeepSeekV3Router, dict(symphony=True, cold_start="base"), dict),
}


def make(name, impl="torch"):
    """(router, keywords of its forward); the same weights for every impl."""
    cls, options, inputs = METHODS[name]
    torch.manual_seed(0)
    options = options(impl) if callable(options) else dict(options)
    return cls(D, E, options.pop("k", 1 if cls is nn.Switch else K), impl=impl, **options), inputs()
