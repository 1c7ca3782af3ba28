"""The calls that are timed, each with torch's own and the best peers.

Names of rows are those of `utils/gpu_model/calls.py` where both have one: the model's time and
the measured one are of the same call.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import moe_mlir as m
from moe_mlir._torch.core import grouped_mm
from moe_mlir.experts.run import run_experts
from moe_mlir.ops._expert_activation import ExpertActivation
from moe_mlir.ops._kernel import ELEMENT_TYPES
from moe_mlir.ops.grouped_linear import kernel as grouped_linear_kernel
from moe_mlir.ops.run_experts import apply_gates, places
from moe_mlir.ops.run_experts import kernel as layer_kernel
from moe_mlir.ops.token_rows import kernel as token_rows_kernel

from . import timing
from .benchmark import Row
from .modules import DEEPSEEK, experts_text, multiply_experts, route, router_text
from .target import Module

BF16, F32 = torch.bfloat16, torch.float32
SWIGLU = ExpertActivation("silu", gate="concatenated")


def _randn(*shape, device, dtype=F32, scale=1.0):
    return torch.randn(*shape, device=device, dtype=dtype).mul_(scale)


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


    for tokens in (1, 32, 16384):
        module = Module(router_text(256, 7168, 8, dtype=BF16, choice=DEEPSEEK, is_biased=True), "route")
        yield Row(f"router {tokens}x7168 -> 256 sigmoid, bias, 4 of 8 groups, bf16", tokens,
                  lambda device, n: [_randn(n, 7168, dtype=BF16, device=device),
                                     _randn(256, 7168, dtype=BF16, device=device, scale=7168**-0.5),
                                     _randn(256, device=device, scale=0.1)],
                  functools.partial(route, module, 8), _deepseek_router,
                  2 * 7168 * (tokens + 256) + 64 * tokens, operations=2 * tokens * 7168 * 256,
                  # Of tokens that eager's rounding routes elsewhere: cases judge the choice.
                  tolerance=0.2)
    yield Row("grouped_topk 8192x256 sigmoid, bias, 4 of 8 groups, f32", 8192,
              lambda device, n: [_randn(n, 256, device=device), _randn(256, device=device)],
              lambda z, b: m.grouped_topk(z, 8, n_group=8, topk_group=4, score="sigmoid", bias=b),
              lambda z, b: m.reference.grouped_topk(z, 8, n_group=8, topk_group=4, score="sigmoid", bias=b),
              8192 * (256 * 4 + 12 * 8))


def _deepseek_router(h, w, bias):
    """As the model's own code."""
    scores = F.linear(h, w).float().sigmoid()
    choice = (scores + bias).view(len(h), 8, 32)
    groups = choice.topk(2).values.sum(-1).topk(4).indices
    kept = torch.zeros(len(h), 8, device=h.device).scatter_(1, groups, 1.0).bool()
    places = choice.masked_fill(~kept[..., None], -float("inf")).flatten(1).topk(8).indices
    gates = scores.gather(1, places)
    return gates / (gates.sum(-1, keepdim=True) + 1e-20) * 2.5, places


def router_module(width: int, experts: int, k: int) -> Module:
    return Module(router_text(experts, width, k, dtype=BF16), "route")


# ---------------------------------------------------------------- mixing and attention


def _sdpa(backend, q, k, v, causal, scale=None):
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)


def _similarity_rows():
    for batch, tokens, width, experts, dtype in (
            (48, 512, 352, 16, BF16), (8, 4096, 512, 32, BF16), (4, 4096, 128, 64, BF16),
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
    yield _similarity_gradient_row(8, 4096, 512, 32)


def _similarity_gradient_row(batch, tokens, width, experts):
    def make(device, n):
        rows = batch if n == tokens else 1
        return [_randn(rows, n, width, dtype=BF16, device=device, scale=(8 / width) ** 0.5),
                _randn(rows, n, experts, device=device).softmax(-1).bfloat16()]

    return Row(f"gradient of similarity_inform {batch}x{tokens}x{width} E{experts} bf16", tokens, make,
               _with_gradients(lambda u, p: m.similarity_inform(u, p, causal=False)[0]),
               _with_gradients(lambda u, p: (u @ u.mT).float().softmax(-1).to(u.dtype) @ p),
               4 * batch * tokens * (width + experts) * 2,
               operations=2 * batch * tokens**2 * (4 * width + 3 * experts), tolerance=0.05)


def _attention_rows():
    for batch, width, causal in ((1, 64, True), (1, 128, True), (4, 64, False), (4, 128, False)):
        pairs = batch * 16 * 4096 * 4096 / (2 if causal else 1)
        row: dict[str, Any] = {
            "tokens": 4096, "bytes": 4 * batch * 16 * 4096 * width * 2, "tolerance": 0.03,
            "make": lambda device, n, b=batch, w=width: [
                _randn(b if n == 4096 else 1, 16, n, w, dtype=BF16, device=device)
                for _ in range(3)],
        }
        name = f"attention {batch}x16x4096x{width} bf16{' causal' if causal else ''}"
        calls = _attention_calls(causal)
        yield Row(name, operations=int(4 * pairs * width), ours=calls.pop("ours"),
                  eager=calls.pop("eager"), peers=calls, **row)
        if width == 128 and batch == 1:
            calls = {key: _with_gradients(call) for key, call in _attention_calls(causal).items()}
            yield Row("gradient of " + name, operations=int(14 * pairs * width),
                      ours=calls.pop("ours"), eager=calls.pop("eager"), peers=calls, **row)


def _attention_calls(causal):
    return {
        "ours": lambda q, k, v: m.attention(q, k, v, causal=causal)[0],
        "eager": lambda q, k, v: _sdpa(SDPBackend.MATH, q, k, v, causal),
        "flash": lambda q, k, v: _sdpa(SDPBackend.FLASH_ATTENTION, q, k, v, causal),
        "cudnn": lambda q, k, v: _sdpa(SDPBackend.CUDNN_ATTENTION, q, k, v, causal),
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
    sizes = ((8, 256, 64, 1024, BF16),) if rehearses else (
        (64, 2048, 1024, 16384, BF16), (128, 2048, 768, 1024, BF16), (8, 2048, 1024, 8192, BF16),
        (64, 2048, 2048, 8, BF16), (64, 2048, 2048, 512, BF16))
    for experts, width, hidden, tokens, dtype in sizes:
        def make(device, n, e=experts, w=width, h=hidden, dtype=dtype):
            return [_randn(n, w, dtype=dtype, device=device),
                    _randn(e, h, w, dtype=dtype, device=device, scale=w**-0.5),
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

        module = Module(experts_text(experts, width, hidden, dtype), "layer")
        yield Row(f"experts {tokens}x{width} to {hidden} E{experts} {ELEMENT_TYPES[dtype]}", tokens,
                  make, functools.partial(multiply_experts, module), eager,
                  dtype.itemsize * (tokens * width + min(tokens, experts) * width * hidden)
                  + 8 * tokens * hidden,
                  operations=2 * tokens * width * hidden, peers={"grouped_mm": grouped},
                  tolerance=0.03, module=module)


def _grouped_linear_rows(rehearses):
    """The layers of experts of an artifact: sorted rows, the weights of their experts, an activation."""
    sizes = ((8, 256, 64, 1024, None),) if rehearses else (
        (64, 2048, 1024, 16384, None), (8, 2048, 1024, 8192, None), (128, 2048, 1536, 65536, SWIGLU),
        (128, 2048, 1536, 262144, SWIGLU), (256, 7168, 4096, 65536, SWIGLU))
    for experts, width, features, tokens, activation in sizes:
        act = activation or ExpertActivation()
        run = grouped_linear_kernel(BF16, width, features, torch.int64, None, None, False, act)

        def make(device, n, e=experts, w=width, f=features):
            return [_randn(n, w, dtype=BF16, device=device),
                    _randn(e, f, w, dtype=BF16, device=device, scale=w**-0.5),
                    torch.arange(e + 1, device=device) * n // e]

        def grouped(x, w, offsets, activation=activation):
            z = grouped_mm(x, w.mT, offs=offsets[1:].int())
            if activation is None:
                return z
            a, u = z.chunk(2, -1)
            return F.silu(a) * u

        yield Row(f"grouped_linear {tokens}x{width} to {features} E{experts}"
                  f"{' swiglu' if activation else ''} bf16", tokens, make, run, grouped,
                  2 * (tokens * width + experts * width * features + tokens * act.width(features)),
                  operations=2 * tokens * width * features, peers={"grouped_mm": grouped},
                  tolerance=0.03, module=run)


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
    for tokens, experts in ((64, 256), (8192, 128), (16384, 256)):
        yield Row(f"dispatch {tokens} k8 E{experts}", tokens,
                  lambda device, n, e=experts: [torch.rand(n, e, device=device).topk(8).indices],
                  lambda i, e=experts: m.dispatch(i, e), lambda i, e=experts: m.reference.dispatch(i, e),
                  2 * 8 * tokens * 8, tolerance=0)
    yield Row("topk_renorm, dispatch 8192x128 k8 bf16", 8192,
              lambda device, n: [_randn(n, 128, dtype=BF16, device=device)],
              lambda z: m.dispatch(m.topk_renorm(z, 8)[1], 128),
              lambda z: m.reference.dispatch(z.float().topk(8).indices, 128), 8192 * (256 + 3 * 64),
              tolerance=None)
    yield Row("token_rows 16384 k8", 16384,
              lambda device, n: [torch.randperm(8 * n, device=device).view(n, 8)],
              token_rows_kernel(8, torch.int64), _tokens_of, 2 * 8 * 8 * 16384, tolerance=0,
              module=token_rows_kernel(8, torch.int64))
    for tokens in (64, 2048):
        yield Row(f"combine {tokens}x2048 k8 bf16", tokens,
                  lambda device, n: [_randn(8 * n, 2048, dtype=BF16, device=device),
                                     torch.rand(n, 8, device=device),
                                     torch.randperm(8 * n, device=device).view(n, 8)],
                  m.combine, lambda y, g, s: (y[s].float() * g[..., None]).sum(1),
                  tokens * (9 * 2048 * 2 + 8 * 12), tolerance=0.01)


def _tokens_of(slots):
    rows = torch.empty(slots.numel(), dtype=torch.int64, device=slots.device)
    tokens = torch.arange(len(slots), device=slots.device)[:, None].expand(slots.shape)
    return rows.scatter_(0, slots.flatten(), tokens.flatten())


# ---------------------------------------------------------------- whole layers


def _layer_rows(rehearses):
    """From routed tokens to the layer's output, SwiGLU in between."""
    sizes = ((40, 256, 64, 8, 2),) if rehearses else (
        *((tokens, 2048, 1024, 64, 8) for tokens in (1, 8, 64, 256, 4096)),
        *((tokens, 2048, 768, 128, 8) for tokens in (1, 8, 64, 4096)), (1, 7168, 2048, 256, 8))
    for tokens, width, hidden, experts, k in sizes:
        def make(device, n, e=experts, w=width, h=hidden, k=k):
            return [_randn(n, w, dtype=BF16, device=device), torch.rand(n, k, device=device),
                    torch.rand(n, e, device=device).topk(k).indices,
                    _randn(e, 2 * h, w, dtype=BF16, device=device, scale=w**-0.5),
                    _randn(e, w, h, dtype=BF16, device=device, scale=h**-0.5)]

        # Of random choices so many experts have one.
        used = round(experts * (1 - (1 - k / experts) ** tokens))
        yield Row(f"layer {tokens}x{width} {experts} experts of {hidden} k{k} bf16",
                  tokens, make, _layer, _grouped_layer,
                  2 * (2 * tokens * width + used * 3 * width * hidden),
                  operations=6 * tokens * k * width * hidden, tolerance=0.05,
                  module=layer_kernel(BF16, width, 2 * hidden, width, experts, k, torch.int64,
                                      (None, None), (False, False), 0, SWIGLU),
                  also=functools.partial(_place_and_sum, width, experts, k))


def _layer(x, gates, indices, w_in, w_out):
    return run_experts(x, gates, indices, w_in, w_out, activation=SWIGLU)


def _place_and_sum(width, experts, k):
    """What of a layer is ours where the products are torch's."""
    slots, _, tokens = places(torch.zeros(2, k, dtype=torch.int64), experts)
    apply_gates(torch.zeros(len(tokens), width, dtype=BF16), torch.zeros(2, k), slots)


def _grouped_layer(x, gates, indices, w_in, w_out):
    """torch's grouped products between a sort and an addition to the tokens."""
    k, experts = indices.shape[1], len(w_in)
    chosen, order = indices.flatten().sort(stable=True)
    rows = order // k
    ends = torch.searchsorted(chosen, torch.arange(experts, device=x.device), right=True).int()
    a, u = grouped_mm(x[rows], w_in.mT, offs=ends).chunk(2, -1)
    y = grouped_mm(F.silu(a) * u, w_out.mT, offs=ends)
    out = torch.zeros(x.shape, device=x.device)
    return out.index_add_(0, rows, y.float() * gates.flatten()[order, None]).to(x.dtype)


def all_rows(rehearses: bool = False) -> list[Row]:
    return [*_selection_rows(), *_router_rows(), *_similarity_rows(), *_attention_rows(),
            *_experts_rows(rehearses), *_grouped_linear_rows(rehearses), *_layer_rows(rehearses), *_statistics_rows()]


def all_units(rehearses: bool) -> list:
    return [timing.Limits(), *all_rows(rehearses)]
