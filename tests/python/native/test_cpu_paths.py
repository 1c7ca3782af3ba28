"""Every kind of vectors that kernels are compiled for, forced by MOE_MLIR_CPU."""

import os
import textwrap

import pytest
from support import run_python

from moe_mlir._native import native

# No vectors beyond 128 bits; AVX2; AVX-512 without bf16 products.
CPUS = ("x86-64-v2", "x86-64-v3", "x86-64-v4")

# Each family of kernels on odd sizes, judged by the reference in float64.
SCRIPT = """
import itertools, torch, moe_mlir
from moe_mlir import reference
from moe_mlir.ops import _kernel

torch.manual_seed(0)
def near(a, b, tol): assert float((a.double() - b).abs().max()) <= tol, (a, b)

for k in (2, 5, 20):
    z = torch.randn(37, 40)
    gates, indices = moe_mlir.topk_renorm(z, k)
    expected, order = reference.topk_renorm(z.double(), k)
    assert torch.equal(indices, order)
    near(gates, expected, 1e-6)

for dtype, causal in itertools.product((torch.float32, torch.bfloat16), (True, False)):
    u = (torch.randn(2, 171, 37) / 4).to(dtype)
    e = torch.randn(2, 171, 5).softmax(-1)
    leaves = [x.clone().requires_grad_() for x in (u, e)]
    p, lse = moe_mlir.similarity_inform(*leaves, causal=causal)
    wide = [x.detach().double().requires_grad_() for x in (u, e)]
    expected, expected_lse = reference.similarity_inform(*wide, causal=causal)
    near(p, expected, 1e-5)
    near(lse, expected_lse, 1e-5)
    cotangent = torch.randn(2, 171, 5)
    mine = torch.autograd.grad(p, leaves, cotangent)
    theirs = torch.autograd.grad(expected, wide, cotangent.double())
    for a, b in zip(mine, theirs):
        near(a, b, 1e-4 if dtype == torch.float32 else 2e-2)

wide = torch.randn(1, 130, 200) / 8
p, _ = moe_mlir.similarity_inform(wide, wide.softmax(-1)[..., :5].contiguous(), causal=True)
near(p, reference.similarity_inform(
    wide.double(), wide.softmax(-1)[..., :5].double(), causal=True)[0], 1e-5)

h, assign = torch.randn(100, 37), torch.randint(-1, 5, (100,))
s, mean, count = moe_mlir.mad_dispersion(h, assign, 5)
expected_s, expected_mean, expected_count = reference.mad_dispersion(h.double(), assign, 5)
near(s, expected_s, 1e-5); near(mean, expected_mean, 1e-5)
assert torch.equal(count, expected_count)

w = torch.randn(9, 37)
near(moe_mlir.router_logits(h, w), h.double() @ w.double().T, 1e-4)
a = torch.rand(9, 9)
near(moe_mlir.adjacency_update(a, torch.randint(0, 9, (50, 3))[:, :1]), a.double(), 1.0)
near(moe_mlir.adjacency_gate(w[:, :9].softmax(-1), a),
     w[:, :9].double().softmax(-1) @ a.double().T, 1e-5)
"""


def run(cpu, code=SCRIPT, **environment):
    return run_python("-c", textwrap.dedent(code), timeout=400,
                      env={**os.environ, "MOE_MLIR_CPU": cpu, **environment})


def missing_features(cpu):
    compiler = native()
    absent = {f[1:] for f in compiler.host_cpu()[1].split(",") if f.startswith("-")}
    return [f for f in compiler.code_features(cpu).split(",") if f[1:] in absent]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("cpu", CPUS)
def test_kernels_for_a_smaller_cpu_are_right(cpu):
    if missing_features(cpu):
        pytest.skip(f"this machine does not run code for {cpu}")
    result = run(cpu)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("cpu, register", [("x86-64-v3", "%ymm"), ("x86-64-v4", "%zmm")])
def test_the_vectors_are_those_of_the_cpu(cpu, register, tmp_path):
    import torch

    from moe_mlir.ops.similarity_inform import Form, Options, kernel

    f32 = torch.float32
    form, options = Form(f32, f32, 16, 8, 16), Options(1.0, True, None, "all", "ieee")
    native().compile_object(kernel(form, options).text(), dump_dir=str(tmp_path), cpu=cpu)
    code = (tmp_path / "91-code.s").read_text()
    assert register in code
    assert cpu == "x86-64-v4" or "%zmm" not in code


def test_bf16_tokens_are_multiplied_in_pairs_where_the_cpu_can(tmp_path):
    import torch

    from moe_mlir.ops.similarity_inform import Form, Options, kernel

    bf16 = torch.bfloat16
    form = Form(bf16, torch.float32, 16, 8, 16)
    options = Options(1.0, True, None, "all", "ieee")
    for cpu, expected in (("sapphirerapids", True), ("x86-64-v4", False)):
        native().compile_object(
            kernel(form, options).text(), dump_dir=str(tmp_path / cpu), cpu=cpu
        )
        assert ("vdpbf16ps" in (tmp_path / cpu / "91-code.s").read_text()) == expected


def test_a_cpu_that_the_machine_is_not_is_refused():
    result = run("diamondrapids", "import torch, moe_mlir; moe_mlir.topk_renorm(torch.randn(4, 4), 1)")
    if result.returncode == 0:
        pytest.skip("this machine is as large as any")
    assert "expected MOE_MLIR_CPU to name a CPU whose code this machine runs" in result.stderr


def test_an_unknown_cpu_is_refused():
    result = run("no-such-cpu", "import torch, moe_mlir; moe_mlir.topk_renorm(torch.randn(4, 4), 1)")
    assert "expected a CPU of x86_64 that LLVM knows, or 'native', found 'no-such-cpu'" in result.stderr
