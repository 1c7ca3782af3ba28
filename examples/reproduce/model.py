"""A small decoder-only language model whose routers get what their method needs."""

import contextlib
from dataclasses import dataclass

import torch
from torch import nn as tnn

import moe_mlir
from moe_mlir import nn


@dataclass(frozen=True)
class Sizes:
    vocabulary: int = 256
    context: int = 64
    layers: int = 4
    width: int = 48
    heads: int = 4
    experts: int = 8
    selected: int = 2
    hidden: int = 64


class Attention(tnn.Module):
    """Causal self-attention that also returns what AttentionSMoE reads."""

    def __init__(self, sizes):
        super().__init__()
        self.heads = sizes.heads
        self.qkv = tnn.Linear(sizes.width, 3 * sizes.width, bias=False)
        self.out = tnn.Linear(sizes.width, sizes.width, bias=False)

    def forward(self, x):
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        # Attention that also tells how sure its heads are, which AttentionSMoE asks.
        mixed, row_lse, row_entropy = moe_mlir.attention(q, k, v, causal=True)
        u = self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        # u = (1/H) sum_h A_h V_h W_O,h, hence the factor of the heads (docs/Spec.md 3.4).
        wo = self.heads * self.out.weight.view(width, self.heads, -1).transpose(0, 1)
        rows = dict(row_lse=row_lse, row_entropy=row_entropy)
        return u, dict(q=q, k=k, attn_output=u, v=v, wo=wo, **rows)


class Dense(tnn.Module):
    """The MLP of a layer without experts, as large as the experts that a token visits."""

    def __init__(self, sizes):
        super().__init__()
        hidden = sizes.hidden * sizes.selected
        self.layers = tnn.Sequential(
            tnn.Linear(sizes.width, hidden, bias=False),
            tnn.GELU(),
            tnn.Linear(hidden, sizes.width, bias=False),
        )

    def forward(self, x):
        return self.layers(x)


@contextlib.contextmanager
def _own_draws():
    """Random numbers of their own: however many are drawn, what follows draws the same."""
    seed = int(torch.randint(2**62, ()))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


class Block(tnn.Module):
    """A layer. Whatever router it has, its other weights start alike."""

    def __init__(self, sizes, method, layer):
        super().__init__()
        self.norm_attention = tnn.LayerNorm(sizes.width)
        self.attention = Attention(sizes)
        self.norm_experts = tnn.LayerNorm(sizes.width)
        self.method = method
        if method.has_experts(layer):
            with _own_draws():
                router = method.router(sizes)
            self.moe = nn.MoELayer(router, sizes.hidden, shared=method.shared)
        else:
            self.moe = Dense(sizes)

    def forward(self, x, state):
        """(x, routing): `state` is that of the layer before, for the methods that carry one."""
        u, attention = self.attention(self.norm_attention(x))
        x = x + u
        h = self.norm_experts(x)
        if isinstance(self.moe, Dense):
            return x + self.moe(h), None
        inputs = attention if self.method.reads_attention else {}
        y, routing = self.moe(h, **inputs, **(state if self.method.carries_state else {}))
        return x + y, routing


class LanguageModel(tnn.Module):
    """Bytes [batch, tokens] to logits [batch, tokens, vocabulary], and each layer's routing."""

    def __init__(self, sizes, method):
        super().__init__()
        self.embedding = tnn.Embedding(sizes.vocabulary, sizes.width)
        self.position = tnn.Embedding(sizes.context, sizes.width)
        self.blocks = tnn.ModuleList()
        for layer in range(sizes.layers):
            # A shared expert or an MLP in place of experts draws more than others do.
            with _own_draws():
                self.blocks.append(Block(sizes, method, layer))
        self.norm = tnn.LayerNorm(sizes.width)
        self.head = tnn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1]))
        routings, state = [], {}
        for block in self.blocks:
            x, routing = block(x, state)
            if routing is not None:
                routings.append(routing)
                state = routing.state
        return self.head(self.norm(x)), routings
