"""Attention with a sink in plain torch: which forms become moe.attention in an imported model."""

import math

import pytest
import torch

import moe_mlir

B, H, N, M, W, E = 2, 4, 9, 150, 8, 6
F = torch.nn.functional


def gpt_oss(q, k, v, mask, sink):
    """As transformers writes it for gpt-oss and DeepSeek-V4."""
    weights = torch.matmul(q, k.transpose(2, 3)) * W**-0.5
    sinks = sink.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
    joined = torch.cat([weights + mask, sinks], dim=-1)
    joined = joined - joined.max(dim=-1, keepdim=True).values
    scores = F.softmax(joined, dim=-1, dtype=joined.dtype)[..., :-1]
    return F.dropout(scores, p=0.1, training=False).to(v.dtype) @ v


def in_float32(q, k, v, mask, sink):
    weights = q.float() @ k.float().mT / math.sqrt(W)
    sinks = sink.float().view(1, H, 1, 1).expand(q.shape[0], H, q.shape[2], 1)
    scores = torch.cat([weights + mask.float(), sinks], -1).softmax(-1)[..., :-1]
    return (scores.to(v.dtype) @ v).to(q.dtype)


def softmax_in_float32(q, k, v, mask, sink):
    sinks = sink.view(1, H, 1, 1).expand(q.shape[0], H, q.shape[2], 1)
    joined = torch.cat([q @ k.transpose(-1, -2) + mask, sinks], -1)
    joined = joined - joined.amax(-1, keepdim=True)
    scores = joined.softmax(-1, dtype=torch.float32)
    return scores[..., :-1].to(v.dtype) @ v


def joined_by(scores, sink):
    return torch.cat([scores, sink.view(1, H, 1, 1).expand(*scores.shape[:3], 1)], -1)


def two_masks(q, k, v, mask, sink):
    near = (torch.arange(M) * 0.01).to(q.dtype).view(1, 1, 1, M)
    return joined_by(0.3 * (q @ k.mT) + near + mask, sink).softmax(-1)[..., :-1] @ v


def no_mask(q, k, v, mask, sink):
    return joined_by(q @ k.mT, sink).softmax(-1)[..., :-1] @ v


def sinks_of_queries(q, k, v, mask, sink):
    sinks = q[..., :1] * sink.view(1, H, 1, 1)
    return torch.cat([q @ k.mT + mask, sinks], -1).softmax(-1)[..., :-1] @ v


RAISED = [gpt_oss, in_float32, softmax_in_float32, two_masks, no_mask, sinks_of_queries]


def two_sinks(q, k, v, mask, sink):
    return joined_by(joined_by(q @ k.mT + mask, sink), sink).softmax(-1)[..., :-2] @ v


def sink_in_front(q, k, v, mask, sink):
    sinks = sink.view(1, H, 1, 1).expand(*q.shape[:3], 1)
    return torch.cat([sinks, q @ k.mT + mask], -1).softmax(-1)[..., 1:] @ v


def shifted_along_queries(q, k, v, mask, sink):
    joined = joined_by(q @ k.mT + mask, sink)
    return (joined - joined.amax(-2, keepdim=True)).softmax(-1)[..., :-1] @ v


def softmax_over_queries(q, k, v, mask, sink):
    return joined_by(q @ k.mT, sink).softmax(-2)[..., :-1] @ v


def weights_that_are_read(q, k, v, mask, sink):
    weights = joined_by(q @ k.mT + mask, sink).softmax(-1)
    return weights[..., :-1] @ v + weights[..., -1:]


def scaled_masks(q, k, v, mask, sink):
    return joined_by(2 * (q @ k.mT + 0.1), sink).softmax(-1)[..., :-1] @ v


def shared_keys(q, k, v, mask, sink):
    return joined_by(q @ k[:, :1].mT + mask, sink).softmax(-1)[..., :-1] @ v


def weights_as_integers(q, k, v, mask, sink):
    weights = joined_by(q @ k.mT + mask, sink).softmax(-1)[..., :-1]
    return weights.to(torch.int64).to(v.dtype) @ v


def masks_of_64_bits(q, k, v, mask, sink):
    weights = joined_by(q @ k.mT + mask.double(), sink.double()).softmax(-1)[..., :-1]
    return weights.to(v.dtype) @ v


KEPT = [weights_as_integers, masks_of_64_bits, two_sinks, sink_in_front, shifted_along_queries, softmax_over_queries,
        weights_that_are_read, scaled_masks, shared_keys]


class Model(torch.nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend = attend

    def forward(self, q, k, v, mask, sink):
        return self.attend(q, k, v, mask, sink)


def operands(dtype=torch.float32, n=N, lowest=None):
    g = torch.Generator().manual_seed(n)
    q = torch.randn(B, H, n, W, generator=g).to(dtype)
    k = torch.randn(B, H, M, W, generator=g).to(dtype)
    v = torch.randn(B, H, M, E, generator=g).to(dtype)
    seen = torch.arange(M) <= 20 + 7 * torch.arange(n)[:, None]
    seen[n // 2] = False  # a query that sees nothing but the sink
    hides = torch.finfo(dtype).min if lowest is None else lowest
    mask = torch.zeros(1, 1, n, M, dtype=dtype).masked_fill(~seen, hides)
    return q, k, v, mask, torch.randn(H, generator=g).to(dtype)


def exact(attend, q, k, v, mask, sink):
    """What a model would give if it rounded nothing."""
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    mask = mask.double().masked_fill(hidden, -math.inf)
    return attend(q.double(), k.double(), v.double(), mask, sink.double()).double()


def assert_exact(found, attend, inputs):
    assert found.dtype == inputs[0].dtype
    # Two roundings of the result, and what float32 inside leaves.
    tolerance = 2 * torch.finfo(found.dtype).eps + 2e-5
    torch.testing.assert_close(found.double(), exact(attend, *inputs), rtol=tolerance,
                               atol=tolerance)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("attend", RAISED, ids=lambda f: f.__name__)
def test_attention_with_a_sink_is_raised(attend, dtype):
    inputs = operands(dtype)
    module = moe_mlir.export(Model(attend), inputs)
    assert module.text.count("moe.softmax_mix") == 1
    assert_exact(moe_mlir.compile(module)(*inputs), attend, inputs)


@pytest.mark.parametrize("lowest", (-math.inf, torch.finfo(torch.float32).min, -3.0), ids=str)
@pytest.mark.parametrize("n", (0, 1, 7))
def test_any_mask_and_number_of_queries(n, lowest):
    module = moe_mlir.export(Model(gpt_oss), operands())
    inputs = operands(n=n, lowest=lowest) if n else tuple(
        x[..., :0, :] if i in (0, 3) else x for i, x in enumerate(operands(n=1)))
    assert_exact(moe_mlir.compile(module)(*inputs), gpt_oss, inputs)


def test_a_query_that_sees_nothing_beside_no_sink_is_zero():
    """As of any attention of ours (E6), and not the NaN that would reach all tokens of a next layer."""
    q, k, v, mask, sink = operands()
    sink[1] = -math.inf
    found = moe_mlir.compile(moe_mlir.export(Model(gpt_oss), operands()))(q, k, v, mask, sink)
    wanted = exact(gpt_oss, q, k, v, mask, sink)
    wanted[:, 1, N // 2] = 0
    torch.testing.assert_close(found.double(), wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("attend", KEPT, ids=lambda f: f.__name__)
def test_what_has_no_sink_of_this_kind_stays(attend):
    model, inputs = Model(attend), operands(lowest=-3.0)
    module = moe_mlir.export(model, inputs)
    assert "moe.softmax_mix" not in module.text
    torch.testing.assert_close(moe_mlir.compile(module)(*inputs), model(*inputs))


class SharedKeys(torch.nn.Module):
    def forward(self, q, k, v, mask, sink):
        k, v = (x[:, :, None].expand(B, 2, 2, M, -1).reshape(B, H, M, -1) for x in (k, v))
        return gpt_oss(q, k, v, mask, sink)


def test_one_query_reads_shared_keys_where_they_lie():
    q, k, v, mask, sink = operands(n=1)
    mask = mask.masked_fill(torch.arange(M) < 30, 0.0)
    inputs = (q, k[:, :2].clone(), v[:, :2].clone(), mask, sink)
    module = moe_mlir.export(SharedKeys(), inputs, dynamic_tokens=False)
    assert f"tensor<{B}x2x2x{W}xf32>, tensor<{B}x2x{M}x{W}xf32>" in module.text
    torch.testing.assert_close(moe_mlir.compile(module)(*inputs), SharedKeys()(*inputs))


class SharedKeysOfAnyNumber(torch.nn.Module):
    """As transformers repeats them: of an open number of keys, slices of everything stay."""

    def forward(self, q, k, v, mask, sink):
        k, v = (x[:, :, None, :, :].expand(B, 2, 2, x.shape[2], x.shape[3])
                .reshape(B, H, x.shape[2], x.shape[3]) for x in (k, v))
        return gpt_oss(q, k, v, mask, sink)


def test_one_query_reads_any_number_of_shared_keys_where_they_lie():
    q, k, v, mask, sink = operands(n=1, lowest=-3.0)
    count = torch.export.Dim("count", min=2)
    program = torch.export.export(
        SharedKeysOfAnyNumber(), (q, k[:, :2].clone(), v[:, :2].clone(), mask, sink),
        dynamic_shapes=({}, {2: count}, {2: count}, {3: count}, {}))
    module = moe_mlir.export(program)
    assert f"tensor<{B}x2x2x{W}xf32>, tensor<{B}x2x?x{W}xf32>" in module.text
    compiled = moe_mlir.compile(module)
    for m in (M, 70):
        inputs = (q, k[:, :2, :m], v[:, :2, :m], mask[..., :m], sink)
        torch.testing.assert_close(compiled(*inputs), SharedKeysOfAnyNumber()(*inputs))
