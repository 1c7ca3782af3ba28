"""Walks an exported program and writes its function through the op table."""

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Node

from .._native import native
from .._support.log import logger
from ..gpu.sizes import RELATIONS
from ..graph.locations import describe, describe_briefly
from ..graph.repeats import Segment
from .builder import (
    Dim,
    FunctionBuilder,
    Operand,
    UnknownSymbol,
    Value,
    as_dim,
    compute_element,
    is_float,
    tensor_type,
)
from .locations import LocationTable
from .registry import COMPLEX, TABLE, UNSIGNED, Arguments, Unsupported

ELEMENTS = {
    torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8",
    torch.uint8: "ui8", torch.bool: "i1",
}

# A complex tensor is a real one whose last dimension holds real and imaginary part.
_PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64}


class ImportFailed(native().MoeError):  # type: ignore[misc]  # a class of the native module
    """The model uses something that the importer cannot translate; a MoeError.

    `problems` has one (what, count, first place) for each distinct cause.
    """

    def __init__(self, problems: Sequence[tuple[str, int, str]]) -> None:
        self.problems = problems
        self.diagnostics: list = []
        lines = [f"cannot import the model: {len(problems)} unsupported "
                 f"operation{'s' if len(problems) > 1 else ''}"]
        for what, count, place in problems:
            lines.append(f"  {what}: {count} use{'s' if count > 1 else ''}, first at {place}")
        lines.append("rewrite these lines with supported operations, or compile the parts "
                     "around them separately")
        super().__init__("\n".join(lines))


@dataclass(frozen=True)
class Splat:
    """A tensor whose elements are all one scalar, not written yet."""

    scalar: str
    shape: tuple[Dim, ...]
    element: str


@dataclass(frozen=True)
class Deferred:
    """An elementwise result that consumers compute themselves, from `inputs`.

    Comparisons and logic stay in this form, so that a mask is part of the loop
    that applies it instead of a tensor of bits in memory. The inputs are seen
    at `shape`.
    """

    inputs: tuple[Operand, ...]
    shape: tuple[Dim, ...]
    element: str
    body: Callable[..., str]


def element_of(dtype: torch.dtype) -> str:
    if dtype not in ELEMENTS:
        raise Unsupported(f"dtype {str(dtype).removeprefix('torch.')}")
    return ELEMENTS[dtype]


def broadcast(operand: Operand, shape: Sequence[Dim]) -> Operand:
    """The operand as seen at `shape`, aligned from the right."""
    offset = len(shape) - len(operand.shape)
    dims = []
    for d in operand.dims:
        stretched = d is not None and operand.shape[d] == 1 and shape[offset + d] != 1
        dims.append(None if d is None or stretched else offset + d)
    return Operand(operand.value, tuple(dims), tuple(shape))


class Context:
    """What the functions of the op table see: the graph's values and a builder."""

    def __init__(self, name: str, table: LocationTable | None = None) -> None:
        self.builder = FunctionBuilder(name)
        self.locations = table or LocationTable()
        # What eager would refuse of open sizes, as (size, relation, 0).
        self.conditions: dict[tuple[sympy.Expr, str, int], None] = {}
        self._values: dict[Node, Any] = {}
        self._problems: Counter = Counter()
        self._places: dict[str, str] = {}

    # ---- types ---------------------------------------------------------------

    def shape(self, node_or_tensor: Node | torch.Tensor) -> tuple:
        tensor = node_or_tensor.meta["val"] if isinstance(node_or_tensor, Node) else node_or_tensor
        sizes = tuple(as_dim(d if isinstance(d, int) else d.node.expr) for d in tensor.shape)
        return (*sizes, 2) if tensor.dtype.is_complex else sizes

    def element(self, node: Node) -> str:
        dtype = node.meta["val"].dtype
        return element_of(_PARTS.get(dtype, dtype))

    def dim(self, value: Node | int | torch.SymInt) -> Dim:
        """A size argument: an int, or a node that holds a symbolic int."""
        if isinstance(value, Node):
            value = value.meta["val"]
        return value if isinstance(value, int) else as_dim(value.node.expr)

    def hint(self, value: Node | torch.SymInt) -> int:
        """What a symbolic size argument is in the example."""
        if isinstance(value, Node):
            value = value.meta["val"]
        if not value.node.has_hint():
            raise Unsupported(f"the size {value}, which depends on data")
        return int(value.node.hint)

    def require(self, size: Dim, relation: str, bound: Dim) -> None:
        """Lets the program serve only calls for whose sizes the relation holds."""
        gap = as_dim(sympy.expand(sympy.sympify(size) - sympy.sympify(bound)))
        if not isinstance(gap, int):
            self.conditions[gap, relation, 0] = None
        elif not RELATIONS[relation](gap, 0):
            raise Unsupported(f"sizes {size} and {bound}; expected {size} {relation} {bound}")

    def assert_holds(self, node: Node, condition: str, error: str, message: str,
                     *values: tuple[str, str]) -> None:
        """As `FunctionBuilder.check`, with the user's line behind the message."""
        where = describe_briefly(node)
        self.builder.check(condition, error, f"{message}; {where}" if where else message, *values)

    # ---- values --------------------------------------------------------------

    def raw(self, node: Node) -> Any:
        return self._values[node]

    def operand(self, node: Node) -> Operand:
        """The node's value, possibly through a permutation or broadcast."""
        value = self._values[node]
        return value if isinstance(value, Operand) else Operand.of(self.value(node))

    def value(self, node: Node) -> Value:
        """The node's value as a tensor of its own, written out where needed."""
        value = self._values[node]
        if isinstance(value, Splat):
            value = self.builder.fill(value.scalar, value.shape, value.element)
        elif isinstance(value, Deferred):
            value = self.builder.map(value.inputs, value.shape, value.element, value.body)
        elif isinstance(value, Operand):
            value = self.builder.write(value)
        self._values[node] = value
        return value

    def scalar(self, value: Node | float, element: str) -> str:
        """A Python number, or a node that holds a number, as an SSA scalar."""
        if isinstance(value, Node):
            expr = as_dim(value.meta["val"].node.expr)
            if not isinstance(expr, int):
                name = self.builder.index(expr)
                if element == "index":
                    return name
                whole = element if not is_float(element) else "i64"
                cast = self.builder.op(f"arith.index_cast {name} : index to {whole}")
                return self.builder.convert(cast, whole, element)
            value = expr
        return self.builder.constant(value, element)

    def is_tensor(self, value: object) -> bool:
        return isinstance(value, Node) and isinstance(value.meta["val"], torch.Tensor)

    def elementwise(self, shape: Sequence[Dim], element: str, operands: Sequence[Node | float],
                    types: Sequence[str], result: str,
                    body: Callable[..., str]) -> Value | Deferred:
        """`body` over scalars: operand i as types[i], what it returns is of type `result`.

        Operands are nodes or numbers. A boolean result is deferred. What is "ui8" comes to the
        body, and from it, in the type that it is computed in.
        """
        inputs: list[Operand] = []
        evaluators = []
        for x, wanted in zip(operands, types):
            leaves, evaluate = self._scalar_source(x, wanted)
            evaluators.append((len(inputs), len(leaves), evaluate))
            inputs.extend(leaves)

        given = compute_element(result) if result == "ui8" else result

        def compute(*scalars):
            values = [evaluate(*scalars[first:first + count])
                      for first, count, evaluate in evaluators]
            return self.builder.convert(body(*values), given, element)
        if element == "i1":
            return Deferred(tuple(broadcast(i, shape) for i in inputs), tuple(shape), element,
                            compute)
        return self.builder.map(inputs, shape, element, compute)

    def _scalar_source(self, x, wanted: str):
        """The operands to read for `x`, and the function from their scalars to x's."""
        def convert(scalar, source, target):
            scalar = self.builder.convert(scalar, source, target)
            return scalar if target != "ui8" else self.builder.convert(
                scalar, target, compute_element(target))
        if not self.is_tensor(x):
            constant = convert(self.scalar(x, wanted), wanted, wanted)
            return (), lambda: constant
        raw = self._values[x]
        if isinstance(raw, Splat):
            constant = convert(raw.scalar, raw.element, wanted)
            return (), lambda: constant
        if isinstance(raw, Deferred):
            return raw.inputs, lambda *s: convert(raw.body(*s), raw.element, wanted)
        operand = self.operand(x)
        return (operand,), lambda s: convert(s, operand.element, wanted)

    # ---- the walk --------------------------------------------------------------

    def argument(self, node: Node, label: str) -> None:
        self._values[node] = self.builder.argument(self.shape(node), self.element(node), label)

    def run(self, node: Node) -> None:
        """Imports one call; problems are collected, so that all are told at once."""
        self.builder.location = self.locations.reference(node)
        try:
            if node.target is operator.getitem:
                self._values[node] = self._values[node.args[0]][node.args[1]]
                return
            if not _has_tensors(node.meta.get("val")) and node.target not in TABLE:
                return  # arithmetic on sizes: dimensions are expressions already
            if _has_no_elements(node.meta.get("val")):
                element = self.element(node)
                for size in self.shape(node):
                    self.builder.index(size)  # none that depends on data
                self._values[node] = Splat(self.builder.constant(0, element), self.shape(node), element)
                return
            if node.target not in TABLE:
                raise Unsupported(str(node.target))
            if node.target not in COMPLEX and _has_complex(node):
                raise Unsupported("complex numbers")
            if node.target not in UNSIGNED and _has_unsigned(node):
                raise Unsupported("dtype uint8; convert the operand, such as by .long()")
            arguments = Arguments(node)
            self._values[node] = TABLE[node.target](self, node, arguments)
            arguments.check_read()
        except Unsupported as problem:
            self._report(node, _name_problem(node, str(problem)))
        except UnknownSymbol as symbol:
            self._report(node, f"{node.target}: {_unknown(str(symbol))}")
        except (ArithmeticError, AssertionError, AttributeError, LookupError) as error:
            # A fault of ours in one call: the user learns which, the log has the rest.
            logger("compile").debug("cannot import %s", node.format_node(), exc_info=True)
            self._report(node, f"{node.target}: {type(error).__name__} in moe-mlir, {error}; please report it")

    def call(self, function: str, segment: Segment, symbols: Sequence[sympy.Symbol],
             shapes: Sequence[tuple[Sequence[Dim], str]]) -> None:
        """Calls a function for the outputs of a segment of the graph."""
        self.builder.location = self.locations.reference(segment.nodes[0])
        inputs = [self.value(x) for x in segment.inputs]
        sizes = [self.builder.index(symbol) for symbol in symbols]
        operands = ", ".join([*(v.name for v in inputs), *sizes])
        types = ", ".join([*(v.type for v in inputs), *["index"] * len(sizes)])
        results = ", ".join(tensor_type(shape, element) for shape, element in shapes)
        names = self.builder.ops(f"func.call @{function}({operands}) : ({types}) -> ({results})",
                                 len(shapes))
        if len(shapes) == 1:
            names = [names[0].partition("#")[0]]
        for node, name, (shape, element) in zip(segment.outputs, names, shapes):
            self._values[node] = Value(name, tuple(shape), element)

    def take_findings(self, other: "Context", times: int) -> None:
        """Takes over what the import of a function met; problems count once for each call."""
        self.conditions |= other.conditions
        self.builder.divisors |= other.builder.divisors
        for what, count in other._problems.items():
            self._problems[what] += count * times
            self._places.setdefault(what, other._places[what])

    def _report(self, node, what: str) -> None:
        self._problems[what] += 1
        self._places.setdefault(what, describe(node))
        self._values[node] = self._placeholder(node.meta.get("val"))

    def _placeholder(self, val):
        """Stands for the result of a failed call, so that the walk can go on."""
        if isinstance(val, (tuple, list)):
            return [self._placeholder(v) for v in val]
        if not isinstance(val, torch.Tensor):
            return None
        return Value("%failed", self.shape(val), ELEMENTS.get(val.dtype, "f32"))

    def check(self) -> None:
        if self._problems:
            raise ImportFailed([(what, count, self._places[what])
                                for what, count in sorted(self._problems.items())])


def _unknown(symbol: str) -> str:
    """What is said of a size, or of a float number that torch computes from sizes or takes from a tensor."""
    if symbol[0] in "us":
        return f"the size {symbol} depends on data"
    return (f"the number {symbol} is taken from a tensor or divides sizes, which depends on data; keep it a "
            "tensor, such as s in place of s.item()")


def _name_problem(node, reason: str) -> str:
    name = str(node.target)
    return reason if reason.startswith(name) else f"{name}: {reason}"


def _tensors(node):
    """The tensors that a call takes and gives."""
    values = [x.meta.get("val") for x in (node, *node.all_input_nodes)]
    flat = [v for value in values for v in (value if isinstance(value, (tuple, list)) else [value])]
    return [v for v in flat if isinstance(v, torch.Tensor)]


def _has_complex(node) -> bool:
    return any(v.is_complex() for v in _tensors(node))


def _has_unsigned(node) -> bool:
    return any(v.dtype is torch.uint8 for v in _tensors(node))


def _has_no_elements(value) -> bool:
    """Whether it is a tensor that is known to be empty: nothing computes it."""
    return isinstance(value, torch.Tensor) and not value.is_complex() and any(
        isinstance(size, int) and size == 0 for size in value.shape)


def _has_tensors(val) -> bool:
    if isinstance(val, (tuple, list)):
        return any(_has_tensors(v) for v in val)
    return isinstance(val, torch.Tensor)
