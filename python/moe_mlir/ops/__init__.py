"""The routing ops: compiled kernels behind `torch.ops.moe.*`.

One file an op, named after it: the public function, the checks of its
arguments, the kernel that it compiles to, its shapes for tracing, its gradient.
"""

from .ac_logits import ac_logits
from .adjacency_gate import adjacency_gate
from .adjacency_update import adjacency_update
from .attention_entropy import attention_entropy
from .attention_posterior import attention_posterior
from .cosine_logits import cosine_logits
from .dispersion_weights import dispersion_weights
from .hyper_router import hyper_router
from .mad_dispersion import mad_dispersion
from .router_logits import router_logits
from .similarity_inform import similarity_inform
from .topk_renorm import topk_renorm

__all__ = [
    "ac_logits",
    "adjacency_gate",
    "adjacency_update",
    "attention_entropy",
    "attention_posterior",
    "cosine_logits",
    "dispersion_weights",
    "hyper_router",
    "mad_dispersion",
    "router_logits",
    "similarity_inform",
    "topk_renorm",
]
