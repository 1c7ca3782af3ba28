"""Dropless execution of the experts that a router selected.

`run_experts` sorts the (token, choice) pairs by expert, runs each expert on
its run of rows, and adds the results back with their gates:

    dispatch      which row of the sorted order each pair goes to, where each
                  expert's rows start, how many it has
    token_rows    the token of each row: the inverse of dispatch
    grouped_linear  row r of expert e's run is multiplied by w[e]
    combine       the sum of each token's rows, weighed by their gates

They are torch ops (`torch.ops.moe.*`), so that a traced model keeps them
as one node each whatever the routing; sizes depend on shapes alone, [T * k]
rows, never on data. Where no gradient is asked for, and the activation is one
that kernels know, all of it is one op, `torch.ops.moe.run_experts`.
"""

import warnings
from collections.abc import Callable

import torch

from .._support.keywords import renamed
from ..ops import dispatch
from ..ops._check import Checker
from ..ops._expert_activation import ExpertActivation, recognize
from ..ops._panels import is_packed
from ..ops.run_experts import apply_gates
from ..ops.run_experts import run_experts as _whole_layer
from ..ops.run_quantized_experts import run_quantized_experts
from .packed_weight import operand_of
from .quantized_weight import QuantizedWeight


@renamed({"x": "h"})
def run_experts(
    h: torch.Tensor,
    gates: torch.Tensor,
    indices: torch.Tensor,
    w_in: torch.Tensor | QuantizedWeight,
    w_out: torch.Tensor | QuantizedWeight,
    *,
    b_in: torch.Tensor | None = None,
    b_out: torch.Tensor | None = None,
    activation: Callable[[torch.Tensor], torch.Tensor] | str | None = None,
    transposed: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """y_t = sum_a gates_ta expert_{indices_ta}(h_t), for tokens of any leading dims.

    Args:
        h: tokens `[.., d]`.
        gates: `[.., k]`.
        indices: experts `[.., k]`; one out of `[0, experts)`, such as -1, selects nothing.
        w_in: `[experts, features, d]`; both may be quantized (`moe_mlir.quantize`).
        w_out: `[experts, d, hidden]`.
        b_in: `[experts, features]`, or None.
        b_out: `[experts, d]`, or None.
        activation: from the first layer's features to the second's, row by row; default:
            gelu. torch's gelu, silu and relu, an `ExpertActivation`, and what
            `ExpertActivation.named` makes of a name ("swiglu"), run inside of the first
            layer's product.
        transposed: weights are `[experts, d, features]` and `[experts, hidden, d]`. Those in
            panels (`moe_mlir.pack_experts`) are not transposed.
        out: a tensor for y, which is returned; without gradients.

    Returns:
        `[.., d]` in the dtype of h.

    Raises:
        ValueError: for shapes that do not fit, an activation that is not known by its name, or one
            that kernels do not know with weights in panels or quantized.

    >>> h, (gates, indices) = torch.randn(5, 16), moe_mlir.topk_renorm(torch.randn(5, 8), 2)
    >>> w_in, w_out = torch.randn(8, 64, 16), torch.randn(8, 16, 32)
    >>> moe_mlir.experts.run_experts(h, gates, indices, w_in, w_out, activation="swiglu").shape
    torch.Size([5, 16])
    """
    if out is not None:
        return _into(out, h, gates, indices, w_in, w_out, b_in, b_out, activation, transposed)
    activation = activation or torch.nn.functional.gelu
    known = recognize(activation)
    if isinstance(w_in, QuantizedWeight) or isinstance(w_out, QuantizedWeight):
        return _run_quantized(h, gates, indices, w_in, b_in, w_out, b_out, known)
    w_in, w_out = operand_of(w_in), operand_of(w_out)
    if is_packed(w_in) and known is None:
        raise ValueError("run_experts: expected an activation that kernels know with weights in "
                         "panels, found another; call moe_mlir.unpack_experts(model) and pack it "
                         "again, or give an ExpertActivation")
    # What lies in panels needs no gradient; the op computes the hidden rows for x's again.
    if known is not None and (is_packed(w_in)
                              or not _needs_gradient(h, gates, w_in, w_out, b_in, b_out)):
        return _run_whole(h, gates, indices, w_in, b_in, w_out, b_out, transposed, known)

    def expert(rows, offsets, tokens):
        # Inside of the product too where it is known: results do not depend on the gradient.
        hidden = torch.ops.moe.grouped_linear(rows, w_in, b_in, offsets, tokens, transposed,
                                              *(known or ExpertActivation()).options)
        if known is None:
            assert not isinstance(activation, str)
            hidden = activation(hidden)
        return torch.ops.moe.grouped_linear(hidden, w_out, b_out, offsets, None, transposed)
    return _run_gathered(h, gates, indices, _num_experts(w_in), expert)


def _into(out, h, gates, indices, w_in, w_out, b_in, b_out, activation, transposed):
    """`run_experts` with a tensor for the result; one kernel writes it where one runs all."""
    if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad
                                       for x in (out, h, gates, w_in, w_out, b_in, b_out)):
        raise RuntimeError("run_experts: expected no tensor that needs a gradient with 'out', found "
                           "one; call it in torch.no_grad()")
    known = recognize(activation or torch.nn.functional.gelu)
    quantized = isinstance(w_in, QuantizedWeight) or isinstance(w_out, QuantizedWeight)
    if known is None or quantized or not out.is_contiguous() or out.shape[:-1] != h.shape[:-1]:
        y = run_experts(h, gates, indices, w_in, w_out, b_in=b_in, b_out=b_out,
                        activation=activation, transposed=transposed)
        _check_out.shape("out", out, y.shape, "of the result")
        _check_out.dtype("out", out, (y.dtype,))
        return out.copy_(y)
    _run_whole(h, gates, indices, operand_of(w_in), b_in, operand_of(w_out), b_out, transposed,
               known, _flat(out))
    return out


_check_out = Checker("run_experts")


def _needs_gradient(*tensors):
    """Whether the hidden rows are worth keeping for a backward."""
    # torch.jit.trace compares graphs of calls with and without gradients.
    if torch.jit.is_tracing():
        return True
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _run_whole(x, gates, indices, w_in, b_in, w_out, b_out, transposed, activation, out=None):
    tokens, chosen, weights = _flat(x), _flat(indices), _flat(gates)
    if tokens.dtype != torch.float64:
        weights = weights.to(torch.float32)
    y = _whole_layer(tokens, weights, chosen, w_in, b_in, w_out, b_out, transposed=transposed,
                     activation=activation, out=out)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def _run_quantized(x, gates, indices, w_in, b_in, w_out, b_out, activation):
    if not isinstance(w_in, QuantizedWeight) or not isinstance(w_out, QuantizedWeight):
        raise ValueError("run_experts: expected both weights quantized, or neither, found "
                         f"{_describe(w_in)} and {_describe(w_out)}")
    if activation is None:
        raise ValueError("run_experts: expected an activation that kernels know with quantized "
                         "weights, found another; give an ExpertActivation")
    if w_in.halves != (activation.gate == "concatenated"):
        raise ValueError("run_experts: expected weights that were quantized for the gate "
                         f"{activation.gate!r}, found others; quantize the layer again")
    weights = _flat(gates)
    if x.dtype != torch.float64:
        weights = weights.to(torch.float32)
    y = run_quantized_experts(
        _flat(x), weights, _flat(indices), w_in.operands(b_in), w_out.operands(b_out),
        w_out.out_and_in[1], w_in.quantization, w_out.quantization, activation=activation)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def _describe(w):
    return str(w) if isinstance(w, QuantizedWeight) else f"{w.dtype} {tuple(w.shape)}"


def _flat(x):
    return x.reshape(-1, x.shape[-1])


def _num_experts(w):
    """The first size of a weight; torch.jit.trace makes a tensor of it, but no weight changes its shape."""
    if not torch.jit.is_tracing():
        return w.shape[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        return int(w.shape[0])


@renamed({"x": "h"})
def run_rows(
    h: torch.Tensor,
    gates: torch.Tensor,
    indices: torch.Tensor,
    num_experts: int,
    expert: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """As `run_experts`, with the experts given as a function.

    `expert(rows, offsets)` maps the rows of all (token, choice) pairs, sorted by
    expert, to as many rows: expert e has rows `offsets[e]` to `offsets[e + 1]`.
    """
    return _run_gathered(h, gates, indices, num_experts,
                         lambda rows, offsets, tokens: expert(rows[tokens], offsets))


def _run_gathered(x, gates, indices, num_experts, expert):
    """`expert(x, offsets, tokens)` reads the row `tokens[i]` of x for its row i."""
    chosen, weights = _flat(indices), _flat(gates)
    slots, offsets, _ = dispatch(chosen, num_experts)
    outputs = expert(_flat(x), offsets, torch.ops.moe.token_rows(slots))
    return apply_gates(outputs, weights, slots).reshape(*x.shape[:-1], outputs.shape[-1])

