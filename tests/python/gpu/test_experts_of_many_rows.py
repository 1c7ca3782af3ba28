"""Layers of experts of many rows on sm_90a: the kernel on warpgroups, in the simulator."""

import json
import re

import pytest
import torch

from moe_mlir.compiler.jit import compile_kernels_cached
from moe_mlir.ops._expert_activation import ExpertActivation
from moe_mlir.ops.grouped_linear import grouped_linear
from moe_mlir.sim.simulation import device_functions, simulate

BF16, F16 = torch.bfloat16, torch.float16
NONE = ExpertActivation()
RELU = ExpertActivation("relu")
SWIGLU = ExpertActivation("silu", gate="concatenated")
GPT_OSS = ExpertActivation("silu", alpha=1.702, gate="interleaved", limit=7.0, up_offset=1.0)
# What a result of 16 bits may be off by, against 1 + its magnitude.
TOLERANCE = {BF16: 2**-8, F16: 2**-11}


def operands(lengths, width, features, dtype, rest=0, transposed=False):
    """x, w, bias, offsets, rows; the last `rest` rows are of no expert, and one row is not in x."""
    experts, count = len(lengths), sum(lengths) + rest
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    tokens = max(1, count // 2)
    w = width**-0.5 * torch.randn(experts, features, width)
    rows = torch.randint(tokens, (count,))
    rows[count // 3] = tokens
    return (torch.randn(tokens, width).to(dtype),
            (w.mT.contiguous() if transposed else w).to(dtype),
            torch.randn(experts, features).to(dtype), offsets, rows)


def expected(x, w, bias, offsets, rows, activation, transposed=False):
    """The layer in float64."""
    x = x.double()
    if rows is not None:
        x = torch.cat([x, x.new_zeros(1, x.shape[1])])[rows]
    w = w.double() if transposed else w.double().mT
    y = torch.zeros(len(x), activation.width(w.shape[2]), dtype=torch.float64)
    for e, (begin, end) in enumerate(zip(offsets.tolist(), offsets[1:].tolist())):
        z = x[begin:end] @ w[e] + (0 if bias is None else bias[e].double())
        y[begin:end] = activation(z)
    return y


def launched(simulation) -> list[str]:
    return [report.kernel for report in simulation.reports]


@pytest.mark.parametrize("lengths, width, features, activation, dtype, rest", [
    # One tile, and tiles of one row more; whole tiles; chunks that begin the sums.
    ([129], 64, 256, NONE, BF16, 0), ([128, 256], 256, 512, NONE, BF16, 0),
    ([40, 0, 70], 320, 264, NONE, F16, 0), ([60, 30], 576, 30, RELU, BF16, 0),
    # Gates of each layout, of whole and partial tiles; rows of no expert.
    ([200, 1], 192, 512, SWIGLU, BF16, 0), ([70, 0, 90], 128, 80, SWIGLU, F16, 7),
    ([150], 64, 256, GPT_OSS, BF16, 2), ([0, 65, 0], 320, 36, GPT_OSS, BF16, 0),
    # A rest of a chunk.
    ([50, 9], 72, 128, NONE, BF16, 0),
])
def test_values(lengths, width, features, activation, dtype, rest):
    for has_bias, gathers in ((True, True), (False, False)):
        x, w, bias, offsets, rows = operands(lengths, width, features, dtype, rest)
        if not gathers:
            x, rows = x[rows.clamp(max=len(x) - 1)], None
        bias = bias if has_bias else None
        with simulate(chip="sm_90a") as simulation:
            y = grouped_linear(x, w, bias, offsets, rows, activation=activation)
        want = expected(x, w, bias, offsets, rows, activation)
        assert len(launched(simulation)) == 1
        assert ((y.double() - want).abs() <= TOLERANCE[dtype] * (1 + want.abs())).all()
        if rest:
            assert not y[-rest:].any()


@pytest.mark.parametrize("lengths, width, features, activation", [
    ([70, 129], 136, 256, NONE), ([3, 1], 64, 80, RELU), ([70, 9], 320, 272, SWIGLU),
    ([90], 72, 48, GPT_OSS), ([1, 0, 130], 192, 544, GPT_OSS),
])
def test_transposed_weights(lengths, width, features, activation):
    """Weights [experts, in, out], of any number of rows: no other kernel has them."""
    x, w, bias, offsets, rows = operands(lengths, width, features, BF16, transposed=True)
    with simulate(chip="sm_90a") as simulation:
        y = grouped_linear(x, w, bias, offsets, rows, transposed=True, activation=activation)
    want = expected(x, w, bias, offsets, rows, activation, transposed=True)
    assert len(launched(simulation)) == 1
    assert ((y.double() - want).abs() <= TOLERANCE[BF16] * (1 + want.abs())).all()


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
@pytest.mark.parametrize("rest", [0, 3])
def test_no_rows(lengths, rest):
    experts = max(1, len(lengths))
    x, w = torch.randn(rest, 64).to(BF16), torch.randn(experts, 64, 16).to(BF16)
    offsets = torch.zeros(experts + 1, dtype=torch.int64)
    with simulate(chip="sm_90a"):
        y = grouped_linear(x, w, None, offsets, transposed=True)
    assert y.shape == (rest, 16) and not y.any()


@pytest.mark.parametrize("offsets", [[0, 99, 99], [-40, 50, 70], [2, 3, 40], [70, 900, 1000],
                                     [60, 10, 80], [80, 0, 80]])
def test_offsets_out_of_bounds_leave_no_buffer(offsets):
    """The simulator checks each address; rows of no expert are zeros where the offsets ascend.

    Where they do not, rows of two experts are written twice.
    """
    x, w = torch.randn(80, 64).to(BF16), torch.randn(2, 32, 64).to(BF16)
    offsets = torch.tensor(offsets)
    ascends = bool((offsets.diff() >= 0).all())
    with simulate(chip="sm_90a", checks=("bounds",) if not ascends else ("bounds", "race")):
        y = grouped_linear(x, w, None, offsets)
    if ascends:
        bounds = offsets.clamp(0, 80)
        assert not y[:bounds[0]].any() and not y[bounds[-1]:].any()


def test_a_row_has_the_same_bits_among_others():
    x, w, bias, _, _ = operands([160], 320, 64, BF16)
    x = torch.randn(160, 320).to(BF16)
    with simulate(chip="sm_90a"):
        y = grouped_linear(x, w, bias, torch.tensor([0, 160]))
        for seed in range(2):
            order = torch.randperm(160, generator=torch.Generator().manual_seed(seed))
            among = grouped_linear(x, w, bias, torch.tensor([0, 160]), order)
            assert torch.equal(among, y[order])
        part = grouped_linear(x[37:90], w, bias, torch.tensor([0, 53]))
    assert torch.equal(part, y[37:90])


def test_blocks_take_tiles_in_turn():
    """More tiles than blocks: 67 groups of rows by 8 tiles of columns."""
    width, features, lengths = 64, 2048, [1] * 64 + [300]
    _, w, _, offsets, _ = operands(lengths, width, features, BF16, transposed=True)
    x = torch.randn(sum(lengths), width).to(BF16)
    with simulate(chip="sm_90a") as simulation:
        y = grouped_linear(x, w, None, offsets, transposed=True)
    want = expected(x, w, None, offsets, None, NONE, transposed=True)
    assert len(launched(simulation)) == 1
    assert ((y.double() - want).abs() <= TOLERANCE[BF16] * (1 + want.abs())).all()


_F32 = """func.func @layer(%x: tensor<?x192xbf16>, %w: tensor<2x264x192xbf16>,
                 %offsets: tensor<3xi32>) -> tensor<?x132xf32> {
  %c0 = arith.constant 0 : index
  %n = tensor.dim %x, %c0 : tensor<?x192xbf16>
  %old = tensor.empty(%n) : tensor<?x132xf32>
  %y = moe.grouped_linear ins(%x, %w, %offsets
      : tensor<?x192xbf16>, tensor<2x264x192xbf16>, tensor<3xi32>)
      outs(%old : tensor<?x132xf32>)
      {activation = #moe.activation<silu>, gate = #moe.gate<concatenated>,
       moe.kernel_config = #moe.kernel_config<schedule = wgmma>} -> tensor<?x132xf32>
  return %y : tensor<?x132xf32>
}"""


def test_results_of_f32():
    """Chunks are summed from 0 and added, so that nothing is lost to truncation."""
    x, w, _, offsets, _ = operands([70, 129], 192, 264, BF16)
    x, y = torch.randn(199, 192).to(BF16), torch.empty(199, 132)
    reports = device_functions(_F32, "sm_90a")["layer"](x, w, offsets, y)
    want = expected(x, w, None, offsets, None, SWIGLU)
    assert len(reports) == 1 and reports[0].ok
    assert ((y.double() - want).abs() <= 2**-18 * (1 + want.abs())).all()


def test_warpgroups_multiply_whole_tiles():
    """Products of 64 rows and 256 columns, 128 for f32; weights are copied, not loaded."""
    ptx = json.loads(compile_kernels_cached(_F32, "sm_90a"))["ptx"]
    assert set(re.findall(r"wgmma\.mma_async\S*\.(m64n\d+)k16", ptx)) == {"m64n128"}
    of_16_bits = _F32.replace("x132xf32>", "x132xbf16>")
    ptx = json.loads(compile_kernels_cached(of_16_bits, "sm_90a"))["ptx"]
    assert set(re.findall(r"wgmma\.mma_async\S*\.(m64n\d+)k16", ptx)) == {"m64n256"}
    assert not re.findall(r"ld\.global\.v\d", ptx)
