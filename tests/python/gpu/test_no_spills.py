"""Every op, forward and backward, keeps its values in registers on every chip, as ptxas sees it:
nothing is spilled, and no kernel has a stack frame.

The kernels are those that the calls below ask for; none of them runs.
"""

import json
import re
import subprocess

import pytest
import torch
from seeds import some
from test_gpu_figures import figures

import moe_mlir as m
from moe_mlir.compiler.chips import target_chips
from moe_mlir.compiler.jit import compile_kernels_cached
from moe_mlir.ops.token_rows import token_rows
from moe_mlir.sim.simulation import intercept
from moe_mlir_bench.gpu_check.cases import OPS, operands
from moe_mlir_bench.gpu_check.modules import router_text

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
N = 4


def normal(*shape, dtype=F32):
    return torch.randn(*shape).to(dtype)


def select(dtype, experts, k):
    return m.topk_renorm(normal(N, experts, dtype=dtype).requires_grad_(), k)[0]


def select_groups(dtype, experts, k):
    return m.grouped_topk(normal(N, experts, dtype=dtype).requires_grad_(), k, bias=normal(experts),
                          n_group=8, topk_group=4)[0]


def inform(dtype, width, experts):
    return m.similarity_inform(normal(1, N, width, dtype=dtype).requires_grad_(),
                               normal(1, N, experts, dtype=dtype).requires_grad_(), causal=True)


def inform_in_parts(width, experts):
    """Values of f32 beside tokens of bf16: each is a sum of bf16 on the tensor cores."""
    return m.similarity_inform(normal(1, N, width, dtype=BF16), normal(1, N, experts),
                               causal=True)


def posterior(dtype, width, head_width, experts, mode):
    q, k, v = (normal(1, 2, N, head_width, dtype=dtype).requires_grad_() for _ in range(3))
    return m.attention_posterior(
        q, k, normal(1, N, width, dtype=dtype).requires_grad_(),
        normal(1, N, experts, dtype=dtype), v=v, wo=normal(2, width, head_width, dtype=dtype),
        causal=True, head_mode=mode)


def attend(dtype, head_width):
    q, k, v = (normal(1, 2, N, head_width, dtype=dtype).requires_grad_() for _ in range(3))
    return m.attention(q, k, v, causal=True)


def disperse(dtype, width, experts):
    return m.mad_dispersion(normal(N, width, dtype=dtype), torch.zeros(N, dtype=torch.int64),
                            experts)


def adjacency(experts, k):
    a, p = torch.ones(experts, experts), torch.ones(N, experts).requires_grad_()
    m.adjacency_update(a, torch.zeros(N, k, dtype=torch.int64))
    return m.adjacency_gate(p, a)


def place(experts, k):
    idx = torch.zeros(N, k, dtype=torch.int64)
    m.dispatch(idx, experts, capacity_factor=1.25, mask=torch.ones(N, dtype=torch.bool),
               expert_map=torch.zeros(experts, dtype=torch.int32), alignment=16)
    return token_rows(idx)


def add_up(dtype, width, k):
    return m.combine(normal(N, width, dtype=dtype), normal(N, k),
                     torch.zeros(N, k, dtype=torch.int64), shared=normal(N, width, dtype=dtype))


# (call, *arguments): the forms that need the most registers, or differ between chips.
WIDE_CALLS = [
    (select, F32, 512, 10), (select_groups, BF16, 256, 8),
    (inform, BF16, 352, 16), (inform, BF16, 1024, 256), (inform, F16, 352, 16),
    (inform, F32, 352, 64), (inform, F32, 128, 256), (disperse, BF16, 352, 16),
    (inform, BF16, 256, 256), (inform_in_parts, 352, 256), (inform_in_parts, 768, 160),
    (place, 2048, 8), (add_up, BF16, 2048, 10), (add_up, F32, 2048, 8),
    (inform_in_parts, 1024, 128), (attend, BF16, 44), (attend, BF16, 128), (attend, F32, 44),
]  # fmt: skip
# Products of f32 on the float units, all of whose sums are in registers.
FLOAT_CALLS = [(inform, F32, 64, 8), (posterior, F32, 512, 64, 16, "all")]
CALLS = [
    (select, BF16, 64, 8), (select, BF16, 256, 8), (select, BF16, 2048, 64),
    (select, F32, 16, 2), (select, F32, 128, 8), (select, F32, 256, 8),
    (select, F32, 2048, 64), (select, F16, 384, 6), (select_groups, F32, 256, 8),
    (inform, BF16, 64, 8), (inform, BF16, 128, 64),
    (posterior, BF16, 512, 64, 64, "min_entropy"), *FLOAT_CALLS,
    (disperse, F32, 1024, 64), (adjacency, 64, 8), (adjacency, 256, 8),
]  # fmt: skip
# dtype, experts, width, k of a router's product and selection.
ROUTERS = [(BF16, 16, 352, 2), (BF16, 128, 4096, 8), (F16, 256, 7168, 8), (F32, 64, 1024, 8)]


class Recorder:
    """Ops add the module that they would run, and their results are 0."""

    def __init__(self):
        self.texts = {}

    def run(self, kernel, tensors):
        self.texts[kernel.text()] = None
        for result in tensors[len(kernel.inputs):]:
            result.zero_()


def modules(calls):
    """What the calls and their gradients would run."""
    recorder = Recorder()
    with intercept(recorder):
        for call, *arguments in calls:
            result = call(*arguments)
            result = result if isinstance(result, torch.Tensor) else result[0]
            if result.requires_grad:
                result.sum().backward()
    return list(recorder.texts)


def spills(text, chip, folder):
    """What ptxas has against the kernels of a module."""
    ptx = folder / "k.ptx"
    ptx.write_text(json.loads(compile_kernels_cached(text, chip))["ptx"])
    done = subprocess.run(
        [figures.find_tool("ptxas"), f"-arch={chip}", "-v", "-warn-spills", "-warn-lmem-usage",
         "-Werror", str(ptx), "-o", str(folder / "k.cubin")], capture_output=True, text=True)
    found = [line for line in done.stderr.splitlines() if re.match(r"ptxas (error|warning)", line)]
    if found or done.returncode:
        return [re.search(r"func.func @\w+\([^)]*\)", text)[0], *found]
    return []


@pytest.mark.drawn(1)
@pytest.mark.parametrize("chip", some(target_chips(), by=lambda name: name[:4]))
def test_wide_kernels_keep_their_values_in_registers(chip, tmp_path):
    texts = modules(WIDE_CALLS)
    texts += [router_text(e, width, k, dtype=dtype, bias=True) for dtype, e, width, k in ROUTERS]
    assert [line for text in texts for line in spills(text, chip, tmp_path)] == []


@pytest.mark.parametrize("chip", ["sm_80", "sm_90", "sm_120"])
def test_sums_of_f32_stay_in_registers(chip, tmp_path):
    texts = modules(FLOAT_CALLS)
    assert [line for text in texts for line in spills(text, chip, tmp_path)] == []


@pytest.mark.parametrize("chip", ["sm_80", pytest.param("sm_120", marks=pytest.mark.long)])
def test_every_op_keeps_its_values_in_registers(chip, tmp_path):
    """On the chips for which ptxas takes the most registers."""
    texts = modules([*((call, m, operands()) for call in OPS.values()), *CALLS])
    assert [line for text in texts for line in spills(text, chip, tmp_path)] == []
