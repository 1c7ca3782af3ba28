"""Attention in plain torch: which forms become moe.attention in an imported model."""

import math

import pytest
import torch

import moe_mlir

B, H, N, W = 2, 3, 7, 8


def every_token(q, k, v):
    return (q @ k.transpose(-2, -1)).softmax(-1) @ v


def compared_positions(q, k, v):
    scores = q @ k.transpose(-2, -1) * W**-0.5
    position = torch.arange(q.shape[2])
    hidden = position[None, :] > position[:, None]
    return scores.masked_fill(hidden, -math.inf).softmax(-1) @ v


def triangle_of_ones(q, k, v):
    scores = torch.matmul(q, k.permute(0, 1, 3, 2)) / math.sqrt(W)
    seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    scores = torch.where(seen, scores, torch.finfo(torch.float32).min)
    return torch.nn.functional.dropout(scores.softmax(-1), 0.1, training=False) @ v


def keys_that_come_transposed(q, k, v):
    return (2 * (q @ k.permute(0, 3, 1, 2).permute(0, 2, 1, 3))).softmax(-1) @ v


def fewer_queries(q, k, v):
    return every_token(q[:, :, :3], k, v)


RAISED = [every_token, compared_positions, triangle_of_ones, keys_that_come_transposed,
          fewer_queries]


def fewer_queries_under_a_triangle(q, k, v):
    # Causal from the first of the keys, where moe.attention's last query stands at the last key.
    position = torch.arange(N)
    hidden = position[None, :] > position[:3, None]
    scores = q[:, :, :3] @ k.transpose(-2, -1)
    return scores.masked_fill(hidden, -math.inf).softmax(-1) @ v


def another_mask(q, k, v):
    position = torch.arange(N)
    hidden = position[None, :] > position[:, None] + 1
    return (q @ k.transpose(-2, -1)).masked_fill(hidden, -math.inf).softmax(-1) @ v


def shared_keys(q, k, v):
    return (q @ k[:, :1].transpose(-2, -1)).softmax(-1) @ v


def one_head(q, k, v):
    return every_token(q[:, 0], k[:, 0], v[:, 0])


def rounded(q, k, v):
    return every_token(q.bfloat16(), k.bfloat16(), v.bfloat16()).float()


def softmax_over_queries(q, k, v):
    return (q @ k.transpose(-2, -1)).softmax(-2) @ v


KEPT = [fewer_queries_under_a_triangle, another_mask, shared_keys, one_head, rounded,
        softmax_over_queries]


class Model(torch.nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend = attend

    def forward(self, q, k, v):
        return self.attend(q, k, v)


def heads():
    torch.manual_seed(0)
    return tuple(torch.randn(B, H, N, W) for _ in range(3))


@pytest.mark.parametrize("attend", RAISED, ids=lambda f: f.__name__)
def test_attention_is_raised(attend):
    model, inputs = Model(attend), heads()
    module = moe_mlir.export(model, inputs)
    assert module.text.count("moe.softmax_mix") == 1
    # No matrix of tokens by tokens is left.
    assert "linalg.generic" not in module.text.split("moe.softmax_mix")[1]
    torch.testing.assert_close(moe_mlir.compile(module)(*inputs), model(*inputs))


@pytest.mark.parametrize("attend", KEPT, ids=lambda f: f.__name__)
def test_what_is_no_attention_of_the_op_stays(attend):
    model, inputs = Model(attend), heads()
    module = moe_mlir.export(model, inputs, dynamic_tokens=False)
    assert "moe.softmax_mix" not in module.text
    # Of 16 bits a product is rounded once more in eager torch.
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if attend is rounded else {}
    torch.testing.assert_close(moe_mlir.compile(module)(*inputs), model(*inputs), **tolerance)
