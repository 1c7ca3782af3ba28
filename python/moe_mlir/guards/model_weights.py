"""The parameters and buffers of a traced model, as the model holds them now.

A program names its weights as the model does. They are looked up by name at
every call, because `.half()`, `.to()`, `load_state_dict(assign=True)`, an
optimizer or tied weights may put another tensor, or another memory, in the
place of the one that was traced.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch

from .._native import native
from ..experts.packed_weight import PackedWeight, panels_of
from .model_form import ModelForm


class ModelWeights:
    """Tensors by dotted name: the model's own, or those that the trace made."""

    def __init__(self, model, traced: dict):
        self._model = model
        # Constants of the program, and all tensors where the model is not known.
        self._traced = {n: panels_of(t) for n, t in traced.items()
                        if model is None or _find(model, n) is None}
        names = [n for n in traced if n not in self._traced]
        self._numbers = {name: number for number, name in enumerate(names)}
        self._tied = _tied_names(model)
        self._form = None if model is None else ModelForm(model)
        self._guard: Any = None

    def __getitem__(self, name) -> torch.Tensor:
        traced = self._traced.get(name)
        if traced is not None:
            return traced
        tensor = _find(self._model, name)
        if tensor is None:
            raise ValueError(f"expected a parameter or buffer '{name}' on the model, as at export, "
                             "found none; compile the model again")
        return tensor

    def __iter__(self):
        return iter((*self._numbers, *self._traced))

    @property
    def guard(self) -> Any:
        """The native guard, which holds as long as the model is as it was at the last `change`."""
        return self._guard

    def number(self, name: str) -> int | None:
        """The number of a weight among those of the guard; None for a tensor of the trace."""
        return self._numbers.get(name)

    def change(self) -> str:
        """What of the model is not as it was traced; empty if all is."""
        if self._guard is not None and self._guard.holds():
            return ""
        difference = None if self._form is None else self._form.difference()
        if difference is not None:
            return str(difference)
        for a, b in self._tied:
            if _find(self._model, a) is not _find(self._model, b):
                return f"'{a}' and '{b}', which were one tensor, as two"
        if self._guard is None:
            self._guard = native().ModelGuard({PackedWeight: "panels"})
        self._guard.expect(*self._places())
        return ""

    def _places(self):
        """What `ModelGuard.expect` takes, of the model as it is now."""
        holders: dict[str, tuple] = {}
        absent: dict[tuple, tuple] = {}
        for name in (*self._numbers, *(name for pair in self._tied for name in pair)):
            *way, (held, leaf, _) = _steps(self._model, name)
            # No tensor of this name is in a dictionary that is asked before.
            absent |= {(id(h), key): (h, key) for h, key, answer in way if answer is None}
            holders[name] = held, leaf
        form = ((), (), ()) if self._form is None else self._form.places
        tied = [(*holders[a], *holders[b]) for a, b in self._tied]
        weights = [holders[name] for name in self._numbers]
        return (*form, *(tuple(chain.from_iterable(entries))
                         for entries in (absent.values(), tied, weights)))

    def __getstate__(self):
        # The objects of a copy are others.
        return vars(self) | {"_guard": None}


def _steps(model, name):
    """(dictionary, key, answer) on the way to a dotted name; the last one has the tensor, if any."""
    *owners, leaf = name.split(".")
    for owner in owners:
        held, model = model._modules, model._modules.get(owner)
        yield held, owner, model
        if model is None:
            return
    for held in (model._parameters, model._buffers, vars(model)):
        answer = held.get(leaf)
        yield held, leaf, answer
        if answer is not None:
            return


def _find(model, name):
    """The tensor at a dotted name of the model; None where there is none."""
    *_, (_, _, found) = _steps(model, name)
    return panels_of(found) if isinstance(found, torch.Tensor) else None


def is_of_model(model: torch.nn.Module, name: str) -> bool:
    """Whether the model has a parameter, buffer or tensor of this dotted name."""
    return _find(model, name) is not None


def _tied_names(model):
    """Pairs of names of one tensor: a program may read both under one of them."""
    if model is None:
        return []
    first: dict[int, str] = {}
    pairs = []
    for kind in (model.named_parameters, model.named_buffers):
        for name, tensor in kind(remove_duplicate=False):
            if first.setdefault(id(tensor), name) != name:
                pairs.append((first[id(tensor)], name))
    return pairs


__all__ = ["ModelWeights", "is_of_model"]
