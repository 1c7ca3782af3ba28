"""The routers of vLLM's models on a CPU by the kernels of this package."""

import torch
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

from ..formulas import SCORE_FUNCTIONS
from ..ops import grouped_topk, topk_renorm


class MoEMlirRouter(CPURouter):
    """One kernel for scores, selection and gates.

    Ties go to the lower index, and each token has k different experts whatever its scores. A model
    with a routing function of its own keeps it, and experts by a table of token ids stay vLLM's.
    """

    def _compute_routing(self, hidden_states, router_logits, indices_type, *, input_ids=None):
        if self.custom_routing_function is not None or self._hash_indices_table is not None or \
                self.scoring_func not in SCORE_FUNCTIONS:
            return super()._compute_routing(hidden_states, router_logits, indices_type,
                                            input_ids=input_ids)
        bias = self.e_score_correction_bias
        if not self.use_grouped_topk and bias is None and self.scoring_func == "softmax":
            return topk_renorm(router_logits, self.top_k, renorm=self.renormalize,
                               index_dtype=torch.int32)
        groups = (self.num_expert_group, self.topk_group) if self.use_grouped_topk else (1, 1)
        scales = self.use_grouped_topk or bias is not None
        return grouped_topk(
            router_logits, self.top_k, bias=None if bias is None else bias.float(),
            score=self.scoring_func, n_group=groups[0], topk_group=groups[1],
            group_score="max" if bias is None else "top2", renorm=self.renormalize,
            # Of others vLLM leaves the factor of all gates to the model.
            route_scale=self.routed_scaling_factor if scales else 1.0, index_dtype=torch.int32)
