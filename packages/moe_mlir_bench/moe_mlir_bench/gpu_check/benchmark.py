"""Times of the kernels, of torch eager, and of the best peer, in one process.

`% of limit` is the larger of bytes / bandwidth and operations / rate, over the time; both
limits are measured in the same run (`timing.Limits`). In the simulator a row is rehearsed: each
of its calls runs once at a fraction of the size, and ours must equal eager's.
"""

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import moe_mlir as m
from moe_mlir._torch.core import grouped_mm
from moe_mlir.ops._kernel import ELEMENT_TYPES

from . import timing
from .case import Problem
from .modules import experts_text, multiply_experts, route, router_text
from .target import Module, Target

BF16, F32 = torch.bfloat16, torch.float32
_REHEARSED_TOKENS = 40


@dataclass
class Row:
    """`make(device, tokens)` gives inputs; `peers` are calls on them by name."""

    name: str
    tokens: int
    make: Callable
    ours: Callable
    eager: Callable
    bytes: int
    operations: int = 0
    peers: dict = field(default_factory=dict)
    # What bf16 rounds in eager is not rounded in ours; None compares nothing.
    tolerance: float | None = 1e-4
    # What is run, where a rehearsal runs another one.
    module: Module | None = None
    group: str = "times"
    limit: float = 30.0
    model: float = 2.0

    def __post_init__(self):
        # Its value at that size has a case of its own.
        self.name = "time of " + self.name

    def run(self, target: Target) -> dict:
        with target.active():
            if target.rehearses:
                return self._rehearse(target)
            return {"row": {"bytes": self.bytes, "operations": self.operations,
                            **self._measure(target.torch_device)}}

    def _rehearse(self, target):
        inputs = self.make(target.torch_device, min(self.tokens, _REHEARSED_TOKENS))
        self._compare(self.ours(*inputs), self.eager(*inputs))
        failed = {}
        for name, peer in self.peers.items():
            try:
                self._compare(peer(*inputs), self.eager(*inputs))
            except Problem as problem:
                raise Problem(f"{name}: {problem}") from None
            except Exception as error:
                failed[name] = _first_line(error)
        return {"peers_without_cpu": failed} if failed else {}

    def _measure(self, device) -> dict:
        first = self.make(device, self.tokens)
        self._compare(self.ours(*first), self.eager(*first))
        inputs = timing.rotated(lambda: self.make(device, self.tokens),
                                sum(x.nbytes for x in first))
        result: dict[str, Any] = {"ours_us": timing.samples(self.ours, inputs)}
        for name, call in {"eager": self.eager, **self.peers}.items():
            try:
                result[f"{name}_us"] = timing.samples(call, inputs)
            except Exception as error:  # a peer that cannot run is a fact of the table
                torch.cuda.synchronize()
                result[f"{name}_error"] = _first_line(error)
        return result

    def _compare(self, found, expected):
        """The first result of each; the large cases are judged in float64 elsewhere."""
        if self.tolerance is None:
            return
        a, b = (x if isinstance(x, torch.Tensor) else x[0] for x in (found, expected))
        error = (a.float() - b.float()).abs()
        worst = float((error / (1 + b.float().abs())).max())
        if not worst <= self.tolerance:
            raise Problem(f"differs by {worst:.2g} from what it is timed against, at most "
                          f"{self.tolerance:.2g}")


def _first_line(error) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def _randn(*shape, device, dtype=F32, scale=1.0):
    return (torch.randn(*shape, device=device) * scale).to(dtype)


# ---------------------------------------------------------------- selection and routers


def _softmax_of_best(z, k):
    values, indices = torch.topk(z.float(), k)
    return values.softmax(-1), indices


def _triton(z, k):
    from . import triton_router

    return triton_router.topk_renorm(z, k)


def _selection_rows():
    for tokens, experts, k in ((16384, 16, 2), (16384, 64, 8), (16384, 128, 8), (8192, 256, 8),
                               (16384, 256, 8), (64, 128, 8), (1, 256, 8)):
        for dtype in (BF16, F32):
            yield Row(f"topk_renorm {tokens}x{experts} k{k} {ELEMENT_TYPES[dtype]}", tokens,
                      lambda device, n, e=experts, d=dtype: [_randn(n, e, dtype=d, device=device)],
                      lambda z, k=k: m.topk_renorm(z, k),
                      lambda z, k=k: _softmax_of_best(z, k),
                      tokens * (experts * dtype.itemsize + 12 * k),
                      peers={"triton": lambda z, k=k: _triton(z, k)}, model=2.5)


def _router_rows():
    for tokens, width, experts, k in ((16384, 7168, 256, 8), (16384, 4096, 128, 8),
                                      (8192, 2880, 128, 4), (32, 7168, 256, 8), (1, 7168, 256, 8),
                                      (32, 4096, 128, 8), (1, 4096, 128, 8)):
        yield Row(f"router {tokens}x{width} E{experts} k{k} bf16", tokens,
                  lambda device, n, d=width, e=experts: [
                      _randn(n, d, dtype=BF16, device=device),
                      _randn(e, d, dtype=BF16, device=device, scale=d**-0.5)],
                  functools.partial(route, router_module(width, experts, k), k),
                  lambda h, w, k=k: _softmax_of_best(F.linear(h, w), k),
                  2 * width * (tokens + experts) + 8 * k * tokens,
                  operations=2 * tokens * width * experts,
                  peers={"linear_triton": lambda h, w, k=k: _triton(F.linear(h, w), k)},
                  # Eager rounds the logits to bf16.
                  tolerance=0.05)


def router_module(width: int, experts: int, k: int) -> Module:
    return Module(router_text(experts, width, k, dtype=BF16), "route")


# ---------------------------------------------------------------- mixing and attention


def _sdpa(backend, q, k, v, causal, scale=None):
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)


def _similarity_rows():
    for batch, tokens, width, experts, dtype in (
            (48, 512, 352, 16, BF16), (4, 4096, 512, 16, BF16), (4, 4096, 128, 64, BF16),
            (8, 512, 352, 16, F32)):
        for causal in (False, True):
            def sdpa(u, p, causal=causal):
                q = u.unsqueeze(1)
                v = F.pad(p, (0, u.shape[-1] - p.shape[-1])).unsqueeze(1)
                out = F.scaled_dot_product_attention(q, q, v, is_causal=causal, scale=1.0)
                return out.squeeze(1)[..., :p.shape[-1]]

            def eager(u, p, causal=causal):
                s = (u @ u.mT).float()
                if causal:
                    s.masked_fill_(torch.ones_like(s, dtype=torch.bool).triu(1), -float("inf"))
                return s.softmax(-1).to(u.dtype) @ p

            pairs = batch * tokens * tokens / (2 if causal else 1)
            yield Row(f"similarity_inform {batch}x{tokens}x{width} E{experts} {ELEMENT_TYPES[dtype]}"
                      f"{' causal' if causal else ''}", tokens,
                      lambda device, n, b=batch, w=width, e=experts, d=dtype: [
                          _randn(min(b, n), n, w, dtype=d, device=device, scale=(8 / w) ** 0.5),
                          _randn(min(b, n), n, e, device=device).softmax(-1).to(d)],
                      lambda u, p, c=causal: m.similarity_inform(u, p, causal=c), eager,
                      batch * tokens * ((width + experts) * dtype.itemsize + 4 * experts),
                      operations=int(2 * pairs * (width + experts)), peers={"sdpa": sdpa},
                      tolerance=0.03 if dtype == BF16 else 1e-4)


def _attention_rows():
    for width in (64, 128):
        for causal in (False, True):
            pairs = 16 * 4096 * 4096 / (2 if causal else 1)
            calls = _attention_calls(causal)
            row: dict[str, Any] = {
                "tokens": 4096, "bytes": 4 * 16 * 4096 * width * 2, "tolerance": 0.03,
                "make": lambda device, n, w=width: [
                    _randn(1, 16, n, w, dtype=BF16, device=device) for _ in range(3)],
            }
            name = f"attention 1x16x4096x{width} bf16{' causal' if causal else ''}"
            yield Row(name, ours=calls["ours"], eager=calls["eager"],
                      peers={"flash": calls["flash"]}, operations=int(4 * pairs * width), **row)
            if causal:
                calls = {key: _with_gradients(call) for key, call in calls.items()}
                yield Row("gradient of " + name, ours=calls["ours"], eager=calls["eager"],
                          peers={"flash": calls["flash"]}, operations=int(14 * pairs * width),
                          **row)


def _attention_calls(causal):
    return {
        "ours": lambda q, k, v: m.attention(q, k, v, causal=causal)[0],
        "eager": lambda q, k, v: _sdpa(SDPBackend.MATH, q, k, v, causal),
        "flash": lambda q, k, v: _sdpa(SDPBackend.FLASH_ATTENTION, q, k, v, causal),
    }


def _with_gradients(call):
    """Forward and backward; the result is the gradient of the first input."""
    def both(*inputs):
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = call(*leaves)
        return torch.autograd.grad(out, leaves, torch.ones_like(out))[0]

    return both


# ---------------------------------------------------------------- experts and statistics


def _experts_rows(rehearses):
    sizes = ((8, 256, 64, 1024),) if rehearses else (
        (64, 2048, 1024, 16384), (128, 2048, 768, 1024))
    for experts, width, hidden, tokens in sizes:
        def make(device, n, e=experts, w=width, h=hidden):
            return [_randn(n, w, dtype=BF16, device=device),
                    _randn(e, h, w, dtype=BF16, device=device, scale=w**-0.5),
                    torch.arange(e + 1, device=device) * n // e, torch.zeros(n, h, device=device)]

        def eager(x, w, offsets, old):
            # A capture cannot read the offsets, so that this is told them.
            y, rows, experts = torch.empty_like(old), len(x), len(w)
            for e in range(experts):
                run = slice(e * rows // experts, (e + 1) * rows // experts)
                y[run] = x[run] @ w[e].mT
            return y

        def grouped(x, w, offsets, old):
            return grouped_mm(x, w.mT, offs=offsets[1:].int())

        module = Module(experts_text(experts, width, hidden, BF16), "layer")
        yield Row(f"experts {tokens}x{width} to {hidden} E{experts} bf16", tokens, make,
                  functools.partial(multiply_experts, module), eager,
                  2 * (tokens * width + experts * width * hidden) + 8 * tokens * hidden,
                  operations=2 * tokens * width * hidden, peers={"grouped_mm": grouped},
                  tolerance=0.03, module=module)


def _statistics_rows():
    for tokens, width, experts in ((16384, 512, 64), (16384, 4096, 64)):
        def eager(h, a, e=experts):
            one = F.one_hot(a, e).float()
            mean = (one.T @ h) / one.sum(0).clamp(min=1)[:, None]
            return torch.zeros(e, h.shape[1], device=h.device).index_add_(
                0, a, (h - mean[a]).abs()) / one.sum(0).clamp(min=1)[:, None]

        # Two reads: the means, then the deviations from them.
        yield Row(f"mad_dispersion {tokens}x{width} E{experts}", tokens,
                  lambda device, n, w=width, e=experts: [
                      _randn(n, w, device=device), torch.randint(e, (n,), device=device)],
                  lambda h, a, e=experts: m.mad_dispersion(h, a, e), eager, 2 * tokens * width * 4)
    yield Row("adjacency_update 16384 k8 E64", 16384,
              lambda device, n: [torch.rand(64, 64, device=device),
                                 torch.rand(n, 64, device=device).topk(8).indices],
              m.adjacency_update, m.reference.adjacency_update, 16384 * 64 + 2 * 64 * 64 * 4)
    yield Row("dispatch 4096 k8 E128", 4096,
              lambda device, n: [torch.rand(n, 128, device=device).topk(8).indices],
              lambda i: m.dispatch(i, 128), lambda i: m.reference.dispatch(i, 128),
              2 * 8 * 4096 * 8, tolerance=0)


def all_rows(rehearses: bool = False) -> list[Row]:
    return [*_selection_rows(), *_router_rows(), *_similarity_rows(), *_attention_rows(),
            *_experts_rows(rehearses), *_statistics_rows()]


def all_units(rehearses: bool) -> list:
    return [timing.Limits(), *all_rows(rehearses)]


# ---------------------------------------------------------------- table


def table(lines: Sequence[dict[str, Any]]) -> str:
    """What a report's lines say of times; medians of the samples."""
    limits = next((line["limits"] for line in lines if "limits" in line), None)
    rows = [(line["case"].removeprefix("time of "), line["row"]) for line in lines if "row" in line]
    if not rows:
        return ""
    peers = sorted({key[:-3] for _, row in rows for key in row if key.endswith("_us")} - {"ours"})
    text = [f"{'':52}{'ours us':>9}" + "".join(f"{p + ' us':>18}" for p in peers)
            + f"{'% of limit':>12}"]
    for name, row in rows:
        medians = {key: statistics.median(row[f"{key}_us"]) for key in ("ours", *peers)
                   if f"{key}_us" in row}
        cells = "".join(f"{medians[p]:18.1f}" if p in medians else f"{'-':>18}" for p in peers)
        share = "-" if limits is None else f"{100 * bound(row, limits) / medians['ours']:.1f}"
        text.append(f"{name:52}{medians['ours']:9.1f}{cells}{share:>12}")
    return "\n".join(text)


def bound(row: Mapping[str, float], limits: Mapping[str, float]) -> float:
    """Microseconds that bytes and operations take at the measured rates."""
    return 1e6 * max(row["bytes"] / limits["bytes_per_second"],
                     row["operations"] / limits["operations_per_second"])
