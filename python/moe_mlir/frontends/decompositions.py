"""A traced program in the operators that the importer knows."""

import functools
import logging
import warnings
from collections.abc import Callable

import torch

from .._torch.core import OpOverload, is_functorch_wrapped_tensor
from ..raising.attention import decomposition
from ..raising.decompose_calls import NeedsTrace, decompose_calls
from ..raising.doubled_state import merge_doubled_state
from ..raising.fold_layers import fold_layers, unfold_layers
from ..raising.reading import is_assertion
from .trace_errors import TraceFailed

_log = logging.getLogger("moe_mlir.export")
_KEPT = frozenset({torch.ops.aten.linear.default, torch.ops.aten.matmul.default,
                   torch.ops.aten.roll.default})


def decompose(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Core ATen, but with linear layers, matmuls, rolls and attention whole.

    Decomposed, linear layers and matmuls hide behind flattened views and
    expanded copies; whole, they are one contraction at the rank that the model
    wrote. A roll becomes a gather. Decomposed attention holds a matrix of tokens
    by tokens.
    """
    if any(map(is_functorch_wrapped_tensor, program.constants.values())):
        raise TraceFailed("expected a forward without gradients of its own, found one that calls torch.func.grad, "
                          "vjp or jvp; compile the function whose gradient it takes")
    with warnings.catch_warnings():
        # torch copies its own tree specs in a way that it deprecated itself.
        warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
        program = fold_layers(merge_doubled_state(program))
        try:
            program = decompose_calls(program, _decompositions(), _KEPT)
        except NeedsTrace as reason:
            _log.debug("tracing the whole program once more: %s", reason)
            program = program.run_decompositions(_table_of_torch())
    unfold_layers(program.graph)
    for node in list(program.graph.nodes):
        # What they check is known: the program has one type a tensor.
        if is_assertion(node):
            program.graph.erase_node(node)
    return program


@functools.cache
def _decompositions() -> dict[OpOverload, Callable]:
    """The table as a dictionary: torch walks over all of its operators to make it."""
    return dict(_table_of_torch().items())


def _table_of_torch():
    table = torch.export.default_decompositions()
    attention = torch.ops.aten.scaled_dot_product_attention.default
    table[attention] = decomposition(table[attention])
    for kept in _KEPT:
        table.pop(kept, None)
    return table
