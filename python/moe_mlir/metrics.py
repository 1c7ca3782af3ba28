"""Routing metrics of the papers; docs/Spec.md 5.

All take an optional `mask` (True = real token) over the tokens, ignore masked
tokens, and return 0 if there are none. Nothing synchronises with the host, so
metrics can stay enabled in training; `RoutingMonitor` collects them while a
model runs.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from ._support.keywords import renamed
from .formulas import entropy

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = [
    "RoutingMonitor",
    "contingency_table",
    "entropy_ratio",
    "fluctuation_rate",
    "load_balance_std",
    "router_instability",
    "routing_entropy",
    "selection_counts",
]


def __dir__() -> list[str]:
    return sorted(__all__)


def _mean(values, mask):
    """Mean over the tokens that count, 0 without any."""
    values = values.double()
    if mask is None:
        return values.sum() / max(1, values.numel())
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)


@renamed({"idx_a": "indices_a", "idx_b": "indices_b"})
def fluctuation_rate(
    indices_a: torch.Tensor,
    indices_b: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Share of tokens whose chosen set of experts differs between two routings."""
    if indices_a.shape != indices_b.shape:
        raise ValueError(
            "fluctuation_rate: expected 'indices_b' to have the shape of 'indices_a' "
            f"{tuple(indices_a.shape)}, found {tuple(indices_b.shape)}"
        )
    differs = (indices_a.sort(dim=-1).values != indices_b.sort(dim=-1).values).any(dim=-1)
    return _mean(differs, mask)


@renamed({"p": "probs"})
def routing_entropy(probs: torch.Tensor, *, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Mean entropy of the routing probabilities [.., E], natural logarithm."""
    return _mean(entropy(probs.double()), mask)


@renamed({"p_method": "probs", "p_base": "base_probs"})
def entropy_ratio(
    probs: torch.Tensor,
    base_probs: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mean entropy of a method's probabilities over that of its baseline's."""
    base = routing_entropy(base_probs, mask=mask)
    ratio = routing_entropy(probs, mask=mask) / base.masked_fill(base == 0, 1.0)
    return torch.where(base == 0, 0.0, ratio)


@renamed({"idx": "indices"})
def selection_counts(
    indices: torch.Tensor,
    num_experts: int,
    *,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """How often each expert was chosen, int64 [E]; indices of -1 are nowhere."""
    chosen = (indices >= 0) & (indices < num_experts)
    if mask is not None:
        chosen = chosen & mask[..., None]
    return _histogram(torch.where(chosen, indices, num_experts), num_experts)


def _histogram(values, size):
    """Counts of 0 .. size-1 in values of 0 .. size; those of `size` are cut off."""
    values = values.reshape(-1).to(torch.int64)
    counts = torch.zeros(size + 1, dtype=torch.int64, device=values.device)
    return counts.scatter_add(0, values, torch.ones_like(values))[:-1]


@renamed({"idx": "indices"})
def load_balance_std(
    indices: torch.Tensor,
    num_experts: int,
    *,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Population deviation over the experts of their percentage of assignments."""
    return _load_std(selection_counts(indices, num_experts, mask=mask))


def _load_std(counts):
    counts = counts.double()
    return (100 * counts / counts.sum(dim=-1, keepdim=True).clamp(min=1)).std(dim=-1, correction=0)


def router_instability(
    top1_prev: torch.Tensor,
    top1_cur: torch.Tensor,
    *,
    num_experts: int | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Share of ordered token pairs that share an expert in one layer only.

    From the contingency table c of the two assignments and its margins a, b:
    `(sum a^2 + sum b^2 - 2 sum c^2) / n^2`, in O(n + E^2) instead of O(n^2).
    Without `num_experts` the largest index is read back from the device.
    """
    if num_experts is None:
        largest = [int(t.max()) for t in (top1_prev, top1_cur) if t.numel()]
        num_experts = max([0, *largest]) + 1
    return _instability(contingency_table(top1_prev, top1_cur, num_experts, mask=mask))


def contingency_table(
    top1_prev: torch.Tensor,
    top1_cur: torch.Tensor,
    num_experts: int,
    *,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """How many tokens went to expert a in one layer and to b in the next, int64 [E, E]."""
    prev, cur = top1_prev.reshape(-1), top1_cur.reshape(-1)
    if prev.shape != cur.shape:
        raise ValueError(
            "router_instability: expected 'top1_cur' to have as many tokens as 'top1_prev' "
            f"({prev.numel()}), found {cur.numel()}"
        )
    valid = (prev >= 0) & (cur >= 0)
    if mask is not None:
        valid = valid & mask.reshape(-1)
    pairs = torch.where(valid, prev * num_experts + cur, num_experts**2)
    return _histogram(pairs, num_experts**2).reshape(num_experts, num_experts)


def _instability(table):
    table = table.double()
    margins = (table.sum(dim=-1) ** 2).sum(dim=-1) + (table.sum(dim=-2) ** 2).sum(dim=-1)
    tokens = table.sum(dim=(-1, -2)).clamp(min=1)
    return (margins - 2 * (table**2).sum(dim=(-1, -2))) / tokens**2


class RoutingMonitor:
    """The papers' metrics of every router of a model, collected while it runs.

    Forward hooks add to small tensors on the device; nothing is read back
    before `history()`. A window ends with `end_window()`, say once an epoch:
    loads, entropies, instabilities and adjacencies are kept per window and
    layer. `probe(run)` routes a fixed batch and compares its experts with the
    previous probe's: the fluctuation rate. A training loop then reads:

        monitor = RoutingMonitor(model)
        for epoch in range(epochs):
            train(model)
            monitor.probe(lambda: model(batch))
            monitor.end_window()
        monitor.history()["fluctuation"]
    """

    def __init__(self, model: torch.nn.Module):
        from .nn import Router

        self.names = [name for name, m in model.named_modules() if isinstance(m, Router)]
        self._routers = [m for m in model.modules() if isinstance(m, Router)]
        self._model = model
        self._windows: list[dict[int, dict[str, Any]]] = []
        self._probes: list[dict[int, torch.Tensor]] = []
        self._window: dict[int, dict[str, Any]] = {}
        # Of a forward apart from the window.
        self._probed: dict[int, torch.Tensor] | None = None
        # (layer, its first experts) of the router before in a pass.
        self._top1: tuple[Any, Any] = (None, None)
        self._handles = [
            router.register_forward_hook(self._hook(layer))
            for layer, router in enumerate(self._routers)
        ]

    def close(self) -> None:
        """Takes the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, layer):
        def hook(router, args, routing):
            if routing.indices is not None:  # else a method on top asked for its scores
                self._record(layer, router, routing)

        return hook

    @torch.no_grad()
    def _record(self, layer, router, routing):
        indices = routing.indices.detach()
        if self._probed is not None:
            self._probed[layer] = indices.clone()
            return
        experts, real = router.num_experts, indices[..., 0] >= 0
        added = {"load": selection_counts(indices, experts), "tokens": real.sum()}
        p = _distribution(routing)
        if p is not None:
            added["entropy"] = torch.where(real, entropy(p), 0.0).sum().double()
        # The layer before in this pass, if it routed the same tokens.
        before, top1 = self._top1
        if before is not None and before < layer and top1.shape == real.shape:
            added["table"] = contingency_table(top1, indices[..., 0], experts)
        self._top1 = (layer, indices[..., 0])
        window = self._window.setdefault(layer, {})
        for name, value in added.items():
            window[name] = window[name] + value if name in window else value

    def probe(self, run: Callable[[], object]) -> None:
        """Calls `run()`, a forward of the model on a fixed batch, apart from the window.

        The model is in evaluation meanwhile: no state of training moves, no noise is drawn.
        """
        probed = self._probed = {}
        try:
            with torch.no_grad(), _evaluating(self._model):
                run()
        finally:
            self._probed = None
        self._probes.append(probed)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves a forward out, such as one that evaluates."""
        self._probed = {}
        try:
            yield
        finally:
            self._probed = None

    def end_window(self) -> None:
        """Keeps what was collected since the last window, with the graphs of experts."""
        for layer, router in enumerate(self._routers):
            graph = getattr(router, "adjacency", None)
            if graph is not None and layer in self._window:
                self._window[layer]["adjacency"] = graph.detach().clone()
        self._windows.append(self._window)
        self._window = {}

    def history(self) -> dict[str, list[list[Any]]]:
        """Lists over windows (or pairs of probes) of lists over the layers that ran.

        `load` [E] as shares, `load_std` in percentage points, `entropy` in
        nats, `instability`, `fluctuation`, `adjacency` [E, E]; None where a
        router has no such thing.
        """
        history = {}
        for name, read in _OF_WINDOWS.items():
            history[name] = [
                [self._read(read, window[layer]) for layer in sorted(window)]
                for window in self._windows
            ]
        history["fluctuation"] = [
            [_fluctuation(before[layer], after[layer]) for layer in sorted(after)]
            for before, after in zip(self._probes, self._probes[1:])
        ]
        return history

    def write(self, writer: "SummaryWriter", step: int, prefix: str = "routing") -> None:
        """Writes the newest window, and the newest pair of probes, for TensorBoard.

        Each layer has the scalars `load_std`, `entropy`, `instability` and `fluctuation`, in the
        units of `history()`; what a router does not have is left out. The histogram `load` has a
        bar for each expert: how often it was chosen, expert `e` from `e - 0.5` to `e + 0.5`.
        A tag is `prefix`, the name of the router in the model, and the metric, as in
        `routing/layers.0.router/entropy`. Values are read from the device.

        Args:
            writer: a `torch.utils.tensorboard.SummaryWriter`, or what has its `add_scalar` and
                `add_histogram_raw`.
            step: the number on the x-axis, such as that of optimizer steps.
            prefix: the first part of each tag.

        Raises:
            ValueError: no window has ended.

        >>> monitor = RoutingMonitor(model)
        >>> y = model(torch.randn(64, 16))
        >>> monitor.end_window()
        >>> monitor.write(SummaryWriter("runs"), step=1)
        """
        if not self._windows:
            raise ValueError("RoutingMonitor.write: expected a window that has ended, found none; "
                             "call end_window() before")
        for layer, window in self._windows[-1].items():
            tag = f"{prefix}/{self.names[layer] or 'router'}"
            for name in ("load_std", "entropy", "instability"):
                value = self._read(_OF_WINDOWS[name], window)
                if value is not None:
                    writer.add_scalar(f"{tag}/{name}", value, step)
            writer.add_histogram_raw(f"{tag}/load", **_bars(window["load"]), global_step=step)
        if len(self._probes) > 1:
            before, after = self._probes[-2:]
            for layer in sorted(set(before) & set(after)):
                writer.add_scalar(f"{prefix}/{self.names[layer] or 'router'}/fluctuation",
                                  _fluctuation(before[layer], after[layer]), step)

    @staticmethod
    def _read(read, window):
        try:
            return read(window)
        except KeyError:
            return None


# What is read of what a window added up.
_OF_WINDOWS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "load": lambda w: (w["load"] / w["load"].sum().clamp(min=1)).tolist(),
    "load_std": lambda w: float(_load_std(w["load"])),
    "entropy": lambda w: float(w["entropy"] / w["tokens"].clamp(min=1)),
    "instability": lambda w: float(_instability(w["table"])),
    "adjacency": lambda w: w["adjacency"].cpu(),
}


def _bars(counts):
    """A histogram of expert numbers, one bar each, from how often each was chosen."""
    counts = counts.cpu().double()
    experts = torch.arange(len(counts), dtype=torch.double)
    return dict(min=0, max=len(counts) - 1, num=int(counts.sum()), sum=float(counts @ experts),
                sum_squares=float(counts @ experts**2), bucket_limits=(experts + 0.5).tolist(),
                bucket_counts=counts.tolist())


def _fluctuation(before, after):
    """Of the tokens that chose experts in either probe: others are padding (E10)."""
    real = ((before >= 0) | (after >= 0)).any(dim=-1)
    return float(fluctuation_rate(before, after, mask=real))


@contextlib.contextmanager
def _evaluating(model):
    """The model in evaluation; each module is in its own mode again afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:  # parents first, whose mode their parts take over
            if module.training != training:
                module.train(training)


def _distribution(routing):
    """Routing scores before the selection as probabilities, None where there are none."""
    if routing.probs is not None:
        # Smoothed over a graph they do not sum to 1.
        p = routing.probs.clamp(min=0)
        return p / p.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)
    return None if routing.logits is None else routing.logits.softmax(dim=-1)
