"""Every router: compiled against plain torch, padding, state, examples."""

import copy
import doctest
import importlib
import pkgutil

import pytest
import torch
from methods import METHODS, D, E, make, normal
from op_judge import assert_close, assert_same_bits, random

import moe_mlir
from moe_mlir import nn

H = normal(2, 9, D)
MASK = torch.rand(2, 9, generator=random(5)) > 0.3


def compare(a, b):
    assert torch.equal(a.indices, b.indices)
    for name in ("gates", "probs", "logits", "dispatch", "combine"):
        if getattr(b, name) is not None:
            assert_close(getattr(a, name), getattr(b, name).double(), 1e-5, name)
    if b.count is not None:
        assert torch.equal(a.count, b.count)


@pytest.mark.parametrize("name", METHODS)
def test_compiled_equals_plain_torch(name):
    (a, inputs), (b, _) = make(name, "moe"), make(name, "torch")
    compare(a(H, MASK, **inputs), b(H, MASK, **inputs))
    compare(a(H, **inputs), b(H, **inputs))


@pytest.mark.parametrize("name", METHODS)
def test_selection_is_legal_and_padding_goes_nowhere_e10(name):
    router, inputs = make(name)
    routing = router(H, MASK, **inputs)
    assert routing.gates.shape == routing.indices.shape
    assert not routing.gates[~MASK].any() and bool((routing.indices[~MASK] == -1).all())
    for row in routing.indices[MASK].tolist():
        chosen = [i for i in row if i >= 0]
        assert chosen and len(set(chosen)) == len(chosen) and max(chosen) < E


@pytest.mark.parametrize("name", METHODS)
def test_garbage_in_padding_reaches_neither_results_nor_gradients_e11(name):
    router, inputs = make(name)
    results = []
    for garbage in (0.0, torch.nan):
        h = H.masked_fill(~MASK[..., None], garbage).requires_grad_()
        routing = router(h, MASK, **inputs)
        router.zero_grad()
        soft = routing.combine is not None
        total = (routing.combine if soft else routing.gates)[MASK].square().sum()
        if total.requires_grad:
            total.backward()
        grads = [p.grad for p in router.parameters() if p.grad is not None]
        results.append([routing.gates[MASK], routing.indices, *grads])
    for clean, dirty in zip(*results, strict=True):
        assert_same_bits(clean.detach(), dirty.detach())


@pytest.mark.parametrize("name", METHODS)
def test_state_survives_a_round_trip(name):
    router, inputs = make(name)
    for seed in range(3):
        router(normal(2, 9, D, seed=seed), **inputs)
        moe_mlir.update_routers(router)
    other, _ = make(name)
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter)
    other.load_state_dict(copy.deepcopy(router.state_dict()))
    assert other.k == router.k
    for mode in (True, False):
        compare(other.train(mode)(H, **inputs), router.train(mode)(H, **inputs))
    assert set(router.state_dict()) == set(other.state_dict())


@pytest.mark.parametrize("name", METHODS)
def test_a_layer_runs_the_experts_and_trains(name):
    router, inputs = make(name)
    layer = nn.MoELayer(router, 10, shared=1)
    h = H.clone().requires_grad_()
    y, routing = layer(h, MASK, **inputs)
    assert y.shape == H.shape and bool(y.isfinite().all())
    y.square().sum().backward()
    assert bool(layer.w_in.grad.any())
    trained = {n for n, p in router.named_parameters() if p.grad is not None and p.grad.any()}
    assert trained == TRAINED.get(name, trained_by_default(name, router))


# A k of 1 with sigmoid gates trains its centroids alone; the learnt assignment
# is distilled by its own loss.
TRAINED = {
    "stablemoe_two_stages": {"centroids"},
    "smoe_dropout": set(),
    "similarity_smoe_dropout": set(),
    "thor": set(),
    "hyper_router": {"embedding"},
}


def trained_by_default(name, router):
    return {n for n, _ in router.named_parameters()}


def test_the_attention_router_takes_the_rows_of_the_attention():
    """The entropies of the given rows choose the head, head 2 here."""
    router, inputs = make("attention_head", "moe")
    rows = dict(row_lse=torch.zeros(2, 3, 9), row_entropy=torch.ones(2, 3, 9))
    rows["row_entropy"][:, 2] = 0.5
    found = router(H, **inputs, **rows)
    router.head_mode = 2
    assert_close(found.probs, router(H, **inputs).probs.double(), 1e-6)


@pytest.mark.parametrize("module", [m.name for m in pkgutil.iter_modules(nn.__path__)])
def test_examples_of_the_documentation_run(module):
    module = importlib.import_module(f"moe_mlir.nn.{module}")
    torch.manual_seed(0)
    names = {**{n: getattr(nn, n) for n in nn.__all__}, "torch": torch, "moe_mlir": moe_mlir}
    finder = doctest.DocTestFinder(exclude_empty=True)
    for test in finder.find(module, extraglobs=names):
        result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test)
        assert result.failed == 0, test.name


def test_every_method_of_the_contract_has_a_module_with_an_example():
    routers = [getattr(nn, n) for n in nn.__all__ if isinstance(getattr(nn, n), type)]
    shown = [c for c in routers if c not in (nn.Routing, nn.Router, nn.LinearRouter)]
    for cls in shown:
        if cls is not nn.ComposedRouter:
            assert ">>>" in (cls.__doc__ or ""), f"{cls.__name__} shows no example"
    tested = {cls for cls, _, _ in METHODS.values()}
    assert {c for c in shown if issubclass(c, nn.Router)} - {nn.ComposedRouter} <= tested
