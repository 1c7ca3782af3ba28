"""moe.dispatch: a row for each assignment of a token to an expert (docs/Spec.md 3.10)."""

import torch

from .._support.keywords import renamed
from ._check import INDICES, MASK, SCORES, Checker
from ._few_values import FewValues
from ._kernel import Kernel, Tensor, contiguous, enum, f64, i64, kernels, rows
from ._library import define

# What the schema calls otherwise, as callers once did.
_NAMES = {"idx": "indices"}
_check = Checker("dispatch", _NAMES)
_factors = FewValues()


@renamed(_NAMES)
def dispatch(
    indices: torch.Tensor,
    num_experts: int,
    *,
    capacity: int | None = None,
    priority: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    capacity_factor: float | None = None,
    gates: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
    alignment: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sorts assignments by expert; inside an expert the order is stable.

    All first choices take their rows in token order, then all second choices.

    Args:
        indices: `[.., k]` int32 or int64; an index out of range is no assignment.
        num_experts: experts that have rows here.
        capacity: rows an expert may have; or `capacity_factor` cf, for
            k * floor(cf * ceil(tokens / experts)) of them. Unbounded by default.
        priority: `[..]` float32: tokens come in its descending order instead,
            ties by token (batch prioritized routing, with the top gate).
        gates: `[.., k]` float32: a full expert keeps the highest gates instead
            of the first assignments.
        expert_map: `[logical experts]` int32, the row owner of each index, -1
            for an expert that lives elsewhere.
        alignment: experts start at multiples of it.
        mask: bool `[..]`, True = real token.

    Returns:
        slots `[.., k]` int64, the row of each assignment or -1; offsets
        `[num_experts + 1]` and counts `[num_experts]` int64, after dropping.
    """
    return _op(
        indices, num_experts, capacity, priority, mask, capacity_factor, gates, expert_map,
        alignment,
    )  # fmt: skip


def _arguments(
    idx, num_experts, capacity, priority, mask, capacity_factor, gates, expert_map, alignment
):
    _check.tensor("idx", idx)
    for name, value in (
        ("priority", priority), ("mask", mask), ("gates", gates), ("expert_map", expert_map),
    ):  # fmt: skip
        _check.tensor(name, value, optional=True)
    num_experts = _check.integer("num_experts", num_experts)
    capacity = _check.integer("capacity", capacity, optional=True)
    alignment = _check.integer("alignment", alignment)
    if capacity_factor is not None:
        _check.number("capacity_factor", capacity_factor)
        capacity_factor = float(capacity_factor)
    return idx, num_experts, capacity, priority, mask, capacity_factor, gates, expert_map, alignment


# Offsets are 32-bit numbers.
_MOST_ROWS = 2**31 - 1


def _validate(
    idx, num_experts, capacity, priority, mask, capacity_factor, gates, expert_map, alignment
):
    _check.at_least_1d("idx", idx, "[.., k]")
    _check.dtype("idx", idx, INDICES)
    tokens = idx.shape[:-1]
    _check.at_least("num_experts", num_experts, 1)
    if capacity is not None:
        _check.at_least("capacity", capacity, 0)
        if capacity_factor is not None:
            _check.fail("expected at most one of 'capacity' and 'capacity_factor', found both")
    if capacity_factor is not None:
        _check.positive("capacity_factor", capacity_factor)
    if priority is not None:
        if gates is not None:
            _check.fail("expected at most one of 'priority' and 'gates', found both")
        _check.dtype("priority", priority, SCORES)
        _check.shape("priority", priority, tokens, "of 'idx' without k")
    if gates is not None:
        _check.dtype("gates", gates, SCORES)
        _check.shape("gates", gates, idx.shape, "of 'idx'")
    if expert_map is not None:
        _check.dtype("expert_map", expert_map, (torch.int32,))
        _check.rank("expert_map", expert_map, "[experts]")
    if mask is not None:
        _check.dtype("mask", mask, MASK)
        _check.shape("mask", mask, tokens, "of 'idx' without k")
    _check.at_least("alignment", alignment, 1)
    if num_experts * (alignment - 1) > _MOST_ROWS:
        _check.fail(f"expected 'alignment' to leave all rows of {num_experts} experts below 2**31, "
                    f"found {alignment}")


@kernels
def kernel(
    k: int,
    index_dtype: torch.dtype,
    experts: int,
    bounded: bool,
    ranked: bool,
    masked: bool,
    factor: float | None,
    weighed: bool,
    mapped: bool,
    alignment: int,
) -> Kernel:
    inputs = [Tensor("indices", ("n", k), index_dtype)]
    if ranked:
        inputs.append(Tensor("priority", ("n",), torch.float32, clause="priority"))
    if weighed:
        inputs.append(Tensor("gates", ("n", k), torch.float32, clause="gates"))
    if mapped:
        inputs.append(Tensor("expert_map", ("l",), torch.int32, clause="expert_map"))
    if bounded:
        inputs.append(Tensor("capacity", (), torch.int32, clause="capacity"))
    if masked:
        inputs.append(Tensor("mask", ("n",), torch.bool, clause="mask"))
    rule = "priority" if ranked else "probs" if weighed else "position"
    attributes = [("drop", enum("drop", rule)), ("alignment", i64(alignment))]
    if factor is not None:
        attributes.append(("capacity_factor", f64(factor)))
    return Kernel(
        "dispatch",
        tuple(inputs),
        (
            Tensor("slots", ("n", k), torch.int64),
            Tensor("offsets", (experts + 1,), torch.int64),
            Tensor("counts", (experts,), torch.int64),
        ),
        tuple(attributes),
    )


def _cpu(idx, num_experts, capacity, priority, mask, capacity_factor, gates, expert_map, alignment):
    _validate(
        idx, num_experts, capacity, priority, mask, capacity_factor, gates, expert_map, alignment
    )
    form = (
        priority is not None, mask is not None, gates is not None, expert_map is not None, alignment,
    )  # fmt: skip
    if capacity_factor is not None and not _factors.has(
        (idx.shape[-1], idx.dtype, num_experts, form), capacity_factor
    ):
        tokens = idx.shape[:-1].numel()
        capacity = idx.shape[-1] * int(capacity_factor * -(-tokens // num_experts))
        capacity_factor = None
    run = kernel(
        idx.shape[-1], idx.dtype, num_experts, capacity is not None, priority is not None,
        mask is not None, capacity_factor, gates is not None, expert_map is not None, alignment,
    )  # fmt: skip
    if idx.numel() + num_experts * (alignment - 1) > _MOST_ROWS:
        _check.fail(f"expected fewer than 2**31 rows in all, found {idx.numel()} assignments with "
                    f"alignment {alignment}")
    operands = [rows(idx, 1)]
    if priority is not None:
        operands.append(rows(priority, 0))
    if gates is not None:
        operands.append(rows(gates, 1))
    if expert_map is not None:
        operands.append(contiguous(expert_map))
    if capacity is not None:
        # More rows than assignments are no bound.
        bound = min(capacity, idx.numel())
        operands.append(torch.full((), bound, dtype=torch.int32, device=idx.device))
    if mask is not None:
        operands.append(rows(mask, 0))
    slots, offsets, counts = run(*operands)
    return slots if slots.dim() == idx.dim() else slots.view(idx.shape), offsets, counts


def _fake(idx, num_experts, *options):
    _validate(idx, num_experts, *options)
    slots = idx.new_empty(idx.shape, dtype=torch.int64)
    return slots, slots.new_empty((num_experts + 1,)), slots.new_empty((num_experts,))


_op = define(
    "dispatch(Tensor idx, int num_experts, SymInt? capacity, Tensor? priority, Tensor? mask, "
    "float? capacity_factor, Tensor? gates, Tensor? expert_map, int alignment) "
    "-> (Tensor slots, Tensor offsets, Tensor counts)",
    arguments=_arguments,
    kernel=_cpu,
    fake=_fake,
    widen=("priority", "gates"),
)
