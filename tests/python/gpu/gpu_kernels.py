"""Compiles MLIR text to kernels and runs them in the simulator."""

from dataclasses import dataclass

import torch


@dataclass
class Kernel:
    """The function of a module that compiles to one kernel."""

    function: object

    def run(self, args, shapes, **options):
        """Launches on inputs and result buffers; None where there is nothing to do."""
        del shapes
        reports = self.function(*args, **options)
        return reports[0] if reports else None


def compile_function(text: str, chip: str = "sm_90"):
    """The only function of `text`; a call launches its kernels and returns their reports."""
    from moe_mlir.sim.simulation import device_functions

    (function,) = device_functions(text, chip).values()
    return function


def compile_kernels(text: str, chip: str = "sm_90") -> list[Kernel]:
    """The only function of `text`, which must be one kernel."""
    function = compile_function(text, chip)
    assert len(function.plan.kernel_names) == 1, function.plan.kernel_names
    return [Kernel(function)]


MLIR_TYPES = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}


def shaped(container: str, shape, dtype: torch.dtype) -> str:
    """`tensor<?x64xf32>` for ("tensor", (None, 64), torch.float32)."""
    dims = "".join(f"{'?' if size is None else size}x" for size in shape)
    return f"{container}<{dims}{MLIR_TYPES[dtype]}>"
