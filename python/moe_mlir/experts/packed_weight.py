"""Weights in panels that remain the model's weights for all code that knows nothing of panels.

A `PackedWeight` is the very Parameter that the layer had, so that optimizers and other modules
that hold it keep it. Its memory holds panels (`ops/_panels.py`), its shape is theirs. Kernels
read `panels_of(weight)`. Every other function of torch gets the weight as it was before,
`[.., out, in]`, for the time of the call, and what it writes there goes back into the panels.
Views that outlive the call, and the values of `state_dict()`, are `LiveCopy`. Weights with a
`Loan` have gradients: functions that may ask for one get the weight itself, unpacked for good.
"""

from __future__ import annotations

import copy
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from .._torch.core import (
    DisableTorchFunctionSubclass,
    OpOverload,
    OpOverloadPacket,
    pytree,
    storage_users,
)
from ..ops._check import ACTIVATIONS
from ..ops._panels import pack_weight, steps_of, unpack_weight, with_panel_pairing
from .loan import Loan

# References to a storage of one tensor: the tensor's, and that of the object to count them.
_OF_ONE_TENSOR = 2


class Form(NamedTuple):
    """A weight as it was before it was packed."""

    shape: tuple[int, ...]
    transposed: bool
    halves: bool
    required_grad: bool
    steps: int      # of `in` side by side, as its dtype had them

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        weight = weight.mT if self.transposed else weight
        # A matrix alone is that of one expert.
        return pack_weight(weight.view(-1, *weight.shape[-2:]), halves=self.halves)

    def unpack(self, panels: torch.Tensor) -> torch.Tensor:
        *_, out, width = self.shape
        if self.transposed:
            out, width = width, out
        # A cast leaves the order as it is.
        weight = unpack_weight(with_panel_pairing(panels, self.steps), out, width)
        return (weight.mT.contiguous() if self.transposed else weight).view(self.shape)


class Panels(torch.Tensor):
    """Memory in panels, which functions of torch see as the weight; also what `.data` gives."""

    form: Form

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return _call(func, args, kwargs)

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            memo[id(self)] = _rebuild(panels_of(self).detach().clone(), self.form,
                                      self.requires_grad, copy.deepcopy(_loan_of(self), memo))
        return memo[id(self)]

    def __reduce_ex__(self, protocol):
        return _rebuild, (panels_of(self).detach(), self.form, self.requires_grad, _loan_of(self))


class PackedWeight(Panels, torch.nn.Parameter):
    """A Parameter in panels; `panels` is what holds them, also where a swap was interrupted."""

    panels: torch.Tensor
    # What it is given back by; None: whoever packed it unpacks it.
    loan: Loan | None = None


def panels_of(weight: torch.Tensor) -> torch.Tensor:
    """What kernels read: the panels of a packed weight, any other tensor itself."""
    # Traced code knows the parameter.
    if torch.compiler.is_dynamo_compiling() or not isinstance(weight, Panels):
        return weight
    if type(weight) is PackedWeight:
        return weight.panels
    with DisableTorchFunctionSubclass():
        return weight.as_subclass(torch.Tensor)


def operand_of(weight: torch.Tensor) -> torch.Tensor:
    """What the forward of a layer multiplies by; a gradient may be asked of it, not of panels."""
    if isinstance(weight, Panels) and torch.is_grad_enabled() and weight.requires_grad:
        give_back_to_train(weight)
    return panels_of(weight)


# Traced code has the shapes of one of both: torch.compile starts anew behind it.
@torch.compiler.disable
def give_back_to_train(weight: Panels) -> None:
    """Has the loan of a weight give it back, and all others that have gradients, too."""
    loan = _loan_of(weight)
    if loan is not None:
        loan.give_back_to_train()


def pack_parameter(
    weight: torch.nn.Parameter, *, transposed: bool, halves: bool, loan: Loan | None = None,
) -> None:
    """Packs a Parameter in place. An exception, Ctrl-C too, leaves it packed or as it was.

    With a loan it still requires the gradient that it does.
    """
    form = Form(tuple(weight.shape), transposed, halves, weight.requires_grad,
                steps_of(weight.dtype))
    try:
        panels = form.pack(weight.detach())
    except BaseException as error:
        # Whoever keeps the error would keep views of the weight.
        traceback.clear_frames(error.__traceback__)
        raise
    weight.form, weight.panels = form, panels
    weight.__class__ = PackedWeight  # from here on `panels` counts
    with DisableTorchFunctionSubclass():
        if loan is None:
            weight.requires_grad_(False)
        else:
            weight.loan = loan
            loan.add(weight)
            panels.requires_grad_(weight.requires_grad)
        weight.data = panels.detach()
        if not weight.is_inference():
            # A backward that still needs the weight as it was says so.
            torch.autograd.graph.increment_version(weight)


def unpack_parameter(weight: Panels) -> None:
    """Undoes `pack_parameter`."""
    plain = weight.form.unpack(panels_of(weight).detach())
    with DisableTorchFunctionSubclass():
        weight.data = plain
        if _loan_of(weight) is None:
            weight.requires_grad_(weight.form.required_grad)
    weight.__class__ = torch.nn.Parameter
    for name in ("panels", "loan"):
        weight.__dict__.pop(name, None)


def is_shared_memory(weight: torch.Tensor) -> bool:
    """Whether other tensors have the memory of this one."""
    storage = weight.untyped_storage()
    return storage_users(storage) > _OF_ONE_TENSOR


def packed_state(weight: Panels, value: torch.Tensor) -> torch.nn.Parameter:
    """A value of a state dict as what `load_state_dict` copies, or assigns, to a packed weight."""
    panels = weight.form.pack(_plain(value).to(weight.dtype))
    return _rebuild(panels, weight.form._replace(steps=steps_of(weight.dtype)),
                    weight.requires_grad, _loan_of(weight))


def _rebuild(panels, form, requires_grad, loan=None):
    weight = torch.nn.Parameter(panels, requires_grad)
    weight.form, weight.panels = form, panels.requires_grad_(requires_grad)
    weight.__class__ = PackedWeight
    if loan is not None:
        weight.loan = loan
        loan.add(weight)
    return weight


def _loan_of(weight: Panels) -> Loan | None:
    return vars(weight).get("loan")


# ---- calls of torch's functions ----------------------------------------------------

# What tells of a tensor's memory, or moves it as it lies, by name; so does all that starts
# with "is_".
_ON_PANELS = frozenset("""
    shape size dim ndim stride numel nelement element_size itemsize nbytes dtype device layout
    data_ptr untyped_storage storage _typed_storage storage_offset storage_type names has_names
    requires_grad requires_grad= requires_grad_ grad grad= grad_dtype grad_fn _grad _grad_fn _version _base
    _cdata _is_view output_nr name retains_grad retain_grad _backward_hooks _backward_hooks=
    _post_accumulate_grad_hooks register_hook register_post_accumulate_grad_hook get_device
    _has_compatible_shallow_copy_type share_memory_ pin_memory __hash__ dim_order ndimension
    _python_dispatch type to cpu cuda half float double bfloat16 contiguous detach data
""".split())
# Of these the results are panels, too.
_GIVE_PANELS = frozenset(
    "type to cpu cuda half float double bfloat16 contiguous detach data pin_memory".split())


# Whose results have no gradient of a weight.
_WITHOUT_GRADIENT = (_ON_PANELS - _GIVE_PANELS) | frozenset(
    "data detach pin_memory __repr__ __format__ equal allclose numpy tolist __array__".split())

_in_thread = threading.local()


@contextmanager
def hidden_gradients() -> Iterator[None]:
    """Lets packed weights have no gradients in this thread.

    They may have ones from before they were packed, in the shape that they had then. A trace copies
    a parameter with its gradient, which torch refuses to give to panels.
    """
    before = getattr(_in_thread, "hides_gradients", False)
    _in_thread.hides_gradients = True
    try:
        yield
    finally:
        _in_thread.hides_gradients = before


def _call(func, args, kwargs):
    name = _name(func)
    if name == "grad" and getattr(_in_thread, "hides_gradients", False):
        return None
    if name == "data=":
        return _assign(*args)
    if name in ("data", "detach") and type(args[0]) is PackedWeight:
        return _alias(args[0].panels.detach(), args[0].form)
    lent = _lent_to_train(name, args, kwargs)
    if lent is not None:
        give_back_to_train(lent)
        return func(*args, **kwargs)
    if name in _ON_PANELS or name.startswith("is_"):
        with DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        return _after_call_on_panels(name, args[0], result)
    if _is_own_op(func):
        args, kwargs = pytree.tree_map_only(Panels, panels_of, (args, kwargs))
        return func(*args, **kwargs)
    if name == "copy_" and isinstance(args[0], Panels) and isinstance(args[1], Panels) and \
            args[0].form._replace(required_grad=False) == args[1].form._replace(
                required_grad=False) and args[0].dtype == args[1].dtype:
        panels_of(args[0]).copy_(panels_of(args[1]))
        return args[0]
    return _call_on_copies(func, args, kwargs)


def _lent_to_train(name, args, kwargs):
    """A weight with a loan of which a function may have a gradient; None if there is none."""
    if not torch.is_grad_enabled() or name in _WITHOUT_GRADIENT or name.startswith("is_"):
        return None
    return next((x for x in pytree.tree_leaves((args, kwargs))
                 if type(x) is PackedWeight and x.requires_grad and (loan := _loan_of(x))
                 and loan.has(x)), None)


def _name(func) -> str:
    """The name of a function or attribute; that of an assignment ends in "="."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        return getattr(func.__self__, "__name__", "") + ("=" if name == "__set__" else "")
    return name


def _is_own_op(func) -> bool:
    return isinstance(func, (OpOverload, OpOverloadPacket)) and \
        str(func).startswith("moe.")


def _after_call_on_panels(name, weight, result):
    if isinstance(weight, PackedWeight) and name in ("requires_grad=", "requires_grad_"):
        weight.panels.requires_grad_(weight.requires_grad)
    if name in _GIVE_PANELS and type(result) is torch.Tensor:
        return _alias(result, weight.form)
    return result


def _alias(panels, form):
    alias = panels.as_subclass(Panels)
    alias.form = form
    return alias


def _assign(weight, value) -> None:
    """`weight.data = value`."""
    if not isinstance(weight, Panels):
        raise RuntimeError("expected .data of a packed weight, in panels, to be given to no other "
                           "tensor; give it .data.clone()")
    if isinstance(value, Panels) and _is_same_memory(panels_of(weight), panels_of(value)):
        return  # as in `weight.data += x`
    loan = _loan_of(weight)
    if loan is not None and (value.dtype not in ACTIVATIONS or value.device.type != "cpu"):
        value = _plain(value)
        loan.give_back([weight])
        weight.data = value
        return
    if isinstance(value, Panels):
        panels = relaid_for(value)
        form = value.form._replace(steps=steps_of(panels.dtype),
                                   required_grad=weight.form.required_grad)
    elif tuple(value.shape) == weight.form.shape:
        form = weight.form._replace(steps=steps_of(value.dtype))
        panels = form.pack(_plain(value))
    else:
        raise RuntimeError(f"expected a tensor of shape {list(weight.form.shape)} for a packed "
                           f"weight, found {list(value.shape)}; unpack the layer first")
    if isinstance(weight, PackedWeight):
        panels = panels.detach()
        weight.form, weight.panels = form, panels
        panels.requires_grad_(weight.requires_grad)
    weight._moe_times_assigned = _times_assigned(weight) + 1
    with DisableTorchFunctionSubclass():
        weight.form = form
        weight.data = panels.detach()


def _is_same_memory(a, b) -> bool:
    return a.data_ptr() == b.data_ptr() and a.dtype == b.dtype and a.shape == b.shape \
        and a.device == b.device and not a.is_meta


def relaid_for(value: Panels) -> torch.Tensor:
    """Panels after a cast, in the order of their dtype."""
    return with_panel_pairing(panels_of(value).detach(), value.form.steps)


def _call_on_copies(func, args, kwargs):
    """The call on the weights as they were; what it writes goes back into the panels."""
    sources: dict[int, _Source] = {}

    def unpacked(weight):
        return sources.setdefault(id(weight), _Source(weight)).whole
    args, kwargs = pytree.tree_map_only(Panels, unpacked, (args, kwargs))
    result = func(*args, **kwargs)
    if _name(func) == "__iter__":
        result = tuple(result)
    for source in sources.values():
        source.write_back()
        result = source.owner if result is source.whole else source.wrap(result)
    return iter(result) if _name(func) == "__iter__" else result


# ---- copies that stay with the weight ---------------------------------------------


class _Source:
    """A packed weight, and a copy of it as it was before."""

    def __init__(self, owner):
        self.owner = owner
        self.whole = _read(owner)
        self._saw()

    def _is_cut(self):
        """Whether the weight was given another memory, with `.data =` or `.to(dtype)`."""
        return _times_assigned(self.owner) != self._assigned

    def _saw(self):
        self._assigned = _times_assigned(self.owner)
        self._panels = panels_of(self.owner)
        self._panels_version, self._version = self._panels._version, self.whole._version

    @torch.no_grad()
    def refresh(self) -> None:
        """Reads the weight again if it changed."""
        panels = panels_of(self.owner)
        # Of a weight that was unpacked since, `.data` is written without a new version.
        is_seen = isinstance(self.owner, Panels) and panels is self._panels and \
            panels._version == self._panels_version
        if is_seen or self._is_cut():
            return
        self.whole.copy_(_read(self.owner))
        self._saw()

    @torch.no_grad()
    def write_back(self) -> None:
        """Packs the copy again if it was written."""
        if self.whole._version == self._version or self._is_cut():
            return
        if isinstance(self.owner, Panels):
            panels_of(self.owner).detach().copy_(self.owner.form.pack(self.whole))
        else:  # unpacked since
            self.owner.copy_(self.whole)
        self._saw()

    def wrap(self, result: Any) -> Any:
        """A result of a function with the tensors in it that are views of the copy kept live."""
        if type(result).__module__ == "numpy":
            # Nothing would see what is written there.
            if hasattr(result, "flags") and result.flags.writeable:
                result.flags.writeable = False
            return result
        return pytree.tree_map_only(torch.Tensor, self._wrap, result)

    def _wrap(self, tensor):
        if isinstance(tensor, (LiveCopy, Panels)) or tensor.layout is not torch.strided or \
                tensor.untyped_storage()._cdata != self.whole.untyped_storage()._cdata:
            return tensor
        view = tensor.as_subclass(LiveCopy)
        view.source = self
        return view


class LiveCopy(torch.Tensor):
    """A packed weight as it was before, or a view of it: both see what is written to the other."""

    source: _Source

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(issubclass(kind, Panels) for kind in types):
            return NotImplemented
        found = [x.source for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, LiveCopy)]
        for source in found:
            source.refresh()
        with DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        for source in found:
            source.write_back()
            result = source.wrap(result)
        return result

    def __deepcopy__(self, memo):
        return memo.setdefault(id(self), _plain(self).clone())

    def __reduce_ex__(self, protocol):
        return _plain(self).__reduce_ex__(protocol)


def live_copy(weight: Panels) -> torch.Tensor:
    """The weight as it was before, which sees what is written to the model, and the reverse."""
    source = _Source(weight)
    return source.wrap(source.whole)


def _times_assigned(owner) -> int:
    return vars(owner).get("_moe_times_assigned", 0)


def _read(owner):
    if isinstance(owner, Panels):
        return owner.form.unpack(panels_of(owner).detach())
    return owner.detach().clone()


def _plain(tensor):
    """The values of a tensor of any of these classes as a tensor of torch."""
    if isinstance(tensor, Panels):
        return _read(tensor)
    if isinstance(tensor, LiveCopy):
        tensor.source.refresh()
    with DisableTorchFunctionSubclass():
        tensor = tensor.detach()
        return tensor if type(tensor) is torch.Tensor else tensor.as_subclass(torch.Tensor)


__all__ = ["Form", "LiveCopy", "PackedWeight", "Panels", "hidden_gradients", "is_shared_memory",
           "live_copy", "operand_of", "pack_parameter", "packed_state", "panels_of", "unpack_parameter"]
