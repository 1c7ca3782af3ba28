"""Recognising routers in torch graphs, and raising them to moe ops."""

from .explain import explain
from .match import RouterMatch, find_routers
from .raise_routing import raise_routing

__all__ = ["RouterMatch", "explain", "find_routers", "raise_routing"]
