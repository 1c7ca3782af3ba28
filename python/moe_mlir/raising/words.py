"""What is known of a selection, in words: its form, its ties, and where ours and torch's part."""

from torch.fx import Node

from ..graph.locations import describe, module_path
from .attention import left_of
from .mixing import mixing_of, posterior_of
from .patterns import exactly
from .reading import arguments_given, dtype, source
from .site import RouterMatch, Site, name_of

# The forms that models have (match.py), in few words: for tables.
FORM_NAMES = {
    "F1": "softmax, top-k, renormalise",
    "F2": "top-k, softmax",
    "F3": "softmax, top-k",
    "F4": "sigmoid + bias, top-k",
    "F5": "softmax + bias, top-k",
    "F6": "softmax, groups, top-k",
    "F7": "top-k, sigmoid",
    "F8": "softmax, argmax",
    "F9": "argmax, mask, argmax",
    "F10": "top-k of other scores",
    "F11": "table of experts",
}
_LATE = ("F2", "F7", "topk->sigmoid")


def form_in_words(site: Site) -> str:
    """How the router is written, for people who do not know the forms' codes."""
    best = "the largest" if site.k == 1 else f"the {site.k} largest"
    if site.forced is not None:
        return _forced_in_words(site, best)
    if site.form == "F8":
        return "the largest of a softmax and its position"
    if site.form == "F9":
        return f"{site.k} times the largest logit, with those far from it masked (sparse mixer)"
    if site.form in _LATE:
        spread = ", spread over all experts" if site.dense else ""
        return f"{best} of the logits{spread}, then their {site.score}" + _after(site)
    if site.form == "sort":
        return "a sort over the last dimension"
    if site.form == "argmax":
        return "the position of a maximum"
    if site.score == "none" and site.kind == "logits":
        return f"{best} of what is no score function"
    scores = "probabilities" if site.score in ("probs", "none") else f"a {site.score}"
    bias = " plus a bias" if site.bias is not None else ""
    groups = ""
    if site.groups > 1:
        by = "their two best" if site.group_score.startswith("top2") else "their best"
        groups = f" in the {site.topk_group} best of {site.groups} groups by {by}"
    return f"{best} of {scores}{bias}{groups}" + _after(site)


def _forced_in_words(site, best) -> str:
    chosen = f"{best} of {call_in_words(site.source)}" if site.selects else \
        "the experts that a table names for a token's id" if site.form == "F11" else \
        f"{site.k} given experts"
    scores = "probabilities" if site.kind == "probs" else f"a {site.score}"
    shared = f" together with {site.shared} shared experts" if site.shared else ""
    return f"{chosen}, weighed by {scores}{shared}" + _after(site)


def _after(site) -> str:
    eps = f" + {site.eps:g}" if site.eps else ""
    late = site.form in _LATE
    renorm = f", divided by their sum{eps}" if site.renorm and not late else ""
    return renorm + (f", times {site.scale:g}" if site.scale != 1.0 else "")


def ties_in_words(site: Site) -> str:
    """Which of equal scores is chosen; empty where torch's own call chooses."""
    if site.reason:
        return ""
    if not site.selects and site.forced is not None:
        return ""
    if site.form in ("F8", "F9"):
        return "of equal scores the first is chosen, as torch's argmax does"
    text = "of equal scores the lowest expert is chosen, where torch.topk follows no rule"
    rounded = site.kind == "logits" and site.score in ("softmax", "sigmoid") \
        and site.bias is None and (site.groups == 1 or site.group_score == "max") \
        and site.form not in _LATE and site.forced is None
    if rounded:
        text += f"; logits that differ are told apart where their {site.score} rounds to one number"
    kind = dtype(site.scores if site.forced is None else site.source)
    if kind.itemsize == 2:
        text += f"; scores from {str(kind).removeprefix('torch.')} logits tie often"
    return text


def edges_in_words(site: Site) -> tuple[str, ...]:
    """Where a raised router is more careful than torch (docs/Spec.md E3 to E7, 9.1)."""
    if site.reason:
        return ()
    found = ["a row with a NaN has NaN in all its gates"]
    if site.kind == "logits" and site.score == "softmax":
        found.append("a row of -inf alone has gates 0, where torch has NaN")
    elif site.renorm and not site.eps:
        found.append("chosen scores whose sum is 0 have gates 0, where torch has NaN")
    if site.forced is not None:
        found.append("a NaN in what is selected from is chosen last, where torch chooses it first"
                     if site.selects else
                     "an id that is no expert's has gate 0, where torch raises an error")
    if site.bias is not None or site.groups > 1:
        found.append("an expert that is chosen at -inf, for want of others, has gate 0")
    return tuple(found)


def call_in_words(node: Node, depth: int = 2) -> str:
    """The call that made a node: its operator, what its arguments say beside tensors, of what."""
    node = exactly(node)
    if node.op != "call_function":
        return "an input of the graph"
    written = node.meta.get("original_aten", node.target)
    if hasattr(written, "_opname") and str(written) != str(node.target):
        return written._opname  # the node is a step of its decomposition
    name = str(getattr(node.target, "_opname", None) or getattr(node.target, "__name__", node.target))
    name = name.lstrip("_")
    given = [f"{key}={text}" for key, text in arguments_given(node).items() if text is not False]
    call = f"{name}({', '.join(given)})" if given else name
    origin = source(node)
    if depth > 1 and isinstance(origin, Node) and exactly(origin).op == "call_function":
        return f"{call} of {call_in_words(origin, depth - 1)}"
    return call


def scores_in_words(site: Site) -> str:
    """Why what a top-k selects from is not known to be scores of experts."""
    return (f"it selects from {call_in_words(site.scores)}, where a softmax or a sigmoid over the "
            "experts, or either of the selected values, is expected")


def describe_site(site: Site) -> RouterMatch:
    """What users are told of the site."""
    left = "; ".join(filter(None, (site.left, left_of(posterior_of(site.scores)))))
    return RouterMatch(
        module_path(site.anchor), describe(site.anchor).split(" (")[0], site.form, site.score,
        site.k, site.num_experts, site.renorm, site.scale, site.bias is not None,
        site.groups, not site.reason, site.reason, site.eps, site.topk_group,
        site.group_score, _dtype_name(site.scores), _dtype_name(site.gates), left,
        mixing_of(site.scores), form_in_words(site), ties_in_words(site), edges_in_words(site))


def _dtype_name(node) -> str:
    return "" if node is None else name_of(dtype(node))
