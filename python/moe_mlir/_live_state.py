"""The parameters and buffers of a traced model, as the model holds them now.

A program names its weights as the model does. They are looked up by name at
every call, because `.half()`, `.to()`, `load_state_dict(assign=True)`, an
optimizer or tied weights may put another tensor, or another memory, in the
place of the one that was traced.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class LiveState:
    """Tensors by dotted name: the model's own, or those that the trace made."""

    def __init__(self, model, traced: dict):
        self._model = model
        # Constants of the program, and all tensors where the model is not known.
        self._traced = {n: t for n, t in traced.items() if model is None or _find(model, n) is None}
        self._names = [n for n in traced if n not in self._traced]
        self._tied = _tied_names(model)
        self._modes = [] if model is None else [(m, m.training) for m in model.modules()]

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

    def is_as_traced(self) -> bool:
        """Whether the model is still in the mode of the trace, with the same weights tied."""
        return (all(module.training == mode for module, mode in self._modes)
                and all(_find(self._model, a) is _find(self._model, b) for a, b in self._tied))

    def places(self) -> Places:
        """What tells that the model is as it is now, and where it holds the weights."""
        fixed = {(id(vars(m)), "training"): (vars(m).get, "training", mode)
                 for m, mode in self._modes}
        holders = {}
        for name in (*self._names, *(name for pair in self._tied for name in pair)):
            *way, (held, leaf, _) = _steps(self._model, name)
            fixed.update({(id(h), key): (h.get, key, answer) for h, key, answer in way})
            holders[name] = held.get, leaf
        tied = [(*holders[a], *holders[b]) for a, b in self._tied]
        return Places(list(fixed.values()), holders, tied)


class Places(NamedTuple):
    """Dictionaries of a model, by their `get`, and the names that they are asked for."""

    # (get, name, expected): modules, their modes, and names that no tensor hides.
    fixed: list[tuple]
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
    return found if isinstance(found, torch.Tensor) else None


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
