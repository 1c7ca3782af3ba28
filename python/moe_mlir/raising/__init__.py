"""Recognising routers in torch graphs, and raising them to moe ops."""

from .match import find_routers
from .raise_routing import raise_routing
from .site import RouterMatch

__all__ = ["RouterMatch", "find_routers", "raise_routing"]
