"""A small decoder-only language model with a mixture of experts in each block."""

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import nn as tnn

from moe_mlir import nn


@dataclass(frozen=True)
class Config:
    """Sizes and training schedule; a checkpoint belongs to exactly one."""

    method: str = "smoe"
    vocabulary: int = 256
    context: int = 128
    layers: int = 3
    width: int = 96
    heads: int = 4
    experts: int = 8
    selected: int = 2
    hidden: int = 192
    temperature: float = 12.0
    balance_weight: float = 0.01
    steps: int = 300
    batch: int = 16
    learning_rate: float = 3e-3
    seed: int = 0

    def as_dict(self) -> dict:
        return asdict(self)


def _top_k(scores, k):
    """Selection as models spell it in plain torch."""
    values, indices = torch.topk(scores, k, dim=-1)
    return values / values.sum(dim=-1, keepdim=True), indices


class SMoE(nn.SMoE):
    """The baseline router; eager it is the usual softmax, top-k, renormalise."""

    def forward(self, h: torch.Tensor, mask: torch.Tensor | None = None) -> nn.Routing:
        if self.impl == "moe":
            return super().forward(h, mask)
        z = F.linear(h, self.weight, self.bias)
        gates, indices = _top_k(z.softmax(dim=-1), self.k)
        return nn.Routing(gates, indices, logits=z)


class SimilaritySMoE(nn.SimilaritySMoE):
    """Mutual-Inform SMoE's router; eager it forms the tokens' similarity matrix."""

    def forward(self, h: torch.Tensor, mask: torch.Tensor | None = None) -> nn.Routing:
        if self.impl == "moe":
            return super().forward(h, mask)
        z = F.linear(h, self.weight, self.bias)
        similarity = h @ h.transpose(-1, -2) / self.tau
        tokens = torch.arange(h.shape[-2], device=h.device)
        similarity = similarity.masked_fill(tokens[None, :] > tokens[:, None], -torch.inf)
        p = similarity.softmax(dim=-1) @ z.softmax(dim=-1)
        gates, indices = _top_k(p, self.k)
        return nn.Routing(gates, indices, probs=p, logits=z)


def make_router(config: Config) -> nn.Router:
    sizes = (config.width, config.experts, config.selected)
    if config.method == "smoe":
        return SMoE(*sizes, impl="torch")
    if config.method == "similarity":
        return SimilaritySMoE(*sizes, causal=True, tau=config.temperature, impl="torch")
    raise ValueError(f"expected method 'smoe' or 'similarity', found '{config.method}'")


class Attention(tnn.Module):
    """Causal self-attention."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = tnn.Linear(config.width, 3 * config.width)
        self.out = tnn.Linear(config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        q, k, v = (part.reshape(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
                   for part in self.qkv(x).split(width, dim=-1))
        scores = q @ k.transpose(-1, -2) * (width // self.heads) ** -0.5
        position = torch.arange(tokens, device=x.device)
        scores = scores.masked_fill(position[None, :] > position[:, None], -torch.inf)
        mixed = scores.softmax(dim=-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))


class Block(tnn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm_attention = tnn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm_experts = tnn.LayerNorm(config.width)
        self.moe = nn.MoELayer(make_router(config), config.hidden)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, nn.Routing]:
        x = x + self.attention(self.norm_attention(x))
        y, routing = self.moe(self.norm_experts(x))
        return x + y, routing


class LanguageModel(tnn.Module):
    """Bytes [batch, tokens] to logits [batch, tokens, vocabulary]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = tnn.Embedding(config.vocabulary, config.width)
        self.position = tnn.Embedding(config.context, config.width)
        self.blocks = tnn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = tnn.LayerNorm(config.width)
        self.head = tnn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.route(tokens)[0]

    def route(self, tokens: torch.Tensor) -> tuple[torch.Tensor, list[nn.Routing]]:
        """The logits, and each block's routing."""
        position = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.position(position)
        routings = []
        for block in self.blocks:
            x, routing = block(x)
            routings.append(routing)
        return self.head(self.norm(x)), routings
