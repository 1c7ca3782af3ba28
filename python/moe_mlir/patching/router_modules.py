"""Which modules of a model are routers, by what their code does, and examples of their inputs."""

import inspect
from collections.abc import Iterator

import torch

from .kinds import OPEN, Kind
from .known_forwards import ROUTERS
from .model_code import code_of, is_model_class

# Calls that select; a maximum alone is in all kinds of code.
_SELECTIONS = {"topk", "argmax"}
# What models call the width of a token.
_WIDTHS = ("hidden_size", "hidden_dim", "input_size", "in_features")


def selects_experts(module: torch.nn.Module) -> bool:
    """Whether the forward of a module of a model selects experts, by its code.

    Whole models do not count: theirs reach losses, which select again.
    """
    kind = type(module)
    if not is_model_class(kind) or _is_whole_model(kind):
        return False
    code = code_of(kind)
    return not code.names.isdisjoint(_SELECTIONS) and any(
        "expert" in name.lower() for name in (*code.names, *code.variables, *vars(module)))


def is_router(module: torch.nn.Module) -> bool:
    """Whether the module selects experts, and is nothing but a router."""
    if is_model_class(type(module)) and type(module).__name__ in ROUTERS:
        return True
    return selects_experts(module) and not experts_inside(module)


def _is_whole_model(kind) -> bool:
    return any(parent.__name__ == "PreTrainedModel" for parent in kind.__mro__)


def experts_inside(module: torch.nn.Module) -> str:
    """The name of a layer of experts inside of the module; empty where it is a router alone."""
    for name, layer in module.named_modules():
        if name and ("expert" in name or isinstance(layer, torch.nn.Embedding)):
            return name
        if any(p.dim() > 2 for p in layer.parameters(recurse=False)):
            return name or type(layer).__name__
    return ""


def example_calls(module: torch.nn.Module, dtype: torch.dtype | None) -> Iterator[list[Kind]]:
    """Inputs with which the forward may be called, the likeliest first.

    `dtype` is the type of the model's hidden states, if it is known.
    """
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    parameters = [x for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD]
    width = _width(module)
    if not parameters or width is None:
        return
    own = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    needed = [x for x in parameters[1:] if x.default is x.empty]
    biases = parameters[1:2] if len(parameters) == 2 and "bias" in parameters[1].name else []
    for kind in dict.fromkeys((dtype or own, own)):
        for more in (needed, biases) if biases != needed else (needed,):
            for shape in ((OPEN, width), (OPEN, OPEN, width)):
                yield [_kind(shape, kind), *(_further(module, x.name, width) for x in more)]


def _further(module, name, width) -> Kind:
    """An input beside the hidden states: ids of tokens, or one number an expert."""
    if "ids" in name:
        return _kind((OPEN,), torch.int64)
    experts = next((value for key, value in vars(module).items()
                    if "experts" in key and type(value) is int), width)
    return _kind((experts,), torch.float32)


def _width(module):
    """The width of a token: by its name, or as the last dimension of the first matrix."""
    named = (getattr(module, name, None) for name in _WIDTHS)
    found = next((value for value in named if type(value) is int), None)
    if found is not None:
        return found
    return next((p.shape[-1] for p in module.parameters() if p.dim() == 2), None)


def _kind(shape, dtype) -> Kind:
    return Kind(shape, dtype, torch.device("cpu"))
