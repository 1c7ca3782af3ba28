"""The table from ATen and moe operators to the functions that import them."""

from types import SimpleNamespace

TABLE = {}
# The operators that also take complex tensors.
COMPLEX = set()


class Unsupported(Exception):
    """This use of an operator cannot be imported; the message says why."""


def imports(*operators, complex=False):
    """Registers `function(context, node, arguments)` for the operators.

    `arguments` has one attribute for each argument of the operator's schema,
    under the schema's name, with the schema's defaults filled in. `complex`: the
    function also serves complex tensors, `[.., 2]` to it.
    """
    def register(function):
        for operator in operators:
            if operator in TABLE:
                raise ValueError(f"operator {operator} is registered twice")
            TABLE[operator] = function
            if complex:
                COMPLEX.add(operator)
        return function
    return register


def bind_arguments(node) -> SimpleNamespace:
    bound = {}
    for i, argument in enumerate(node.target._schema.arguments):
        if i < len(node.args) and not argument.kwarg_only:
            bound[argument.name] = node.args[i]
        elif argument.name in node.kwargs:
            bound[argument.name] = node.kwargs[argument.name]
        else:
            bound[argument.name] = argument.default_value if argument.has_default_value() else None
    return SimpleNamespace(**bound)
