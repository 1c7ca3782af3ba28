"""A float that has another value in each step does not compile a kernel for each value."""

import pytest
import torch
from op_judge import assert_close, random

import moe_mlir
from moe_mlir import reference
from moe_mlir.compiler import jit
from moe_mlir.ops._few_values import MOST_VALUES, FewValues

G = random(0)
S, A = torch.randn(7, 8, generator=G), torch.rand(8, 8, generator=G)
P, I = S.softmax(-1), torch.randint(8, (7, 2), generator=G)
H, HEADS = torch.randn(1, 7, 12, generator=G), torch.randn(1, 2, 7, 4, generator=G)
WO, EMB = torch.randn(2, 12, 4, generator=G), torch.randn(8, 12, generator=G)
PHI, LOAD = torch.randn(12, 3, 2, generator=G), torch.arange(8)
VALUES = [0.31 + 0.07 * step for step in range(20)]
# op -> (operands that get a gradient, the others, options, the float)
OPS = {
    "topk_renorm": (dict(scores=S), {}, dict(k=2), "route_scale"),
    "topk_renorm raw": (dict(scores=S), {}, dict(k=2, renorm=False), "route_scale"),
    "grouped_topk": (dict(scores=S), {}, dict(k=2), "route_scale"),
    "threshold_renorm": (dict(probs=P), {}, {}, "theta"),
    "cosine_logits": (dict(h=H[0], emb=EMB), {}, dict(omega=None), "tau"),
    "similarity_inform": (dict(h=H, probs=P[None]), {}, dict(causal=True), "tau"),
    "attention_posterior": (
        dict(q=HEADS, k=HEADS, attn_output=H, probs=P[None], v=HEADS, wo=WO), {},
        dict(causal=True), "sigma"),
    "soft_dispatch": (dict(h=H, phi=PHI), {}, {}, "scale"),
    "adjacency_gate": (dict(probs=P), dict(adjacency=A), {}, "threshold"),
    "adjacency_gate base": (dict(probs=P), dict(adjacency=A), dict(cold_start="base"), "threshold"),
    "adjacency_update": ({}, dict(adjacency=A), dict(indices=I), "beta"),
    "bias_update": ({}, dict(bias=A[0]), dict(counts=LOAD), "gamma"),
    "dispatch": ({}, {}, dict(indices=I, num_experts=8), "capacity_factor"),
}  # fmt: skip


def run(where, name, value, dtype):
    """Results and gradients; floats are in `dtype`."""
    learns, others, options, argument = OPS[name]
    learns = {n: x.clone().to(dtype).requires_grad_() for n, x in learns.items()}
    others = {n: x.to(dtype) for n, x in others.items()}
    value = min(value, 1.0) if argument == "beta" else value
    results = getattr(where, name.split()[0])(**learns, **others, **options, **{argument: value})
    results = results if isinstance(results, tuple) else (results,)
    moving = [x for x in results if x.requires_grad]
    if moving:
        sum((x * torch.arange(1, x.numel() + 1).view(x.shape)).sum() for x in moving).backward()
    return [*results, *(x.grad for x in learns.values())]


@pytest.mark.parametrize("name", OPS)
def test_many_values_are_few_kernels_and_right(name, compiled_texts):
    argument = OPS[name][-1]
    for value in VALUES:
        found, wanted = (run(where, name, value, dtype) for where, dtype in (
            (moe_mlir, torch.float32), (reference, torch.float64)))
        for mine, exact in zip(found, wanted, strict=True):
            if mine.is_floating_point():
                size = float(exact.nan_to_num(0, 0, 0).abs().max())
                tol = 2e-3 if argument == "sigma" else 1e-4  # logits are divided by its square
                assert_close(mine, exact, tol * max(1.0, size), f"{name}, {value}")
            else:
                assert torch.equal(mine, exact.to(mine.dtype))
    # Forward and backward, each with a few constants and one that serves all values.
    assert len(set(compiled_texts)) <= 2 * (MOST_VALUES + 1)
    before = len(compiled_texts)
    for value in VALUES:
        run(moe_mlir, name, value + 0.01, torch.float32)
    assert len(compiled_texts) == before


@pytest.mark.parametrize("value", [0.0, -1.5])
@pytest.mark.parametrize("name", ["topk_renorm", "topk_renorm raw", "grouped_topk"])
def test_a_scale_of_zero_or_below(name, value):
    for other in VALUES[:MOST_VALUES]:
        run(moe_mlir, name, other, torch.float32)
    found, wanted = (run(where, name, value, dtype) for where, dtype in (
        (moe_mlir, torch.float32), (reference, torch.float64)))
    for mine, exact in zip(found, wanted, strict=True):
        assert_close(mine.double(), exact.double(), 2e-5 * max(1.0, float(exact.abs().max())))


def test_values_are_equal_to_the_last_bit_where_they_multiply_results(monkeypatch):
    constants = {}
    for name in ("topk_renorm", "grouped_topk", "bias_update", "dispatch"):
        monkeypatch.setattr(FewValues, "has", lambda self, form, value: True)
        constants[name] = [run(moe_mlir, name, value, torch.float32)[0] for value in VALUES[:3]]
        monkeypatch.setattr(FewValues, "has", lambda self, form, value: False)
        for value, wanted in zip(VALUES, constants[name]):
            assert torch.equal(run(moe_mlir, name, value, torch.float32)[0], wanted), name


def test_masked_tokens_keep_index_and_gate():
    mask = torch.tensor([True, False] * 3 + [True])
    for value in VALUES:
        gates, indices = moe_mlir.topk_renorm(S, 2, route_scale=value, mask=mask)
        assert not gates[~mask].any() and (indices[~mask] == -1).all()


def test_an_empty_graph_is_the_identity_only_where_it_was_empty():
    for value in VALUES:
        kept = moe_mlir.adjacency_gate(P, A, threshold=5 + value, cold_start="base")
        assert not kept.any()
        assert torch.equal(moe_mlir.adjacency_gate(
            P, torch.zeros(8, 8), threshold=value, cold_start="base"), P)


def test_without_a_token_an_adjacency_stays_as_it_is():
    none = torch.full((7, 2), -1)
    for value in VALUES:
        assert torch.equal(moe_mlir.adjacency_update(A, none, beta=min(value, 1.0)), A)


@pytest.mark.parametrize(("name", "argument", "options"), [
    ("topk_renorm", "route_scale", dict(k=2)), ("threshold_renorm", "theta", {})])
def test_in_the_simulator(name, argument, options, monkeypatch):
    texts = set()
    compile_kernels = jit.compile_kernels_cached
    monkeypatch.setattr(jit, "compile_kernels_cached", lambda text, chip: (
        texts.add(text), compile_kernels(text, chip))[1])
    with moe_mlir.simulate(chip="sm_90"):
        for value in VALUES[:8]:
            found = getattr(moe_mlir, name)(P, **options, **{argument: value})[0]
            exact = getattr(reference, name)(P.double(), **options, **{argument: value})[0]
            assert_close(found, exact, 1e-5)
    assert 1 <= len(texts) <= MOST_VALUES + 1


def test_forms_are_forgotten_before_they_fill_memory(monkeypatch):
    monkeypatch.setattr("moe_mlir.ops._few_values._MOST_FORMS", 3)
    few = FewValues()
    for form in range(50):
        assert few.has(form, 1.0)
    assert len(few._seen) <= 3
    assert [few.has("x", float(value)) for value in range(6)] == [True] * 4 + [False] * 2
    assert few.has("x", 0.0)
