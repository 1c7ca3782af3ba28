"""kernel_configs of moe_mlir.compile: which kernel runs an op, asked for by its name."""

import re

import pytest
import torch

import moe_mlir
from moe_mlir._native import native
from moe_mlir.compiler import cache, jit


class Inform(torch.nn.Module):
    def forward(self, u, p):
        return moe_mlir.similarity_inform(u, p, causal=False)[0]


QUERIES = {"similarity_inform": "<schedule = queries>"}
MMA = {"softmax_mix": "<schedule = mma>"}


@pytest.fixture(scope="module")
def example():
    generator = torch.Generator().manual_seed(18)
    return (torch.randn(2, 40, 64, generator=generator).bfloat16(),
            torch.randn(2, 40, 16, generator=generator).softmax(-1))


@pytest.fixture(scope="module")
def module(example):
    return moe_mlir.export(Inform(), example)


def expected(tokens, probabilities):
    return moe_mlir.reference.similarity_inform(tokens, probabilities, causal=False)[0]


@pytest.mark.parametrize("kernel_configs", [QUERIES, {**QUERIES, "softmax_mix": "<rows = 192>"},
                                            {"router_logits": "<rows = 7>"}])
def test_results_are_those_of_the_reference_on_a_cpu(module, example, kernel_configs):
    compiled = moe_mlir.compile(module, kernel_configs=kernel_configs)
    torch.testing.assert_close(compiled(*example), expected(*example), rtol=0, atol=1e-5)


def test_results_are_those_of_the_reference_on_a_gpu(module, example):
    compiled = moe_mlir.compile(module, target="sm_90a", kernel_configs=MMA)
    with moe_mlir.simulate(chip="sm_90a"):
        found = compiled(*example)
    torch.testing.assert_close(found, expected(*example), rtol=0, atol=1e-5)


def test_the_kernel_is_the_one_asked_for(module):
    chosen = jit.compile_ptx_cached(module.text, "sm_90a")
    asked_for = jit.compile_ptx_cached(jit.with_kernel_configs(module.text, MMA), "sm_90a")
    assert "wgmma.mma_async" in chosen and "wgmma" not in asked_for
    assert "mma.sync" in asked_for


def test_the_ir_shows_it(module):
    parsed = native().Module.parse(jit.with_kernel_configs(module.text, QUERIES))
    parsed.run("builtin.module(moe-select-kernel-config)")
    op = re.search("moe.similarity_inform.*", parsed.text())[0]
    assert "#moe.kernel_config<schedule = queries>" in op


def test_caches_keep_kernels_apart(module, example, monkeypatch, tmp_path):
    monkeypatch.setenv("MOE_MLIR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(jit, "_loaded", type(jit._loaded)())
    both = {**QUERIES, "softmax_mix": "<rows = 192>"}
    entries = []
    for configs in (None, both, dict(reversed(both.items())), {}):
        moe_mlir.compile(module, kernel_configs=configs)
        entries.append(len(cache.open_default().entries()))
    assert entries == [1, 2, 2, 2]


def test_another_size_is_compiled_likewise(example):
    class Branching(Inform):
        def forward(self, u, p):
            return super().forward(u, p) if u.shape[1] > 8 else super().forward(u, p) + 1

    compiled = moe_mlir.compile(Branching(), example, kernel_configs=QUERIES)
    few = [tensor[:, :8] for tensor in example]
    torch.testing.assert_close(compiled(*few), expected(*few) + 1, rtol=0, atol=1e-5)
    assert [p._kernel_configs for p in compiled._programs] == [QUERIES, QUERIES]


@pytest.mark.parametrize("target, kernel_configs, message", [
    ("cpu", {"softmax_mixed": "<rows = 64>"},
     "ops of the moe dialect, such as softmax_mix, found one for 'softmax_mixed'"),
    ("cpu", {"softmax_mix": "<tile = 64>"},
     "configuration of 'softmax_mix' as it is printed, .* found '<tile = 64>': .* name: tile"),
    ("cpu", {"softmax_mix": "rows = 64"}, "as it is printed, .* found 'rows = 64'"),
    ("cpu", {"softmax_mix": "<rows = -1>"}, "rows .* to be positive, .* found -1"),
    ("cpu", {"similarity_inform": "<schedule = mma>"},
     "test_kernel_configs.py:.* no such kernel on the CPU: .* one of GPUs(.|\n)*"
     "possible: #moe.kernel_config<schedule = queries>"),
    ("sm_90", {"similarity_inform": "<schedule = pairs_once>"},
     "test_kernel_configs.py:.* no such kernel on sm_90: .* one of CPUs(.|\n)*schedule = float"),
    ("sm_90", {"softmax_mix": "<schedule = wgmma>"},
     "test_kernel_configs.py:.* no such kernel on sm_90: .*schedule = wgmma>"),
])
def test_what_no_kernel_can_do_is_an_error(module, target, kernel_configs, message):
    with pytest.raises(ValueError, match=message):
        moe_mlir.compile(module, target=target, kernel_configs=kernel_configs)


@pytest.mark.parametrize("kernel_configs", ["softmax_mix=<rows = 64>", {"softmax_mix": 64}])
def test_other_types_are_refused(module, kernel_configs):
    with pytest.raises(TypeError, match="expected 'kernel_configs' to map names of ops"):
        moe_mlir.compile(module, kernel_configs=kernel_configs)
