"""A compiler for the routing of mixture-of-experts models.

The routing ops, their meaning in plain torch (`reference`), router
modules (`nn`), metrics, and the road from a torch model to compiled code
(`export`, `compile`, `load`, `torch.compile(backend="moe")`).

The ops register with torch as `torch.ops.moe.*` on import. Everything else is
loaded at its first use, and without torch the artifact runtime still imports.
"""

import importlib
import importlib.util

from ._moved import MOVED, import_moved
from ._version import __version__  # noqa: F401

_OPS = (
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
)
# Public name -> the submodule that defines it.
_FUNCTIONS = {
    **dict.fromkeys(_OPS, "ops"),
    "MoeError": "_native",
    "RouterMatch": "fx",
    "compile": "compiled_model",
    "doctor": "environment_report",
    "explain": "frontends.explain",
    "export": "frontends.export",
    "inductor_pass": "frontends.inductor",
    "load": "artifact",
    "pack_experts": "packing",
    "simulate": "sim.simulation",
    "unpack_experts": "packing",
    "update_routers": "nn",
}
_SUBMODULES = (
    "crash_report",
    "distributed",
    "jit",
    "metrics",
    "nn",
    "phases",
    "plots",
    "reference",
    "sim",
)

# Needs transformers, so `from moe_mlir import *` leaves it alone.
_OPTIONAL = ("hf",)

__all__ = [*_FUNCTIONS, *_SUBMODULES]


def __getattr__(name):
    if name in _SUBMODULES + _OPTIONAL:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _FUNCTIONS:
        module = importlib.import_module(f"{__name__}.{_FUNCTIONS[name]}")
        value = getattr(module, name)
        globals()[name] = value
        return value
    if name in MOVED:
        return import_moved(name)
    raise AttributeError(f"module 'moe_mlir' has no attribute '{name}'")


def __dir__():
    return sorted({*globals(), *__all__})


if importlib.util.find_spec("torch") is not None:
    from . import ops  # noqa: F401  registers torch.ops.moe.*
