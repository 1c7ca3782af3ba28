"""Bitwise equality: across runs, thread counts, batch sizes and positions (docs/Spec.md F15)."""

import pytest
import torch
from op_judge import assert_same_bits, random

import moe_mlir


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=random(seed))


N = 131
H, W, B = normal(N, 33), normal(24, 33, seed=1), normal(24, seed=2)
U, E = normal(3, 70, 24), normal(3, 70, 8, seed=1).softmax(-1)
Q, K, V = (normal(3, 2, 70, 8, seed=s) for s in (2, 3, 4))
WO = 0.4 * normal(2, 24, 8, seed=5)
ASSIGN = torch.randint(0, 24, (N,), generator=random(6))
A = torch.rand(24, 24, generator=random(7))
IDX = torch.rand(N, 24, generator=random(8)).argsort(-1)[:, :3]

CALLS = {
    "router_logits": lambda: (moe_mlir.router_logits(H, W, B),),
    "cosine_logits": lambda: (moe_mlir.cosine_logits(H, W[:6], W[:, :6], tau=0.3),),
    "ac_logits": lambda: (moe_mlir.ac_logits(H, W.abs(), ASSIGN[:, None], W, bias=B),),
    "topk_renorm": lambda: moe_mlir.topk_renorm(H[:, :24], 5, renorm=False),
    "similarity_inform": lambda: moe_mlir.similarity_inform(U, E, causal=True),
    "attention_posterior": lambda: moe_mlir.attention_posterior(
        Q, K, U, E, v=V, wo=WO, causal=True, return_lse=True
    ),
    "posterior_of_all_heads": lambda: moe_mlir.attention_posterior(
        Q, K, U, E, v=V, wo=WO, causal=False, head_mode="all", return_lse=True
    ),
    "attention": lambda: moe_mlir.attention(Q, K, V, causal=True),
    "attention_entropy": lambda: moe_mlir.attention_entropy(Q, K, causal=True),
    "dispersion_weights": lambda: (moe_mlir.dispersion_weights(W.abs(), IDX[:24, 0]),),
    "mad_dispersion": lambda: moe_mlir.mad_dispersion(H, ASSIGN, 24),
    "pairwise": lambda: moe_mlir.mad_dispersion(H, ASSIGN, 24, measure="pairwise"),
    "adjacency_gate": lambda: (moe_mlir.adjacency_gate(H[:, :24].softmax(-1), A),),
    "adjacency_update": lambda: (moe_mlir.adjacency_update(A, IDX),),
    "grouped_topk": lambda: moe_mlir.grouped_topk(H[:, :24], 5, bias=B, n_group=4, topk_group=2),
    "threshold_renorm": lambda: moe_mlir.threshold_renorm(H[:, :24].softmax(-1), 0.05),
    "densify": lambda: (moe_mlir.densify(H[:, :3], IDX, 24),),
    "make_finite": lambda: (moe_mlir.make_finite(H.log(), scope="tensor"),),
    "dispatch": lambda: moe_mlir.dispatch(IDX, 24, capacity=11),
    "dispatch_by_priority": lambda: moe_mlir.dispatch(IDX, 24, capacity=11, priority=H[:, 0]),
    "combine": lambda: (moe_mlir.combine(H, H[:, :3], IDX),),
    "soft_dispatch": lambda: moe_mlir.soft_dispatch(U, H[:24, :30].unflatten(1, (15, 2))),
    "balance_loss": lambda: (moe_mlir.balance_loss(H[:, :24].softmax(-1), IDX),),
    "z_loss": lambda: (moe_mlir.z_loss(H),),
    "bias_update": lambda: (moe_mlir.bias_update(B, IDX.flatten().bincount(minlength=24)),),
}


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", CALLS)
def test_equal_for_every_thread_count(name, threads):
    results = []
    for count in (1, 2, 3, 8):
        threads(count)
        results.append(CALLS[name]())
    for other in results[1:]:
        for first, second in zip(results[0], other, strict=True):
            assert_same_bits(first, second, name)


@pytest.mark.parametrize("name", CALLS)
def test_equal_from_run_to_run(name):
    first = CALLS[name]()
    for _ in range(3):
        for a, b in zip(first, CALLS[name](), strict=True):
            assert_same_bits(a, b, name)


COUNTS = (1, 2, 3, 7, 16, 17, 64, 127)


def test_router_logits_of_a_token_do_not_depend_on_its_batch():
    whole = moe_mlir.router_logits(H, W, B)
    for n in COUNTS:
        assert_same_bits(moe_mlir.router_logits(H[:n], W, B), whole[:n], f"first {n}")
        assert_same_bits(moe_mlir.router_logits(H[-n:], W, B), whole[-n:], f"last {n}")


def test_logits_of_a_token_do_not_depend_on_its_batch():
    def cosine(part):
        return moe_mlir.cosine_logits(H[part], W[:6], W[:, :6])

    def clustered(part):
        return moe_mlir.ac_logits(H[part], W.abs(), IDX[part], W, prev_gates=H[part, :3].abs())

    for function in (cosine, clustered):
        whole = function(slice(0, N))
        for n in COUNTS:
            for part in (slice(0, n), slice(N - n, N)):
                assert_same_bits(function(part), whole[part], f"{function.__name__} {part}")


@pytest.mark.parametrize("renorm", (True, False))
def test_topk_renorm_of_a_token_does_not_depend_on_its_batch(renorm):
    z = normal(N, 24)
    gates, indices = moe_mlir.topk_renorm(z, 5, renorm=renorm)
    for n in COUNTS:
        for part in (slice(0, n), slice(N - n, N)):
            some, chosen = moe_mlir.topk_renorm(z[part], 5, renorm=renorm)
            assert_same_bits(some, gates[part], f"{part}")
            assert torch.equal(chosen, indices[part])


def test_similarity_inform_of_a_sequence_does_not_depend_on_the_others():
    whole = moe_mlir.similarity_inform(U, E, causal=True)
    for b in range(3):
        one = moe_mlir.similarity_inform(U[b : b + 1], E[b : b + 1], causal=True)
        for a, c in zip(one, whole, strict=True):
            assert_same_bits(a[0], c[b], f"sequence {b}")


def test_similarity_inform_of_a_prefix_does_not_depend_on_what_follows():
    """A decode that recomputes a causal prefix gets the same bits."""
    p, lse = moe_mlir.similarity_inform(U, E, causal=True)
    for n in (1, 2, 17, 33, 64):
        some, sums = moe_mlir.similarity_inform(U[:, :n], E[:, :n], causal=True)
        assert_same_bits(some, p[:, :n].contiguous(), f"prefix {n}")
        assert_same_bits(sums, lse[:, :n].contiguous(), f"prefix {n}")


def test_adjacency_gate_of_a_token_does_not_depend_on_its_batch():
    p = normal(N, 24).softmax(-1)
    whole = moe_mlir.adjacency_gate(p, A)
    for n in COUNTS:
        assert_same_bits(moe_mlir.adjacency_gate(p[-n:], A), whole[-n:], f"last {n}")


def test_rows_of_the_support_ops_do_not_depend_on_their_batch():
    p, idx, gates = H[:, :24].softmax(-1), IDX, H[:, :3].contiguous()
    calls = (
        lambda part: moe_mlir.grouped_topk(p[part], 4, n_group=4, topk_group=2),
        lambda part: moe_mlir.threshold_renorm(p[part], 0.05),
        lambda part: (moe_mlir.densify(gates[part], idx[part], 24),),
        lambda part: (moe_mlir.make_finite(p[part]),),
        lambda part: (moe_mlir.combine(H, gates[part], idx[part]),),
    )
    for call in calls:
        whole = call(slice(None))
        for n in COUNTS:
            for part in (slice(0, n), slice(N - n, N)):
                for some, all_rows in zip(call(part), whole, strict=True):
                    assert torch.equal(some, all_rows[part])


def test_integer_inputs_are_exact():
    """Small integers leave no rounding: every bit is known."""
    g = random(0)
    h = torch.randint(-8, 9, (50, 33), generator=g).float()
    w = torch.randint(-8, 9, (24, 33), generator=g).float()
    assert_same_bits(moe_mlir.router_logits(h, w), h @ w.T)
    p = torch.randint(0, 9, (50, 24), generator=g).float()
    a = torch.randint(0, 9, (24, 24), generator=g).float()
    assert_same_bits(moe_mlir.adjacency_gate(p, a), p @ a.T)
