"""Routing over several ranks of torch.distributed; docs/Distributed.md.

Statistics that a method takes over "the batch" are sums over the tokens of all
ranks: co-selections, loads, the clusters of ACMoE. Here they are reduced first
and used then, so that every rank gets what one process would get from all the
tokens. Experts can live on different ranks; tokens travel to them and back.

Any backend serves: everything is an all_reduce, an all_gather or an
all_to_all_single on the device of the tokens. Without an initialised process
group there is one rank, and every function is its local meaning.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from . import experts as _registered  # noqa: F401  registers the ops of the experts
from ._support.keywords import renamed
from .formulas import blend_counts, co_selections
from .ops import dispatch
from .ops import mad_dispersion as dispersion_of_one
from .ops._expert_activation import recognize

if TYPE_CHECKING:
    from .nn import MoELayer, Routing

__all__ = [
    "ExpertParallel",
    "adjacency_update",
    "load_balance_std",
    "mad_dispersion",
    "run_experts",
    "selection_counts",
    "share_statistics",
]


def __dir__() -> list[str]:
    return sorted(__all__)


def _size(group) -> int:
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def _sum(tensor, group):
    """The sum over the ranks, in place and returned."""
    if _size(group) > 1:
        dist.all_reduce(tensor, group=group)
    return tensor


# ------------------------------------------------------------------ statistics


@renamed({"idx": "indices", "group": "process_group"})
def selection_counts(
    indices: torch.Tensor,
    num_experts: int,
    *,
    mask: torch.Tensor | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """`metrics.selection_counts` over the tokens of all ranks."""
    from .metrics import selection_counts as count

    return _sum(count(indices, num_experts, mask=mask), process_group)


@renamed({"idx": "indices", "group": "process_group"})
def load_balance_std(
    indices: torch.Tensor,
    num_experts: int,
    *,
    mask: torch.Tensor | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """`metrics.load_balance_std` over the tokens of all ranks."""
    counts = selection_counts(indices, num_experts, mask=mask, process_group=process_group)
    counts = counts.double()
    return (100 * counts / counts.sum().clamp(min=1)).std(correction=0)


@torch.no_grad()
@renamed({"a": "adjacency", "idx": "indices", "group": "process_group"})
def adjacency_update(
    adjacency: torch.Tensor,
    indices: torch.Tensor,
    *,
    beta: float = 0.9,
    norm: Literal["row", "col", "eq7"] = "row",
    diagonal: bool = True,
    mask: torch.Tensor | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """`moe_mlir.adjacency_update` from the choices of all ranks, with equal adjacencies."""
    counts = _sum(co_selections(indices, adjacency.shape[0], mask=mask), process_group)
    blended = blend_counts(adjacency, counts, beta=beta, norm=norm, diagonal=diagonal)
    return blended.to(adjacency.dtype)


@torch.no_grad()
@renamed({"group": "process_group"})
def mad_dispersion(
    h: torch.Tensor,
    assign: torch.Tensor,
    num_experts: int,
    *,
    measure: Literal["mad", "variance", "pairwise"] = "mad",
    mask: torch.Tensor | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`moe_mlir.mad_dispersion` of the clusters that the tokens of all ranks form.

    Two reductions: sums for the means, then sums of deviations from the means
    of all; both are formed in float64 and in the order of the tokens.
    "pairwise" needs every pair of tokens: they are gathered.
    """
    if measure not in ("mad", "variance", "pairwise"):
        raise ValueError("mad_dispersion: expected 'measure' to be one of 'mad', 'variance', "
                         f"'pairwise', found {measure!r}")
    h, assign = h.reshape(-1, h.shape[-1]), assign.reshape(-1)
    member = (assign >= 0) & (assign < num_experts)
    if mask is not None:
        member = member & mask.reshape(-1)
    # Tokens of no cluster form one behind the others, which is dropped.
    assign = torch.where(member, assign, num_experts).to(torch.int64)
    if measure == "pairwise":
        h = _gather_rows(h, process_group)
        assign = _gather_rows(assign[:, None], process_group)[:, 0]
        return dispersion_of_one(h, assign, num_experts, measure=measure)
    assign, order = assign.sort(stable=True)
    h = h[order].double()
    lengths = torch.bincount(assign, minlength=num_experts + 1)

    def sum_of_clusters(rows):
        return torch.segment_reduce(rows, "sum", lengths=lengths, axis=0, initial=0)[:-1]

    count = _sum(lengths[:-1].clone(), process_group)
    size = count.clamp(min=1).double()[:, None]
    mean = _sum(sum_of_clusters(h), process_group) / size
    deviation = h - torch.cat([mean, mean.new_zeros(1, mean.shape[1])])[assign]
    spread = deviation.abs() if measure == "mad" else deviation * deviation
    s = _sum(sum_of_clusters(spread), process_group) / size
    return s.float(), mean.float(), count


def _gather_rows(rows, group):
    """The rows of all ranks in the order of the ranks."""
    ranks = _size(group)
    if ranks == 1:
        return rows
    count = torch.tensor([rows.shape[0]], device=rows.device)
    counts = [torch.empty_like(count) for _ in range(ranks)]
    dist.all_gather(counts, count, group=group)
    counts = [int(c) for c in counts]
    # all_gather takes equal shapes: as many rows as the longest rank has.
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: rows.shape[0]] = rows
    parts = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:n] for part, n in zip(parts, counts)])


@renamed({"group": "process_group"})
def share_statistics(
    model: torch.nn.Module, process_group: dist.ProcessGroup | None = None
) -> int:
    """Makes every ACMoE of a model compute its clusters over all ranks.

    Adjacencies and biases need no call: `update_routers` reduces them. Returns
    the number of routers.
    """
    from .nn import Router

    routers = [m for m in model.modules() if isinstance(m, Router) and hasattr(m, "dispersion")]
    for router in routers:
        router.dispersion = functools.partial(mad_dispersion, process_group=process_group)
    return len(routers)


# ------------------------------------------------------------------ experts


class _Exchange(torch.autograd.Function):
    """Rows to other ranks: `sent` of them to each, `received` from each; backward the other way."""

    @staticmethod
    def forward(ctx, rows, sent, received, group):
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx, gradient):
        return _exchange(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


def _exchange(rows, sent, received, group):
    if _size(group) == 1:
        return rows.clone()
    # As bytes: not every backend moves every dtype.
    packed = rows.contiguous().view(torch.uint8)
    arrived = packed.new_empty(sum(received), packed.shape[1])
    dist.all_to_all_single(arrived, packed, received, sent, group=group)
    return arrived.view(rows.dtype)


def _exchange_counts(counts, ranks, group):
    """[rank, its experts] rows that this rank sends -> that it receives, as lists."""
    counts = counts.view(ranks, -1)
    if ranks == 1:
        return counts.tolist(), counts.tolist()
    arrived = torch.empty_like(counts)
    dist.all_to_all_single(arrived, counts.contiguous(), group=group)
    # One read by the host for both: uneven splits are host numbers in every backend.
    sent, received = torch.stack([counts, arrived]).tolist()
    return sent, received


@renamed({"x": "h", "group": "process_group"})
def run_experts(
    h: torch.Tensor,
    gates: torch.Tensor,
    indices: torch.Tensor,
    w_in: torch.Tensor,
    w_out: torch.Tensor,
    *,
    num_experts: int,
    b_in: torch.Tensor | None = None,
    b_out: torch.Tensor | None = None,
    activation: Callable[[torch.Tensor], torch.Tensor] | str | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """`moe_mlir.experts.run_experts` with the experts spread over the ranks.

    Rank r holds experts `[r E / R, (r + 1) E / R)`. Rows leave in the order of
    the experts, which is the order of the ranks; they arrive by rank and are
    sorted by expert, stably, so that the result does not depend on timing.

    Args:
        h, gates, indices: this rank's tokens `[.., d]` and their routing `[.., k]`,
            with global expert numbers; -1 selects nothing.
        w_in, w_out, b_in, b_out: this rank's experts, as for one process.
        num_experts: of all ranks; a multiple of their number.
        activation: as in `moe_mlir.experts.run_experts`.

    Returns:
        `[.., d]`, this rank's tokens. Gradients flow to the tokens, the gates
        and the experts of other ranks.
    """
    ranks = _size(process_group)
    _check_experts(num_experts, ranks, w_in)
    function = recognize(activation) or activation or torch.nn.functional.gelu
    assert not isinstance(function, str)
    tokens = h.reshape(-1, h.shape[-1])
    chosen = indices.reshape(-1, indices.shape[-1])
    weights = gates.reshape(-1, gates.shape[-1])
    slots, offsets, counts = dispatch(chosen, num_experts)
    sent, received = _exchange_counts(counts, ranks, process_group)
    per_rank = [sum(part) for part in sent], [sum(part) for part in received]
    rows = torch.ops.moe.token_rows(slots)[: sum(per_rank[0])]
    arrived = _Exchange.apply(tokens[rows], *per_rank, process_group)

    order, local_offsets = _by_expert(received, h.device)
    hidden = torch.ops.moe.grouped_linear(arrived[order], w_in, b_in, local_offsets)
    computed = torch.ops.moe.grouped_linear(function(hidden), w_out, b_out, local_offsets)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    outputs = _Exchange.apply(computed[back], per_rank[1], per_rank[0], process_group)

    # A pair without a slot reads a row of zeros.
    padded = torch.nn.functional.pad(outputs, (0, 0, 0, 1))
    picked = padded[torch.where(slots >= 0, slots, len(outputs))]
    weights = torch.where(slots >= 0, weights.to(h.dtype), 0.0)
    return (picked * weights.unsqueeze(-1)).sum(dim=1).reshape(h.shape)


def _check_experts(num_experts, ranks, w_in):
    if num_experts % ranks:
        raise ValueError(f"run_experts: expected 'num_experts' to be a multiple of the {ranks} "
                         f"ranks, found {num_experts}")
    if w_in.shape[0] != num_experts // ranks:
        raise ValueError(f"run_experts: expected 'w_in' to hold this rank's "
                         f"{num_experts // ranks} of {num_experts} experts, found {w_in.shape[0]}")


def _by_expert(received, device):
    """The permutation of rows that came by rank to rows by expert, and the experts' offsets."""
    counts = torch.tensor(received)
    ranks, experts = counts.shape
    of_row = torch.arange(experts).repeat(ranks).repeat_interleave(counts.flatten())
    order = of_row.sort(stable=True).indices
    offsets = torch.nn.functional.pad(counts.sum(dim=0).cumsum(dim=0), (1, 0))
    return order.to(device), offsets.to(device)


class ExpertParallel(torch.nn.Module):
    """A MoELayer whose experts are spread over the ranks of a group.

    Takes this rank's slice of the experts' weights; the router and the shared
    experts stay whole on every rank. Each rank calls it with its own tokens.

    The gradients of the experts are sums over the tokens of all ranks. Those of
    the router are of this rank's tokens, for DistributedDataParallel to reduce:
    give it the experts' parameters, `parameters_to_ignore`, to leave alone.
    """

    @renamed({"group": "process_group"})
    def __init__(self, layer: MoELayer, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        if layer.capacity_factor is not None:
            raise ValueError("ExpertParallel: expected a layer without capacity_factor, found "
                             f"{layer.capacity_factor}: a capacity is of one rank's tokens")
        ranks = _size(process_group)
        experts = layer.router.num_experts
        if experts % ranks:
            raise ValueError(f"ExpertParallel: expected the number of experts to be a multiple of "
                             f"the {ranks} ranks, found {experts}")
        rank = _rank(process_group)
        here = slice(rank * experts // ranks, (rank + 1) * experts // ranks)
        self.process_group, self.experts = process_group, here
        self.router = layer.router
        self.activation = layer.activation
        for name in self.parameters_to_ignore:
            weight = getattr(layer, name)
            weight = None if weight is None else torch.nn.Parameter(weight.detach()[here].clone())
            self.register_parameter(name, weight)
        for name in ("shared_in", "shared_out", "shared_b_in", "shared_b_out"):
            self.register_parameter(name, getattr(layer, name))

    parameters_to_ignore = ("w_in", "w_out", "b_in", "b_out")

    def forward(
        self,
        h: torch.Tensor,
        mask: torch.Tensor | None = None,
        **state: Any,
    ) -> tuple[torch.Tensor, Routing]:
        routing = self.router(h, mask, **state)
        if routing.dispatch is not None:
            raise ValueError("ExpertParallel: expected a router that selects experts, found a "
                             f"soft one, {type(self.router).__name__}, whose slots mix all tokens")
        y = run_experts(h, routing.gates, routing.indices, self.w_in, self.w_out,
                        num_experts=self.router.num_experts, b_in=self.b_in, b_out=self.b_out,
                        activation=self.activation, process_group=self.process_group)
        if self.shared_in is not None and self.shared_out is not None:
            linear = torch.nn.functional.linear
            hidden = self.activation(linear(h, self.shared_in, self.shared_b_in))
            y = y + linear(hidden, self.shared_out, self.shared_b_out)
        return y, routing


def _rank(group) -> int:
    return dist.get_rank(group) if _size(group) > 1 else 0
