"""Weights that were packed without being asked for, until somebody trains them.

`moe_mlir.compile` packs the weights of a model that it is given. They still require the
gradients that they did, and whoever computes one finds the weights as they were: before a function
runs that may have a gradient of one of them, all are given back.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

_log = logging.getLogger("moe_mlir.compile")


class Loan:
    """The weights that were packed together, and the experts implementations that were changed.

    A copy of a model, or another process, has a loan of its own, which its weights join.

    Args:
        unpack: makes a packed weight what it was, in place.
    """

    def __init__(self, unpack: Callable[[Any], None]) -> None:
        self._unpack = unpack
        self._weights: dict[int, weakref.ref] = {}
        # Configurations of transformers, and which implementation they named.
        self._implementations: list[tuple[Any, str]] = []

    def add(self, weight: torch.Tensor) -> None:
        self._weights[id(weight)] = weakref.ref(weight)

    def add_implementation(self, config: Any, implementation: str) -> None:
        self._implementations.append((config, implementation))

    @property
    def weights(self) -> list[Any]:
        """Those that have not been given back."""
        found = (reference() for reference in self._weights.values())
        return [weight for weight in found if weight is not None]

    def has(self, weight: torch.Tensor) -> bool:
        """Whether it is one of these, and no copy that a tracer made with all of its attributes."""
        reference = self._weights.get(id(weight))
        return reference is not None and reference() is weight

    def give_back(self, weights: Iterable[torch.Tensor] | None = None) -> None:
        """Unpacks these weights, or all; they require gradients if they do now."""
        for weight in self.weights if weights is None else weights:
            self._unpack(weight)
            self._weights.pop(id(weight), None)
        # Of experts that remain packed, no other implementation reads the panels.
        if not any(len(weight.form.shape) == 3 for weight in self.weights):
            for config, implementation in self._implementations:
                if config._experts_implementation == "moe":
                    config._experts_implementation = implementation
            self._implementations.clear()

    def give_back_to_train(self) -> None:
        """Gives back those that require gradients."""
        weights = [weight for weight in self.weights if weight.requires_grad]
        _log.info("%d packed weights are given back: they require gradients, and the model ran "
                  "with gradients enabled", len(weights))
        self.give_back(weights)

    def __getstate__(self) -> dict:
        return vars(self) | {"_weights": {}, "_implementations": list(self._implementations)}


__all__ = ["Loan"]
