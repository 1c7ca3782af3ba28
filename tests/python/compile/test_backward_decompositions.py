"""The gradients' kernels against their meaning in linalg, which shares none of their algebra."""

import pytest
import torch

import moe_mlir
from moe_mlir._native import native
from moe_mlir.compiler.jit import compile_cached
from moe_mlir.ops import _kernel
from moe_mlir.ops._kernel import Kernel, Tensor, boolean, enum

MASK = torch.rand(2, 23, generator=torch.Generator().manual_seed(0)) > 0.3


def leaf(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def experts(*shape, seed=0):
    return leaf(*shape, seed=seed).detach().softmax(-1).requires_grad_()


def run_decomposed(kernel, tensors, like):
    module = native().Module.parse(kernel.text())
    module.run("moe-decompose")
    assert f"moe.{kernel.op}" not in module.text()
    results = [torch.empty_like(x) for x in like]
    compile_cached(module.text()).function(kernel.op)(*tensors, *results)
    return results


def assert_agree(kernel, tensors, actual):
    for tensor, a, b in zip(
        kernel.results, actual, run_decomposed(kernel, tensors, actual), strict=True
    ):
        error = float((a - b).abs().max()) if a.numel() else 0.0
        # Both are sums of at most some hundred f32 terms, which cancel in the sums over all.
        tolerance = 1e-5 if tensor.dims else 1e-4
        assert error <= tolerance * max(float(b.abs().max()), 1e-3), f"{tensor.name}: {error:.2e}"


@pytest.fixture
def both(monkeypatch):
    """Runs every backward kernel a second time, decomposed; lists their names."""
    compared = []
    call = Kernel.__call__

    def run(self, *tensors):
        results = call(self, *tensors)
        if self.op.endswith("_backward"):
            assert_agree(self, tensors, results)
            compared.append(self.op)
        return results

    monkeypatch.setattr(_kernel.Kernel, "__call__", run)
    return compared


@pytest.mark.parametrize(
    "options",
    [
        dict(causal=True, ws=True, mask=MASK, tau=torch.tensor(1.4), window=9),
        dict(causal=True, uk=True, mask=MASK),
        dict(causal=False, restrict="entropy"),
    ],
    ids=["ws-mask-tau-window", "cached-keys", "entropy"],
)
def test_similarity_inform(both, options):
    options = dict(options)
    n = 7 if options.pop("uk", False) else 23
    operands = dict(h=leaf(2, n, 6), probs=experts(2, 23, 4, seed=1))
    if n != 23:
        operands["keys"] = leaf(2, 23, 6, seed=2)
    if options.pop("ws", False):
        operands["weight"] = leaf(6, 6, seed=4)
    if "tau" in options:
        options["tau"] = options["tau"].clone().requires_grad_()
    p, lse = moe_mlir.similarity_inform(**operands, **options)
    ((p * p).sum() + torch.where(lse.isfinite(), lse, 0.0).sum()).backward()
    assert both == ["similarity_inform_backward"]


@pytest.mark.parametrize("mode,means", [("min_entropy", False), ("all", False), (1, True)])
def test_attention_posterior(both, mode, means):
    values = (
        dict(projected_v=leaf(2, 3, 23, 8, seed=4))
        if means
        else dict(v=leaf(2, 3, 23, 5, seed=4), wo=leaf(3, 8, 5, seed=5))
    )
    if mode == "all":
        prior = torch.rand(2, 23, 3, generator=torch.Generator().manual_seed(6)) + 0.1
        values["head_prior"] = prior.requires_grad_()
    p, _ = moe_mlir.attention_posterior(
        leaf(2, 3, 23, 6), leaf(2, 3, 23, 6, seed=1), leaf(2, 23, 8, seed=2),
        experts(2, 23, 4, seed=3), causal=True, mask=MASK, exclude_self=True,
        sigma=torch.tensor(1.3, requires_grad=True), head_mode=mode,
        bias=leaf(1, 3, 23, 23, seed=7), **values,
    )  # fmt: skip
    (p * p).sum().backward()
    assert both == ["attention_posterior_backward"]


@pytest.mark.parametrize("renorm", (True, False))
@pytest.mark.parametrize("score", ("softmax", "sigmoid", "sqrtsoftplus", "none"))
def test_topk_renorm(score, renorm):
    """Every score function, with -1 for a choice that is no expert."""
    gates = experts(9, 3).detach()
    indices = torch.stack([torch.randperm(12)[:3] for _ in range(9)]).to(torch.int32)
    indices[::4, 1] = -1
    x = leaf(9, 12, seed=1).detach() * 8
    kernel = Kernel(
        "topk_renorm_backward",
        (
            Tensor("dgates", ("n", 3), torch.float32),
            Tensor("gates", ("n", 3), torch.float32),
            Tensor("indices", ("n", 3), torch.int32),
            Tensor("scores", ("n", 12), torch.float32, clause="scores"),
        ),
        (Tensor("dscores", ("n", 12), torch.float32),),
        (
            ("kind", enum("score_kind", "probs" if score == "none" else "logits")),
            ("score", enum("score_function", score)),
            ("renorm", boolean(renorm)),
        ),
    )
    x = x.softmax(-1) if score == "none" else x
    if score == "softmax" and not renorm:
        # The gates of the forward: they are the softmax, which the kernel relies on.
        gates = x.softmax(-1).gather(1, indices.clamp(min=0).long())
    operands = (leaf(9, 3, seed=2).detach(), gates, indices, x)
    assert_agree(kernel, operands, kernel(*operands))
