"""The peer of topk_renorm: softmax, k best and renormalisation as one Triton kernel.

Written as the routers of serving engines are: a block of rows a program, the
maximum found k times, ties to the lower index.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _kernel(scores, gates, indices, tokens, E: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
            WIDTH: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < tokens)[:, None] & (column < E)[None, :]
    z = tl.load(scores + row[:, None] * E + column[None, :], mask=inside,
                other=-float("inf")).to(tl.float32)
    highest = tl.max(z, 1)
    total = tl.zeros((ROWS,), tl.float32)
    for i in tl.static_range(K):
        best = tl.max(z, 1)
        at = tl.argmax(z, 1)
        weight = tl.exp(best - highest)
        total += weight
        tl.store(gates + row * K + i, weight, mask=row < tokens)
        tl.store(indices + row * K + i, at.to(tl.int64), mask=row < tokens)
        z = tl.where(column[None, :] == at[:, None], -float("inf"), z)
    for i in tl.static_range(K):
        weight = tl.load(gates + row * K + i, mask=row < tokens)
        tl.store(gates + row * K + i, weight / total, mask=row < tokens)


def topk_renorm(scores, k):
    tokens, experts = scores.shape
    gates = torch.empty(tokens, k, device=scores.device)
    indices = torch.empty(tokens, k, dtype=torch.int64, device=scores.device)
    width = triton.next_power_of_2(experts)
    rows = max(1, 1024 // width)
    _kernel[(triton.cdiv(tokens, rows),)](scores, gates, indices, tokens, E=experts, K=k,
                                          ROWS=rows, WIDTH=width, num_warps=4)
    return gates, indices
