"""Sizes travel as text and are evaluated without running code."""

import pytest
import sympy

from moe_mlir.gpu.sizes import evaluate_text, format_size


def test_a_formatted_size_has_the_value_of_the_expression():
    a, b = sympy.symbols("s0 s1", integer=True, positive=True)
    for expression in (a, 2 * a * b, a ** 2 + b, sympy.Max(a, b) + 1):
        text = format_size(expression)
        assert evaluate_text(text, {"s0": 5, "s1": 7}) == expression.subs({a: 5, b: 7})


@pytest.mark.parametrize("text", ["__import__('os')", "s0.real", "s0[0]", "f(s0)", "'a'*9", "1.5",
                                  "max(*s0)", "lambda: 1"])
def test_anything_but_arithmetic_is_refused(text):
    with pytest.raises(ValueError, match="expected a size made of"):
        evaluate_text(text, {"s0": 3})


@pytest.mark.parametrize("text, message", [
    ("s9", "no argument determines"), ("s0//0", "divides by zero"), ("9**99", "expected a power"),
    ("s0 +", "expected a size such as")])
def test_bad_sizes_say_why(text, message):
    with pytest.raises(ValueError, match=message):
        evaluate_text(text, {"s0": 3})
