"""One function of an artifact as a callable."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..gpu.sizes import evaluate_expression, expression_sources
from .arguments import (
    DTYPES,
    contiguous,
    require_kind,
    require_no_alias,
    require_one_device,
    require_writable,
)

if TYPE_CHECKING:
    import numpy
    import torch

    from ..gpu.launch import LaunchPlan


class ArtifactFunction:
    """A function of an artifact: tensors in, new tensors out."""

    def __init__(self, function: Any, description: Mapping[str, Any]):
        self.name = description["name"]
        self._function = function
        self.arguments = description["arguments"]
        self._num_arguments = len(self.arguments)
        self.results = description["results"]
        self._relations = description["relations"]
        self._updated = [i for i, a in enumerate(self.arguments) if a.get("updated")]

    def __call__(self, *arguments: Any, out: Any = None) -> Any:
        """Runs on tensors of torch or on numpy arrays.

        An artifact for a chip takes CUDA tensors, and CPU tensors inside of
        `moe_mlir.simulate`.

        Args:
            out: the result buffers, for results whose size depends on data, or
                to avoid an allocation.

        Returns:
            The result, or a tuple of results; torch tensors if an argument is one.

        Raises:
            TypeError: an argument or a result buffer is no tensor of the right dtype.
            ValueError: it has another shape than the function takes, or than follows from the
                sizes of other arguments; or it cannot be written where it has to be, or a result
                buffer shares memory with an argument or another one.
        """
        if len(arguments) != self._num_arguments:
            raise TypeError(f"expected {self._num_arguments} arguments for '{self.name}', found "
                            f"{len(arguments)}")
        for i, (value, expected) in enumerate(zip(arguments, self.arguments)):
            if "shape" in expected:
                require_kind(f"argument {i} of '{self.name}'", value, expected)
        self.require_relations(arguments)
        sizes = self._sizes(arguments)
        if out is None:
            out = [self.allocate(i, self._known(i, shape), arguments)
                   for i, shape in enumerate(sizes)]
        else:
            out = list(out) if isinstance(out, (tuple, list)) else [out]
            self._require_places(out, sizes)
            require_one_device(self.name, (*arguments, *out))
            require_no_alias(self.name, arguments, out)
        for i in self._updated:
            require_writable(f"argument {i} of '{self.name}', which it updates in place,",
                             arguments[i])
        self.run(arguments, out)
        return out[0] if len(out) == 1 else tuple(out)

    def run(self, arguments: Sequence[Any], out: Sequence[Any]) -> None:
        """A call whose sizes and types have been checked."""
        self._function(*map(contiguous, arguments), *out)

    def require_relations(self, arguments: Sequence[Any]) -> None:
        """Raises ValueError where sizes of arguments, whose types are right, do not agree."""
        for found, relation, expected in self._relations:
            a, b = (evaluate_expression(size, arguments) for size in (found, expected))
            if a is None or b is None or (a == b if relation == "==" else a <= b):
                continue
            sources = " and ".join(expression_sources(found, self._num_arguments))
            computed = "" if found[0] == "arg" else "what is computed from "
            reason = " and ".join(expression_sources(expected, self._num_arguments))
            raise ValueError(f"'{self.name}': expected {computed}{sources} to be "
                             f"{'' if relation == '==' else 'at most '}{b}"
                             f"{reason and ', by ' + reason}, found {a}")

    def _require_places(self, out, sizes) -> None:
        if len(out) != len(self.results):
            raise ValueError(f"expected {len(self.results)} buffers as out= for '{self.name}', "
                             f"found {len(out)}")
        for i, (value, shape) in enumerate(zip(out, sizes)):
            self.require_place(i, value, shape)

    def require_place(self, index: int, value: Any, sizes: Sequence[int | None]) -> None:
        """Raises where result `index` of these sizes cannot be written into `value`."""
        what = f"result {index} of '{self.name}'"
        dtype = self.results[index]["dtype"]
        require_kind(what, value, {"dtype": dtype, "shape": [-1 if s is None else s for s in sizes]})
        require_writable(what, value)

    def __repr__(self):
        return f"<compiled {self._function.signature}>"

    def allocate(
        self,
        index: int,
        sizes: Sequence[int],
        arguments: Sequence[Any],
    ) -> torch.Tensor | numpy.ndarray:
        """A buffer for result `index`, of the kind that the arguments are."""
        name = DTYPES[self.results[index]["dtype"]]
        torch: Any = sys.modules.get("torch")
        device = next((a.device for a in arguments if torch and isinstance(a, torch.Tensor)), None)
        if device is not None:
            return torch.empty(sizes, dtype=getattr(torch, name), device=device)
        import numpy

        if name == "bfloat16":
            raise ValueError(f"expected torch tensors for '{self.name}', found numpy arrays, "
                             "which have no bfloat16")
        return numpy.empty(sizes, dtype=name)

    def _sizes(self, arguments) -> list[list[int | None]]:
        """The shapes of the results; None for a size that depends on data."""
        return [[evaluate_expression(size, arguments) for size in result.get("sizes", ())]
                for result in self.results]

    def _known(self, index, sizes):
        if None in sizes:
            raise ValueError(
                f"expected out= for '{self.name}': the size of result {index} depends on data"
            )
        return sizes


class KernelFunction:
    """The kernels of a function, on the device that the buffers are on."""

    def __init__(self, ptx: str, plan: LaunchPlan, chip: str):
        self.signature = f"{plan.name} for {chip}"
        self._ptx = ptx
        self._plan = plan
        self._chip = chip

    def __call__(self, *buffers: Any) -> None:
        from ..gpu import cuda
        from ..sim.simulation import active_simulation, device_function

        torch = sys.modules.get("torch")
        device = next((b.device for b in buffers if torch and isinstance(b, torch.Tensor)), None)
        require_one_device(self._plan.name, buffers)
        if device is not None and device.type == "cuda":
            cuda.run_kernels(self._ptx, self._plan, buffers)
        elif (simulation := active_simulation()) is not None:
            simulation.run_function(device_function(self._ptx, self._plan), buffers)
        else:
            raise ValueError(
                f"expected CUDA tensors for '{self._plan.name}', which was compiled for "
                f"{self._chip}, found none; `with moe_mlir.simulate():` runs it on CPU tensors"
            )
