"""The torch ops inside of moe_mlir.simulate: the GPU's kernels on CPU tensors."""

import math

import pytest
import torch

import moe_mlir
from moe_mlir import reference

pytest.importorskip("moe_mlir.sim")


def tokens(batch, n, width, experts, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    u = (math.sqrt(8 / width) * torch.randn(batch, n, width, generator=g)).to(dtype)
    return u, torch.randn(batch, n, experts, generator=g).softmax(-1).to(dtype)


def check_similarity(u, e, **options):
    """Against the reference in float64, under two schedules."""
    wide = {k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v
            for k, v in options.items()}
    expected, expected_lse = reference.similarity_inform(u.double(), e.double(), **wide)
    for launch in ({"seed": 1}, {"seed": 2, "policy": 1}):
        with moe_mlir.simulate(**launch) as simulation:
            p, lse = moe_mlir.similarity_inform(u, e, **options)
        assert simulation.reports or not u.numel()
        torch.testing.assert_close(p.double(), expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [True, False])
def test_similarity_inform(dtype, causal):
    u, e = tokens(2, 70, 40, 8, dtype)
    check_similarity(u, e, causal=causal)


def test_similarity_inform_with_masks_windows_and_temperature():
    u, e = tokens(2, 40, 12, 4)
    mask = torch.rand(2, 40, generator=torch.Generator().manual_seed(3)) > 0.3
    u[~mask] = math.nan
    check_similarity(u, e, causal=True, mask=mask, window=9, tau=2.5)


def test_similarity_inform_with_cached_keys_and_leading_dims():
    u, _ = tokens(6, 9, 12, 4)
    uk, e = tokens(6, 30, 12, 4, seed=1)
    check_similarity(u.view(2, 3, 9, 12), e.view(2, 3, 30, 4), keys=uk.view(2, 3, 30, 12),
                     causal=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_similarity_inform_with_a_matrix_and_a_learned_temperature(dtype):
    u, e = tokens(2, 40, 16, 4, dtype)
    ws = 0.3 * torch.randn(16, 16, generator=torch.Generator().manual_seed(5))
    check_similarity(u, e, causal=True, weight=ws.to(dtype), tau=torch.tensor(1.7))


def test_similarity_inform_restricted_by_entropy():
    u, e = tokens(1, 40, 16, 4)
    check_similarity(u, e, causal=False, restrict="entropy")


def posterior_operands(dtype=torch.float32, n=40, nk=40):
    g = torch.Generator().manual_seed(0)
    batch, heads, width, d, experts = 2, 3, 8, 24, 4

    def normal(*shape, scale=1.0):
        return (scale * torch.randn(*shape, generator=g)).to(dtype)

    return dict(
        q=normal(batch, heads, n, width),
        k=normal(batch, heads, nk, width),
        attn_output=normal(batch, n, d, scale=0.3),
        probs=normal(batch, nk, experts).softmax(-1),
        v=normal(batch, heads, nk, width, scale=0.3),
        wo=normal(heads, d, width, scale=0.3),
    )


@pytest.mark.parametrize("head_mode", ["min_entropy", "all", 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_posterior(head_mode, dtype):
    options = dict(causal=True, head_mode=head_mode, sigma=1.5)
    operands = posterior_operands(dtype)
    wide = {name: tensor.double() for name, tensor in operands.items()}
    expected, expected_head = reference.attention_posterior(**wide, **options)[:2]
    for launch in ({"seed": 1}, {"seed": 2, "policy": 1}):
        with moe_mlir.simulate(**launch):
            p, head = moe_mlir.attention_posterior(**operands, **options)
        assert torch.equal(head, expected_head)
        torch.testing.assert_close(p.double(), expected, rtol=0, atol=2e-5)


def test_attention_posterior_with_masks_biases_and_given_means():
    operands = posterior_operands(n=20, nk=50)
    g = torch.Generator().manual_seed(1)
    v, wo = operands.pop("v"), operands.pop("wo")
    operands["projected_v"] = torch.einsum("bhjc,hdc->bhjd", v, wo)
    operands["bias"] = torch.randn(1, 3, 20, 50, generator=g)
    mask = torch.rand(2, 50, generator=g) > 0.2
    options = dict(causal=True, head_mode="all", window=30, exclude_self=True)
    wide = {name: tensor.double() for name, tensor in operands.items()}
    expected, _ = reference.attention_posterior(**wide, mask=mask, **options)[:2]
    with moe_mlir.simulate():
        p, _ = moe_mlir.attention_posterior(**operands, mask=mask, **options)
    torch.testing.assert_close(p.double(), expected, rtol=0, atol=2e-5)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("chip", ["sm_80", "sm_90", "sm_90a"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_attention_of_any_chip_and_type(chip, dtype):
    """Values, sums of rows and gradients; widths of whole and of half fragments."""
    for n, nk, width, values in ((40, 40, 44, 44), (9, 70, 16, 8)):
        g = torch.Generator().manual_seed(n)
        q, k, v = (torch.randn(2, 3, length, w, generator=g).to(dtype).requires_grad_()
                   for length, w in ((n, width), (nk, width), (nk, values)))
        mask = torch.rand(2, nk, generator=g) > 0.2
        wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
        expected = reference.attention(*wide, causal=True, mask=mask)
        weight = torch.randn(expected[0].shape, generator=g)
        gradients = torch.autograd.grad((expected[0] * weight).sum(), wide)
        with moe_mlir.simulate(chip=chip):
            found = moe_mlir.attention(q, k, v, causal=True, mask=mask)
            ours = torch.autograd.grad((found[0] * weight).sum(), (q, k, v))
        # Results are rounded once to their type; 16-bit gradients start from a rounded output.
        ulp = torch.finfo(dtype).eps
        for a, b, atol in zip(found, expected, (2e-5 + 4 * ulp, 2e-5, 2e-5), strict=True):
            torch.testing.assert_close(a.double(), b, rtol=0, atol=atol)
        for a, b in zip(ours, gradients, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=0, atol=5e-5 + 32 * ulp)


def test_selection_runs_on_the_device_too():
    z = torch.randn(20, 16, generator=torch.Generator().manual_seed(0))
    gates, indices = moe_mlir.topk_renorm(z, 2)
    with moe_mlir.simulate(chip="sm_80") as simulation:
        device_gates, device_indices = moe_mlir.topk_renorm(z, 2)
    assert torch.equal(indices, device_indices)
    torch.testing.assert_close(device_gates, gates, rtol=0, atol=1e-6)
    assert [report.kernel for report in simulation.reports] == ["topk_renorm_kernel"]


def test_nothing_is_simulated_outside_of_the_block():
    z = torch.randn(4, 8)
    with moe_mlir.simulate() as simulation:
        pass
    moe_mlir.topk_renorm(z, 2)
    assert not simulation.reports


def test_nested_simulations_are_apart():
    z = torch.randn(4, 8)
    with moe_mlir.simulate(chip="sm_80") as outer:
        with moe_mlir.simulate(chip="sm_90") as inner:
            moe_mlir.topk_renorm(z, 2)
        moe_mlir.topk_renorm(z, 2)
    assert len(outer.reports) == len(inner.reports) == 1


def test_an_unknown_chip_is_an_error():
    with pytest.raises(ValueError, match="expected a chip among"), moe_mlir.simulate(chip="sm_12"):
        pass


TWO_KERNELS = """
func.func @attend_to_logits(%x: tensor<?x16xf32>, %w: tensor<8x16xf32>)
    -> tensor<1x1x?x8xf32> {
  %c0 = arith.constant 0 : index
  %n = tensor.dim %x, %c0 : tensor<?x16xf32>
  %z0 = tensor.empty(%n) : tensor<?x8xf32>
  %z = moe.router_logits ins(%x, %w : tensor<?x16xf32>, tensor<8x16xf32>)
      outs(%z0 : tensor<?x8xf32>) -> tensor<?x8xf32>
  %q = tensor.expand_shape %z [[0, 1, 2], [3]] output_shape [1, 1, %n, 8]
      : tensor<?x8xf32> into tensor<1x1x?x8xf32>
  %v = tensor.expand_shape %z [[0, 1], [2]] output_shape [1, %n, 8]
      : tensor<?x8xf32> into tensor<1x?x8xf32>
  %o0 = tensor.empty(%n) : tensor<1x1x?x8xf32>
  %l0 = tensor.empty(%n) : tensor<1x1x?xf32>
  %r:2 = moe.softmax_mix ins(%q, %q : tensor<1x1x?x8xf32>, tensor<1x1x?x8xf32>)
      values(%v : tensor<1x?x8xf32>)
      outs(%o0, %l0 : tensor<1x1x?x8xf32>, tensor<1x1x?xf32>)
      -> tensor<1x1x?x8xf32>, tensor<1x1x?xf32>
  return %r#0 : tensor<1x1x?x8xf32>
}
"""


def test_kernels_meet_in_the_workspace():
    """Keys come from every block of the first kernel."""
    from moe_mlir.sim.simulation import device_functions

    (function,) = device_functions(TWO_KERNELS, "sm_90").values()
    assert len(function.plan.kernel_names) == 2
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(100, 16, generator=g), torch.randn(8, 16, generator=g) / 4
    out = torch.empty(1, 1, 100, 8)
    for launch in ({"seed": 1}, {"seed": 2, "policy": 1}):
        reports = function(x, w, out.fill_(77), **launch)
        assert len(reports) == 2 and all(reports)
        z = x.double() @ w.double().T
        expected = (z @ z.T).softmax(-1) @ z
        torch.testing.assert_close(out[0, 0].double(), expected, rtol=0, atol=1e-4)
