"""Writes one MLIR function as text: names, types, constants, locations.

Nothing here knows torch. A dimension is an `int` or a sympy expression over
the symbols that the function's arguments bind; constants and the arithmetic on
dimensions depend on nothing but the arguments, so they are written once, at
the entry of the function, and are visible everywhere.
"""

from collections.abc import Callable, Collection, Iterator, Sequence

import math
import struct
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import sympy

Dim: TypeAlias = int | sympy.Expr

FLOAT_BITS = {"f64": 64, "f32": 32, "bf16": 16, "f16": 16}
INT_BITS = {"i64": 64, "i32": 32, "i16": 16, "i8": 8, "ui8": 8, "i1": 1}


def is_float(element: str) -> bool:
    return element in FLOAT_BITS


def stored(element: str) -> str:
    """The type as MLIR writes it: what has a sign is up to the operations."""
    return "i8" if element == "ui8" else element


def compute_element(element: str) -> str:
    """The type that scalars are computed in; 16-bit floats and uint8 in a wider one.

    Numbers without a sign are whole numbers like others in a type that holds them all; what
    is rounded off of a result are the bits that wrap around.
    """
    return {"bf16": "f32", "f16": "f32", "ui8": "i16"}.get(element, element)


def string_literal(text: str) -> str:
    """The text as MLIR reads it."""
    return '"' + "".join(chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else
                         f"\\{byte:02X}" for byte in text.encode()) + '"'


def tensor_type(shape: Sequence[Dim], element: str) -> str:
    dims = "".join(f"{d}x" if isinstance(d, int) else "?x" for d in shape)
    return f"tensor<{dims}{stored(element)}>"


def as_dim(value: int | sympy.Expr) -> Dim:
    """An int where the expression is one: types print `8`, not `?`."""
    if isinstance(value, int):
        return value
    value = sympy.sympify(value)
    return int(value) if value.is_Integer else value


def same_dim(a: Dim, b: Dim) -> bool:
    return a == b or sympy.expand(sympy.sympify(a) - sympy.sympify(b)) == 0


@dataclass(frozen=True)
class Value:
    """An SSA value of tensor type."""

    name: str
    shape: tuple[Dim, ...]
    element: str

    @property
    def type(self) -> str:
        return tensor_type(self.shape, self.element)

    @property
    def rank(self) -> int:
        return len(self.shape)


@dataclass(frozen=True)
class Operand:
    """A value seen through a permutation or broadcast that is not written yet.

    `dims[b]` is the dimension of `shape` that walks dimension `b` of the value,
    or None where that dimension has size 1 and is broadcast. Consumers that
    have indexing maps read the value in place; the others ask for a copy.
    """

    value: Value
    dims: tuple[int | None, ...]
    shape: tuple[Dim, ...]

    @staticmethod
    def of(value: Value) -> "Operand":
        return Operand(value, tuple(range(value.rank)), value.shape)

    @property
    def element(self) -> str:
        return self.value.element

    @property
    def is_identity(self) -> bool:
        return self.dims == tuple(range(len(self.shape)))

    def map_results(self, loops: Sequence[str]) -> list[str]:
        """The value's affine map results when dimension i runs over loops[i]."""
        return ["0" if d is None else loops[d] for d in self.dims]


class UnknownSymbol(Exception):
    """A size that no argument determines; it depends on data."""


class FunctionBuilder:
    def __init__(self, name: str) -> None:
        self.name = name
        self.arguments: list[tuple[Value | str, str | None]] = []
        self.location = "loc(unknown)"
        self._entry: list[str] = []
        self._lines: list[str] = []
        self._indent = "  "
        self._next = 0
        self._constants: dict[tuple[str, str], str] = {}
        self._dims: dict[sympy.Expr, str] = {}
        # What sizes are divided by: calls for which one is 0 must not come here.
        self.divisors: dict[sympy.Expr, None] = {}

    # ---- names and lines -------------------------------------------------

    def fresh(self) -> str:
        self._next += 1
        return f"%{self._next - 1}"

    def line(self, text: str) -> None:
        self._lines.append(f"{self._indent}{text} {self.location}")

    def op(self, text: str) -> str:
        """One operation with one result."""
        name = self.fresh()
        self.line(f"{name} = {text}")
        return name

    def ops(self, text: str, count: int) -> list[str]:
        """One operation with `count` results."""
        name = self.fresh()
        self.line(f"{name}:{count} = {text}")
        return [f"{name}#{i}" for i in range(count)]

    def tensor(self, text: str, shape: Sequence[Dim], element: str) -> Value:
        return Value(self.op(text), tuple(shape), element)

    @contextmanager
    def region(self, head: str, result: str | None = None, tail: str = "") -> Iterator[None]:
        """`result = head { ... } tail`; the body is written inside the with."""
        self._lines.append(self._indent + (f"{result} = " if result else "") + head + " {")
        self._indent += "  "
        yield
        self._indent = self._indent[2:]
        self.line("}" + (f" {tail}" if tail else ""))

    def _entry_op(self, text: str) -> str:
        name = self.fresh()
        self._entry.append(f"  {name} = {text} loc(unknown)")
        return name

    # ---- arguments, dimensions, constants ---------------------------------

    def argument(self, shape: Sequence[Dim], element: str, label: str) -> Value:
        value = Value(f"%arg{len(self.arguments)}", tuple(shape), element)
        self.arguments.append((value, label))
        for i, dim in enumerate(shape):
            if isinstance(dim, sympy.Symbol) and dim not in self._dims:
                at = self.constant(i, "index")
                self._dims[dim] = self._entry_op(
                    f"tensor.dim {value.name}, {at} : {value.type}")
        return value

    def size_argument(self, symbol: sympy.Symbol) -> None:
        """An argument that is the size `symbol`."""
        name = f"%arg{len(self.arguments)}"
        self.arguments.append((name, None))
        self._dims[symbol] = name

    def constant(self, value: float, element: str) -> str:
        """A scalar constant at the function's entry."""
        text, element = format_constant(value, element), stored(element)
        key = (text, element)
        if key not in self._constants:
            suffix = "" if element == "i1" else f" : {element}"
            self._constants[key] = self._entry_op(f"arith.constant {text}{suffix}")
        return self._constants[key]

    def index(self, dim: Dim) -> str:
        """A dimension as an SSA value of type index."""
        if isinstance(dim, int) or dim.is_Integer:
            return self.constant(int(dim), "index")
        if dim not in self._dims:
            self._dims[dim] = self._index_expression(dim)
        return self._dims[dim]

    def open_size(self, name: str) -> sympy.Symbol:
        """A dimension for a size that is an SSA value of a loop; for no arithmetic."""
        symbol = sympy.Symbol(f"size_{name.removeprefix('%')}", integer=True)
        self._dims[symbol] = name
        return symbol

    def _index_expression(self, expr: sympy.Expr) -> str:
        if isinstance(expr, sympy.Symbol):
            raise UnknownSymbol(str(expr))
        operands = expr.args
        kind = type(expr).__name__
        if isinstance(expr, sympy.Pow) and operands[1].is_Integer and operands[1] > 0:
            operands, op = [operands[0]] * int(operands[1]), "muli"
        elif kind in INDEX_OPS:
            op = INDEX_OPS[kind]
            if op in ("floordivsi", "remsi") and not operands[1].is_Integer:
                self.divisors[operands[1]] = None
        else:
            raise UnknownSymbol(str(expr))
        result = self.index(operands[0])
        for other in operands[1:]:
            result = self._entry_op(f"arith.{op} {result}, {self.index(other)} : index")
        return result

    def size(self, dim: Dim) -> str:
        """A dimension as the mixed static/dynamic lists of tensor ops take it."""
        return str(dim) if isinstance(dim, int) else self.index(dim)

    def check(self, condition: str, error: str, message: str,
              *values: tuple[str, str]) -> None:
        """Ends the call with an error unless the condition holds.

        `error` is a kind of `moe.assert`; `values` are (name, type) of what stands in the
        places `{0}`, `{1}` .. of the message.
        """
        given = ""
        if values:
            given = (f" ({', '.join(name for name, _ in values)} : "
                     f"{', '.join(kind for _, kind in values)})")
        self.line(f"moe.assert <{error}> {condition}, {string_literal(message)}{given}")

    # ---- structured operations ---------------------------------------------

    def empty(self, shape: Sequence[Dim], element: str) -> Value:
        sizes = ", ".join(self.index(d) for d in shape if not isinstance(d, int))
        return self.tensor(f"tensor.empty({sizes}) : {tensor_type(shape, element)}",
                           shape, element)

    def fill(self, scalar: str, shape: Sequence[Dim], element: str) -> Value:
        init = self.empty(shape, element)
        return self.tensor(
            f"linalg.fill ins({scalar} : {stored(element)}) outs({init.name} : {init.type}) -> {init.type}",
            shape, element)

    def generic(self, loops: int, inputs: Sequence[tuple[Value, Sequence[str]]], init: Value,
                init_map: Sequence[str], body: Callable[..., str],
                parallel: Collection[int]) -> Value:
        """A linalg.generic.

        `inputs` are (Value, map results); `parallel` the set of parallel loops;
        `body` maps the block's scalars (inputs, then the output) to the result.
        """
        dims = ", ".join(f"d{i}" for i in range(loops))
        maps = ", ".join(f"affine_map<({dims}) -> ({', '.join(results)})>"
                         for results in [m for _, m in inputs] + [init_map])
        iterators = ", ".join('"parallel"' if i in parallel else '"reduction"'
                              for i in range(loops))
        ins = ""
        if inputs:
            ins = (f" ins({', '.join(v.name for v, _ in inputs)} : "
                   f"{', '.join(v.type for v, _ in inputs)})")
        scalars = [self.fresh() for _ in range(len(inputs) + 1)]
        elements = [stored(v.element) for v in (*(v for v, _ in inputs), init)]
        result = self.fresh()
        head = (f"linalg.generic {{indexing_maps = [{maps}], iterator_types = [{iterators}]}}"
                f"{ins} outs({init.name} : {init.type})")
        with self.region(head, result, f"-> {init.type}"):
            block = ", ".join(f"{s}: {e} {self.location}" for s, e in zip(scalars, elements))
            self._lines.append(f"{self._indent[2:]}^bb0({block}):")
            self.line(f"linalg.yield {body(*scalars)} : {elements[-1]}")
        return Value(result, init.shape, init.element)

    def map(self, operands: Sequence[Operand], shape: Sequence[Dim], element: str,
            body: Callable[..., str]) -> Value:
        """An elementwise generic; operands are broadcast to `shape` from the right."""
        loops = [f"d{i}" for i in range(len(shape))]
        inputs = [(o.value, o.map_results(broadcast_loops(o.shape, shape))) for o in operands]
        return self.generic(len(shape), inputs, self.empty(shape, element), loops,
                            lambda *scalars: body(*scalars[:-1]), set(range(len(shape))))

    def write(self, operand: Operand) -> Value:
        """The operand as a tensor of its own."""
        if operand.is_identity:
            return operand.value
        return self.map([operand], operand.shape, operand.element, lambda x: x)

    def convert(self, scalar: str, source: str, target: str) -> str:
        """A scalar of another element type; conversions as torch's `.to`."""
        if source == target:
            return scalar
        if target == "i1":
            zero = self.constant(0, source)
            compare = "cmpf une" if is_float(source) else "cmpi ne"
            return self.op(f"arith.{compare}, {scalar}, {zero} : {stored(source)}")
        if target in ("f16", "bf16") and source != "f32":
            # As torch, which rounds twice; arith has no conversion of f16 to bf16 or back.
            scalar, source = self.convert(scalar, source, "f32"), "f32"
        if is_float(source) and target in ("i16", "i8", "ui8"):
            # As torch, which wraps around what the type does not hold; arith does not say.
            wide = "i64" if target == "ui8" else "i32"
            scalar, source = self.convert(scalar, source, wide), wide
        if stored(source) == stored(target):
            return scalar
        return self.op(f"arith.{conversion(source, target)} {scalar} : {stored(source)} to "
                       f"{stored(target)}")

    # ---- the finished function ----------------------------------------------

    def _as(self, value: Value, argument: Value | str) -> Value:
        """The value in the type of an argument, which has its sizes; a trace may know more of them."""
        assert not isinstance(argument, str)  # a size is not updated
        if value.type == argument.type:
            return value
        name = self.op(f"tensor.cast {value.name} : {value.type} to {argument.type}")
        return Value(name, argument.shape, argument.element)

    def finish(self, results: list[Value], private: bool = False,
               updates: Sequence[int | None] = ()) -> str:
        """The function's text; `updates` has the argument that each result updates."""
        results = [r if argument is None else self._as(r, self.arguments[argument][0])
                   for r, argument in zip(results, updates or [None] * len(results))]
        arguments = ",\n    ".join(f"{v}: index" if isinstance(v, str) else
                                  f"{v.name}: {v.type} {{moe.name = {string_literal(label or v.name)}}}"
                                  for v, label in self.arguments)
        types = ", ".join(r.type for r in results)
        returned = ", ".join(
            r.type if argument is None else f"{r.type} {{moe.updates = {argument} : i64}}"
            for r, argument in zip(results, updates or [None] * len(results)))
        names = ", ".join(r.name for r in results)
        body = "\n".join(self._entry + self._lines)
        # A function of its own is compiled once, however often it is called.
        head, kept = (("private ", ' attributes {passthrough = ["noinline"]}') if private
                      else ("", ""))
        return (f"func.func {head}@{self.name}(\n    {arguments})\n    -> ({returned}){kept} {{\n"
                f"{body}\n"
                f"  return {names}{' : ' + types if results else ''}\n}}\n")


INDEX_OPS = {"Add": "addi", "Mul": "muli", "FloorDiv": "floordivsi", "CleanDiv": "floordivsi",
             "Mod": "remsi", "PythonMod": "remsi", "Max": "maxsi", "Min": "minsi"}


def broadcast_loops(source: Sequence[Dim], target: Sequence[Dim]) -> list[str]:
    """The loops of `target` that each dimension of `source` runs over."""
    offset = len(target) - len(source)
    return ["0" if d == 1 and target[offset + i] != 1 else f"d{offset + i}"
            for i, d in enumerate(source)]


_UNSIGNED = ("i1", "ui8")


def conversion(source: str, target: str) -> str:
    if is_float(source) and is_float(target):
        return "extf" if FLOAT_BITS[target] > FLOAT_BITS[source] else "truncf"
    if is_float(source):
        return "fptosi"
    if is_float(target):
        return "uitofp" if source in _UNSIGNED else "sitofp"
    if target == "index" or source == "index":
        return "index_cast"
    if INT_BITS[target] < INT_BITS[source]:
        return "trunci"
    return "extui" if source in _UNSIGNED else "extsi"


def format_constant(value: float, element: str) -> str:
    if element == "i1":
        return "true" if value else "false"
    if element in INT_BITS:
        # Numbers wrap around, as where torch makes tensors of them.
        bits = INT_BITS[element]
        return str((int(value) + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1))
    if not is_float(element):
        return str(int(value))
    value = float(value)
    if math.isfinite(value):
        return f"{value:.17e}"
    # Infinities and NaN have no decimal form in MLIR: print the bits.
    bits = int.from_bytes(struct.pack(">d", value), "big")
    if element == "f64":
        return f"0x{bits:016X}"
    single = int.from_bytes(struct.pack(">f", value), "big")
    if element == "f32":
        return f"0x{single:08X}"
    if element == "bf16":
        return f"0x{single >> 16:04X}"
    half = int.from_bytes(struct.pack(">e", value), "big")
    return f"0x{half:04X}"
