"""The rows of the table: how to make each method's router, and what its paper claims of it."""

from dataclasses import dataclass
from typing import Callable

from moe_mlir import nn


@dataclass(frozen=True)
class Method:
    """A router for language modelling; `make(width, experts, k, impl=...)`.

    `claims` are (metric, direction, against, source): the direction in which
    the paper says the metric moves from `against` to this method.
    """

    name: str
    make: Callable
    claims: tuple = ()
    every_other: bool = False
    reads_attention: bool = False
    carries_state: bool = False
    shared: int = 0
    selected: int | None = None
    two_passes: bool = False
    impl: str = "moe"

    def has_experts(self, layer):
        return nn.GLaM.is_moe_layer(layer) if self.every_other else True

    def router(self, sizes):
        k = sizes.selected if self.selected is None else self.selected
        return self.make(sizes.width, sizes.experts, k, impl=self.impl)


def _with(router, **options):
    return lambda d, e, k, impl: router(d, e, k, impl=impl, **options)


def _over(method, base, **options):
    """A method on the scores of the router that `base` makes."""

    def make(d, e, k, impl):
        return method(d, e, k, base=base(d, e, k, impl=impl), impl=impl, **options)

    return make


def _informed(against):
    return (
        ("loss", "lower", against, "P0 Tables 1 to 6"),
        ("fluctuation", "lower", against, "P0 Fig. 2, 3"),
        ("entropy", "lower", against, "P0 Prop. 1, Fig. 2"),
    )


def _clustered(against):
    return (
        ("loss", "lower", against, "P3 Table 3"),
        ("load std", "lower", against, "P3 Table 6"),
        ("instability", "lower", against, "P3 Fig. 5"),
    )


_SYMPHONY = (("loss", "lower", "SMoE", "P4 Table 1"),)

METHODS = (
    Method("SMoE", _with(nn.SMoE)),
    Method("Switch", _with(nn.Switch), selected=1),
    Method("GLaM", _with(nn.GLaM), every_other=True),
    Method("XMoE", _with(nn.XMoE, tau=0.3)),
    Method("StableMoE", _with(nn.StableMoE)),
    Method("SMoE-dropout", _with(nn.SMoEDropout)),
    Method(
        "HyperRouter",
        _with(nn.HyperRouter),
        (
            ("loss", "lower", "SMoE", "P2 Table 2"),
            ("entropy", "lower", "SMoE", "P2 Table 4"),
            ("entropy", "lower", "SMoE-dropout", "P2 Table 4"),
        ),
    ),
    Method("THOR", _with(nn.THOR), two_passes=True),
    Method("Similarity-SMoE", _with(nn.SimilaritySMoE, causal=True), _informed("SMoE")),
    Method("Similarity-SMoE, tau 12", _with(nn.SimilaritySMoE, causal=True, tau=12.0),
           _informed("SMoE")),
    Method("Similarity-XMoE", _over(nn.SimilaritySMoE, _with(nn.XMoE), causal=True),
           _informed("XMoE")),
    Method("Attention-SMoE", _with(nn.AttentionSMoE, causal=True), _informed("SMoE"),
           reads_attention=True),
    Method("Attention-SMoE, full", _with(nn.AttentionSMoE, causal=True, head_mode="all"),
           _informed("SMoE"), reads_attention=True),
    Method("ACMoE", _with(nn.ACMoE), _clustered("SMoE"), carries_state=True),
    Method("ACMoE, variance", _with(nn.ACMoE, measure="variance"), _clustered("SMoE"),
           carries_state=True),
    Method("ACMoE, mix 2", _with(nn.ACMoE, mix=2), _clustered("SMoE"), carries_state=True),
    Method("ACMoE, XMoE", _with(nn.ACMoE, d_embedding=8), _clustered("XMoE"), carries_state=True),
    # Up to k experts, so that no method sees more of them than the others.
    Method("top-p", _with(nn.DynamicTopP, theta=0.15)),
    Method("Symphony", _with(nn.SymphonySMoE), _SYMPHONY),
    Method("Symphony, threshold", _with(nn.SymphonySMoE, threshold=0.05), _SYMPHONY),
    Method("Symphony, shared", _with(nn.SymphonySMoE), (), shared=1),
    Method("Symphony, Similarity",
           _over(nn.SymphonySMoE, _with(nn.SimilaritySMoE, causal=True)),
           (("loss", "lower", "Symphony", "P4 App. H"),)),
    Method("DeepSeek-V3", _with(nn.DeepSeekV3Router, n_group=2, topk_group=1)),
    Method("DeepSeek-V3, Symphony", _with(nn.DeepSeekV3Router, symphony=True)),
)  # fmt: skip
