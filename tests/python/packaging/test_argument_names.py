"""One name for one thing in all public signatures; old names of arguments warn and work."""

import inspect
import warnings

import pytest
import torch

import moe_mlir
from moe_mlir import distributed, experts, metrics, nn, reference

# What the field writes with one letter: hidden states, the queries, keys and values of attention,
# and how many experts a token has.
LETTERS = {"h", "q", "k", "v", "n"}
# Name -> the one that stands for the same thing elsewhere.
OTHER_NAMES = {
    "idx": "indices", "index": "indices", "prob": "probs", "p_base": "base_probs", "uk": "keys",
    "ws": "weight", "vp": "projected_v", "prev_idx": "prev_indices", "group": "process_group",
    "n_experts": "num_experts", "experts": "num_experts", "top_k": "k",
    "temperature": "tau", "kwargs_": "kwargs",
}  # fmt: skip
# Not of routing: groups of weights that share a scale.
ALLOWED = {("moe_mlir.quantize", "group")}


def public_functions():
    for module in (moe_mlir, nn, reference, metrics, distributed, experts):
        for name in module.__all__:
            thing = getattr(module, name)
            if callable(thing) and thing is not moe_mlir.MoeError:
                yield f"{module.__name__}.{name}", thing


@pytest.mark.parametrize(("name", "function"), list(public_functions()),
                         ids=lambda x: x if isinstance(x, str) else "")
def test_arguments_have_the_names_that_they_have_elsewhere(name, function):
    given = inspect.signature(function).parameters
    assert not [p for p in given if len(p) == 1 and p not in LETTERS]
    assert not {p: OTHER_NAMES[p] for p in given if p in OTHER_NAMES and (name, p) not in ALLOWED}


@pytest.mark.parametrize("name", [n for n in reference.__all__ if n in moe_mlir.__all__])
def test_a_reference_has_the_names_of_its_op(name):
    op, plain = (inspect.signature(getattr(m, name)).parameters for m in (moe_mlir, reference))
    assert [p for p in op if p in plain] == list(plain)


P, A = torch.rand(4, 6).softmax(-1), torch.eye(6)
I, H = torch.arange(8).reshape(4, 2) % 6, torch.randn(1, 4, 8)
E = torch.rand(1, 4, 6).softmax(-1)
HEADS = torch.randn(1, 2, 4, 3)
W = torch.randn(6, 8, 8)
GATES = torch.rand(4, 2)
ROUTED = (GATES, I, W, W)

# function name -> (old keywords, what they are now)
CALLS = {
    "adjacency_gate": (dict(p=P, a=A), "probs adjacency", {}),
    "adjacency_update": (dict(a=A, idx=I), "adjacency indices", {}),
    "balance_loss": (dict(p=P, idx=I), "probs indices", {}),
    "threshold_renorm": (dict(p=P), "probs", dict(theta=0.2)),
    "z_loss": (dict(z=P), "logits", {}),
    "dispatch": (dict(idx=I), "indices", dict(num_experts=6)),
    "ac_logits": (dict(m=torch.rand(6, 8), prev_idx=I[:, :1]), "metric prev_indices",
                  dict(h=H[0], emb=torch.randn(6, 8))),
    "soft_dispatch": (dict(x=H, m=H.abs()), "h metric", dict(phi=torch.randn(8, 3, 2))),
    "dispersion_weights": (dict(s=torch.rand(6, 8), count=torch.arange(6)), "dispersion counts", {}),
    "hyper_router": (dict(e=torch.randn(5)), "embedding",
                     dict(w1=torch.randn(7, 5), b1=torch.randn(7), w2=torch.randn(54, 7),
                          b2=torch.randn(54), num_experts=6)),
    "similarity_inform": (dict(u=H, e=E, uk=H + 1, ws=torch.eye(8)), "h probs keys weight",
                          dict(causal=True)),
    "attention_posterior": (dict(u=H, e=E, vp=torch.randn(1, 2, 4, 8)),
                            "attn_output probs projected_v", dict(q=HEADS, k=HEADS, causal=True)),
}  # fmt: skip


def both_names(function, old, new, others):
    with pytest.warns(DeprecationWarning) as told:
        found = function(**old, **others)
    first = [str(w.message) for w in told if "is now" in str(w.message)]
    assert len(first) == len(old)
    assert all(w.filename == __file__ for w in told if "is now" in str(w.message))
    wanted = function(**dict(zip(new.split(), old.values(), strict=True)), **others)
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (found, wanted)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("where", [moe_mlir, reference], ids=["ops", "reference"])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("default:moe_mlir")
def test_old_names_warn_and_work(name, where):
    both_names(getattr(where, name), *CALLS[name])


@pytest.mark.filterwarnings("default:moe_mlir")
@pytest.mark.parametrize(("function", "old", "new", "others"), [
    (metrics.selection_counts, dict(idx=I), "indices", dict(num_experts=6)),
    (metrics.load_balance_std, dict(idx=I), "indices", dict(num_experts=6)),
    (metrics.routing_entropy, dict(p=P), "probs", {}),
    (metrics.entropy_ratio, dict(p_method=P, p_base=P), "probs base_probs", {}),
    (metrics.fluctuation_rate, dict(idx_a=I, idx_b=I), "indices_a indices_b", {}),
    (distributed.selection_counts, dict(idx=I), "indices", dict(num_experts=6)),
    (distributed.run_experts, dict(x=H[0]), "h",
     dict(gates=GATES, indices=I, w_in=W, w_out=W, num_experts=6)),
    (experts.run_experts, dict(x=H[0]), "h", dict(gates=GATES, indices=I, w_in=W, w_out=W)),
    (reference.co_selections, dict(idx=I), "indices", dict(num_experts=6)),
    (reference.entropy, dict(p=P), "probs", {}),
])
def test_old_names_of_other_functions(function, old, new, others):
    both_names(function, old, new, others)


@pytest.mark.filterwarnings("default:moe_mlir")
def test_old_names_of_a_router_s_inputs_also_below_another():
    router = nn.SymphonySMoE(8, 6, 2, cold_start="base", base=nn.AttentionSMoE(8, 6, 2, causal=True))
    rest = dict(q=HEADS, k=HEADS)
    projected = torch.randn(1, 2, 4, 8)
    wanted = router(H, attn_output=H, projected_v=projected, **rest)
    with pytest.warns(DeprecationWarning, match=r"SymphonySMoE\(u=\) is now .*\(attn_output=\)"):
        found = router(H, u=H, vp=projected, **rest)
    assert torch.equal(found.gates, wanted.gates)
    with pytest.raises(TypeError, match="expected inputs among .*attn_output"):
        router(H, w=H, **rest)


@pytest.mark.filterwarnings("default:moe_mlir")
def test_an_argument_is_given_once():
    with pytest.raises(TypeError, match="adjacency_gate: expected 'adjacency' once, found it as 'a'"):
        moe_mlir.adjacency_gate(P, adjacency=A, a=A)
    with pytest.raises(TypeError):
        moe_mlir.adjacency_gate(P, A, a=A)


def test_compiled_code_knows_the_new_names_and_says_nothing():
    function = torch.compile(
        lambda p, a: moe_mlir.adjacency_gate(probs=p, adjacency=a), fullgraph=True, backend="eager")
    old = torch.compile(lambda p, a: moe_mlir.adjacency_gate(p=p, a=a), fullgraph=True,
                        backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(function(P, A), old(P, A))
