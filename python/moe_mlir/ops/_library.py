"""Registration of the routing ops with torch as `torch.ops.moe.<name>`."""

import torch

from ._plain_calls import PlainCalls

_LIBRARY = torch.library.Library("moe", "FRAGMENT")


def define(
    schema, *, kernel, fake, arguments=None, setup_context=None, backward=None, is_gradient=False,
    key="CPU",
):  # fmt: skip
    """Registers one op: its schema, its kernel for a dispatch key, its shapes, its gradient.

    `arguments` makes the op's arguments of those of the public function, whose
    types it checks; its result depends on nothing but values and types.
    Without `backward` the op has no gradient: its results are marked so,
    instead of torch's default of failing when a backward reaches them. An op
    that `is_gradient` itself refuses to be differentiated.
    """
    name = schema.partition("(")[0]
    if is_gradient:
        setup_context, backward = _keep_nothing, _refuse(name)
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, kernel, key)
    if key == "CPU":
        # The same code: what differs is where its kernels run.
        _LIBRARY.impl(name, kernel, "CUDA")
    torch.library.register_fake(f"moe::{name}", fake, lib=_LIBRARY)
    if backward is None:
        setup_context, backward = _no_gradient, None
    torch.library.register_autograd(
        f"moe::{name}",
        backward or _unreachable,
        setup_context=setup_context,
        lib=_LIBRARY,
    )
    return _callable(getattr(torch.ops.moe, name).default, kernel, arguments or _unchanged)


def _callable(op, kernel, arguments):
    """The op for the public functions: through torch's dispatcher, or straight to the kernel.

    Why it is needed: the dispatcher's layers for ops from Python cost more
    than selecting experts for a thousand tokens. Why it is safe: on plain CPU
    tensors without gradients, tracing, modes or transforms, all that these
    layers do is to call this kernel.
    """
    plain = PlainCalls(lambda *args: kernel(*arguments(*args)))

    def call(*args):
        if not torch.compiler.is_compiling():
            results = plain.replay(*args)
            if results is False:
                return plain.run(args)
            if results is not None:
                return results
        args = arguments(*args)
        if not torch.compiler.is_compiling() and _are_plain(args):
            return kernel(*args)
        return op(*args)

    return call


def _unchanged(*args):
    return args


def _are_plain(args):
    if (
        torch._C._len_torch_dispatch_stack()
        or torch._ops._len_torch_dispatch_stack_pre_dispatch()
        or torch._C._functorch.peek_interpreter_stack() is not None
    ):
        return False
    grad = torch.is_grad_enabled()
    for arg in args:
        if type(arg) in _PLAIN_TENSORS:
            if not arg.is_cpu or (grad and arg.requires_grad):
                return False
        elif isinstance(arg, torch.Tensor):
            return False
    return True


_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


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
