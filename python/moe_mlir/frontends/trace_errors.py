"""What torch.export says when it cannot trace a model, at the model's line and in our words."""

import contextlib
import os
import re
import traceback

import torch

from .._support.paths import PREFIX
from .._torch.core import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
    pytree,
)

_FOREIGN = (PREFIX, *(os.path.dirname(os.path.abspath(path)) + os.sep
                      for path in (torch.__file__, contextlib.__file__)))


_UNKNOWN_OUTPUT = re.compile(r"Found <class '([^']+)'> in output, which is not a known type")
# Of Module.to on weights without memory.
_CAST_LAYER = "_apply(): Couldn't swap"
# Of tensors that a trace makes where the model takes the memory of one without its history.
_WRITE_OF_DATA = "fake tensor in the exported program constant's list"
# Of resize_.
_RESIZED = "tried to directly modify sizes"
# Of a function in C++ that needs numbers.
_NO_OPEN_SIZES = "with symbolic sizes/strides"
# What a trace has no tensors for, and what to do.
_OPERATORS = {
    DataDependentOutputException: (
        "whose result is a number that depends on data; compute with tensors, such as by (a == b).all()"),
    DynamicOutputShapeException: (
        "whose results have sizes that depend on data; compile the parts around it separately"),
    UnsupportedOperatorException: (
        "which torch.export cannot trace; compile the parts around it separately"),
}


class TraceFailed(ValueError):
    """A model that torch.export cannot trace: where, why, and what to do."""


@contextlib.contextmanager
def explained():
    """Turns torch's reports about the model in the block into TraceFailed."""
    from torch.fx.experimental.symbolic_shapes import (
        GuardOnDataDependentSymNode,
        PendingUnbackedSymbolNotFound,
    )

    from .._torch.dynamo import TorchDynamoException

    try:
        yield
    except (GuardOnDataDependentSymNode, PendingUnbackedSymbolNotFound, TorchDynamoException) as error:
        raise TraceFailed(_describe(error)) from None
    except tuple(_OPERATORS) as error:
        raise TraceFailed(f"{_users_line(error)}: expected operators that a trace can run, found "
                          f"{error.func}, {_OPERATORS[type(error)]}") from None
    except RuntimeError as error:
        if _CAST_LAYER in str(error):
            raise TraceFailed(
                f"{_users_line(error)}: expected a forward that leaves its layers as they are, found "
                "one that casts or moves them; cast their inputs, and the model before it is "
                "compiled") from None
        if _WRITE_OF_DATA in str(error):
            raise TraceFailed(
                "expected writes that a trace can see, found a use of '.data'; write in place, such as "
                "by x.mul_(2), under torch.no_grad()") from None
        if _RESIZED in str(error):
            raise TraceFailed(f"{_users_line(error)}: expected tensors that keep their shape, found resize_; "
                              "make a new tensor") from None
        if _NO_OPEN_SIZES in str(error):
            raise TraceFailed(_describe(error)) from None
        found = _UNKNOWN_OUTPUT.search(str(error))
        if found is None:
            raise
        raise TraceFailed(
            f"expected outputs made of tensors, found an object of {found[1]} among them; leave it "
            "out, or register the class with torch.utils._pytree.register_pytree_node") from None


def require_weights_in_memory(model, args, kwargs=None) -> None:
    """Refuses weights without memory, such as those that accelerate offloads, beside real inputs."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if torch.nn.parameter.is_lazy(tensor):
            raise TraceFailed(f"expected weights with shapes, found '{name}' of a lazy module, which has none yet; "
                              "call the model once before")
    inputs = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    if all(x.is_meta for x in inputs):
        return
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise TraceFailed(
                f"expected weights in memory, found '{name}' on the device 'meta'; if accelerate "
                "offloads it, load the model whole, or run it with hf.patch(model)")


def _describe(error) -> str:
    place = _users_line(error)
    text = str(error)
    if text.startswith("Pending unbacked symbols"):
        reason = ("expected sizes that follow from those of the inputs, found one that depends on data; "
                  "take parts of fixed sizes, and mask what is not there")
    elif "data-dependent" in text or "data dependent" in text:
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
