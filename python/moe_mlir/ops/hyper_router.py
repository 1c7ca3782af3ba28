"""moe.hyper_router: generate a router from an embedding (docs/Spec.md 3.2)."""

import torch

from .._support.keywords import renamed
from ._check import ACTIVATIONS, Checker
from ._kernel import Kernel, Tensor, contiguous, kernels
from ._library import define

# What the schema calls otherwise, as callers once did.
_NAMES = {"e": "embedding"}
_check = Checker("hyper_router", _NAMES)


@renamed(_NAMES)
def hyper_router(
    embedding: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor,
    w2: torch.Tensor,
    b2: torch.Tensor,
    num_experts: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The router that a frozen network makes of e, an embedding: w2 relu(w1 e + b1) + b2.

    Nothing in it depends on tokens: compute it once where no gradient is
    needed. With constant operands the compiler folds it away.

    Args:
        embedding: the router's embedding `[c]`, float32, bfloat16 or float16; the only
            operand that gets a gradient.
        w1, b1: `[hidden, c]` and `[hidden]`.
        w2, b2: `[rows, hidden]` and `[rows]`, rows = num_experts * (d + 1):
            the weights of an expert, then its bias.
        num_experts: the number of experts.

    Returns:
        weight `[experts, d]` and bias `[experts]`, float32.
    """
    return _op(embedding, w1, b1, w2, b2, num_experts)


def _arguments(e, w1, b1, w2, b2, num_experts):
    for name, value in (("e", e), ("w1", w1), ("b1", b1), ("w2", w2), ("b2", b2)):
        _check.tensor(name, value)
    num_experts = _check.integer("num_experts", num_experts)
    return e, w1, b1, w2, b2, num_experts


def _validate(e, w1, b1, w2, b2, num_experts):
    for name, tensor in (("e", e), ("w1", w1), ("b1", b1), ("w2", w2), ("b2", b2)):
        _check.dtype(name, tensor, ACTIVATIONS)
    _check.rank("e", e, "[c]")
    _check.rank("w1", w1, "[hidden, c]")
    hidden = w1.shape[0]
    _check.shape("w1", w1, (hidden, e.shape[0]), "[hidden, c of 'e']")
    _check.shape("b1", b1, (hidden,), "[hidden of 'w1']")
    _check.rank("w2", w2, "[rows, hidden]")
    _check.shape("w2", w2, (w2.shape[0], hidden), "[rows, hidden of 'w1']")
    _check.shape("b2", b2, w2.shape[:1], "[rows of 'w2']")
    _check.at_least("num_experts", num_experts, 1)
    if w2.shape[0] % num_experts != 0 or w2.shape[0] < num_experts:
        _check.fail(
            "expected 'w2' to have num_experts * (d + 1) rows with num_experts = "
            f"{num_experts}, found {w2.shape[0]}"
        )


@kernels
def kernel(
    dtypes: tuple[torch.dtype, ...], width: int, hidden: int, experts: int, d: int
) -> Kernel:
    count = experts * (d + 1)
    shapes = ((width,), (hidden, width), (hidden,), (count, hidden), (count,))
    names = ("e", "w1", "b1", "w2", "b2")
    inputs = tuple(Tensor(name, shape, dtype) for name, shape, dtype in zip(names, shapes, dtypes))
    results = (
        Tensor("weight", (experts, d), torch.float32),
        Tensor("bias", (experts,), torch.float32),
    )
    return Kernel("hyper_router", inputs, results)


def _cpu(e, w1, b1, w2, b2, num_experts):
    _validate(e, w1, b1, w2, b2, num_experts)
    operands = (e, w1, b1, w2, b2)
    d = w2.shape[0] // num_experts - 1
    run = kernel(tuple(t.dtype for t in operands), e.shape[0], w1.shape[0], num_experts, d)
    weight, bias = run(*map(contiguous, operands))
    return weight, bias


def _fake(e, w1, b1, w2, b2, num_experts):
    _validate(e, w1, b1, w2, b2, num_experts)
    d = w2.shape[0] // num_experts - 1
    return (
        e.new_empty((num_experts, d), dtype=torch.float32),
        e.new_empty((num_experts,), dtype=torch.float32),
    )


def _setup_context(ctx, inputs, output):
    e, w1, b1, w2, _, _ = inputs
    ctx.save_for_backward(e, w1, b1, w2)


def _backward(ctx, dweight, dbias):
    # de = w1^T ((w2^T drows) . [pre > 0])
    e, w1, b1, w2 = ctx.saved_tensors
    wide = w1.float()
    active = wide @ e.float() + b1.float() > 0
    drows = torch.cat([dweight, dbias[:, None]], dim=1).reshape(-1)
    dhidden = (drows @ w2.float()) * active
    return (dhidden @ wide).to(e.dtype), None, None, None, None, None


_op = define(
    "hyper_router(Tensor e, Tensor w1, Tensor b1, Tensor w2, Tensor b2, int num_experts) "
    "-> (Tensor weight, Tensor bias)",
    arguments=_arguments,
    kernel=_cpu,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
)
