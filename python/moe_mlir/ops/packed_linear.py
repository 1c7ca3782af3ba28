"""moe.packed_linear: torch.nn.functional.linear of a weight in panels (docs/Spec.md 3.14)."""

import torch

from ._check import ACTIVATIONS, Checker
from ._expert_activation import ExpertActivation
from ._expert_runs import has_kernel
from ._kernel import Kernel, Tensor, contiguous, kernels
from ._library import define
from ._panels import columns, has_halves, is_packed, packed_shape, unpack_weight
from .grouped_linear import attributes

_check = Checker("packed_linear")


def packed_linear(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, out_features: int,
    groups: int = 1,
) -> torch.Tensor:
    """y = x W^T + bias, with W in the order in which kernels read it.

    A block-diagonal weight has a matrix for each group of features: y_g = x_g W_g^T.

    Args:
        x: `[.., in]` float32, bfloat16 or float16; with more than one group `[.., groups, in]`.
        w: W, `[out_features, in]`, in panels: the weight of one expert, as
            `moe_mlir.pack_linears` lays it out; in the dtype of x. It has no gradient. The
            panels of groups lie one behind the other.
        bias: `[out_features]`, or None, as it is for several groups.
        out_features: of each group; the panels' columns behind them are zeros.
        groups: the matrices of a block-diagonal weight.

    Returns:
        `[.., out_features]` in the dtype of x; with groups `[.., groups, out_features]`. Sums
        are float32.
    """
    return _op(x, w, bias, out_features, groups)


def _matrices(w, out, width, groups):
    return unpack_weight(w.view(groups, -1, *w.shape[2:]), out, width)


def _validate(x, w, bias, out, groups):
    _check.dtype("x", x, ACTIVATIONS)
    _check.same_dtype("w", w, "x", x)
    if x.dim() == 0 or not is_packed(w) or w.shape[0] != 1 or has_halves(w):
        _check.fail("expected x [.., in] and w in the panels of one matrix, found shapes "
                    f"{tuple(x.shape)} and {tuple(w.shape)}")
    if groups < 1:
        _check.fail(f"expected at least 1 group, found {groups}")
    if groups > 1 and (x.dim() < 2 or x.shape[-2] != groups):
        _check.fail(f"expected x [.., {groups}, in] for {groups} groups, found shape "
                    f"{tuple(x.shape)}")
    if groups > 1 and bias is not None:
        _check.fail(f"expected no bias for {groups} groups, found one")
    wanted = packed_shape(groups, out, x.shape[-1], x.dtype, False, columns(w))
    wanted = (1, wanted[0] * wanted[1], *wanted[2:])
    each = f"{out} of y" if groups == 1 else f"{groups} times {out} of y"
    _check.shape("w", w, wanted, f"of panels for {x.shape[-1]} features and {each}")
    if bias is not None:
        _check.shape("bias", bias, (out,), "[out_features]")


@kernels
def kernel(
    dtype: torch.dtype, width: int, out: int, panels: int, bias_dtype: torch.dtype | None,
    groups: int = 1,
) -> Kernel:
    inputs = [
        Tensor("x", ("r" if groups == 1 else "n", width), dtype),
        Tensor("w", packed_shape(groups, out, width, dtype, False, panels), dtype),
        Tensor("offsets", (groups + 1,), torch.int64),
    ]
    if groups > 1:
        inputs.append(Tensor("rows", ("r",), torch.int64, clause="rows"))
    if bias_dtype is not None:
        inputs.append(Tensor("bias", (1, out), bias_dtype, clause="bias"))
    return Kernel("grouped_linear", tuple(inputs), (Tensor("y", ("r", out), dtype),),
                  attributes(False, ExpertActivation(), panels))


def _run(x, w, bias, out, groups=1):
    _validate(x, w, bias, out, groups)
    if not has_kernel(x, w, bias):
        matrices = _matrices(w, out, x.shape[-1], groups)
        if len(matrices) > 1:
            return torch.einsum("...gi,goi->...go", x, matrices).contiguous()
        return torch.nn.functional.linear(x, matrices[0], bias)
    if groups > 1:
        return _run_groups(x, w, out)
    rows = contiguous(x).view(-1, x.shape[-1])
    run = kernel(x.dtype, x.shape[-1], out, columns(w), None if bias is None else bias.dtype)
    operands = [rows, contiguous(w.detach()), torch.tensor([0, rows.shape[0]])]
    (y,) = run(*operands, *(() if bias is None else (contiguous(bias)[None],)))
    return y.view(*x.shape[:-1], out)


def _run_groups(x, w, out):
    """The rows of a group lie apart in x, and behind each other in what the kernel writes."""
    groups, width = x.shape[-2:]
    count = x.shape[:-2].numel()
    run = kernel(x.dtype, width, out, columns(w), None, groups)
    panels = contiguous(w.detach()).view(groups, -1, *w.shape[2:])
    (y,) = run(contiguous(x).view(-1, width), panels, torch.arange(groups + 1) * count,
               torch.arange(count * groups).view(count, groups).T.reshape(-1))
    return y.view(groups, count, out).transpose(0, 1).contiguous().view(*x.shape[:-1], out)


def _fake(x, w, bias, out, groups=1):
    _validate(x, w, bias, out, groups)
    return x.new_empty((*x.shape[:-1], out))


def _setup_context(ctx, inputs, output):
    x, w, _, ctx.out, ctx.groups = inputs
    ctx.save_for_backward(w)
    ctx.width = x.shape[-1]


def _backward(ctx, dy):
    of_x, of_w, of_bias, *_ = ctx.needs_input_grad
    if of_w:
        _check.fail("expected a weight in panels without requires_grad, for which there is no "
                    "gradient; call moe_mlir.unpack_linears(model) before training", RuntimeError)
    (w,) = ctx.saved_tensors
    dx = torch.ops.moe.packed_linear_backward(dy, w, ctx.width, ctx.groups) if of_x else None
    return dx, None, dy.reshape(-1, ctx.out).sum(0) if of_bias else None, None, None


_op = define(
    "packed_linear(Tensor x, Tensor w, Tensor? bias, int out_features, int groups=1) -> Tensor",
    kernel=_run, fake=_fake, setup_context=_setup_context, backward=_backward,
    key="CompositeExplicitAutograd", rows=("x",), cast=("x", "w", "bias"),
    panels=("w",),
)


# ---- the gradient of x ------------------------------------------------------------


def _gradient(dy, w, width, groups=1):
    matrices = _matrices(w, dy.shape[-1], width, groups)
    if len(matrices) > 1:
        return torch.einsum("...go,goi->...gi", dy, matrices).contiguous()
    # The order of sums in torch's product follows the strides.
    return contiguous(dy) @ matrices[0]


def _fake_gradient(dy, w, width, groups=1):
    return dy.new_empty((*dy.shape[:-1], width))


define(
    "packed_linear_backward(Tensor dy, Tensor w, int in_features, int groups=1) -> Tensor",
    kernel=_gradient, fake=_fake_gradient, key="CompositeExplicitAutograd", is_gradient=True,
)
