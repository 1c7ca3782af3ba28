"""Selections that are limited to the best groups of experts.

A mask that is built from a top-k over groups, and written into the scores of
all other experts, is the op's `n_group`, `topk_group` and `group_score`:

    group_scores = sum(topk(view(c, [.., groups, size]), 2)) | max(view(c, ..))
    mask = scatter(zeros, topk(group_scores, topk_group).indices, 1)
    c = masked_fill(c, ~reshape(expand(unsqueeze(mask))), -inf)
"""

from torch.fx import Node

from .patterns import (
    CASTS,
    NEGATIONS,
    VIEWS,
    aten,
    exactly,
    filled_with,
    is_last_dim,
    item,
    masked_alone,
    same_sizes,
    through,
)
from .reading import is_call, read, source, value
from .site import Site

_SCATTERS = (aten.scatter.value, aten.scatter_.value, aten.scatter.src, aten.scatter_.src)
_COPIES = {aten.clone.default, aten.contiguous.default}
# What a dropped expert's score must be so that it loses against any other.
_LOWEST = -3.0e38


def peel_groups(site: Site, node: Node) -> Node:
    """Scores with the experts of other groups masked out -> the scores."""
    parts = masked_alone(node)
    if parts is None:
        return node
    base, mask, fill, drops = parts
    site.inner = _selections_behind(mask)
    if not site.inner:
        return node
    base = exactly(base)
    chosen = _chosen_groups(mask, drops)
    if chosen is None or not _score_groups(site, chosen, base):
        site.groups = value(source(site.inner[0])).shape[-1]
        site.reject("the mask of the scores is not that of the best groups of neighbours")
        return base
    site.fill = fill
    return base


def check_fill(site: Site) -> None:
    """Dropped experts must lose: -inf does, 0 only against scores that are not negative."""
    fill = site.fill
    if fill is None or fill <= _LOWEST:
        return
    if fill != 0.0 or site.bias is not None or site.score not in ("softmax", "sigmoid"):
        site.reject(f"experts of dropped groups are filled with {fill:g}, which can win against "
                    "a score; -inf cannot")


def _selections_behind(mask: Node, limit: int = 64) -> list[Node]:
    """The top-k calls that a group mask is computed from, nearest first."""
    found: list[Node] = []
    queue, seen = [mask], set[Node]()
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
        compared = read(node, {aten.eq.Scalar, aten.ne.Scalar, aten.gt.Scalar}, "other")
        if read(node, NEGATIONS):
            marks_dropped = not marks_dropped
        elif compared and compared.other == 0:
            marks_dropped ^= is_call(node, aten.eq.Scalar)
        elif not read(node, CASTS, "dtype", "other") and not _keeps_neighbours(node):
            break
        node = source(node)
    scatter = read(node, _SCATTERS, "dim", "index", "value", "src")
    if scatter is None or not is_last_dim(node, scatter.dim):
        return None
    mark = scatter.src if scatter.value is None else scatter.value
    wanted = (1.0, 0.0) if marks_dropped else (0.0, 1.0)
    return node if (filled_with(scatter.source), filled_with(mark)) == wanted else None


def _keeps_neighbours(node) -> bool:
    """Whether a mark of a group goes to experts that lie side by side."""
    unsqueezed = read(node, {aten.unsqueeze.default}, "dim")
    if unsqueezed is not None:
        return is_last_dim(node, unsqueezed.dim)
    repeated = read(node, {aten.repeat_interleave.self_int}, "repeats", "dim", "output_size")
    if repeated is not None:
        return is_last_dim(node, repeated.dim)
    expanded = read(node, {aten.expand.default, aten.expand_as.default}, "size", "other")
    if expanded is not None:
        # Along any other dim than the last, marks of all groups would take turns.
        return same_sizes(expanded.source, node, slice(0, -1))
    return is_call(node, *VIEWS) or read(node, _COPIES) is not None


def _score_groups(site, node: Node, base: Node) -> bool:
    """Fills in the site's groups, if the scatter `node` marks the best of them."""
    index = read(node, _SCATTERS, "dim", "index", "value", "src").index
    best = _largest_k(item(index, 1))
    if best is None:
        return False
    total = read(best.source, {aten.sum.dim_IntList}, "dim", "keepdim")
    pairs = _largest_k(item(total.source, 0)) if total and not total.keepdim \
        and is_last_dim(total.source, total.dim) else None
    if pairs is not None and pairs.k == 2:
        grouped, kind, inner = pairs.source, "top2", [best.node, pairs.node]
    else:
        grouped, kind, inner = _largest_of(best.source), "max", [best.node]
    if grouped is None or exactly(through(grouped, VIEWS)) is not base:
        return False
    *_, groups, size = value(grouped).shape
    if groups * size != value(base).shape[-1] or value(node).shape[-1] != groups \
            or not isinstance(best.k, int):
        return False
    site.groups, site.topk_group, site.group_score = groups, best.k, kind
    site.inner = inner
    if is_call(node, aten.scatter_.value, aten.scatter_.src):
        site.writes.append(node)
    return True


def _largest_k(node):
    """The call of a top-k that takes the largest along the last dim; None for another."""
    call = read(node, {aten.topk.default}, "k", "dim", "largest", "sorted")
    if call is None or not call.largest or not is_last_dim(call.source, call.dim):
        return None
    call.node = node
    return call


def _largest_of(node: Node):
    """x, where the node is the largest of x along its last dimension."""
    call = read(item(node, 0), {aten.max.dim}, "dim", "keepdim") \
        or read(node, {aten.amax.default}, "dim", "keepdim")
    if call is None or call.keepdim or not is_last_dim(call.source, call.dim):
        return None
    return call.source
