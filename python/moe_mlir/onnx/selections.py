"""Selection by our ops in operators that ONNX has; of equal scores its TopK takes the lower index."""

from __future__ import annotations

import math

import torch

from ..formulas import map_scores, ratio, softmax


def topk_renorm(given):
    """Gates and indices of moe.topk_renorm (docs/Spec.md 3.1)."""
    scores = given.scores.float()
    chosen, indices = scores.topk(given.k)
    if given.kind == "probs":
        gates = chosen.masked_fill(chosen == -math.inf, 0.0)
        gates = ratio(gates, gates.sum(-1, keepdim=True)) if given.renorm else gates
    elif given.renorm:
        gates = softmax(chosen)
    else:
        gates = softmax(scores).gather(-1, indices)
    return _finished(gates, indices, scores, given)


def grouped_topk(given):
    """Those of moe.grouped_topk (docs/Spec.md 9.1), without forced choices and counts of tokens."""
    scores = given.scores.float()
    mapped = map_scores(scores, given.score)
    # Scores rank by themselves where nothing is added to them: functions of them saturate.
    is_plain = given.bias is None and (given.n_group == 1 or given.group_score == "max")
    choice = scores if is_plain else mapped if given.bias is None else mapped + given.bias.float()
    if given.n_group > 1:
        choice = choice.masked_fill(~_kept(choice, given), -math.inf)
    values, indices = choice.topk(given.k)
    gates = _gates(scores, mapped, indices, values == -math.inf, given)
    return _finished(gates, indices, scores, given)


def _kept(choice, given):
    """The experts of the best groups."""
    groups = choice.unflatten(-1, (given.n_group, -1))
    best = 1 if given.group_score == "max" else min(2, groups.shape[-1])
    value = groups.topk(best).values.sum(-1)
    places = value.topk(given.topk_group).indices
    kept = torch.zeros_like(value).scatter(-1, places, 1.0)
    return (kept > 0).unsqueeze(-1).expand(groups.shape).flatten(-2)


def _gates(scores, mapped, indices, outside, given):
    if given.renorm and given.eps == 0 and given.score in ("softmax", "sigmoid"):
        # s / sum s is the softmax of ln s: nothing underflows.
        logs = scores if given.score == "softmax" else torch.nn.functional.logsigmoid(scores)
        return softmax(logs.gather(-1, indices).masked_fill(outside, -math.inf))
    gates = mapped.gather(-1, indices)
    gates = gates.masked_fill(outside | (gates == -math.inf), 0.0)
    return ratio(gates, gates.sum(-1, keepdim=True) + given.eps) if given.renorm else gates


def _finished(gates, indices, scores, given):
    """With the factor; NaN in a row shows in all its gates, and masked tokens have no expert."""
    gates = (gates * given.route_scale).masked_fill(
        scores.isnan().any(-1, keepdim=True), math.nan)
    if given.mask is not None:
        gates = torch.where(given.mask.unsqueeze(-1), gates, 0.0)
        indices = indices.masked_fill(~given.mask.unsqueeze(-1), -1)
    return gates, indices.to(given.index_dtype)


def router_logits(given):
    logits = given.h.float() @ given.weight.float().mT
    return logits if given.bias is None else logits + given.bias.float()
