"""Every op gives the same bits for any thread count, from run to run, and for a token on its own.

docs/Spec.md F15. `alone` are the arguments that a subset of the tokens takes
along; an op without it looks at all tokens by its meaning.
"""

import pytest
import torch
from inputs import (
    features,
    generator,
    normal,
    op,
    probability_rows,
    score_rows,
    selections,
    uniform,
)  # fmt: skip
from op_judge import assert_same_bits

N, D, E, K = 67, 33, 24, 4


def make():
    """{name: (op, arguments, keywords, which arguments are by token)}."""
    g = generator(0)
    z, h = score_rows(N, E, g), features(N, D, g)
    p, idx = probability_rows(N, E, g), selections(N, E, K, g)
    emb, metric = normal(E, D, g=g), normal(E, D, g=g).exp()
    u, e = normal(3, 40, D, g=g), normal(3, 40, E, g=g).softmax(-1)
    q, k, v = (normal(3, 2, 40, 8, g=g) for _ in range(3))
    wo, mask = 0.4 * normal(2, D, 8, g=g), uniform(3, 40, g=g) > 0.2
    s, count = normal(E, D, g=g).abs(), torch.randint(0, 3, (E,), generator=g)
    rows = E * (D + 1)
    network = [normal(*shape, g=g) for shape in ((5,), (7, 5), (7,), (rows, 7), (rows,))]
    a = uniform(E, E, g=g)
    gates, slots = uniform(N, K, g=g), torch.arange(N * K).view(N, K)
    return {
        "topk_renorm": ("topk_renorm", (z, K), {}, (0,)),
        "topk_renorm_raw": ("topk_renorm", (z, K), dict(renorm=False), (0,)),
        "grouped_topk": ("grouped_topk", (z, K), dict(n_group=4, topk_group=2), (0,)),
        "threshold_renorm": ("threshold_renorm", (p, 0.05), {}, (0,)),
        "densify": ("densify", (gates, idx, E), {}, (0, 1)),
        "make_finite": ("make_finite", (z,), dict(scope="row"), (0,)),
        "make_finite_tensor": ("make_finite", (z,), dict(scope="tensor"), ()),
        "router_logits": ("router_logits", (h, emb), {}, (0,)),
        "cosine_logits": ("cosine_logits", (h, normal(8, D, g=g), normal(E, 8, g=g)), {}, (0,)),
        "hyper_router": ("hyper_router", (*network, E), {}, ()),
        "ac_logits": ("ac_logits", (h, metric, idx[:, :1], emb), {}, (0, 2)),
        "ac_logits_mixed": (
            "ac_logits", (h, metric, idx, emb), dict(prev_gates=gates), (0, 2, "prev_gates"),
        ),
        "similarity_inform": (
            "similarity_inform", (u, e), dict(causal=True, mask=mask), (0, 1, "mask"),
        ),
        "attention_posterior": (
            "attention_posterior", (q, k, u, e), dict(v=v, wo=wo, causal=True), (0, 1, 2, 3, "v"),
        ),
        "attention_posterior_all": (
            "attention_posterior", (q, k, u, e), dict(v=v, wo=wo, causal=False, head_mode="all"),
            (0, 1, 2, 3, "v"),
        ),
        "attention": ("attention", (q, k, v), dict(causal=True), (0, 1, 2)),
        "attention_entropy": ("attention_entropy", (q, k), dict(causal=True), (0, 1)),
        "soft_dispatch": ("soft_dispatch", (u, normal(D, 4, 2, g=g)), {}, (0,)),
        "mad_dispersion": ("mad_dispersion", (h, idx[:, 0], E), {}, ()),
        "variance": ("mad_dispersion", (h, idx[:, 0], E), dict(measure="variance"), ()),
        "dispersion_weights": ("dispersion_weights", (s, count), dict(clamp=2.0), ()),
        "adjacency_gate": ("adjacency_gate", (p, a), {}, (0,)),
        "adjacency_update": ("adjacency_update", (a, idx), {}, ()),
        "dispatch": ("dispatch", (idx, E), dict(capacity=9), ()),
        "combine": ("combine", (normal(N * K, D, g=g), gates, slots), {}, (1, 2)),
        "balance_loss": ("balance_loss", (p.nan_to_num(0.0), idx), {}, ()),
        "z_loss": ("z_loss", (h,), {}, ()),
        "bias_update": ("bias_update", (s[:, 0], count), {}, ()),
    }  # fmt: skip


CALLS = make()


def call(name, rows=None):
    """Results as a tuple; `rows` takes a part of the arguments that are by token."""
    which, args, keywords, by_token = CALLS[name]
    if rows is not None:
        args = tuple(x[rows] if i in by_token else x for i, x in enumerate(args))
        keywords = {n: x[rows] if n in by_token else x for n, x in keywords.items()}
    results = op(which)(*args, **keywords)
    return results if isinstance(results, tuple) else (results,)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", CALLS)
def test_any_thread_count_and_run(name, threads):
    results = []
    for count in (1, 2, 5, 1):
        threads(count)
        results.append(call(name))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert_same_bits(a, b, name)


@pytest.mark.parametrize("name", [name for name, case in CALLS.items() if case[3]])
def test_a_token_or_sequence_depends_on_no_other_of_its_batch(name):
    whole = call(name)
    size = len(CALLS[name][1][CALLS[name][3][0]])
    for rows in (slice(0, 1), slice(1, 3), slice(size - 1, size), slice(0, size, 2)):
        for a, b in zip(call(name, rows), whole, strict=True):
            assert_same_bits(a, b[rows], f"{name} of {rows}")
