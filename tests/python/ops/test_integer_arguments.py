"""Whatever is an integer is taken where an int is: numpy's, too; a bool, a float and a tensor are not."""

import numpy as np
import pytest
import torch

import moe_mlir
from moe_mlir import nn

Z = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
H = Z[None, :, :4]
INTEGERS = (np.int64(2), np.int32(2), np.uint8(2), np.array(2))

CALLS = {
    "topk_renorm": lambda two: moe_mlir.topk_renorm(Z, two),
    "grouped_topk": lambda two: moe_mlir.grouped_topk(Z, two, n_group=two, topk_group=two,
                                                      num_valid=two),
    "similarity_inform": lambda two: moe_mlir.similarity_inform(H, Z[None], causal=True, window=two),
    "mad_dispersion": lambda two: moe_mlir.mad_dispersion(Z, (Z[:, 0] > 0).long(), two),
    "dispatch": lambda two: moe_mlir.dispatch((Z[:, :1] > 0).long(), two, capacity=two),
    "densify": lambda two: moe_mlir.densify(Z[:, :1], (Z[:, :1] > 0).long(), two),
    "attention_entropy": lambda two: moe_mlir.attention_entropy(H[None], H[None], causal=True,
                                                                window=two),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_integers_of_numpy_are_integers(name):
    expected = CALLS[name](2)
    for two in INTEGERS:
        for _ in range(2):  # the second call is a remembered one
            for a, b in zip(_tuple(CALLS[name](two)), _tuple(expected), strict=True):
                assert torch.equal(a, b)


def _tuple(value):
    return value if isinstance(value, tuple) else (value,)


@pytest.mark.parametrize("value", [True, np.True_, 2.0, np.float64(2), torch.tensor(2), "2"])
def test_what_is_no_integer_is_refused(value):
    found = rf"expected 'k' to be an int, found {type(value).__name__}"
    with pytest.raises(TypeError, match=f"topk_renorm: {found}"):
        moe_mlir.topk_renorm(Z, value)
    with pytest.raises(TypeError, match=f"SMoE: {found}"):
        nn.SMoE(4, 8, value)


def test_modules_take_them_everywhere():
    two, sizes = np.int64(2), (np.int64(4), np.int32(8), np.int64(2))
    for router in (nn.SMoE(*sizes), nn.ACMoE(*sizes, mix=two), nn.XMoE(*sizes, d_embedding=two),
                   nn.DeepSeekV3Router(*sizes, n_group=two, topk_group=two),
                   nn.SimilaritySMoE(*sizes, causal=True, window=two), nn.SoftMoE(*sizes, slots=two),
                   nn.SMoEDropout(*sizes, k_max=np.int64(4), total_steps=two)):  # fmt: skip
        layer = nn.MoELayer(router, np.int64(6), shared=two)
        moe_mlir.update_routers(layer)
        y, routing = layer(H)
        assert y.shape == H.shape and type(router.k) is int, type(router).__name__
