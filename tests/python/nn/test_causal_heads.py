"""The head that each token of a causal `AttentionSMoE` takes: by the rows up to its own."""

import pytest
import torch

import moe_mlir
from moe_mlir import nn

B, H, N, W, D, E = 2, 4, 32, 8, 16, 8


def random(seed=0):
    return torch.Generator().manual_seed(seed)


def tokens(n=N, dtype=torch.float32, seed=1):
    """(h, what the attention gives the router)."""
    g = random(seed)
    q, k, v = (torch.randn(B, H, n, W, generator=g).to(dtype) for _ in range(3))
    u, h = (torch.randn(B, n, D, generator=g).to(dtype) for _ in range(2))
    return h, dict(q=q, k=k, v=v, attn_output=u, wo=torch.randn(H, D, W, generator=g).to(dtype))


def router(**options):
    torch.manual_seed(0)
    return nn.AttentionSMoE(D, E, 2, causal=True, **options).eval()


def moved(route, h, x):
    """How far earlier tokens move where the last three have other queries."""
    other = {**x, "q": x["q"].clone()}
    other["q"][:, :, -3:] *= torch.tensor([0.0, 20.0, 40.0])[:, None]
    before, after = route(h, **x).probs, route(h, **other).probs
    return float((before - after)[:, :-3].abs().max())


@torch.no_grad()
def test_later_tokens_never_change_the_routing_of_earlier_ones():
    assert max(moved(router(), *tokens(seed=i)) for i in range(8)) == 0
    # What this test sees in equation (15), for which one has to ask.
    looks_ahead = router(head_scope="sequence")
    assert max(moved(looks_ahead, *tokens(seed=i)) for i in range(8)) > 0.05


def piece(h, x, start, stop):
    late = {n: x[n][..., start:stop, :] for n in ("q", "attn_output")}
    seen = {n: x[n][..., :stop, :] for n in ("k", "v")}
    return h[:, start:stop], {**x, **late, **seen}


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sizes", [[1] * N, [7, 1, 16, 8], [0, 31, 0, 1]], ids=str)
def test_decoding_in_pieces_routes_as_the_whole_sequence(sizes, masked, dtype):
    route, (h, x) = router(dtype=dtype), tokens(dtype=dtype)
    mask = torch.rand(B, N, generator=random(2)) > 0.3 if masked else None
    whole, state, found, start = route(h, mask, **x), {}, [], 0
    for size in sizes:
        stop = start + size
        part, given = piece(h, x, start, stop)
        seen = {} if mask is None else dict(
            mask=mask[:, :stop], query_mask=mask[:, start:stop])
        found.append(route(part, **given, **seen, **state))
        state, start = found[-1].state, stop
    assert torch.equal(torch.cat([x.indices for x in found], dim=1), whole.indices)
    torch.testing.assert_close(torch.cat([x.probs for x in found], dim=1), whole.probs)
    torch.testing.assert_close(state["cached_entropy"], whole.state["cached_entropy"])


@torch.no_grad()
def test_the_rows_of_the_attention_choose_the_head_of_each_token():
    """Head 2 until token 9, then head 1: there its sum falls below."""
    (h, x), rows = tokens(), torch.ones(B, H, N)
    rows[:, 2], rows[:, 1, 8:] = 0.5, 0.0
    # 1 has summed up 8 at token 7 and stays there; 2 has 0.5 a token, 8 at token 15.
    given = dict(x, row_lse=moe_mlir.attention(x["q"], x["k"], x["v"], causal=True)[1],
                 row_entropy=rows)
    found = router()(h, **given).probs
    of_head = [router(head_mode=i)(h, **x).probs for i in range(H)]
    # At a tie, token 15, the lower head goes first (E19).
    expected = torch.cat([of_head[2][:, :15], of_head[1][:, 15:]], dim=1)
    torch.testing.assert_close(found, expected)


@torch.no_grad()
def test_heads_without_a_number_come_last_and_ties_go_to_the_lower():
    h, x = tokens()
    of_head = [router(head_mode=i)(h, **x).probs for i in range(H)]
    _, lse, _ = moe_mlir.attention(x["q"], x["k"], x["v"], causal=True)
    for values, head in (((1, 1, 1, 1), 0), ((2, 1, 1, 3), 1), ((float("nan"), 2, 2, 3), 1),
                         ((float("nan"),) * 4, 0), ((float("inf"), float("nan"), 9, 10), 2)):
        rows = torch.tensor(values)[None, :, None].expand(B, H, N).float()
        found = router()(h, **x, row_lse=lse, row_entropy=rows).probs
        torch.testing.assert_close(found, of_head[head])


def test_the_simulated_gpu_takes_the_same_heads():
    results = []
    for gpu in (False, True):
        route, (h, x) = router(), tokens(9)
        leaves = [h, *x.values()]
        for leaf in leaves:
            leaf.requires_grad_()
        if gpu:
            with moe_mlir.simulate():
                found = route(h, **x)
                found.gates.square().sum().backward()
        else:
            found = route(h, **x)
            found.gates.square().sum().backward()
        results.append([found.indices, found.gates.detach(), *(leaf.grad for leaf in leaves)])
    for cpu, simulated in zip(*results, strict=True):
        torch.testing.assert_close(simulated, cpu, rtol=2e-5, atol=2e-5)


@torch.no_grad()
def test_a_compiled_layer_decodes_as_eager():
    class Step(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.router = router()

        def forward(self, h, q, k, v, u, wo, probs, entropy):
            found = self.router(h, q=q, k=k, v=v, attn_output=u, wo=wo, cached_probs=probs,
                                cached_entropy=entropy)
            return found.gates, found.indices, *found.state.values()

    (h, x), step = tokens(), Step()
    prompt, first = piece(h, x, 0, 20)
    state = step.router(prompt, **first).state
    late, given = piece(h, x, 20, 24)
    arguments = (late, *(given[n] for n in ("q", "k", "v", "attn_output", "wo")), *state.values())
    found = moe_mlir.compile(step, arguments)(*arguments)
    for compiled, eager in zip(found, step(*arguments), strict=True):
        torch.testing.assert_close(compiled, eager)


def test_no_tokens():
    h, x = tokens(0)
    found = router()(h, **x)
    assert found.gates.shape == (B, 0, 2)
    assert torch.equal(found.state["cached_entropy"], torch.zeros(B, H).double())


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="'sequence', 'batch' or 'prefix', found 'rows'"):
        router(head_scope="rows")
    with pytest.raises(ValueError, match="with causal=False, found 'prefix'"):
        nn.AttentionSMoE(D, E, 2, causal=False, head_scope="prefix")
    h, x = tokens(4)
    with pytest.raises(ValueError, match="together, as a call's state has them, found 'cached_pr"):
        router()(h[:, 3:], **{**x, "q": x["q"][:, :, 3:], "attn_output": x["attn_output"][:, 3:]},
                 cached_probs=torch.rand(B, 3, E))
    with pytest.raises(ValueError, match="head_mode='all' and head_scope='prefix', found one"):
        router(head_mode="all")(h, **x, cached_entropy=torch.zeros(B, H))
    with pytest.raises(ValueError, match="expected 'head_prior' with head_mode='all' only"):
        router()(h, **x, head_prior=torch.rand(B, 4, H))
