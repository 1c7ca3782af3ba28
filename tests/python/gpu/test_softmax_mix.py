"""softmax_mix as a kernel, executed in the PTX simulator.

Every launch must be free of findings and give the same bits under any schedule;
values are judged by a dense softmax in float64 (spec, section 1).
"""

import math
from dataclasses import dataclass, field

import pytest
import torch
from gpu_kernels import compile_function, shaped

from moe_mlir.ops._kernel import visibility

sim = pytest.importorskip("moe_mlir.sim")

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
LAUNCHES = ({"seed": 1}, {"seed": 2, "policy": 1})


@dataclass
class Problem:
    """Operands by name, and the op's attributes."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor | None = None
    operands: dict = field(default_factory=dict)
    scale: float = 1.0
    causal: bool = False
    window: int | None = None
    exclude_self: bool = False
    entropy: bool = False
    origin: int | None = None
    precision: str = "ieee"


def problem(
    n, nk, d, e=16, *, batch=1, heads=1, dtype=F32, value_dtype=None, norm=8.0, seed=0, **options
):
    """Queries and keys whose products are about `norm`; e = 0: no values."""
    g = torch.Generator().manual_seed(seed)
    unit = math.sqrt(norm / d)
    q = (unit * torch.randn(batch, heads, n, d, generator=g)).to(dtype)
    k = (unit * torch.randn(batch, heads, nk, d, generator=g)).to(dtype)
    v = torch.randn(batch, nk, e, generator=g).softmax(-1).to(value_dtype or dtype)
    return Problem(q, k, v if e else None, **options)


# ---------------------------------------------------------------------- text


def module_text(p: Problem):
    """A function @mix of all operands and results, and the results' buffers."""
    batch, heads, n, d = p.q.shape
    operands = {"q": p.q, "k": p.k, "v": p.v, **p.operands}
    operands = {name: tensor for name, tensor in operands.items() if tensor is not None}

    def type_of(name, tensor):
        """Tokens and sequences are dynamic, the rest is static."""
        dynamic = {"q": (0, 2), "k": (0, 2), "bias": (2, 3), "key_bias": (0, 2)}.get(name, (0, 1))
        shape = [None if i in dynamic else size for i, size in enumerate(tensor.shape)]
        return shaped("tensor", shape, tensor.dtype)

    types = {name: type_of(name, tensor) for name, tensor in operands.items()}
    clauses = [f"ins(%q, %k : {types['q']}, {types['k']})"]
    for name, keyword in (
        ("v", "values"), ("key_bias", "key_bias"), ("bias", "bias"),
        ("query_mask", "query_mask"), ("key_mask", "key_mask"),
    ):  # fmt: skip
        if name in types:
            clauses.append(f"{keyword}(%{name} : {types[name]})")
    if "query_level" in types:
        clauses.append(
            f"levels(%query_level, %key_level : {types['query_level']}, {types['key_level']})"
        )
    arguments = [f"%{name}: {t}" for name, t in types.items()]
    if p.origin is not None:
        arguments.append("%origin: index")
        clauses.append("origin(%origin : index)")
    results = []
    if p.v is not None:
        results.append((torch.full((batch, heads, n, p.v.shape[-1]), 77.0), p.v.shape[-1:]))
    results += [(torch.full((batch, heads, n), 77.0), ())] * (2 if p.entropy else 1)
    results = [(tensor.clone(), tail) for tensor, tail in results]
    out_types = [shaped("tensor", (None, heads, None, *tail), F32) for _, tail in results]
    attributes = [f"scale = {float(p.scale)!r} : f64"]
    attributes.append(f"visibility = {visibility(p.causal, p.window, p.exclude_self)}")
    attributes.append(f"with_entropy = {str(p.entropy).lower()}")
    attributes.append(f"precision = #moe.precision<{p.precision}>")
    inits = [
        f"%o{i} = tensor.empty(%b, %n) : {t}" for i, t in enumerate(out_types)
    ]
    outs = ", ".join(f"%o{i}" for i in range(len(results)))
    values = ", ".join(f"%r#{i}" for i in range(len(results))) if len(results) > 1 else "%r"
    target = f"%r:{len(results)}" if len(results) > 1 else "%r"
    listed = ", ".join(out_types)
    lines = [
        "%c0 = arith.constant 0 : index",
        "%c2 = arith.constant 2 : index",
        f"%b = tensor.dim %q, %c0 : {types['q']}",
        f"%n = tensor.dim %q, %c2 : {types['q']}",
        *inits,
        f"{target} = moe.softmax_mix {' '.join(clauses)} outs({outs} : {listed}) "
        f"{{{', '.join(attributes)}}} -> {listed}",
        f"return {values} : {listed}",
    ]
    body = "\n  ".join(lines)
    text = f"func.func @mix({', '.join(arguments)}) -> ({listed}) {{\n  {body}\n}}\n"
    inputs = [*operands.values(), *([] if p.origin is None else [p.origin])]
    return text, inputs, [tensor for tensor, _ in results]


# ----------------------------------------------------------------- reference


def reference(p: Problem):
    """mixed (or None), lse and entropy in float64, by definition."""
    get = p.operands.get
    _, _, n, _ = p.q.shape
    nk = p.k.shape[2]
    clean_k = p.k.double()
    v = None if p.v is None else p.v.double()
    key_mask, query_mask = get("key_mask"), get("query_mask")
    if key_mask is not None:
        clean_k = clean_k.masked_fill(~key_mask[:, None, :, None], 0)
        v = None if v is None else v.masked_fill(~key_mask[..., None], 0)
    x = p.scale * p.q.double() @ clean_k.mT
    largest = x[x.isfinite()].abs().max().item() if x.numel() else 0.0
    if get("key_bias") is not None:
        x = x + get("key_bias").double()[:, :, None, :]
    if get("bias") is not None:
        x = x + get("bias").double()
    origin = nk - n if p.origin is None else p.origin
    position = torch.arange(n)[:, None] + origin
    key = torch.arange(nk)[None, :]
    visible = torch.ones(n, nk, dtype=torch.bool)
    if p.causal:
        visible &= key <= position
    if p.exclude_self:
        visible &= key != position
    if p.window is not None:
        visible &= key > position - p.window - int(p.exclude_self)
    visible = visible.expand(x.shape).clone()
    if key_mask is not None:
        visible &= key_mask[:, None, None, :]
    if query_mask is not None:
        visible &= query_mask[:, None, :, None]
    if get("query_level") is not None:
        visible &= (get("key_level")[:, None, None, :] <= get("query_level")[:, None, :, None])
    x = torch.where(visible, x, -math.inf)
    lse = x.logsumexp(-1) if nk else torch.full(x.shape[:-1], -math.inf, dtype=x.dtype)
    empty = ~visible.any(-1)
    a = torch.where(empty[..., None], 0.0, (x - lse[..., None]).exp())
    entropy = lse - (a * x.masked_fill(~visible, 0)).sum(-1)
    mixed = None if v is None else a @ v[:, None]
    return mixed, lse.masked_fill(empty, -math.inf), entropy.masked_fill(empty, 0), largest


def assert_close(actual, expected, atol, what):
    actual = actual.double()
    special = ~expected.isfinite()
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    assert same[special].all(), f"{what}: infinities or NaN in other places"
    error = (actual - expected)[~special].abs()
    worst = error.max().item() if error.numel() else 0.0
    assert worst <= atol, f"{what}: error {worst:.3e} exceeds {atol:.3e}"


def check(p: Problem, launches=LAUNCHES, chip="sm_90"):
    text, inputs, results = module_text(p)
    function = compile_function(text, chip)
    first = None
    for launch in launches:
        for tensor in results:
            tensor.fill_(77.0)
        reports = function(*inputs, *results, **launch)
        for report in reports:
            assert report.ok, str(report)
        if first is not None:
            for tensor, other in zip(results, first):
                assert torch.equal(tensor.view(torch.int32), other.view(torch.int32))
        first = [tensor.clone() for tensor in results]
    mixed, lse, entropy, largest = reference(p)
    rounding = 8 * 2.0**-24 if p.precision == "ieee" else 2 * 2.0**-11
    atol = min(1.0, 1e-6 + rounding * largest)
    buffers = list(results)
    if mixed is not None:
        assert_close(buffers.pop(0), mixed, atol, "mixed")
    assert_close(buffers.pop(0), lse, atol, "lse")
    if buffers:
        # An entropy is a sum over all keys of logits times weights.
        assert_close(buffers.pop(0), entropy, 8 * atol, "entropy")
    return reports


# --------------------------------------------------------------------- tests


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("d, e", [(1, 1), (13, 3), (16, 16), (40, 64), (72, 33), (24, 200)])
def test_any_width_and_number_of_columns(dtype, d, e):
    check(problem(70, 70, d, e, dtype=dtype, causal=True), launches=LAUNCHES[:1])


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("n, nk", [(0, 0), (0, 5), (1, 1), (1, 130), (65, 64), (7, 0), (20, 7)])
@pytest.mark.parametrize("causal", [True, False])
def test_any_number_of_tokens(dtype, n, nk, causal):
    check(problem(n, nk, 32, 8, dtype=dtype, causal=causal))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_wide_features(dtype):
    check(problem(33, 90, 352, 16, dtype=dtype, norm=30.0), launches=LAUNCHES[:1])


def test_features_that_travel_with_the_keys():
    check(problem(20, 70, 1024, 64, dtype=BF16, causal=True), LAUNCHES[:1], chip="sm_86")


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("value_dtype", [F32, BF16, F16])
def test_values_of_another_type(dtype, value_dtype):
    check(problem(30, 80, 64, 24, dtype=dtype, value_dtype=value_dtype), launches=LAUNCHES[:1])


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_tf32_precision(dtype):
    check(problem(40, 80, 64, 24, dtype=dtype, precision="tf32"), launches=LAUNCHES[:1])


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_batches_and_heads(dtype):
    check(problem(40, 50, 24, 8, batch=2, heads=3, dtype=dtype, causal=True))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_log_sum_exp_and_entropy_alone(dtype):
    check(problem(70, 70, 32, 0, heads=2, dtype=dtype, entropy=True, causal=True))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("norm", [1.0, 352.0])
def test_entropy_with_values(dtype, norm):
    check(problem(70, 70, 32, 8, dtype=dtype, entropy=True, norm=norm), launches=LAUNCHES[:1])


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("exclude_self", [True, False])
@pytest.mark.parametrize("window", [None, 1, 70])
def test_visibility(dtype, causal, exclude_self, window):
    check(
        problem(
            140, 140, 16, 8, dtype=dtype, causal=causal, exclude_self=exclude_self, window=window
        ),
        launches=LAUNCHES[:1],
    )


@pytest.mark.parametrize("window", [2**31 - 5, 2**33 + 3])
def test_windows_that_reach_further_than_positions(window):
    """Queries before key 0 see all keys: a difference of 32 bits must not wrap."""
    check(problem(80, 30, 16, 8, window=window), launches=LAUNCHES[:1])


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("origin", [-30, 0, 25])
def test_origin(dtype, origin):
    check(problem(40, 60, 16, 8, dtype=dtype, causal=True, origin=origin), launches=LAUNCHES[:1])


def problem_with_garbage_at_masked_tokens(dtype):
    p = problem(70, 100, 40, 8, batch=2, dtype=dtype)
    g = torch.Generator().manual_seed(3)
    key_mask = torch.rand(2, 100, generator=g) > 0.3
    key_mask[1] = False
    query_mask = torch.rand(2, 70, generator=g) > 0.2
    p.k[~key_mask[:, None]] = math.nan
    p.v[~key_mask] = math.nan
    p.operands = {"key_mask": key_mask, "query_mask": query_mask}
    return p


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_garbage_at_masked_tokens_does_not_leak(dtype):
    check(problem_with_garbage_at_masked_tokens(dtype))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_levels(dtype):
    p = problem(90, 90, 16, 8, dtype=dtype)
    level = torch.rand(1, 90, generator=torch.Generator().manual_seed(4))
    level[0, 5] = level[0, 9]
    p.operands = {"query_level": level, "key_level": level.clone()}
    check(p)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("bias_dtype", [F32, BF16])
@pytest.mark.parametrize("shape", [(2, 3), (1, 3), (2, 1), (1, 1)])
def test_biases(dtype, bias_dtype, shape):
    p = problem(30, 75, 24, 8, batch=2, heads=3, dtype=dtype, scale=0.5, causal=True)
    g = torch.Generator().manual_seed(5)
    p.operands = {
        "key_bias": torch.randn(2, 3, 75, generator=g),
        "bias": torch.randn(*shape, 30, 75, generator=g).to(bias_dtype),
    }
    p.operands["key_bias"][0, 0, 7] = -math.inf
    check(p, launches=LAUNCHES[:1])


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("numerics", ["tensor_core", "perturbed"])
def test_holds_on_real_arithmetic_units(dtype, numerics):
    p = problem(64, 200, 352, 16, dtype=dtype, norm=30.0)
    check(p, launches=[{"seed": 3, "numerics": numerics}])


@pytest.mark.parametrize("chip", ["sm_80", "sm_86", "sm_120"])
def test_other_chips(chip):
    check(problem(70, 70, 352, 16, dtype=BF16, causal=True), LAUNCHES[:1], chip=chip)


@pytest.mark.parametrize("d, e", [(128, 16), (72, 40), (64, 200)])
def test_tensor_cores_meet_no_bank_conflicts(d, e):
    (report,) = check(problem(128, 128, d, e, dtype=BF16), LAUNCHES[:1])
    counters = report.counters
    assert counters["shared_wavefronts"] == counters["shared_requests"]


def test_causal_tiles_are_skipped():
    """Half of the keys are behind the queries: about half of the work."""
    (whole,) = check(problem(512, 512, 64, 16, dtype=BF16), LAUNCHES[:1])
    (half,) = check(problem(512, 512, 64, 16, dtype=BF16, causal=True), LAUNCHES[:1])
    assert half.counters["shared_requests"] < 0.7 * whole.counters["shared_requests"]


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_more_columns_than_registers_hold(dtype):
    """In groups of columns, each of which computes the logits again."""
    (_,) = check(problem(20, 70, 16, 288, dtype=dtype, causal=True), launches=LAUNCHES)


def test_columns_that_are_no_equal_groups():
    """Decomposed, with the weights in the workspace."""
    check(problem(20, 30, 16, 257, causal=True), launches=LAUNCHES[:1])


@pytest.mark.parametrize("window, exclude_self", [(2**33 + 3, False), (2**63 - 1, True)])
def test_windows_wider_than_positions(window, exclude_self):
    """They end before the first key, whatever their lower 32 bits say."""
    import moe_mlir
    from moe_mlir import reference

    q = torch.randn(1, 1, 21, 16, generator=torch.Generator().manual_seed(1))
    with moe_mlir.simulate(chip="sm_90"):
        found = moe_mlir.attention_entropy(
            q, q, causal=True, window=window, exclude_self=exclude_self)
    expected = reference.attention_entropy(
        q.double(), q.double(), causal=True, exclude_self=exclude_self)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
