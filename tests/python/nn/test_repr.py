"""The repr of a module says what it computes, in the words of its constructor."""

import inspect
import re

import pytest
import torch
from methods import METHODS, D, E, K, make

import moe_mlir
from moe_mlir import nn
from moe_mlir.experts import ExpertActivation


@pytest.mark.parametrize("name", METHODS)
def test_a_router_shows_its_sizes_and_options(name):
    router, _ = make(name, "torch")
    shown = router.extra_repr()
    assert shown.startswith(f"d_model={D}, num_experts={E}, k={router.k}")
    assert shown.endswith("impl='torch'") or "impl='torch'" in shown
    # What it shows are keywords that the class, or one below it, takes, or a stage that changes.
    known = {name for cls in type(router).__mro__ if issubclass(cls, nn.Router)
             for name in inspect.signature(cls).parameters}
    outside = re.sub(r"\{[^}]*\}", "", shown)
    assert {n for n in re.findall(r"(\w+)=", outside)} <= known | {"stage"}


@pytest.mark.parametrize(("make_one", "shown"), [
    (lambda: nn.DeepSeekV3Router(16, 32, 4, n_group=4, topk_group=2, route_scale=2.5),
     "score='sigmoid', n_group=4, topk_group=2, group_score='top2', renorm=True, gamma=0.001, "
     "route_scale=2.5"),
    (lambda: nn.XMoE(D, E, K, tau=0.3), "tau=0.3"),
    (lambda: nn.XMoE(D, E, K, learn_tau=True), "tau=learned"),
    (lambda: nn.SimilaritySMoE(D, E, K, causal=True, window=4), "causal=True, tau=1.0, "
     "similarity=False, window=4"),
    (lambda: nn.AttentionSMoE(D, E, K, causal=False), "head_scope='sequence', causal=False"),
    (lambda: nn.SMoEDropout(D, E, K, k_max=8, total_steps=9), "k_max=8, total_steps=9"),
    (lambda: nn.SymphonySMoE(D, E, K, beta=0.5, cold_start="base"), "cold_start='base', beta=0.5"),
    (lambda: nn.DynamicTopP(D, E, theta=0.2), "theta=0.2"),
    (lambda: nn.SoftMoE(D, E, slots=3), "slots=3, scale=learned"),
    (lambda: nn.MoELayer(nn.SMoE(D, E, K), 6, activation="swiglu", bias=True, shared=2),
     f"num_experts={E}, d_hidden=6, activation='swiglu', bias=True, shared=2"),
    (lambda: nn.MoELayer(nn.VMoE(D, E, K), 6, capacity_factor=1.5, priority="gate"),
     "capacity_factor=1.5, priority='gate'"),
    (lambda: nn.MoELayer(nn.SMoE(D, E, K), 6, activation=ExpertActivation(
        "silu", gate="interleaved", limit=7.0)), "gate='interleaved'"),
])
def test_what_matters_is_there(make_one, shown):
    assert shown in make_one().extra_repr()


def test_a_layer_whose_weights_are_codes_or_panels_or_nowhere_has_a_repr():
    for change in (moe_mlir.pack_experts, moe_mlir.quantize, lambda m: m.to("meta")):
        layer = nn.MoELayer(nn.SMoE(64, 8, 2), 128)
        change(layer)
        assert "num_experts=8, d_hidden=128, activation='gelu'" in repr(layer)


def test_a_base_is_shown_below():
    router = nn.SimilaritySMoE(D, E, K, causal=True, base=nn.XMoE(D, E, K, tau=0.3))
    assert re.search(r"\(base\): XMoE\(.*tau=0.3", repr(router))


class Mine(nn.LinearRouter):
    """A router of one's own adds its options."""

    def __init__(self, *sizes, heat=2.0, **options):
        super().__init__(*sizes, **options)
        self.heat = torch.nn.Parameter(torch.tensor(heat))

    def repr_options(self):
        return {"heat": self.heat, **super().repr_options()}


def test_a_router_of_ones_own():
    assert repr(Mine(D, E, K)) == f"Mine(d_model={D}, num_experts={E}, k={K}, heat=learned, bias=True)"
