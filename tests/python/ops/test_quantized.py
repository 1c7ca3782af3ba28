"""Products with weights of 4 and 8 bits: within rounding of float64 on the same codes."""

import itertools

import pytest
import torch
from expert_problems import FORMS, SWIGLU, judge, problem, rounded, wide

from moe_mlir.experts import run_experts
from moe_mlir.experts.quantized_weight import QuantizedWeight, quantize_weight, quantized
from moe_mlir.ops._check import Checker
from moe_mlir.ops._quantized import (
    E2M1,
    Quantization,
    columns_of_panels,
    dequantize_codes,
    of_two_levels,
    pack_codes,
    pack_scales,
    round_rows,
    unpack_codes,
    unpack_scales,
)
from moe_mlir.ops.quantized_linear import quantized_linear
from moe_mlir.ops.run_quantized_experts import run_quantized_experts

# Sums are float32 and have up to 300 terms; a result is rounded to the dtype of x.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
CODES = {"int4": 16, "int6": 64, "int8": 256, "fp4_e2m1": 16, "fp8_e4m3": 256}
FORMATS = list(CODES)
INTEGERS = FORMATS[:3]
GROUPS = [32, 64, 8, 16, 0]


def close(found, expected, tolerance):
    """By norm: a sum of terms of both signs has an error relative to its terms."""
    error = (found.double() - expected).norm() / expected.norm().clamp(min=1e-30)
    assert error <= tolerance, error


def weight_of(out, width, quantization, seed=0, **options):
    w = torch.randn(out, width, generator=torch.Generator().manual_seed(seed))
    return quantized(w, quantization, **options)


def product(x, weight, bias=None):
    return quantized_linear(x, weight.codes, weight.scales, weight.zeros, bias,
                            weight.out_and_in[0], weight.quantization)


# ---- panels and codes ---------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("halves", [False, True])
def test_unpacked_panels_are_the_codes(format, halves):
    for out, width in itertools.product((2, 64, 130), (1, 5, 64)):
        codes = torch.randint(0, CODES[format], (3, out, width), dtype=torch.uint8)
        panels = pack_codes(codes, format, halves=halves)
        assert torch.equal(unpack_codes(panels, out, width, format, halves=halves), codes)
        scales = torch.randn(3, out, 4)
        assert torch.equal(unpack_scales(pack_scales(scales, halves=halves), out, halves=halves),
                           scales)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("halves", [False, True])
def test_panels_are_laid_out_as_documented(format, halves):
    """By the formula of docs/Spec.md 3.14, also of weights that are packed in many slices."""
    bits, q = CODES[format].bit_length() - 1, columns_of_panels()
    parts = 2 if halves else 1
    for out, width in ((3 * q + 2, 40), (600, 1024)):
        codes = torch.randint(0, 2**bits, (2, out, width), dtype=torch.uint8)
        panels = pack_codes(codes, format, halves=halves).view(torch.uint8)
        _, p, t, _, _ = panels.shape
        row = torch.arange(p)[:, None] * (q // parts) + torch.arange(q)[None] % (q // parts)
        row, real = row + torch.arange(q) // (q // parts) * (out // parts), row < out // parts
        padded = torch.nn.functional.pad(codes, (0, t * 32 // bits - width))
        padded = padded[:, torch.where(real, row, 0)] * real[..., None]
        # Of 8, 16 or 4 features the steps, and in them what is shifted by so many bits.
        size, shifts = {8: (4, [{0: 0}]), 4: (8, [{0: 0, 4: 4}]),
                        6: (16, [{0: 0, 4: 4}, {8: 0, 12: 4}, {0: 0, 4: 2, 8: 4, 12: 6}])}[bits]
        steps = []
        for number, parts_of_step in enumerate(shifts):
            of_step = 0
            for first, shift in parts_of_step.items():
                at = torch.arange(0, padded.shape[-1], size)[:, None] + first + torch.arange(4)
                part = padded[..., at]
                part = (part >> 4 if number == 2 else part & 15) if bits == 6 else part
                of_step = of_step | part << shift
            steps.append(of_step)
        wanted = torch.stack(steps, dim=-2).flatten(-3, -2)
        assert torch.equal(panels, wanted.movedim(2, 3))


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("format", INTEGERS)
@pytest.mark.parametrize("group", GROUPS)
def test_no_code_is_nearer_to_a_weight(format, group, symmetric):
    w = torch.randn(7, 70, generator=torch.Generator().manual_seed(1))
    quantization = Quantization(format, group)
    codes, scales, zeros = quantize_weight(w, quantization, symmetric=symmetric,
                                           dtype=torch.float32)
    found = dequantize_codes(codes, scales, zeros, format, group)
    for step in (-1, 1):
        others = (codes.int() + step).clamp(0, CODES[format] - 1)
        other = dequantize_codes(others, scales, zeros, format, group)
        assert ((found - w).abs() <= (other - w).abs() + 1e-6).all()


def test_4_bit_floats_are_those_of_the_ocp_specification():
    """OCP Microscaling Formats 1.0, 5.3.3 and 6.3: values, ties to even, the scale of a block."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    assert torch.equal(E2M1, torch.cat([values, -values]))
    w = torch.zeros(1, 32)
    w[0, :10] = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0, 0.26])
    codes, scales, _ = quantize_weight(w, Quantization("fp4_e2m1", 32), exponents=True)
    assert scales.item() == 1.0
    assert E2M1[codes[0, :10].long()].tolist() == [6, 0, 1, 1, 2, 2, 4, 4, -4, 0.5]
    for power in (-20, -1, 5):
        _, scales, _ = quantize_weight(w * 2.0**power, Quantization("fp4_e2m1", 32), exponents=True)
        assert scales.item() == 2.0**power


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@torch.no_grad()
def test_all_codes_of_floats_have_their_values(dtype):
    """A row of ones at one feature reads that feature's column: results are exact."""
    for format, count in (("fp4_e2m1", 16), ("fp8_e4m3", 256)):
        codes = torch.arange(count, dtype=torch.uint8).view(1, -1, 4).repeat(1, 1, 8)
        quantization = Quantization(format, 32)
        weight = QuantizedWeight(tuple(codes.shape), dtype, quantization, codes,
                                 torch.ones(1, count // 4, 1))
        found = product(torch.eye(32, dtype=dtype), weight).T
        expected = E2M1[codes[0].long()] if count == 16 else \
            codes[0].view(torch.float8_e4m3fn).float().nan_to_num(480.0)
        expected = torch.where(codes[0] == 255, -480.0, expected) if count == 256 else expected
        assert torch.equal(found.float(), expected)
        assert torch.equal(weight.dequantize()[0].float(), expected)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("symmetric", [False, True])
def test_weights_of_zeros_and_of_one_value_are_exact(format, symmetric):
    if format not in INTEGERS and not symmetric:
        return
    for value in (0.0, 1.5, -2.0):
        w = torch.full((4, 64), value)
        weight = quantized(w, Quantization(format, 32), symmetric=symmetric)
        torch.testing.assert_close(weight.dequantize(), w, rtol=1e-2, atol=0)


# ---- products ------------------------------------------------------------------------


@pytest.mark.drawn(12)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("activations", ["none", "int8"])
@pytest.mark.parametrize("format", FORMATS)
@torch.no_grad()
def test_a_product_is_within_rounding_of_float64(format, activations, dtype):
    cases = [(32, False, (20, 96, 64)), (0, True, (7, 50, 100))]
    if dtype == torch.float32:
        cases += [(64, False, (7, 50, 100)), (16, False, (1, 33, 37))]
        cases += [] if format == "int6" else [(8, True, (20, 33, 37))]
    for group, symmetric, (rows, out, width) in cases:
        quantization = Quantization(format, group, activations)
        weight = weight_of(out, width, quantization,
                           symmetric=symmetric or format not in INTEGERS)
        x, bias = torch.randn(rows, width).to(dtype), torch.randn(out)
        y = product(x, weight, bias)
        assert y.dtype == dtype
        expected = round_rows(x, quantization).double() @ weight.dequantize().double().T + bias
        close(y, expected, TOLERANCES[dtype])
        # A row's result depends on nothing else, nor on strides.
        assert torch.equal(product(x[-1:], weight, bias), y[-1:])
        assert torch.equal(product(torch.stack([x, x], -1)[..., 0], weight, bias), y)


@pytest.mark.drawn(6)
@pytest.mark.parametrize("activations", ["none", "int8"])
@pytest.mark.parametrize("format", FORMATS)
@torch.no_grad()
def test_many_rows_give_what_one_does(format, activations):
    """Their codes are expanded before, some blocks of features at a time, for tiles of all sizes."""
    for group, symmetric, dtype in ((32, True, torch.float32), (0, False, torch.bfloat16)):
        weight = weight_of(40, 700, Quantization(format, group, activations),
                           symmetric=symmetric or format not in INTEGERS)
        x = torch.randn(140, 700).to(dtype)
        alone = torch.cat([product(row, weight) for row in x.split(1)])
        close(alone[:3], round_rows(x[:3], weight.quantization).double()
              @ weight.dequantize().double().T, TOLERANCES[dtype])
        for rows in (2, 3, 4, 5, 6, 7, 9, 13, 14, 15, 29, 140):
            assert torch.equal(product(x[:rows], weight), alone[:rows])


@pytest.mark.drawn(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("format", FORMATS)
@torch.no_grad()
def test_large_rows(format, dtype):
    """Sums of products with codes are larger than the result; up to 2^112 they are finite."""
    for symmetric in (True, False):
        weight = weight_of(64, 64, Quantization(format, 32),
                           symmetric=symmetric or format not in INTEGERS)
        x = (torch.rand(9, 64) * 2.0**112).to(dtype)
        close(product(x, weight), x.double() @ weight.dequantize().double().T, TOLERANCES[dtype])


@torch.no_grad()
def test_no_rows_and_any_leading_dims():
    weight = weight_of(80, 64, Quantization("int4", 32))
    assert product(torch.randn(0, 64), weight).shape == (0, 80)
    assert product(torch.randn(64), weight).shape == (80,)
    x = torch.randn(2, 3, 64)
    assert torch.equal(product(x, weight)[1, 2], product(x[1, 2], weight))


@torch.no_grad()
def test_rows_that_are_zeros_tiny_or_not_finite():
    quantization = Quantization("int4", 32, "int8")
    weight = weight_of(64, 64, quantization)
    x = torch.randn(5, 64)
    x[0] = 0
    x[1] *= 1e-42
    x[2, 3], x[3, 40] = float("nan"), float("inf")
    y = product(x, weight)
    assert (y[0] == 0).all() and (y[1].abs() < 1e-35).all() and y[4].isfinite().all()
    assert not y[2].isfinite().any() and not y[3].isfinite().any()
    plain = weight_of(64, 64, Quantization("int4", 32))
    y = product(x, plain)
    assert (y[0] == 0).all() and y[4].isfinite().all() and not y[2:4].isfinite().any()


@torch.no_grad()
def test_rounded_rows_give_products_of_integers():
    """On whole numbers up to 127 rounding takes nothing away, and sums are exact."""
    weight = weight_of(40, 64, Quantization("int8", 0, "int8"))
    x = torch.randint(-127, 128, (6, 64)).float()
    x[:, ::32] = 127
    ones = torch.ones_like(weight.scales)
    y = quantized_linear(x, weight.codes, ones, None, None, 40, weight.quantization)
    codes = unpack_codes(weight.codes, 40, 64, "int8", halves=False)[0].double() - 128
    assert torch.equal(y.double(), x.double() @ codes.T)


# ---- scales of two levels -------------------------------------------------------------


def of_two_levels_weight(out, width, quantization, minima, halves=False):
    """As blocks of a GGUF file: bytes of any sign, and for minima not below 0."""
    format, group, _ = quantization
    blocks, draw = -(-width // 256), torch.Generator().manual_seed(2)
    codes = torch.randint(0, CODES[format], (1, out, width), dtype=torch.uint8, generator=draw)

    def levels(least):
        steps = torch.randint(least, 64, (1, out, blocks, 256 // group), dtype=torch.int8,
                              generator=draw)
        units = torch.rand(1, out, blocks, generator=draw).mul(0.01).to(torch.float16)
        return of_two_levels(steps, units), steps.float() * units.float().unsqueeze(-1)
    (scales, floats), (zeros, floats_of_minima) = levels(-63), levels(0)
    weight = QuantizedWeight((out, width), torch.float32, quantization, codes, scales,
                             zeros if minima else None, halves=halves)

    def spread(each):
        return each.flatten(-2).repeat_interleave(group, -1)[..., :width].double()
    middle = 0 if minima else CODES[format] // 2
    expected = spread(floats) * (codes.double() - middle)
    return weight, (expected - spread(floats_of_minima) if minima else expected)[0]


@pytest.mark.drawn(8)
@pytest.mark.parametrize("minima", [False, True])
@pytest.mark.parametrize("activations", ["none", "int8"])
@pytest.mark.parametrize(("format", "group"), [
    ("int4", 32), ("int4", 16), ("int6", 16), ("int6", 32), ("int8", 64), ("int8", 256),
    ("int4", 8),
])
@torch.no_grad()
def test_scales_of_two_levels(format, group, activations, minima):
    for out, width, dtype in ((40, 512, torch.bfloat16), (33, 300, torch.float32)):
        quantization = Quantization(format, group, activations)
        weight, expected = of_two_levels_weight(out, width, quantization, minima)
        assert weight.scales.dtype == torch.int8
        torch.testing.assert_close(weight.dequantize().double(), expected, rtol=1e-6, atol=1e-6)
        x = torch.randn(140, width).to(dtype)
        y = product(x, weight)
        close(y, round_rows(x, quantization).double() @ expected.T, TOLERANCES[dtype])
        for rows in (1, 2, 3, 7, 15, 29):
            assert torch.equal(product(x[:rows], weight), y[:rows])


def test_scales_of_two_levels_ask_for_groups_of_a_superblock():
    weight, _ = of_two_levels_weight(8, 256, Quantization("int4", 32), minima=True)
    x = torch.randn(1, 256)
    for group, named in ((0, "found 0"), (96, "found 96"), (512, "found 512")):
        with pytest.raises(ValueError, match=f"expected 'group' to divide 256 where 'scales'.*{named}"):
            quantized_linear(x, weight.codes, weight.scales, None, None, 8,
                             Quantization("int4", group))
    with pytest.raises(TypeError, match="expected 'zeros' to have dtype int8, found float32"):
        quantized_linear(x, weight.codes, weight.scales, weight.scales.float(), None, 8,
                         weight.quantization)
    with pytest.raises(ValueError, match="expected 'group' to be 0 .a row., 16 or a multiple"):
        Quantization("int6", 8).validate(Checker("quantize"))


# ---- a layer of experts ---------------------------------------------------------------


def operands(values, act, quantization, **options):
    *_, w_in, w_out, b_in, b_out = values
    first = quantized(w_in, quantization, halves=act.gate == "concatenated", **options)
    last = quantized(w_out, quantization, **options)
    return first, last, first.operands(b_in), last.operands(b_out)


def layer(values, act, first, last, quantization):
    x, gates, indices, _, w_out, *_ = values
    return run_quantized_experts(x, gates, indices, first, last, w_out.shape[-1], quantization,
                                 activation=act)


@pytest.mark.parametrize(("form", "format"), [
    *((form, "int4") for form in ("none", "swiglu", "gpt-oss")), ("swiglu", "int8"),
    ("gpt-oss", "fp4_e2m1"), ("swiglu", "fp8_e4m3"), ("swiglu", "int6"),
])
@torch.no_grad()
def test_a_layer_is_within_rounding_of_float64(form, format):
    act = FORMS[form]
    for (width, hidden), tokens in itertools.product([(33, 10)], (0, 1, 60)):
        values = rounded(problem(width, hidden, act, tokens=tokens), torch.float32)
        quantization = Quantization(format, 32)
        first, last, *both = operands(values, act, quantization)
        y = layer(values, act, *both, quantization)
        x, gates, indices, _, _, b_in, b_out = wide(values)
        expected = judge(x, gates, indices, first.dequantize().double(), last.dequantize().double(),
                         b_in=b_in, b_out=b_out, activation=act, transposed=False)
        close(y, expected, 5e-6)


@pytest.mark.parametrize("activations", ["none", "int8"])
def test_weights_of_a_layer_may_have_other_codes(activations):
    """As in GGUF files: 4 bits in groups of 32, and 6 in groups of 16."""
    act = FORMS["swiglu"]
    values = rounded(problem(64, 48, act, tokens=9), torch.float32)
    x, gates, indices, w_in, w_out, b_in, b_out = values
    wide_x, wide_gates, _, _, _, wide_b_in, wide_b_out = wide(values)
    wide_x.requires_grad_()
    kinds = Quantization("int4", 32, activations), Quantization("int6", 16, activations)
    first = quantized(w_in, kinds[0], halves=True, symmetric=False)
    last = quantized(w_out, kinds[1])
    x.requires_grad_()
    y = run_experts(x, gates, indices, first, last, b_in=b_in, b_out=b_out, activation=act)
    expected = judge(wide_x, wide_gates, indices, first.dequantize().double(),
                     last.dequantize().double(), b_in=wide_b_in, b_out=wide_b_out, activation=act,
                     transposed=False)
    close(y, expected, 5e-6 if activations == "none" else 0.02)
    y.square().sum().backward()
    expected.square().sum().backward()
    close(x.grad, wide_x.grad, 1e-5 if activations == "none" else 0.04)
    with pytest.raises(ValueError, match="expected rows of both layers rounded in the same way"):
        run_experts(x, gates, indices, first, quantized(w_out, kinds[1]._replace(
            activations="none" if activations == "int8" else "int8")), activation=act)


@pytest.mark.parametrize("k", [1, 5])
@torch.no_grad()
def test_all_experts_and_one(k):
    values = rounded(problem(64, 32, k=k), torch.float32)
    quantization = Quantization("int4", 32)
    first, last, *both = operands(values, SWIGLU, quantization, symmetric=False)
    x, gates, indices, _, _, b_in, b_out = wide(values)
    expected = judge(x, gates, indices, first.dequantize().double(), last.dequantize().double(),
                     b_in=b_in, b_out=b_out, activation=SWIGLU, transposed=False)
    close(layer(values, SWIGLU, *both, quantization), expected, 5e-6)


def test_gradients_are_those_of_the_layer_with_its_weights_as_floats():
    values = rounded(problem(32, 24, SWIGLU), torch.float32)
    quantization = Quantization("int4", 8)
    first, last, *both = operands(values, SWIGLU, quantization)
    x, gates, indices, _, _, b_in, b_out = wide(values)
    leaves = [t.requires_grad_() for t in (x, gates, b_in, b_out)]
    judge(x, gates, indices, first.dequantize().double(), last.dequantize().double(), b_in=b_in,
          b_out=b_out, activation=SWIGLU, transposed=False).square().sum().backward()
    mine = [values[0], values[1], values[5], values[6]]
    for each in mine:
        each.requires_grad_()
    layer(values, SWIGLU, *both, quantization).square().sum().backward()
    for found, expected in zip(mine, leaves, strict=True):
        close(found.grad, expected.grad, 1e-5)
    both[0].scales.requires_grad_()
    with pytest.raises(RuntimeError, match="there is no gradient; train adapters"):
        layer(values, SWIGLU, *both, quantization).sum().backward()


def test_meta_tensors_give_the_shape():
    weight = weight_of(80, 64, Quantization("int4", 32)).to("meta")
    y = product(torch.randn(3, 64, device="meta"), weight)
    assert y.shape == (3, 80) and y.is_meta


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"format": "int5"}, ValueError, "expected 'format' to be one of"),
    ({"group": 24}, ValueError, "expected 'group' to be 0 .a row., 8, 16 or a multiple of 32"),
    ({"activations": "int4"}, ValueError, "expected 'activations' to be one of"),
    ({"w": torch.zeros(1, 3, 8, 32, 4)}, TypeError, "expected 'w' to have dtype int8"),
    ({"x": torch.randn(2, 65)}, ValueError, "expected 'w' to have shape"),
    ({"x": torch.ones(2, 64, dtype=torch.int64)}, TypeError, "expected 'x' to have dtype"),
    ({"out_features": 1000}, ValueError, "expected 'w' to have shape"),
    ({"scales": torch.ones(1, 3, 3, 32)}, ValueError, "expected 'scales' to have shape"),
    ({"zeros": torch.ones(1, 3, 1, 32)}, ValueError, "expected 'zeros' to have shape"),
    ({"bias": torch.ones(79)}, ValueError, "expected 'bias' to have shape"),
])
@torch.no_grad()
def test_operands_that_do_not_fit_are_refused(change, error, message):
    weight = weight_of(80, 64, Quantization("int4", 32))
    call = dict(x=torch.randn(2, 64), w=weight.codes, scales=weight.scales, zeros=None, bias=None,
                out_features=80, format="int4", group=32, activations="none") | change
    with pytest.raises(error, match=message):
        torch.ops.moe.quantized_linear(**call)


def test_4_bit_floats_have_no_zeros():
    weight = weight_of(80, 64, Quantization("int4", 32), symmetric=False)
    with pytest.raises(ValueError, match="expected no 'zeros' with format 'fp4_e2m1'"):
        quantized_linear(torch.randn(2, 64), weight.codes, weight.scales, weight.zeros, None, 80,
                         Quantization("fp4_e2m1", 32))
