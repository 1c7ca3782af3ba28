"""Registration of the routing ops with torch as `torch.ops.moe.<name>`."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from .._torch.core import autograd_implementation
from ._autocast import Autocast, without_autocast
from ._plain_calls import PlainCalls, are_plain
from ._transforms import refuse_tangents, register_transforms

_LIBRARY = torch.library.Library("moe", "FRAGMENT")
_DIRECT: dict[Any, Callable] = {}


def direct_call(op: Any) -> Callable | None:
    """The op, past the dispatcher where a call is plain; None where it is none of these."""
    return _DIRECT.get(op)


def define(
    schema, *, kernel, fake, arguments=None, setup_context=None, backward=None, is_gradient=False,
    key="CPU", rows=(), cast=(), widen=(), promote=(), panels=(),
):  # fmt: skip
    """Registers one op: its schema, its kernel for a dispatch key, its shapes, its gradient.

    `arguments` makes the op's arguments of those of the public function, whose
    types it checks; its result depends on nothing but values and types.
    Without `backward` the op has no gradient: its results are marked so,
    instead of torch's default of failing when a backward reaches them. An op
    that `is_gradient` itself refuses to be differentiated.

    What torch may do around an op follows from lists of its arguments:

    `rows`: those with any number of leading dims, if each row of the results
    depends on the same row of these. torch.vmap adds one more leading dim;
    other batched calls run one by one.
    `cast`: those that torch.autocast casts to its dtype, as torch.linear's are.
    `widen`: those that it casts to float32, as softmax's are.
    `promote`: those that it casts to the widest dtype among them, as torch.cat's are.
    `panels`: those of `cast` that may be weights in panels, which depend on the dtype.
    """
    name = schema.partition("(")[0]
    if is_gradient:
        setup_context, backward = _keep_nothing, _refuse(name)
    if backward is None:
        setup_context, backward = _no_gradient, _unreachable
    backward = without_autocast(backward)
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    op = getattr(torch.ops.moe, name).default
    plain = _PlainFirst(kernel)
    # CUDA is the same code: what differs is where its kernels run.
    for each in ("CPU", "CUDA") if key == "CPU" else (key,):
        _LIBRARY.impl(name, plain.around(refuse_tangents(name, kernel)), each)
    _DIRECT[op] = plain.around(op)
    fake = refuse_tangents(name, _on_one_device(op, fake))
    torch.library.register_fake(f"moe::{name}", fake, lib=_LIBRARY)
    _register_autograd(op, backward, setup_context, plain)
    autocast = Autocast(op, cast, widen, promote, panels)
    autocast.register(_LIBRARY)
    register_transforms(_LIBRARY, op, setup_context, backward, autocast.around, rows)
    return _callable(op, kernel, arguments or _unchanged)


class _PlainFirst:
    """Runs plain calls of an op at once wherever the dispatcher enters Python.

    What a compiler writes calls the op, not the public function: without it each
    of the dispatcher's layers would be Python, and the kernel's checks behind them.
    """

    def __init__(self, kernel):
        self._plain = PlainCalls(kernel)

    def around(self, otherwise, leading=0):
        """`otherwise`, for what is not plain; its first `leading` arguments are not the op's."""
        plain = self._plain

        def run(*args):
            own = args[leading:]
            results = plain.replay(*own)
            if results is None:
                return otherwise(*args)
            return plain.run(own) if results is False else results

        return run


def _register_autograd(op, backward, setup_context, plain):
    """As torch.library.register_autograd does, with plain calls in front."""
    generated = autograd_implementation(op, backward, setup_context)
    _LIBRARY.impl(op._opname, plain.around(generated, leading=1), "Autograd", with_keyset=True)


def takes(operands: Any, options: type) -> Callable:
    """Lets `function(*others, operands, options)` be given an op's arguments, which torch lists.

    Args:
        operands: a NamedTuple whose fields are tensors of the op's schema, in its order.
        options: a frozen dataclass whose fields are what comes after them.
    """
    num_options = len(dataclasses.fields(options))
    num_given = num_options + len(operands._fields)

    def decorate(function):
        @functools.wraps(function)
        def of_list(*arguments):
            return function(*arguments[:-num_given], operands(*arguments[-num_given:-num_options]),
                            options(*arguments[-num_options:]))

        return of_list

    return decorate


def _on_one_device(op, fake):
    """Shapes alone, which torch also asks for where one real tensor meets one on "meta".

    Its own ops refuse that; the results would be memory that nobody has written.
    """
    names = [argument.name for argument in op._schema.arguments]

    @functools.wraps(fake)
    def checked(*args):
        tensors = [(n, x) for n, x in zip(names, args) if isinstance(x, torch.Tensor)]
        (first, reference), *rest = tensors
        for name, tensor in rest:
            if tensor.device != reference.device:
                raise ValueError(
                    f"{op._opname}: expected '{name}' on {reference.device} as '{first}', found "
                    f"{tensor.device}"
                )
        return fake(*args)

    return checked


def _callable(op, kernel, arguments):
    """The op for the public functions: through torch's dispatcher, or straight to the kernel.

    Why it is needed: the dispatcher's layers for ops from Python cost more
    than selecting experts for a thousand tokens. Why it is safe: on plain CPU
    tensors that nothing observes, all that these layers do is to call this
    kernel.
    """
    plain = PlainCalls(lambda *args: kernel(*arguments(*args)))

    def call(*args):
        # Dynamo takes this for a constant, and never sees what follows.
        if torch.compiler.is_dynamo_compiling():
            return op(*arguments(*args))
        results = plain.replay(*args)
        if results is False:
            return plain.run(args)
        if results is not None:
            return results
        args = arguments(*args)
        if are_plain(args):
            return kernel(*args)
        return op(*args)

    return call


def _unchanged(*args):
    return args


def _keep_nothing(ctx, inputs, output):
    pass


def _refuse(name):
    def backward(ctx, *grads):
        raise NotImplementedError(
            f"{name}: expected gradients of first order, found a backward through a backward; "
            "use moe_mlir.reference for higher orders"
        )

    return backward


def _no_gradient(ctx, inputs, output):
    outputs = output if isinstance(output, tuple) else (output,)
    ctx.mark_non_differentiable(*outputs)


def _unreachable(ctx, *grads):
    return (None,) * len(ctx.needs_input_grad)
