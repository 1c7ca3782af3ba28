"""The rows of the table: how to make each method's router, and what its paper claims of it."""

from collections.abc import Callable
from dataclasses import dataclass

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


# What the paper measured with two experts a token, tau 1, all tokens mixing. (Its
# Prop. 1 is of other routers: of tokens that see only surer ones, as tau goes to 0.)
_INFORMED = (
    ("loss", "lower", "SMoE", "P0 Table 1"),
    ("fluctuation", "lower", "SMoE", "P0 Fig. 2"),
    ("entropy", "lower", "SMoE", "P0 Fig. 2"),
)
_CLUSTERED = (
    ("loss", "lower", "SMoE", "P3 Table 3"),
    ("loss", "lower", "XMoE", "P3 Table 3"),
    ("loss", "lower", "StableMoE", "P3 Table 3"),
    ("load std", "lower", "SMoE", "P3 Table 6"),
    *(("instability", "lower", base, "P3 Fig. 5") for base in ("SMoE", "XMoE", "StableMoE")),
)
_XMOE = _with(nn.XMoE, tau=0.3)
_SYMPHONY = (("loss", "lower", "SMoE", "P4 Table 1"),)

METHODS = (
    Method("SMoE", _with(nn.SMoE)),
    Method("Switch", _with(nn.Switch), selected=1),
    Method("GLaM", _with(nn.GLaM), every_other=True),
    Method("XMoE", _XMOE),
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
    Method("Similarity-SMoE", _with(nn.SimilaritySMoE, causal=True), _INFORMED),
    Method("Similarity-SMoE, tau 12", _with(nn.SimilaritySMoE, causal=True, tau=12.0)),
    Method("Similarity-XMoE", _over(nn.SimilaritySMoE, _XMOE, causal=True),
           (("loss", "lower", "XMoE", "P0 Table 3"),)),
    Method("Attention-SMoE", _with(nn.AttentionSMoE, causal=True), _INFORMED,
           reads_attention=True),
    Method("Attention-SMoE, full", _with(nn.AttentionSMoE, causal=True, head_mode="all"),
           reads_attention=True),
    Method("ACMoE", _with(nn.ACMoE), _CLUSTERED, carries_state=True),
    Method("ACMoE, variance", _with(nn.ACMoE, measure="variance"),
           (("loss", "lower", "SMoE", "P3 Tables 3, 10"),), carries_state=True),
    Method("ACMoE, mix 2", _with(nn.ACMoE, mix=2),
           (("loss", "lower", "SMoE", "P3 Tables 3, 15"),), carries_state=True),
    Method("ACMoE, XMoE", _with(nn.ACMoE, d_embedding=8), carries_state=True),
    # Up to k experts, so that no method sees more of them than the others.
    Method("top-p", _with(nn.DynamicTopP, theta=0.15)),
    Method("Symphony", _with(nn.SymphonySMoE), _SYMPHONY),
    Method("Symphony, threshold", _with(nn.SymphonySMoE, threshold=0.05), _SYMPHONY),
    Method("Symphony, shared", _with(nn.SymphonySMoE), (), shared=1),
    Method("Symphony, Similarity",
           _over(nn.SymphonySMoE, _with(nn.SimilaritySMoE, causal=True)),
           # The paper's text says it the wrong way round; its table has 34.50 against
           # 35.06 of Similarity and 34.29 of Symphony.
           (("loss", "lower", "Similarity-SMoE", "P4 Table 16"),
            ("loss", "higher", "Symphony", "P4 Table 16"))),
    Method("DeepSeek-V3", _with(nn.DeepSeekV3Router, n_group=2, topk_group=1)),
    Method("DeepSeek-V3, Symphony", _with(nn.DeepSeekV3Router, symphony=True)),
)  # fmt: skip
