"""What is checked: every forward op, and the forms of the ops with kernels of their own."""

from dataclasses import dataclass
from typing import Callable

import torch

import moe_mlir
from moe_mlir import reference
from moe_mlir.ops._kernel import ELEMENT_TYPES

n, e, d, k, heads = 12, 8, 16, 2, 2


def operands():
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


@dataclass(frozen=True)
class Case:
    """`call(*inputs)` on the GPU against `expect(*inputs)` in float64 on the CPU."""

    name: str
    inputs: Callable
    call: Callable
    expect: Callable
    tolerance: float

    def check(self, device: str) -> str:
        """Empty, or what is wrong. A second run must give the same bits."""
        inputs = self.inputs()
        expected = _tuple(self.expect(*(_wide(x) for x in inputs)))
        moved = [x.to(device) for x in inputs]
        found, again = (_tuple(self.call(*moved)) for _ in range(2))
        for i, (a, b, want) in enumerate(zip(found, again, expected, strict=True)):
            if not torch.equal(_bits(a), _bits(b)):
                return f"result {i} differs between two runs"
            if problem := _difference(a.cpu(), want, self.tolerance):
                return f"result {i}: {problem}"
        return ""


def _tuple(x):
    return x if isinstance(x, tuple) else (x,)


def _wide(x):
    return x.double() if x.is_floating_point() else x


def _bits(x):
    """NaNs equal themselves as integers."""
    return x.view({4: torch.int32, 2: torch.int16}[x.element_size()]) \
        if x.is_floating_point() else x


def _difference(found, expected, tolerance):
    if found.shape != expected.shape:
        return f"expected shape {list(expected.shape)}, found {list(found.shape)}"
    if not found.is_floating_point():
        wrong = int((found != expected).sum())
        return f"{wrong} of {found.numel()} integers differ" if wrong else ""
    if not torch.equal(found.isnan(), expected.isnan()):
        return "NaN in other places"
    error = (found.double() - expected).nan_to_num(0).abs()
    limit = tolerance * (1 + expected.nan_to_num(0).abs())
    worst = float((error / limit).max()) if error.numel() else 0
    return f"error is {worst:.2g} of the tolerance {tolerance}" if worst > 1 else ""


def _op_cases():
    """The ops in their smallest form."""
    names = list(operands())

    def call_on(library, call):
        return lambda *values: call(library, dict(zip(names, values)))

    for name, call in OPS.items():
        yield Case(name, lambda: list(operands().values()), call_on(moe_mlir, call),
                   call_on(reference, call), 2e-6)


def _selection_cases():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for tokens, experts, chosen in ((1, 8, 2), (33, 16, 2), (257, 64, 8), (130, 128, 8),
                                        (64, 256, 8), (19, 160, 6), (5, 512, 10), (3, 1024, 32)):
            def inputs(tokens=tokens, experts=experts, dtype=dtype):
                generator = torch.Generator().manual_seed(experts)
                z = torch.randn(tokens, experts, generator=generator)
                z[0, experts // 2] = float("inf")
                z[-1, 1] = z[-1, 0]
                return [z.to(dtype)]

            yield Case(f"topk_renorm {tokens}x{experts} k{chosen} {ELEMENT_TYPES[dtype]}", inputs,
                       lambda z, c=chosen: moe_mlir.topk_renorm(z, c),
                       lambda z, c=chosen: reference.topk_renorm(z, c), 2e-6)


def _mixing_cases():
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-5)):
        for tokens, width, experts in ((1, 16, 8), (70, 48, 8), (200, 352, 16), (129, 128, 64)):
            for causal in (False, True):
                def inputs(t=tokens, w=width, e=experts, dtype=dtype):
                    generator = torch.Generator().manual_seed(t)
                    u = torch.randn(2, t, w, generator=generator) * (8 / w) ** 0.5
                    p = torch.randn(2, t, e, generator=generator).softmax(-1)
                    return [u.to(dtype), p.to(dtype)]

                yield Case(
                    f"similarity_inform {tokens}x{width} E{experts} {ELEMENT_TYPES[dtype]}"
                    f"{' causal' if causal else ''}", inputs,
                    lambda u, p, c=causal: moe_mlir.similarity_inform(u, p, causal=c),
                    lambda u, p, c=causal: reference.similarity_inform(u, p, causal=c), tolerance)


def _statistics_cases():
    for tokens, width, experts in ((1, 8, 4), (300, 64, 16), (1000, 96, 64)):
        def inputs(t=tokens, w=width, e=experts):
            generator = torch.Generator().manual_seed(t)
            return [torch.randn(t, w, generator=generator),
                    torch.randint(e, (t,), generator=generator)]

        yield Case(f"mad_dispersion {tokens}x{width} E{experts}", inputs,
                   lambda h, a, e=experts: moe_mlir.mad_dispersion(h, a, e),
                   lambda h, a, e=experts: reference.mad_dispersion(h, a, e), 1e-5)


def all_cases() -> list[Case]:
    return [*_op_cases(), *_selection_cases(), *_mixing_cases(), *_statistics_cases()]
