"""A call of every op `torch.ops.moe.<name>`, those of gradients included."""

import torch
from op_judge import random
from torch.utils._python_dispatch import TorchDispatchMode

import moe_mlir.experts
import moe_mlir.packing  # noqa: F401  both have ops, too
from moe_mlir.experts.quantized_weight import quantized
from moe_mlir.ops._panels import pack_weight
from moe_mlir.ops._quantized import Quantization


def normal(*shape, seed=0, grad=False):
    x = torch.randn(shape, generator=random(seed))
    return x.requires_grad_() if grad else x


def probabilities(*shape, seed=0):
    return normal(*shape, seed=seed).softmax(-1).requires_grad_()


MASK = torch.rand(2, 6, generator=random(9)) > 0.3
CALLS = {
    "topk_renorm": (normal(2, 6, 8, grad=True), 2, "logits", False, 2.0, MASK, torch.int32),
    "router_logits": (normal(6, 4, grad=True), normal(3, 4, grad=True), normal(3, grad=True)),
    "cosine_logits": (
        normal(6, 4, grad=True), normal(3, 4, grad=True), normal(5, 3, grad=True),
        torch.tensor(0.7, requires_grad=True), 1.0, 1e-4, True, True,
    ),
    "hyper_router": (
        normal(3, grad=True), normal(4, 3), normal(4), normal(10, 4), normal(10), 2,
    ),
    "ac_logits": (
        normal(6, 4, grad=True), torch.rand(3, 4), torch.arange(12).view(6, 2) % 4 - 1,
        normal(3, 4, grad=True), torch.rand(6, 2), normal(3, grad=True),
    ),
    "similarity_inform": (
        normal(2, 6, 5, grad=True), probabilities(2, 6, 4), None, normal(5, 5, grad=True), MASK,
        torch.tensor(1.5, requires_grad=True), 1.0, True, 4, "all", "ieee",
    ),
    "attention_posterior": (
        normal(2, 3, 6, 4, grad=True), normal(2, 3, 6, 4, seed=1, grad=True),
        normal(2, 6, 5, grad=True), probabilities(2, 6, 4), None,
        normal(2, 3, 6, 4, seed=2, grad=True), normal(3, 5, 4, grad=True), None, None, MASK, MASK,
        normal(2, 3, 6), normal(2, 3, 6).abs(), None, 1.3, None, "min_entropy", None, "sequence",
        True, None, False, "ieee",
    ),
    "attention": (
        normal(2, 3, 6, 4, grad=True), normal(2, 3, 6, 4, seed=1, grad=True),
        normal(2, 3, 6, 5, seed=2, grad=True), normal(3, 6, 6, seed=3, grad=True), MASK, None,
        True, 4, False, "ieee",
    ),
    "mad_dispersion": (normal(6, 4, grad=True), torch.arange(6) % 3, 3, "mad", MASK[0]),
    "attention_entropy": (
        normal(2, 3, 6, 4), normal(2, 3, 6, 4), normal(6, 6), MASK, None, True, 4, False, "ieee",
    ),
    "dispersion_weights": (torch.rand(3, 4), torch.arange(3), 1e-4, 10.0, "feature", False),
    "adjacency_gate": (probabilities(6, 4), torch.rand(4, 4), 0.1, "literal"),
    "adjacency_update": (torch.rand(4, 4), torch.arange(6)[:, None] % 4, 0.9, "row", True, MASK[0]),
}  # fmt: skip

# Ops around the routers of `Model` below.
SUPPORT_CALLS = {
    "grouped_topk": (
        normal(2, 6, 8, grad=True), 2, normal(8), None, MASK, None, "sigmoid", 4, 2, "top2", True,
        0.0, 2.5, torch.int64,
    ),
    "threshold_renorm": (
        probabilities(2, 6, 8), torch.tensor(0.1, requires_grad=True), 1.0, True, MASK,
    ),
    "densify": (normal(6, 2, grad=True), torch.arange(12).view(6, 2) % 5, 5),
    "make_finite": (normal(6, 4, grad=True), "tensor"),
    "dispatch": (
        torch.arange(12).view(6, 2) % 5, 5, 2, None, MASK[0], None, None, None, 1,
    ),
    "combine": (
        normal(7, 4, grad=True), normal(6, 2, seed=1, grad=True), torch.arange(12).view(6, 2) % 7,
        normal(6, 4, seed=2, grad=True),
    ),
    "soft_dispatch": (
        normal(2, 6, 4, grad=True), normal(4, 3, 2, seed=1, grad=True),
        torch.tensor(1.5, requires_grad=True), 1.0, 1e-6, MASK, normal(2, 6, 4, seed=2),
    ),
    "balance_loss": (probabilities(6, 4), torch.arange(12).view(6, 2) % 4, MASK[0], "tokens"),
    "z_loss": (normal(6, 4, grad=True), MASK[0]),
    "bias_update": (normal(4), torch.arange(4), 0.1),
}  # fmt: skip
EXPERT_CALLS = {
    "token_rows": (torch.tensor([[0, 3], [-1, 2]]),),
    "grouped_linear": (
        normal(6, 4, grad=True), normal(3, 5, 4, seed=1, grad=True), normal(3, 5, seed=2, grad=True),
        torch.tensor([0, 2, 2, 6]),
    ),
    "grouped_outer": (normal(6, 5), normal(4, 3, seed=1), torch.tensor([0, 2, 2, 5]),
                      torch.arange(6) % 4),
    "run_experts": (
        normal(6, 4, grad=True), normal(6, 2, seed=1, grad=True), torch.arange(12).view(6, 2) % 4 - 1,
        normal(3, 6, 4, seed=2, grad=True), normal(3, 6, seed=3, grad=True),
        normal(3, 5, 3, seed=4, grad=True), None, False, "silu", 1.5, "interleaved", "clamp", 0.9, None,
        0.5,
    ),
}  # fmt: skip
FORWARD_CALLS = CALLS | SUPPORT_CALLS | EXPERT_CALLS


def codes(*shape, seed=0, halves=False, symmetric=False):
    weight = quantized(normal(*shape, seed=seed), Quantization("int4", 8), halves=halves,
                       symmetric=symmetric)
    return weight.codes, weight.scales, weight.zeros


# Weights in panels: whose shapes depend on their dtype.
PACKED_CALLS = {
    "packed_linear": (
        normal(2, 3, 4, grad=True), pack_weight(normal(1, 20, 4, seed=1), halves=False),
        normal(20, seed=2, grad=True), 20,
    ),
    "quantized_linear": (
        normal(2, 3, 12, grad=True), *codes(20, 12, seed=1), normal(20, seed=2, grad=True), 20,
        "int4", 8, "int8",
    ),
    "run_quantized_experts": (
        normal(6, 12, grad=True), normal(6, 2, seed=1, grad=True),
        torch.arange(12).view(6, 2) % 4 - 1,
        *codes(3, 20, 12, seed=2, halves=True), normal(3, 20, seed=3, grad=True),
        *codes(3, 12, 10, seed=4, symmetric=True), None, 10, "int4", 8, "none", None, None, "silu", 1.5,
        "concatenated", "clamp", 0.9, None, 0.5,
    ),
}


class _Backwards(TorchDispatchMode):
    """The calls of ops that are gradients of others."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "moe" and func._opname.endswith("_backward"):
            self.calls.setdefault(func._opname, tuple(map(_own, args)))
        return func(*args, **(kwargs or {}))


def _own(x):
    return x.detach().clone() if isinstance(x, torch.Tensor) else x


def run(name, call):
    results = getattr(torch.ops.moe, name)(*call)
    return results if isinstance(results, tuple) else (results,)


def floats(results):
    return [x for x in results if x.is_floating_point()]


def backward_calls():
    calls = _Backwards()
    for name, call in (FORWARD_CALLS | PACKED_CALLS).items():
        leaves = [x for x in call if isinstance(x, torch.Tensor) and x.requires_grad]
        outputs = [x for x in run(name, call) if x.requires_grad]
        with calls:
            if outputs:
                torch.autograd.grad(
                    outputs, leaves, [normal(*x.shape, seed=4) for x in outputs], allow_unused=True
                )
    return calls.calls


ALL_CALLS = FORWARD_CALLS | PACKED_CALLS | backward_calls()
