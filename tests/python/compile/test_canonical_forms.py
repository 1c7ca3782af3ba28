"""Each canonicalisation of a moe op, proved numerically: both forms are run.

The literal form is decomposed before any canonicalisation sees it, so that what
runs is the meaning of the op as written; the other form is canonicalised first.
"""

from dataclasses import dataclass

import pytest
import torch

from moe_mlir._native import native
from moe_mlir.compiler.jit import compile_cached

N, E, K, D = 37, 8, 3, 12


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def scores():
    """Random rows, large ones, ties, and one without a NaN or Inf in sight but huge."""
    z = random(N, E)
    z[1] *= 80.0
    z[2] = 1.0
    z[3, :4] = 2.0
    z[4] = torch.linspace(-1e30, 1e30, E)
    return z


@dataclass(frozen=True)
class Case:
    """`gone` is in the op as written and not in its canonical form; `there` the reverse."""

    body: str
    inputs: tuple
    results: str
    gone: tuple = ()
    there: tuple = ()
    atol: float = 1e-6


def type_of(tensor):
    element = {torch.float32: "f32", torch.int32: "i32", torch.bool: "i1"}[tensor.dtype]
    return f"tensor<{''.join(f'{d}x' for d in tensor.shape)}{element}>"


def text_of(case):
    arguments = ", ".join(f"%a{i}: {type_of(t)}" for i, t in enumerate(case.inputs))
    return f"{MAPS}func.func @f({arguments}) -> ({case.results}) {{\n{case.body}\n}}\n"


def passed(text, pipeline):
    module = native().Module.parse(text)
    module.run(pipeline)
    return module.text()


DTYPES = {"float32": torch.float32, "int32": torch.int32, "f32": torch.float32, "i32": torch.int32}


def run(text, inputs):
    function = compile_cached(text).function("f")
    results = [torch.empty(shape, dtype=DTYPES[str(dtype)]) for dtype, shape in function.results]
    function(*inputs, *results)
    return results


# ---- what the bodies are made of ---------------------------------------------------

MAPS = """
#whole = affine_map<(n, e) -> (n, e)>
#row = affine_map<(n, e) -> (n)>
"""
ROUTED = f"tensor<{N}x{K}xf32>, tensor<{N}x{K}xi32>"
SOFTMAX = f"""
  %zero = arith.constant 0.0 : f32
  %low = arith.constant 0xFF800000 : f32
  %rows = tensor.empty() : tensor<{N}xf32>
  %all = tensor.empty() : tensor<{N}x{E}xf32>
  %m0 = linalg.fill ins(%low : f32) outs(%rows : tensor<{N}xf32>) -> tensor<{N}xf32>
  %m = linalg.generic {{indexing_maps = [#whole, #row],
                       iterator_types = ["parallel", "reduction"]}}
      ins(%a0 : tensor<{N}x{E}xf32>) outs(%m0 : tensor<{N}xf32>) {{
  ^bb0(%x: f32, %acc: f32):
    %y = arith.maximumf %x, %acc : f32
    linalg.yield %y : f32
  }} -> tensor<{N}xf32>
  %exps = linalg.generic {{indexing_maps = [#whole, #row, #whole],
                          iterator_types = ["parallel", "parallel"]}}
      ins(%a0, %m : tensor<{N}x{E}xf32>, tensor<{N}xf32>) outs(%all : tensor<{N}x{E}xf32>) {{
  ^bb0(%x: f32, %peak: f32, %out: f32):
    %s = arith.subf %x, %peak : f32
    %y = math.exp %s : f32
    linalg.yield %y : f32
  }} -> tensor<{N}x{E}xf32>
  %s0 = linalg.fill ins(%zero : f32) outs(%rows : tensor<{N}xf32>) -> tensor<{N}xf32>
  %sum = linalg.generic {{indexing_maps = [#whole, #row],
                         iterator_types = ["parallel", "reduction"]}}
      ins(%exps : tensor<{N}x{E}xf32>) outs(%s0 : tensor<{N}xf32>) {{
  ^bb0(%x: f32, %acc: f32):
    %y = arith.addf %x, %acc : f32
    linalg.yield %y : f32
  }} -> tensor<{N}xf32>
  %p = linalg.generic {{indexing_maps = [#whole, #row, #whole],
                       iterator_types = ["parallel", "parallel"]}}
      ins(%exps, %sum : tensor<{N}x{E}xf32>, tensor<{N}xf32>) outs(%all : tensor<{N}x{E}xf32>) {{
  ^bb0(%x: f32, %total: f32, %out: f32):
    %y = arith.divf %x, %total : f32
    linalg.yield %y : f32
  }} -> tensor<{N}x{E}xf32>
"""


def topk(source, attributes, clauses="", k=K, then=""):
    routed = f"tensor<{N}x{k}xf32>, tensor<{N}x{k}xi32>"
    return f"""
  %g0 = tensor.empty() : tensor<{N}x{k}xf32>
  %i0 = tensor.empty() : tensor<{N}x{k}xi32>
  %g, %i = moe.topk_renorm ins({source} : tensor<{N}x{E}xf32>) {clauses}
      outs(%g0, %i0 : {routed}) {{{attributes}}} -> {routed}
{then or f"  return %g, %i : {routed}"}"""


SCALED = f"""
  %c = arith.constant 2.5 : f32
  %scaled = linalg.generic {{indexing_maps = [#whole, #whole],
                            iterator_types = ["parallel", "parallel"]}}
      ins(%g : tensor<{N}x{K}xf32>) outs(%g0 : tensor<{N}x{K}xf32>) {{
  ^bb0(%x: f32, %out: f32):
    %y = arith.mulf %x, %c : f32
    linalg.yield %y : f32
  }} -> tensor<{N}x{K}xf32>
  return %scaled, %i : {ROUTED}"""

PROBS = "kind = #moe.score_kind<probs>"
SELECTIONS = {
    "groups_that_are_all_kept": Case(
        topk("%a0", "n_group = 4 : i64, topk_group = 4 : i64"),
        (random(N, E),), ROUTED, gone=("n_group",),
    ),
    "implied_score": Case(
        topk("%a0", "score = #moe.score_function<softmax>"), (scores(),), ROUTED, gone=("score_f",),
    ),
    "eps_of_no_sum": Case(
        topk("%a0", "renorm = false, eps = 0.5 : f64"), (scores(),), ROUTED, gone=("eps",),
    ),
    "mask_of_trues": Case(
        f"%t = arith.constant dense<true> : tensor<{N}xi1>"
        + topk("%a0", "", f"mask(%t : tensor<{N}xi1>)"),
        (scores(),), ROUTED, gone=("mask(",),
    ),
    "uniform_bias": Case(
        f"%b = arith.constant dense<0.25> : tensor<{E}xf32>"
        + topk("%a0", "score = #moe.score_function<sigmoid>", f"bias(%b : tensor<{E}xf32>)"),
        (random(N, E),), ROUTED, gone=("bias(",),
    ),
    "softmax_of_all_experts": Case(
        topk("%a0", "renorm = false", k=E), (scores(),),
        f"tensor<{N}x{E}xf32>, tensor<{N}x{E}xi32>", gone=("renorm = false",),
    ),
    "softmax_then_renormalised": Case(
        SOFTMAX + topk("%p", PROBS), (random(N, E),), ROUTED, gone=("probs", "math.exp"),
    ),
    "softmax_then_raw": Case(
        SOFTMAX + topk("%p", PROBS + ", renorm = false"), (random(N, E),), ROUTED,
        gone=("probs", "math.exp"),
    ),
    "factor_behind_the_gates": Case(
        topk("%a0", "route_scale = 2.0 : f64", then=SCALED), (scores(),), ROUTED,
        gone=("linalg.generic",), there=("route_scale = 5.0",), atol=5e-6,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SELECTIONS)
def test_selection(name):
    judge(SELECTIONS[name])


def judge(case):
    text = text_of(case)
    literal, canonical = passed(text, "moe-decompose"), passed(text, "canonicalize")
    assert "moe." not in literal
    for pattern in case.gone:
        assert pattern in text and pattern not in canonical, canonical
    for pattern in case.there:
        assert pattern not in text and pattern in canonical, canonical
    for meant, cheap in zip(run(literal, case.inputs), run(canonical, case.inputs), strict=True):
        if meant.dtype == torch.float32:
            torch.testing.assert_close(cheap, meant, rtol=1e-6, atol=case.atol, equal_nan=True)
        else:
            assert torch.equal(cheap, meant)


# ---- logits -------------------------------------------------------------------------


def constant(name, tensor):
    values = str(tensor.tolist())
    return f"  %{name} = arith.constant dense<{values}> : {type_of(tensor)}\n"


def cosine(attributes, omega=None, width=D):
    """Embeddings are constants; so is omega, `[width, D]`."""
    clause = "" if omega is None else f"omega(%omega : tensor<{width}x{D}xf32>)"
    text = constant("emb", random(E, D if omega is None else width, seed=1))
    if omega is not None:
        text += constant("omega", omega)
    emb = f"tensor<{E}x{D if omega is None else width}xf32>"
    return f"""{text}
  %z0 = tensor.empty() : tensor<{N}x{E}xf32>
  %z = moe.cosine_logits ins(%a0, %emb : tensor<{N}x{D}xf32>, {emb}) {clause}
      outs(%z0 : tensor<{N}x{E}xf32>) {{{attributes}}} -> tensor<{N}x{E}xf32>
  return %z : tensor<{N}x{E}xf32>"""


def ac(m, idx, r, gates=""):
    ins = f"tensor<{N}x{D}xf32>, tensor<{E}x{D}xf32>, tensor<{N}x{r}xi32>, tensor<{E}x{D}xf32>"
    return f"""
  %m = arith.constant dense<{m}> : tensor<{E}x{D}xf32>
  %idx = arith.constant dense<{idx}> : tensor<{N}x{r}xi32>
  %z0 = tensor.empty() : tensor<{N}x{E}xf32>
  %z = moe.ac_logits ins(%a0, %m, %idx, %a1 : {ins}) {gates}
      outs(%z0 : tensor<{N}x{E}xf32>) -> tensor<{N}x{E}xf32>
  return %z : tensor<{N}x{E}xf32>"""


HYPER = [random(*s, seed=i) for i, s in enumerate(((4,), (6, 4), (6,), (E * (D + 1), 6)))]
HYPER.append(random(E * (D + 1), seed=9))
LOGITS = f"tensor<{N}x{E}xf32>"
TOKENS = (random(N, D, seed=5),)
FORMS = {
    "constant_embeddings": Case(
        cosine("tau = 0.3 : f64"), TOKENS, LOGITS, there=("norm_emb = false",), atol=2e-6
    ),
    "constant_omega": Case(
        cosine("tau = 0.3 : f64, norm_token = false", random(D, D, seed=2), D), TOKENS, LOGITS,
        gone=("cosine",), there=("router_logits",), atol=5e-5,
    ),
    "constant_temperature": Case(
        cosine("tau = 0.3 : f64, norm_token = false, norm_emb = false"), TOKENS, LOGITS,
        gone=("cosine",), there=("router_logits",), atol=2e-5,
    ),
    "metric_of_ones": Case(
        ac(1.0, 3, 1), (*TOKENS, random(E, D, seed=6)), LOGITS, gone=("ac_logits",), atol=0.0
    ),
    "no_previous_expert": Case(
        ac(2.0, -1, 2, gates=f"gates(%a2 : tensor<{N}x2xf32>)"),
        (*TOKENS, random(E, D, seed=6), random(N, 2, seed=7).abs()), LOGITS,
        gone=("ac_logits",), atol=0.0,
    ),
    "constant_hyper_router": Case(
        "".join(constant(n, t) for n, t in zip(("e", "w1", "b1", "w2", "b2"), HYPER)) + f"""
  %w0 = tensor.empty() : tensor<{E}x{D}xf32>
  %b0 = tensor.empty() : tensor<{E}xf32>
  %w, %b = moe.hyper_router
      ins(%e, %w1, %b1, %w2, %b2 : {", ".join(map(type_of, HYPER))})
      outs(%w0, %b0 : tensor<{E}x{D}xf32>, tensor<{E}xf32>)
      -> tensor<{E}x{D}xf32>, tensor<{E}xf32>
  return %w, %b : tensor<{E}x{D}xf32>, tensor<{E}xf32>""",
        (), f"tensor<{E}x{D}xf32>, tensor<{E}xf32>", gone=("hyper",), atol=1e-5,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_logits(name):
    judge(FORMS[name])


# ---- mixing over tokens -------------------------------------------------------------

B, H, T, W = 2, 3, 19, 6
Q, P = f"tensor<{B}x{H}x{T}x{W}xf32>", f"tensor<{B}x{T}x{E}xf32>"
MIXED = f"{P}, tensor<{B}x{T}xf32>"


def similarity(attributes="", before="", clauses=""):
    u = f"tensor<{B}x{T}x{D}xf32>"
    return f"""{before}
  %p0 = tensor.empty() : {P}
  %l0 = tensor.empty() : tensor<{B}x{T}xf32>
  %p, %l = moe.similarity_inform ins(%a0, %a1 : {u}, {P}) {clauses}
      outs(%p0, %l0 : {MIXED}) {{{attributes}}} -> {MIXED}
  return %p, %l : {MIXED}"""


def posterior(attributes, before="", clauses="", heads=H, lse=1):
    q = f"tensor<{B}x{heads}x{T}x{W}xf32>"
    results = f"{P}, tensor<{B}xi32>, tensor<{B}x{lse}x{T}xf32>, tensor<{B}x{lse}x{T}xf32>"
    return f"""{before}
  %p0 = tensor.empty() : {P}
  %h0 = tensor.empty() : tensor<{B}xi32>
  %l0 = tensor.empty() : tensor<{B}x{lse}x{T}xf32>
  %r:4 = moe.attention_posterior
      ins(%a0, %a1, %a2, %a3 : {q}, {q}, tensor<{B}x{T}x{D}xf32>, {P})
      means(%a4 : tensor<{B}x{heads}x{T}x{D}xf32>) {clauses}
      outs(%p0, %h0, %l0, %l0 : {results}) {{{attributes}}} -> {results}
  return %r#0, %r#1 : {P}, tensor<{B}xi32>"""


def sees(parts):
    return f"visibility = #moe.visibility<{parts}>"


def tokens():
    return random(B, T, D), random(B, T, E, seed=1).softmax(-1)


def attention(heads=H):
    q, k = random(B, heads, T, W), random(B, heads, T, W, seed=1)
    means = 0.3 * random(B, heads, T, D, seed=4)
    return q, k, random(B, T, D, seed=2), random(B, T, E, seed=3).softmax(-1), means


CHOSEN = f"{P}, tensor<{B}xi32>"
IDENTITY = constant("ws", torch.eye(D))
MIXINGS = {
    "identity_of_the_similarity": Case(
        similarity(sees("causal"), IDENTITY, f"ws(%ws : tensor<{D}x{D}xf32>)"),
        tokens(), MIXED, gone=("ws(",), atol=1e-5,
    ),
    "window_over_all_keys": Case(
        similarity(sees(f"causal, window = {T}")), tokens(), MIXED, gone=("window",),
        atol=1e-5,
    ),
    "window_over_all_keys_without_causality": Case(
        similarity(sees(f"window = {T}")), tokens(), MIXED, gone=("window",), atol=1e-5
    ),
    "mask_of_trues": Case(
        similarity("", f"%t = arith.constant dense<true> : tensor<{B}x{T}xi1>",
                   f"mask(%t : tensor<{B}x{T}xi1>)"),
        tokens(), MIXED, gone=("mask(",), atol=1e-5,
    ),
    "uniform_head_prior": Case(
        posterior("head_mode = #moe.head_mode<all>",
                  f"%pi = arith.constant dense<0.25> : tensor<{B}x{T}x{H}xf32>",
                  f"head_prior(%pi : tensor<{B}x{T}x{H}xf32>)", lse=H),
        attention(), CHOSEN, gone=("head_prior(",), atol=1e-5,
    ),
    "head_prior_that_is_not_used": Case(
        posterior("", f"%pi = arith.constant dense<0.7> : tensor<{B}x{T}x{H}xf32>",
                  f"head_prior(%pi : tensor<{B}x{T}x{H}xf32>)"),
        attention(), CHOSEN, gone=("head_prior(",), atol=1e-5,
    ),
    "only_head": Case(
        posterior("head_scope = #moe.head_scope<batch>", heads=1), attention(1), CHOSEN,
        gone=("head_scope",), there=("fixed",), atol=1e-5,
    ),
    "bias_of_zeros": Case(
        posterior(sees("causal"), f"%b = arith.constant dense<0.0> : tensor<1x1x{T}x{T}xf32>",
                  f"bias(%b : tensor<1x1x{T}x{T}xf32>)"),
        attention(), CHOSEN, gone=("bias(",), atol=1e-5,
    ),
    "causality_of_one_query": Case(
        f"""
  %l0 = tensor.empty() : tensor<{B}x{H}x1xf32>
  %l = moe.softmax_mix ins(%a0, %a1 : tensor<{B}x{H}x1x{W}xf32>, {Q})
      outs(%l0 : tensor<{B}x{H}x1xf32>) {{{sees("causal")}}} -> tensor<{B}x{H}x1xf32>
  return %l : tensor<{B}x{H}x1xf32>""",
        (random(B, H, 1, W), random(B, H, T, W, seed=1)), f"tensor<{B}x{H}x1xf32>",
        gone=("causal",), atol=1e-5,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXINGS)
def test_mixing(name):
    judge(MIXINGS[name])
