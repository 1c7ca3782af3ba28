"""What every op means, in plain torch.

Each function follows the formulas of docs/Spec.md literally and takes any
floating dtype: float64 inputs are computed and returned in float64, all others
in float32. It is the judge of the compiled kernels (on float64 copies of the
same inputs), the `impl="torch"` form of the router modules, and differentiable
by torch's own autograd. It favours the reading over the speed: the mixing ops
hold the whole N x N matrix.

One file a family: selection, scores, mixing, statistics, dispatch, losses.
"""

from ..formulas import (
    DISPERSION_PRESETS,
    blend_counts,
    co_selections,
    entropy,
    map_scores,
    mix_metric,
    ratio,
)
from .dispatch import capacity_of, combine, dispatch, soft_dispatch
from .losses import balance_loss, bias_update, z_loss
from .mixing import (
    attention,
    attention_entropy,
    attention_posterior,
    lowest_entropy_head,
    similarity_inform,
    visible_keys,
)
from .scores import ac_logits, cosine_logits, hyper_router, router_logits
from .selection import (
    densify,
    grouped_topk,
    make_finite,
    rank_experts,
    threshold_renorm,
    topk_renorm,
)
from .statistics import (
    adjacency_gate,
    adjacency_update,
    dispersion_weights,
    mad_dispersion,
)

__all__ = [
    "DISPERSION_PRESETS",
    "ac_logits",
    "adjacency_gate",
    "adjacency_update",
    "attention",
    "attention_entropy",
    "attention_posterior",
    "balance_loss",
    "bias_update",
    "blend_counts",
    "capacity_of",
    "co_selections",
    "combine",
    "cosine_logits",
    "densify",
    "dispatch",
    "dispersion_weights",
    "entropy",
    "grouped_topk",
    "hyper_router",
    "lowest_entropy_head",
    "mad_dispersion",
    "make_finite",
    "map_scores",
    "mix_metric",
    "rank_experts",
    "ratio",
    "router_logits",
    "similarity_inform",
    "soft_dispatch",
    "threshold_renorm",
    "topk_renorm",
    "visible_keys",
    "z_loss",
]


def __dir__() -> list[str]:
    return sorted(__all__)
