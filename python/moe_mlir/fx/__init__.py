"""Recognising routers in torch graphs, and raising them to moe ops."""

from .explain import explain
from .match import find_routers
from .raise_routing import raise_routing
from .site import RouterMatch

__all__ = ["RouterMatch", "explain", "find_routers", "raise_routing"]
