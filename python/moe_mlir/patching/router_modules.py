"""Which modules of a model are routers, by what their code does, and examples of their inputs."""

import inspect
from collections.abc import Iterator

import torch

from .kinds import OPEN, TIED, Kind
from .known_forwards import ROUTERS
from .model_code import code_of, is_model_class, own_methods

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
    return (not code.names.isdisjoint(_SELECTIONS) or _looks_experts_up(kind)) and any(
        "expert" in name.lower() for name in (*code.names, *code.variables, *vars(module)))


def _looks_experts_up(kind) -> bool:
    """Whether a forward takes ids of tokens beside their states, and gathers: hash routing."""
    parameters = list(inspect.signature(kind.forward).parameters)[2:]
    return "gather" in code_of(kind).names and any("ids" in name for name in parameters)


def is_router(module: torch.nn.Module) -> bool:
    """Whether the module selects experts in code that can be replaced alone."""
    if is_model_class(type(module)) and type(module).__name__ in ROUTERS:
        return True
    return bool(selecting_method(module))


def selecting_method(module: torch.nn.Module) -> str:
    """The method of a module that selects experts and runs none; empty where there is none.

    It is the forward, unless that runs experts in layers of their own.
    """
    if not selects_experts(module):
        return ""
    if not experts_inside(module):
        return "forward"
    kind = type(module)
    experts = {name for name, layer in module.named_children()
               if "expert" in name or experts_inside(layer)}
    for method in own_methods(kind):
        names = code_of(kind, method).names
        if method != "forward" and method in code_of(kind).names \
                and names.isdisjoint(experts) and not names.isdisjoint(_SELECTIONS):
            return method
    return ""


def _is_whole_model(kind) -> bool:
    return any(parent.__name__ == "PreTrainedModel" for parent in kind.__mro__)


def experts_inside(module: torch.nn.Module) -> str:
    """The name of a layer of experts inside of the module; empty where it is a router alone.

    Experts that are rows of an embedding are looked up by the module's own code.
    """
    for name, layer in module.named_modules():
        if name and "expert" in name:
            return name
        if any(p.dim() > 2 for p in layer.parameters(recurse=False)):
            return name or type(layer).__name__
    return ""


def example_calls(module: torch.nn.Module, dtype: torch.dtype | None, method: str = "forward",
                  ) -> Iterator[list[Kind]]:
    """Inputs with which the method may be called, the likeliest first.

    `dtype` is the type of the model's hidden states, if it is known. A method that gets logits
    has as many experts as they are wide, whatever that is.
    """
    parameters = list(inspect.signature(getattr(type(module), method)).parameters.values())[1:]
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
                rank = len(shape)
                yield [_kind(shape, kind), *(_further(module, x.name, width, rank) for x in more)]


def _further(module, name, width, rank) -> Kind:
    """An input beside the hidden states: ids of tokens, or one number an expert."""
    if "ids" in name:
        return _kind((TIED,) * (rank - 1), torch.int64)
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
