"""The features of an expert's layer as formulas, in one normal form.

Code that is run on `Features` instead of a tensor leaves the formula of its result: a sum of
products of functions such as sigmoid(1.702 a) and clamp(u, -7, 7). Two formulas are equal if
they are so as real functions by the rules below, whatever the tensors hold: the code differs in
rounding at most. What has no rule here raises, so that nothing is taken for what it is not:
comparisons, functions of several tensors, casts that lose bits, values that decide a branch.
"""

import math
import operator
from collections.abc import Callable
from typing import Any

import torch

# A monomial is a sorted tuple of (atom, power); a formula maps monomials to coefficients.
Formula = dict[tuple, float]
_MOST_TERMS = 64


class NoFormula(Exception):
    """The code does something that has no rule."""


# ---- formulas -------------------------------------------------------------------


def _number(x: Any) -> float:
    if isinstance(x, torch.Tensor) or not isinstance(x, (int, float)) or isinstance(x, bool):
        raise NoFormula(f"expected a number, found {type(x).__name__}")
    return float(x)


def _constant(x: Any) -> Formula:
    number = _number(x)
    return {(): number} if number else {}


def _add(a: Formula, b: Formula) -> Formula:
    total = dict(a)
    for monomial, factor in b.items():
        total[monomial] = total.get(monomial, 0.0) + factor
        if total[monomial] == 0:
            if monomial:
                raise NoFormula("a difference in which features vanish")
            del total[monomial]
    return total


def _scale(a: Formula, factor: float) -> Formula:
    if factor == 0 or not math.isfinite(factor):
        raise NoFormula(f"a product with {factor}")
    return {monomial: coefficient * factor for monomial, coefficient in a.items()}


def _multiply(a: Formula, b: Formula) -> Formula:
    total: Formula = {}
    for left, x in a.items():
        for right, y in b.items():
            powers: dict[tuple, int] = dict(left)
            for atom, power in right:
                powers[atom] = powers.get(atom, 0) + power
            total = _add(total, {tuple(sorted(powers.items(), key=repr)): x * y})
    if len(total) > _MOST_TERMS:
        raise NoFormula("a sum of many terms")
    return total


def _power(a: Formula, exponent: Any) -> Formula:
    if _number(exponent) not in (1, 2, 3, 4):
        raise NoFormula(f"the power {exponent}")
    result = a
    for _ in range(int(exponent) - 1):
        result = _multiply(result, a)
    return result


def _key(a: Formula) -> tuple:
    """What equal formulas have in common: constants count to seven digits, as in float32."""
    return tuple(sorted(((monomial, float(f"{factor:.6e}")) for monomial, factor in a.items()),
                        key=repr))


def _atom(name: str, a: Formula, *numbers: Any) -> Formula:
    if not any(a):
        raise NoFormula("a function of a constant")
    bounds = tuple(None if n is None else float(f"{_number(n):.6e}") for n in numbers)
    return {(((name, _key(a), *bounds), 1),): 1.0}


def _clamp(a: Formula, low: Any = None, high: Any = None) -> Formula:
    return a if low is None and high is None else _atom("clamp", a, low, high)


def _reciprocal(a: Formula) -> Formula:
    """1 / a; 1 / (1 + exp(-x)) is sigmoid(x)."""
    if list(a) == [()]:
        return {(): 1 / a[()]}
    functions = [monomial for monomial in a if monomial]
    if len(functions) == 1 and a.get(()) == 1 and a[functions[0]] == 1:
        (atom, power), *others = functions[0]
        if atom[0] == "exp" and power == 1 and not others:
            return _atom("sigmoid", _scale(dict(atom[1]), -1))
    return _atom("reciprocal", a)


def _gelu(a: Formula, approximate: str = "none") -> Formula:
    if approximate == "none":
        inner = _atom("erf", _scale(a, math.sqrt(0.5)))
    elif approximate == "tanh":
        cubed = _add(a, _scale(_power(a, 3), 0.044715))
        inner = _atom("tanh", _scale(cubed, math.sqrt(2 / math.pi)))
    else:
        raise NoFormula(f"gelu with approximate={approximate!r}")
    return _scale(_multiply(a, _add(_constant(1), inner)), 0.5)


# ---- the features -----------------------------------------------------------------


class Features:
    """Stands for a tensor `[.., features]` of a layer, or for what was computed of it.

    Attributes:
        formula: of an element.
        slices: (first, step, number) of the layer's features that the elements belong to.
    """

    def __init__(self, formula: Formula, slices: tuple[int, int, int],
                 dtype: torch.dtype = torch.float32) -> None:
        self.formula, self.slices, self.dtype = formula, slices, dtype
        self._is_viewed = False

    @classmethod
    def of_layer(cls, features: int, dtype: torch.dtype = torch.float32) -> "Features":
        return cls._of_slice((0, 1, features), dtype)

    @classmethod
    def _of_slice(cls, slices, dtype) -> "Features":
        return cls({((("feature", *slices), 1),): 1.0}, slices, dtype)

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (),
                           kwargs: dict | None = None) -> Any:
        return evaluate(function, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in _RULES:
            raise NoFormula(f"the attribute '{name}'")
        return lambda *args, **kwargs: evaluate(name, (self, *args), kwargs)

    def __getitem__(self, index: Any) -> "Features":
        *whole, last = index if isinstance(index, tuple) else (index,)
        if any(part is not Ellipsis and part != slice(None) for part in whole) or not whole \
                or not isinstance(last, slice):
            raise NoFormula("an index of other than the last dim")
        return self.part(last.start, last.stop, last.step)

    def part(self, start: int | None, stop: int | None, step: int | None = 1) -> "Features":
        """Of the layer's own features those of a slice; computed ones are not cut."""
        if list(self.formula) != [((("feature", *self.slices), 1),)]:
            raise NoFormula("a slice of computed features")
        self._is_viewed = True
        first, stride, count = self.slices
        begin, end, own_step = slice(start, stop, step).indices(count)
        size = len(range(begin, end, own_step))
        return self._of_slice((first + begin * stride, stride * own_step, size), self.dtype)

    def with_formula(self, formula: Formula, other: Any = None) -> "Features":
        """The result of a function of these features, and of `other`, element by element."""
        count = self.slices[2]
        if isinstance(other, Features) and other.slices[2] != count:
            raise NoFormula("features of different numbers")
        return Features(formula, self.slices, self.dtype)

    def become(self, new: "Features") -> "Features":
        """An update in place, which no other name may see."""
        if self._is_viewed or self.slices[:2] != (0, 1):
            raise NoFormula("an update of features that have several names")
        self.formula = new.formula
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Features) and _key(self.formula) == _key(other.formula) \
            and self.slices[2] == other.slices[2]

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise NoFormula("a branch on values")


def evaluate(function: Callable | str, args: tuple, kwargs: dict) -> Any:
    """What a function of torch, an ATen operator, or a method by its name gives for Features.

    Raises:
        NoFormula: it has no rule for these arguments.
    """
    if function is operator.getitem:
        return args[0][args[1]]
    name = function if isinstance(function, str) else getattr(
        function, "_opname", getattr(function, "__name__", ""))
    name = name.strip("_") if name.startswith("__") else name
    in_place = kwargs.pop("inplace", False) or (name.endswith("_") and name[:-1] in _RULES)
    rule = _RULES.get(name.rstrip("_"))
    if rule is None:
        raise NoFormula(f"the function '{name}'")
    try:
        result = rule(*args, **kwargs)
    except TypeError as error:  # arguments that the rule does not know
        raise NoFormula(f"the function '{name}': {error}") from None
    return args[0].become(result) if in_place else result


def _formula(x: Any) -> Formula:
    return x.formula if isinstance(x, Features) else _constant(x)


def _sum_rule(sign: float) -> Callable:
    def rule(a, b, *, alpha=1):
        shape, other = (a, b) if isinstance(a, Features) else (b, a)
        return shape.with_formula(_add(_formula(a), _scale(_formula(b), sign * _number(alpha))
                                       if _formula(b) else {}), other)
    return rule


def _product(a, b):
    shape, other = (a, b) if isinstance(a, Features) else (b, a)
    if not isinstance(other, Features):
        return shape.with_formula(_scale(shape.formula, _number(other)))
    return shape.with_formula(_multiply(a.formula, b.formula), other)


def _quotient(a, b):
    if not isinstance(b, Features):
        number = _number(b)
        if not number:
            raise NoFormula("a division by 0")
        return a.with_formula(_scale(a.formula, 1 / number))
    return b.with_formula(_multiply(_formula(a), _reciprocal(b.formula)), a)


def _pointwise(make: Callable[[Formula], Formula]) -> Callable:
    return lambda x: x.with_formula(make(x.formula))


def _threshold(x, threshold, value):
    if _number(threshold) or _number(value):
        raise NoFormula("a threshold other than that of relu")
    return x.with_formula(_clamp(x.formula, 0.0))


def _converted(x, dtype=None, *_, **__):
    """A cast that keeps all bits of the layer's type, or goes back to it."""
    if isinstance(dtype, Features):
        dtype = dtype.dtype
    if dtype is None:
        return x
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise NoFormula(f"a conversion to {dtype}")
    if dtype != x.dtype and torch.finfo(dtype).bits < 32:
        raise NoFormula(f"a conversion to {dtype}, which loses bits")
    return x.with_formula(x.formula)


def _is_last(dim) -> None:
    if dim not in (-1, 1):
        raise NoFormula(f"a part along dim {dim}")


def _chunk(x, chunks, dim=0):
    _is_last(dim)
    size = -(-x.slices[2] // chunks)
    return _split(x, size, dim)


def _split(x, split_size, dim=0):
    _is_last(dim)
    count = x.slices[2]
    sizes = list(split_size) if isinstance(split_size, (list, tuple)) else \
        [min(split_size, count - first) for first in range(0, count, split_size)]
    if sum(sizes) != count:
        raise NoFormula("parts of another sum")
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(x.part(start, start + size) for start, size in zip(starts, sizes))


def _slice(x, dim=0, start=None, end=None, step=1):
    if dim in (0, -2):
        if (start or 0) == 0 and (end is None or end >= 2 ** 62) and step == 1:
            return x
        raise NoFormula("a part of the rows")
    _is_last(dim)
    return x.part(start, end, step)


def _dropout(x, p=0.5, training=True):
    if training and p:
        raise NoFormula("dropout in training")
    return x


def _same(x, *, memory_format=None):
    return x


def _sigmoid(a: Formula) -> Formula:
    return _atom("sigmoid", a)


_RULES: dict[str, Callable] = {
    "add": _sum_rule(1), "radd": _sum_rule(1), "sub": _sum_rule(-1),
    "rsub": lambda a, b, *, alpha=1: _sum_rule(-1)(b, a, alpha=alpha),
    "mul": _product, "rmul": _product, "multiply": _product,
    "div": _quotient, "truediv": _quotient, "rtruediv": lambda a, b: _quotient(b, a),
    "neg": _pointwise(lambda a: _scale(a, -1)), "pow": lambda x, exponent: x.with_formula(
        _power(x.formula, exponent)),
    "square": _pointwise(lambda a: _power(a, 2)), "reciprocal": _pointwise(_reciprocal),
    "exp": _pointwise(lambda a: _atom("exp", a)), "erf": _pointwise(lambda a: _atom("erf", a)),
    "tanh": _pointwise(lambda a: _atom("tanh", a)), "sigmoid": _pointwise(_sigmoid),
    "silu": _pointwise(lambda a: _multiply(a, _sigmoid(a))),
    "relu": _pointwise(lambda a: _clamp(a, 0.0)), "threshold": _threshold,
    "gelu": lambda x, *, approximate="none": x.with_formula(_gelu(x.formula, approximate)),
    "clamp": lambda x, min=None, max=None: x.with_formula(_clamp(x.formula, min, max)),
    "clip": lambda x, min=None, max=None: x.with_formula(_clamp(x.formula, min, max)),
    "hardtanh": lambda x, min_val=-1.0, max_val=1.0: x.with_formula(
        _clamp(x.formula, min_val, max_val)),
    "clamp_min": lambda x, min: x.with_formula(_clamp(x.formula, min)),
    "clamp_max": lambda x, max: x.with_formula(_clamp(x.formula, None, max)),
    "chunk": _chunk, "split": _split, "split_with_sizes": _split, "slice": _slice,
    "dropout": _dropout, "clone": _same, "contiguous": _same, "alias": _same,
    "to": _converted, "type_as": _converted, "_to_copy": lambda x, *, dtype=None, **_: _converted(
        x, dtype), "convert_element_type": _converted,
    "float": lambda x: _converted(x, torch.float32), "double": lambda x: _converted(
        x, torch.float64),
}


def _operator(name: str) -> Callable:
    return lambda self, *args: evaluate(name, (self, *args), {})


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "neg", "pow"):
    setattr(Features, f"__{_name}__", _operator(_name))
