"""The sweeps of softmax_mix's gradient as kernels, executed in the PTX simulator.

Every launch must be free of findings and give the same bits under any schedule;
values are judged by the definition in float64, from the same lse and delta.
"""

import math
from dataclasses import dataclass

import pytest
import torch
from gpu_kernels import compile_function, shaped

from moe_mlir.ops._kernel import visibility

pytest.importorskip("moe_mlir.sim")

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
LAUNCHES = ({"seed": 1}, {"seed": 2, "policy": 1})


@dataclass
class Problem:
    n: int
    nk: int
    d: int
    e: int = 16
    batch: int = 1
    heads: int = 1
    dtype: torch.dtype = F32
    value_dtype: torch.dtype | None = None
    bias: tuple | None = None
    masked: bool = False
    causal: bool = False
    window: int | None = None
    scale: float = 0.5
    sums: bool = True

    def operands(self):
        """Inputs by name; what a masked token holds is NaN."""
        g = torch.Generator().manual_seed(self.n + self.nk + self.d)

        def normal(*shape, scale=1.0):
            return scale * torch.randn(*shape, generator=g)

        rows = (self.batch, self.heads)
        unit = math.sqrt(8.0 / self.d)
        inputs = {
            "q": normal(*rows, self.n, self.d, scale=unit).to(self.dtype),
            "k": normal(*rows, self.nk, self.d, scale=unit).to(self.dtype),
            "lse": torch.empty(*rows, self.n),
            "delta": normal(*rows, self.n),
        }
        if self.e:
            inputs["v"] = normal(self.batch, self.nk, self.e).to(self.value_dtype or self.dtype)
            inputs["dmixed"] = normal(*rows, self.n, self.e)
        if self.bias:
            inputs["bias"] = normal(*self.bias, self.n, self.nk)
        if self.masked:
            inputs["query_mask"] = torch.rand(self.batch, self.n, generator=g) > 0.2
            inputs["key_mask"] = torch.rand(self.batch, self.nk, generator=g) > 0.3
        x = self.logits(inputs)
        inputs["lse"] = torch.where(
            x.isfinite().any(-1), x.logsumexp(-1), -math.inf).float()
        if self.masked:
            inputs["q"][~inputs["query_mask"][:, None].expand(*rows, self.n)] = math.nan
            inputs["k"][~inputs["key_mask"][:, None].expand(*rows, self.nk)] = math.nan
            if self.e:
                inputs["v"][~inputs["key_mask"]] = math.nan
        return inputs

    def logits(self, inputs):
        x = self.scale * inputs["q"].double() @ inputs["k"].double().mT
        if self.bias:
            x = x + inputs["bias"].double()
        position = torch.arange(self.n)[:, None] + self.nk - self.n
        key = torch.arange(self.nk)[None]
        seen = torch.ones(self.n, self.nk, dtype=torch.bool)
        if self.causal:
            seen &= key <= position
        if self.window is not None:
            seen &= key > position - self.window
        seen = seen.expand(x.shape).clone()
        if self.masked:
            seen &= inputs["query_mask"][:, None, :, None] & inputs["key_mask"][:, None, None]
        return torch.where(seen, x, -math.inf)

    def reference(self, inputs):
        """The results of both sweeps by name, in float64."""
        clean = {name: x.nan_to_num(0.0).double() for name, x in inputs.items()
                 if name in ("q", "k", "v", "dmixed", "delta")}
        x = self.logits(inputs | {"q": clean["q"], "k": clean["k"]})
        lse = inputs["lse"].double()
        a = torch.where(lse[..., None].isfinite(), (x - lse[..., None]).exp(), 0.0)
        product = clean["dmixed"] @ clean["v"][:, None].mT if self.e else 0.0
        dx = a * (product - clean["delta"][..., None])
        results = {
            "dq": self.scale * dx @ clean["k"], "dq_sums": dx.sum(-1),
            "dk": self.scale * dx.mT @ clean["q"], "dk_sums": dx.sum(-2),
        }
        if self.e:
            results["dv"] = a.mT @ clean["dmixed"]
        if self.bias:
            shared = [dim for dim in (0, 1) if self.bias[dim] == 1]
            results["dbias"] = dx.sum(shared, keepdim=True) if shared else dx
        return results


def module_text(p, inputs, sweep):
    """A function of one sweep, and the names of its results."""
    def type_of(name, tensor):
        dynamic = {"bias": (2, 3), "v": (1,), "query_mask": (1,), "key_mask": (1,)}
        places = dynamic.get(name, (2,))
        return shaped("tensor", [None if i in places else size
                                 for i, size in enumerate(tensor.shape)], tensor.dtype)

    types = {name: type_of(name, x) for name, x in inputs.items()}
    first = ("q", "k", "lse", "delta")

    def clause(keyword, names):
        listed = ", ".join(f"%{name}" for name in names)
        return f"{keyword}({listed} : {', '.join(types[name] for name in names)})"

    clauses = [clause("ins", first)]
    if p.e:
        clauses.append(clause("values", ("v", "dmixed")))
    clauses += [clause(name, (name,)) for name in ("bias", "query_mask", "key_mask")
                if name in types]
    rows = (p.batch, p.heads, None)
    if sweep == "dq":
        outs = {"dq": (*rows, p.d)} | ({"dq_sums": rows} if p.sums else {})
        if p.bias:
            outs["dbias"] = (*p.bias, None, None)
    else:
        outs = {"dk": (*rows, p.d)} | ({"dv": (*rows, p.e)} if p.e else {})
        outs |= {"dk_sums": rows} if p.sums else {}
    out_types = {name: shaped("tensor", shape, F32) for name, shape in outs.items()}
    size = "%n" if sweep == "dq" else "%m"
    inits = "\n  ".join(
        f"%o_{name} = tensor.empty({'%n, %m' if name == 'dbias' else size}) : {t}"
        for name, t in out_types.items())
    listed = ", ".join(out_types.values())
    attributes = [f"scale = {p.scale} : f64", f"visibility = {visibility(p.causal, p.window)}",
                  f"with_sums = {str(p.sums).lower()}"]
    if "dbias" in outs:
        attributes.append("with_dbias = true")
    many = len(outs) > 1
    values = ", ".join(f"%r#{i}" if many else "%r" for i in range(len(outs)))
    text = f"""func.func @sweep({', '.join(f'%{n}: {t}' for n, t in types.items())}) -> ({listed}) {{
  %c2 = arith.constant 2 : index
  %n = tensor.dim %q, %c2 : {types['q']}
  %m = tensor.dim %k, %c2 : {types['k']}
  {inits}
  %r{f':{len(outs)}' if many else ''} = moe.softmax_mix_backward_{sweep if sweep == 'dq' else 'dkv'}
      {' '.join(clauses)} outs({', '.join(f'%o_{n}' for n in outs)} : {listed})
      {{{', '.join(attributes)}}} -> {listed}
  return {values} : {listed}
}}"""
    return text, list(outs)


def check(p: Problem, launches=LAUNCHES, chip="sm_90"):
    """Runs both sweeps; returns the reports of the last launch of each."""
    inputs = p.operands()
    expected = p.reference(inputs)
    last = []
    for sweep in ("dq", "dk"):
        text, names = module_text(p, inputs, sweep)
        function = compile_function(text, chip)
        results = [torch.empty(expected[name].shape) for name in names]
        first = None
        for launch in launches:
            for tensor in results:
                tensor.fill_(77.0)
            reports = function(*inputs.values(), *results, **launch)
            for report in reports:
                assert report.ok, str(report)
            if first is not None:
                assert all(torch.equal(a, b) for a, b in zip(results, first))
            first = [tensor.clone() for tensor in results]
        last.append(reports)
        for name, found in zip(names, results):
            # Errors are those of f32 sums of terms of this size.
            atol = 2e-6 * max(1.0, expected[name].abs().max().item() if found.numel() else 1.0)
            torch.testing.assert_close(
                found.double(), expected[name], rtol=2e-5, atol=10 * atol,
                msg=lambda m, name=name: f"{name}: {m}")
    return last


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("n, nk", [(0, 0), (1, 1), (7, 0), (40, 70), (65, 64)])
def test_any_number_of_tokens(dtype, n, nk):
    check(Problem(n, nk, 32, 8, dtype=dtype, causal=n == 65))


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("d, e", [(8, 4), (72, 33), (352, 16), (40, 0)])
def test_any_width(dtype, d, e):
    check(Problem(40, 50, d, e, dtype=dtype), LAUNCHES[:1])


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_batches_heads_and_windows(dtype):
    check(Problem(40, 40, 16, 8, batch=2, heads=3, dtype=dtype, causal=True, window=9))


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_garbage_at_masked_tokens_does_not_leak(dtype):
    check(Problem(50, 70, 24, 8, batch=2, dtype=dtype, masked=True), LAUNCHES[:1])


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("shape", [(2, 3), (1, 3), (2, 1), (1, 1)])
def test_gradients_of_pair_biases(dtype, shape):
    """Each batch and head has its own, or shares one: no buffer of all pairs beside the result."""
    p = Problem(20, 45, 16, 8, batch=2, heads=3, dtype=dtype, bias=shape, causal=True)
    (by_queries, _) = check(p)
    assert len(by_queries) == 1
