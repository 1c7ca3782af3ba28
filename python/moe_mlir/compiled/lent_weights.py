"""Traces a model whose weights `packing.lend` packed, and gives back those that it reads itself."""

import logging
from collections.abc import Mapping
from typing import Any

import torch

from ..frontends.export import Module, export
from ..packing import give_back, lend, lent

_log = logging.getLogger("moe_mlir.compile")


def export_lent(
    model: torch.nn.Module,
    args: tuple | None,
    kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Module:
    """`export` of a model, of which some weights may be lent.

    Code that reads the weight of a linear layer without calling it gets panels in a trace: their
    weights are given back, and the model is traced again.
    """
    weights = lent(model)
    if not weights:
        return export(model, args, kwargs=kwargs, **options)
    try:
        module = export(model, args, kwargs=kwargs, **options)
    except Exception as error:  # whatever code says that is given panels
        return _export_unpacked(model, args, kwargs, options, weights, error)
    misread = [weights[name] for name in module.misread if name in weights]
    if not misread:
        return module
    _log.info("%s are not packed: the model reads them without calling their layers",
              module.misread)
    _give_back(misread)
    return export(model, args, kwargs=kwargs, **options)


def _give_back(weights) -> None:
    for weight in weights:
        weight.loan.give_back([weight])


def _export_unpacked(model, args, kwargs, options, weights, error) -> Module:
    """The program without panels; what the model refuses itself leaves these weights packed."""
    give_back(model)
    try:
        module = export(model, args, kwargs=kwargs, **options)
    except Exception:
        # Not those that were given back before, to somebody who trains them.
        _give_back([w for name, w in lend(model).items() if name not in weights])
        raise
    _log.info("%s is not packed, which cannot be traced with it: %s", type(model).__name__, error)
    return module


__all__ = ["export_lent"]
