"""Registration of the routing ops with torch as `torch.ops.moe.<name>`."""

import torch

_LIBRARY = torch.library.Library("moe", "FRAGMENT")


def define(schema, *, kernel, fake, setup_context=None, backward=None, key="CPU"):
    """Registers one op: its schema, its kernel for a dispatch key, its shapes, its gradient.

    Without `backward` the op has no gradient: its results are marked so,
    instead of torch's default of failing when a backward reaches them.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, kernel, key)
    torch.library.register_fake(f"moe::{name}", fake, lib=_LIBRARY)
    if backward is None:
        setup_context, backward = _no_gradient, None
    torch.library.register_autograd(
        f"moe::{name}",
        backward or _unreachable,
        setup_context=setup_context,
        lib=_LIBRARY,
    )
    return getattr(torch.ops.moe, name).default


def _no_gradient(ctx, inputs, output):
    outputs = output if isinstance(output, tuple) else (output,)
    ctx.mark_non_differentiable(*outputs)


def _unreachable(ctx, *grads):
    return (None,) * len(ctx.needs_input_grad)
