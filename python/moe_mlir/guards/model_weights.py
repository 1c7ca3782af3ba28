"""The parameters and buffers of a traced model, as the model holds them now.

A program names its weights as the model does. They are looked up by name at
every call, because `.half()`, `.to()`, `load_state_dict(assign=True)`, an
optimizer or tied weights may put another tensor, or another memory, in the
place of the one that was traced.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..experts.packed_weight import panels_of
from .model_form import ModelForm


class LiveState:
    """Tensors by dotted name: the model's own, or those that the trace made."""

    def __init__(self, model, traced: dict):
        self._model = model
        # Constants of the program, and all tensors where the model is not known.
        self._traced = {n: panels_of(t) for n, t in traced.items()
                        if model is None or _find(model, n) is None}
        self._names = [n for n in traced if n not in self._traced]
        self._tied = _tied_names(model)
        self._form = None if model is None else ModelForm(model)

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
        return iter((*self._names, *self._traced))

    def change(self) -> str:
        """What of the model is not as it was traced; empty if all is."""
        if self._form is not None and not self._form.holds():
            return str(self._form.difference())
        for a, b in self._tied:
            if _find(self._model, a) is not _find(self._model, b):
                return f"'{a}' and '{b}', which were one tensor, as two"
        return ""

    def guards(self) -> ModelGuards:
        """What tells that the model is as it is now, and where it holds the weights."""
        holders, hiding = {}, []
        for name in (*self._names, *(name for pair in self._tied for name in pair)):
            *way, (held, leaf, _) = _steps(self._model, name)
            # No tensor of this name is in a dictionary that is asked before.
            hiding += [(h.get, key) for h, key, answer in way if answer is None]
            holders[name] = held.get, leaf
        tied = [(*holders[a], *holders[b]) for a, b in self._tied]
        form = ((), (), ()) if self._form is None else self._form.places
        return ModelGuards(form, list(dict.fromkeys(hiding)), holders, tied)


class ModelGuards(NamedTuple):
    """Dictionaries of a model, by their `get`, and the names that they are asked for."""

    # What `is_unchanged` asks of modules, attributes and hooks.
    form: tuple[tuple, tuple, tuple]
    # (get, name) that gives nothing: where a tensor would hide a weight.
    hiding: list[tuple]
    # Dotted name of a weight -> (get, name) of the dictionary that holds it.
    holders: dict[str, tuple]
    # (get, name, get, name) of two that are one tensor.
    tied: list[tuple]


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


__all__ = ["LiveState"]
