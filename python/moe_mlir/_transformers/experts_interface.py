"""transformers' interface of experts: the implementation "moe".

Importing this module registers it, and asks for transformers.
"""

import torch

from ..experts import run_experts, run_rows
from ..experts.activation_detection import activation_of
from ..experts.packed_weight import operand_of
from ..experts.quantized_weight import QuantizedWeight
from ..ops._panels import is_packed
from .names import has_post_expert_norm


def experts_forward(
    self: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """transformers' interface of experts, on dispatch, grouped layers and combine.

    An expert of another rank, by the id `num_experts` of expert parallelism, adds nothing.
    """
    first = operand_of(self.gate_up_proj if self.has_gate else self.up_proj)
    bias = self.gate_up_proj_bias if self.has_gate and self.has_bias else \
        self.up_proj_bias if self.has_bias else None
    last_bias = self.down_proj_bias if self.has_bias else None
    x = hidden_states.to(first.dtype)
    if not has_post_expert_norm(self):
        activation = activation_of(self) or (self._apply_gate if self.has_gate else self.act_fn)
        # Panels are made of either order.
        transposed = self.is_transposed and not (
            isinstance(first, QuantizedWeight) or is_packed(first))
        y = run_experts(x, top_k_weights, top_k_index, first, self.down_proj, b_in=bias,
                        b_out=last_bias, activation=activation, transposed=transposed)
        return y.to(hidden_states.dtype)

    def expert(rows, offsets):
        hidden = _layer(self, rows, first, bias, offsets)
        hidden = self._apply_gate(hidden) if self.has_gate else self.act_fn(hidden)
        return self.post_expert_norm(_layer(self, hidden, self.down_proj, last_bias, offsets))
    y = run_rows(x, top_k_weights, top_k_index, self.num_experts, expert)
    return y.to(hidden_states.dtype)


def _layer(experts, rows, weight, bias, offsets):
    # Stored as [experts, in, out] if transposed, else as [experts, out, in].
    return torch.ops.moe.grouped_linear(rows.to(weight.dtype), weight, bias, offsets, None,
                                        experts.is_transposed)


def register_experts() -> None:
    """Makes "moe" an experts implementation of transformers; done when this module is imported."""
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:
        raise ImportError("expected transformers 5 or later for moe_mlir.hf, found none that has "
                          f"an experts interface: {error}; pip install 'transformers>=5'"
                          ) from error
    ALL_EXPERTS_FUNCTIONS.register("moe", experts_forward)


register_experts()

__all__ = ["experts_forward", "register_experts"]
