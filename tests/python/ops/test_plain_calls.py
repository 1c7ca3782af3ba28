"""Repeated calls on plain tensors, which run their kernel without what Python did at first."""

import gc
import importlib
import resource
import threading

import pytest
import torch
from op_judge import random
from torch.utils._python_dispatch import TorchDispatchMode

import moe_mlir
from moe_mlir.ops._kernel import Kernel
from moe_mlir.ops._library import _callable
from moe_mlir.ops._plain_calls import PlainCalls


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=random(seed))


@pytest.fixture
def runs(monkeypatch):
    """The calls that went through Python, by their arguments."""
    seen, run = [], PlainCalls.run

    def record(self, args):
        seen.append(args)
        return run(self, args)

    monkeypatch.setattr(PlainCalls, "run", record)
    return seen


def probabilities(*shape, seed=0):
    return normal(*shape, seed=seed).softmax(-1)


# Calls of which all that Python does is to choose a kernel; sizes of no other test.
CALLS = {
    "topk_renorm": lambda seed: ((normal(2, 3, 11, seed=seed), 2), {}),
    "grouped_topk": lambda seed: ((normal(5, 12, seed=seed), 3), dict(n_group=4, topk_group=2)),
    "router_logits": lambda seed: (
        (normal(5, 7, seed=seed), normal(3, 7, seed=seed + 1), normal(3, seed=seed + 2)), {}),
    "similarity_inform": lambda seed: (
        (normal(2, 5, 7, seed=seed), probabilities(2, 5, 3, seed=seed)), dict(causal=True)),
    "mad_dispersion": lambda seed: (
        (normal(9, 7, seed=seed), torch.randint(3, (9,), generator=random(seed)), 3), {}),
    "adjacency_gate": lambda seed: (
        (probabilities(5, 3, seed=seed), torch.rand(3, 3, generator=random(seed))), {}),
    "combine": lambda seed: (
        (normal(9, 7, seed=seed), probabilities(5, 2, seed=seed),
         torch.randint(9, (5, 2), generator=random(seed))), {}),
    "make_finite": lambda seed: ((normal(5, 13, seed=seed),), {}),
    "dispersion_weights": lambda seed: (
        (torch.rand(3, 7, generator=random(seed)), torch.arange(3)), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_the_second_call_runs_the_kernel_at_once(name, runs):
    op = getattr(moe_mlir, name)
    first, options = CALLS[name](0)
    op(*first, **options)
    for seed in (10, 20):
        args, options = CALLS[name](seed)
        known = len(runs)
        with torch.no_grad():
            found = op(*args, **options)
        assert len(runs) == known
        # Through the dispatcher, which knows nothing of the public function's calls.
        with torch.enable_grad():
            wanted = op(*(x.requires_grad_() if is_float(x) else x for x in args), **options)
        pairs = zip(found, wanted) if isinstance(found, tuple) else [(found, wanted)]
        for a, b in pairs:
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
            assert not a.requires_grad and torch.equal(a, b)


def test_the_second_call_through_the_dispatcher_runs_the_kernel_at_once(runs):
    """As compilers call an op, with and without autograd's layer."""
    op = torch.ops.moe.make_finite.default
    for change in (torch.no_grad, torch.inference_mode):
        with change():
            x = normal(6, 17, seed=1)
            x[0, 0] = float("nan")
            wanted = op(x, "row")
            known = len(runs)
            found = op(x.clone(), "row")
        assert len(runs) == known and torch.equal(found, wanted)
    assert len(runs) == 1


def test_a_gradient_in_part_absent_is_replayed(monkeypatch):
    """Where an op has no gradient, its backward returns a tensor without elements."""

    def prepare(seed):
        leaves = [normal(2, 5, 9, seed=seed), probabilities(2, 5, 3, seed=seed)]
        leaves = [x.requires_grad_() for x in leaves]
        p, _ = moe_mlir.similarity_inform(*leaves, causal=True)
        return p, leaves, normal(*p.shape, seed=seed + 1)

    torch.autograd.grad(*prepare(0))
    p, leaves, dp = prepare(10)
    wanted = torch.autograd.grad(p, leaves, dp, create_graph=True)
    with monkeypatch.context() as patch:
        patch.setattr(Kernel, "__call__", None)
        found = torch.autograd.grad(p, leaves, dp)
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape and torch.equal(a, b)


def is_float(x):
    return isinstance(x, torch.Tensor) and x.is_floating_point()


@pytest.mark.parametrize("change", [
    dict(scores=normal(2, 11)),
    dict(scores=normal(3, 10)),
    dict(scores=normal(3, 11).bfloat16()),
    dict(scores=normal(11, 3).mT),
    dict(k=3),
    dict(kind="probs"),
    dict(renorm=False),
    dict(route_scale=0.5),
    dict(mask=torch.tensor([True, False, True])),
    dict(index_dtype=torch.int32),
])  # fmt: skip
def test_every_argument_is_part_of_the_form(change):
    call = dict(scores=normal(3, 11), k=2)
    moe_mlir.topk_renorm(**call)
    call |= change
    options = dict(kind="logits", renorm=True, route_scale=1.0, mask=None, index_dtype=torch.int64)
    options |= call
    wanted = torch.ops.moe.topk_renorm(*(options[x] for x in (
        "scores", "k", "kind", "renorm", "route_scale", "mask", "index_dtype")))  # fmt: skip
    for a, b in zip(moe_mlir.topk_renorm(**call), wanted, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def test_a_string_that_was_made_is_the_one_in_the_source(runs):
    z = normal(3, 17)
    wanted = moe_mlir.topk_renorm(z, 2, kind="probs")
    found = moe_mlir.topk_renorm(z, 2, kind="".join(["pro", "bs"]))
    assert len(runs) == 1 and torch.equal(found[0], wanted[0])


def test_arguments_that_share_memory_are_a_form_of_their_own():
    u, other = normal(1, 6, 9), normal(1, 6, 9, seed=1)
    e = probabilities(1, 6, 3)
    options = dict(causal=False)
    same = moe_mlir.similarity_inform(u, e, keys=u, **options)[0]
    apart = moe_mlir.similarity_inform(u, e, keys=other, **options)[0]
    wanted = moe_mlir.similarity_inform(u.clone().requires_grad_(), e, keys=other, **options)[0]
    assert torch.equal(apart, wanted) and not torch.equal(same, apart)
    again = moe_mlir.similarity_inform(other, e, keys=other, **options)[0]
    assert torch.equal(again, moe_mlir.similarity_inform(other, e, keys=other.clone(), **options)[0])


def test_calls_that_do_more_than_a_kernel_stay_in_python():
    """Their results are made anew of the kernel's: counts become int64."""
    for seed in range(3):
        p = probabilities(5, 19, seed=seed)
        gates, count = moe_mlir.threshold_renorm(p, 0.05)
        assert torch.equal(count, (gates > 0).sum(-1)) and count.dtype == torch.int64


def test_wrong_arguments_are_found_after_right_ones():
    mask = torch.ones(3, dtype=torch.bool)
    moe_mlir.topk_renorm(normal(3, 11), 2, mask=mask)
    with pytest.raises(ValueError, match="expected 'mask' to have shape"):
        moe_mlir.topk_renorm(normal(4, 11), 2, mask=mask)
    with pytest.raises(TypeError, match="expected 'k' to be an int, found bool"):
        moe_mlir.topk_renorm(normal(3, 11), True, mask=mask)
    with pytest.raises((RuntimeError, NotImplementedError)):
        moe_mlir.topk_renorm(normal(3, 11).to_sparse(), 2, mask=mask)


def test_gradients_and_modes_see_the_op():
    z = normal(3, 11)
    gates, _ = moe_mlir.topk_renorm(z, 2)

    assert moe_mlir.topk_renorm(z.clone().requires_grad_(), 2)[0].grad_fn is not None
    with torch.inference_mode():
        assert moe_mlir.topk_renorm(z, 2)[0].is_inference()
    with Names() as names:
        assert torch.equal(moe_mlir.topk_renorm(z, 2)[0], gates)
    assert "moe.topk_renorm.default" in names.seen
    with moe_mlir.simulate() as simulation:
        torch.testing.assert_close(moe_mlir.topk_renorm(z, 2)[0], gates)
    assert simulation.reports
    graph = torch.fx.experimental.proxy_tensor.make_fx(
        lambda x: moe_mlir.topk_renorm(x, 2)[0], pre_dispatch=True
    )(z)
    assert any("topk_renorm" in str(node.target) for node in graph.graph.nodes)


class Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_parameter_is_plain_only_without_gradients(runs):
    weight = torch.nn.Parameter(normal(3, 23))
    h = normal(5, 23)
    assert moe_mlir.router_logits(h, weight).grad_fn is not None
    known = len(runs)  # what autograd's layer runs is plain
    with torch.no_grad():
        moe_mlir.router_logits(h, weight)
        moe_mlir.router_logits(h, weight)
    assert len(runs) == known + 1


def test_results_live_as_long_as_they_are_held():
    z = normal(4, 11)
    first = moe_mlir.topk_renorm(z, 2)
    copies = [x.clone() for x in first]
    for seed in range(100):
        moe_mlir.topk_renorm(normal(4, 11, seed=seed), 2)
    assert all(torch.equal(a, b) for a, b in zip(first, copies))
    assert first[0].data_ptr() % 64 == 0
    first[0].mul_(2)
    assert torch.equal(first[0], 2 * copies[0])


def test_many_forms_are_forgotten_and_learned_again(runs):
    for _ in range(2):
        for n in range(1, 400):
            gates, _ = moe_mlir.topk_renorm(normal(n, 29), 1)
            assert gates.shape == (n, 1)
    assert 400 < len(runs) <= 2 * 399


def test_the_native_half_asks_for_arguments_of_a_plain_call():
    module = importlib.import_module("moe_mlir._native").native()
    calls = module.PlainCalls((torch.Tensor,), torch.dtype, (), torch.is_grad_enabled)
    assert calls.replay(object()) is None and calls.replay() is None
    assert calls.replay(normal(3)) is False
    with pytest.raises(ValueError, match="expected the arguments of a plain call"):
        calls.remember((object(),), None, [], ())
    calls.remember((normal(3),), None, [], ())
    assert calls.replay(normal(3)) is None


def test_tensors_without_the_exchange_api_go_through_python():
    """Those of numpy here, of torch before 2.10 elsewhere."""
    module = importlib.import_module("moe_mlir._native").native()
    array = normal(3).numpy()
    calls = module.PlainCalls((type(array),), torch.dtype, (), torch.is_grad_enabled)
    with torch.no_grad():
        assert calls.replay(array) is None


def test_without_the_native_module_fake_tensors_still_have_shapes(monkeypatch):
    def missing():
        raise ImportError("no compiler")

    monkeypatch.setattr("moe_mlir.ops._plain_calls.native", missing)
    monkeypatch.setattr(
        importlib.import_module("moe_mlir.ops.make_finite"), "_op",
        _callable(torch.ops.moe.make_finite.default, None, lambda *args: args),
    )  # fmt: skip
    assert moe_mlir.make_finite(torch.empty(3, 5, device="meta")).shape == (3, 5)


def test_threads_share_the_table_while_it_forgets():
    wrong = []

    def select(seed):
        generator = random(seed)
        for n in torch.randint(1, 600, (400,), generator=generator).tolist():
            z = torch.randn(n, 31, generator=generator)
            if not torch.equal(moe_mlir.topk_renorm(z, 1)[1], z.argmax(-1, keepdim=True)):
                wrong.append(n)

    threads = [threading.Thread(target=select, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_calls_leave_no_memory_behind():
    z = normal(64, 37)
    counts = []
    for _ in range(2):
        for _ in range(2000):
            moe_mlir.topk_renorm(z, 2, kind="probs")
        gc.collect()
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    # 2000 results of 1.5 KB would be 3 MB.
    assert counts[1] - counts[0] < 1500
