"""The head of a batch's lowest entropy, on the simulated GPU as on the CPU."""

import pytest
import torch

import moe_mlir


@pytest.mark.parametrize("scope", ["batch", "sequence"])
@pytest.mark.parametrize("sizes", [(2, 3, 6, 6), (3, 4, 9, 8), (2, 8, 20, 16), (1, 3, 6, 6)])
def test_the_head_is_that_of_the_cpu(sizes, scope):
    batch, heads, tokens, width = sizes
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        q, k = torch.randn(2, batch, heads, tokens, width, generator=generator).unbind()
        u = torch.randn(batch, tokens, heads * width, generator=generator)
        vp = torch.randn(batch, heads, tokens, heads * width, generator=generator)
        e = torch.randn(batch, tokens, 5, generator=generator)

        def run():
            return moe_mlir.attention_posterior(q, k, u, e, vp=vp, causal=False,
                                                head_scope=scope)
        expected = run()
        with moe_mlir.simulate():
            found = run()
        assert torch.equal(found[1], expected[1]), seed
        torch.testing.assert_close(found[0], expected[0], rtol=2e-5, atol=2e-5)
