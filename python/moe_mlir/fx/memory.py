"""Which memory the nodes of a torch graph show and write."""

import torch
from torch.fx import Node


def origin(node, is_inside=lambda node: True):
    """The node whose memory this one may show, as far as nodes are inside."""
    while is_inside(node) and not _makes_memory(node):
        if not (node.args and isinstance(node.args[0], Node)):
            break
        node = node.args[0]
    return node


# Composites whose results are never their arguments.
_NEW = {torch.ops.aten.linear.default, torch.ops.aten.matmul.default, torch.ops.aten.einsum.default}


def _makes_memory(node) -> bool:
    """A composite such as contiguous or reshape may return its argument without saying so."""
    target = node.target
    return target in _NEW or isinstance(target, torch._ops.OpOverload) and not (
        any(result.alias_info for result in target._schema.returns)
        or torch._C._dispatch_has_kernel_for_dispatch_key(target.name(),
                                                          "CompositeImplicitAutograd"))


def written(node):
    """What the call writes in place."""
    schema = getattr(node.target, "_schema", None)
    for position, argument in enumerate(schema.arguments if schema else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            in_order = position < len(node.args)
            value = node.args[position] if in_order else node.kwargs.get(argument.name)
            yield from (x for x in (value if isinstance(value, (tuple, list)) else [value])
                        if isinstance(x, Node))
