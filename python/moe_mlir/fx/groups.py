"""Selections that are limited to the best groups of experts.

A mask that is built from a top-k over groups, and written into the scores of
all other experts, is the op's `n_group`, `topk_group` and `group_score`:

    group_scores = sum(topk(view(c, [.., groups, size]), 2)) | max(view(c, ..))
    mask = scatter(zeros, topk(group_scores, topk_group).indices, 1)
    c = masked_fill(c, ~reshape(expand(unsqueeze(mask))), -inf)
"""

from torch.fx import Node

from .patterns import (CASTS, VIEWS, argument, aten, exactly, filled_with, is_call, is_last_dim,
                       item, masked, through, value)

_SCATTERS = (aten.scatter.value, aten.scatter_.value, aten.scatter.src, aten.scatter_.src)
_NEGATIONS = (aten.bitwise_not.default, aten.logical_not.default)
_SHAPES = VIEWS | {aten.expand.default, aten.clone.default, aten.contiguous.default}
# What a dropped expert's score must be so that it loses against any other.
_LOWEST = -3.0e38


def peel_groups(site, node: Node) -> Node:
    """Scores with the experts of other groups masked out -> the scores."""
    parts = masked(node)
    if parts is None:
        return node
    base, mask, fill, drops = parts
    site.inner = _selections_behind(mask)
    if not site.inner:
        return node
    base = exactly(base)
    chosen = _chosen_groups(mask, drops)
    if chosen is None or not _score_groups(site, chosen, base):
        site.groups = value(site.inner[0].args[0]).shape[-1]
        site.reject("the mask of the scores is not that of the best groups of neighbours")
        return base
    site.fill = fill
    return base


def check_fill(site) -> None:
    """Dropped experts must lose: -inf does, 0 only against scores that are not negative."""
    fill = site.fill
    if fill is None or fill <= _LOWEST:
        return
    if fill != 0.0 or site.bias is not None or site.score not in ("softmax", "sigmoid"):
        site.reject(f"experts of dropped groups are filled with {fill:g}, which can win against "
                    "a score; -inf cannot")


def _selections_behind(mask: Node, limit: int = 64) -> list[Node]:
    """The top-k calls that a group mask is computed from, nearest first."""
    found, queue, seen = [], [mask], set()
    while queue and len(seen) < limit:
        node = queue.pop(0)
        if not isinstance(node, Node) or node in seen:
            continue
        seen.add(node)
        if is_call(node, aten.topk.default):
            found.append(node)
        queue.extend(node.all_input_nodes)
    return found


def _chosen_groups(mask: Node, drops: bool):
    """The scatter that marks groups, where it marks those whose experts stay."""
    marks_dropped, node = drops, mask
    while True:
        if is_call(node, *_NEGATIONS):
            marks_dropped, node = not marks_dropped, node.args[0]
        elif is_call(node, aten.eq.Scalar) and node.args[1] == 0:
            marks_dropped, node = not marks_dropped, node.args[0]
        elif is_call(node, aten.ne.Scalar, aten.gt.Scalar) and node.args[1] == 0:
            node = node.args[0]
        elif is_call(node, *CASTS) or _keeps_neighbours(node):
            node = node.args[0]
        else:
            break
    if not is_call(node, *_SCATTERS) or not is_last_dim(node, node.args[1]):
        return None
    marks = {(0.0, 1.0): False, (1.0, 0.0): True}
    written = marks.get((filled_with(node.args[0]), filled_with(node.args[3])))
    return node if written is not None and written == marks_dropped else None


def _keeps_neighbours(node) -> bool:
    """Whether a mark of a group goes to experts that lie side by side."""
    if is_call(node, aten.unsqueeze.default):
        return is_last_dim(node, node.args[1])
    if is_call(node, aten.repeat_interleave.self_int):
        return is_last_dim(node, argument(node, 2, "dim"))
    return is_call(node, *_SHAPES)


def _score_groups(site, scatter: Node, base: Node) -> bool:
    """Fills in the site's groups, if the scatter marks the best of them."""
    best = item(scatter.args[2], 1)
    if not is_call(best, aten.topk.default) or not _takes_largest(best):
        return False
    totals = best.args[0]
    pairs = item(totals.args[0], 0) if is_call(totals, aten.sum.dim_IntList) else None
    if is_call(pairs, aten.topk.default) and argument(pairs, 1, "k") == 2 \
            and _takes_largest(pairs) and is_last_dim(totals.args[0], totals.args[1]):
        grouped, kind, inner = pairs.args[0], "top2", [best, pairs]
    else:
        grouped, kind, inner = _largest_of(totals), "max", [best]
    if grouped is None or exactly(through(grouped, VIEWS)) is not base:
        return False
    *_, groups, size = value(grouped).shape
    if groups * size != value(base).shape[-1]:
        return False
    site.groups, site.topk_group, site.group_score = groups, argument(best, 1, "k"), kind
    site.inner = inner
    if is_call(scatter, aten.scatter_.value, aten.scatter_.src):
        site.writes.append(scatter)
    return True


def _takes_largest(topk: Node) -> bool:
    return is_last_dim(topk.args[0], argument(topk, 2, "dim", -1)) \
        and argument(topk, 3, "largest", True) is not False


def _largest_of(node: Node):
    """x, where the node is the largest of x along its last dimension."""
    call = item(node, 0)
    if is_call(call, aten.max.dim) and is_last_dim(call.args[0], call.args[1]):
        return call.args[0]
    if is_call(node, aten.amax.default) and is_last_dim(node.args[0], argument(node, 1, "dim", [])):
        return node.args[0]
    return None
