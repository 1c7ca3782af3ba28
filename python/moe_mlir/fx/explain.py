"""moe_mlir.explain: what the compiler sees of a model's routers."""

import torch

from .match import RouterMatch, find_selections


def explain(model, args, *, kwargs=None) -> list[RouterMatch]:
    """Every top-k site of the model: its form and parameters, or why it is none.

    Args:
        model: a torch.nn.Module or an ExportedProgram.
        args: example inputs, as a tuple.
        kwargs: example keyword inputs.
    """
    from ..export import decompose, trace
    if isinstance(model, torch.export.ExportedProgram):
        program = decompose(model)
    else:
        program, _, _ = trace(model, args, kwargs)
    return find_selections(program.graph)
