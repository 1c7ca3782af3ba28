"""The matrix of bases and methods, generated from the classes, and each cell's meaning in float64.

A meaning is composed of plain torch and of `moe_mlir.reference`, by the parts'
own definitions; nothing here asks a router how it composes.
"""

import dataclasses
import math

import torch
from methods import D, E, K, attention, normal, previous

from moe_mlir import nn, reference

ABSTRACT = (nn.Router, nn.LinearRouter, nn.ComposedRouter)
ROUTERS = sorted(
    (
        c
        for c in (getattr(nn, name) for name in nn.__all__)
        if isinstance(c, type) and issubclass(c, nn.Router) and c not in ABSTRACT
    ),
    key=lambda c: c.__name__,
)
METHODS = [c for c in ROUTERS if issubclass(c, nn.ComposedRouter)]

# Sizes and values at which every part shows.
OPTIONS = {
    nn.ACMoE: dict(mix=2),
    nn.AttentionSMoE: dict(learn_sigma=True, sigma=2.0),
    nn.DeepSeekV3Router: dict(n_group=4, topk_group=2, route_scale=2.5),
    nn.DynamicTopP: dict(theta=0.11, learn_theta=True, straight_through=True),
    nn.HyperRouter: dict(d_embedding=5, d_hidden=7),
    nn.SMoEDropout: dict(route_scale=1.5),
    nn.SimilaritySMoE: dict(tau=4.0, learn_tau=True, similarity=True),
    nn.SymphonySMoE: dict(init="uniform"),
    nn.TwoStageStableMoE: dict(vocabulary=20),
    nn.XMoE: dict(tau=0.3, learn_tau=True),
}
INPUTS = {
    nn.ACMoE: previous,
    nn.AttentionSMoE: attention,
    nn.VMoE: lambda: dict(noise=normal(2, 9, E, seed=3) / E),
}
CAUSAL = (nn.AttentionSMoE, nn.SimilaritySMoE)
K_OF = {nn.Switch: 1, nn.TwoStageStableMoE: 1}


def make(cls, *, base=None, causal=True, impl="moe", k=None):
    k = k or (base.k if base is not None else K_OF.get(cls, K))
    options = dict(OPTIONS.get(cls, {}), impl=impl)
    options |= dict(causal=causal) if cls in CAUSAL else {}
    router = cls(D, E, k, **options) if base is None else cls(D, E, k, base=base, **options)
    if cls is nn.DeepSeekV3Router:
        router.bias.copy_(0.2 * normal(E, seed=12))
    return router


def stack(classes, *, causal=True, impl="moe"):
    """The router of `classes`, the outermost first."""
    torch.manual_seed(0)
    router = None
    for cls in reversed(classes):
        router = make(cls, base=router, causal=causal, impl=impl)
    return router


def operands(classes):
    """Inputs of the stacked router; one that two levels have is prefixed in the inner one."""
    inputs, seen = {}, {}
    for cls in classes:
        for name, value in INPUTS.get(cls, dict)().items():
            depth = seen.setdefault(name, 0)
            seen[name] += 1
            # Each level sees other values, so that none can stand in for another.
            value = value if depth == 0 or not value.is_floating_point() else 0.7 * value
            inputs["base_" * depth + name] = value
    return inputs


# Deeper stacks, of everything that carries, counts, or selects by a rule of its own.
TOWERS = [
    (nn.DynamicTopP, nn.SymphonySMoE, nn.SimilaritySMoE, nn.ACMoE),
    (nn.SymphonySMoE, nn.SymphonySMoE, nn.AttentionSMoE, nn.XMoE),
    (nn.SimilaritySMoE, nn.DynamicTopP, nn.DeepSeekV3Router),
    (nn.AttentionSMoE, nn.SymphonySMoE, nn.AttentionSMoE, nn.DeepSeekV3Router),
    (nn.SymphonySMoE, nn.SimilaritySMoE),
]


def name_of(classes):
    return "-".join(c.__name__ for c in classes)


# ------------------------------------------------------------------ float64 meanings


@dataclasses.dataclass
class Meaning:
    """Scores, logits and counters of one level; `own` are the classes from it inwards."""

    p: torch.Tensor
    z: torch.Tensor
    own: tuple
    weights: dict
    state: dict = dataclasses.field(default_factory=dict)
    counters: dict = dataclasses.field(default_factory=dict)


def weights_of(router):
    """float64 copies of parameters and buffers; the parameters are leaves."""
    parameters = {n: p.detach().double().requires_grad_() for n, p in router.named_parameters()}
    return {n: b.double() for n, b in router.named_buffers()} | parameters


def linear(w, h, x):
    z = h @ w["weight"].T + w.get("bias", 0.0)
    return z + x.get("noise", 0.0)


def cosine(w, h, x):
    token = h @ w["omega"].T
    # A padded token is 0; the op's eps keeps it there.
    token, emb = (t / t.norm(dim=-1, keepdim=True).clamp(min=1e-4) for t in (token, w["emb"]))
    return token @ emb.T / w["tau"]


def centroids(w, h, x):
    return h @ (w["emb"] / w["emb"].norm(dim=-1, keepdim=True)).T


def hyper(w, h, x):
    rows = w["w2"] @ torch.relu(w["w1"] @ w["embedding"] + w["b1"]) + w["b2"]
    rows = rows.reshape(E, D + 1)
    return h @ rows[:, :-1].T + rows[:, -1]


def clusters(w, h, x):
    s, _, count = reference.mad_dispersion(
        x["prev_h"].double(), x["prev_indices"][..., 0], E, mask=x["mask"]
    )
    m = reference.dispersion_weights(s, count)
    share = x["prev_gates"].double() / x["prev_gates"].double().sum(-1, keepdim=True)
    metric = (share[..., None] * m[x["prev_indices"]]).sum(-2)
    return (h * metric) @ w["weight"].T


LOGITS = {
    nn.ACMoE: clusters,
    nn.DeepSeekV3Router: lambda w, h, x: h @ w["weight"].T,
    nn.GLaM: linear,
    nn.HyperRouter: hyper,
    nn.SMoE: linear,
    nn.SMoEDropout: linear,
    nn.StableMoE: centroids,
    nn.Switch: linear,
    nn.VMoE: linear,
    nn.XMoE: cosine,
}


def similarity(w, h, inner, x, causal):
    logits = h @ w["ws"] @ h.mT / w["tau"]
    visible = torch.ones(9, 9, dtype=torch.bool).tril() if causal else torch.tensor(True)
    visible = visible.expand(2, 9, 9)
    if x["mask"] is not None:
        visible = visible & x["mask"][:, None, :] & x["mask"][:, :, None]
    weight = torch.where(visible, (logits - logits.detach().amax(-1, keepdim=True)).exp(), 0.0)
    return weight / weight.sum(-1, keepdim=True).clamp(min=1e-300) @ inner.p


def posterior(w, h, inner, x, causal):
    if not causal:
        return posterior_up_to(9, w, inner, x, causal)
    # A token's head is the one of the sequence that ends with it.
    return torch.stack(
        [posterior_up_to(i + 1, w, inner, x, causal)[:, -1] for i in range(9)], dim=1)


def posterior_up_to(n, w, inner, x, causal):
    """What the first n tokens have, as if there were no more."""
    tokens = {name: x[name].double()[..., :n, :] for name in ("q", "k", "attn_output", "v")}
    mask = None if x["mask"] is None else x["mask"][:, :n]
    p, _, lse, _ = reference.attention_posterior(
        **tokens, wo=x["wo"].double(), probs=inner.p[:, :n], causal=causal, mask=mask,
        sigma=w["sigma"], return_lse=True)
    blind = (lse == -math.inf).all(dim=1)
    return torch.where(blind[..., None], inner.p[:, :n], p)


def entropies(x):
    """Of the rows of each head, summed over the real tokens."""
    _, rows = reference.attention_entropy(
        x["q"].double(), x["k"].double(), causal=True, mask=x["mask"])
    return rows.sum(-1)


MIX = {
    nn.AttentionSMoE: posterior,
    nn.DynamicTopP: lambda w, h, inner, x, causal: inner.p,
    nn.SimilaritySMoE: similarity,
    nn.SymphonySMoE: lambda w, h, inner, x, causal: inner.p @ w["adjacency"].T,
}
# Do the method's own gates sum to one? (P0 (11), P3 C.10; P4 Algorithm 1 takes them raw.)
RENORM = {
    nn.AttentionSMoE: True, nn.DynamicTopP: True, nn.SimilaritySMoE: True, nn.SymphonySMoE: False,
}  # fmt: skip
# Gates of their own kind, which a method on top leaves alone.
KEPT = {nn.DeepSeekV3Router: True, nn.DynamicTopP: True, nn.Switch: False}


def meaning(classes, weights, h, mask, inputs, *, causal):
    """The Meaning of a stack, the outermost class first."""
    cls, rest = classes[0], classes[1:]
    here = {n: v for n, v in weights.items() if not n.startswith("base.")}
    x = {**{n: v for n, v in inputs.items() if not n.startswith("base_")}, "mask": mask}
    if not rest and cls not in MIX:
        z = LOGITS[cls](here, h, x)
        p = z.sigmoid() if cls is nn.DeepSeekV3Router else z.softmax(-1)
        state = {"prev_h": h} if cls is nn.ACMoE else {}
        return Meaning(p, z, classes, weights, state)
    if rest:
        below = {n.removeprefix("base."): v for n, v in weights.items() if n.startswith("base.")}
        taken = set(INPUTS.get(cls, dict)())
        passed = {n.removeprefix("base_") if n.rsplit("base_")[-1] in taken else n: v
                  for n, v in inputs.items() if n not in taken}  # fmt: skip
        inner = meaning(rest, below, h, mask, passed, causal=causal)
    else:
        z = linear(here, h, {})
        inner = Meaning(z.softmax(-1), z, (nn.SMoE,), here)
    own = Meaning(MIX[cls](here, h, inner, x, causal), inner.z, classes, weights)
    # What a level carries goes by its name, prefixed where the outer level has it, too.
    prefix = "base_" if cls is nn.AttentionSMoE else ""
    own.state = {prefix + n if n.startswith("cached_") else n: v for n, v in inner.state.items()}
    own.counters = {f"base.{n}": v for n, v in inner.counters.items()}
    if cls is nn.AttentionSMoE:
        own.state["cached_probs"] = inner.p
        if causal:
            own.state["cached_entropy"] = entropies(x)
    if cls is nn.SymphonySMoE:
        chosen = choice(inner, inner.p, mask)[1]
        member = torch.zeros(2, 9, E + 1, dtype=torch.int64).scatter(-1, chosen % (E + 1), 1)
        member = member[..., :-1].reshape(-1, E)
        own.counters["co_selections"] = member.T @ member
    return own


def choice(level, p, mask):
    """(gates, indices) that a level chooses by scores p."""
    classes, leaf = level.own, level.own[-1]
    ranked = p
    if leaf is nn.DeepSeekV3Router:
        ranked = p + level.weights["base." * (len(classes) - 1) + "bias"]
        pair = ranked.unflatten(-1, (4, 2)).sum(-1)
        kept = torch.zeros_like(pair).scatter(-1, pair.topk(2).indices, 1.0)
        ranked = torch.where(kept.repeat_interleave(2, -1) > 0, ranked, -math.inf)
    value, indices = ranked.topk(K_OF.get(leaf, K), dim=-1)
    gates, through = p.gather(-1, indices), 1.0
    if nn.DynamicTopP in classes:
        theta = level.weights["base." * classes.index(nn.DynamicTopP) + "theta"]
        passed = value.detach() > theta.detach()
        passed[..., 0] = True
        gates, indices = torch.where(passed, gates, 0.0), torch.where(passed, indices, -1)
        through = 1 + theta.detach() - theta
    renorm = RENORM.get(classes[0], classes[0] is not nn.VMoE)
    if next((KEPT[c] for c in classes if c in KEPT), renorm):
        total = gates.sum(-1, keepdim=True)
        gates = gates / total.masked_fill(total == 0, 1.0)
    gates = gates * through * math.prod(OPTIONS.get(c, {}).get("route_scale", 1.0) for c in classes)
    if mask is not None:
        gates = torch.where(mask[..., None], gates, 0.0)
        indices = torch.where(mask[..., None], indices, -1)
    return gates, indices


def loss_of(gates, probs):
    """Every gate and score counts, each with a weight of its own."""
    real = torch.nan_to_num(probs)
    weight = [normal(*t.shape, seed=s).to(t.dtype) for s, t in ((21, gates), (22, real))]
    return (gates * weight[0]).sum() + (real * weight[1]).sum()
