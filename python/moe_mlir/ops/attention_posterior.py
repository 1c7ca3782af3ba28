"""moe.attention_posterior: mix expert probabilities by attention's posterior (docs/Spec.md 3.4)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Self

import torch

from .._support.keywords import renamed
from ._attention import (
    PairOptions,
    bias_dims,
    bias_form,
    four_dims,
    mask_of_queries,
    pair_options,
    validate_pairs,
)
from ._check import ACTIVATIONS, Checker
from ._few_values import FewValues, scalar
from ._kernel import Kernel, Tensor, contiguous, enum, f64, i64, kernels
from ._library import define, takes

# What the schema calls otherwise, as callers once did.
_NAMES = {"u": "attn_output", "e": "probs", "vp": "projected_v"}
_check = Checker("attention_posterior", _NAMES)
_sigmas = FewValues()


@renamed(_NAMES)
def attention_posterior(
    q: torch.Tensor,
    k: torch.Tensor,
    attn_output: torch.Tensor,
    probs: torch.Tensor,
    *,
    causal: bool,
    projected_v: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    wo: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    head_prior: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    query_mask: torch.Tensor | None = None,
    row_lse: torch.Tensor | None = None,
    row_entropy: torch.Tensor | None = None,
    sigma: float | torch.Tensor = 1.0,
    scale: float | None = None,
    head_mode: Literal["min_entropy", "all"] | int = "min_entropy",
    head_scope: Literal["sequence", "batch"] = "sequence",
    window: int | None = None,
    exclude_self: bool = False,
    precision: Literal["ieee", "tf32"] = "ieee",
    return_lse: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Mixes the keys' expert probabilities by the posterior of attention given its output.

    Args:
        q, k: `[batch, heads, n | nk, head_width]`, float32, bfloat16 or float16.
        attn_output: the attention's output `[batch, n, d]`, before residual and norm.
        probs: expert probabilities of the keys `[batch, nk, experts]`.
        causal: may a query see only its own position and earlier ones? No default.
        projected_v: the heads' projected values `[batch, heads, nk, d]`; or, instead,
        v, wo: values `[batch, heads, nk, w]` and output projections
            `[heads, d, w]` (heads times torch's out_proj slices); `projected_v`
            is then never formed.
        bias: added to the logits, broadcastable to `[batch, heads, n, nk]`.
        head_prior: `[batch, n, heads]` float32, with head_mode="all"; default uniform.
        mask: bool `[batch, nk]`, the real keys.
        query_mask: bool `[batch, n]`, the real queries; default `mask` where
            n = nk, since then they are the same tokens, else all.
        row_lse, row_entropy: `[batch, heads, n]` float32, what
            `moe_mlir.attention` returned for these q, k, bias and masks: spares
            a pass over the keys of all heads. Gradients do not need them.
        sigma: deviation of the Gaussians, a float or a learned 0-d tensor.
        scale: factor of q.k, default 1/sqrt(head_width).
        head_mode: "min_entropy" (the head with the least mean entropy), "all", or a head.
        head_scope: "sequence" or "batch", where the mean entropy is taken.
        window, exclude_self: see only the last `window` positions; not oneself.
        precision: "ieee" or "tf32" products.
        return_lse: also return the log-sum-exps.

    Returns:
        p `[batch, n, experts]` float32, head `[batch]` int64 (-1 with "all"),
        and with `return_lse` the log-sum-exps of prior and posterior logits,
        `[batch, heads | 1, n]`, without gradient.
    """
    results = _op(
        q, k, attn_output, probs, causal, projected_v, v, wo, bias, head_prior, mask, query_mask,
        row_lse, row_entropy, sigma, scale, head_mode, head_scope, window, exclude_self, precision,
    )  # fmt: skip
    return results if return_lse else results[:2]


class Operands(NamedTuple):
    """The tensors of a call, in the order of the op's schema.

    A further one needs a field here, its places in `_OPERANDS` and `_OF_KERNELS`,
    its dims in `Form.tensor`, its checks, and, if it gets no gradient, its name in
    `_CONSTANT`.
    """

    q: torch.Tensor
    k: torch.Tensor
    u: torch.Tensor
    e: torch.Tensor
    vp: torch.Tensor | None
    v: torch.Tensor | None
    wo: torch.Tensor | None
    bias: torch.Tensor | None
    head_prior: torch.Tensor | None
    mask: torch.Tensor | None
    query_mask: torch.Tensor | None
    row_lse: torch.Tensor | None
    row_entropy: torch.Tensor | None
    sigma: torch.Tensor | None

    def present(self) -> dict[str, torch.Tensor]:
        """Those that are there, by name, as kernels read them."""
        named = self._asdict()
        named["bias"] = four_dims(self.bias)
        named["query_mask"] = mask_of_queries(self.q, self.k, self.mask, self.query_mask)
        named["key_mask"] = self.mask
        if self.sigma is not None:
            named["sigma"] = self.sigma.detach().to(torch.float32)
        return {name: named[name] for name in _OF_KERNELS if named[name] is not None}


@dataclass(frozen=True)
class Options:
    """What a call says besides its tensors, in the order of the op's schema.

    A further one needs a field here, its place in `_OPTIONS`, its check, and its
    attribute in the kernels that it changes.
    """

    sigma: float  # Means nothing where sigma is a tensor.
    scale: float | None
    head_mode: str
    head: int | None
    head_scope: str
    causal: bool
    window: int | None
    exclude_self: bool
    precision: str

    @property
    def pairs(self) -> PairOptions:
        return PairOptions(
            self.scale, self.causal, self.window, self.exclude_self, self.precision)

    @property
    def all_heads(self) -> bool:
        return self.head_mode == "all"


_OPERANDS = (
    "Tensor q, Tensor k, Tensor u, Tensor e, Tensor? vp, Tensor? v, Tensor? wo, Tensor? bias, "
    "Tensor? head_prior, Tensor? mask, Tensor? query_mask, Tensor? row_lse, "
    "Tensor? row_entropy, Tensor? sigma_value"
)
_OPTIONS = (
    "float sigma, float? scale, str head_mode, int? head, str head_scope, bool causal, "
    "int? window, bool exclude_self, str precision"
)
# The rows' sums are no function of their own: gradients flow through q and k.
_CONSTANT = ("mask", "query_mask", "row_lse", "row_entropy")
# In the order of the op's assembly.
_OF_KERNELS = ("q", "k", "u", "e", "vp", "v", "wo", "bias", "head_prior", "query_mask", "key_mask",
               "row_lse", "row_entropy", "sigma")


def _arguments(
    q, k, u, e, causal, vp, v, wo, bias, head_prior, mask, query_mask, row_lse, row_entropy,
    sigma, scale, head_mode, head_scope, window, exclude_self, precision,
):  # fmt: skip
    head = None
    if not isinstance(head_mode, str):
        head_mode, head = "fixed", _check.integer("head_mode", head_mode)
    sigma_value, sigma = _check.scalar_or_tensor("sigma", sigma)
    operands = Operands(
        q, k, u, e, vp, v, wo, bias, head_prior, mask, query_mask, row_lse, row_entropy,
        sigma_value)
    for name, value in operands._asdict().items():
        _check.tensor(name, value, optional=name not in ("q", "k", "u", "e"))
    scale, *rest = pair_options(_check, scale, causal, window, exclude_self, precision)
    return *operands, sigma, scale, head_mode, head, head_scope, *rest


def _validate(operands, options):
    q, k, u, e, vp, v, wo, bias, head_prior, mask, query_mask, row_lse, row_entropy, sigma = (
        operands)
    validate_pairs(_check, q, k, bias, mask, options.pairs, query_mask)
    for name, tensor in (("u", u), ("e", e)):
        _check.dtype(name, tensor, ACTIVATIONS)
    batch, heads, n, _ = q.shape
    nk = k.shape[2]
    _check.rank("u", u, "[batch, n, d]")
    d = u.shape[-1]
    _check.shape("u", u, (batch, n, d), "[batch, n, d]")
    _check.rank("e", e, "[batch, nk, experts]")
    _check.shape("e", e, (batch, nk, e.shape[-1]), "[batch, nk, experts]")
    _validate_values(vp, v, wo, batch, heads, nk, d)
    if head_prior is not None:
        _check.dtype("head_prior", head_prior, (torch.float32,))
        _check.shape("head_prior", head_prior, (batch, n, heads), "[batch, n, heads]")
    if (row_lse is None) != (row_entropy is None):
        _check.fail("expected 'row_lse' and 'row_entropy' together, found one of them")
    for name, rows in (("row_lse", row_lse), ("row_entropy", row_entropy)):
        if rows is not None:
            _check.dtype(name, rows, (torch.float32,))
            _check.shape(name, rows, (batch, heads, n), "[batch, heads, n]")
    if sigma is None:
        _check.positive("sigma", options.sigma)
    _validate_head(options, heads)


def _validate_head(options, heads):
    head = options.head
    if options.head_mode == "fixed":
        if head is None or not 0 <= head < heads:
            _check.fail(f"expected 'head_mode' in [0, {heads}) (the number of heads), found {head}")
    else:
        _check.choice("head_mode", options.head_mode, ("min_entropy", "all"))
    _check.choice("head_scope", options.head_scope, ("sequence", "batch"))


def _validate_values(vp, v, wo, batch, heads, nk, d):
    """The means: either `vp`, or `v` with `wo`."""
    given = [name for name, t in (("vp", vp), ("v", v), ("wo", wo)) if t is not None]
    if given not in (["vp"], ["v", "wo"]):
        _check.fail(
            f"expected either 'vp' or both 'v' and 'wo', found {' and '.join(given) or 'none'}"
        )
    for name, tensor in (("vp", vp), ("v", v), ("wo", wo)):
        if tensor is not None:
            _check.dtype(name, tensor, ACTIVATIONS)
    if vp is not None:
        _check.shape("vp", vp, (batch, heads, nk, d), "[batch, heads, nk, d of 'u']")
    else:
        _check.rank("v", v, "[batch, heads, nk, w]")
        _check.shape("v", v, (batch, heads, nk, v.shape[-1]), "[batch, heads, nk, w]")
        _check.shape("wo", wo, (heads, d, v.shape[-1]), "[heads, d of 'u', w of 'v']")


class Form(NamedTuple):
    """What of its operands a kernel is specialised to."""

    # (name, dtype) of the operands that are there.
    dtypes: tuple[tuple[str, torch.dtype], ...]
    heads: int
    width: int
    d: int
    experts: int
    value_width: int | None
    # Which of batch and heads the bias has.
    bias: tuple[bool, bool] | None

    @classmethod
    def of(cls, present: Mapping[str, torch.Tensor]) -> Self:
        return cls(
            tuple((name, tensor.dtype) for name, tensor in present.items()),
            present["q"].shape[1],
            present["q"].shape[-1],
            present["u"].shape[-1],
            present["e"].shape[-1],
            present["v"].shape[-1] if "v" in present else None,
            bias_form(present.get("bias")),
        )

    def inputs(self) -> list[Tensor]:
        return [self.tensor(name, dtype) for name, dtype in self.dtypes]

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        """How a kernel takes an operand."""
        of_keys = ("b", self.heads, "m")
        places: dict[str, tuple[Any, str]] = {
            "q": (("b", self.heads, "n", self.width), "ins"),
            "k": ((*of_keys, self.width), "ins"),
            "u": (("b", "n", self.d), "ins"),
            "e": (("b", "m", self.experts), "ins"),
            "vp": ((*of_keys, self.d), "means"),
            "v": ((*of_keys, self.value_width), "values"),
            "wo": ((self.heads, self.d, self.value_width), "values"),
            "bias": (self.bias and bias_dims(self.bias, self.heads), "bias"),
            "head_prior": (("b", "n", self.heads), "head_prior"),
            "query_mask": (("b", "n"), "query_mask"),
            "key_mask": (("b", "m"), "key_mask"),
            "row_lse": (("b", self.heads, "n"), "rows"),
            "row_entropy": (("b", self.heads, "n"), "rows"),
            "sigma": ((), "sigma"),
        }
        dims, clause = places[name]
        return Tensor(name, dims, dtype, clause)

    def attributes(self, options: Options) -> Iterator[tuple[str, str]]:
        """Those that forward and backward share."""
        yield from options.pairs.attributes(self.width)
        if "sigma" not in dict(self.dtypes):
            yield "sigma", f64(options.sigma)

    def lse_dims(self, options: Options) -> tuple[str, int, str]:
        return "b", self.heads if options.all_heads else 1, "n"


def _with_sigma(operands: Operands, options: Options) -> tuple[Operands, Options]:
    """Makes an operand of a float sigma that has had many values."""
    others = replace(options, sigma=1.0)
    if operands.sigma is None and not _sigmas.has(
            (Form.of(operands.present()), others), options.sigma):
        return operands._replace(sigma=scalar(options.sigma, operands.q)), others
    return operands, options


@kernels
def kernel(form: Form, options: Options) -> Kernel:
    attributes = [
        ("head_mode", enum("head_mode", options.head_mode)),
        ("head_scope", enum("head_scope", options.head_scope)),
        *form.attributes(options),
    ]
    if options.head is not None:
        attributes.append(("head", i64(options.head)))
    lse_dims = form.lse_dims(options)
    return Kernel(
        "attention_posterior",
        tuple(form.inputs()),
        (
            Tensor("p", ("b", "n", form.experts), torch.float32),
            Tensor("head_index", ("b",), torch.int32),
            Tensor("prior_lse", lse_dims, torch.float32),
            Tensor("posterior_lse", lse_dims, torch.float32),
        ),
        tuple(attributes),
    )


@takes(Operands, Options)
def _cpu(operands, options):
    _validate(operands, options)
    operands, options = _with_sigma(operands, options)
    present = operands.present()
    p, chosen, prior_lse, posterior_lse = kernel(Form.of(present), options)(
        *map(contiguous, present.values()))
    return p, chosen.to(torch.int64), prior_lse, posterior_lse


@takes(Operands, Options)
def _fake(operands, options):
    _validate(operands, options)
    q, e = operands.q, operands.e
    batch, heads, n = q.shape[:3]
    lse = (batch, heads if options.all_heads else 1, n)
    return (
        q.new_empty((batch, n, e.shape[-1]), dtype=torch.float32),
        q.new_empty((batch,), dtype=torch.int64),
        q.new_empty(lse, dtype=torch.float32),
        q.new_empty(lse, dtype=torch.float32),
    )


# -------------------------------------------------------------------- backward


@kernels
def backward_kernel(form: Form, options: Options) -> Kernel:
    """Its inputs are q, k, u, e, results and gradient of the forward, and the other operands."""
    tokens, optional = form.inputs()[:4], form.inputs()[4:]
    lse_dims = form.lse_dims(options)
    of_forward = [
        Tensor("p", ("b", "n", form.experts), torch.float32),
        Tensor("prior_lse", lse_dims, torch.float32),
        Tensor("posterior_lse", lse_dims, torch.float32),
        Tensor("dp", ("b", "n", form.experts), torch.float32),
    ]
    head = [] if options.all_heads else [Tensor("head", ("b",), torch.int64, clause="head")]
    return Kernel(
        "attention_posterior_backward",
        (*tokens, *of_forward, *optional, *head),
        tuple(Tensor(f"d{x.name}", x.dims, torch.float32) for x in (*tokens, *optional)
              if x.dtype != torch.bool),
        tuple(form.attributes(options)),
    )


def _gradients_of(operands):
    return [x for name, x in operands._asdict().items() if name not in _CONSTANT]


@takes(Operands, Options)
def _backward_cpu(dp, p, chosen, prior_lse, posterior_lse, operands, options):
    # One head needs no weights of heads.
    prior = operands.head_prior if options.all_heads else None
    given = operands
    operands, options = _with_sigma(operands, options)
    present = operands._replace(head_prior=prior, row_lse=None, row_entropy=None).present()
    run = backward_kernel(Form.of(present), options)
    tokens = [present.pop(name) for name in ("q", "k", "u", "e")]
    inputs = [*tokens, p, prior_lse, posterior_lse, dp, *present.values()]
    if not options.all_heads:
        inputs.append(chosen)
    grads = iter(run(*map(contiguous, inputs)))

    def like(x):
        if x is None:
            return p.new_empty(0)
        if x is operands.head_prior and prior is None:
            return torch.zeros_like(x)
        return next(grads).view(x.shape).to(x.dtype)

    return tuple(map(like, _gradients_of(given)))


@takes(Operands, Options)
def _backward_fake(dp, p, chosen, prior_lse, posterior_lse, operands, options):
    def like(x):
        if x is None:
            return p.new_empty(0)
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    return tuple(map(like, _gradients_of(operands)))


_backward_op = define(
    "attention_posterior_backward(Tensor dp, Tensor p, Tensor chosen, Tensor prior_lse, "
    f"Tensor posterior_lse, {_OPERANDS}, {_OPTIONS}) -> "
    "(Tensor dq, Tensor dk, Tensor du, Tensor de, Tensor dvp, Tensor dv, Tensor dwo, "
    "Tensor dbias, Tensor dhead_prior, Tensor dsigma)",
    kernel=_backward_cpu,
    fake=_backward_fake,
    is_gradient=True,
)


def _setup_context(ctx, inputs, output):
    num_operands = len(Operands._fields)
    operands, ctx.options = Operands(*inputs[:num_operands]), inputs[num_operands:]
    p, head, prior_lse, posterior_lse = output
    ctx.mark_non_differentiable(head, prior_lse, posterior_lse)
    operands = operands._replace(row_lse=None, row_entropy=None)
    ctx.save_for_backward(p, head, prior_lse, posterior_lse, *operands)


def _backward(ctx, dp, *_):
    p, head, prior_lse, posterior_lse, *saved = ctx.saved_tensors
    operands = Operands(*saved)
    grads = iter(_backward_op(dp, p, head, prior_lse, posterior_lse, *operands, *ctx.options))
    of_operands = [None if name in _CONSTANT else next(grads) for name in Operands._fields]
    return (
        *(None if x is None else grad for x, grad in zip(operands, of_operands, strict=True)),
        *(None for _ in ctx.options),
    )


_op = define(
    f"attention_posterior({_OPERANDS}, {_OPTIONS}) -> "
    "(Tensor p, Tensor head_index, Tensor prior_lse, Tensor posterior_lse)",
    arguments=_arguments,
    kernel=_cpu,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    cast=("q", "k", "u", "vp", "v", "wo"),
    widen=("head_prior", "row_lse", "row_entropy"),
)
