"""Routing over ranks equals routing in one process: Gloo, 2 and 4 processes.

Each rank takes a slice of the same tokens, of unequal size; one rank has none.
"""

import pytest
import torch
import torch.distributed as dist
from support import run_ranks

import moe_mlir
from moe_mlir import distributed, metrics, nn, reference
from moe_mlir.experts import run_experts

E, K, D, T = 8, 2, 12, 41
# Tokens of each rank; unequal, and with a rank that has none.
SHARES = {1: [T], 2: [30, 11], 4: [20, 0, 5, 16]}


def tokens():
    generator = torch.Generator().manual_seed(7)
    h = torch.randn(T, D, generator=generator)
    idx = torch.rand(T, E, generator=generator).topk(K).indices
    gates = torch.rand(T, K, generator=generator)
    mask = torch.rand(T, generator=generator) > 0.2
    idx[3] = -1
    return h, idx, gates, mask


def weights(dtype=torch.float32):
    generator = torch.Generator().manual_seed(8)
    shapes = (E, 10, D), (E, D, 10), (E, 10), (E, D)
    return [torch.randn(s, generator=generator).mul(0.3).to(dtype) for s in shapes]


def share(rank, ranks, *tensors):
    start = sum(SHARES[ranks][:rank])
    return [t[start : start + SHARES[ranks][rank]] for t in tensors]


def layer():
    torch.manual_seed(3)
    return nn.MoELayer(nn.SMoE(D, E, K), 10, shared=1)


# ---------------------------------------------------------------- what ranks compute


def statistics(rank, ranks):
    h, idx, _, mask = share(rank, ranks, *tokens())
    h[mask.logical_not()] = float("nan")
    adjacency = torch.rand(E, E, generator=torch.Generator().manual_seed(1))
    return {
        "counts": distributed.selection_counts(idx, E, mask=mask),
        "std": distributed.load_balance_std(idx, E, mask=mask),
        **{f"a {norm}": distributed.adjacency_update(adjacency, idx, norm=norm, mask=mask)
           for norm in ("row", "col", "eq7")},
        **{m: distributed.mad_dispersion(h, idx[:, 0], E, measure=m, mask=mask)
           for m in ("mad", "variance", "pairwise")},
    }


def experts(rank, ranks, dtype):
    h, idx, gates, _ = tokens()
    h, gates = h.to(dtype).requires_grad_(), gates.requires_grad_()
    all_weights = [w.requires_grad_() for w in weights(dtype)]
    here = slice(rank * E // ranks, (rank + 1) * E // ranks)
    x, g, i = share(rank, ranks, h, gates, idx)
    w_in, w_out, b_in, b_out = (w[here] for w in all_weights)
    y = distributed.run_experts(x, g, i, w_in, w_out, num_experts=E, b_in=b_in, b_out=b_out)
    y.float().square().sum().backward()
    return [y.detach(), h.grad, gates.grad, *(w.grad[here] for w in all_weights)]


def parallel_layer(rank, ranks):
    model = distributed.ExpertParallel(layer())
    (h,) = share(rank, ranks, tokens()[0])
    y, routing = model(h)
    y.square().sum().backward()
    for name, parameter in model.named_parameters():
        if name not in model.parameters_to_ignore:
            dist.all_reduce(parameter.grad)
    return [y.detach(), routing.indices,
            *(p.grad for _, p in sorted(model.named_parameters()))], [model.experts.start, model.experts.stop]


def acmoe(rank, ranks):
    torch.manual_seed(5)
    model = torch.nn.ModuleList([nn.ACMoE(D, E, K), nn.ACMoE(D, E, K)])
    assert distributed.share_statistics(model) == 2
    (h,) = share(rank, ranks, tokens()[0])
    return model[1](h, **model[0](h).state).logits.detach()


def work(rank, ranks, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank,
                            world_size=ranks)
    torch.set_num_threads(1)
    results = {
        "statistics": statistics(rank, ranks),
        "experts": experts(rank, ranks, torch.float32),
        "experts bf16": experts(rank, ranks, torch.bfloat16),
        "layer": parallel_layer(rank, ranks),
        "acmoe": acmoe(rank, ranks),
    }
    torch.save(results, f"{folder}/{rank}")
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request, tmp_path_factory):
    """The results of every rank."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(work, (request.param, str(folder)), request.param)
    return [torch.load(folder / str(rank)) for rank in range(request.param)]


# ---------------------------------------------------------------- and one process


def close(found, expected, tolerance=1e-6):
    expected = expected.detach()
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * scale)


def test_counts_and_adjacencies_are_exactly_those_of_one_process(ranks):
    _, idx, _, mask = tokens()
    adjacency = torch.rand(E, E, generator=torch.Generator().manual_seed(1))
    for rank in ranks:
        found = rank["statistics"]
        assert torch.equal(found["counts"], metrics.selection_counts(idx, E, mask=mask))
        close(found["std"], metrics.load_balance_std(idx, E, mask=mask), 1e-12)
        for norm in ("row", "col", "eq7"):
            one = moe_mlir.adjacency_update(adjacency, idx, norm=norm, mask=mask)
            close(found[f"a {norm}"], one)


@pytest.mark.parametrize("measure", ["mad", "variance", "pairwise"])
def test_clusters_are_those_of_one_process(ranks, measure):
    h, idx, _, mask = tokens()
    s, mean, count = reference.mad_dispersion(h.double(), idx[:, 0], E, measure=measure, mask=mask)
    for rank in ranks:
        found = rank["statistics"][measure]
        close(found[0], s.float())
        close(found[1], mean.float())
        assert torch.equal(found[2], count)
        # Every rank has the same bits, or the ranks would drift apart.
        for a, b in zip(found, ranks[0]["statistics"][measure]):
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype, name, tolerance", [(torch.float32, "experts", 1e-6),
                                                    (torch.bfloat16, "experts bf16", 2e-2)])
def test_experts_on_ranks_are_experts_in_one_process(ranks, dtype, name, tolerance):
    h, idx, gates, _ = tokens()
    h, gates = h.to(dtype).requires_grad_(), gates.requires_grad_()
    leaves = [w.requires_grad_() for w in weights(dtype)]
    y = run_experts(h, gates, idx, leaves[0], leaves[1], b_in=leaves[2], b_out=leaves[3])
    y.float().square().sum().backward()
    close(torch.cat([rank[name][0] for rank in ranks]), y.detach(), tolerance)
    # A token's gradient arises at its own rank.
    close(sum(rank[name][1] for rank in ranks), h.grad, tolerance)
    close(sum(rank[name][2] for rank in ranks), gates.grad, tolerance)
    for i, leaf in enumerate(leaves):
        close(torch.cat([rank[name][3 + i] for rank in ranks]), leaf.grad, tolerance)


def test_an_expert_parallel_layer_is_the_layer(ranks):
    model = layer()
    y, routing = model(tokens()[0])
    y.square().sum().backward()
    close(torch.cat([rank["layer"][0][0] for rank in ranks]), y.detach())
    assert torch.equal(torch.cat([rank["layer"][0][1] for rank in ranks]), routing.indices)
    for position, (name, parameter) in enumerate(sorted(model.named_parameters())):
        for rank in ranks:
            gradients, (start, stop) = rank["layer"]
            whole = name not in distributed.ExpertParallel.parameters_to_ignore
            close(gradients[2 + position], parameter.grad if whole else parameter.grad[start:stop], 3e-6)


def test_acmoe_measures_the_clusters_of_all_ranks(ranks):
    torch.manual_seed(5)
    model = torch.nn.ModuleList([nn.ACMoE(D, E, K), nn.ACMoE(D, E, K)])
    h = tokens()[0]
    one = model[1](h, **model[0](h).state).logits.detach()
    close(torch.cat([rank["acmoe"] for rank in ranks]), one, 3e-6)


def test_without_ranks_all_is_local():
    h, idx, gates, _ = tokens()
    w_in, w_out, b_in, b_out = weights()
    found = distributed.run_experts(h, gates, idx, w_in, w_out, num_experts=E, b_in=b_in,
                                    b_out=b_out)
    close(found, run_experts(h, gates, idx, w_in, w_out, b_in=b_in, b_out=b_out))
    y, _ = distributed.ExpertParallel(layer())(h)
    close(y, layer()(h)[0])


# ---------------------------------------------------------------- wrong inputs


def test_a_share_of_the_experts_must_fit(monkeypatch):
    h, idx, gates, _ = tokens()
    w_in, w_out, *_ = weights()
    with pytest.raises(ValueError, match="this rank's 16 of 16 experts, found 8"):
        distributed.run_experts(h, gates, idx, w_in, w_out, num_experts=16)
    monkeypatch.setattr(distributed, "_size", lambda group: 3)
    with pytest.raises(ValueError, match="a multiple of the 3 ranks, found 8"):
        distributed.run_experts(h, gates, idx, w_in, w_out, num_experts=E)
    with pytest.raises(ValueError, match="a multiple of the 3 ranks, found 8"):
        distributed.ExpertParallel(layer())


def test_layers_that_mix_tokens_are_refused():
    with pytest.raises(ValueError, match="capacity is of one rank's tokens"):
        distributed.ExpertParallel(nn.MoELayer(nn.SMoE(D, E, K), 8, capacity_factor=1.0))
    soft = distributed.ExpertParallel(nn.MoELayer(nn.SoftMoE(D, E, slots=1), 8))
    with pytest.raises(ValueError, match="found a soft one, SoftMoE"):
        soft(torch.randn(2, 5, D))
    with pytest.raises(ValueError, match="'measure' to be one of"):
        distributed.mad_dispersion(torch.randn(4, D), torch.zeros(4, dtype=torch.int64), E,
                                   measure="median")
