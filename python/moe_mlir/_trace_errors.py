"""What torch.export says when it cannot trace a model, at the model's line and in our words."""

import contextlib
import os
import traceback

import torch

_FOREIGN = tuple(os.path.dirname(os.path.abspath(path)) + os.sep
                 for path in (torch.__file__, __file__, contextlib.__file__))


class TraceFailed(ValueError):
    """A model that torch.export cannot trace: where, why, and what to do."""


@contextlib.contextmanager
def explained():
    """Turns torch's reports about the model in the block into TraceFailed."""
    from torch._dynamo.exc import TorchDynamoException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    try:
        yield
    except (GuardOnDataDependentSymNode, TorchDynamoException) as error:
        raise TraceFailed(_describe(error)) from None


def _describe(error) -> str:
    place = _users_line(error)
    text = str(error)
    if "data-dependent" in text or "data dependent" in text:
        reason = ("expected a graph for all inputs, found control flow that depends on data; choose "
                  "with torch.where, or branch with torch.cond")
    else:
        first = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
        reason = (f"torch.export cannot trace this: {first.strip()}; torch.export.export(model, "
                  "args) alone gives torch's whole report")
    return f"{place}: {reason}" if place else reason


def _users_line(error) -> str:
    """The innermost line that is neither torch's nor ours."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not os.path.abspath(frame.filename).startswith(_FOREIGN) and frame.filename[:1] != "<":
            return f"{frame.filename}:{frame.lineno}"
    return ""
