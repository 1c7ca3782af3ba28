"""Pictures of routing metrics over training: what `RoutingMonitor.history()` holds.

Each function takes `{name: history}` (or one history) and returns a matplotlib
figure; `save_all` writes all of them.
"""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ._support import files

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["adjacency", "entropy_ratio", "fluctuation", "instability", "load", "save_all"]


def __dir__() -> list[str]:
    return sorted(__all__)


def _pyplot():
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            "moe_mlir.plots: expected matplotlib, found none: pip install matplotlib"
        ) from error
    matplotlib.use("Agg", force=False)
    from matplotlib import pyplot

    return pyplot


def _mean(layers):
    """Mean over the layers that have the metric, NaN without any."""
    known = [x for x in layers if x is not None]
    return sum(known) / len(known) if known else float("nan")


def _over_windows(histories, metric, label):
    """One line a method: the mean over the layers against the window."""
    figure, axis = _pyplot().subplots(figsize=(6, 3.5))
    for name, history in histories.items():
        values = [_mean(layers) for layers in history[metric]]
        axis.plot(range(1, len(values) + 1), values, marker="o", markersize=3, label=name)
    axis.set(xlabel="window", ylabel=label)
    axis.legend(fontsize=7)
    figure.tight_layout()
    return figure


def fluctuation(histories: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Share of tokens whose experts changed between probes (P0 Fig. 2, 3)."""
    return _over_windows(histories, "fluctuation", "fluctuation rate")


def instability(histories: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Share of token pairs that stay together in one of two layers only (P3 Fig. 5)."""
    return _over_windows(histories, "instability", "router instability")


def entropy_ratio(histories: Mapping[str, Mapping[str, Any]], baseline: str) -> Figure:
    """Entropy of each layer in the last window over that of the method `baseline` (P0 Fig. 2)."""
    figure, axis = _pyplot().subplots(figsize=(6, 3.5))
    base = histories[baseline]["entropy"][-1]
    for name, history in histories.items():
        layers = history["entropy"][-1]
        if any(value is None for value in layers):
            continue
        ratio = [value / b if b else float("nan") for value, b in zip(layers, base)]
        axis.plot(range(len(ratio)), ratio, marker="o", markersize=3, label=name)
    axis.axhline(1, color="gray", linewidth=0.8)
    axis.set(xlabel="layer", ylabel=f"entropy over that of {baseline}")
    axis.legend(fontsize=7)
    figure.tight_layout()
    return figure


def load(history: Mapping[str, Any], title: str = "") -> Figure:
    """Share of the assignments of each layer's experts in the last window (P4 Fig. 5)."""
    layers = history["load"][-1]
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(
        1, len(layers), figsize=(3 * len(layers), 2.8), sharey=True, squeeze=False
    )
    for layer, (axis, shares) in enumerate(zip(axes[0], layers)):
        axis.bar(range(len(shares)), shares)
        axis.axhline(1 / len(shares), color="gray", linewidth=0.8)
        axis.set(title=f"layer {layer}", xlabel="expert")
    axes[0][0].set_ylabel("share of assignments")
    figure.suptitle(title)
    figure.tight_layout()
    return figure


def adjacency(history: Mapping[str, Any], title: str = "", windows: int = 4) -> Figure:
    """Heat maps of the graph of experts: a row a layer, from the first to the last window."""
    kept = [w for w in history["adjacency"] if any(a is not None for a in w)]
    if not kept:
        raise ValueError("adjacency: expected a history with a graph of experts, found none")
    step = max(1, (len(kept) - 1) // max(1, windows - 1))
    chosen = sorted({*range(0, len(kept), step), len(kept) - 1})
    rows = len(kept[0])
    figure, axes = _pyplot().subplots(
        rows, len(chosen), figsize=(2.2 * len(chosen) + 0.8, 2.2 * rows), squeeze=False
    )
    largest = max(float(a.max()) for w in kept for a in w if a is not None)
    for column, window in enumerate(chosen):
        for layer, graph in enumerate(kept[window]):
            axis = axes[layer][column]
            axis.set(xticks=[], yticks=[], title=f"layer {layer}, window {window + 1}")
            axis.title.set_fontsize(8)
            if graph is not None:
                image = axis.imshow(graph.numpy(), vmin=0, vmax=largest or 1)
    figure.colorbar(image, ax=axes, shrink=0.7)
    figure.suptitle(title)
    return figure


def save_all(
    folder: str | os.PathLike[str],
    histories: Mapping[str, Mapping[str, Any]],
    *,
    baseline: str,
) -> list[pathlib.Path]:
    """Writes every picture that the histories hold as PNG; returns the paths."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []

    def save(stem, figure):
        paths.append(folder / f"{re.sub('[^a-z0-9]+', '-', stem.lower())}.png")
        with files.replacing(paths[-1], "wb") as file:
            figure.savefig(file, dpi=110, format="png")
        _pyplot().close(figure)

    save("fluctuation", fluctuation(histories))
    save("instability", instability(histories))
    save("entropy-ratio", entropy_ratio(histories, baseline))
    for name, history in histories.items():
        save(f"load-{name}", load(history, name))
        if any(graph is not None for window in history["adjacency"] for graph in window):
            save(f"adjacency-{name}", adjacency(history, name))
    return paths
