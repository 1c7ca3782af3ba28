"""Argument checks: each message names the op, the argument, what was expected, what was found."""

import contextlib
import math
import numbers
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

import torch

ACTIVATIONS = (torch.float32, torch.bfloat16, torch.float16)
SCORES = (torch.float32,)
INDICES = (torch.int32, torch.int64)
MASK = (torch.bool,)


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


class Checker:
    """Checks of one op's arguments; `op` opens every message.

    `names`: what the public function calls an argument where the op's schema calls it otherwise.
    """

    def __init__(self, op: str, names: Mapping[str, str] | None = None) -> None:
        self.op, self.names = op, names or {}

    def fail(self, message: str, error: type[Exception] = ValueError) -> NoReturn:
        for name, public in self.names.items():
            message = message.replace(f"'{name}'", f"'{public}'")
        raise error(f"{self.op}: {message}")

    def dtype(self, name: str, tensor: torch.Tensor, allowed: Sequence[torch.dtype]) -> None:
        if tensor.dtype not in allowed:
            self.fail(
                f"expected '{name}' to have dtype {_names(allowed)}, "
                f"found {_names((tensor.dtype,))}",
                TypeError,
            )

    def same_dtype(
        self, name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor
    ) -> None:
        if tensor.dtype != other.dtype:
            self.fail(
                f"expected '{name}' to have the dtype of '{other_name}' "
                f"({_names((other.dtype,))}), found {_names((tensor.dtype,))}",
                TypeError,
            )

    def rank(self, name: str, tensor: torch.Tensor, dims: str) -> None:
        """`dims` is the written form of the shape, such as "[batch, n, d]"."""
        rank = dims.count(",") + 1
        if tensor.dim() != rank:
            self.fail(
                f"expected '{name}' to have {rank} dims {dims}, found shape {tuple(tensor.shape)}"
            )

    def at_least_1d(self, name: str, tensor: torch.Tensor, dims: str) -> None:
        if tensor.dim() < 1:
            self.fail(f"expected '{name}' to have dims {dims}, found a 0-d tensor")

    def shape(
        self, name: str, tensor: torch.Tensor, expected: Sequence[Any], dims: str
    ) -> None:
        """Every entry of `expected` must equal the tensor's size there."""
        if len(tensor.shape) != len(expected) or any(
            found != size for found, size in zip(tensor.shape, expected)
        ):
            self.fail(
                f"expected '{name}' to have shape {dims} = {tuple(expected)}, "
                f"found {tuple(tensor.shape)}"
            )

    def choice(self, name: str, value: Any, choices: Collection[Any]) -> None:
        if value not in choices:
            self.fail(
                f"expected '{name}' to be one of {', '.join(map(repr, choices))}, found {value!r}"
            )

    def at_least(self, name: str, value: Any, least: Any) -> None:
        if value < least:
            self.fail(f"expected '{name}' to be at least {least}, found {value}")

    def finite(self, name: str, value: float) -> None:
        if not math.isfinite(value):
            self.fail(f"expected '{name}' to be finite, found {value}")

    def positive(self, name: str, value: float) -> None:
        if not (value > 0 and math.isfinite(value)):
            self.fail(f"expected '{name}' to be positive and finite, found {value}")

    # Types of Python values, checked in the public functions: torch's own
    # schema error names the schema instead of the argument.

    def tensor(self, name: str, value: Any, *, optional: bool = False) -> None:
        if not isinstance(value, torch.Tensor) and not (optional and value is None):
            what = "a tensor or None" if optional else "a tensor"
            self.fail(f"expected '{name}' to be {what}, found {type(value).__name__}", TypeError)

    def integer(self, name: str, value: Any, *, optional: bool = False) -> Any:
        """The value as a Python int, or as torch's symbolic one; numpy's integers are taken."""
        if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
            return value
        if optional and value is None:
            return None
        # A bool and a tensor have an __index__, too: the one is no number, the other no constant.
        if not isinstance(value, (bool, torch.Tensor)):
            with contextlib.suppress(TypeError):
                return operator.index(value)
        self.fail(f"expected '{name}' to be an int, found {type(value).__name__}", TypeError)

    def number(self, name: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            self.fail(f"expected '{name}' to be a number, found {type(value).__name__}", TypeError)

    def scalar_or_tensor(self, name: str, value: Any) -> tuple[torch.Tensor | None, float]:
        """Splits a learned scalar into (tensor, 1.0) and a plain one into (None, float)."""
        if isinstance(value, torch.Tensor):
            if value.dim() != 0 or not value.is_floating_point():
                self.fail(
                    f"expected '{name}' to be a number or a 0-d floating tensor, "
                    f"found shape {tuple(value.shape)} of {_names((value.dtype,))}"
                )
            return value, 1.0
        self.number(name, value)
        return None, float(value)
