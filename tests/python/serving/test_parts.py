"""What stands in vLLM's place computes what it computed: routers and activations."""

import itertools
import pickle

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: utils/check_vllm.py")

import served  # noqa: E402, F401  (its settings, before vLLM)
from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.model_executor.layers import activation as vllm_activation  # noqa: E402
from vllm.model_executor.layers.fused_moe.activation import (  # noqa: E402
    ApplyMoEActivationConfig,
    MoEActivation,
)
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter  # noqa: E402
from vllm.model_executor.layers.quantization import get_quantization_config  # noqa: E402

import moe_mlir.vllm  # noqa: E402
from moe_mlir.vllm.experts import activation_of  # noqa: E402
from moe_mlir.vllm.router import MoEMlirRouter  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def plugin():
    moe_mlir.vllm.register()


def dense(gates, indices, experts):
    assert indices.dtype == torch.int32 and gates.dtype == torch.float32
    return torch.zeros(*indices.shape[:-1], experts).scatter(-1, indices.long(), gates.float())


@pytest.mark.parametrize(("score", "grouped", "biased", "dtype"), [
    ("softmax", False, False, torch.float32), ("softmax", False, False, torch.bfloat16),
    ("softmax", True, False, torch.float32), ("sigmoid", True, True, torch.float32),
    ("sqrtsoftplus", False, True, torch.float32), ("sqrtsoftplus", False, True, torch.bfloat16)])
def test_a_router_selects_as_vllm_does(score, grouped, biased, dtype):
    # vLLM's kernel for sqrtsoftplus takes few numbers of experts.
    experts, generator = 256 if score == "sqrtsoftplus" else 144, torch.Generator().manual_seed(0)
    logits = torch.randn(17, experts, generator=generator).to(dtype)
    options = dict(top_k=6, global_num_experts=experts, scoring_func=score, use_grouped_topk=grouped,
                   num_expert_group=8 if grouped else None, topk_group=3 if grouped else None,
                   routed_scaling_factor=2.5 if biased else 1.0,
                   e_score_correction_bias=torch.rand(experts, generator=generator) / 8
                   if biased else None)
    for renormalize in ((True,) if score == "sqrtsoftplus" else (True, False)):
        # vLLM rounds sums to bfloat16 on the way, and we do not.
        ours, theirs = (dense(*kind(**options, renormalize=renormalize)._compute_routing(
            torch.empty(17, 1), each, torch.int32), experts)
            for kind, each in ((MoEMlirRouter, logits), (CPURouter, logits.float())))
        assert (ours > 0).sum(-1).eq(6).all()
        if dtype == torch.bfloat16:
            # Of scores that are equal vLLM selects any: other experts, the same gates.
            ours, theirs = ours.sort().values, theirs.sort().values
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_any_number_of_experts():
    """vLLM's kernel refuses 144: `unsupported num_experts`."""
    bias, logits = torch.rand(144), torch.randn(5, 144)
    options = dict(top_k=6, global_num_experts=144, scoring_func="sqrtsoftplus",
                   e_score_correction_bias=bias)
    gates, indices = MoEMlirRouter(**options)._compute_routing(torch.empty(5, 1), logits, torch.int32)
    scores = torch.nn.functional.softplus(logits.double()).sqrt()
    chosen = (scores + bias).topk(6).indices
    assert torch.equal(indices.long(), chosen)
    expected = scores.gather(1, chosen)
    torch.testing.assert_close(gates.double(), expected / expected.sum(1, keepdim=True), rtol=1e-5,
                               atol=1e-7)


def test_sigmoid_scores_with_a_bias_and_no_groups():
    """vLLM's router of a CPU asserts that there are none of these."""
    logits, bias = torch.randn(9, 20), torch.rand(20)
    router = MoEMlirRouter(top_k=3, global_num_experts=20, scoring_func="sigmoid",
                           e_score_correction_bias=bias)
    gates, indices = router._compute_routing(torch.empty(9, 1), logits, torch.int32)
    scores = logits.double().sigmoid()
    chosen = (scores + bias).topk(3).indices
    expected = scores.gather(1, chosen)
    assert torch.equal(indices.long(), chosen)
    torch.testing.assert_close(gates.double(), expected / expected.sum(1, keepdim=True), rtol=1e-5,
                               atol=1e-7)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_without_a_bias_and_groups_the_factor_is_left_to_the_model(score):
    """As in vLLM's FusedTopKRouter, which takes none."""
    router = MoEMlirRouter(top_k=3, global_num_experts=20, scoring_func=score,
                           routed_scaling_factor=2.5)
    gates, _ = router._compute_routing(torch.empty(9, 1), torch.randn(9, 20), torch.int32)
    torch.testing.assert_close(gates.sum(1), torch.ones(9), rtol=1e-5, atol=0)


def test_a_model_s_own_function_is_kept():
    def pick_first(hidden_states, gating_output, topk, renormalize):
        return torch.ones(len(gating_output), topk), torch.zeros(len(gating_output), topk)
    router = MoEMlirRouter(top_k=2, global_num_experts=4, custom_routing_function=pick_first)
    _, indices = router._compute_routing(torch.empty(3, 1), torch.randn(3, 4), torch.int32)
    assert not indices.any()


def vllm_of(kind, limit, alpha, beta):
    """vLLM's definition in torch."""
    if kind == MoEActivation.SILU and limit is not None:
        return vllm_activation.SiluAndMulWithClamp(limit).forward_native
    if kind == MoEActivation.SWIGLUOAI_UNINTERLEAVE:
        return vllm_activation.SiluAndMulWithClamp(limit, alpha, beta).forward_native
    made = {MoEActivation.SILU: vllm_activation.SiluAndMul,
            MoEActivation.GELU: vllm_activation.GeluAndMul,
            MoEActivation.GELU_TANH: lambda: vllm_activation.GeluAndMul("tanh"),
            MoEActivation.SWIGLUOAI: vllm_activation.SwigluOAIAndMul,
            MoEActivation.SWIGLUSTEP: vllm_activation.SwigluStepAndMul,
            MoEActivation.SILU_NO_MUL: torch.nn.SiLU, MoEActivation.GELU_NO_MUL: torch.nn.GELU,
            MoEActivation.GELU_TANH_NO_MUL: lambda: torch.nn.GELU("tanh"),
            MoEActivation.RELU2_NO_MUL: vllm_activation.ReLUSquaredActivation}[kind]()
    return getattr(made, "forward_native", made)


def test_activations_are_those_of_vllm():
    z = 6 * torch.randn(50, 32, dtype=torch.float64)
    known = 0
    with set_current_vllm_config(VllmConfig()):
        for kind, limit in itertools.product(MoEActivation, (None, 3.0)):
            config = ApplyMoEActivationConfig(limit, alpha=1.5, beta=0.5)
            activation = activation_of(kind, config)
            if activation is None:
                continue
            known += 1
            expected = vllm_of(kind, limit, config.alpha, config.beta)(z.clone())
            torch.testing.assert_close(activation(z), expected, rtol=1e-6, atol=1e-6)
    assert known == 19  # 9 with and without a limit, one that asks for it


def test_activations_that_no_kernel_knows():
    config = ApplyMoEActivationConfig(3.0)
    assert activation_of(MoEActivation.SITU, config) is None
    assert activation_of(MoEActivation.RELU2, config) is None
    assert activation_of(MoEActivation.SWIGLUOAI_UNINTERLEAVE, ApplyMoEActivationConfig()) is None


def test_a_configuration_reaches_the_engine_s_process():
    for name in ("moe_mlir", "moe_int4", "moe_mxfp8"):
        config = get_quantization_config(name)()
        again = pickle.loads(pickle.dumps(config))
        assert type(again) is type(config) and again.get_name() == name
        assert again.round.quantization == config.round.quantization
