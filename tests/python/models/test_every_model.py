"""hf.patch on every model of transformers with experts: its routers equal eager, or are named."""

import copy
import re
import warnings

import pytest
import torch
from support import Selections, tied_rows

from moe_mlir import hf
from moe_mlir.patching.kinds import OPEN, TIED
from moe_mlir.patching.raised_forward import RaisedForward
from moe_mlir.patching.router_modules import example_calls, is_router, selecting_method
from moe_mlir_bench.models import every_model, tiny_models

NO_ROUTER = set(every_model.WITHOUT_ROUTER)
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
    assert len(patched) >= len(FOLDERS) - 2, set(FOLDERS) - set(patched)


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
        if TIED in kind.shape:
            shape = inputs[0].shape[:-1]
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
        # A loop over experts reads nothing without tokens, and leaves no gradient.
        assert (ours is None) == (eager is None) or len(tied) == 0 and not ours.any()
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


def test_of_a_block_the_method_that_selects_is_replaced():
    model = tiny_models.build("dbrx")
    tokens = torch.randint(3, 60, (2, 5), generator=torch.Generator().manual_seed(0))
    expected = model(tokens).logits
    original = next(m for m in model.modules() if type(m).__name__ == "DbrxFFN")
    assert is_router(original) and hf.patch(model) == 2
    for patched in (model, copy.deepcopy(model)):
        block = next(m for m in patched.modules() if type(m).__name__ == "DbrxFFN")
        method = vars(block)["route_tokens_to_experts"]
        assert "forward" not in vars(block) and method.module is block
        torch.testing.assert_close(patched(tokens).logits, expected, rtol=1e-5, atol=1e-5)
        assert method.runner((torch.zeros(3, 8),), {}, []) is not None
    assert hf.unpatch(model) == 2 and "route_tokens_to_experts" not in vars(original)


class Block(torch.nn.Module):
    """Selects in a method, which tokens then go through."""

    def __init__(self):
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))

    def route(self, logits):
        return logits.softmax(-1).topk(2)

    def forward(self, x):
        gates, indices = self.route(x[:, :4])
        return sum(gates[:, i, None] * self.experts[i](x) * (indices[:, i, None] >= 0) for i in range(2))


class BlockThatRunsThem(Block):
    """As Block, but the method runs an expert, too."""

    def route(self, logits):
        gates, indices = logits.softmax(-1).topk(2)
        return gates * self.experts[0].weight[0, 0], indices


@pytest.mark.parametrize("kind, method", [(Block, "route"), (BlockThatRunsThem, "")])
def test_a_method_that_runs_experts_is_none_that_selects(kind, method, monkeypatch):
    for each in (Block, BlockThatRunsThem):
        monkeypatch.setattr(each, "__module__", "transformers.models.made_up")
    assert selecting_method(kind()) == method


def test_ids_of_other_tokens_than_the_states_run_the_model_s_own_code():
    """A graph of hash routing holds where there is an id for each hidden state."""
    model = tiny_models.build("deepseek_v4")
    router = next(m for m in model.modules() if type(m).__name__ == "DeepseekV4HashRouter")
    router.tid2eid.random_(0, 8, generator=torch.Generator().manual_seed(0))
    states, ids = torch.randn(2, 6, 32), torch.arange(12).view(2, 6)
    expected = [router(states, ids), router(states, ids.view(-1))]
    hf.patch(router)
    for given, outputs in zip((ids, ids.view(-1)), expected):
        for ours, eager in zip(router(states, given), outputs, strict=True):
            torch.testing.assert_close(ours, eager)
    assert router.forward.runner((states, ids), {}, []) is not None
    assert router.forward.runner((states, ids.view(-1)), {}, []) is None
