"""hf.patch on every model of transformers with experts: its routers equal eager, or are named."""

import copy
import re
import warnings

import pytest
import torch
from support import Selections, tied_rows

from moe_mlir import hf
from moe_mlir.patching.kinds import OPEN
from moe_mlir.patching.raised_forward import RaisedForward
from moe_mlir.patching.router_modules import example_calls, is_router
from moe_mlir_bench.models import every_model

# Experts of these are chosen by the data set of an image, not by a router.
NO_ROUTER = {"vitpose_backbone"}
FOLDERS = every_model.folders()


def patch_with_reasons(model):
    """The number of patched routers, and the lines that name those which stay."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        count = hf.patch(model)
    return count, [line for w in found for line in str(w.message).splitlines() if " stay" in line]


@pytest.mark.drawn(8)
@pytest.mark.parametrize("folder", FOLDERS)
def test_each_router_is_replaced_or_named(folder):
    model = every_model.build(folder)
    routers = sum(map(is_router, model.modules()))
    count, lines = patch_with_reasons(model)
    named = sum(1 + int((re.search(r"and (\d+) other", line) or [0, 0])[1]) for line in lines)
    assert count + named >= max(routers, folder not in NO_ROUTER)
    assert hf.unpatch(model) == count


@pytest.mark.long
def test_most_models_have_their_routers_replaced():
    patched = [folder for folder in FOLDERS if patch_with_reasons(every_model.build(folder))[0]]
    assert len(patched) >= len(FOLDERS) - 6, set(FOLDERS) - set(patched)


def routers_of(folder, dtype):
    """One router of each class of the folder's model, with random weights."""
    torch.manual_seed(0)
    found = {}
    for module in every_model.build(folder).modules():
        if is_router(module) and type(module) not in found:
            found[type(module)] = router = module.to_empty(device="cpu")
            fill(router, dtype)
    return list(found.values())


@torch.no_grad()
def fill(router, dtype):
    for name, tensor in (*router.named_parameters(), *router.named_buffers()):
        if not tensor.is_floating_point():
            tensor.zero_()
        elif tensor.dim() > 1:
            tensor.copy_(torch.randn(tensor.shape) * tensor.shape[-1] ** -0.5)
        else:
            tensor.copy_(torch.randn(tensor.shape) * 0.2 + ("norm" in name or "scale" in name))
    if dtype != torch.float32:
        router.to(dtype)


def example(kinds, tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = []
    for kind in kinds:
        shape = [tokens if size == OPEN and i == kind.shape.index(OPEN) + len(kind.shape) - 2
                 else 2 if size == OPEN else size for i, size in enumerate(kind.shape)]
        shape = [tokens, *kind.shape[1:]] if len(kind.shape) == 2 else shape
        if kind.dtype.is_floating_point:
            inputs.append(torch.randn(shape, generator=generator).to(kind.dtype))
        else:
            inputs.append(torch.randint(0, 3, shape, generator=generator))
    return inputs


def run(router, inputs, rows_of=None):
    """(leaves of the results, their structure, gradients, rows with ties)."""
    router.zero_grad()
    inputs = [x.clone().requires_grad_(x.is_floating_point() and x.dim() > 1) for x in inputs]
    with Selections(settle=True) as selections:
        leaves, spec = torch.utils._pytree.tree_flatten(router(*inputs))
    rows = inputs[0].shape[:-1].numel()
    tied = tied_rows(selections, rows) if rows_of is None else rows_of
    total = sum((cotangent(x, tied) * x.float()).sum() for x in leaves
                if isinstance(x, torch.Tensor) and x.requires_grad)
    if isinstance(total, torch.Tensor):
        total.backward()
    weights = [p.grad for p in router.parameters()]
    return leaves, spec, [x.grad for x in inputs] + weights, tied


def by_row(x, rows):
    """A result as [rows, ..]; None where it has no row a token."""
    if x.dim() > 2 and x.shape[:2].numel() == rows and x.shape[0] != rows:
        x = x.flatten(0, 1)
    return x if x.dim() and x.shape[0] == rows else None


def cotangent(x, tied):
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(x.shape, generator=generator)
    rows = by_row(weight, len(tied))
    if rows is None:
        return weight * (not tied.any())
    return rows.masked_fill(tied.view(-1, *[1] * (rows.dim() - 1)), 0.0).view(x.shape)


def check_equal(found, expected, tolerance):
    leaves, spec, gradients, _ = found
    exact, exact_spec, exact_gradients, tied = expected
    assert spec == exact_spec
    for ours, eager in zip(leaves, exact, strict=True):
        if not isinstance(eager, torch.Tensor):
            assert tied.any() or ours == eager
            continue
        assert ours.dtype == eager.dtype and ours.shape == eager.shape
        ours, eager = (by_row(x.detach(), len(tied)) for x in (ours, eager))
        if eager is not None:
            torch.testing.assert_close(ours[~tied], eager[~tied], rtol=tolerance, atol=tolerance)
    for ours, eager in zip(gradients, exact_gradients, strict=True):
        assert (ours is None) == (eager is None)
        if eager is not None and eager.numel():
            scale = eager.abs().max().clamp(min=1e-6)
            assert (ours - eager).abs().max() / scale < 10 * tolerance


@pytest.mark.drawn(10)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("folder", [f for f in FOLDERS if f not in NO_ROUTER])
def test_routers_equal_eager(folder, dtype):
    # Weights are the model's type, or f32 as since transformers 5.24; some take one of them.
    kinds = dict.fromkeys((dtype, torch.float32))
    for routers in zip(*(routers_of(folder, kind) for kind in kinds)):
        assert sum(check_router(router, dtype) for router in routers)


def check_router(router, dtype) -> int:
    """Compares a router with its patched copy; returns in how many calls."""
    patched = copy.deepcopy(router)
    count, lines = patch_with_reasons(patched)
    if not count:
        return len(lines)
    calls, taken = list(example_calls(router, dtype)), 0
    for training in (False, True):
        router.train(training)
        patched.train(training)
        for tokens in (7, 1, 0):
            taken += check_calls(router, patched, calls, tokens,
                                 1e-5 if dtype == torch.float32 else 0.01)
    return taken


def check_calls(router, patched, calls, tokens, tolerance):
    """Compares the calls that the router takes; returns how many."""
    taken = 0
    for call in calls:
        inputs = example(call, tokens, seed=tokens)
        try:
            torch.manual_seed(1)
            expected = run(router, inputs)
        except (RuntimeError, ValueError, TypeError, IndexError):
            continue  # of another rank, or without an input that it needs
        torch.manual_seed(1)
        check_equal(run(patched, inputs, expected[3]), expected, tolerance)
        taken += 1
    return taken


def test_a_call_runs_the_graph():
    """Calls that the trace at the time of the patch was not of, too."""
    (router,) = routers_of("qwen3_next", torch.float32)
    hf.patch(router)
    assert isinstance(router.forward, RaisedForward)
    for shape in ((5, 2048), (1, 2048), (0, 2048), (2, 3, 2048)):
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                assert router.forward.runner((torch.zeros(shape),), {}, []) is not None
