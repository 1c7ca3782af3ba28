"""The experts of vLLM's models by the kernels of this package."""

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import (
    ApplyMoEActivationConfig,
    MoEActivation,
)
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import CpuArchEnum, current_platform

from ..experts import run_experts
from ..experts.quantized_weight import QuantizedWeight
from ..ops._expert_activation import ExpertActivation
from ..ops._panels import pack_weight

# The layouts of `w13`: all gates, then all their factors; or in turns.
_HALVES, _TURNS = "concatenated", "interleaved"


def activation_of(
    activation: MoEActivation, config: ApplyMoEActivationConfig,
) -> ExpertActivation | None:
    """What vLLM's `apply_moe_activation` computes; None if no kernel knows it."""
    limit = config.clamp_limit
    known = {
        MoEActivation.SILU: ExpertActivation("silu", gate=_HALVES, limit=limit, up_limit=limit),
        MoEActivation.GELU: ExpertActivation("gelu", gate=_HALVES),
        MoEActivation.GELU_TANH: ExpertActivation("gelu_tanh", gate=_HALVES),
        # vLLM's own kernels have these two numbers built in.
        MoEActivation.SWIGLUOAI: ExpertActivation(
            "silu", 1.702, _TURNS, limit=7.0, up_limit=7.0, up_offset=1.0),
        MoEActivation.SWIGLUSTEP: ExpertActivation(
            "silu", gate=_HALVES, bound="clamp_activated", limit=7.0, up_limit=7.0),
        MoEActivation.SILU_NO_MUL: ExpertActivation("silu"),
        MoEActivation.GELU_NO_MUL: ExpertActivation("gelu"),
        MoEActivation.GELU_TANH_NO_MUL: ExpertActivation("gelu_tanh"),
        MoEActivation.RELU2_NO_MUL: ExpertActivation("relu2"),
    }
    if limit is not None:
        known[MoEActivation.SWIGLUOAI_UNINTERLEAVE] = ExpertActivation(
            "silu", config.alpha, _HALVES, limit=limit, up_limit=limit, up_offset=config.beta)
    return known.get(activation)


class MoEMlirExperts(mk.FusedMoEExpertsModular):
    """Experts whose weights are in panels, or codes of 4 to 8 bits in panels.

    vLLM selects the experts of each token, moves tokens between ranks and adds shared experts;
    this class runs the experts. Results of a token do not depend on the other tokens of a batch.
    """

    def __init__(self, moe_config, quant_config):
        super().__init__(moe_config, quant_config)
        self.codes: tuple[QuantizedWeight, QuantizedWeight] | None = None
        activation = activation_of(moe_config.activation, self.activation_config)
        # is_supported_config has asked, but for the limit without which vLLM has no activation.
        assert activation is not None
        self.expert_activation: ExpertActivation = activation

    # ---- what vLLM asks before it makes one -------------------------------------------

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    @staticmethod
    def activation_format():
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return current_platform.is_cpu() and \
            current_platform.get_cpu_architecture() == CpuArchEnum.X86

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation_of(activation, ApplyMoEActivationConfig(clamp_limit=7.0)) is not None

    @staticmethod
    def _supports_quant_scheme(weight_key, activation_key) -> bool:
        # A method of `methods.py` chooses this class for weights that it can read.
        return True

    @staticmethod
    def _supports_parallel_config(moe_parallel_config) -> bool:
        return True

    @staticmethod
    def _supports_batch_invariance() -> bool:
        return True

    # ---- weights ------------------------------------------------------------------------

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Packs weights that are floats, one after the other."""
        if self.codes is None:
            halves = self.expert_activation.gate == _HALVES
            replace_parameter(layer, "w13_weight", pack_weight(layer.w13_weight, halves=halves))
            replace_parameter(layer, "w2_weight", pack_weight(layer.w2_weight, halves=False))

    # ---- a call -------------------------------------------------------------------------

    def moe_problem_size(self, a1, w1, w2, topk_ids):
        # The shapes of panels say something else.
        config = self.moe_config
        rows = config.intermediate_size_per_partition * (2 if config.is_act_and_mul else 1)
        return w1.shape[0], a1.shape[0], rows, a1.shape[-1], topk_ids.shape[1]

    def workspace_shapes(self, M, N, K, topk, global_num_experts, local_num_experts,
                         expert_tokens_meta, activation):
        return (0,), (0,), (M, K)

    def finalize_weight_and_reduce_impl(self):
        return TopKWeightAndReduceNoOP()

    def apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation,
              global_num_experts, expert_map, a1q_scale, a2_scale, workspace13, workspace2,
              expert_tokens_meta, apply_router_weight_on_input):
        if expert_map is not None:
            # Experts of another rank are -1, which selects nothing.
            topk_ids = expert_map[topk_ids]
        if apply_router_weight_on_input:
            topk_weights = torch.ones_like(topk_weights)
        w_in, w_out = self.codes or (w1, w2)
        output.copy_(run_experts(
            hidden_states, topk_weights, topk_ids, w_in, w_out, b_in=self.w1_bias,
            b_out=self.w2_bias, activation=self.expert_activation))
