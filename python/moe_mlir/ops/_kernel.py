"""One routing op as a compiled kernel: its MLIR text, its outputs, its call.

A `Kernel` describes one specialisation of an op: element types, static sizes
(experts, k, widths) as numbers, token counts as names. From that description
come the text of a function with just that op, the check that memory matches
it, and the allocation of the results. A kernel of several ops lists them as
`steps`.
"""

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import torch

from ..gpu import cuda
from ..sim.simulation import active_simulation

ELEMENT_TYPES = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.int8: "i8",
    torch.bool: "i1",
}


@dataclass(frozen=True)
class Tensor:
    """An operand or result: dims are sizes (int) or names of dynamic sizes (str).

    A dim of a result may be a tuple of those, their product. `clause` is the keyword under which the op's assembly lists the operand;
    a rank of 0 is passed as a tensor and read as a scalar by the op.
    """

    name: str
    dims: tuple
    dtype: torch.dtype
    clause: str = "ins"

    @property
    def type(self):
        element = ELEMENT_TYPES[self.dtype]
        dims = "".join(f"{dim}x" if isinstance(dim, int) else "?x" for dim in self.dims)
        return f"tensor<{dims}{element}>"

    @property
    def operand(self):
        """The SSA value and the type by which the op reads this operand."""
        if self.dims:
            return f"%{self.name}", self.type
        return f"%{self.name}_value", ELEMENT_TYPES[self.dtype]


@dataclass(frozen=True)
class Step:
    """One op of a kernel: `operands` are (clause, name) of inputs or of results of steps before."""

    op: str
    operands: tuple
    results: tuple
    attributes: tuple = ()


@dataclass(frozen=True)
class Kernel:
    """`results` are among those of `steps`; without steps, they are those of the one op."""

    op: str
    inputs: tuple
    results: tuple
    attributes: tuple = field(default=())
    steps: tuple[Step, ...] = ()

    def text(self):
        """The module: one public function named after the op, holding only the op, or the steps."""
        return self._text

    @functools.cached_property
    def _text(self):
        arguments = ", ".join(f"%{t.name}: {t.type}" for t in self.inputs)
        result_types = ", ".join(t.type for t in self.results)
        steps = self.steps or (Step(self.op, tuple((t.clause, t.name) for t in self.inputs),
                                    self.results, self.attributes),)
        body = [*self._scalars(), *self._empty_results(steps), *self._operations(steps)]
        lines = "\n".join(f"  {line}" for line in body)
        return f"func.func @{self.op}({arguments}) -> ({result_types}) {{\n{lines}\n}}\n"

    def _scalars(self):
        for tensor in self.inputs:
            if not tensor.dims:
                yield f"%{tensor.name}_value = tensor.extract %{tensor.name}[] : {tensor.type}"

    def _empty_results(self, steps):
        sizes: dict[Any, str] = {}
        for tensor in self.inputs:
            for position, dim in enumerate(tensor.dims):
                if isinstance(dim, str) and dim not in sizes:
                    sizes[dim] = f"%{dim}_size"
                    yield f"%{dim}_axis = arith.constant {position} : index"
                    yield f"%{dim}_size = tensor.dim %{tensor.name}, %{dim}_axis : {tensor.type}"
        results = [tensor for step in steps for tensor in step.results]
        for dim in dict.fromkeys(dim for tensor in results for dim in tensor.dims):
            if isinstance(dim, tuple):
                sizes[dim], lines = _product(dim, sizes)
                yield from lines
        for tensor in results:
            dynamic = ", ".join(sizes[dim] for dim in tensor.dims if not isinstance(dim, int))
            yield f"%{tensor.name}_init = tensor.empty({dynamic}) : {tensor.type}"

    def _operations(self, steps):
        values = {tensor.name: tensor.operand for tensor in self.inputs}
        for number, step in enumerate(steps):
            result = "%r" if len(steps) == 1 else f"%r{number}"
            yield _operation(step, values, result)
            several = len(step.results) > 1
            for n, tensor in enumerate(step.results):
                values[tensor.name] = f"{result}#{n}" if several else result, tensor.type
        returned = ", ".join(values[tensor.name][0] for tensor in self.results)
        yield f"return {returned} : {', '.join(t.type for t in self.results)}"

    @functools.cached_property
    def function(self):
        """The native function, compiled at the first call that is not simulated."""
        from ..compiler.jit import compile_cached

        return compile_cached(self._text).function(self.op)

    @functools.cached_property
    def _plan(self):
        """What a call does: size checks, and how to make the results.

        `same` are pairs of places (operand, dim) that must have one size; the
        native function checks static sizes and dtypes itself. A result's dims
        are functions of the shapes.
        """
        first: dict[str, tuple[int, int]] = {}
        same = []
        for position, tensor in enumerate(self.inputs):
            for axis, dim in enumerate(tensor.dims):
                if isinstance(dim, str) and first.setdefault(dim, (position, axis)) != (
                    position,
                    axis,
                ):
                    same.append((first[dim], (position, axis)))
        results = [
            (tensor.dtype, [_measure(dim, first) for dim in tensor.dims]) for tensor in self.results
        ]
        return same, results

    def __call__(self, *tensors, out=None):
        """Runs on contiguous tensors of one device in the order of `inputs`; returns the results.

        `out` are contiguous tensors for them, of the right shapes and dtypes.
        """
        same, plan = self._plan
        shapes = [tensor.shape for tensor in tensors]
        # Memory safety: the kernel trusts that sizes of one name agree.
        for (i, axis), (j, other) in same:
            if shapes[i][axis] != shapes[j][other]:
                self._fail(i, axis, j, other, shapes)
        device = tensors[0].device
        results = out or [
            torch.empty([size(shapes) for size in dims], dtype=dtype, device=device)
            for dtype, dims in plan
        ]
        simulation = active_simulation()
        if device.type != "cpu":
            self._check_devices(tensors)
            cuda.run(self._text, self.op, [*tensors, *results])
        elif simulation is None:
            self.function(*tensors, *results)
        else:
            simulation.run(self, [*tensors, *results])
        return results

    def _check_devices(self, tensors):
        """The native function of the CPU checks its own."""
        for tensor, described in zip(tensors, self.inputs, strict=True):
            if tensor.device != tensors[0].device:
                raise ValueError(
                    f"{self.op}: expected '{described.name}' on {tensors[0].device} as "
                    f"'{self.inputs[0].name}', found {tensor.device}"
                )

    def _fail(self, i, axis, j, other, shapes):
        raise ValueError(
            f"{self.op}: expected dim {other} of '{self.inputs[j].name}' ({shapes[j][other]}) to "
            f"match dim {axis} of '{self.inputs[i].name}' ({shapes[i][axis]})"
        )


def _measure(dim, places):
    """The function that reads a dim's size off the shapes of the inputs."""
    if isinstance(dim, int):
        return lambda shapes: dim
    if isinstance(dim, tuple):
        factors = [_measure(factor, places) for factor in dim]
        return lambda shapes: math.prod(size(shapes) for size in factors)
    position, axis = places[dim]
    return lambda shapes: shapes[position][axis]


def _product(dims, sizes):
    """The SSA value of a product of dims, and the lines that compute it."""
    first, *rest = dims
    value, lines = sizes[first], []
    for dim in rest:
        product, factor = f"{value}_{dim}", sizes.get(dim)
        if factor is None:
            factor = f"{product}_factor"
            lines.append(f"{factor} = arith.constant {dim} : index")
        lines.append(f"{product} = arith.muli {value}, {factor} : index")
        value = product
    return value, lines


def _operation(step, values, result):
    """A step as text; `values` are the (SSA value, type) of names."""
    clauses: dict[str, list[tuple[str, str]]] = {}
    for clause, name in step.operands:
        clauses.setdefault(clause, []).append(values[name])
    written = " ".join(
        f"{name}({', '.join(v for v, _ in group)} : {', '.join(t for _, t in group)})"
        for name, group in clauses.items()
    )
    inits = ", ".join(f"%{t.name}_init" for t in step.results)
    types = ", ".join(t.type for t in step.results)
    attributes = ", ".join(f"{name} = {value}" for name, value in step.attributes)
    target = result if len(step.results) == 1 else f"{result}:{len(step.results)}"
    return (
        f"{target} = moe.{step.op} {written} outs({inits} : {types}) {{{attributes}}} -> {types}"
    )


# For functions that make a Kernel of what it is specialised to: a process that asks for more than
# this of one op forgets the oldest.
kernels = functools.lru_cache(maxsize=512)


def rows(x, kept):
    """A kernel's view of x: contiguous, its leading dims joined in front of the last `kept`."""
    if x.requires_grad:
        x = x.detach()
    if x.dim() != kept + 1:
        leading = x.shape[: x.dim() - kept].numel()
        x = x.reshape(leading, *x.shape[x.dim() - kept :])
    return x.contiguous()


def contiguous(x):
    """A kernel's view of x in its own shape."""
    return (x.detach() if x.requires_grad else x).contiguous()


# ------------------------------------------------------------------ attributes


def f64(value):
    """A float attribute; MLIR's grammar wants a point in the mantissa."""
    mantissa, e, exponent = repr(float(value)).partition("e")
    return f"{mantissa if '.' in mantissa else mantissa + '.0'}{e}{exponent} : f64"


def i64(value):
    return f"{value} : i64"


def boolean(value):
    return "true" if value else "false"


def enum(mnemonic, value):
    return f"#moe.{mnemonic}<{value}>"


def visibility(causal, window=None, exclude_self=False):
    """Which keys a query sees by their positions."""
    parts = ["causal"] if causal else []
    if window is not None:
        parts.append(f"window = {window}")
    if exclude_self:
        parts.append("exclude_self")
    return f"#moe.visibility<{', '.join(parts)}>"
