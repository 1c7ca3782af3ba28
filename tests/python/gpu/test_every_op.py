"""Every forward op of the package on the simulated GPU, against the CPU's kernel."""

import pytest
import torch

import moe_mlir as m

n, e, d, k, heads = 12, 8, 16, 2, 2


def operands():
    """The same values at every call."""
    torch.manual_seed(0)
    z = torch.randn(n, e)
    indices = torch.topk(z, k).indices
    return {
        "h": torch.randn(n, d), "weight": torch.randn(e, d), "z": z, "p": z.softmax(-1),
        "idx": indices, "top1": indices[:, 0].contiguous(), "g": torch.rand(n, k),
        "a": torch.rand(e, e), "u": torch.randn(1, n, d), "q": torch.randn(1, heads, n, 8),
        "wo": torch.randn(heads, d, 8), "rows": torch.randn(n * k, d), "m": torch.rand(e, d),
        "bias": torch.randn(e), "phi": torch.randn(d, e, 2),
    }


CASES = {
    "topk_renorm": lambda o: m.topk_renorm(o["z"], k),
    "grouped_topk": lambda o: m.grouped_topk(o["z"], k, bias=o["bias"], n_group=4, topk_group=2),
    "threshold_renorm": lambda o: m.threshold_renorm(o["p"], 0.1),
    "router_logits": lambda o: m.router_logits(o["h"], o["weight"]),
    "cosine_logits": lambda o: m.cosine_logits(o["h"], None, o["weight"]),
    "soft_dispatch": lambda o: m.soft_dispatch(o["h"], o["phi"]),
    "hyper_router": lambda o: m.hyper_router(
        torch.ones(4), torch.ones(6, 4), torch.ones(6), torch.ones(e * (d + 1), 6),
        torch.ones(e * (d + 1)), e),
    "similarity_inform": lambda o: m.similarity_inform(o["u"], o["p"][None], causal=True),
    "attention_posterior": lambda o: m.attention_posterior(
        o["q"], o["q"], o["u"], o["p"][None], causal=True, v=o["q"], wo=o["wo"]),
    "attention_entropy": lambda o: m.attention_entropy(o["q"], o["q"], causal=True),
    "mad_dispersion": lambda o: m.mad_dispersion(o["h"], o["top1"], e),
    "dispersion_weights": lambda o: m.dispersion_weights(o["m"], torch.ones(e).long()),
    "ac_logits": lambda o: m.ac_logits(o["h"], o["m"], o["idx"], o["weight"], prev_gates=o["g"]),
    "adjacency_gate": lambda o: m.adjacency_gate(o["p"], o["a"]),
    "adjacency_update": lambda o: m.adjacency_update(o["a"], o["idx"]),
    "dispatch": lambda o: m.dispatch(o["idx"], e),
    "combine": lambda o: m.combine(o["rows"], o["g"], torch.arange(n * k).view(n, k)),
    "balance_loss": lambda o: m.balance_loss(o["p"], o["idx"]),
    "z_loss": lambda o: m.z_loss(o["z"]),
    "bias_update": lambda o: m.bias_update(torch.zeros(e), torch.arange(e)),
    "densify": lambda o: m.densify(o["g"], o["idx"], e),
    "make_finite": lambda o: m.make_finite(o["z"]),
}


@pytest.mark.parametrize("op", CASES)
def test_op_equals_its_cpu_kernel(op):
    expected = CASES[op](operands())
    with m.simulate(chip="sm_90"):
        found = CASES[op](operands())
    if isinstance(expected, torch.Tensor):
        expected, found = (expected,), (found,)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        if a.is_floating_point():
            torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6)
        else:
            assert torch.equal(a, b)

