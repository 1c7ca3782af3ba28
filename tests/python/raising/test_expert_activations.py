"""What lies between the layers of imported experts, moved into the first of them."""

import pytest
import torch

import moe_mlir
from moe_mlir.experts import run_rows

E, K, D, H, T = 4, 2, 6, 5, 7


class Experts(torch.nn.Module):
    """Experts whose features go through a function of plain torch."""

    def __init__(self, function, features, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.w_in = torch.nn.Parameter(torch.randn(E, features, D).to(dtype))
        self.w_out = torch.nn.Parameter(torch.randn(E, D, H).to(dtype))

    def forward(self, x, gates, indices):
        def expert(rows, offsets):
            hidden = torch.ops.moe.grouped_linear(rows, self.w_in, None, offsets)
            return torch.ops.moe.grouped_linear(self.function(hidden), self.w_out, None, offsets)
        return run_rows(x, gates, indices, E, expert)


def gpt_oss(z):
    a, u = z[..., ::2].clamp(max=0.9), z[..., 1::2].clamp(-0.9, 0.9)
    return (u + 1) * (a * torch.sigmoid(a * 1.702))


def swiglu_in_float32(z):
    a, u = z.chunk(2, dim=-1)
    return (torch.nn.functional.silu(a.float()) * u.float()).to(z.dtype)


@pytest.mark.parametrize("function, features, dtype, fused", [
    (gpt_oss, 2 * H, torch.float32, ["silu", "alpha = 1.702", "interleaved", "limit = 0.9"]),
    (swiglu_in_float32, 2 * H, torch.bfloat16, ["silu", "concatenated"]),
    (lambda z: torch.relu(z).square(), H, torch.float32, ["relu2"]),
    (torch.nn.functional.gelu, H, torch.float32, ["<gelu>"]),
    (torch.tanh, H, torch.float32, None),
    (lambda z: torch.relu(z) + z.sum(), H, torch.float32, None),
])
def test_known_activations_are_fused(function, features, dtype, fused):
    model = Experts(function, features, dtype)
    x, gates = torch.randn(T, D).to(dtype), torch.rand(T, K)
    inputs = x, gates, torch.randint(-1, E, (T, K))
    module = moe_mlir.export(model, inputs)
    layers = [line for line in module.text.splitlines() if "moe.grouped_linear" in line]
    assert len(layers) == 2 and "rows(" in layers[0] and "rows(" not in layers[1]
    for part in fused or ["#moe.activation<none>"]:
        assert part in layers[0]
    if fused:
        with torch.no_grad():
            expected = model.double()(x.double(), gates.double(), inputs[2])
            found = moe_mlir.compile(model.to(dtype), inputs)(*inputs)
        scale = expected.abs().max()
        tolerance = 2e-6 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(found.double() / scale, expected / scale, rtol=0, atol=tolerance)
