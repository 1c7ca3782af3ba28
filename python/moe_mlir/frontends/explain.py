"""moe_mlir.explain: what the compiler sees of a model's routers."""

import logging
from collections.abc import Mapping
from typing import Any

import torch

from ..raising.before_autograd import trace_before_autograd
from ..raising.match import find_selections
from ..raising.site import RouterMatch
from .export import check_inputs, decompose, trace

_log = logging.getLogger("moe_mlir.explain")


def explain(
    model: torch.nn.Module | torch.export.ExportedProgram,
    args: tuple[Any, ...],
    *,
    kwargs: Mapping[str, Any] | None = None,
) -> list[RouterMatch]:
    """Every selection of the model: its form and parameters, or why it is none.

    A model that torch.export cannot capture, because it loops over experts by
    what the router chose, is run once, and the graphs between its breaks are read.

    Args:
        model: a torch.nn.Module or an ExportedProgram.
        args: example inputs, as a tuple.
        kwargs: example keyword inputs.
    """
    if isinstance(model, torch.export.ExportedProgram):
        return find_selections(decompose(model).graph)
    check_inputs(model, args, kwargs)
    try:
        program = trace(model, args, kwargs)
    except Exception as error:  # torch.export raises whatever the model's code leads it to
        _log.info("torch.export cannot capture the model, it is run in pieces instead: %s",
                  str(error).splitlines()[0] if str(error) else type(error).__name__)
        return _explain_pieces(model, args, kwargs or {})
    return find_selections(program.graph)


def _explain_pieces(model, args, kwargs) -> list[RouterMatch]:
    """The selections of each piece, as often as the piece runs."""
    found: list[RouterMatch] = []

    def note(module, inputs):
        _, graphs = trace_before_autograd(module)
        matches = [match for graph in graphs for match in find_selections(graph.graph)]

        def run(*tensors):
            found.extend(matches)
            return module.forward(*tensors)
        return run
    with torch.no_grad():
        torch.compile(model, backend=note)(*args, **kwargs)
    return found
