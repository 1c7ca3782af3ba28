"""The rival that torch brings: the same eager model, compiled by Inductor."""

from collections.abc import Callable

import torch

from moe_mlir._support.progress import Clock


def compile_inductor(
    model: torch.nn.Module, inputs: torch.Tensor, label: str
) -> tuple[dict[str, Callable[..., torch.Tensor]], str]:
    """The model compiled for these inputs as `inductor`; or nothing, and why there is none.

    Takes 10 s a model on one idle core. It has no time limit: an exception out of a timer that
    is raised inside torch's C++ code can end the process.
    """
    compiled = torch.compile(model, dynamic=False)
    try:
        with Clock(f"compiling {label} with Inductor"), torch.inference_mode():
            compiled(inputs)
    except Exception as error:  # whatever its compilers raise: no C++ compiler is the usual one
        return {}, f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return {"inductor": compiled}, ""
