"""moe.similarity_inform: mix expert probabilities of similar tokens (docs/Spec.md 3.3)."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Self

import torch

from .._support.keywords import renamed
from ._check import ACTIVATIONS, MASK, Checker
from ._few_values import FewValues, scalar
from ._kernel import Kernel, Tensor, contiguous, enum, f64, kernels, rows, visibility
from ._library import define, takes

# What the schema calls otherwise, as callers once did.
_NAMES = {"u": "h", "e": "probs", "uk": "keys", "ws": "weight"}
_check = Checker("similarity_inform", _NAMES)
_taus = FewValues()


@renamed(_NAMES)
def similarity_inform(
    h: torch.Tensor,
    probs: torch.Tensor,
    *,
    causal: bool,
    keys: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    tau: float | torch.Tensor = 1.0,
    mask: torch.Tensor | None = None,
    window: int | None = None,
    restrict: Literal["all", "entropy"] = "all",
    precision: Literal["ieee", "tf32"] = "ieee",
) -> tuple[torch.Tensor, torch.Tensor]:
    """p_i = sum_j softmax_j(h_i^T weight keys_j / tau) probs_j, without the N x N matrix in memory.

    Args:
        h: tokens `[.., n, d]`, float32, bfloat16 or float16.
        probs: expert probabilities of the keys `[.., nk, experts]`.
        causal: may a token see only itself and earlier ones? There is no
            default: the paper's own formula mixes in later tokens.
        keys: other keys `[.., nk, f]`, such as cached tokens; default: `h`.
        weight: similarity matrix `[d, f]`; default: the identity.
        tau: temperature, a float or a learned 0-d tensor.
        mask: bool `[.., nk]`, True = real token. Without `keys` it covers the
            queries too.
        window: see only the last `window` positions.
        restrict: "all", or "entropy": only keys at most as uncertain as the token.
        precision: "ieee" or "tf32" products.

    Returns:
        p `[.., n, experts]` and lse `[.., n]`, float32. A token that sees no
        key has p = 0 and lse = -inf.
    """
    return _op(h, probs, causal, keys, weight, tau, mask, window, restrict, precision)


class Operands(NamedTuple):
    """The tensors of a call, in the order of the op's schema."""

    u: torch.Tensor
    e: torch.Tensor
    uk: torch.Tensor | None
    ws: torch.Tensor | None
    mask: torch.Tensor | None
    tau: torch.Tensor | None

    def optional(self) -> Iterator[torch.Tensor]:
        """What `Form.optional_inputs` describe."""
        if self.uk is not None:
            yield rows(self.uk, 2)
        if self.ws is not None:
            yield contiguous(self.ws)
        if self.mask is not None:
            yield rows(self.mask, 1)
        if self.tau is not None:
            yield self.tau.detach().to(torch.float32)


@dataclass(frozen=True)
class Options:
    """What a call says besides its tensors, in the order of the op's schema."""

    tau: float  # Means nothing where tau is a tensor.
    causal: bool
    window: int | None
    restrict: str
    precision: str


_OPERANDS = "Tensor u, Tensor e, Tensor? uk, Tensor? ws, Tensor? mask, Tensor? tau_value"
_OPTIONS = "float tau, bool causal, int? window, str restrict, str precision"


def _arguments(u, e, causal, uk, ws, tau, mask, window, restrict, precision):
    for name, value in (("u", u), ("e", e)):
        _check.tensor(name, value)
    for name, value in (("uk", uk), ("ws", ws), ("mask", mask)):
        _check.tensor(name, value, optional=True)
    window = _check.integer("window", window, optional=True)
    tau_value, tau = _check.scalar_or_tensor("tau", tau)
    return u, e, uk, ws, mask, tau_value, tau, bool(causal), window, restrict, precision


def _validate(operands, options):
    u, e, uk, ws, mask, tau = operands
    for name, tensor in (("u", u), ("e", e), ("uk", uk)):
        if tensor is not None:
            _check.dtype(name, tensor, ACTIVATIONS)
            if tensor.dim() < 2 or tensor.dim() != u.dim():
                _check.fail(
                    f"expected '{name}' to have dims [.., tokens, width], as many as 'u', "
                    f"found shape {tuple(tensor.shape)}"
                )
    leading, width = u.shape[:-2], u.shape[-1]
    keys = u if uk is None else uk
    key_dims = (*leading, keys.shape[-2])
    _check.shape("e", e, (*key_dims, e.shape[-1]), "[.., keys, experts]")
    if uk is not None:
        _check.same_dtype("uk", uk, "u", u)
        if options.restrict == "entropy":
            _check.fail(
                "expected no 'uk' with restrict='entropy', which compares a token with its keys"
            )
        _check.shape("uk", uk, (*key_dims, uk.shape[-1]), "[.., keys, f]")
    if ws is not None:
        _check.same_dtype("ws", ws, "u", u)
        _check.shape("ws", ws, (width, keys.shape[-1]), "[d of 'u', d of the keys]")
    elif uk is not None:
        _check.shape("uk", uk, (*key_dims, width), "[.., keys, d of 'u'] (no 'ws' was given)")
    if mask is not None:
        _check.dtype("mask", mask, MASK)
        _check.shape("mask", mask, key_dims, "[.., keys]")
    if tau is None:
        _check.positive("tau", options.tau)
    if options.window is not None:
        _check.at_least("window", options.window, 1)
    _check.choice("restrict", options.restrict, ("all", "entropy"))
    _check.choice("precision", options.precision, ("ieee", "tf32"))


class Form(NamedTuple):
    """What of its operands a kernel is specialised to."""

    dtype: torch.dtype
    e_dtype: torch.dtype
    width: int
    experts: int
    key_width: int
    has_uk: bool = False
    has_ws: bool = False
    masked: bool = False
    learns_tau: bool = False

    @classmethod
    def of(cls, operands: Operands) -> Self:
        u, e, uk, ws, mask, tau = operands
        return cls(
            u.dtype,
            e.dtype,
            u.shape[-1],
            e.shape[-1],
            (u if uk is None else uk).shape[-1],
            uk is not None,
            ws is not None,
            mask is not None,
            tau is not None,
        )

    @property
    def keys(self) -> str:
        """The name of their number."""
        return "m" if self.has_uk else "n"

    def tokens(self) -> tuple[Tensor, Tensor]:
        return (
            Tensor("u", ("b", "n", self.width), self.dtype),
            Tensor("e", ("b", self.keys, self.experts), self.e_dtype),
        )

    def optional_inputs(self) -> Iterator[Tensor]:
        if self.has_uk:
            yield Tensor("uk", ("b", "m", self.key_width), self.dtype, clause="keys")
        if self.has_ws:
            yield Tensor("ws", (self.width, self.key_width), self.dtype, clause="ws")
        if self.masked:
            yield Tensor("mask", ("b", self.keys), torch.bool, clause="mask")
        if self.learns_tau:
            yield Tensor("tau", (), torch.float32, clause="tau")

    def attributes(self, options: Options) -> Iterator[tuple[str, str]]:
        yield "visibility", visibility(options.causal, options.window)
        yield "restrict", enum("restrict", options.restrict)
        yield "precision", enum("precision", options.precision)
        if not self.learns_tau:
            yield "tau", f64(options.tau)


def _with_tau(operands: Operands, options: Options) -> tuple[Operands, Options]:
    """Makes an operand of a float tau that has had many values."""
    others = replace(options, tau=1.0)
    if operands.tau is None and not _taus.has((Form.of(operands), others), options.tau):
        return operands._replace(tau=scalar(options.tau, operands.u)), others
    return operands, options


@kernels
def kernel(form: Form, options: Options) -> Kernel:
    return Kernel(
        "similarity_inform",
        (*form.tokens(), *form.optional_inputs()),
        (
            Tensor("p", ("b", "n", form.experts), torch.float32),
            Tensor("lse", ("b", "n"), torch.float32),
        ),
        tuple(form.attributes(options)),
    )


@takes(Operands, Options)
def _cpu(operands, options):
    _validate(operands, options)
    u, e, *_ = operands
    operands, options = _with_tau(operands, options)
    run = kernel(Form.of(operands), options)
    p, lse = run(rows(u, 2), rows(e, 2), *operands.optional())
    return p.view(*u.shape[:-1], e.shape[-1]), lse.view(u.shape[:-1])


@takes(Operands, Options)
def _fake(operands, options):
    _validate(operands, options)
    u, e, *_ = operands
    p = u.new_empty((*u.shape[:-1], e.shape[-1]), dtype=torch.float32)
    return p, u.new_empty(u.shape[:-1], dtype=torch.float32)


# -------------------------------------------------------------------- backward


@kernels
def backward_kernel(form: Form, options: Options, has_dlse: bool) -> Kernel:
    dlse = [Tensor("dlse", ("b", "n"), torch.float32, clause="dlse")] if has_dlse else []
    differentiable = [x for x in (*form.tokens(), *form.optional_inputs()) if x.name != "mask"]
    return Kernel(
        "similarity_inform_backward",
        (
            *form.tokens(),
            Tensor("p", ("b", "n", form.experts), torch.float32),
            Tensor("lse", ("b", "n"), torch.float32),
            Tensor("dp", ("b", "n", form.experts), torch.float32),
            *dlse,
            *form.optional_inputs(),
        ),
        tuple(Tensor(f"d{x.name}", x.dims, torch.float32) for x in differentiable),
        tuple(form.attributes(options)),
    )


@takes(Operands, Options)
def _backward_cpu(dp, dlse, p, lse, operands, options):
    u, e, uk, ws, _, tau = operands
    operands, options = _with_tau(operands, options)
    run = backward_kernel(Form.of(operands), options, dlse is not None)
    grads = iter(
        run(
            *(rows(x, 2) for x in (u, e, p)),
            rows(lse, 1),
            rows(dp, 2),
            *(() if dlse is None else (rows(dlse, 1),)),
            *operands.optional(),
        )
    )

    def like(x):
        if x is None:
            return u.new_empty(0, dtype=torch.float32)
        return next(grads).view(x.shape).to(x.dtype)

    return tuple(map(like, (u, e, uk, ws, tau)))


@takes(Operands, Options)
def _backward_fake(dp, dlse, p, lse, operands, options):
    u, e, uk, ws, _, tau = operands

    def like(x):
        if x is None:
            return u.new_empty(0, dtype=torch.float32)
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    return like(u), like(e), like(uk), like(ws), like(tau)


_backward_op = define(
    "similarity_inform_backward(Tensor dp, Tensor? dlse, Tensor p, Tensor lse, "
    f"{_OPERANDS}, {_OPTIONS}) -> (Tensor du, Tensor de, Tensor duk, Tensor dws, Tensor dtau)",
    kernel=_backward_cpu,
    fake=_backward_fake,
    is_gradient=True,
)


def _setup_context(ctx, inputs, output):
    num_operands = len(Operands._fields)
    ctx.options = inputs[num_operands:]
    ctx.save_for_backward(*output, *inputs[:num_operands])
    # Few losses read lse; without its gradient nothing is made of zeros.
    ctx.set_materialize_grads(False)


def _backward(ctx, dp, dlse):
    p, lse, *saved = ctx.saved_tensors
    if dp is None:
        dp = torch.zeros_like(p)
    du, de, duk, dws, dtau = _backward_op(dp, dlse, p, lse, *saved, *ctx.options)
    operands = Operands(*saved)
    grads = Operands(du, de, duk, dws, None, dtau)
    return (
        *(None if x is None else grad for x, grad in zip(operands, grads, strict=True)),
        *(None for _ in ctx.options),
    )


_op = define(
    f"similarity_inform({_OPERANDS}, {_OPTIONS}) -> (Tensor p, Tensor lse)",
    arguments=_arguments,
    kernel=_cpu,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    rows=("u", "e", "uk", "mask"),
    cast=("u", "uk", "ws"),
)
