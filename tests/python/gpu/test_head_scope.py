"""The head of a batch's lowest entropy, on the simulated GPU as on the CPU."""

import pytest
import torch

import moe_mlir


def operands(batch, heads, tokens, width, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = (batch, heads, tokens)
    q, k = torch.randn(2, *rows, width, generator=generator).unbind()
    u = torch.randn(batch, tokens, heads * width, generator=generator)
    vp = torch.randn(*rows, heads * width, generator=generator)
    return {"q": q, "k": k, "attn_output": u, "projected_v": vp,
            "probs": torch.randn(batch, tokens, 5, generator=generator)}


@pytest.mark.parametrize("scope", ["batch", "sequence"])
@pytest.mark.parametrize("sizes", [(2, 3, 6, 6), (3, 4, 9, 8), (2, 8, 20, 16), (1, 3, 6, 6)])
def test_the_head_is_that_of_the_cpu(sizes, scope):
    for seed in range(6):
        given = dict(operands(*sizes, seed), causal=False, head_scope=scope)
        expected = moe_mlir.attention_posterior(**given)
        with moe_mlir.simulate():
            found = moe_mlir.attention_posterior(**given)
        assert torch.equal(found[1], expected[1]), seed
        torch.testing.assert_close(found[0], expected[0], rtol=2e-5, atol=2e-5)
