"""Programs of routers, drawn at random: the forms that are recognised, then edits.

    python tests/python/raising/router_programs.py --programs 10000 --seed 7

traces each program before dispatch, raises it, and compares what is raised with
eager on rows with ties, NaN, infinities and masks; prints how many were raised.
A program is text, so that a difference is reported as code that anybody can run.
"""

import argparse
import collections
import contextlib
import importlib
import inspect
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch._dynamo.exc import UserError
from torch.fx.experimental.proxy_tensor import make_fx

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import Selections, rounding_of, tied_rows  # noqa: E402

import moe_mlir.frontends.dynamo  # noqa: E402  registers torch.ops.moe
import moe_mlir.importer  # noqa: E402
from moe_mlir import reference  # noqa: E402
from moe_mlir.graph.arguments import bind_arguments  # noqa: E402
from moe_mlir.raising import raise_routing  # noqa: E402

E, N, GROUPS = 8, 8, 4
_G = torch.Generator().manual_seed(0)
# What programs may name beside their logits `z`. As many tokens as experts, so that a tensor of
# the wrong orientation still broadcasts.
CONSTANTS = {
    "torch": torch, "F": F, "E": E, "N": N, "GROUPS": GROUPS,
    "B": torch.linspace(0.4, -0.3, E), "B1": torch.linspace(-0.2, 0.4, E).view(1, E),
    "BT": torch.linspace(0.3, -0.4, E).view(E, 1), "BN": torch.randn(N, E, generator=_G) / 4,
    "BI": torch.arange(E) % 3, "BH": torch.linspace(0.5, -0.5, E, dtype=torch.bfloat16),
    "BD": torch.linspace(0.5, -0.5, E, dtype=torch.float64), "B0": torch.tensor(0.25),
    "A": torch.rand(E, E, generator=_G), "S": torch.tensor(1.5), "EPS": torch.tensor(0.125),
    "M": torch.rand(N, E, generator=_G) < 0.2, "M1": torch.rand(N, 1, generator=_G) < 0.3,
    "L": torch.ones(N, N, dtype=torch.bool).triu(1), "INF": float("inf"),
    # A table of experts by token, the ids of tokens, and scores of further experts.
    "TABLE": torch.rand(16, E, generator=_G).argsort(-1)[:, :3].contiguous(),
    "IDS": torch.randint(0, 16, (N,), generator=_G), "ZS": torch.randn(N, 2, generator=_G),
}


@dataclass(frozen=True)
class Program:
    """`program(z)` returns gates, experts' ids, and what else it uses."""

    text: str
    dtype: torch.dtype

    def function(self):
        scope = dict(CONSTANTS)
        exec(self.text, scope)
        return scope["program"]


# ---- drawing -------------------------------------------------------------------------

# Edits of a tensor `v` of scores [N, E], of what is selected [N, k], or of either.
_ANY = ["{v} = {v}.clone()", "{v} = {v}.contiguous()", "{v} = {v}.detach()", "{v} = {v}.float()",
        "{v} = {v}.to(torch.bfloat16)", "{v} = {v}.to(torch.float16)", "{v} = {v}.double()",
        "{v} = {v}.to(torch.bfloat16).float()", "{v} = {v}.double().float()",
        "{v} = F.dropout({v}, 0.5, training=False)", "{v} = {v} * 1.0", "{v} = {v} + 0.0",
        "{v} = {v} * 0.5", "{v} = -{v}", "{v} = {v}.abs()", "{v} = {v}.clamp(0.05, 0.6)",
        "{v} = {v}.clamp(min=0.1)", "{v} = torch.add({v}, {v}, alpha=0.5)",
        "{v} = torch.sub({v}, B0, alpha=2)", "{v} = {v} * S", "{v} = {v} / 3", "{v} = 1 - {v}",
        "{v}.mul_(0.5)", "{v}.neg_()", "{v}[:, :1].add_(0.25)", "{v}.view(-1)[:3].zero_()",
        "{v}.t().mul_(2)", "kept = {v}.view(-1); kept.mul_(1.5)", "also = {v}.sum()",
        "also = {v} + 1", "also = {v}.clone(); {v}.add_(0.125)", "{v} = {v}.t().contiguous().t()",
        "{v} = torch.cat([{v}[:, 1:], {v}[:, :1]], 1)", "{v} = torch.stack(({v}, {v}))[1]",
        "{v} = torch.cat({v}.chunk(2, 0))", "{v} = {v}.flip(0)", "{v} = {v}.roll(1, -1)",
        "{v} = {v}.view(N // 2, 2, -1).view(N, -1)", "{v} = {v}.reshape(-1).reshape(N, -1)",
        "{v} = {v}.unsqueeze(0).squeeze(0)", "{v} = {v}.type_as(z)", "{v} = {v}.expand(N, -1)",
        "{v} = torch.where({v} > 0.1, {v}, 0.0)", "{v} = torch.where(M1, {v}, 0.5)",
        "{v} = {v}.masked_fill(M1, 0.0)", "{v} = torch.round({v}, decimals=1)"]
_SCORES = ["{v} = {v}.masked_fill(M, -INF)", "{v} = {v}.masked_fill(M, 0.0)",
           "{v} = {v}.masked_fill(M, -1e9)", "{v} = torch.where(M, -INF, {v})",
           "{v} = torch.where(M, {v}, -INF)", "{v} = {v} @ A", "{v} = {v} @ A.t()",
           "{v} = {v}.t()", "{v} = {v} + BT", "{v} = {v}.view(2 * N, -1).softmax(-1).view(N, E)",
           "{v} = {v}.view(2 * N, -1).view(N, E)", "{v} = torch.add({v}, B, alpha=0.5)"]

_BEFORE = ["", "", "", "z = z.masked_fill(M, -INF)", "z = z / 0.5", "z = torch.tanh(z) * 3",
           "z = torch.add(z, B, alpha=2)", "z = z.view(N, E)"]
_SOFTMAX = ["p = F.softmax(z, -1)", "p = F.softmax(z, dim=1)", "p = z.softmax(-1)",
            "p = F.softmax(z, -1, dtype=torch.float32)", "p = F.softmax(z.float(), -1).type_as(z)",
            "p = torch.softmax(z.view(2, N // 2, E), -1).view(N, E)",
            "s = z - z.amax(-1, keepdim=True); p = s.exp() / s.exp().sum(-1, keepdim=True)",
            "s = (z - z.amax(-1, keepdim=True)).exp(); p = s / s.sum(-1, keepdim=True)",
            "s = (z - z.amax(1, True)).exp(); p = s / s.sum(1, keepdim=True, dtype=torch.bfloat16)",
            "p = F.softmax(z, 0)", "p = F.softmax(z, -1, dtype=torch.bfloat16)",
            "p = F.softmax(z, -1, dtype=torch.float64)", "p = z.exp() / z.exp().sum(-1, True)",
            "s = torch.sub(z, z.amax(-1, True), alpha=2).exp(); p = s / s.sum(-1, True)",
            "s = (z - z.amax(-1, True)).exp(); p = torch.div(s, s.sum(-1, True), "
            "rounding_mode='floor')"]
_SIGMOID = ["p = z.sigmoid()", "p = torch.sigmoid(z.float())", "p = F.sigmoid(z).float()",
            "p = z.clone().sigmoid_()"]
_OTHER = ["p = F.softplus(z).sqrt()", "p = z.relu()", "p = F.log_softmax(z, -1)", "p = z.tanh()",
          "p = F.normalize(z.sigmoid(), p=1.0)", "p = 1 / (1 + (-z).exp())"]
_BIASES = ["c = p + B", "c = B + p", "c = p + B1", "c = p + B.view(1, -1)", "c = p + BN",
           "c = p + BT", "c = p + BI", "c = p + BH", "c = p + BD", "c = p + B0", "c = p + 0.25",
           "c = torch.add(p, B, alpha=0.5)", "c = torch.add(B, p, alpha=2)", "c = p - B",
           "c = p * B", "c = torch.add(p, B, alpha=1)", "c = p.clone().add_(B)",
           "c = torch.empty(N, E); torch.add(p, B, out=c)", "c = p.add_(B)",
           "c = p + B.expand(N, E)", "c = p + B + B1", "c = p + F.relu(B)"]
_BEST = ["best = g.topk(2, dim=-1)[0].sum(-1)", "best = g.max(-1).values", "best = g.amax(-1)",
         "best = g.amax(dim=-1)", "best = g.topk(2, -1, False)[0].sum(-1)", "best = g.mean(-1)",
         "best = g.topk(1, dim=-1)[0].sum(-1)", "best = g.topk(2, dim=-1)[0].sum(-1) * 2",
         "best = g.topk(2, dim=-1)[0].sum(-1, dtype=torch.float64)", "best = g.amax(1)[:, :1] + g[..., 0]"]
_MARKS = ["m = torch.zeros_like(best).scatter(1, chosen, 1)",
          "m = torch.zeros_like(best).scatter_(1, chosen, 1)",
          "m = torch.zeros_like(best); m.scatter_(1, chosen, 1.0)",
          "m = torch.zeros(N, GROUPS, dtype=torch.bool).scatter(1, chosen, True)",
          "m = torch.ones_like(best).scatter(1, chosen, 0) == 0",
          "m = torch.zeros_like(best).scatter(1, chosen, 0.5)",
          "m = torch.zeros_like(best).scatter(1, chosen, 1, reduce='add')",
          "m = torch.zeros_like(best).scatter(1, chosen, torch.ones_like(best))",
          "w = torch.zeros_like(best); u = w.view(-1); m = w.scatter_(1, chosen, 1); also = u * 2"]
_SPREADS = ["m = m.unsqueeze(-1).expand(N, GROUPS, E // GROUPS).reshape(N, E)",
            "m = m.repeat_interleave(E // GROUPS, dim=-1)",
            "m = m.unsqueeze(-1).expand_as(g).reshape(N, E)",
            "m = m.unsqueeze(1).expand_as(g.transpose(1, 2)).reshape(N, E)",
            "m = m.view(N, 1, GROUPS).expand(N, E // GROUPS, GROUPS).reshape(N, E)",
            "m = m.unsqueeze(1).expand(N, E // GROUPS, GROUPS).reshape(N, E)",
            "m = m.repeat(1, E // GROUPS)",
            "m = m.view(N, GROUPS, 1).expand(-1, -1, E // GROUPS).reshape(N, E)"]
_MASKINGS = ["c = c.masked_fill(~m.bool(), -INF)", "c = torch.where(m > 0, c, -INF)",
             "c = c.masked_fill(m == 0, 0.0)", "c = torch.where(m.bool(), c, 0.0)",
             "c = c.masked_fill(m.logical_not(), float('-inf'))", "c = c * m",
             "c = c.masked_fill(m.bool(), -INF)", "c = c.masked_fill(~m.bool(), -1e4)",
             "c = torch.where(m > 0, -INF, c)", "c = c.masked_fill(m < 1, -INF)"]
_TOPKS = ["v, i = c.topk({k})", "v, i = torch.topk(c, {k}, dim=-1)", "v, i = c.topk({k}, 1)",
          "v, i = c.topk({k}, dim=-1, sorted=False)", "v, i = torch.topk(c, k={k}, sorted=False)",
          "v, i = c.topk({k}, largest=False)", "v, i = c.topk({k}, dim=0)",
          "v, i = c.sort(-1, descending=True); v, i = v[:, :{k}], i[:, :{k}]",
          "r = c.topk({k}); v, i = r.values, r[1]", "i = c.topk({k})[1]; v = c.topk({k})[0]",
          "v, i = c.topk({k}); i = i.to(torch.int32).long()",
          "v, i = c.topk(c.shape[-1] // 4)"]
_GATES = ["w = v", "w = v", "w = p.gather(-1, i)", "w = p.gather(1, i)", "w = c.gather(1, i)",
          "w = z.gather(1, i)", "w = torch.take_along_dim(p, i, 1)", "w = p.gather(0, i)",
          "w = p[torch.arange(N)[:, None], i]", "w = torch.gather(p, 1, i, sparse_grad=True)",
          "w = p.gather(1, i.flip(1))", "w = p.gather(1, i); also = v"]
_LATE = ["w = F.softmax(v, -1)", "w = v.softmax(dim=1)", "w = v.sigmoid()", "w = F.softmax(v, 0)",
         "w = F.softmax(v, -1, dtype=torch.float32)", "w = F.softmax(v, -1, dtype=torch.bfloat16)",
         "w = F.softmax(v.float(), -1)", "w = F.softmax(v, -1, dtype=torch.float64)",
         "w = F.log_softmax(v, -1)", "w = F.softmax(v, -1); also = v * 2", "w = v.sigmoid_()"]
_DENSE = ["d = torch.full_like(z, -INF).scatter(1, i, v)",
          "d = torch.full_like(z, -INF).scatter_(1, i, v)",
          "d = torch.full_like(z, -INF); d.scatter_(1, i, v)",
          "d = torch.full_like(z, -1e9).scatter(1, i, v)", "d = torch.zeros_like(z).scatter(1, i, v)",
          "d = torch.full_like(z, -INF).scatter(0, i, v)",
          "d = torch.full_like(z, -INF).scatter(1, i, v * 1)",
          "b = torch.full_like(z, -INF); u = b.view(-1); d = b.scatter_(1, i, v); also = u"]
_DENSE_SCORES = ["w = torch.sigmoid(d)", "w = F.softmax(d, -1)", "w = torch.sigmoid(d.float())",
                 "w = F.softmax(d, 0)", "w = F.softmax(d, -1, dtype=torch.bfloat16)"]
# What is selected from where the gates are of other scores, and how these are looked up.
_RAW = ["c = z + B", "c = z.sigmoid() + B", "c = z + BN", "c = B1 + z", "c = z.tanh()", "c = z + BT",
        "c = z * B", "c = F.softplus(z)", "c = z.sigmoid().masked_fill(M, 0.0) + B", "c = -z",
        "c = z[:, :E // 2] + 1", "c = z.double() + B", "c = z.flip(1)", "c = (z * 4).round()"]
_LOOKED_UP = ["w = z.gather(1, i).sigmoid()", "w = z.sigmoid().gather(1, i)",
              "w = F.softmax(z.gather(1, i), -1)", "w = F.softmax(z, -1).gather(-1, i)",
              "w = F.softplus(z).sqrt().gather(1, i)", "w = F.softplus(z.gather(1, i)).sqrt()",
              "w = z.float().gather(1, i).sigmoid()", "w = z.gather(0, i).sigmoid()",
              "w = F.softmax(z.gather(1, i), 0)", "w = z.gather(1, i.flip(1)).sigmoid()",
              "w = z.gather(1, i).tanh()", "w = F.softmax(z.gather(1, i), -1, dtype=torch.bfloat16)",
              "w = z.t().gather(1, i.t()).t().sigmoid()", "w = z.gather(1, i).sigmoid_()",
              "w = F.softplus(z.gather(1, i), beta=2).sqrt()", "s = z.sigmoid(); w = s.gather(1, i); s.mul_(2)",
              "w = F.softmax(z[:, :4], -1).gather(1, i.clamp(max=3))", "w = z.neg().gather(1, i).sigmoid()",
              "w = z.view(2 * N, -1).sigmoid().view(N, E).gather(1, i)"]
_TABLES = ["i = TABLE[IDS]", "i = TABLE[IDS].long()", "i = F.embedding(IDS, TABLE)", "i = TABLE[IDS][:, :2]",
           "i = TABLE[IDS].flip(0)", "i = (TABLE[IDS] + 1) % E", "i = TABLE[:N]", "i = TABLE.t()[:, IDS].t()"]
_JOINED = ["l = F.logsigmoid(torch.cat([z.gather(1, i), s], -1))",
           "l = F.logsigmoid(torch.cat([z.gather(1, i), s], 1))",
           "l = F.logsigmoid(torch.cat([s, z.gather(1, i)], -1))",
           "l = F.log_softmax(torch.cat([z.gather(1, i), s], -1), -1)",
           "l = F.logsigmoid(torch.cat([z.gather(1, i), s * 2], -1))",
           "l = F.logsigmoid(torch.cat([z.gather(1, i), s, s], -1))",
           "l = torch.cat([z.gather(1, i), s], -1)"]
_SHARES = ["w = torch.exp(l - torch.logsumexp(l, -1, keepdim=True))",
           "w = (l - l.logsumexp(1, True)).exp()", "w = torch.exp(l - torch.logsumexp(l, 0, keepdim=True))",
           "w = torch.exp(l - torch.logsumexp(2 * l, -1, keepdim=True))",
           "w = torch.exp(torch.sub(l, torch.logsumexp(l, -1, keepdim=True), alpha=2))",
           "w = torch.exp(torch.logsumexp(l, -1, keepdim=True) - l)"]
_SPLITS = ["a, s = z, ZS", "a = torch.cat([z, ZS.to(z.dtype)], -1); z, s = a[:, :-2], a[:, -2:]",
           "a = torch.cat([z, ZS.to(z.dtype)], -1); z, s = a[:, :E], a[:, E:]",
           "a = torch.cat([z, ZS.to(z.dtype)], -1); z, s = a[:, 1:-1], a[:, -1:]",
           "a = torch.cat([ZS.to(z.dtype), z], -1); z, s = a[:, 2:], a[:, :2]",
           "a = torch.cat([z, ZS.to(z.dtype)], -1); z, s = a[:, :-1], a[:, -2:]"]
_RENORMS = ["", "", "w = w / w.sum(-1, keepdim=True)", "w = w / w.sum(dim=-1, keepdim=True)",
            "w /= w.sum(1, keepdim=True)", "w = w / (w.sum(-1, keepdim=True) + 1e-20)",
            "w = w / (w.sum(-1, keepdim=True) + 0.125)", "w = w / (1e-20 + w.sum(-1, True))",
            "w = w / w.sum(-1, keepdim=True).clamp(min=1e-12)",
            "w = w / w.sum(-1, keepdim=True).clamp(min=0.5)",
            "w = w / w.sum(-1, keepdim=True).clamp(0.1, 0.9)",
            "w = w / w.sum(-1, keepdim=True, dtype=torch.bfloat16)",
            "w = w / w.sum(-1, keepdim=True, dtype=torch.float64)",
            "w = w / w.sum(0, keepdim=True)", "w = w / w.sum()", "w = F.normalize(w, p=1.0, dim=-1)",
            "w = w / (w.sum(-1, keepdim=True) + EPS)", "w = w / (w.sum(-1, keepdim=True) - 0.125)",
            "w = w / torch.add(w.sum(-1, keepdim=True), 0.125, alpha=3)",
            "w = torch.div(w, w.sum(-1, keepdim=True), rounding_mode='floor')",
            "w = w / w.mean(-1, keepdim=True)", "w = w / w.abs().sum(-1, keepdim=True)",
            "w = w.div_(w.sum(-1, keepdim=True)); also = v", "t = w.sum(-1, True); w = t / w",
            "w = w / (w.sum(-1, keepdim=True) * 2)", "u = w[:, :1]; w /= w.sum(-1, True); also = u",
            "w = w / w.sum(-1, keepdim=True).expand(-1, w.shape[1])"]
_SCALES = ["", "", "", "w = w * 2.5", "w = 2.5 * w", "w *= 2.5", "w = torch.mul(w, 2.5)",
           "w = w * S", "w = w / 2", "w = w * w", "w = w * 2", "w = w * -1.5", "w = w + 0.5",
           "w = (w * 2.5).to(z.dtype)", "w = w.mul_(2.5); also = v", "w = 2.5 - w"]
# A NaN has no integer that torch and a compiler agree on.
_CASTS = ["", "", "", "w = w.to(torch.bfloat16)", "w = w.to(z.dtype)", "w = w.double()",
          "w = w.to(torch.float16)", "w = w.float()", "w = w.nan_to_num(0.0, 0.0, 0.0).long()"]
_AFTER = ["", "", "", "p.mul_(2); also = p", "v.mul_(2)", "also = v", "also = p.gather(1, i)",
          "c.zero_(); also = c", "w.mul_(0.5)", "z.add_(1); also = z", "also = i + 1"]
_GREEDY = ["w, i = p.max(-1)", "w, i = p.max(-1, keepdim=True)", "w, i = p.max(-1).values, p.argmax(-1)",
           "w, i = p.amax(-1), p.argmax(dim=-1)", "w, i = p.max(0)", "w, i = p.amax(-1), p.argmax(0)",
           "w, i = p.amax(-1, keepdim=True), p.argmax(-1, keepdim=True)",
           "w, i = p.amax(-1), p.argmin(-1)", "w, i = p.min(-1)", "i = p.argmax(-1); w = p.amax(-1); p.mul_(2)",
           "q = p.to(torch.bfloat16); w, i = q.amax(-1), q.argmax(-1)",
           "i = p.argmax(); w = p.amax(-1)", "i = p.argmax(-1); p.mul_(-1); w = p.amax(-1)"]
_MIXINGS = ["p = F.softmax(x @ x.t() / 2.0, -1) @ p", "p = F.softmax(x @ x.t(), dim=-1) @ p",
            "p = F.softmax((x @ x.t() / 4).masked_fill(L, -INF), -1) @ p",
            "p = torch.softmax((x @ x.t()).masked_fill(L, -1e4), -1) @ p",
            "p = torch.softmax((x @ x.t()).masked_fill(L.t(), -INF), -1) @ p",
            "p = torch.softmax(x @ x, -1) @ p", "p = F.softmax(x @ x.t() / S, -1) @ p",
            "p = F.softmax(torch.div(x @ x.t(), 2, rounding_mode='floor'), -1) @ p",
            "p = F.softmax(x @ x.t(), 0) @ p", "p = p @ F.softmax(A, -1)",
            "p = F.softmax(torch.einsum('ik,jk->ij', x, x), -1) @ p",
            "p = F.softmax((x @ A) @ x.t() * 0.5, -1) @ p"]


class Drawing:
    """Draws one program."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        # Most programs have one edit or none, so that most forms stay recognisable.
        self.odd = self.random.choice((0.0, 0.1, 0.35))
        self.edits = self.random.choice((0.0, 0.04, 0.12))
        self.lines = []

    def __call__(self) -> Program:
        self.pick(_BEFORE)
        self.edit("z", _ANY + _SCORES)
        kind = self.random.choice(("plain", "plain", "bias", "bias", "groups", "late", "dense",
                                   "greedy", "mixed", "forced", "forced", "table", "shared"))
        getattr(self, f"_{kind}")()
        self.pick(_AFTER)
        body = "\n    ".join(line for line in self.lines if line)
        text = (f"def program(z):\n    x, also = z, z.new_zeros(())\n    {body}\n"
                "    return w, i, also\n")
        dtype = self.random.choice((torch.float32,) * 4 + (torch.bfloat16, torch.float16))
        return Program(text, dtype)

    def pick(self, lines, **names):
        """A usual line, which comes first in its list, or an odd one."""
        usual = lines if self.random.random() < self.odd else lines[:max(3, len(lines) // 3)]
        self.lines.append(self.random.choice(usual).format(**names))

    def edit(self, variable, edits):
        if self.random.random() < self.edits:
            self.lines.append(self.random.choice(edits).format(v=variable))

    def _score(self, logits=()):
        usual = self.random.choice((_SOFTMAX, _SIGMOID))
        self.pick(_OTHER if self.random.random() < self.odd / 4 else usual)
        self.edit("p", _ANY + _SCORES)
        self.lines.append("c = p")

    def _select(self):
        self.edit("c", _ANY + _SCORES)
        self.pick(_TOPKS, k=self.random.choice((1, 2, 2, 3)))
        self.edit("v", _ANY)

    def _weigh(self):
        self.edit("w", _ANY)
        self.pick(_RENORMS)
        self.edit("w", _ANY)
        self.pick(_SCALES)
        self.pick(_CASTS)

    def _plain(self):
        self._score()
        self._select()
        self.pick(_GATES)
        self._weigh()

    def _bias(self):
        self._score()
        self.pick(_BIASES)
        self._select()
        self.pick(_GATES[2:])
        self._weigh()

    def _groups(self):
        self._score()
        if self.random.random() < 0.5:
            self.pick(_BIASES)
        self.edit("c", _ANY)
        self.lines.append("g = c.view(N, GROUPS, E // GROUPS)")
        self.pick(_BEST)
        self.edit("best", _ANY)
        self.pick(["chosen = best.topk(2, dim=-1, sorted=False)[1]", "chosen = best.topk(2)[1]",
                   "chosen = best.topk(2, 1)[1]", "chosen = best.topk(2, largest=False)[1]",
                   "chosen = best.topk(1)[1]"])
        for lines in (_MARKS, _SPREADS, _MASKINGS):
            self.pick(lines)
        self._select()
        self.pick(_GATES)
        self._weigh()

    def _late(self):
        self.lines.append("p = c = z")
        self._select()
        self.pick(_LATE)
        self._weigh()

    def _dense(self):
        self.lines.append("p = c = z")
        self._select()
        self.pick(_DENSE)
        self.edit("d", _ANY)
        self.pick(_DENSE_SCORES)
        self._weigh()

    def _forced(self):
        self.lines.append("p = z")
        self.pick(_RAW)
        self._select()
        self.pick(_LOOKED_UP)
        self._weigh()

    def _table(self):
        self.lines.append("p = c = v = z")
        self.pick(_TABLES)
        self.pick(_LOOKED_UP)
        self._weigh()

    def _shared(self):
        self.pick(_SPLITS)
        self.lines.append("p = z")
        self.pick(_RAW)
        self._select()
        self.pick(_JOINED)
        self.edit("l", _ANY)
        self.pick(_SHARES)
        self._weigh()

    def _greedy(self):
        self._score()
        self.lines.append("v = p")
        self.pick(_GREEDY)

    def _mixed(self):
        self._score()
        self.pick(_MIXINGS)
        self.lines.append("c = p")
        self._select()
        self.pick(_GATES)
        self._weigh()


# ---- inputs --------------------------------------------------------------------------


def inputs_of(program: Program, seed: int) -> dict:
    """Logits by what is special about them."""
    generator = torch.Generator().manual_seed(seed)
    plain = torch.randn(N, E, generator=generator)
    tied = torch.randint(-2, 3, (N, E), generator=generator).float() / 2
    odd = torch.randn(N, E, generator=generator)
    odd[0], odd[1, 2], odd[2, 3], odd[3, 1], odd[4] = -torch.inf, torch.nan, torch.inf, -torch.inf, 30
    return {name: z.to(program.dtype) for name, z in
            (("plain", plain), ("tied", tied), ("odd", odd))}


# ---- the meaning of moe ops, without a kernel ----------------------------------------


class Meaning(torch.fx.Interpreter):
    """Runs a raised graph with moe ops as `moe_mlir.reference` defines them, in float64."""

    def run_node(self, node):
        if getattr(node.target, "namespace", "") != "moe":
            return super().run_node(node)
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        bound = vars(bind_arguments(_Call(node.target, args, kwargs)))
        # A learned scalar is an operand of its own.
        bound |= {key.removesuffix("_value"): x for key, x in bound.items()
                  if key.endswith("_value") and x is not None}
        name = node.target._opname
        public = getattr(importlib.import_module(f"moe_mlir.ops.{name}"), "_NAMES", {})
        bound = {public.get(key, key): x for key, x in bound.items()}
        names = inspect.signature(getattr(reference, name)).parameters
        found = getattr(reference, name)(**{
            key: bound[key] for key in bound if key in names
            and (bound[key] is not None or key not in ("num_valid",))})
        narrow = torch.utils._pytree.tree_map(
            lambda x: (x.float() if x.is_floating_point() else x).contiguous(), found)
        if isinstance(node.meta["val"], torch.Tensor):
            return narrow
        return narrow[:len(node.meta["val"])]


@dataclass(frozen=True)
class _Call:
    target: object
    args: tuple
    kwargs: dict


# ---- comparing -----------------------------------------------------------------------


@dataclass
class Outcome:
    """What became of one program: how many sites were raised, and what differs."""

    raised: int
    difference: str = ""


class _Module(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, z):
        return self.function(z)


def trace(function, *inputs):
    traced = make_fx(function, tracing_mode="fake", pre_dispatch=True,
                     _allow_non_fake_inputs=True)(*inputs)
    count = raise_routing(traced)
    traced.graph.lint()
    return count, traced


def _export(function, z):
    module = torch.export.export(_Module(function), (z,)).module()
    return raise_routing(module), module


def _by_backend(function, z):
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=moe_mlir.frontends.dynamo.moe, fullgraph=True,
                             options={"rest": "eager"})
    return trace(function, z)[0], compiled


def _compile(function, z):
    return trace(function, z)[0], moe_mlir.compile(_Module(function), (z,))


# How a program is compiled; what cannot be captured or imported is no difference.
WAYS = {"trace": trace, "export": _export, "backend": _by_backend, "compile": _compile}


def check(program: Program, seed: int, way="trace", kernels=False) -> Outcome:
    function = program.function()
    cases = inputs_of(program, seed)
    try:
        count, run = WAYS[way](function, cases["plain"].clone())
    except (moe_mlir.importer.ImportFailed, torch._dynamo.exc.Unsupported, UserError):
        return Outcome(0)
    if not count:
        return Outcome(0)
    # A top-k that is not raised settles its ties alike; compiled code cannot be watched.
    watched = way in ("trace", "export")
    kernels = kernels or not watched
    if not kernels:
        run = Meaning(run).run
    for name, z in cases.items():
        mine = z.clone()
        with Selections(settle=True) if watched else contextlib.nullcontext():
            found = (*run(mine), mine)
        # Code that a compiler runs may have torch's own order of a sorted=False, or ours.
        texts = [against_eager(function, z, found, settle, kernels)
                 for settle in ((True,) if watched else (False, True))]
        if all(texts):
            return Outcome(count, f"{name} logits: {texts[0]}")
    return Outcome(count)


def against_eager(function, z, found, settle, exact) -> str:
    """Empty, or how what was found differs from what eager computes of the logits."""
    theirs = z.clone()
    with Selections(settle=settle) as selections:
        wanted = (*function(theirs), theirs)
    lost = lost_rows(selections, wanted[0])
    if len(lost) == len(z):
        # A NaN shows in all gates of its row (E3), though a table chose, or a comparison hid it.
        lost |= z.isnan().any(-1)
    if lost.any() and not is_by_row(function, z, wanted[0], lost, settle=settle):
        return ""
    return difference_of(found, wanted, selections, lost, exact=exact)


def lost_rows(selections, gates):
    """Rows whose scores or gates are not all numbers; -inf marks masked experts."""
    rows = gates.shape[0]
    lost = ~gates.reshape(rows, -1).double().isfinite().all(-1)
    for scores in selections.scores():
        if scores.shape[0] == rows:
            flat = scores.reshape(rows, -1).double()
            lost |= (flat.isnan() | (flat == torch.inf)).any(-1) | (flat == -torch.inf).all(-1)
    return lost


def is_by_row(function, z, gates, lost, settle) -> bool:
    """Whether what becomes of the lost rows does not show in the others."""
    if len(lost) != len(z):
        return False
    with Selections(settle=settle):
        others = function(z.masked_fill(lost[:, None], 0.5))[0]
    return torch.equal(others[~lost], gates[~lost])


def difference_of(found, wanted, selections, lost, exact) -> str:
    """Empty, or how gates, ids and the rest of (w, i, also, z) differ from eager's.

    Rows whose selection ties are compared as sets of equal scores where the choice
    differs: logits may be told apart whose scores are equal. Of lost rows Spec 1
    asks for legal ids alone; what their gates are, a test of its own says.
    """
    for ours, eager in zip(found, wanted):
        if ours.dtype != eager.dtype or ours.shape != eager.shape:
            return f"{ours.dtype} {list(ours.shape)} instead of {eager.dtype} {list(eager.shape)}"
    (gates, ids), (eager_gates, eager_ids) = found[:2], wanted[:2]
    rows = gates.shape[0]
    if ids.shape[0] != rows or any(x.shape[0] != rows for x in selections.scores()):
        rows = 0  # a selection of columns: nothing of it may be raised, compare all
    tied = tied_rows(selections, rows, 0 if exact else 4)
    if rows == 0:
        return "" if same(gates, eager_gates) and torch.equal(ids, eager_ids) else "columns"
    for row in range(rows):
        choice = gates[row], ids[row], eager_gates[row], eager_ids[row]
        if lost[row]:
            right = ((0 <= ids[row]) & (ids[row] < E)).all()
        else:
            right = selections.same_choice(*choice) or \
                tied[row] and selections.same_scores(ids[row], row)
        if not right:
            kind = "lost" if lost[row] else "tied" if tied[row] else "plain"
            ours, mine, eager, theirs = (x.tolist() for x in choice)
            return f"{kind} row {row}: {ours} for {mine} instead of {eager} for {theirs}"
    if not (tied | lost).any():
        for ours, eager in zip(found[2:], wanted[2:]):
            if not same(ours, eager):
                return f"another result: {ours.tolist()} instead of {eager.tolist()}"
    return ""


def same(ours, eager) -> bool:
    if not ours.is_floating_point():
        return torch.equal(ours, eager)
    rounding = max(rounding_of(eager), 2.0 ** -22)
    return torch.allclose(ours.double(), eager.double(), rtol=2 * rounding, atol=2 * rounding,
                          equal_nan=True)


# ---- the command ---------------------------------------------------------------------


def draw(seed: int) -> Program:
    """The first program from the seed on that eager can run."""
    for attempt in range(100):
        program = Drawing(f"{seed}.{attempt}")()
        try:
            with torch.no_grad():
                w, i, _ = program.function()(inputs_of(program, 0)["plain"])
            if isinstance(w, torch.Tensor) and isinstance(i, torch.Tensor) and w.dim() and i.dim():
                return program
        except (RuntimeError, TypeError, IndexError):
            continue
    raise RuntimeError(f"expected a program that runs among 100 of seed {seed}, found none")


def run(count: int, seed: int, way="trace", kernels=False, seconds=None):
    """(number of programs, of raised ones, differences as (seed, program, text))."""
    start, raised, differences, done = time.monotonic(), 0, [], 0
    for number in range(seed, seed + count):
        if seconds is not None and time.monotonic() - start > seconds:
            break
        program = draw(number)
        outcome = check(program, number, way, kernels)
        raised += outcome.raised > 0
        done += 1
        if outcome.difference:
            differences.append((number, program, outcome.difference))
    return done, raised, differences


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kernels", action="store_true",
                        help="run the compiled kernels instead of their float64 meaning")
    parser.add_argument("--way", choices=WAYS, default="trace", help="how they are compiled")
    options = parser.parse_args(arguments)
    count, raised, differences = run(options.programs, options.seed, options.way, options.kernels)
    kinds = collections.Counter(text.split(":")[0] for *_, text in differences)
    for number, program, text in differences[:20]:
        print(f"seed {number}, {program.dtype}:\n{program.text}  {text}\n")
    print(f"{count} programs from seed {options.seed}: {raised} raised, "
          f"{len(differences)} differences {dict(kinds) or ''}")
    return bool(differences)


if __name__ == "__main__":
    sys.exit(main())
