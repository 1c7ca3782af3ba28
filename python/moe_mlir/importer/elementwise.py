"""Elementwise operators: arithmetic, comparisons, logic, conversions."""

import math

import torch
from torch.fx import Node

from . import complex
from .builder import FLOAT_BITS, INT_BITS, FunctionBuilder, compute_element, is_float
from .context import Splat, element_of
from .registry import Unsupported, imports

aten = torch.ops.aten


def _apply(context, node, operands, body):
    """An elementwise op in the result's type (16-bit floats: in f32, uint8: in i16)."""
    element = context.element(node)
    compute = element if element == "ui8" else compute_element(element)
    return context.elementwise(context.shape(node), element, operands, [compute] * len(operands),
                               compute, body)


# ---- unary -------------------------------------------------------------------

_UNARY = {
    aten.abs.default: "math.absf", aten.acos.default: "math.acos",
    aten.acosh.default: "math.acosh", aten.asin.default: "math.asin",
    aten.asinh.default: "math.asinh", aten.atan.default: "math.atan",
    aten.atanh.default: "math.atanh", aten.ceil.default: "math.ceil", aten.cos.default: "math.cos",
    aten.cosh.default: "math.cosh", aten.erfc.default: "math.erfc", aten.exp2.default: "math.exp2",
    aten.log10.default: "math.log10", aten.sinh.default: "math.sinh", aten.tan.default: "math.tan",
    aten.trunc.default: "math.trunc",
    aten.erf.default: "math.erf", aten.exp.default: "math.exp", aten.expm1.default: "math.expm1",
    aten.floor.default: "math.floor", aten.log.default: "math.log",
    aten.log1p.default: "math.log1p", aten.log2.default: "math.log2",
    aten.neg.default: "arith.negf", aten.round.default: "math.roundeven",
    aten.rsqrt.default: "math.rsqrt", aten.sin.default: "math.sin",
    aten.sqrt.default: "math.sqrt", aten.tanh.default: "math.tanh",
}


@imports(*_UNARY, unsigned=True)
def _unary(context, node, arguments):
    element = compute_element(context.element(node))
    builder = context.builder
    if not is_float(element):
        return _apply(context, node, [arguments.self], lambda x: _integer_unary(node, x, element,
                                                                               builder))
    if node.target in _LOGARITHMS and element == "f32":
        return _apply(context, node, [arguments.self], lambda x: _logarithm(node, x, builder))
    return _apply(context, node, [arguments.self],
                  lambda x: builder.op(f"{_UNARY[node.target]} {x} : {element}"))


# What one binary digit adds.
_LOGARITHMS = {aten.log.default: math.log(2), aten.log2.default: 1.0}


def _logarithm(node, x, builder):
    """log(x 2^24) - log(2^24) of a denormal x: the CPU's polynomial reads an exponent."""
    least = builder.constant(torch.finfo(torch.float32).tiny, "f32")
    small = builder.op(f"arith.cmpf olt, {x}, {least} : f32")
    scaled = builder.op(f"arith.mulf {x}, {builder.constant(2.0 ** 24, 'f32')} : f32")
    normal = builder.op(f"arith.select {small}, {scaled}, {x} : f32")
    log = builder.op(f"{_UNARY[node.target]} {normal} : f32")
    offset = builder.constant(24 * _LOGARITHMS[node.target], "f32")
    shifted = builder.op(f"arith.subf {log}, {offset} : f32")
    return builder.op(f"arith.select {small}, {shifted}, {log} : f32")


_WHOLE = (aten.ceil.default, aten.floor.default, aten.round.default, aten.trunc.default)


def _integer_unary(node, x, element, builder):
    if node.target in _WHOLE:
        return x
    if node.target is aten.neg.default:
        return builder.op(f"arith.subi {builder.constant(0, element)}, {x} : {element}")
    if node.target is aten.abs.default:
        return builder.op(f"math.absi {x} : {element}")
    raise Unsupported(f"element type {element}")


@imports(aten.sign.default, unsigned=True)
def _sign(context, node, arguments):
    """-1, 0 or 1; of a NaN 0, as torch has it."""
    element, builder = compute_element(context.element(node)), context.builder
    if element == "i1":
        return context.raw(arguments.self)
    zero = builder.constant(0, element)
    codes = ("cmpf ogt", "cmpf olt") if is_float(element) else ("cmpi sgt", "cmpi slt")

    def body(x):
        above, below = (builder.op(f"arith.{code}, {x}, {zero} : {element}") for code in codes)
        low = builder.op(f"arith.select {below}, {builder.constant(-1, element)}, {zero} : {element}")
        return builder.op(f"arith.select {above}, {builder.constant(1, element)}, {low} : {element}")
    return _apply(context, node, [arguments.self], body)


def _nowhere(context, node) -> Splat:
    return Splat(context.builder.constant(0, "i1"), context.shape(node), "i1")


@imports(aten.signbit.default)
def _signbit(context, node, arguments):
    element, builder = context.element(arguments.self), context.builder
    if element == "i1":
        return _nowhere(context, node)
    if not is_float(element):
        return _compare(context, node, [arguments.self], element, lambda x: builder.op(
            f"arith.cmpi slt, {x}, {builder.constant(0, element)} : {element}"))
    whole = f"i{FLOAT_BITS[element]}"

    def body(x):
        bits = builder.op(f"arith.bitcast {x} : {element} to {whole}")
        return builder.op(f"arith.cmpi slt, {bits}, {builder.constant(0, whole)} : {whole}")
    return _compare(context, node, [arguments.self], element, body)


@imports(aten.copysign.Tensor)
def _copysign(context, node, arguments):
    element = compute_element(context.element(node))
    return _apply(context, node, [arguments.self, arguments.other],
                  lambda x, y: context.builder.op(f"math.copysign {x}, {y} : {element}"))


@imports(aten.atan2.default)
def _atan2(context, node, arguments):
    """By a quotient, which two zeros or infinities have not: 1 stands for numbers of one size."""
    element, builder = compute_element(context.element(node)), context.builder
    one, zero = (builder.constant(number, element) for number in (1, 0))

    def op(name, *operands):
        return builder.op(f"{name} {', '.join(operands)} : {element}")

    def body(y, x):
        equal = op("arith.cmpf oeq,", op("math.absf", x), op("math.absf", y))
        is_zero = op("arith.cmpf oeq,", y, zero)
        unit = op("arith.select", is_zero, y, op("math.copysign", one, y))
        angle = op("math.atan2", op("arith.select", equal, unit, y),
                   op("arith.select", equal, op("math.copysign", one, x), x))
        # Zeros have signs, too.
        return op("math.copysign", angle, y)
    return _apply(context, node, [arguments.self, arguments.other], body)


def sigmoid(builder: FunctionBuilder, x: str, element: str) -> str:
    """1 / (1 + exp(-x))"""
    one = builder.constant(1, element)
    minus = builder.op(f"arith.negf {x} : {element}")
    power = builder.op(f"math.exp {minus} : {element}")
    total = builder.op(f"arith.addf {one}, {power} : {element}")
    return builder.op(f"arith.divf {one}, {total} : {element}")


@imports(aten.sigmoid.default)
def _sigmoid(context, node, arguments):
    element = compute_element(context.element(node))
    return _apply(context, node, [arguments.self],
                  lambda x: sigmoid(context.builder, x, element))


@imports(aten.silu.default)
def _silu(context, node, arguments):
    element = compute_element(context.element(node))

    def body(x):
        return context.builder.op(
            f"arith.mulf {x}, {sigmoid(context.builder, x, element)} : {element}")
    return _apply(context, node, [arguments.self], body)


@imports(aten.relu.default, unsigned=True)
def _relu(context, node, arguments):
    element = compute_element(context.element(node))
    zero = context.builder.constant(0, element)
    op = "maximumf" if is_float(element) else "maxsi"
    return _apply(context, node, [arguments.self],
                  lambda x: context.builder.op(f"arith.{op} {x}, {zero} : {element}"))


@imports(aten.gelu.default)
def _gelu(context, node, arguments):
    """x/2 (1 + erf(x/sqrt 2)), or the tanh form of it."""
    builder, element = context.builder, compute_element(context.element(node))

    def constant(value):
        return builder.constant(value, element)

    def op(name, *operands):
        return builder.op(f"{name} {', '.join(operands)} : {element}")

    def body(x):
        if arguments.approximate == "tanh":
            cube = op("arith.mulf", op("arith.mulf", x, x), x)
            inner = op("arith.addf", x, op("arith.mulf", cube, constant(0.044715)))
            curve = op("math.tanh", op("arith.mulf", inner, constant((2 / torch.pi) ** 0.5)))
        else:
            curve = op("math.erf", op("arith.mulf", x, constant(0.5 ** 0.5)))
        half = op("arith.mulf", x, constant(0.5))
        return op("arith.mulf", half, op("arith.addf", curve, constant(1)))
    return _apply(context, node, [arguments.self], body)


@imports(aten.reciprocal.default)
def _reciprocal(context, node, arguments):
    element = compute_element(context.element(node))
    one = context.builder.constant(1, element)
    return _apply(context, node, [arguments.self],
                  lambda x: context.builder.op(f"arith.divf {one}, {x} : {element}"))


@imports(aten.isnan.default)
def _isnan(context, node, arguments):
    element = context.element(arguments.self)
    if not is_float(element):
        return _nowhere(context, node)
    return _compare(context, node, [arguments.self], element,
                    lambda x: context.builder.op(f"arith.cmpf uno, {x}, {x} : {element}"))


# ---- binary ------------------------------------------------------------------

@imports(aten.mul.Tensor, complex=True, unsigned=True)
def _mul(context, node, arguments):
    factors = [x for x in (arguments.self, arguments.other) if context.is_tensor(x)]
    complex_factors = [x for x in factors if x.meta["val"].is_complex()]
    if len(complex_factors) == 2:
        return complex.product(context, node, arguments)
    if complex_factors and len(factors) == 2:
        raise Unsupported("a complex tensor times a real one; make both complex")
    # A number scales real and imaginary parts alike.
    return _binary(context, node, arguments)


_BINARY = {  # operator: (float op, integer op)
    aten.add.Tensor: ("addf", "addi"), aten.add.Scalar: ("addf", "addi"),
    aten.sub.Tensor: ("subf", "subi"), aten.sub.Scalar: ("subf", "subi"),
    aten.mul.Tensor: ("mulf", "muli"), aten.mul.Scalar: ("mulf", "muli"),
    aten.div.Tensor: ("divf", None), aten.div.Scalar: ("divf", None),
    aten.maximum.default: ("maximumf", "maxsi"), aten.minimum.default: ("minimumf", "minsi"),
}


@imports(*(set(_BINARY) - {aten.mul.Tensor}), unsigned=True)
def _binary(context, node, arguments):
    element = compute_element(context.element(node))
    float_op, integer_op = _BINARY[node.target]
    op = float_op if is_float(element) else integer_op
    if element == "i1":
        op = {"addi": "ori", "muli": "andi", "maxsi": "ori", "minsi": "andi"}.get(op or "", op)
    builder = context.builder
    alpha = getattr(arguments, "alpha", 1)

    def body(x, y):
        if alpha != 1:
            times = "mulf" if is_float(element) else "muli"
            y = builder.op(f"arith.{times} {y}, {context.scalar(alpha, element)} : {element}")
        return builder.op(f"arith.{op} {x}, {y} : {element}")
    return _apply(context, node, [arguments.self, arguments.other], body)


@imports(aten.rsub.Scalar, aten.rsub.Tensor, unsigned=True)
def _rsub(context, node, arguments):
    element = compute_element(context.element(node))
    if arguments.alpha != 1:
        raise Unsupported(f"alpha {arguments.alpha}; 1 is supported")
    op = "subf" if is_float(element) else "subi"
    return _apply(context, node, [arguments.self, arguments.other],
                  lambda x, y: context.builder.op(f"arith.{op} {y}, {x} : {element}"))


def _is_negative(builder, x, element):
    code = "cmpf olt" if is_float(element) else "cmpi slt"
    return builder.op(f"arith.{code}, {x}, {builder.constant(0, element)} : {element}")


def _float_remainder(builder, x, y, element):
    """C's fmod, and whether its sign is not that of y: Python's % is larger by y then."""
    rest = builder.op(f"arith.remf {x}, {y} : {element}")
    some = builder.op(f"arith.cmpf une, {rest}, {builder.constant(0, element)} : {element}")
    signs = [_is_negative(builder, value, element) for value in (y, rest)]
    differ = builder.op(f"arith.xori {signs[0]}, {signs[1]} : i1")
    return rest, builder.op(f"arith.andi {some}, {differ} : i1")


def _float_floor_division(builder, x, y, element):
    """The whole number nearest to (x - x % y) / y, as torch and Python compute it.

    The floor of the rounded x / y is not: 1 / 0.1 is 10 in float32, and 1 // 0.1 is 9.
    """
    def op(name, *operands):
        return builder.op(f"{name} {', '.join(operands)} : {element}")

    def constant(value):
        return builder.constant(value, element)
    rest, is_over = _float_remainder(builder, x, y, element)
    quotient = op("arith.divf", op("arith.subf", x, rest), y)
    quotient = op("arith.select", is_over, op("arith.subf", quotient, constant(1)), quotient)
    floor = op("math.floor", quotient)
    gap = op("arith.subf", quotient, floor)
    is_above = builder.op(f"arith.cmpf ogt, {gap}, {constant(0.5)} : {element}")
    nearest = op("arith.select", is_above, op("arith.addf", floor, constant(1)), floor)
    plain = op("arith.divf", x, y)
    is_zero = builder.op(f"arith.cmpf oeq, {quotient}, {constant(0)} : {element}")
    nearest = op("arith.select", is_zero, op("math.copysign", constant(0), plain), nearest)
    by_zero = builder.op(f"arith.cmpf oeq, {y}, {constant(0)} : {element}")
    return op("arith.select", by_zero, plain, nearest)


def _divisor(context, node, divisor, y, element):
    """A divisor of integers that no division traps for: not 0, nor -1 of the least number.

    Returns what to divide by, and whether `y` is -1.
    """
    builder = context.builder
    if isinstance(divisor, Node):
        usable = builder.op(f"arith.cmpi ne, {y}, {builder.constant(0, element)} : {element}")
        context.assert_holds(node, usable, "zero_division",
                             f"{node.target._opname}: expected divisors other than 0, found 0")
    minus_one = builder.constant(-1, element)
    is_minus_one = builder.op(f"arith.cmpi eq, {y}, {minus_one} : {element}")
    one = builder.constant(1, element)
    return builder.op(f"arith.select {is_minus_one}, {one}, {y} : {element}"), is_minus_one


def _integer_quotient(context, node, divisor, x, y, element, mode):
    builder = context.builder
    y, is_minus_one = _divisor(context, node, divisor, y, element)
    op = "floordivsi" if mode == "floor" else "divsi"
    quotient = builder.op(f"arith.{op} {x}, {y} : {element}")
    negated = builder.op(f"arith.subi {builder.constant(0, element)}, {x} : {element}")
    return builder.op(f"arith.select {is_minus_one}, {negated}, {quotient} : {element}")


@imports(aten.div.Tensor_mode, aten.div.Scalar_mode, aten.floor_divide.default, unsigned=True)
def _div_mode(context, node, arguments):
    mode = getattr(arguments, "rounding_mode", "floor")
    element = compute_element(context.element(node))
    builder = context.builder

    def body(x, y):
        if not is_float(element):
            return _integer_quotient(context, node, arguments.other, x, y, element, mode)
        if mode == "floor":
            return _float_floor_division(builder, x, y, element)
        quotient = builder.op(f"arith.divf {x}, {y} : {element}")
        if mode is None:
            return quotient
        # torch rounds the quotient of 16-bit floats before it truncates it.
        rounded = builder.convert(builder.convert(quotient, element, context.element(node)),
                                  context.element(node), element)
        return builder.op(f"math.{mode} {rounded} : {element}")
    return _apply(context, node, [arguments.self, arguments.other], body)


@imports(aten.fmod.Scalar, aten.fmod.Tensor, unsigned=True)
def _fmod(context, node, arguments):
    """What is left of x, with the sign of x as C's %."""
    element = compute_element(context.element(node))
    builder = context.builder

    def body(x, y):
        if is_float(element):
            return builder.op(f"arith.remf {x}, {y} : {element}")
        y, _ = _divisor(context, node, arguments.other, y, element)
        return builder.op(f"arith.remsi {x}, {y} : {element}")
    return _apply(context, node, [arguments.self, arguments.other], body)


@imports(aten.remainder.Scalar, aten.remainder.Tensor, unsigned=True)
def _remainder(context, node, arguments):
    """What is left of x, with the sign of y as Python's %."""
    element = compute_element(context.element(node))
    builder = context.builder

    def body(x, y):
        if is_float(element):
            rest, is_over = _float_remainder(builder, x, y, element)
            larger = builder.op(f"arith.addf {rest}, {y} : {element}")
            return builder.op(f"arith.select {is_over}, {larger}, {rest} : {element}")
        y, _ = _divisor(context, node, arguments.other, y, element)
        whole = builder.op(f"arith.floordivsi {x}, {y} : {element}")
        product = builder.op(f"arith.muli {whole}, {y} : {element}")
        return builder.op(f"arith.subi {x}, {product} : {element}")
    return _apply(context, node, [arguments.self, arguments.other], body)


def _whole_power(builder, x, exponent, element):
    """By squares: one product for each binary digit of the exponent, and for each that is 1."""
    if not isinstance(exponent, int) or exponent < 0:
        raise Unsupported(f"integer power {exponent}; whole numbers from 0 are supported")
    result = builder.constant(1, element)
    while exponent:
        if exponent & 1:
            result = builder.op(f"arith.muli {result}, {x} : {element}")
        x, exponent = builder.op(f"arith.muli {x}, {x} : {element}"), exponent >> 1
    return result


@imports(aten.pow.Tensor_Scalar, unsigned=True)
def _pow_scalar(context, node, arguments):
    builder, element = context.builder, compute_element(context.element(node))
    exponent = arguments.exponent
    times = "mulf" if is_float(element) else "muli"
    simple = {0.5: "math.sqrt", -0.5: "math.rsqrt"}

    def body(x):
        if exponent in (2, 3):
            square = builder.op(f"arith.{times} {x}, {x} : {element}")
            if exponent == 2:
                return square
            return builder.op(f"arith.{times} {square}, {x} : {element}")
        if not is_float(element):
            return _whole_power(builder, x, exponent, element)
        if exponent in simple:
            return builder.op(f"{simple[exponent]} {x} : {element}")
        return builder.op(f"math.powf {x}, {builder.constant(exponent, element)} : {element}")
    return _apply(context, node, [arguments.self], body)


@imports(aten.pow.Tensor_Tensor, aten.pow.Scalar)
def _pow(context, node, arguments):
    element = compute_element(context.element(node))
    if not is_float(element):
        raise Unsupported("integer powers of tensors")
    return _apply(context, node, [arguments.self, arguments.exponent],
                  lambda x, y: context.builder.op(f"math.powf {x}, {y} : {element}"))


def _require_held(number, dtype):
    """Eager refuses a bound that the integers of a type do not reach."""
    if isinstance(number, (int, float)) and not dtype.is_floating_point and dtype != torch.bool:
        limits = torch.iinfo(dtype)
        # Of types without a sign negative numbers wrap around, in eager as well.
        least = limits.min or -limits.max
        if not least <= number <= limits.max:
            raise Unsupported(f"the bound {number} for {str(dtype).removeprefix('torch.')}; "
                              f"expected {least} to {limits.max}")


@imports(aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default, aten.clamp.Tensor,
         unsigned=True)
def _clamp(context, node, arguments):
    element = compute_element(context.element(node))
    low, high = getattr(arguments, "min", None), getattr(arguments, "max", None)
    # Of one bit the sign of True is that of -1.
    larger, smaller = ("ori", "andi") if element == "i1" else ("maxsi", "minsi")
    if is_float(element):
        larger, smaller = "maximumf", "minimumf"
    bounds = [b for b in (low, high) if b is not None]
    for bound in bounds:
        _require_held(bound, node.meta["val"].dtype)

    def body(x, *limits):
        rest = iter(limits)
        if low is not None:
            x = context.builder.op(f"arith.{larger} {x}, {next(rest)} : {element}")
        if high is not None:
            x = context.builder.op(f"arith.{smaller} {x}, {next(rest)} : {element}")
        return x
    return _apply(context, node, [arguments.self, *bounds], body)


_SHIFTS = {
    aten.bitwise_left_shift.Tensor: "shli", aten.bitwise_left_shift.Tensor_Scalar: "shli",
    aten.bitwise_right_shift.Tensor: "shrsi", aten.bitwise_right_shift.Tensor_Scalar: "shrsi",
    aten.__lshift__.Tensor: "shli", aten.__lshift__.Scalar: "shli",
    aten.__rshift__.Tensor: "shrsi", aten.__rshift__.Scalar: "shrsi",
}


@imports(*_SHIFTS, unsigned=True)
def _shift(context, node, arguments):
    """By bits that the type has; by others all of them leave it, as in torch."""
    kind = context.element(node)
    element = compute_element(kind)
    if is_float(element):
        raise Unsupported(f"element type {element}; shift integers")
    op, builder = _SHIFTS[node.target], context.builder
    bits = INT_BITS[kind]
    # To the right the bit of the sign stays: all others have left after one step less.
    most = bits - 1 if op == "shrsi" and kind != "ui8" else bits

    def body(x, y):
        inside = builder.op(f"arith.cmpi ult, {y}, {builder.constant(most, element)} : {element}")
        amount = builder.op(f"arith.select {inside}, {y}, {builder.constant(0, element)} : {element}")
        shifted = builder.op(f"arith.{op} {x}, {amount} : {element}")
        if most == bits:
            gone = builder.constant(0, element)
        else:
            gone = builder.op(f"arith.{op} {x}, {builder.constant(most, element)} : {element}")
        return builder.op(f"arith.select {inside}, {shifted}, {gone} : {element}")
    return _apply(context, node, [arguments.self, arguments.other], body)


# ---- comparisons, logic, selection -------------------------------------------

_COMPARISONS = {"eq": ("oeq", "eq"), "ne": ("une", "ne"), "lt": ("olt", "slt"),
                "le": ("ole", "sle"), "gt": ("ogt", "sgt"), "ge": ("oge", "sge")}


def _compare(context, node, operands, compute, body):
    """As `_apply`, with a result that is i1 whatever the operands are."""
    return context.elementwise(context.shape(node), "i1", operands, [compute] * len(operands),
                               "i1", body)


@imports(*(getattr(getattr(aten, name), overload)
           for name in _COMPARISONS for overload in ("Tensor", "Scalar")), unsigned=True)
def _comparison(context, node, arguments):
    float_code, integer_code = _COMPARISONS[node.target._opname]
    metas = [x.meta["val"] if isinstance(x, Node) else x for x in (arguments.self,
                                                                 arguments.other)]
    kind = element_of(torch.result_type(*metas))
    element = compute_element(kind) if kind == "ui8" else kind
    if element == "i1" and node.target._opname not in ("eq", "ne"):
        float_code, integer_code = float_code, "u" + integer_code[1:]
    code = f"cmpf {float_code}" if is_float(element) else f"cmpi {integer_code}"
    return _compare(context, node, [arguments.self, arguments.other], kind,
                    lambda x, y: context.builder.op(f"arith.{code}, {x}, {y} : {element}"))


_LOGIC = {
    aten.bitwise_and.Tensor: "andi", aten.bitwise_or.Tensor: "ori",
    aten.bitwise_xor.Tensor: "xori", aten.logical_and.default: "andi",
    aten.logical_or.default: "ori", aten.logical_xor.default: "xori",
    aten.bitwise_and.Scalar: "andi", aten.bitwise_or.Scalar: "ori",
}


@imports(*_LOGIC, unsigned=True)
def _logic(context, node, arguments):
    element = compute_element(context.element(node))
    return _apply(context, node, [arguments.self, arguments.other],
                  lambda x, y: context.builder.op(
                      f"arith.{_LOGIC[node.target]} {x}, {y} : {element}"))


@imports(aten.bitwise_not.default, aten.logical_not.default, unsigned=True)
def _not(context, node, arguments):
    element = compute_element(context.element(node))
    ones = context.builder.constant(1 if element == "i1" else -1, element)
    return _apply(context, node, [arguments.self],
                  lambda x: context.builder.op(f"arith.xori {x}, {ones} : {element}"))


@imports(aten.where.self, unsigned=True)
def _where(context, node, arguments):
    element = context.element(node)
    kind = compute_element(element) if element == "ui8" else element
    return context.elementwise(
        context.shape(node), element, [arguments.condition, arguments.self, arguments.other],
        ["i1", element, element], element,
        lambda flag, x, y: context.builder.op(f"arith.select {flag}, {x}, {y} : {kind}"))


# ---- conversions ---------------------------------------------------------------

@imports(aten._to_copy.default, aten.to.dtype, torch.ops.prims.convert_element_type.default,
         unsigned=True)
def _convert(context, node, arguments):
    source = getattr(arguments, "self", None) or arguments.a
    if context.element(source) == context.element(node):
        return context.raw(source)
    # Converting from the source's own type: a detour through f32 could round twice.
    raw, origin, target = context.raw(source), context.element(source), context.element(node)
    if isinstance(raw, Splat):
        return Splat(context.builder.convert(raw.scalar, raw.element, target), raw.shape, target)
    return context.elementwise(context.shape(node), target, [source], [origin], origin, lambda x: x)
