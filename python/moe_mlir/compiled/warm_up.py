"""moe_mlir.warm_up: compile the kernels of a function before its first call."""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from .._torch.core import pytree
from ..sim.simulation import intercept


def warm_up(
    function: Callable[..., Any], *calls: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None,
    backward: bool = True,
) -> int:
    """Compiles the CPU kernels that calls of a function, op or module run, several at a time.

    Kernels are specialised to dtypes, numbers of experts, widths and options, but not to
    numbers of tokens: an example with one token serves all. Nothing is computed on the CPU:
    kernels of the ops are compiled and not run, and buffers of modules and the state of torch's
    random numbers stay as they are. What torch computes itself, and what runs on a GPU, runs. With
    the disk cache, later processes load what was compiled.

    A module compiled by `moe_mlir.compile` has its kernels already.

    Args:
        function: an op, a module, or a function that calls them.
        calls: the arguments of each call, a tuple of example tensors and options.
        kwargs: keywords of every call.
        backward: whether kernels of gradients are compiled, of what requires a gradient.

    Returns:
        the number of kernels that the calls run.

    Raises:
        TypeError: `function` cannot be called, or a call is no tuple.

    >>> layer = moe_mlir.nn.MoELayer(moe_mlir.nn.SMoE(16, 8, 2), d_hidden=32)
    >>> moe_mlir.warm_up(layer, (torch.empty(1, 16),)) > 2
    True
    >>> moe_mlir.warm_up(moe_mlir.topk_renorm, (torch.empty(1, 64), 8), (torch.empty(1, 64), 4))
    2
    """
    if not callable(function):
        raise TypeError("warm_up: expected 'function' to be a function or a module, found "
                        f"{type(function).__name__}")
    for call in calls:
        if not isinstance(call, tuple):
            raise TypeError("warm_up: expected each call as a tuple of arguments, found "
                            f"{type(call).__name__}; write (x,) for one argument")
    recorder = _Recorder()
    with torch.random.fork_rng(devices=[]), intercept(recorder):
        for call in calls:
            _run(function, call, dict(kwargs or {}), backward)
    kernels = list(recorder.kernels.values())
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda kernel: kernel.function, kernels))
    return len(kernels)


class _Recorder:
    """Notes kernels; their results are zeros, which are indices and offsets as well."""

    def __init__(self) -> None:
        self.kernels: dict[str, Any] = {}

    def run(self, kernel: Any, tensors: Any) -> None:
        self.kernels.setdefault(kernel.text(), kernel)
        for result in tensors[len(kernel.inputs):]:
            result.zero_()


def _run(function, args, kwargs, backward):
    if isinstance(function, torch.nn.Module):
        # A forward in training counts, and what it counts is not of real tokens.
        buffers = {name: buffer.clone() for name, buffer in function.named_buffers()
                   if not buffer.dtype == torch.uint8}
        results = torch.func.functional_call(function, buffers, args, kwargs)
        parameters = list(function.parameters())
    else:
        results, parameters = function(*args, **kwargs), []
    if not backward:
        return
    moving = [x for x in pytree.tree_leaves(results)
              if isinstance(x, torch.Tensor) and x.requires_grad]
    inputs = [x for x in (*pytree.tree_leaves((args, kwargs)), *parameters)
              if isinstance(x, torch.Tensor) and x.requires_grad]
    if moving and inputs:
        torch.autograd.grad(moving, inputs, [torch.zeros_like(x) for x in moving],
                            allow_unused=True)


__all__ = ["warm_up"]
