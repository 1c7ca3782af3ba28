"""The routing ops: compiled kernels behind `torch.ops.moe.*`.

One file an op, named after it: the public function, the checks of its
arguments, the kernel that it compiles to, its shapes for tracing, its gradient.
"""

from .ac_logits import ac_logits
from .adjacency_gate import adjacency_gate
from .adjacency_update import adjacency_update
from .attention import attention
from .attention_entropy import attention_entropy
from .attention_posterior import attention_posterior
from .balance_loss import balance_loss
from .bias_update import bias_update
from .combine import combine
from .cosine_logits import cosine_logits
from .densify import densify
from .dispatch import dispatch
from .dispersion_weights import dispersion_weights
from .grouped_topk import grouped_topk
from .hyper_router import hyper_router
from .mad_dispersion import mad_dispersion
from .make_finite import make_finite
from .router_logits import router_logits
from .similarity_inform import similarity_inform
from .soft_dispatch import soft_dispatch
from .threshold_renorm import threshold_renorm
from .topk_renorm import topk_renorm
from .z_loss import z_loss

__all__ = [
    "ac_logits",
    "adjacency_gate",
    "adjacency_update",
    "attention",
    "attention_entropy",
    "attention_posterior",
    "balance_loss",
    "bias_update",
    "combine",
    "cosine_logits",
    "densify",
    "dispatch",
    "dispersion_weights",
    "grouped_topk",
    "hyper_router",
    "mad_dispersion",
    "make_finite",
    "router_logits",
    "similarity_inform",
    "soft_dispatch",
    "threshold_renorm",
    "topk_renorm",
    "z_loss",
]


def __dir__() -> list[str]:
    return sorted(__all__)
