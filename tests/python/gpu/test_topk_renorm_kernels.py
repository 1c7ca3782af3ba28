"""topk_renorm as a kernel, executed in the PTX simulator.

Every launch must be free of findings; selections are judged by the choice
scores in float64 and gates by those of the same experts (spec, section 1).
"""

import math

import numpy as np
import pytest
import torch
from gpu_kernels import compile_kernels, shaped
from reference import choice_row, gates_row, order

sim = pytest.importorskip("moe_mlir.sim")

DEFAULTS = {"score": "softmax", "renorm": True}


def module_text(e, k, form, *, dtype, index_dtype, leading=(None,)):
    """A function @select, and the MLIR shapes of its buffers."""
    operands = [("z", (*leading, e), dtype)]
    clauses = [f"ins(%z : {shaped('tensor', (*leading, e), dtype)})"]
    if form.get("bias") is not None:
        operands.append(("bias", (e,), torch.float32))
        clauses.append(f"bias(%bias : {shaped('tensor', (e,), torch.float32)})")
    if form.get("forced") is not None:
        shape = (*leading, k)
        operands.append(("forced", shape, index_dtype))
        clauses.append(f"forced(%forced : {shaped('tensor', shape, index_dtype)})")
    if form.get("mask") is not None:
        operands.append(("mask", leading, torch.bool))
        clauses.append(f"mask(%mask : {shaped('tensor', leading, torch.bool)})")
    attributes = [f"renorm = {str(form['renorm']).lower()}"]
    if form["score"] == "none":
        attributes.append("kind = #moe.score_kind<probs>")
    else:
        attributes.append(f"score = #moe.score_function<{form['score']}>")
    for name in ("eps", "route_scale"):
        if name in form:
            attributes.append(f"{name} = {float(form[name])!r} : f64")
    for name in ("n_group", "topk_group"):
        if name in form:
            attributes.append(f"{name} = {form[name]} : i64")
    if "group_score" in form:
        attributes.append(f"group_score = #moe.group_score<{form['group_score']}>")

    results = [(*leading, k)] * 2
    types = [
        shaped("tensor", (*leading, k), t) for t in (torch.float32, index_dtype)
    ]
    body, sizes = [], []
    for dim, size in enumerate(leading):
        if size is None:
            body.append(f"%c{dim} = arith.constant {dim} : index")
            body.append(
                f"%n{dim} = tensor.dim %z, %c{dim} : "
                f"{shaped('tensor', (*leading, e), dtype)}"
            )
            sizes.append(f"%n{dim}")
    for number, type_ in enumerate(types):
        body.append(f"%o{number} = tensor.empty({', '.join(sizes)}) : {type_}")
    body.append(
        f"%r:2 = moe.topk_renorm {' '.join(clauses)} "
        f"outs(%o0, %o1 : {', '.join(types)}) {{{', '.join(attributes)}}} "
        f"-> {', '.join(types)}"
    )
    arguments = [f"%{n}: {shaped('tensor', s, t)}" for n, s, t in operands]
    text = (
        f"func.func @select({', '.join(arguments)}) -> ({', '.join(types)}) {{\n  "
        + "\n  ".join(body)
        + f"\n  return %r#0, %r#1 : {', '.join(types)}\n}}"
    )
    return text, [shape for _, shape, _ in operands] + results


def run(z, k, form, *, index_dtype=torch.int32, leading=None, **options):
    """Compiles for z's shape and runs; returns gates and indices."""
    e = z.shape[-1]
    leading = leading or (None,) * (z.dim() - 1)
    text, shapes = module_text(
        e, k, form, dtype=z.dtype, index_dtype=index_dtype, leading=leading
    )
    (kernel,) = compile_kernels(text)
    gates = torch.full((*z.shape[:-1], k), 77.0)
    indices = torch.full((*z.shape[:-1], k), 77, dtype=index_dtype)
    inputs = [z]
    for name in ("bias", "forced", "mask"):
        if form.get(name) is not None:
            inputs.append(form[name])
    for launch in options.pop("launches", [{"seed": 1}, {"seed": 2, "policy": 1}]):
        gates.fill_(77)
        indices.fill_(77)
        report = kernel.run([*inputs, gates, indices], shapes, **launch)
        assert report is None or not report.findings
    return gates, indices


def check(z, k, form, *, exact_order=None, **options):
    """Runs and judges every row."""
    gates, indices = run(z, k, form, **options)
    rows = z.reshape(-1, z.shape[-1]).double().numpy()
    gates = gates.reshape(-1, k).double().numpy()
    indices = indices.reshape(-1, k).long().numpy()
    mask = form.get("mask")
    mask = None if mask is None else mask.reshape(-1).numpy()
    forced = form.get("forced")
    forced = None if forced is None else forced.reshape(-1, k).long().numpy()
    simple = form.get("bias") is None and form.get("n_group", 1) == 1
    row_form = dict(form)
    if form.get("bias") is not None:
        row_form["bias"] = form["bias"].double().numpy()
    finite = np.abs(rows[np.isfinite(rows)])
    largest = finite.max() if finite.size and form["score"] != "none" else 0.0
    tolerance = min(1.0, 1e-6 + 8 * 2.0**-24 * largest)
    for n, x in enumerate(rows):
        if mask is not None and not mask[n]:
            assert (indices[n] == -1).all() and (gates[n] == 0).all()
            continue
        choice = choice_row(x, row_form)
        if forced is not None:
            assert (indices[n] == forced[n]).all()
        else:
            assert len(set(indices[n])) == k
            assert ((0 <= indices[n]) & (indices[n] < len(x))).all()
            best = order(choice)[:k]
            if simple:
                # The choice scores are the inputs: nothing rounds, so the
                # total order decides.
                assert (indices[n] == best).all(), (n, indices[n], best)
            elif not np.isnan(x).any() and not np.isposinf(x).any():
                chosen = choice[indices[n]]
                assert (chosen >= choice[best[-1]] - tolerance).all()
                drop = chosen[:-1] - chosen[1:]
                assert ((drop >= -tolerance) | np.isneginf(chosen[1:])).all()
        if np.isposinf(x).any() and not np.isnan(x).any():
            if form["score"] == "softmax":
                assert np.isnan(gates[n]).all()
            continue
        expected = gates_row(x, choice, indices[n], row_form)
        np.testing.assert_allclose(
            gates[n],
            expected,
            rtol=0,
            atol=tolerance * max(1.0, form.get("route_scale", 1.0)) * max(
                1.0, np.nanmax(np.abs(expected), initial=1.0)
            ),
            equal_nan=True,
        )


def random(n, e, *, dtype=torch.float32, scale=3.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(n, e, generator=generator) * scale).to(dtype)


SHAPES = [
    (1, 1), (3, 1), (8, 2), (16, 2), (37, 5), (64, 8), (64, 64), (128, 8),
    (160, 8), (256, 8), (288, 8), (512, 10), (896, 16), (1024, 32), (2048, 32),
]


@pytest.mark.parametrize("e, k", SHAPES)
def test_selects_for_any_number_of_experts(e, k):
    check(random(5, e, seed=e), k, DEFAULTS, launches=[{"seed": 3}])


@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 50])
def test_any_number_of_tokens(n):
    check(random(n, 24, seed=n), 3, DEFAULTS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_element_types(dtype, index_dtype):
    check(random(9, 64, dtype=dtype), 8, DEFAULTS, index_dtype=index_dtype)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus", "none"])
@pytest.mark.parametrize("renorm", [True, False])
@pytest.mark.parametrize("eps", [0.0, 1e-2])
def test_score_functions(score, renorm, eps):
    z = random(6, 40, seed=4)
    if score == "none":
        z = z.softmax(-1)
    check(z, 6, {"score": score, "renorm": renorm, "eps": eps, "route_scale": 2.5})


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_extreme_scores(score):
    """Where the exponentials of single scores under- or overflow."""
    z = torch.tensor(
        [[-200.0, -150.0, -120.0, -199.0], [90.0, 100.0, 89.0, -90.0],
         [-20.0, -25.0, -16.0, -30.0], [1e30, 1e30, -1e30, 0.0]]
    )
    # ln s of softmax and sigmoid never underflows; sqrtsoftplus(-120) does.
    first = 1 if score == "sqrtsoftplus" else 0
    check(z[first:3], 2, {"score": score, "renorm": True})
    check(z, 3, {"score": score, "renorm": False})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ties_go_to_the_lower_index(dtype):
    generator = torch.Generator().manual_seed(1)
    z = torch.randint(-1, 2, (20, 48), generator=generator).to(dtype)
    z[3] = 0.0
    z[4, ::2] = -0.0  # equal to +0 (E2)
    z[4, 1::2] = 0.0
    check(z, 8, DEFAULTS)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus", "none"])
@pytest.mark.parametrize("renorm", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nan_and_infinities(score, renorm, dtype):
    inf, nan = math.inf, math.nan
    z = random(8, 20, dtype=dtype, seed=9).abs()
    z[0, 7] = nan  # E3
    z[1, 19] = inf  # E4
    z[2, 1::2] = -inf  # E5
    z[3] = -inf  # E6
    z[4] = -inf
    z[4, [3, 11]] = nan
    z[5] = nan
    z[6, :18] = -inf  # fewer than k in the support
    z[7] = 0.0 if score == "none" else -inf
    if score == "none":
        z[2, 1::2] = z[6, :18] = z[3] = 0.0
    check(z, 4, {"score": score, "renorm": renorm})


def test_masked_tokens_select_nothing():
    z = random(21, 32, seed=5)
    mask = torch.arange(21) % 3 != 1
    z[~mask] = math.nan  # E11
    check(z, 4, {**DEFAULTS, "mask": mask})


@pytest.mark.parametrize("score", ["sigmoid", "softmax", "sqrtsoftplus"])
def test_bias_selects_and_does_not_weigh(score):
    generator = torch.Generator().manual_seed(2)
    bias = torch.randn(96, generator=generator)
    bias[5] = -math.inf
    form = {"score": score, "renorm": True, "bias": bias, "route_scale": 2.5}
    check(random(7, 96, seed=6), 6, form)


@pytest.mark.parametrize(
    "e, n_group, topk_group, k",
    [(256, 8, 4, 8), (32, 4, 2, 5), (36, 12, 3, 4), (16, 16, 5, 5), (24, 2, 1, 12)],
)
@pytest.mark.parametrize("group_score", ["top2_sum", "max"])
def test_groups_limit_the_selection(e, n_group, topk_group, k, group_score):
    generator = torch.Generator().manual_seed(3)
    form = {
        "score": "sigmoid",
        "renorm": True,
        "bias": torch.randn(e, generator=generator) * 0.2,
        "n_group": n_group,
        "topk_group": topk_group,
        "group_score": group_score,
    }
    check(random(6, e, seed=e), k, form, launches=[{"seed": 1, "policy": 1}])


def test_equal_groups_go_to_the_lower_one():
    form = {
        "score": "sigmoid", "renorm": True, "n_group": 4, "topk_group": 2,
    }
    gates, indices = run(torch.zeros(3, 16), 8, form)
    assert (indices == torch.arange(8, dtype=torch.int32)).all()
    assert torch.allclose(gates, torch.full((3, 8), 0.125))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_forced_experts(index_dtype):
    generator = torch.Generator().manual_seed(7)
    forced = torch.stack(
        [torch.randperm(30, generator=generator)[:5] for _ in range(8)]
    ).to(index_dtype)
    forced[2, 3] = -1
    forced[5] = -1
    form = {**DEFAULTS, "forced": forced}
    check(random(8, 30, seed=8), 5, form, index_dtype=index_dtype)
    check(
        random(8, 30, seed=8), 5, {**form, "score": "sigmoid", "renorm": False},
        index_dtype=index_dtype,
    )


def test_batched_tokens():
    z = random(3 * 19, 16, seed=11).reshape(3, 19, 16)
    check(z, 2, DEFAULTS)


def test_approximate_instructions_may_err():
    """The tolerance holds if ex2 is off by two more ulp and sums are reordered."""
    check(
        random(33, 128, seed=12, scale=6.0), 8, {**DEFAULTS, "renorm": False},
        launches=[{"seed": s, "numerics": "perturbed"} for s in range(3)],
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("renorm", [True, False])
def test_a_forced_place_without_an_expert_has_gate_zero_in_any_row(renorm, dtype):
    import moe_mlir
    from moe_mlir import reference

    z = random(9, 12, dtype=dtype, seed=3)
    z[1, 3] = z[4] = math.nan
    z[3] = -math.inf
    generator = torch.Generator().manual_seed(4)
    forced = torch.stack([torch.randperm(12, generator=generator)[:4] for _ in z])
    forced[:, 1] = -1
    forced[5] = -1
    # Not representable in 32 bits, where it would be expert 3.
    forced[6, 2], forced[7, 3] = 12, 2**32 + 3
    with moe_mlir.simulate(chip="sm_90"):
        gates, indices = moe_mlir.grouped_topk(z, 4, forced=forced, renorm=renorm)
    none = (forced < 0) | (forced >= 12)
    expected, _ = reference.grouped_topk(
        z.double(), 4, forced=forced.masked_fill(none, -1), renorm=renorm)
    assert torch.equal(indices, forced) and gates[1, 1] == 0
    torch.testing.assert_close(gates.double(), expected, rtol=0, atol=4e-6, equal_nan=True)
