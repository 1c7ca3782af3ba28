"""moe_mlir.compare: how far a compiled model is from its model, and whether that is a fault."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from .._torch.core import pytree
from .._transformers.cache_state import is_cache, leaves_of, put
from ..experts.quantized_weight import QuantizedWeight
from ..packing import give_back

# Roundings of a result, relative to the largest number of an output, that are no fault even where
# eager happens to be exact: sums of other orders, of many layers.
_ROUNDINGS = {torch.float64: 64, torch.float32: 64, torch.bfloat16: 4, torch.float16: 8}
# Runs with changed weights, and by how many roundings of its type each weight changes at most.
_RUNS, _CHANGE = 4, 4


class Difference(NamedTuple):
    """One output of the compiled model beside the model's own.

    Errors are the largest absolute ones against a run in more bits, 0 where there is none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    difference: float   # between compiled and eager
    largest: float      # number of eager
    error: float        # of the compiled model
    eager_error: float
    near_ties: int      # rows that are as far apart as small changes of the weights move them
    fault: str          # what is wrong; empty if nothing is

    def __str__(self) -> str:
        text = (f"{self.name} {list(self.shape)}: differs by {self.difference:.2g} (largest "
                f"{self.largest:.2g}), error {self.error:.2g}, eager's {self.eager_error:.2g}")
        ties = f"; {self.near_ties} rows of near ties" if self.near_ties else ""
        return text + ties + (f"; {self.fault}" if self.fault else "")


@dataclass(frozen=True)
class Comparison:
    """What `compare` found: a difference for each output; `ok` where none is a fault.

    `print` shows a line for each output, and one for the tokens.
    """

    outputs: list[Difference] = field(default_factory=list)
    # Of logits the places whose best word differs, and those of them that are no near tie.
    tokens: int = 0
    other_tokens: int = 0
    wrong_tokens: int = 0

    @property
    def ok(self) -> bool:
        return not self.wrong_tokens and not any(output.fault for output in self.outputs)

    def __str__(self) -> str:
        lines = list(map(str, self.outputs))
        if self.tokens:
            lines.append(f"best words of logits: {self.other_tokens} of {self.tokens} differ, "
                         f"{self.wrong_tokens} beyond a near tie")
        return "\n".join([*lines, "ok" if self.ok else "the compiled model is wrong"])


@torch.no_grad()
def compare(
    model: torch.nn.Module,
    compiled: Callable[..., Any],
    args: tuple[Any, ...] = (),
    *,
    kwargs: Mapping[str, Any] | None = None,
    reference: torch.nn.Module | None = None,
) -> Comparison:
    """Compares what a compiled model and the model itself give for the same inputs.

    A run of the same weights in twice the bits (float64 of float32, float32 of 16 bits) says how
    far each is off. A row of an output is a fault where the compiled model's error is more than twice
    eager's in it, more than some roundings, and more than twice what the row changes by if the
    weights change by a few roundings. A row that changes much more than others is a near tie, of
    two experts or of two words, for which eager's own answer means no more than another.

    Args:
        model: the model, in evaluation mode.
        compiled: what `moe_mlir.compile` or `torch.compile` returned for it, or another function
            that should give the same.
        args: inputs of both, as a tuple. Caches among them are copied for each run.
        kwargs: keyword inputs of both.
        reference: the model in more bits. By default a copy of `model` is converted, which takes
            twice its memory; weights in 4 or 8 bits cannot be, so give the model that they are of.

    Raises:
        TypeError: `model` is no module, or its weights cannot be converted, as those in 4 or 8 bits,
            and there is no `reference`.

    Example:
        >>> print(moe_mlir.compare(model, compiled, (ids,)))
        logits [1, 3, 64]: differs by 1.9e-06 (largest 2.6), error 1.1e-06, eager's 1.4e-06
        best words of logits: 0 of 3 differ, 0 beyond a near tie
        ok
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"expected 'model' to be a torch.nn.Module, found {type(model).__name__}")
    inputs = (args, dict(kwargs or {}))
    # Compiled code first: eager may give packed weights back.
    ours, eager = (_outputs(function, inputs) for function in (compiled, model))
    wide = _wider(model) if reference is None else reference.eval()
    exact = _outputs(wide, inputs, _dtype(wide))
    moved = [_outputs(_changed(wide, run, _dtype(model)), inputs, _dtype(wide))
             for run in range(_RUNS)]
    if ours.keys() != eager.keys():
        only = sorted(ours.keys() ^ eager.keys())
        return Comparison([Difference(name, (), torch.float32, 0, 0, 0, 0, 0,
                                      "an output of one alone") for name in only])
    outputs = [_difference(name, ours[name], eager[name], exact.get(name),
                           [run.get(name) for run in moved]) for name in ours]
    return Comparison(outputs, *_tokens(ours, eager, exact, moved))


# ---- runs --------------------------------------------------------------------------


def _outputs(function, inputs, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """The tensors of a call by name; floats among the inputs as `dtype`."""
    args, kwargs = pytree.tree_map(lambda x: _own(x, dtype), inputs, is_leaf=is_cache)
    found = {}
    for path, leaf in pytree.tree_flatten_with_path(function(*args, **kwargs), is_leaf=is_cache)[0]:
        name = pytree.keystr(path).strip("[]'.\"").replace("']['", ".") or "output"
        if isinstance(leaf, torch.Tensor):
            found[name] = leaf.detach().clone()
        elif is_cache(leaf):
            found.update({".".join(map(str, (name, *place))): x for place, _, x in leaves_of(leaf)
                          if isinstance(x, torch.Tensor)})
    return found


def _own(value, dtype):
    """A copy of an input, which a call may change."""
    value = copy.deepcopy(value)
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if dtype is not None and value.is_floating_point() else value
    if dtype is not None and is_cache(value):
        for path, _, leaf in list(leaves_of(value)):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                put(value, path, leaf.to(dtype))
    return value


def _dtype(model) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def _wider(model):
    """A copy whose weights have twice the bits."""
    quantized = [name for name, part in model.named_modules() if isinstance(part, QuantizedWeight)]
    if quantized:
        raise TypeError(
            "compare: expected weights that can be converted to more bits, found a quantized one, "
            f"'{quantized[0]}'; give the model that was quantized as 'reference', which also says "
            "what rounding costs")
    wide = copy.deepcopy(model)
    give_back(wide)
    if hasattr(wide, "set_experts_implementation"):
        wide.set_experts_implementation("eager")  # a plain loop, which takes all types
    try:
        return wide.to(torch.float64 if _dtype(model) == torch.float32 else torch.float32).eval()
    except Exception as error:
        raise TypeError(f"expected weights that can be converted to more bits, found {error}; give "
                        "the model in floats as 'reference'") from error


def _changed(wide, run, dtype):
    """The model with each weight changed by some roundings of its type.

    Every second run changes them the other way: of equal scores another is the larger one then.
    """
    changed, sign = copy.deepcopy(wide), 1 - 2 * (run % 2)
    generator = torch.Generator().manual_seed(run // 2)
    for weight in changed.parameters():
        if weight.is_floating_point():
            noise = torch.rand(weight.shape, generator=generator) * 2 - 1
            change = sign * _CHANGE * torch.finfo(dtype).eps
            weight.mul_(1 + noise.to(weight.device, weight.dtype) * change)
    return changed


# ---- differences -------------------------------------------------------------------


def _difference(name, ours, eager, exact, moved) -> Difference:
    shape, dtype = tuple(eager.shape), eager.dtype

    def result(difference=0.0, largest=0.0, error=0.0, eager_error=0.0, ties=0, fault=""):
        return Difference(name, shape, dtype, difference, largest, error, eager_error, ties, fault)
    if ours.shape != eager.shape or ours.dtype != dtype:
        return result(fault=f"expected {dtype} {list(shape)}, found {ours.dtype} {list(ours.shape)}")
    if not eager.is_floating_point() or eager.numel() == 0:
        unequal = int((ours != eager).sum())
        return result(unequal, fault=f"{unequal} of {eager.numel()} differ" if unequal else "")
    finite = eager.isfinite()
    if not torch.equal(finite, ours.isfinite()):
        return result(fault="other places are infinite or no numbers")
    ours, eager = (torch.where(finite, x, 0).double() for x in (ours, eager))
    largest, difference = float(eager.abs().max()), float((ours - eager).abs().max())
    if exact is None or exact.shape != eager.shape:
        return result(difference, largest, fault="no output of the run in more bits has its name")
    exact = torch.where(finite, exact, 0).double()
    mine, others = (_rows((x - exact).abs()) for x in (ours, eager))
    moves, floor = _moves(exact, moved, finite), _floor(dtype) * float(exact.abs().max())
    wrong = mine > torch.maximum(2 * torch.maximum(moves, others), moves.new_tensor(floor))
    ties = ~wrong & (mine > 2 * max(float(moves.median()), floor))
    fault = f"{int(wrong.sum())} of {wrong.numel()} rows are off by up to {float(mine[wrong].max()):.2g}" \
        if wrong.any() else ""
    return result(difference, largest, float(mine.max()), float(others.max()), int(ties.sum()), fault)


def _rows(errors):
    """The largest of each row, of what has rows."""
    return errors.amax(-1) if errors.dim() else errors


def _floor(dtype) -> float:
    return _ROUNDINGS.get(dtype, 4) * torch.finfo(dtype).eps


def _moves(exact, moved, finite):
    """How far each row moves if the weights change."""
    runs = [torch.where(finite, run, 0).double() for run in moved if run is not None]
    return torch.stack([_rows((run - exact).abs()) for run in runs]).amax(0)


def _tokens(ours, eager, exact, moved) -> tuple[int, int, int]:
    """Of logits the places, those whose best words differ, and those beyond a near tie."""
    if not all("logits" in outputs and outputs["logits"].dim() > 1
               and outputs["logits"].shape == eager["logits"].shape for outputs in (ours, eager, exact)):
        return 0, 0, 0
    mine, other, judge = (outputs["logits"].double() for outputs in (ours, eager, exact))
    chosen = mine.argmax(-1, keepdim=True)
    differ = (chosen != other.argmax(-1, keepdim=True))[..., 0]
    below = judge.amax(-1) - judge.gather(-1, chosen)[..., 0]
    error = (other - judge).abs().max()
    moves = _moves(judge, [run["logits"] for run in moved], judge.isfinite())
    wrong = differ & (below > 2 * torch.maximum(error, moves))
    return differ.numel(), int(differ.sum()), int(wrong.sum())


__all__ = ["Comparison", "Difference", "compare"]
