"""The shape of the kernels, as utils/gpu_figures.py reads it from SASS and the simulator."""

import importlib.util
from pathlib import Path

import pytest
import torch

import moe_mlir

PATH = Path(__file__).resolve().parents[3] / "utils" / "gpu_figures.py"
spec = importlib.util.spec_from_file_location("gpu_figures", PATH)
figures = importlib.util.module_from_spec(spec)
spec.loader.exec_module(figures)

try:
    figures.find_tool("ptxas"), figures.find_tool("nvdisasm")
except FileNotFoundError as error:
    pytest.skip(str(error), allow_module_level=True)


@pytest.mark.parametrize("experts, chosen, limit",
                         [(16, 2, 6), (64, 8, 66), (128, 8, 115), (256, 8, 240)])
def test_instructions_a_token(experts, chosen, limit):
    text = figures.topk_kernel(torch.bfloat16, experts, chosen, "logits", True, 1.0, False,
                               torch.int32).text()
    ptx, (kernel,) = figures.describe(text, "sm_90")
    code = figures.assemble(ptx, "sm_90", kernel["name"])
    assert not any(code.loops()) and code.spilled == 0
    tokens = figures.rows_of(kernel) * 32 / kernel["block_size"]
    assert len(code.instructions) / tokens <= limit


@pytest.mark.parametrize("width, experts", [(128, 64), (352, 16)])
def test_matrix_instructions_and_bank_conflicts_of_mixing(width, experts):
    u = torch.randn(1, 96, width).bfloat16() * (8 / width) ** 0.5
    p = torch.randn(1, 96, experts).softmax(-1).bfloat16()
    texts, counters, _ = figures.simulate(
        lambda: moe_mlir.similarity_inform(u, p, causal=False), "sm_90")
    ptx, kernels = figures.describe(texts[0], "sm_90")
    code = figures.assemble(ptx, "sm_90", kernels[0]["name"])
    share, _ = code.densest_loop("HMMA")
    # An HMMA.16816 keeps the tensor core busy for 8 issue slots.
    assert share >= 1 / 8 and code.spilled == 0
    assert not any(m.startswith(("LDL", "STL")) for m in code.mnemonics)
    assert any(m.startswith("LDGSTS") for m in code.mnemonics)
    assert counters[0]["shared_wavefronts"] == counters[0]["shared_requests"]
    # Results are written where the caller wants them.
    assert len(counters) == 1


@pytest.mark.parametrize("width, experts", [(128, 64), (352, 16)])
def test_matrix_instructions_of_warpgroups(width, experts):
    u = torch.randn(1, 96, width).bfloat16() * (8 / width) ** 0.5
    p = torch.randn(1, 96, experts).softmax(-1).bfloat16()
    texts, counters, _ = figures.simulate(
        lambda: moe_mlir.similarity_inform(u, p, causal=False), "sm_90a")
    ptx, kernels = figures.describe(texts[0], "sm_90a")
    code = figures.assemble(ptx, "sm_90a", kernels[0]["name"])
    loop = max((loop for loop in code.loops() if any("HGMMA" in m for m in loop)), key=len)
    products = sum(m.startswith("HGMMA") for m in loop)
    # 64 keys: a product for 16 features, and 3 bf16 of each weight for 16 keys.
    of_logits, of_values = width // 16, 3 * 4
    assert products == of_logits + of_values
    # A product with n columns keeps the tensor cores busy for n / 2 issue slots.
    # Two warpgroups take turns: while one is busy there the other may issue.
    assert of_logits * 64 / 2 + of_values * experts / 2 >= 0.9 * len(loop)
    assert code.spilled == 0 and not any(m.startswith(("LDL", "STL")) for m in code.mnemonics)
    assert any(m.startswith("LDGSTS") for m in code.mnemonics)
    assert counters[0]["shared_wavefronts"] == counters[0]["shared_requests"]
    assert len(counters) == 1


@pytest.mark.parametrize("width, experts", [(64, 8), (40, 48)])
def test_mixing_on_float_units_has_no_bank_conflicts(width, experts):
    u = torch.randn(1, 96, width) * (8 / width) ** 0.5
    p = torch.randn(1, 96, experts).softmax(-1)
    _, (counters,), _ = figures.simulate(
        lambda: moe_mlir.similarity_inform(u, p, causal=False), "sm_90")
    assert counters["shared_wavefronts"] == counters["shared_requests"]


def test_selection_moves_each_byte_once():
    scores = torch.randn(512, 64).bfloat16()
    _, (counters,), results = figures.simulate(lambda: moe_mlir.topk_renorm(scores, 8), "sm_90")
    moved = counters["global_bytes_read"] + counters["global_bytes_written"]
    assert moved == scores.nbytes + sum(x.nbytes for x in results)


def test_a_block_of_a_router_moves_each_byte_once():
    """Also where the last chunk of features is half empty."""
    text = figures.router_text(352, 16, 2, "bf16")
    ptx, (kernel,) = figures.describe(text, "sm_90")
    code = figures.assemble(ptx, "sm_90", kernel["name"])
    assert code.spilled == 0 and any(m.startswith("HMMA") for m in code.mnemonics)
    counters, least = figures.run_router(text, kernel, 352, 16, 2,
                                         torch.bfloat16, "sm_90")
    assert counters["global_bytes_read"] + counters["global_bytes_written"] == least
