"""What topk_renorm means, in float64 and one row at a time.

Written from the specification alone, so that it shares no idea with the
kernels: a full sort where they select, a loop where they shuffle.
"""

import math

import numpy as np


def score_row(x: np.ndarray, function: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        if function == "none":
            return x.copy()
        if function == "sigmoid":
            return np.where(x >= 0, 1 / (1 + np.exp(-x)), np.exp(x) / (1 + np.exp(x)))
        if function == "sqrtsoftplus":
            return np.sqrt(np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))))
        highest = x.max()
        if highest == -math.inf:
            return np.zeros_like(x)
        weights = np.exp(x - highest)
        return weights / weights.sum()


def order(choice: np.ndarray) -> np.ndarray:
    """Experts by value descending, then index ascending; NaN after -inf."""
    keys = [
        (1, 0.0, e) if math.isnan(c) else (0, -c, e)
        for e, c in enumerate(choice)
    ]
    return np.array([e for _, _, e in sorted(keys)], dtype=np.int64)


def drop_groups(choice, n_group, topk_group, group_score):
    groups = choice.reshape(n_group, -1)
    if group_score == "max" or groups.shape[1] == 1:
        values = groups.max(axis=1)
    else:
        values = np.sort(groups, axis=1)[:, -2:].sum(axis=1)
    kept = order(values)[:topk_group]
    dropped = np.full_like(groups, -math.inf)
    dropped[kept] = groups[kept]
    return dropped.reshape(-1)


def choice_row(x, form) -> np.ndarray:
    """The choice scores c."""
    bias, n_group = form.get("bias"), form.get("n_group", 1)
    if bias is None and n_group == 1:
        return x
    choice = score_row(x, form["score"])
    if bias is not None:
        choice = choice + bias
    if n_group > 1:
        choice = drop_groups(
            choice, n_group, form["topk_group"], form.get("group_score", "top2_sum")
        )
    return choice


def gates_row(x, choice, indices, form) -> np.ndarray:
    """The gates of the selected `indices`."""
    k = len(indices)
    if np.isnan(x).any():
        return np.full(k, math.nan)
    scores = score_row(x, form["score"])
    values = np.array(
        [0.0 if e < 0 or choice[e] == -math.inf else scores[e] for e in indices]
    )
    if form["renorm"]:
        with np.errstate(all="ignore"):
            total = values.sum()
            values = (
                np.zeros(k)
                if total == 0
                else values / (total + form.get("eps", 0.0))
            )
    return values * form.get("route_scale", 1.0)
