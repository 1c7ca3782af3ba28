"""A compiler for the routing of mixture-of-experts models.

The package has routing ops, their references in plain torch (`reference`), router
modules (`nn`), metrics, and functions that compile torch models (`export`,
`compile`, `load`, and `torch.compile(backend="moe")`).

Importing it registers the ops with torch as `torch.ops.moe.*`. Everything else is
loaded when it is first used. The runtime of artifacts also works without torch.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from ._deprecated_names import import_moved, new_name
from ._version import __version__  # noqa: F401

if TYPE_CHECKING:
    # What type checkers and editors see of the names that are loaded at their first use;
    # `as` tells them that a name is meant to be found here.
    from . import (
        distributed as distributed,
    )
    from . import (
        experts as experts,
    )
    from . import (
        hf as hf,
    )
    from . import (
        megatron as megatron,
    )
    from . import (
        metrics as metrics,
    )
    from . import (
        nn as nn,
    )
    from . import (
        onnx as onnx,
    )
    from . import (
        plots as plots,
    )
    from . import (
        reference as reference,
    )
    from . import (
        sim as sim,
    )
    from ._native import MoeError as MoeError
    from .artifact import load as load
    from .cli.doctor import doctor as doctor
    from .compiled.compare import compare as compare
    from .compiled.model import compile as compile
    from .compiled.warm_up import warm_up as warm_up
    from .decoding import save_decoder as save_decoder
    from .frontends.explain import explain as explain
    from .frontends.export import export as export
    from .frontends.inductor import inductor_pass as inductor_pass
    from .nn import update_routers as update_routers
    from .ops import (
        ac_logits as ac_logits,
    )
    from .ops import (
        adjacency_gate as adjacency_gate,
    )
    from .ops import (
        adjacency_update as adjacency_update,
    )
    from .ops import (
        attention as attention,
    )
    from .ops import (
        attention_entropy as attention_entropy,
    )
    from .ops import (
        attention_posterior as attention_posterior,
    )
    from .ops import (
        balance_loss as balance_loss,
    )
    from .ops import (
        bias_update as bias_update,
    )
    from .ops import (
        combine as combine,
    )
    from .ops import (
        cosine_logits as cosine_logits,
    )
    from .ops import (
        densify as densify,
    )
    from .ops import (
        dispatch as dispatch,
    )
    from .ops import (
        dispersion_weights as dispersion_weights,
    )
    from .ops import (
        grouped_topk as grouped_topk,
    )
    from .ops import (
        hyper_router as hyper_router,
    )
    from .ops import (
        mad_dispersion as mad_dispersion,
    )
    from .ops import (
        make_finite as make_finite,
    )
    from .ops import (
        router_logits as router_logits,
    )
    from .ops import (
        similarity_inform as similarity_inform,
    )
    from .ops import (
        soft_dispatch as soft_dispatch,
    )
    from .ops import (
        threshold_renorm as threshold_renorm,
    )
    from .ops import (
        topk_renorm as topk_renorm,
    )
    from .ops import (
        z_loss as z_loss,
    )
    from .packing import pack_experts as pack_experts
    from .packing import pack_linears as pack_linears
    from .packing import unpack_experts as unpack_experts
    from .packing import unpack_linears as unpack_linears
    from .quantization import from_pretrained as from_pretrained
    from .quantization import quantize as quantize
    from .quantization import save_pretrained as save_pretrained
    from .raising import RouterMatch as RouterMatch
    from .sim.simulation import simulate as simulate

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
    "RouterMatch": "raising",
    "compare": "compiled.compare",
    "compile": "compiled.model",
    "doctor": "cli.doctor",
    "explain": "frontends.explain",
    "export": "frontends.export",
    "from_pretrained": "quantization",
    "inductor_pass": "frontends.inductor",
    "load": "artifact",
    "pack_experts": "packing",
    "pack_linears": "packing",
    "quantize": "quantization",
    "save_decoder": "decoding",
    "save_pretrained": "quantization",
    "simulate": "sim.simulation",
    "unpack_experts": "packing",
    "unpack_linears": "packing",
    "update_routers": "nn",
    "warm_up": "compiled.warm_up",
}
_SUBMODULES = (
    "distributed",
    "experts",
    "megatron",
    "metrics",
    "nn",
    "plots",
    "reference",
    "sim",
)

# Need transformers, or onnx, so `from moe_mlir import *` leaves them alone.
_OPTIONAL = ("hf", "onnx")

__all__ = [*_FUNCTIONS, *_SUBMODULES]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES + _OPTIONAL:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _FUNCTIONS:
        module = importlib.import_module(f"{__name__}.{_FUNCTIONS[name]}")
        value = getattr(module, name)
        globals()[name] = value
        return value
    if new_name(name) is not None:
        return import_moved(name)
    raise AttributeError(f"module 'moe_mlir' has no attribute '{name}'")


def __dir__() -> list[str]:
    """What a user types: public names, also those that are loaded at their first use."""
    optional = ["hf"] if importlib.util.find_spec("transformers") is not None else []
    if importlib.util.find_spec("onnx") is not None:
        optional.append("onnx")
    return sorted([*__all__, *optional, "__version__"])


if importlib.util.find_spec("torch") is not None:
    from . import ops  # noqa: F401  registers torch.ops.moe.*
