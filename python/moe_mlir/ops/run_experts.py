"""moe.run_experts: a whole layer of experts as one function (docs/Spec.md 3.14)."""

import torch

from ._check import ACTIVATIONS, INDICES, SCORES, Checker
from ._expert_activation import SCHEMA, ExpertActivation
from ._expert_runs import are_grouped, has_gpu_kernel, has_kernel, multiply_groups
from ._kernel import Kernel, Step, Tensor, contiguous, kernels, rows
from ._library import define
from ._out import can_write
from ._panels import (
    as_operand,
    columns,
    in_features,
    is_packed,
    packed_shape,
    unpack_weight,
)
from .combine import combine
from .combine import gradients as combine_gradients
from .dispatch import dispatch
from .grouped_linear import as_bits, attributes, grouped_linear, matrices
from .grouped_linear import gradients as linear_gradients
from .token_rows import token_rows

_check = Checker("run_experts", {"x": "h"})


def run_experts(
    x: torch.Tensor,
    gates: torch.Tensor,
    indices: torch.Tensor,
    w_in: torch.Tensor,
    b_in: torch.Tensor | None,
    w_out: torch.Tensor,
    b_out: torch.Tensor | None,
    *,
    transposed: bool = False,
    activation: ExpertActivation,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """y_t = sum_a gates_ta expert_{indices_ta}(x_t), dispatch to combine in one function.

    Args:
        x: `[tokens, d]`.
        gates: `[tokens, k]` float32.
        indices: `[tokens, k]` int32 or int64; out of `[0, experts)`: no expert.
        w_in: `[experts, features, d]`, or `[experts, d, features]` if `transposed`.
        b_in: `[experts, features]`, or None.
        w_out: `[experts, d, hidden]`, or `[experts, hidden, d]` if `transposed`; hidden
            is half of the features with a gate. Both weights may lie in panels
            (`moe_mlir.pack_experts`), which have no gradient.
        b_out: `[experts, d]`, or None.
        activation: between the two layers.
        out: `[tokens, d]` for the result.

    Returns:
        `[tokens, d]` in the dtype of x.
    """
    args = (x, gates, indices, w_in, b_in, w_out, b_out, transposed, *activation.options)
    if out is None:
        return _op(*args)
    d = _widths(x, w_in, w_out, transposed, activation)[1]
    if can_write(_check, args, (out,), (x.shape[0], d), (x.dtype,), "[tokens of 'x', d]"):
        return _run(*args, out=out)
    return out.copy_(_op(*args))


def _validate(x, gates, indices, w_in, b_in, w_out, b_out, transposed, activation):
    _check.rank("x", x, "[tokens, d]")
    _check.rank("indices", indices, "[tokens, k]")
    _check.dtype("indices", indices, INDICES)
    _check.shape("indices", indices, (x.shape[0], indices.shape[1]), "[tokens of 'x', k]")
    _check.shape("gates", gates, indices.shape, "of 'indices'")
    if x.dtype != torch.float64:
        _check.dtype("gates", gates, SCORES)
    if is_packed(w_in) or is_packed(w_out):
        _validate_panels(x, w_in, w_out, transposed, activation)
    else:
        _validate_matrices(x, w_in, w_out, transposed, activation)
    features, out = _widths(x, w_in, w_out, transposed, activation)
    for name, bias, width in (("b_in", b_in, features), ("b_out", b_out, out)):
        if bias is not None:
            _check.shape(name, bias, (w_in.shape[0], width), "[experts, features]")


def _validate_matrices(x, w_in, w_out, transposed, activation):
    for name, w in (("w_in", w_in), ("w_out", w_out)):
        _check.rank(name, w, "[experts, in, out]" if transposed else "[experts, out, in]")
        _check.same_dtype(name, w, "x", x)
    if w_in.shape[0] == 0:
        _check.fail(f"expected 'w_in' to have at least 1 expert, found shape {tuple(w_in.shape)}")
    if w_in.shape[1 if transposed else 2] != x.shape[1]:
        _check.fail(f"expected 'w_in' to take the {x.shape[1]} features of 'x', found shape "
                    f"{tuple(w_in.shape)}")
    features = w_in.shape[2 if transposed else 1]
    activation.validate(_check, features)
    taken = w_out.shape[1 if transposed else 2]
    if w_out.shape[0] != w_in.shape[0] or taken != activation.width(features):
        _check.fail(f"expected 'w_out' of {w_in.shape[0]} experts to take "
                    f"{activation.width(features)} features, found shape {tuple(w_out.shape)}")


def _validate_panels(x, w_in, w_out, transposed, activation):
    """What is in panels tells no widths of its own: those of x and of the rows between."""
    if transposed or not is_packed(w_in) or not is_packed(w_out):
        _check.fail("expected both weights in panels and none transposed, found shapes "
                    f"{tuple(w_in.shape)} and {tuple(w_out.shape)}, transposed={transposed}")
    for name, w in (("w_in", w_in), ("w_out", w_out)):
        _check.same_dtype(name, w, "x", x)
    features, out = _widths(x, w_in, w_out, transposed, activation)
    activation.validate(_check, features)
    gated, experts, q = activation.gate == "concatenated", w_in.shape[0], columns(w_in)
    for name, w, wanted in (
        ("w_in", w_in, packed_shape(experts, features, x.shape[1], x.dtype, gated, q)),
        ("w_out", w_out, packed_shape(experts, out, in_features(w_out), x.dtype, False, q)),
    ):
        _check.shape(name, w, wanted, f"of panels for gate {activation.gate!r}")


def _widths(x, w_in, w_out, transposed, activation):
    """The features of the first layer and those of the second."""
    if not is_packed(w_in):
        return tuple(w.shape[2 if transposed else 1] for w in (w_in, w_out))
    hidden = in_features(w_out)
    return hidden if activation.gate == "none" else 2 * hidden, x.shape[1]


@kernels
def kernel(
    dtype: torch.dtype, width: int, features: int, out: int, experts: int, k: int,
    index_dtype: torch.dtype, biases: tuple, transposed: tuple[bool, bool], panels: int,
    activation: ExpertActivation,
) -> Kernel:
    hidden = activation.width(features)
    inputs = [
        Tensor("x", ("n", width), dtype),
        Tensor("gates", ("n", k), torch.float32),
        Tensor("indices", ("n", k), index_dtype),
        Tensor("w_in", _weight(experts, features, width, dtype, transposed[0], panels), dtype),
        Tensor("w_out", _weight(experts, out, hidden, dtype, transposed[1], panels), dtype),
    ]
    clauses: list[tuple] = [(), ()]
    for n, (name, size) in enumerate((("b_in", features), ("b_out", out))):
        if biases[n] is not None:
            inputs.append(Tensor(name, (experts, size), biases[n]))
            clauses[n] = (("bias", name),)
    steps, y = layer_steps(
        dtype, experts, k, hidden, out, (clauses[0], attributes(transposed[0], activation, panels)),
        (clauses[1], attributes(transposed[1], ExpertActivation(), panels)))
    return Kernel("run_experts", tuple(inputs), (y,), steps=steps)


def layer_steps(
    dtype: torch.dtype, experts: int, k: int, hidden: int, out: int, first: tuple, last: tuple,
) -> tuple[tuple[Step, ...], Tensor]:
    """From x, gates, indices, w_in and w_out to y; of both products more clauses and attributes."""
    y, row = Tensor("y", ("n", out), dtype), ("n", k)
    return (
        Step("dispatch", (("ins", "indices"),), (
            Tensor("slots", ("n", k), torch.int32), Tensor("offsets", (experts + 1,), torch.int32),
            Tensor("counts", (experts,), torch.int32))),
        Step("token_rows", (("ins", "slots"),), (Tensor("rows", (row,), torch.int32),)),
        Step("grouped_linear",
             (("ins", "x"), ("ins", "w_in"), ("ins", "offsets"), ("rows", "rows"), *first[0]),
             (Tensor("hidden", (row, hidden), dtype),), first[1]),
        Step("grouped_linear", (("ins", "hidden"), ("ins", "w_out"), ("ins", "offsets"), *last[0]),
             (Tensor("outputs", (row, out), dtype),), last[1]),
        Step("combine", (("ins", "outputs"), ("ins", "gates"), ("ins", "slots")), (y,)),
    ), y


def _weight(experts, out, width, dtype, transposed, panels):
    if panels:
        # Of halves there are as many panels, and the op counts their columns as one dim.
        return packed_shape(experts, out, width, dtype, halves=False, columns=panels)
    return (experts, width, out) if transposed else (experts, out, width)


def _run(x, gates, indices, w_in, b_in, w_out, b_out, transposed=False, *options, out=None):
    activation = ExpertActivation(*options)
    _validate(x, gates, indices, w_in, b_in, w_out, b_out, transposed, activation)
    features, width = _widths(x, w_in, w_out, transposed, activation)
    panels = columns(w_in) if is_packed(w_in) else 0
    first, first_transposed = _operand(w_in, transposed)
    last, last_transposed = _operand(w_out, transposed)
    if not (has_kernel(x, gates, indices, w_in, b_in, w_out, b_out) or
            has_gpu_kernel(indices.numel(), first, last,
                           transposed=first_transposed or last_transposed)):
        w_in, w_out = _unpacked(x, w_in, w_out, activation)
        slots, offsets, tokens = places(indices, w_in.shape[0])
        layers = _layers
        if are_grouped(x, first, last) and all(w.shape[1] % 8 == 0 for w in (first, last)):
            layers, w_in, w_out = _layers_by_groups, first, last
            transposed = first_transposed, last_transposed
        *_, outputs = layers(x, w_in, b_in, w_out, b_out, offsets, tokens, transposed, activation)
        y = apply_gates(outputs, gates, slots)
        return y if out is None else out.copy_(y)
    run = kernel(
        x.dtype, x.shape[1], features, width, w_in.shape[0], indices.shape[1], indices.dtype,
        tuple(None if b is None else b.dtype for b in (b_in, b_out)),
        (first_transposed, last_transposed), panels, activation,
    )  # fmt: skip
    operands = [rows(x, 1), rows(gates, 1), rows(indices, 1), first, last]
    operands += [contiguous(b) for b in (b_in, b_out) if b is not None]
    (y,) = run(*operands, out=None if out is None else [out])
    return y


def _operand(w, transposed):
    return (as_operand(w.detach()), False) if is_packed(w) else matrices(w, transposed)


def _unpacked(x, w_in, w_out, activation):
    """The weights as `[experts, out, in]` if they are packed; otherwise as they are."""
    if not is_packed(w_in):
        return w_in, w_out
    features, out = _widths(x, w_in, w_out, False, activation)
    return (unpack_weight(w_in, features, x.shape[1]),
            unpack_weight(w_out, out, in_features(w_out)))


def places(indices: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each assignment's row, where each expert's rows start, and each row's token."""
    slots, offsets, _ = dispatch(indices, experts)
    return slots, offsets, token_rows(slots)


def _layers(x, w_in, b_in, w_out, b_out, offsets, tokens, transposed, activation):
    """The rows between the layers without and with the activation, and what comes out."""
    z = grouped_linear(x, w_in, b_in, offsets, tokens, transposed=transposed)
    hidden = activation(z)
    return z, hidden, grouped_linear(hidden, w_out, b_out, offsets, transposed=transposed)


def _layers_by_groups(x, w_in, b_in, w_out, b_out, offsets, tokens, transposed, activation):
    """What comes out of both, by torch's grouped products; `combine` reads no row of no expert."""
    z = multiply_groups(x.index_select(0, tokens), w_in, b_in, offsets, transposed[0])
    return multiply_groups(activation(z), w_out, b_out, offsets, transposed[1]),


def apply_gates(outputs: torch.Tensor, gates: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """`combine`, or its meaning for float64, which it does not take."""
    if outputs.dtype in ACTIVATIONS:
        return combine(outputs, gates, slots)
    gates = torch.where(slots >= 0, gates.to(outputs.dtype), 0.0)
    return (outputs[slots.clamp(min=0)] * gates.unsqueeze(-1)).sum(dim=1)


def _fake(x, gates, indices, w_in, b_in, w_out, b_out, transposed=False, *options):
    activation = ExpertActivation(*options)
    _validate(x, gates, indices, w_in, b_in, w_out, b_out, transposed, activation)
    return x.new_empty((x.shape[0], _widths(x, w_in, w_out, transposed, activation)[1]))


def _setup_context(ctx, inputs, output):
    *tensors, ctx.transposed = inputs[:8]
    ctx.options = inputs[8:]
    ctx.save_for_backward(*tensors)


def _backward(ctx, dy):
    needed = ctx.needs_input_grad[:7]
    w_in, w_out = ctx.saved_tensors[3], ctx.saved_tensors[5]
    if is_packed(w_in) and (needed[3] or needed[5]):
        _check.fail("expected weights in panels without requires_grad, for which there is no "
                    "gradient; call moe_mlir.unpack_experts(model) before training", RuntimeError)
    grads = torch.ops.moe.run_experts_backward(dy, *ctx.saved_tensors, as_bits(needed),
                                               ctx.transposed, *ctx.options)
    x, gates, w_in, b_in, w_out, b_out = grads
    found = (x, gates, None, w_in, b_in, w_out, b_out)
    grads = [grad if need else None for need, grad in zip(needed, found, strict=True)]
    return *grads, *[None] * (1 + len(ctx.options))


_TENSORS = ("Tensor x, Tensor gates, Tensor indices, Tensor w_in, Tensor? b_in, Tensor w_out, "
            "Tensor? b_out")
_op = define(
    f"run_experts({_TENSORS}, bool transposed=False, {SCHEMA}) -> Tensor",
    kernel=_run, fake=_fake, setup_context=_setup_context, backward=_backward,
    key="CompositeExplicitAutograd", cast=("x", "w_in", "b_in", "w_out", "b_out"),
    panels=("w_in", "w_out"),
    widen=("gates",),
)


# ---- gradients ------------------------------------------------------------------


def _run_backward(dy, x, gates, indices, w_in, b_in, w_out, b_out, needed,
                  transposed=False, *options):
    """What lies between the layers is computed again, not kept from the forward.

    Bit n of `needed` says whether the gradient of tensor n of the forward is; the others are empty.
    """
    activation = ExpertActivation(*options)
    w_in, w_out = _unpacked(x, w_in, w_out, activation)
    slots, offsets, tokens = places(indices, w_in.shape[0])
    z, hidden, outputs = _layers(x, w_in, b_in, w_out, b_out, offsets, tokens, transposed,
                                 activation)
    doutputs, dgates = combine_gradients(dy, outputs, gates, slots)
    dhidden, dw_out, db_out = linear_gradients(doutputs, hidden, w_out, offsets, None, None,
                                               1 | (needed >> 4 & 6), transposed)
    dz = activation.gradient(z, dhidden)
    dx, dw_in, db_in = linear_gradients(dz, x, w_in, offsets, None, tokens,
                                        needed & 1 | (needed >> 2 & 6), transposed)
    return dx, dgates if needed & 2 else dy.new_empty(0), dw_in, db_in, dw_out, db_out


def _fake_backward(dy, x, gates, indices, w_in, b_in, w_out, b_out, needed,
                   transposed=False, *options):
    places = (0, 1, 3, 4, 5, 6)
    sizes = _widths(x, w_in, w_out, transposed, ExpertActivation(*options))
    shapes = (x.shape, gates.shape, w_in.shape, (w_in.shape[0], sizes[0]), w_out.shape,
              (w_in.shape[0], sizes[1]))
    dtypes = (x.dtype, gates.dtype, *[x.dtype] * 4)
    return tuple(x.new_empty(shape if needed >> n & 1 else (0,), dtype=dtype)
                 for n, shape, dtype in zip(places, shapes, dtypes, strict=True))


define(
    f"run_experts_backward(Tensor dy, {_TENSORS}, int needed, bool transposed=False, "
    f"{SCHEMA}) "
    "-> (Tensor dx, Tensor dgates, Tensor dw_in, Tensor db_in, Tensor dw_out, Tensor db_out)",
    kernel=_run_backward, fake=_fake_backward, key="CompositeExplicitAutograd", is_gradient=True,
)
