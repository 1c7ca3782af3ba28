"""The arguments of a call in a graph, by the names in the operator's schema."""

from types import SimpleNamespace

from torch.fx import Node


def bind_arguments(node: Node) -> SimpleNamespace:
    """What a call gives or leaves to defaults; None where there is neither."""
    bound = {}
    for i, argument in enumerate(node.target._schema.arguments):
        if i < len(node.args) and not argument.kwarg_only:
            bound[argument.name] = node.args[i]
        elif argument.name in node.kwargs:
            bound[argument.name] = node.kwargs[argument.name]
        else:
            bound[argument.name] = argument.default_value if argument.has_default_value() else None
    return SimpleNamespace(**bound)
