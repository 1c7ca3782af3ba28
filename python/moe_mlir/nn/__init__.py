"""Router modules: a row of docs/Spec.md section 4 each, and a layer that runs experts.

`forward(h, mask=None, **state)` returns a `Routing`; what a method carries
from call to call is its `state`, which goes back in as `**state`. With
`impl="torch"` a router runs the plain-torch meaning of its ops instead of the
compiled kernels. One file a family; docs/Methods.md lists them.
"""

from ._composed import ComposedRouter
from ._router import LinearRouter, Router, Routing, Scores, linear_increase, update_routers
from .clusters import ACMoE
from .cosine import StableMoE, TwoStageStableMoE, XMoE
from .deepseek import DeepSeekV3Router
from .fixed import THOR, HyperRouter, SMoEDropout, thor_loss
from .layer import MoELayer
from .linear import GLaM, SMoE, Switch, VMoE
from .mutual import AttentionSMoE, SimilaritySMoE
from .soft import SoftACMoE, SoftMoE, SymphonySoftMoE
from .symphony import SymphonySMoE
from .threshold import DynamicTopP

__all__ = [
    "ACMoE",
    "AttentionSMoE",
    "ComposedRouter",
    "DeepSeekV3Router",
    "DynamicTopP",
    "GLaM",
    "HyperRouter",
    "LinearRouter",
    "MoELayer",
    "Router",
    "Routing",
    "SMoE",
    "SMoEDropout",
    "Scores",
    "SimilaritySMoE",
    "SoftACMoE",
    "SoftMoE",
    "StableMoE",
    "Switch",
    "SymphonySMoE",
    "SymphonySoftMoE",
    "THOR",
    "TwoStageStableMoE",
    "VMoE",
    "XMoE",
    "linear_increase",
    "thor_loss",
    "update_routers",
]


def __dir__() -> list[str]:
    return sorted(__all__)
