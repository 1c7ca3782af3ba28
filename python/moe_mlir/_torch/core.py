"""Of torch's core: what is loaded with `import torch` anyway."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

ScriptFunction = torch._C.ScriptFunction
# What torch.compile writes into the module that it wraps, and no forward reads; where Lightning is
# imported, its options, too.
MARKS_OF_COMPILE = frozenset({"_is_torch_compile", "_compile_kwargs"})

# Tells a trace what holds of a size; outside of one it raises where it does not.
check_size = torch._check

# ---- modes ----------------------------------------------------------------------

DisableAutocast = torch._C._DisableAutocast
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
enter_autocast = torch.amp.autocast_mode._enter_autocast
exit_autocast = torch.amp.autocast_mode._exit_autocast
is_any_autocast_enabled = torch._C._is_any_autocast_enabled
# The innermost transform of torch.func, such as vmap or grad; None outside of all.
innermost_transform = torch._C._functorch.peek_interpreter_stack
is_functorch_wrapped_tensor = torch._C._functorch.is_functorch_wrapped_tensor
set_grad_enabled = torch._C._set_grad_enabled


def modes_that_see_ops(further: Callable[[], Any]) -> tuple[Callable[[], Any], ...]:
    """Functions of which one gives a true value where something wants to see a call of an op.

    `further` counts where it gives anything but None.
    """
    def is_seen_from_python():
        # By one call, which costs half as much as three: it is on the way of every op.
        return (forward_ad._current_level >= 0 or torch.compiler._is_compiling_flag
                or further() is not None)

    return (
        torch._C._len_torch_dispatch_stack,
        torch._C._len_torch_function_stack,
        # Modes in front of the dispatcher switch its key on.
        functools.partial(torch._C._dispatch_tls_is_dispatch_key_included,
                          torch._C.DispatchKey.PreDispatch),
        innermost_transform,
        torch._C._is_tracing,
        is_any_autocast_enabled,
        torch.autograd._profiler_enabled,
        is_seen_from_python,
    )


def autocast_in_use() -> tuple[tuple[str, torch.dtype], ...]:
    """The kinds of devices for which autocast is enabled, with its dtypes."""
    if not is_any_autocast_enabled():
        return ()
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")
                 if torch.is_autocast_enabled(kind))


@contextlib.contextmanager
def autocast_of(kinds: tuple[tuple[str, torch.dtype], ...], enabled: bool = True) -> Iterator[None]:
    """Autocast as `autocast_in_use` says, or none of it."""
    with contextlib.ExitStack() as stack:
        for kind, dtype in kinds:
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
        yield


def is_transformed() -> bool:
    """Whether torch.func, forward-mode gradients or torch.jit.trace look at what is called."""
    return (innermost_transform() is not None or forward_ad._current_level >= 0
            or torch._C._is_tracing())


def is_in_backward() -> bool:
    """Whether autograd runs a backward in this thread."""
    return torch._C._current_graph_task_id() != -1


def active_ddp_module() -> torch.nn.Module | None:
    """The DistributedDataParallel whose forward is running."""
    return torch.nn.parallel.DistributedDataParallel._get_active_ddp_module()


def modes_in_use() -> bool:
    """Whether something in this thread sees calls of torch before torch does."""
    return bool(torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack())


def has_global_hooks() -> bool:
    """Whether something sees the calls of all modules."""
    return torch.nn.modules.module._has_any_global_hook()


def is_namespace_of_ops(value: object) -> bool:
    """Whether it is one of those in `torch.ops`."""
    return isinstance(value, torch._ops._OpNamespace)


def is_plain_class(kind: type[torch.Tensor]) -> bool:
    """Whether tensors of this class are memory, whatever their functions are."""
    return kind.__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl


def settings_of_process() -> list[Any]:
    """What of torch may lead a model's code, or a decomposition, one way or another."""
    autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in ("cpu", "cuda")]
    backends = torch.backends
    return [torch.get_default_dtype(), str(torch.get_default_device()), autocast,
            torch.is_inference_mode_enabled(), torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(), backends.mkldnn.enabled,
            backends.cuda.flash_sdp_enabled(), backends.cuda.mem_efficient_sdp_enabled(),
            backends.cuda.math_sdp_enabled(), backends.cuda.cudnn_sdp_enabled(),
            backends.cudnn.enabled, torch.cuda.is_available()]


def size_oblivious_export() -> Any:
    """A context in which torch.export takes open sizes for larger than 1 without asking."""
    return torch.fx.experimental._config.patch(backed_size_oblivious=True)


# ---- ops and memory --------------------------------------------------------------

grouped_mm = torch._grouped_mm
is_avx512_supported = torch.cpu._is_avx512_supported


def autograd_implementation(op: Any, backward: Callable, setup_context: Callable | None) -> Callable:
    """What torch.library.register_autograd registers."""
    info = torch._library.autograd.Info(backward, setup_context)
    return torch._library.autograd.make_autograd_impl(op, info)


def is_composite(op: OpOverload) -> bool:
    """Whether an op is made of others, for autograd as well."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


def storage_users(storage: torch.UntypedStorage) -> int:
    """How many tensors and objects of Python hold a storage."""
    return torch._C._storage_Use_Count(storage._cdata)


__all__ = [
    "MARKS_OF_COMPILE", "DataDependentOutputException", "DisableAutocast",
    "DisableTorchFunctionSubclass", "DynamicOutputShapeException", "FakeTensor",
    "FakeTensorMode", "HigherOrderOperator",
    "OpOverload", "OpOverloadPacket", "ScriptFunction", "TorchDispatchMode",
    "UnsupportedOperatorException", "active_ddp_module",
    "autocast_in_use", "autocast_of", "autograd_implementation", "disable_current_modes", "enter_autocast", "exit_autocast", "grouped_mm",
    "innermost_transform", "is_avx512_supported",
    "is_any_autocast_enabled", "is_composite", "is_functorch_wrapped_tensor", "is_in_backward",
    "is_traceable_wrapper_subclass", "is_transformed", "modes_that_see_ops", "pytree",
    "set_grad_enabled", "size_oblivious_export", "storage_users",
]  # fmt: skip
