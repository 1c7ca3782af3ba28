"""What is checked of the ops: each kernel once, then its forms, then large sizes.

The order of `all_cases` is that of a run: by what teaches most. Functions that take
`rehearses` make large cases small, for the simulator; the kernels are the same.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch

import moe_mlir
from moe_mlir import reference
from moe_mlir.experts.run import run_experts
from moe_mlir.ops._expert_activation import ExpertActivation
from moe_mlir.ops._kernel import ELEMENT_TYPES
from moe_mlir.ops.grouped_linear import kernel as grouped_linear_kernel

from . import gradients
from .case import Case, _tuple, difference
from .modules import experts_text, multiply_experts, route, router_text
from .target import Module

n, e, d, k, heads = 12, 8, 16, 2, 2


def operands() -> dict[str, torch.Tensor]:
    """Small operands for all ops; the same values at every call."""
    torch.manual_seed(0)
    z = torch.randn(n, e)
    indices = torch.topk(z, k).indices
    return {
        "h": torch.randn(n, d), "weight": torch.randn(e, d), "z": z, "p": z.softmax(-1),
        "idx": indices, "top1": indices[:, 0].contiguous(), "g": torch.rand(n, k),
        "a": torch.rand(e, e), "u": torch.randn(1, n, d), "q": torch.randn(1, heads, n, 8),
        "wo": torch.randn(heads, d, 8), "rows": torch.randn(n * k, d), "m": torch.rand(e, d),
        "bias": torch.randn(e), "generator": torch.ones(4), "w1": torch.ones(6, 4),
        "b1": torch.ones(6), "w2": torch.ones(e * (d + 1), 6), "b2": torch.ones(e * (d + 1)),
        "counts": torch.arange(e), "zeros": torch.zeros(e),
        "phi": torch.randn(d, e, 2), "places": torch.arange(n * k).view(n, k),
    }


# Op name -> a call on `operands()`, of the package or of `reference`.
OPS = {
    "topk_renorm": lambda m, o: m.topk_renorm(o["z"], k),
    "grouped_topk": lambda m, o: m.grouped_topk(o["z"], k, bias=o["bias"], n_group=4, topk_group=2),
    "threshold_renorm": lambda m, o: m.threshold_renorm(o["p"], 0.1),
    "router_logits": lambda m, o: m.router_logits(o["h"], o["weight"]),
    "cosine_logits": lambda m, o: m.cosine_logits(o["h"], None, o["weight"]),
    "soft_dispatch": lambda m, o: m.soft_dispatch(o["h"], o["phi"]),
    "hyper_router": lambda m, o: m.hyper_router(
        o["generator"], o["w1"], o["b1"], o["w2"], o["b2"], e),
    "similarity_inform": lambda m, o: m.similarity_inform(o["u"], o["p"].unsqueeze(0), causal=True),
    "attention_posterior": lambda m, o: m.attention_posterior(
        o["q"], o["q"], o["u"], o["p"].unsqueeze(0), causal=True, v=o["q"], wo=o["wo"]),
    "attention": lambda m, o: m.attention(o["q"], o["q"], o["q"], causal=True),
    "attention_entropy": lambda m, o: m.attention_entropy(o["q"], o["q"], causal=True),
    "mad_dispersion": lambda m, o: m.mad_dispersion(o["h"], o["top1"], e),
    "dispersion_weights": lambda m, o: m.dispersion_weights(o["m"], o["counts"] + 1),
    "ac_logits": lambda m, o: m.ac_logits(o["h"], o["m"], o["idx"], o["weight"], prev_gates=o["g"]),
    "adjacency_gate": lambda m, o: m.adjacency_gate(o["p"], o["a"]),
    "adjacency_update": lambda m, o: m.adjacency_update(o["a"], o["idx"]),
    "dispatch": lambda m, o: m.dispatch(o["idx"], e),
    "combine": lambda m, o: m.combine(o["rows"], o["g"], o["places"]),
    "balance_loss": lambda m, o: m.balance_loss(o["p"], o["idx"]),
    "z_loss": lambda m, o: m.z_loss(o["z"]),
    "bias_update": lambda m, o: m.bias_update(o["zeros"], o["counts"]),
    "densify": lambda m, o: m.densify(o["g"], o["idx"], e),
    "make_finite": lambda m, o: m.make_finite(o["z"]),
}


# ---------------------------------------------------------------- every kernel once


def _op_cases():
    """The ops in their smallest form."""
    names = list(operands())

    def call_on(library, call):
        return lambda *values: call(library, dict(zip(names, values)))

    for name, call in OPS.items():
        yield Case(name, lambda: list(operands().values()), call_on(moe_mlir, call),
                   call_on(reference, call), 2e-6)


def _normal(*shape, seed=0, scale=1.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(*shape, generator=generator)).to(dtype)


def _gradient_cases():
    for name, (call, values) in gradients.CASES.items():
        yield _gradient_case(f"gradient of {name}", call, values, 20 * 2e-6)
    for width in (64, 128):
        q, k, v = (_normal(1, 2, 70, width, seed=i, dtype=torch.bfloat16) for i in range(3))
        yield _gradient_case(f"gradient of attention {width} bf16",
                             lambda m, q, k, v: m.attention(q, k, v, causal=True), [q, k, v], 2**-7)
    u = _normal(1, 70, 352, scale=(8 / 352) ** 0.5, dtype=torch.bfloat16)
    p = _normal(1, 70, 16, seed=1).softmax(-1).bfloat16()
    yield _gradient_case("gradient of similarity 352 bf16",
                         lambda m, u, p: m.similarity_inform(u, p, causal=True), [u, p], 2**-7)


def _gradient_case(name, call, values, tolerance):
    """Judged by the largest gradient of each leaf; those of bf16 leaves are rounded to it."""
    def judge(inputs, found, tolerance):
        expected = gradients.gradients(
            reference, call, [x.double() for x in inputs])
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            error = float((a.double() - b).abs().max())
            bound = tolerance * max(1.0, float(b.abs().max()))
            if not error <= bound:
                return f"gradient {i}: error {error:.2g}, at most {bound:.2g}"
        return ""

    return Case(name, lambda: values, lambda *x: gradients.gradients(moe_mlir, call, x), None,
                tolerance, judge=judge, model=1.0)


# Experts, width, k, type. Those of 65 to 160 experts need more shared memory than a launch gets
# unasked, and no other kernel has their layout.
ROUTERS = [
    (128, 4096, 8, torch.bfloat16), (128, 2880, 4, torch.bfloat16), (65, 4096, 8, torch.float16),
    (72, 2880, 6, torch.bfloat16), (160, 5120, 6, torch.bfloat16), (96, 4096, 8, torch.float16),
    (16, 352, 2, torch.bfloat16), (64, 1024, 8, torch.bfloat16), (256, 7168, 8, torch.bfloat16),
    (64, 1024, 8, torch.float32),
]


def router_case(experts: int, width: int, k: int, dtype: torch.dtype, tokens: int,
                **options: Any) -> Case:
    module = Module(router_text(experts, width, k, dtype=dtype), "route")

    def inputs():
        return [_normal(tokens, width, seed=1, dtype=dtype),
                _normal(experts, width, seed=2, scale=width**-0.5, dtype=dtype)]

    return Case(f"router {tokens}x{width} E{experts} k{k} {ELEMENT_TYPES[dtype]}", inputs,
                functools.partial(route, module, k), None, 0, judge=judge_router,
                **{"model": 1.0, **options})


def judge_router(inputs: Sequence[torch.Tensor], found: Sequence[torch.Tensor], _: float) -> str:
    """A legal selection (docs/Spec.md, section 1), with the gates of what it chose."""
    h, w = inputs
    gates, indices = found[0].double(), found[1].long()
    z = h.double() @ w.double().T
    experts, k = z.shape[1], indices.shape[1]
    atol = 1e-6 + (8 + h.shape[1] ** 0.5) * 2.0**-24 * float(z.abs().max())
    if not ((0 <= indices) & (indices < experts)).all():
        return f"expected experts in [0, {experts}), found {int(indices.min())} to {int(indices.max())}"
    if (indices.sort(-1).values.diff() == 0).any():
        return "an expert is chosen twice"
    chosen = z.gather(1, indices)
    if (short := float((z.topk(k).values[:, -1:] - chosen).max())) > atol:
        return f"a chosen expert is {short:.2g} below the k-th best, at most {atol:.2g}"
    if (rise := float(chosen.diff().max())) > atol:
        return f"scores rise by {rise:.2g} along the places, at most {atol:.2g}"
    worst = float((gates - chosen.softmax(-1)).abs().max())
    return f"gates differ by {worst:.2g}, at most {2 * atol:.2g}" if not worst <= 2 * atol else ""


def experts_case(experts: int, width: int, hidden: int, dtype: torch.dtype, lengths: Sequence[int],
                 transposed: bool = False, **options: Any) -> Case:
    module = Module(experts_text(experts, width, hidden, dtype, transposed), "layer")
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0)])

    def inputs():
        w = _normal(experts, hidden, width, seed=2, scale=width**-0.5, dtype=dtype)
        rows = int(offsets[-1])
        return [_normal(rows, width, seed=1, dtype=dtype), w.mT.contiguous() if transposed else w,
                offsets, _normal(rows, hidden, seed=3)]

    def expect(x, w, offsets, old):
        y, at = old.clone(), offsets.tolist()
        for e in range(experts):
            rows = slice(at[e], at[e + 1])
            y[rows] += x[rows] @ (w[e] if transposed else w[e].mT)
        return y

    name = f"experts {sum(lengths)}x{width} to {hidden} E{experts} {ELEMENT_TYPES[dtype]}"
    # Sums in f32 of products that are exact.
    return Case(name + (" transposed" if transposed else ""), inputs,
                functools.partial(multiply_experts, module), expect,
                4e-6 + width**0.5 * 2**-23, module=module, **options)


def grouped_linear_case(width: int, features: int, dtype: torch.dtype, lengths: Sequence[int],
                        activation: ExpertActivation, transposed: bool = False,
                        **options: Any) -> Case:
    """Rows gathered from x, times the weights of their experts, a bias, and an activation."""
    count, experts, element = sum(lengths), len(lengths), ELEMENT_TYPES[dtype]
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0)])
    run = grouped_linear_kernel(dtype, width, features, torch.int64, dtype, torch.int64,
                                transposed, activation)

    def inputs():
        w = _normal(experts, features, width, seed=2, scale=width**-0.5, dtype=dtype)
        rows = torch.randint(count, (count,), generator=torch.Generator().manual_seed(1))
        return [_normal(count, width, seed=1, dtype=dtype), w.mT.contiguous() if transposed else w,
                offsets, rows, _normal(experts, features, seed=3, dtype=dtype)]

    def expect(x, w, offsets, rows, bias):
        x, w = x[rows], w if transposed else w.mT
        return torch.cat([activation(x[begin:end] @ w[e] + bias[e])
                          for e, (begin, end) in enumerate(zip(offsets, offsets[1:]))])

    return Case(f"grouped_linear {count}x{width} to {features} E{experts} {activation.activation} "
                f"{activation.gate} {element}{' transposed' if transposed else ''}",
                inputs, run, expect, 2**-8 if dtype == torch.bfloat16 else 2**-11, module=run,
                **options)


def _grouped_linear_cases():
    """Of many rows an expert: on sm_90a warpgroups multiply them."""
    bf16, f16 = torch.bfloat16, torch.float16
    none = ExpertActivation()
    swiglu = ExpertActivation("silu", gate="concatenated")
    interleaved = ExpertActivation("silu", alpha=1.702, gate="interleaved", limit=7.0, up_offset=1.0)
    yield grouped_linear_case(256, 512, bf16, [128, 256], none)
    yield grouped_linear_case(320, 264, bf16, [70, 0, 90], none)
    yield grouped_linear_case(192, 272, f16, [200, 1], swiglu)
    yield grouped_linear_case(576, 256, bf16, [60, 129], interleaved)
    yield grouped_linear_case(136, 256, bf16, [70, 129], none, transposed=True)
    yield grouped_linear_case(320, 272, bf16, [70, 9], swiglu, transposed=True)
    yield grouped_linear_case(72, 48, f16, [90], interleaved, transposed=True)


def layer_case(tokens: int, width: int, hidden: int, experts: int, k: int, dtype: torch.dtype,
               activation: ExpertActivation, is_gradient: bool = False, **options: Any) -> Case:
    """A layer of experts as users call it, some of whose tokens have fewer than k experts."""
    features = hidden if activation.gate == "none" else 2 * hidden

    def inputs():
        generator = torch.Generator().manual_seed(tokens)
        indices = torch.rand(tokens, experts, generator=generator).topk(k).indices
        indices[::3, -1] = -1
        return [_normal(tokens, width, seed=1, dtype=dtype), indices,
                torch.rand(tokens, k, generator=generator).to(dtype),
                _normal(experts, features, width, seed=2, scale=width**-0.5, dtype=dtype),
                _normal(experts, width, hidden, seed=3, scale=hidden**-0.5, dtype=dtype),
                _normal(experts, features, seed=4, dtype=dtype),
                _normal(experts, width, seed=5, dtype=dtype)]

    def layer(x, indices, gates, w_in, w_out, b_in, b_out):
        if x.dtype == torch.float64:
            return _layer_in_torch(activation, x, gates, indices, w_in, w_out, b_in, b_out)
        return run_experts(x, gates, indices, w_in, w_out, b_in=b_in, b_out=b_out,
                           activation=activation)

    def gradient(x, indices, *others):
        leaves = [value.clone().requires_grad_() for value in (x, *others)]
        out = layer(leaves[0], indices, *leaves[1:])
        seed = _normal(*out.shape, seed=7).to(out.device, out.dtype)
        return torch.autograd.grad(out, leaves, seed)

    call = gradient if is_gradient else layer
    # bf16 rounds what lies between the products, and each product; gradients of weights add up.
    tolerance = {torch.bfloat16: 2**-5, torch.float16: 2**-8}.get(dtype, 2e-5)
    name = (f"layer {tokens}x{width} {experts} experts of {hidden} k{k} {activation.activation} "
            f"{ELEMENT_TYPES[dtype]}")
    return Case("gradient of " + name if is_gradient else name, inputs, call, None,
                tolerance, judge=functools.partial(_judge_by_largest, call),
                **{"model": 1.0, **options})


def _judge_by_largest(call, inputs, found, tolerance):
    """Errors of each result against its largest value."""
    expected = call(*(x.double() if x.is_floating_point() else x for x in inputs))
    for i, (a, b) in enumerate(zip(found, _tuple(expected), strict=True)):
        error, bound = float((a.double() - b).abs().max()), tolerance * float(b.abs().max())
        if not error <= bound:
            return f"result {i}: error {error:.2g}, at most {bound:.2g}"
    return ""


def _layer_in_torch(activation, x, gates, indices, w_in, w_out, b_in, b_out):
    """Every expert on every token: without a kernel, and differentiable."""
    shares = torch.zeros(len(x), len(w_in) + 1, dtype=x.dtype).scatter_add(
        1, torch.where(indices < 0, len(w_in), indices), gates)
    return sum(shares[:, e, None] * (activation(x @ w_in[e].mT + b_in[e]) @ w_out[e].mT + b_out[e])
               for e in range(len(w_in)))


def _layer_cases():
    """Few rows an expert, of which one kernel reads the weights, and many."""
    swiglu, gelu = ExpertActivation("silu", gate="concatenated"), ExpertActivation("gelu")
    bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
    for tokens, experts, activation, dtype in (
            (1, 8, swiglu, bf16), (5, 64, gelu, bf16), (100, 16, swiglu, bf16),
            (200, 8, swiglu, bf16), (200, 8, gelu, bf16), (20, 8, swiglu, f16), (20, 8, gelu, f32)):
        yield layer_case(tokens, 192, 128, experts, 2, dtype, activation)
    for tokens, dtype in ((20, bf16), (200, bf16), (20, f32)):
        yield layer_case(tokens, 192, 128, 8, 2, dtype, swiglu, is_gradient=True)


def attention_case(heads: int, tokens: int, width: int, dtype: torch.dtype, batch: int = 1,
                   causal: bool = True, **options: Any) -> Case:
    def inputs():
        return [_normal(batch, heads, tokens, width, seed=i, dtype=dtype) for i in range(3)]

    def judge(inputs, found, tolerance):
        expected = reference.attention(*(x.double() for x in inputs), causal=causal)
        rounding = 2**-8 if dtype == torch.bfloat16 else 2**-11 if dtype == torch.float16 else 0
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            # The mean is rounded to the type of q; the entropy is a difference of two logarithms.
            allowed = (rounding + tolerance, tolerance, 4 * tolerance)[i]
            if text := difference(a, b, allowed):
                return f"result {i}: {text}"
        return ""

    return Case(f"attention {batch}x{heads}x{tokens}x{width} {ELEMENT_TYPES[dtype]}"
                f"{' causal' if causal else ''}", inputs,
                lambda q, k, v: moe_mlir.attention(q, k, v, causal=causal), None, 1e-5,
                judge=judge, **{"model": 1.5, **options})


def similarity_case(tokens: int, width: int, experts: int, dtype: torch.dtype, causal: bool,
                    batch: int = 2, **options: Any) -> Case:
    def inputs():
        u = _normal(batch, tokens, width, seed=tokens, scale=(8 / width) ** 0.5, dtype=dtype)
        p = _normal(batch, tokens, experts, seed=tokens + 1).softmax(-1)
        return [u, p.to(dtype)]

    return Case(f"similarity_inform {batch}x{tokens}x{width} E{experts} {ELEMENT_TYPES[dtype]}"
                f"{' causal' if causal else ''}", inputs,
                lambda u, p: moe_mlir.similarity_inform(u, p, causal=causal),
                lambda u, p: reference.similarity_inform(u, p, causal=causal), 1e-5, **options)


def _tensor_core_cases():
    bf16, f16 = torch.bfloat16, torch.float16
    # On sm_90a the values are a wgmma operand along N of this width; 8, 24 and 40 fill no swizzle.
    for experts in (8, 24, 40, 16):
        yield similarity_case(150, 64, experts, bf16, True, model=1.5)
    for experts, width, k, dtype in ROUTERS:
        yield router_case(experts, width, k, dtype, 70)
    for width in (64, 128):
        yield attention_case(2, 150, width, bf16)
    yield attention_case(2, 70, 128, f16)
    yield experts_case(4, 72, 200, bf16, [70, 0, 1, 16])
    yield experts_case(4, 64, 48, f16, [3, 130, 64, 17], transposed=True)
    yield from _grouped_linear_cases()
    yield similarity_case(200, 352, 16, bf16, True, model=2.0)
    yield similarity_case(70, 512, 16, bf16, False, model=2.0)


# ---------------------------------------------------------------- forms


def selection_case(tokens: int, experts: int, chosen: int, dtype: torch.dtype,
                   **options: Any) -> Case:
    def inputs():
        z = _normal(tokens, experts, seed=experts)
        z[0, experts // 2] = float("inf")
        z[-1, 1] = z[-1, 0]
        return [z.to(dtype)]

    return Case(f"topk_renorm {tokens}x{experts} k{chosen} {ELEMENT_TYPES[dtype]}", inputs,
                lambda z: moe_mlir.topk_renorm(z, chosen),
                lambda z: reference.topk_renorm(z, chosen), 2e-6, **options)


def _selection_cases():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for tokens, experts, chosen in ((1, 8, 2), (33, 16, 2), (257, 64, 8), (130, 128, 8),
                                        (64, 256, 8), (19, 160, 6), (5, 512, 10), (3, 1024, 32)):
            yield selection_case(tokens, experts, chosen, dtype, group="forms", model=0.3)


def _mixing_cases():
    for dtype in (torch.float32, torch.bfloat16):
        for tokens, width, experts in ((1, 16, 8), (70, 48, 8), (200, 352, 16), (129, 128, 64)):
            for causal in (False, True):
                # The form that every kernel is run in once.
                if (tokens, width, dtype, causal) != (200, 352, torch.bfloat16, True):
                    yield similarity_case(tokens, width, experts, dtype, causal, group="forms",
                                          model=1.0)


def dispersion_case(tokens: int, width: int, experts: int, **options: Any) -> Case:
    def inputs():
        generator = torch.Generator().manual_seed(tokens)
        return [torch.randn(tokens, width, generator=generator),
                torch.randint(experts, (tokens,), generator=generator)]

    return Case(f"mad_dispersion {tokens}x{width} E{experts}", inputs,
                lambda h, a: moe_mlir.mad_dispersion(h, a, experts),
                lambda h, a: reference.mad_dispersion(h, a, experts), 1e-5, **options)


def adjacency_case(tokens: int, experts: int, k: int, **options: Any) -> Case:
    def inputs():
        generator = torch.Generator().manual_seed(tokens)
        scores = torch.rand(tokens, experts, generator=generator)
        return [torch.rand(experts, experts, generator=generator), scores.topk(k).indices]

    return Case(f"adjacency_update {tokens} k{k} E{experts}", inputs, moe_mlir.adjacency_update,
                reference.adjacency_update, 2e-6, **options)


def dispatch_case(tokens: int, experts: int, k: int, **options: Any) -> Case:
    def inputs():
        generator = torch.Generator().manual_seed(tokens)
        return [torch.rand(tokens, experts, generator=generator).topk(k).indices]

    return Case(f"dispatch {tokens} k{k} E{experts}", inputs,
                lambda i: moe_mlir.dispatch(i, experts), lambda i: reference.dispatch(i, experts),
                0, **options)


def _statistics_cases():
    for tokens, width, experts in ((1, 8, 4), (300, 64, 16), (1000, 96, 64)):
        yield dispersion_case(tokens, width, experts, group="forms", model=0.3)


def _unaligned_cases():
    """Views that begin one element past what kernels read at once."""
    options: dict[str, Any] = {"group": "forms", "is_unaligned": True, "model": 0.3}
    for case in (selection_case(33, 16, 2, torch.bfloat16, **options),
                 selection_case(130, 128, 8, torch.float32, **options),
                 similarity_case(70, 64, 8, torch.bfloat16, True, **options),
                 router_case(128, 4096, 8, torch.bfloat16, 20, **options),
                 dispersion_case(300, 64, 16, **options)):
        yield _renamed(case, " unaligned")


def _renamed(case, ending, **changes):
    return dataclasses.replace(case, name=case.name + ending, **changes)


def _older_chip_cases():
    """What an older GPU would run: mma.sync instead of wgmma, tables without clusters."""
    for case in (similarity_case(150, 64, 24, torch.bfloat16, True, model=1.0),
                 similarity_case(200, 352, 16, torch.bfloat16, True, model=1.5),
                 attention_case(2, 150, 128, torch.bfloat16),
                 router_case(128, 4096, 8, torch.bfloat16, 70), adjacency_case(300, 64, 8),
                 dispersion_case(300, 64, 16)):
        yield _renamed(case, " as sm_80", chip="sm_80", group="forms")


# ---------------------------------------------------------------- large


def _large_cases(rehearses):
    """Sizes of models, where tails, 64-bit offsets and many blocks are."""
    def size(full):
        return max(full // 64, 70) if rehearses else full

    options: dict[str, Any] = {"group": "large", "is_large": True, "limit": 30.0, "model": 2.5}
    bf16 = torch.bfloat16
    yield router_case(128, 4096, 8, bf16, size(16384), **options)
    yield router_case(256, 7168, 8, bf16, size(8192), **options)
    yield selection_case(size(65536), 128, 8, bf16, **options)
    yield selection_case(size(8192), 256, 8, torch.float32, **options)
    yield similarity_case(size(4096), 512, 16, bf16, True, batch=1 if rehearses else 4, **options)
    yield similarity_case(size(512), 352, 16, bf16, False, batch=1 if rehearses else 48, **options)
    yield attention_case(2 if rehearses else 16, size(4096), 128, bf16, **options)
    yield attention_case(2 if rehearses else 16, size(4096), 64, bf16, **options)
    yield experts_case(8 if rehearses else 64, 2048 if not rehearses else 256,
                       1024 if not rehearses else 64, bf16,
                       _uneven(8 if rehearses else 64, size(16384)), **options)
    yield grouped_linear_case(256 if rehearses else 2048, 64 if rehearses else 1536, bf16,
                              _uneven(8 if rehearses else 64, size(16384)),
                              ExpertActivation("silu", gate="concatenated"), **options)
    yield dispersion_case(size(16384), 512, 64, **options)
    yield adjacency_case(size(16384), 64, 8, **options)
    yield dispatch_case(size(4096), 128, 8, **options)
    few = 20 if rehearses else 1024
    yield _far(selection_case(few, 256, 8, bf16, **options), 4 if rehearses else 2**14)
    yield _far(router_case(128, 4096, 8, bf16, few, **options), 4 if rehearses else 2**10)


def _far(case, times):
    """The same rows many times, so that the last of them lie behind 2^31 elements."""
    def call(x, *others):
        results = case.call(x.repeat(times, 1), *others)
        return tuple(y[-len(x):].clone() for y in results)

    return _renamed(case, f" behind {times} times", call=call)


def _uneven(experts, rows):
    """Lengths that sum up to `rows`: none, few, and many rows an expert."""
    weight = torch.arange(experts) % 7
    lengths = (weight * rows // int(weight.sum())).tolist()
    lengths[1] += rows - sum(lengths)
    return lengths


def all_cases(rehearses: bool = False) -> list[Case]:
    return [*_tensor_core_cases(), *_layer_cases(), *_op_cases(), *_gradient_cases(), *_selection_cases(),
            *_mixing_cases(), *_statistics_cases(), *_unaligned_cases(), *_older_chip_cases(),
            *_large_cases(rehearses)]
