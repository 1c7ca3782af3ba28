"""Attention beside ops on its rows: which attentions give them, which do not and why."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from seeds import some

import moe_mlir
from moe_mlir import nn
from moe_mlir.frontends import dynamo
from moe_mlir.frontends.inductor import RoutingPass
from moe_mlir.raising.attention import find_rows

B, H, N, W, D, E = 2, 4, 6, 8, 32, 5
sdpa = F.scaled_dot_product_attention


def causal(q, k, v, bias):
    return sdpa(q, k, v, is_causal=True)


def of_all_tokens(q, k, v, bias):
    return sdpa(q, k, v)


def scaled(q, k, v, bias):
    return sdpa(q, k, v, is_causal=True, scale=0.5)


def biased(q, k, v, bias):
    return sdpa(q, k, v, attn_mask=bias)


def triangle(q, k, v, bias):
    n = q.shape[-2]
    return sdpa(q, k, v, attn_mask=torch.ones(n, n, dtype=torch.bool).tril())


def triangle_of_infinities(q, k, v, bias):
    n = q.shape[-2]
    return sdpa(q, k, v, attn_mask=torch.full((n, n), -math.inf).triu(1))


def filled_triangle(q, k, v, bias):
    n = q.shape[-2]
    above = torch.ones(n, n).triu(1).bool()
    return sdpa(q, k, v, attn_mask=torch.zeros(n, n).masked_fill(above, -math.inf))


def copies(q, k, v, bias):
    return sdpa(q.contiguous(), k.reshape(q.shape).clone(), v, is_causal=True)


def ours(q, k, v, bias):
    return moe_mlir.attention(q, k, v, causal=True)[0]


# Attention -> what the posterior of the same weights is told.
GIVES = {
    causal: dict(causal=True),
    of_all_tokens: dict(causal=False),
    scaled: dict(causal=True, scale=0.5),
    biased: dict(causal=False, bias=True),
    triangle: dict(causal=True),
    triangle_of_infinities: dict(causal=True),
    filled_triangle: dict(causal=True),
    copies: dict(causal=True),
    ours: dict(causal=True),
}


class Layer(torch.nn.Module):
    """Attention and the router that mixes decisions by its posterior."""

    def __init__(self, attend, bias=False, **options):
        super().__init__()
        torch.manual_seed(0)
        self.qkv = torch.nn.Linear(D, 3 * H * W, bias=False)
        self.out = torch.nn.Linear(H * W, D, bias=False)
        self.bias = torch.nn.Parameter(torch.randn(1, H, N, N))
        self.attend, self.takes_bias = attend, bias
        self.router = nn.AttentionSMoE(D, E, 2, **options)

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, H, W).permute(2, 0, 3, 1, 4)
        heads = self.attend(q, k, v, self.bias).transpose(1, 2)
        # As torch lays out its fused attention, that is a view.
        joined = heads.view if self.attend is causal else heads.reshape
        u = self.out(joined(b, n, -1))
        wo = H * self.out.weight.view(D, H, W).transpose(0, 1)
        routing = self.router(x + u, q=q, k=k, v=v, attn_output=u, wo=wo,
                              bias=self.bias if self.takes_bias else None)
        return routing.gates, routing.indices


def compiled(module):
    """The module on our backend, and what its graphs have of attention and its rows."""
    torch._dynamo.reset()
    seen = dict(calls=[], reasons=[])

    def spy(graph, inputs):
        _, traced = dynamo.trace_before_autograd(graph)
        seen["reasons"] += [rows.reason for piece in traced for rows in find_rows(piece.graph)]
        raised = dynamo._raise_before_autograd(graph)
        nodes = [] if raised is None else [n for m in raised.modules() if hasattr(m, "graph")
                                           for n in m.graph.nodes]
        seen["calls"] += [str(n.target) for n in nodes if "attention" in str(n.target)]
        return dynamo.moe(graph, inputs, options={"rest": "eager"})

    return torch.compile(module, backend=spy, fullgraph=True), seen


def gradients(module, run, x):
    module.zero_grad()
    gates, indices = run(x)
    (gates * torch.arange(1.0, 3)).sum().backward()
    grads = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    return [gates.detach(), indices, *grads]


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    "attend, mode",
    some(itertools.product(GIVES, ["min_entropy", "all"]), by=lambda case: case[0]),
    ids=lambda x: getattr(x, "__name__", x))
def test_the_posterior_takes_the_rows_of_its_attention(attend, mode):
    layer, x = Layer(attend, head_mode=mode, **GIVES[attend]), torch.randn(B, N, D)
    run, seen = compiled(layer)
    found, wanted = gradients(layer, run, x), gradients(layer, layer, x)
    # A head for each token asks for the entropies apart from the posterior.
    prefix = layer.router.head_scope == "prefix" and mode == "min_entropy"
    assert seen["reasons"] == [""] * (2 if prefix else 1)
    assert seen["calls"] == ["moe.attention.default", "moe.attention_posterior.default"]
    for ours, eager in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("attend", GIVES, ids=lambda f: f.__name__)
def test_imported_layers_hold_no_matrix_of_tokens_by_tokens(attend):
    layer, x = Layer(attend, **GIVES[attend]), torch.randn(B, N, D)
    (site,) = moe_mlir.explain(layer, (x,))
    assert (site.mixing, site.left) == ("attention", "")
    imported = moe_mlir.compile(layer, (x,))
    text = imported.module.text
    assert text.count("moe.softmax_mix") == 1 and "rows(" in text
    # Of the softmax of the experts alone.
    assert text.count("math.exp") == 1 and ("visibility<causal" in text) == GIVES[attend]["causal"]
    with torch.no_grad():
        for found, eager in zip(imported(x), layer(x), strict=True):
            torch.testing.assert_close(found, eager, rtol=1e-5, atol=1e-6)


class Padded(Layer):
    """Attention and router of the tokens that are there; `pairs` says so to torch's attention."""

    def __init__(self, pairs, **options):
        super().__init__(None, **options)
        self.pairs = pairs

    def forward(self, x, mask):
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, H, W).permute(2, 0, 3, 1, 4)
        pairs = self.pairs(torch.ones(n, n, dtype=torch.bool).tril(), mask)
        u = self.out(sdpa(q, k, v, attn_mask=pairs).transpose(1, 2).reshape(b, n, -1))
        wo = H * self.out.weight.view(D, H, W).transpose(0, 1)
        x += u
        routing = self.router(x, mask, q=q, k=k, v=v, attn_output=u, wo=wo)
        return routing.gates, routing.indices, u


def both(lower, mask):
    return lower & mask[:, None, None, :]


def both_and_more(lower, mask):
    return mask[:, None, None] & lower[None, None] & mask[:, None, None]


def keys(lower, mask):
    return mask[:, None, None]


def infinite(lower, mask):
    return torch.zeros(mask.shape[0], 1, *lower.shape).masked_fill(~both(lower, mask), -math.inf)


def queries(lower, mask):
    return lower & mask[:, None, :, None]


PADDED = {both: True, both_and_more: True, keys: False, infinite: True}


def padded(n=N):
    mask = torch.rand(B, n, generator=torch.Generator().manual_seed(2)) > 0.3
    return torch.randn(B, n, D, generator=torch.Generator().manual_seed(3)), mask


@pytest.mark.drawn(2)
@pytest.mark.parametrize("pairs", PADDED, ids=lambda f: f.__name__)
def test_attention_under_the_routers_own_padding_gives_its_rows(pairs):
    layer = Padded(pairs, causal=PADDED[pairs])
    run, seen = compiled(layer)
    with torch.no_grad():
        found, wanted = (f(*padded()) for f in (run, layer))
        assert not any(seen["reasons"])
        assert seen["calls"] == ["moe.attention.default", "moe.attention_posterior.default"]
        imported = moe_mlir.compile(layer, padded())
        for ours, eager in zip((*found, *imported(*padded(40))), (*wanted, *layer(*padded(40))),
                               strict=True):
            torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-6)
    text = imported.module.text
    assert "rows(" in text and text.count("moe.softmax_mix") == 1


def test_attention_under_another_padding_keeps_its_rows():
    layer = Padded(queries, causal=True)
    run, seen = compiled(layer)
    with torch.no_grad():
        for ours, eager in zip(run(*padded()), layer(*padded()), strict=True):
            torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-6)
    assert set(seen["reasons"]) == {"its bias is another"}


def test_inductors_own_graphs_hand_the_rows_over():
    """There torch's attention is the call of one of its kernels."""
    layer, x = Layer(causal, causal=True), torch.randn(B, N, D)
    torch._dynamo.reset()
    seen = []

    class Spy(RoutingPass):
        def __call__(self, graph):
            super().__call__(graph)
            seen.extend(str(n.target) for n in graph.nodes if "attention" in str(n.target))

    with torch._inductor.config.patch(post_grad_custom_post_pass=Spy(), fx_graph_cache=False), \
            torch.no_grad():
        for found, eager in zip(torch.compile(layer)(x), layer(x), strict=True):
            torch.testing.assert_close(found, eager, rtol=1e-5, atol=1e-6)
    assert seen == ["moe.attention.default", "moe.attention_posterior.default"]


# ------------------------------------------------------------------- what is kept


def dropped(q, k, v, bias):
    return sdpa(q, k, v, is_causal=True, dropout_p=1e-9)


def of_other_pairs(q, k, v, bias):
    return sdpa(q, k, v, attn_mask=torch.ones(N, N, dtype=torch.bool).tril(1))


KEPT = {
    dropped: (dict(causal=True), "it drops weights out"),
    scaled: (dict(causal=True), "its scale is 0.5, not 0.35"),
    causal: (dict(causal=False), "its causal is True, not False"),
    of_all_tokens: (dict(causal=False, exclude_self=True), "its exclude_self is False, not True"),
    biased: (dict(causal=False), "its bias is another"),
    of_other_pairs: (dict(causal=False), "its bias is another"),
}


@pytest.mark.parametrize("attend", KEPT, ids=lambda f: f.__name__)
def test_other_attention_keeps_its_rows_and_says_why(attend):
    options, reason = KEPT[attend]
    layer, x = Layer(attend, **options), torch.randn(B, N, D)
    run, seen = compiled(layer)
    with torch.no_grad():
        for found, eager in zip(run(x), layer(x), strict=True):
            torch.testing.assert_close(found, eager, rtol=1e-5, atol=1e-6)
    assert seen["reasons"] and all(found.startswith(reason) for found in seen["reasons"])
    assert "moe.attention.default" not in seen["calls"]


def test_explain_says_why_the_entropies_take_a_pass_of_their_own():
    layer = Layer(scaled, causal=True)
    (site,) = moe_mlir.explain(layer, (torch.randn(B, N, D),))
    assert site.mixing == "attention"
    assert site.left.startswith("the attention's entropies: its scale is 0.5, not 0.35")


class Sure(torch.nn.Module):
    """Attention and the entropies of its heads, in either order."""

    def __init__(self, first, attend=causal, **options):
        super().__init__()
        self.first, self.attend, self.options = first, attend, dict(causal=True) | options

    def forward(self, q, k, v):
        out = self.attend(q, k, v, None) if self.first else None
        entropies = moe_mlir.attention_entropy(q.detach(), k, **self.options)
        return *entropies, self.attend(q, k, v, None) if out is None else out


def heads(n=N, width=W):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(B, H, n, width, generator=g) for _ in range(3)]


@pytest.mark.parametrize("first", [True, False])
def test_entropies_are_those_that_the_attention_emits(first):
    module = Sure(first)
    run, seen = compiled(module)
    found, wanted = run(*heads()), module(*heads())
    assert seen == dict(calls=["moe.attention.default"], reasons=[""])
    for ours, eager in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-6)


class Twice(torch.nn.Module):
    """Queries and keys cut out anew by each who wants them; `part` of the second cut."""

    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, x):
        def cut(i):
            return x.chunk(3, dim=-1)[i].unflatten(-1, (H, W)).transpose(1, 2)

        out = sdpa(cut(0), cut(1), cut(2), is_causal=True)
        return moe_mlir.attention_entropy(cut(0), cut(self.part), causal=True)[1], out


@pytest.mark.parametrize("part, reasons", [(1, [""]), (2, [])])
def test_operands_are_the_same_if_they_are_cut_alike(part, reasons):
    x, module = torch.randn(B, N, 3 * H * W), Twice(part)
    run, seen = compiled(module)
    for ours, eager in zip(run(x), module(x), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-6)
    assert seen["reasons"] == reasons
    assert seen["calls"] == ["moe.attention.default"] * len(reasons)


class SurePadded(torch.nn.Module):
    """Entropies of padded tokens beside an attention that a mask of pairs tells of them."""

    def __init__(self, with_mean):
        super().__init__()
        self.with_mean = with_mean

    def forward(self, q, k, v, mask):
        pairs = both(torch.ones(N, N, dtype=torch.bool).tril(), mask)
        mean, rows = moe_mlir.attention_entropy(q, k, causal=True, mask=mask)
        return sdpa(q, k, v, attn_mask=pairs), rows, *([mean] if self.with_mean else [])


@pytest.mark.parametrize("with_mean, reason", [(False, ""), (True, "its bias is another")])
def test_the_entropies_of_padding_are_zero_beside_any_attention(with_mean, reason):
    module, (_, mask) = SurePadded(with_mean), padded()
    run, seen = compiled(module)
    found, wanted = run(*heads(), mask), module(*heads(), mask)
    assert seen["reasons"] == [reason]
    assert not found[1].transpose(1, 2)[~mask].any()
    for ours, eager in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("n", [N, 40, 1, 0])
def test_imported_entropies_of_any_number_of_tokens(n):
    module = Sure(True)
    call = moe_mlir.compile(module, tuple(heads()))
    for ours, eager in zip(call(*heads(n)), module(*heads(n)), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-6)


def test_operands_that_the_graph_writes_keep_their_own_pass():
    run, seen = compiled(Sure(True, written_afterwards))
    run(*heads())
    assert seen["reasons"] == ["the graph writes its operands in place"]


def written_afterwards(q, k, v, bias):
    out = sdpa(q, k, v, is_causal=True)
    k.view(-1).mul_(1.0)
    return out


def test_causal_attention_of_fewer_queries_than_keys_counts_from_the_first_key():
    class Decode(torch.nn.Module):
        def forward(self, q, k, v):
            return sdpa(q, k, v, is_causal=True), moe_mlir.attention_entropy(q, k, causal=True)[1]

    q, k, v = heads()
    module = Decode()
    run, seen = compiled(module)
    for ours, eager in zip(run(q[:, :, :2], k, v), module(q[:, :, :2], k, v), strict=True):
        torch.testing.assert_close(ours, eager)
    assert seen["reasons"] == ["it is causal from the first of its keys, not to the last"]


def test_an_attention_on_another_device_stays_torchs():
    layer = Layer(scaled, causal=True, scale=0.5).to("meta")
    program = torch.export.export(layer, (torch.empty(B, N, D, device="meta"),))
    assert {rows.reason for rows in find_rows(program.graph)} == {
        "it runs on meta, where torch's own is kept"
    }
