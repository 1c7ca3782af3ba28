"""Gradients of the ops: a call of each form, and the values of its leaves."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

B, N, E, D, K, HEADS, WIDTH = 2, 21, 8, 12, 3, 2, 4


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


MASK = torch.rand(B, N, generator=torch.Generator().manual_seed(9)) > 0.3

# {name: (a call of the package or of `reference` on leaves, their values)}; a call's first result is differentiated.
CASES = {
    "softmax_of_topk": (lambda m, z: m.topk_renorm(z, K), [normal(N, E)]),
    "topk_of_softmax": (lambda m, z: m.topk_renorm(z, K, renorm=False), [normal(N, E)]),
    "topk_of_probs_renorm": (
        lambda m, z: m.topk_renorm(z, K, kind="probs"), [normal(N, E).softmax(-1)]),
    "topk_of_probs": (
        lambda m, z: m.topk_renorm(z, K, kind="probs", renorm=False, route_scale=2.5),
        [normal(N, E).softmax(-1)]),
    "topk_with_a_mask": (lambda m, z: m.topk_renorm(z, K, mask=MASK.to(z.device)), [normal(B, N, E)]),
    "grouped_sigmoid": (
        lambda m, z: m.grouped_topk(z, K, n_group=4, topk_group=2, bias=normal(E, seed=1).to(z.device)),
        [normal(N, E)]),
    "grouped_sqrtsoftplus": (
        lambda m, z: m.grouped_topk(z, K, score="sqrtsoftplus", eps=1e-3), [normal(N, E)]),
    "similarity": (
        lambda m, u, e: m.similarity_inform(u, e, causal=True),
        [normal(B, N, D, scale=0.5), normal(B, N, E, seed=1).softmax(-1)]),
    "similarity_full_form": (
        lambda m, u, e, ws, tau: m.similarity_inform(
            u, e, causal=False, weight=ws, tau=tau, mask=MASK.to(u.device), window=7),
        [normal(B, N, D, scale=0.5), normal(B, N, E, seed=1).softmax(-1),
         normal(D, D, seed=2, scale=0.4), torch.tensor(1.3)]),
    "attention": (
        lambda m, q, k, v: m.attention(q, k, v, causal=True),
        [normal(B, HEADS, N, WIDTH), normal(B, HEADS, N, WIDTH, seed=1),
         normal(B, HEADS, N, 2 * WIDTH, seed=2)]),
    "attention_full_form": (
        lambda m, q, k, v, bias: m.attention(
            q, k, v, causal=False, bias=bias, mask=MASK.to(q.device), window=7, scale=0.3),
        [normal(B, HEADS, N, WIDTH), normal(B, HEADS, N, WIDTH, seed=1),
         normal(B, HEADS, N, WIDTH, seed=2), normal(HEADS, N, N, seed=3)]),
    "posterior": (
        lambda m, q, k, u, e, v, wo: m.attention_posterior(q, k, u, e, v=v, wo=wo, causal=True),
        [normal(B, HEADS, N, WIDTH), normal(B, HEADS, N, WIDTH, seed=1),
         normal(B, N, D, seed=2, scale=0.3), normal(B, N, E, seed=3).softmax(-1),
         normal(B, HEADS, N, WIDTH, seed=4), normal(HEADS, D, WIDTH, seed=5, scale=0.4)]),
    "posterior_of_all_heads": (
        lambda m, q, k, u, e, vp, s: m.attention_posterior(
            q, k, u, e, projected_v=vp, sigma=s, causal=True, head_mode="all"),
        [normal(B, HEADS, N, WIDTH), normal(B, HEADS, N, WIDTH, seed=1),
         normal(B, N, D, seed=2, scale=0.3), normal(B, N, E, seed=3).softmax(-1),
         normal(B, HEADS, N, D, seed=4, scale=0.3), torch.tensor(1.2)]),
}  # fmt: skip


def gradients(library: Any, call: Callable[..., Any],
              values: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    leaves = [value.clone().requires_grad_() for value in values]
    result = call(library, *leaves)
    result = result if isinstance(result, torch.Tensor) else result[0]
    seed = normal(*result.shape, seed=7).to(result.device, result.dtype)
    return torch.autograd.grad(result, leaves, seed)
