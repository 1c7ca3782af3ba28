"""Routers of the shapes that models have, scores that are hard to order, and eager's choice.

For `python -m moe_mlir_bench.models decisions`.
"""

import dataclasses
import math
from typing import Any, Literal

import torch

from moe_mlir import reference
from moe_mlir.formulas import ScoreName

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


@dataclasses.dataclass(frozen=True)
class Router:
    """How a model chooses its experts: docs/Spec.md 9.1."""

    name: str
    experts: int
    k: int
    score: ScoreName = "softmax"
    bias: bool = False
    n_group: int = 1
    topk_group: int = 1
    group_score: Literal["top2", "max"] = "top2"

    @property
    def is_computed(self) -> bool:
        """The choice is by a function of the scores, which rounds; not by the scores themselves."""
        sums_scores = self.n_group > 1 and self.group_score != "max"
        return self.score != "none" and (self.bias or sums_scores)

    def make_bias(self) -> torch.Tensor | None:
        """f32 [experts] of few values, as updates by equal steps make: sums of equal scores tie."""
        generator = torch.Generator().manual_seed(self.experts)
        steps = torch.randint(-3, 4, (self.experts,), generator=generator)
        return 0.05 * steps if self.bias else None

    def options(self) -> dict[str, Any]:
        """Keywords of `moe_mlir.grouped_topk`."""
        return dict(score=self.score, bias=self.make_bias(), n_group=self.n_group,
                    topk_group=self.topk_group, group_score=self.group_score)


ROUTERS = (
    Router("Mixtral", 8, 2),
    Router("ACMoE", 16, 2),
    Router("Granite-MoE", 40, 8),
    Router("OLMoE", 64, 8),
    Router("gpt-oss", 128, 4),
    Router("Qwen3-MoE", 128, 8),
    Router("Llama4", 128, 1, "sigmoid"),
    Router("DeepSeek-V2", 160, 6, n_group=8, topk_group=3, group_score="max"),
    Router("DeepSeek-V3", 256, 8, "sigmoid", bias=True, n_group=8, topk_group=4),
    Router("DeepSeek-V4", 256, 6, "sqrtsoftplus", bias=True),
    Router("GLM-5", 288, 8, "sigmoid"),
    Router("Kimi K2", 384, 8, "sigmoid", bias=True),
    Router("Qwen3-Next", 512, 10),
    Router("Nemotron 3", 512, 22, "sigmoid", bias=True),
    Router("LongCat", 768, 12, bias=True),
    Router("Kimi K3", 896, 16, "sigmoid"),
    Router("given scores", 896, 32, "none"),
    Router("given scores, bias", 33, 4, "none", bias=True),
    Router("given scores, groups", 96, 8, "none", bias=True, n_group=6, topk_group=3),
)


def draw_scores(router: Router, tokens: int, dtype: torch.dtype, generator: torch.Generator,
                plain: bool = False) -> torch.Tensor:
    """[tokens, experts]: logits as models have them, and unless `plain`, rows of near ties."""
    shape = (tokens, router.experts)
    x = torch.randn(shape, generator=generator) * 2
    if plain:
        return x.to(dtype)
    kind = torch.arange(tokens)[:, None] % 8
    # 0..2: plain. 3, 4: few different values, so that the edge of the k best is a tie.
    x = torch.where((kind == 3) | (kind == 4), (4 * x).round() / 4, x)
    # 5: all within some units in the last place; 6: saturated scores.
    x = torch.where(kind == 6, x * 20, x)
    x = torch.where(kind == 5, torch.ones(()), x).to(dtype)
    steps = torch.randint(-3, 4, shape, generator=generator)
    x = _move(x, torch.where(kind == 5, steps, 0))
    # 7: each value twice, one unit in the last place apart (or equal).
    half = router.experts // 2
    twins = x.clone()
    twins[:, half : 2 * half] = _move(x[:, :half], steps[:, :half].clamp(-1, 1))
    x = torch.where(kind == 7, twins, x)[:, torch.randperm(router.experts, generator=generator)]
    # Some experts are masked, and some zeros have a sign.
    dead = torch.rand(shape, generator=generator) < 0.02
    x = x.masked_fill(dead & (kind == 2), -math.inf)
    return x.masked_fill(dead & (kind == 3), -0.0).contiguous()


def _move(x, steps):
    """x, `steps` floats farther from zero; as it is where it would leave the numbers."""
    bits = _BITS[x.dtype]
    moved = (x.view(bits) + steps.to(bits)).view(x.dtype)
    return torch.where(moved.isnan(), x, moved)  # the bits below those of 0.0 are of a NaN


def eager_choice(router: Router, x: torch.Tensor) -> torch.Tensor:
    """Expert ids [tokens, k] by float32 arithmetic of eager torch and the order of docs/Spec.md E1.

    torch.topk chooses among equal values by no rule: it gets the position in the last bits.
    """
    scores, kept = choice_scores(router, x.float())
    bits = (scores + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    if kept is not None:
        ordered = ordered.masked_fill(~kept, -1 << 31)  # below -inf
    reversed_position = torch.arange(router.experts).flip(0)
    return torch.topk(ordered * router.experts + reversed_position, router.k, dim=-1).indices


def choice_scores(router: Router, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What is ordered: the scores, or their function and bias. And which experts may be chosen:
    those of the best groups, or None for all."""
    bias = router.make_bias()
    if router.score == "none" or router.is_computed:
        x = reference.selection.map_scores(x, router.score)
    if bias is not None:
        x = x + bias.to(x.dtype)
    if router.n_group == 1:
        return x, None
    return x, reference.selection.kept_experts(x, router.n_group, router.topk_group,
                                               router.group_score)


class WrittenOut(torch.nn.Module):
    """Layers of a router as models write it in torch: scores [layers, tokens, experts] to ids."""

    def __init__(self, router: Router) -> None:
        super().__init__()
        self.router = router
        bias = router.make_bias()
        self.register_buffer("bias", bias)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gates, ids = zip(*(self.route(layer) for layer in x.unbind(0)))
        return torch.stack(gates), torch.stack(ids)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        score = self.score(x)
        choice = score if self.bias is None else score + self.bias
        if self.router.n_group > 1:
            choice = self.drop_groups(choice)
        ids = torch.topk(choice, self.router.k, dim=-1)[1]
        gates = score.gather(-1, ids)
        return gates / gates.sum(-1, keepdim=True), ids

    def score(self, x: torch.Tensor) -> torch.Tensor:
        if self.router.score == "softmax":
            return torch.softmax(x, dim=-1)
        if self.router.score == "sigmoid":
            return x.sigmoid()
        if self.router.score == "sqrtsoftplus":
            return torch.nn.functional.softplus(x).sqrt()
        return x

    def drop_groups(self, choice: torch.Tensor) -> torch.Tensor:
        """As DeepSeek-V2 and V3 do in transformers."""
        router = self.router
        groups = choice.view(-1, router.n_group, router.experts // router.n_group)
        if router.group_score == "max":
            value = groups.max(dim=-1).values
        else:
            value = groups.topk(2, dim=-1)[0].sum(dim=-1)
        kept = torch.topk(value, router.topk_group, dim=-1, sorted=False)[1]
        mask = torch.zeros_like(value).scatter_(1, kept, 1)
        mask = mask.unsqueeze(-1).expand_as(groups).reshape(-1, router.experts)
        return choice.masked_fill(~mask.bool(), float("-inf"))
