"""Conversions between widths of floats, bit for bit those of torch for every CPU."""

import cpus
import pytest
import torch

TYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "f64": torch.float64}
CONVERSIONS = [(narrow, wide) for narrow in ("bf16", "f16") for wide in ("f32", "f64")]

FUNCTION = """
func.func @{name}(%x: tensor<?x{source}>) -> tensor<?x{target}> {{
  %c0 = arith.constant 0 : index
  %n = tensor.dim %x, %c0 : tensor<?x{source}>
  %empty = tensor.empty(%n) : tensor<?x{target}>
  %r = linalg.generic {{
      indexing_maps = [affine_map<(i) -> (i)>, affine_map<(i) -> (i)>],
      iterator_types = ["parallel"]}}
      ins(%x : tensor<?x{source}>) outs(%empty : tensor<?x{target}>) {{
  ^bb0(%in: {source}, %unused: {target}):
    {body}
    linalg.yield %out : {target}
  }} -> tensor<?x{target}>
  return %r : tensor<?x{target}>
}}
"""


# Moves lanes below a limit, then the first of the next eight alone: two kinds of masks.
MASKED_COPY = """
func.func @masked_{narrow}(%x: tensor<16x{narrow}>, %limit: tensor<i64>) -> tensor<16x{narrow}> {{
  %c0 = arith.constant 0 : index
  %c8 = arith.constant 8 : index
  %one = arith.constant 1.0 : {narrow}
  %all = arith.constant dense<1.0> : tensor<16x{narrow}>
  %number = tensor.extract %limit[] : tensor<i64>
  %lanes = arith.index_cast %number : i64 to index
  %some = vector.create_mask %lanes : vector<8xi1>
  %first = vector.constant_mask [1] : vector<8xi1>
  %a = vector.transfer_read %x[%c0], %one, %some {{in_bounds = [true]}} : tensor<16x{narrow}>, vector<8x{narrow}>
  %b = vector.transfer_read %x[%c8], %one, %first {{in_bounds = [true]}} : tensor<16x{narrow}>, vector<8x{narrow}>
  %r = vector.transfer_write %a, %all[%c0], %some {{in_bounds = [true]}} : vector<8x{narrow}>, tensor<16x{narrow}>
  %s = vector.transfer_write %b, %r[%c8] {{in_bounds = [true]}} : vector<8x{narrow}>, tensor<16x{narrow}>
  return %s : tensor<16x{narrow}>
}}
"""


def bits(x):
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def all_values(dtype):
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)


def hard_floats():
    """Every sign and exponent of f32 with the fractions around ties of both narrow types."""
    ties = [tie + d for tie in (0x1000, 0x3000, 0x8000, 0x18000) for d in (-1, 0, 1)]
    generator = torch.Generator().manual_seed(1)
    more = torch.randint(0, 2**23, (40,), generator=generator)
    fractions = torch.cat([torch.tensor([0, 1, 0x200000, 0x400000, 0x7FFFFF, *ties]), more])
    words = (torch.arange(512)[:, None] << 23) | fractions
    return torch.where(words >= 2**31, words - 2**32, words).flatten().to(torch.int32).view(torch.float32)


@pytest.fixture(scope="module")
def executables():
    """CPU to all conversions and an arithmetic chain of each narrow type, compiled for it."""
    from moe_mlir._native import native

    text = ""
    for narrow, wide in CONVERSIONS:
        for source, target, op in ((wide, narrow, "truncf"), (narrow, wide, "extf")):
            text += FUNCTION.format(
                name=f"{source}_to_{target}", source=source, target=target,
                body=f"%out = arith.{op} %in : {source} to {target}")  # fmt: skip
    for narrow in ("bf16", "f16"):
        text += FUNCTION.format(
            name=f"chain_{narrow}", source=narrow, target=narrow,
            body=f"""%sum = arith.addf %in, %in : {narrow}
    %square = arith.mulf %sum, %in : {narrow}
    %less = arith.cmpf olt, %square, %in : {narrow}
    %least = arith.select %less, %square, %in : {narrow}
    %root = math.absf %least : {narrow}
    %bounded = arith.minimumf %root, %sum : {narrow}
    %out = arith.negf %bounded : {narrow}""")  # fmt: skip
    moe = native()
    return {cpu: moe.Executable(moe.compile_object(text, cpu=cpu)) for cpu in cpus.runnable()}


def call(executable, name, x, dtype):
    result = torch.empty(x.shape, dtype=dtype)
    executable.function(name)(x, result)
    return result


@pytest.mark.parametrize("narrow, wide", CONVERSIONS)
def test_widening_is_exact(executables, narrow, wide):
    x = all_values(TYPES[narrow])
    for cpu, executable in executables.items():
        found = call(executable, f"{narrow}_to_{wide}", x, TYPES[wide])
        assert torch.equal(bits(found), bits(x.to(TYPES[wide]))), cpu


@pytest.mark.parametrize("narrow, wide", CONVERSIONS)
def test_rounding_is_that_of_torch(executables, narrow, wide):
    """From f64 by way of f32, as torch does. A NaN of bf16 has several forms in torch itself."""
    x = hard_floats().to(TYPES[wide])
    if wide == "f64":
        x = torch.cat([x * (1 + 2.0**-40), x * (1 - 2.0**-40)])
    expected = x.to(TYPES[narrow])
    isnan = x.isnan()
    first = None
    for cpu, executable in executables.items():
        found = call(executable, f"{wide}_to_{narrow}", x, TYPES[narrow])
        assert torch.equal(found.isnan(), isnan), cpu
        assert torch.equal(bits(found)[~isnan], bits(expected)[~isnan]), cpu
        first = found if first is None else first
        assert torch.equal(bits(found), bits(first)), cpu


@pytest.mark.parametrize("narrow", ["bf16", "f16"])
def test_each_operation_rounds_once(executables, narrow):
    x = all_values(TYPES[narrow])
    x = x[~x.isnan()]
    total = x + x
    square = total * x
    expected = -torch.minimum(torch.where(square < x, square, x).abs(), total)
    for cpu, executable in executables.items():
        found = call(executable, f"chain_{narrow}", x, x.dtype)
        assert torch.equal(found, expected), cpu


@pytest.mark.parametrize("narrow", ["bf16", "f16"])
def test_masked_moves_keep_every_bit(narrow):
    """Without a call: LLVM would take the vector apart by way of float."""
    from moe_mlir._native import native

    moe, x = native(), all_values(TYPES[narrow])[-(2**15) // 3 :][:16].contiguous()
    x[9] = x[3] = torch.nan
    for cpu in cpus.LEVELS:
        code = moe.compile_object(MASKED_COPY.format(narrow=narrow), cpu=cpu)
        for limit in (0, 1, 5, 8) if cpu in cpus.runnable() else ():
            expected = torch.ones_like(x)
            expected[:limit], expected[8] = x[:limit], x[8]
            found = torch.empty_like(x)
            moe.Executable(code).function(f"masked_{narrow}")(x, torch.tensor(limit), found)
            assert torch.equal(bits(found), bits(expected)), (cpu, limit)


def test_vectors_with_subnormals_are_rounded_as_others():
    """AVX512-BF16's instruction takes them for zero."""
    import moe_mlir

    rows = torch.ones(1, 40, dtype=torch.bfloat16)
    rows[0, ::3] = 2.0**-30
    rows[0, 1] = -(2.0**-30)
    gates = torch.tensor([[1.7 * 2.0**-97]])
    found = moe_mlir.combine(rows, gates, torch.zeros(1, 1, dtype=torch.int32))
    expected = (rows.float() * gates).to(torch.bfloat16)
    assert (expected != 0).all() and (expected.abs() < 2.0**-126).any()
    assert torch.equal(bits(found), bits(expected))


def test_a_function_that_nobody_defines_is_named():
    from moe_mlir._native import native

    text = """
    func.func private @somewhere_else(f32) -> f32
    func.func @f(%x: f32, %y: tensor<1xf32>) -> tensor<1xf32> {
      %c0 = arith.constant 0 : index
      %r = call @somewhere_else(%x) : (f32) -> f32
      %t = tensor.insert %r into %y[%c0] : tensor<1xf32>
      return %t : tensor<1xf32>
    }
    """
    with pytest.raises(Exception, match="found calls of somewhere_else"):
        native().compile_object(text)
