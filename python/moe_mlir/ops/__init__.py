"""The routing ops: compiled kernels behind `torch.ops.moe.*`.

One file an op, named after it: the public function, the checks of its
arguments, the kernel that it compiles to, its shapes for tracing, its gradient.
"""

from .adjacency_gate import adjacency_gate
from .adjacency_update import adjacency_update
from .attention_posterior import attention_posterior
from .balance_loss import balance_loss
from .bias_update import bias_update
from .combine import combine
from .densify import densify
from .dispatch import dispatch
from .grouped_topk import grouped_topk
from .mad_dispersion import mad_dispersion
from .make_finite import make_finite
from .router_logits import router_logits
from .similarity_inform import similarity_inform
from .soft_dispatch import soft_dispatch
from .threshold_renorm import threshold_renorm
from .topk_renorm import topk_renorm
from .z_loss import z_loss

__all__ = [
    "adjacency_gate",
    "adjacency_update",
    "attention_posterior",
    "balance_loss",
    "bias_update",
    "combine",
    "densify",
    "dispatch",
    "grouped_topk",
    "mad_dispersion",
    "make_finite",
    "router_logits",
    "similarity_inform",
    "soft_dispatch",
    "threshold_renorm",
    "topk_renorm",
    "z_loss",
]
