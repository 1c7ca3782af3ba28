"""Models that call the logits ops and their statistics: import, compile, run, other sizes."""

import re

import pytest
import torch
from support import Gates
from test_operators import Function, check, tokens

import moe_mlir
from moe_mlir import nn
from moe_mlir._native import native
from moe_mlir.importer import ImportFailed


def test_cosine_logits():
    def function(h, omega, emb, tau):
        return (
            moe_mlir.cosine_logits(h, omega, emb, tau=tau.exp()),
            moe_mlir.cosine_logits(h, None, emb @ omega, tau=0.3, norm_token=False),
        )

    weights = torch.randn(5, 8), torch.randn(6, 5), torch.tensor(-1.0)
    check(function, (tokens(),), *weights, later=(tokens(count=70),), atol=1e-5)


def test_hyper_router():
    def function(h, *weights):
        weight, bias = moe_mlir.hyper_router(*weights, 6)
        return moe_mlir.router_logits(h, weight, bias)

    shapes = (3,), (4, 3), (4,), (54, 4), (54,)
    check(function, (tokens(),), *map(torch.randn, shapes), later=(tokens(count=9),), atol=1e-5)


def test_the_chain_of_a_clustered_router():
    def function(h, emb):
        z = moe_mlir.router_logits(h, emb)
        gates, before = moe_mlir.topk_renorm(z, 2)
        s, _, count = moe_mlir.mad_dispersion(h, before[..., 0], 6)
        m = moe_mlir.dispersion_weights(s, count, clamp=10.0, scale="feature")
        mixed = moe_mlir.ac_logits(h, m, before, emb, prev_gates=gates, bias=emb[:, 0])
        one = moe_mlir.ac_logits(h, m, before[..., :1], emb)
        return (*moe_mlir.topk_renorm(mixed, 2), one)

    check(function, (tokens(),), torch.randn(6, 8), later=(tokens(count=70),), atol=1e-5)


def test_attention_entropy():
    def function(x, bias):
        heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
        return moe_mlir.attention_entropy(heads, heads, causal=True, window=5, bias=bias)

    check(function, (tokens(count=7),), torch.randn(7, 7), atol=1e-5)


def heads_of(x, width=4):
    return x.unflatten(-1, (x.shape[-1] // width, width)).transpose(1, 2)


def test_attention():
    def function(x, bias):
        q = heads_of(x)
        every = moe_mlir.attention(q, q, 2 * q, causal=True, window=5, bias=bias)
        wide = moe_mlir.attention(q, q[:, :, :4], heads_of(x[:, :4], 4), causal=False, scale=0.3)
        return *every, *wide

    check(function, (tokens(count=7),), torch.randn(7, 7), atol=1e-5)


def test_attention_of_other_sizes_with_a_mask():
    """The mask of the tokens covers the queries too; one of the keys alone does not."""
    def function(x, mask):
        q = heads_of(x)
        return (*moe_mlir.attention(q, q, q, causal=True, mask=mask),
                *moe_mlir.attention(q[:, :, 1:], q, q, causal=True, mask=mask))

    mask = torch.rand(2, 7) > 0.4
    later = torch.rand(3, 40) > 0.4
    check(function, (tokens(count=7), mask), later=(tokens(3, 40), later), atol=1e-5)


def test_attention_with_a_mask_of_as_many_keys_as_queries_or_not_is_refused():
    class Cross(torch.nn.Module):
        def forward(self, x, y, mask):
            q, k = heads_of(x), heads_of(y)
            return moe_mlir.attention(q, k, k, causal=False, mask=mask)

    with pytest.raises(ImportFailed, match="may or may not be that of keys"):
        moe_mlir.export(Cross(), (tokens(count=3), tokens(count=5), torch.ones(2, 5).bool()))


def posterior_of(x, y, mask, query_mask=None):
    q, k = heads_of(x), heads_of(y)
    return moe_mlir.attention_posterior(q, k, x, y.softmax(-1), causal=False, v=k,
                                        wo=torch.ones(2, 8, 4), mask=mask, query_mask=query_mask)


def test_a_posterior_takes_masks_of_its_queries_and_keys():
    masks = torch.rand(2, 3) > 0.4, torch.rand(2, 5) > 0.4
    later = torch.rand(3, 40) > 0.4, torch.rand(3, 9) > 0.4
    check(lambda x, y, of_queries, of_keys: posterior_of(x, y, of_keys, of_queries),
          (tokens(count=3), tokens(count=5), *masks),
          later=(tokens(3, 40), tokens(3, 9), *later), atol=1e-5)


def test_a_posterior_whose_mask_may_cover_its_queries_or_not_is_refused():
    class Cross(torch.nn.Module):
        def forward(self, x, y, mask):
            return posterior_of(x, y, mask)

    with pytest.raises(ImportFailed, match="give .* a 'query_mask'"):
        moe_mlir.export(Cross(), (tokens(count=3), tokens(count=5), torch.ones(2, 5).bool()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_in_16_bit_has_its_dtype(dtype):
    def function(x):
        out, row_lse, _ = moe_mlir.attention(heads_of(x), heads_of(x), heads_of(x), causal=True)
        return out, row_lse

    inputs, later = ((tokens(count=n).to(dtype),) for n in (9, 70))
    check(function, inputs, later=later, rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["min_entropy", "all", 1])
def test_the_posterior_takes_the_rows_of_the_attention(mode):
    def function(x, wo, sigma):
        q, e = heads_of(x), x.softmax(-1)
        out, row_lse, row_entropy = moe_mlir.attention(q, q, q, causal=True)
        u = torch.einsum("bhnw,hdw->bnd", out, wo)
        return moe_mlir.attention_posterior(
            q, q, u, e, causal=True, v=q, wo=wo, sigma=sigma, head_mode=mode,
            row_lse=row_lse, row_entropy=row_entropy)

    weights = torch.randn(2, 8, 4), torch.tensor(1.3)
    check(function, (tokens(count=7),), *weights, later=(tokens(3, 40),), atol=1e-5)
    text = moe_mlir.export(Function(function, *weights), (tokens(count=7),)).text
    assert "rows(" in text and text.count("moe.softmax_mix") == 1


def test_the_mean_entropy_alone():
    def function(x):
        heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
        return moe_mlir.attention_entropy(heads, heads, causal=False)[0].argmin(-1)

    check(function, (tokens(),), later=(tokens(count=70),))


def canonical(model, inputs):
    """The canonical IR of an exported model."""
    form = native().Module.parse(moe_mlir.export(model, inputs).text)
    form.run("canonicalize")
    return form.text()


def test_a_softmax_in_front_of_the_selection_is_left_out():
    class Router(torch.nn.Module):
        def forward(self, h):
            return moe_mlir.topk_renorm(h.softmax(-1), 2, kind="probs", route_scale=2.0)

    check(lambda h: Router()(h), (tokens(),), later=(tokens(count=70),))
    assert "math.exp" in moe_mlir.export(Router(), (tokens(),)).text
    assert "math.exp" not in canonical(Router(), (tokens(),))


def test_a_hyper_router_at_inference_is_a_plain_router_op_for_op():
    """HyperRouter C.4: nothing of the network is left."""

    def operations(router):
        text = canonical(Gates(router).eval(), (tokens(),))
        return re.findall(r" = ([\w.]+)", text)

    ours = operations(nn.HyperRouter(8, 6, 2))
    assert "moe.router_logits" in ours and ours == operations(nn.SMoE(8, 6, 2))
