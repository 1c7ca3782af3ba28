"""One routing op as a compiled kernel: its MLIR text, its outputs, its call.

A `Kernel` describes one specialisation of an op: element types, static sizes
(experts, k, widths) as numbers, token counts as names. From that description
come the text of a function with just that op, the check that memory matches
it, and the allocation of the results.
"""

import functools
from dataclasses import dataclass, field

import torch

from .. import gpu
from ..sim.simulation import active_simulation

ELEMENT_TYPES = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}


@dataclass(frozen=True)
class Tensor:
    """An operand or result: dims are sizes (int) or names of dynamic sizes (str).

    `clause` is the keyword under which the op's assembly lists the operand;
    a rank of 0 is passed as a tensor and read as a scalar by the op.
    """

    name: str
    dims: tuple
    dtype: torch.dtype
    clause: str = "ins"

    @property
    def type(self):
        element = ELEMENT_TYPES[self.dtype]
        dims = "".join("?x" if isinstance(dim, str) else f"{dim}x" for dim in self.dims)
        return f"tensor<{dims}{element}>"

    @property
    def operand(self):
        """The SSA value and the type by which the op reads this operand."""
        if self.dims:
            return f"%{self.name}", self.type
        return f"%{self.name}_value", ELEMENT_TYPES[self.dtype]


@dataclass(frozen=True)
class Kernel:
    op: str
    inputs: tuple
    results: tuple
    attributes: tuple = field(default=())

    def text(self):
        """The module: one public function named after the op, holding only the op."""
        return self._text

    @functools.cached_property
    def _text(self):
        arguments = ", ".join(f"%{t.name}: {t.type}" for t in self.inputs)
        result_types = ", ".join(t.type for t in self.results)
        body = [*self._scalars(), *self._empty_results(), *self._operation()]
        lines = "\n".join(f"  {line}" for line in body)
        return f"func.func @{self.op}({arguments}) -> ({result_types}) {{\n{lines}\n}}\n"

    def _scalars(self):
        for tensor in self.inputs:
            if not tensor.dims:
                yield f"%{tensor.name}_value = tensor.extract %{tensor.name}[] : {tensor.type}"

    def _empty_results(self):
        sizes = {}
        for tensor in self.inputs:
            for position, dim in enumerate(tensor.dims):
                if isinstance(dim, str) and dim not in sizes:
                    sizes[dim] = f"%{dim}_size"
                    yield f"%{dim}_axis = arith.constant {position} : index"
                    yield f"%{dim}_size = tensor.dim %{tensor.name}, %{dim}_axis : {tensor.type}"
        for tensor in self.results:
            dynamic = ", ".join(sizes[dim] for dim in tensor.dims if isinstance(dim, str))
            yield f"%{tensor.name}_init = tensor.empty({dynamic}) : {tensor.type}"

    def _operation(self):
        clauses: dict[str, list[tuple[str, str]]] = {}
        for tensor in self.inputs:
            clauses.setdefault(tensor.clause, []).append(tensor.operand)
        written = " ".join(
            f"{name}({', '.join(v for v, _ in group)} : {', '.join(t for _, t in group)})"
            for name, group in clauses.items()
        )
        inits = ", ".join(f"%{t.name}_init" for t in self.results)
        types = ", ".join(t.type for t in self.results)
        attributes = ", ".join(f"{name} = {value}" for name, value in self.attributes)
        values = ", ".join(f"%r#{i}" for i in range(len(self.results)))
        if len(self.results) == 1:
            values = "%r"
        target = "%r" if len(self.results) == 1 else f"%r:{len(self.results)}"
        yield (
            f"{target} = moe.{self.op} {written} outs({inits} : {types}) "
            f"{{{attributes}}} -> {types}"
        )
        yield f"return {values} : {types}"

    @functools.cached_property
    def function(self):
        """The native function, compiled at the first call that is not simulated."""
        from ..jit import compile_cached

        return compile_cached(self._text).function(self.op)

    @functools.cached_property
    def _plan(self):
        """What a call does: size checks, and how to make the results.

        `same` are pairs of places (operand, dim) that must have one size; the
        native function checks static sizes and dtypes itself. A result's dims
        are numbers or the places that they come from.
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
            (tensor.dtype, [first.get(dim, dim) for dim in tensor.dims]) for tensor in self.results
        ]
        return same, results

    def __call__(self, *tensors):
        """Runs on contiguous tensors of one device in the order of `inputs`; returns the results."""
        same, plan = self._plan
        shapes = [tensor.shape for tensor in tensors]
        # Memory safety: the kernel trusts that sizes of one name agree.
        for (i, axis), (j, other) in same:
            if shapes[i][axis] != shapes[j][other]:
                self._fail(i, axis, j, other, shapes)
        device = tensors[0].device
        results = [
            torch.empty([d if type(d) is int else shapes[d[0]][d[1]] for d in dims], dtype=dtype,
                        device=device)
            for dtype, dims in plan
        ]
        simulation = active_simulation()
        if device.type != "cpu":
            self._check_devices(tensors)
            gpu.run(self._text, self.op, [*tensors, *results])
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
