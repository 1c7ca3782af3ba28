"""The routing ops: compiled kernels behind `torch.ops.moe.*`.

One file an op, named after it: the public function, the checks of its
arguments, the kernel that it compiles to, its shapes for tracing, its gradient.
"""

from .adjacency_gate import adjacency_gate
from .adjacency_update import adjacency_update
from .attention_posterior import attention_posterior
from .mad_dispersion import mad_dispersion
from .router_logits import router_logits
from .similarity_inform import similarity_inform
from .topk_renorm import topk_renorm

__all__ = [
    "adjacency_gate",
    "adjacency_update",
    "attention_posterior",
    "mad_dispersion",
    "router_logits",
    "similarity_inform",
    "topk_renorm",
]
