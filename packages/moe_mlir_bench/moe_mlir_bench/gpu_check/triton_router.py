"""The peer of topk_renorm: softmax, k best and renormalisation as one Triton kernel, in one pass.

As in the routers of serving engines, a score and its expert are one integer whose order is
that of the scores, ties to the lower expert: one maximum a place finds both. What is chosen
stays in registers until it is written once.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _kernel(scores, gates, indices, tokens, E: tl.constexpr, K: tl.constexpr, PLACES: tl.constexpr,
            ROWS: tl.constexpr, WIDTH: tl.constexpr, NARROW: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < tokens)[:, None] & (column < E)[None, :]
    z = tl.load(scores + row[:, None] * E + column[None, :], mask=inside,
                other=-float("inf")).to(tl.float32)
    bits = z.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    # The low half of a bf16 is free for the expert.
    if NARROW:
        packed = (key & -65536) | (WIDTH - 1 - column)[None, :]
        least = -2147483648
    else:
        packed = (key.to(tl.int64) << 32) | (WIDTH - 1 - column)[None, :].to(tl.int64)
        least = -9223372036854775808
    place = tl.arange(0, PLACES)
    chosen = tl.full((ROWS, PLACES), least, packed.dtype)
    for i in tl.static_range(K):
        best = tl.max(packed, 1)
        chosen = tl.where(place[None, :] == i, best[:, None], chosen)
        packed = tl.where(packed == best[:, None], least, packed)
    if NARROW:
        at = WIDTH - 1 - (chosen & 0xFFFF)
        key = chosen & -65536
        bits = tl.where(key < 0, key ^ 0x7FFF0000, key)
    else:
        at = WIDTH - 1 - (chosen & 0xFFFFFFFF).to(tl.int32)
        key = (chosen >> 32).to(tl.int32)
        bits = tl.where(key < 0, key ^ 0x7FFFFFFF, key)
    value = tl.where((place < K)[None, :], bits.to(tl.float32, bitcast=True), -float("inf"))
    weight = tl.exp(value - tl.max(value, 1)[:, None])
    weight = weight / tl.sum(weight, 1)[:, None]
    kept = (row < tokens)[:, None] & (place < K)[None, :]
    to = row[:, None] * K + place[None, :]
    tl.store(gates + to, weight, mask=kept)
    tl.store(indices + to, at.to(tl.int64), mask=kept)


def constants(experts: int, k: int, dtype: torch.dtype) -> dict:
    width = triton.next_power_of_2(experts)
    # Of f16 all bits count once it is f32, as of f32.
    return {"E": experts, "K": k, "PLACES": triton.next_power_of_2(k), "WIDTH": width,
            "ROWS": max(1, 1024 // width), "NARROW": dtype == torch.bfloat16}


def topk_renorm(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, experts = scores.shape
    gates = torch.empty(tokens, k, device=scores.device)
    indices = torch.empty(tokens, k, dtype=torch.int64, device=scores.device)
    chosen = constants(experts, k, scores.dtype)
    _kernel[(triton.cdiv(tokens, chosen["ROWS"]),)](scores, gates, indices, tokens, num_warps=4,
                                                    **chosen)
    return gates, indices
