"""The table, and which of the papers' directions the runs show."""

import math
import statistics

_METRICS = {
    "loss": ("loss", "{:.3f}"),
    "fluctuation": ("fluctuation", "{:.3f}"),
    "entropy": ("entropy", "{:.3f}"),
    "load std": ("load_std", "{:.2f}"),
    "instability": ("instability", "{:.3f}"),
}


def values(runs, metric):
    """One number a seed, in the order of the seeds; None where the method has none."""
    field, _ = _METRICS[metric]
    return [getattr(run, field) for run in sorted(runs, key=lambda r: r.seed)]


def table(results):
    """`results`: {method: [Run, one a seed]}."""
    rows = [("method", *_METRICS, "entropy ratio", "router share", "s a run")]
    baseline = next(iter(results.values()))
    for name, runs in results.items():
        cells = [name]
        for metric, (_, form) in _METRICS.items():
            cells.append(_spread(values(runs, metric), form))
        ratio = [
            a / b if a is not None and b else None
            for a, b in zip(values(runs, "entropy"), values(baseline, "entropy"))
        ]
        cells.append(_spread(ratio, "{:.2f}"))
        cells.append(f"{statistics.mean(r.router_share for r in runs):.0%}")
        cells.append(f"{statistics.mean(r.seconds for r in runs):.0f}")
        rows.append(tuple(cells))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def _spread(numbers, form):
    """Mean and deviation over the seeds."""
    if any(x is None for x in numbers):
        return "-"
    mean = form.format(statistics.mean(numbers))
    if len(numbers) == 1:
        return mean
    return f"{mean} +-{form.format(statistics.stdev(numbers))}"


def verdict(claim, runs, against):
    """(word, differences a seed): seeds are paired, as they share data and initial weights.

    Of the weights those of all but the routers (`model.py`).

    "shows" or "does not show: opposite" only if all seeds agree in sign and the
    mean difference exceeds twice its standard error.
    """
    metric, direction = claim[0], claim[1]
    pairs = list(zip(values(runs, metric), values(against, metric)))
    if any(a is None or b is None for a, b in pairs):
        return "not measured", []
    sign = -1 if direction == "lower" else 1
    gains = [sign * (a - b) for a, b in pairs]
    mean = statistics.mean(gains)
    if len(gains) < 2:
        return "one seed: no verdict", gains
    error = statistics.stdev(gains) / math.sqrt(len(gains))
    if all(g > 0 for g in gains) and mean > 2 * error:
        return "shows", gains
    if all(g < 0 for g in gains) and mean < -2 * error:
        return "opposite", gains
    return "undecided", gains


def directions(methods, results):
    """A line a claim, those that show first."""
    lines = []
    for method in methods:
        for claim in method.claims:
            metric, direction, against, source = claim
            if method.name not in results or against not in results:
                continue
            word, gains = verdict(claim, results[method.name], results[against])
            form = _METRICS[metric][1]
            sign = -1 if direction == "lower" else 1
            changes = ", ".join(f"{sign * g:+{form[2:-1]}}" for g in gains)
            lines.append(
                (word, f"{word:20} {method.name}: {direction} {metric} than {against} ({source})"
                       f"; by seed: {changes or '-'}")
            )  # fmt: skip
    order = ["shows", "opposite", "undecided", "one seed: no verdict", "not measured"]
    lines.sort(key=lambda line: order.index(line[0]))
    counts = {word: sum(w == word for w, _ in lines) for word in order}
    closing = ", ".join(f"{word} {n}" for word, n in counts.items() if n)
    return "\n".join([*(text for _, text in lines), f"of {len(lines)} claims: {closing or 'none'}"])
