"""The table and the plots of the main job."""

import pathlib

from moe_mlir._support import files

from .compare import Comparison

_HEADINGS = ("method", "max rel. error", "eager ms", "Inductor ms", "compiled ms", "speed-up",
             "kernels", "registers", "spill bytes")


def table(comparisons: list[Comparison]) -> str:
    rows = [_HEADINGS]
    for c in comparisons:
        rows.append((c.method, f"{c.max_error:.1e}", f"{c.eager_ms:.2f}",
                     "-" if c.inductor_ms is None else f"{c.inductor_ms:.2f}",
                     f"{c.compiled_ms:.2f}", f"{c.speed_up:.2f}x",
                     str(len(c.kernels)), _each(k.registers for k in c.kernels),
                     _each(k.spill_bytes for k in c.kernels)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADINGS))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def _each(values) -> str:
    """One value a kernel; a dash where ptxas was not there to ask."""
    return ", ".join("-" if v is None else str(v) for v in values) or "-"


def plot(folder: pathlib.Path, trained: dict, comparisons: list[Comparison]) -> list[pathlib.Path]:
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    return [_plot_load(pyplot, folder / "expert-load.png", comparisons),
            _plot_entropy(pyplot, folder / "routing-entropy.png", comparisons),
            _plot_loss(pyplot, folder / "loss.png", trained)]


def _plot_load(pyplot, path, comparisons):
    layers = len(comparisons[0].load)
    figure, axes = pyplot.subplots(1, layers, figsize=(4 * layers, 3), sharey=True)
    for layer, axis in enumerate(axes if layers > 1 else [axes]):
        width = 0.8 / len(comparisons)
        for i, c in enumerate(comparisons):
            experts = range(len(c.load[layer]))
            axis.bar([e + i * width for e in experts], c.load[layer], width, label=c.method)
        axis.axhline(1 / len(comparisons[0].load[layer]), color="gray", linewidth=0.8)
        axis.set(title=f"layer {layer}", xlabel="expert")
    figure.axes[0].set_ylabel("share of assignments")
    figure.axes[0].legend()
    return _save(pyplot, figure, path)


def _plot_entropy(pyplot, path, comparisons):
    figure, axis = pyplot.subplots(figsize=(5, 3))
    for c in comparisons:
        axis.plot(range(len(c.entropy)), c.entropy, marker="o", label=c.method)
    axis.set(xlabel="layer", ylabel="mean routing entropy (nats)")
    axis.set_xticks(range(len(comparisons[0].entropy)))
    axis.legend()
    return _save(pyplot, figure, path)


def _plot_loss(pyplot, path, trained):
    figure, axis = pyplot.subplots(figsize=(5, 3))
    for method, t in trained.items():
        axis.plot(t.losses, label=f"{method} (validation {t.validation_loss:.2f})")
    axis.set(xlabel="step", ylabel="training loss (nats a byte)")
    axis.legend()
    return _save(pyplot, figure, path)


def _save(pyplot, figure, path):
    figure.tight_layout()
    with files.replacing(path, "wb") as file:
        figure.savefig(file, dpi=120, format="png")
    pyplot.close(figure)
    return path
