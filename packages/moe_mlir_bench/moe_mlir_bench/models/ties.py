"""`python -m moe_mlir_bench.models --ties`: how often the k best experts are not determined.

Hidden states are normal, weights normal with a deviation of 0.02, widths and
experts those of real models; each router is written as transformers writes it.
"""

from dataclasses import dataclass

import torch
from torch.overrides import TorchFunctionMode

from moe_mlir.ops import grouped_topk, topk_renorm

_TOKENS = 16384
_CHUNK = 2048
_HEAD = """\
| router | logits | undetermined | another set than torch | another order |
|---|---|---|---|---|
"""


class LowestIndexFirst(TorchFunctionMode):
    """Inside, torch.topk chooses the lowest index of equal scores, as our ops do.

    torch promises no order. Scores of an indexer of tokens are sums of relu, of which many are 0.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        run = _topk if function in (torch.topk, torch.Tensor.topk) else function
        return run(*args, **(kwargs or {}))


def _topk(input, k, dim=-1, largest=True, sorted=True):
    ranked = input.sort(dim=dim, descending=largest, stable=True)
    return torch.return_types.topk([x.narrow(dim, 0, k).contiguous() for x in ranked])


@dataclass(frozen=True)
class Shape:
    """A router of a real model: its width, experts and choices, and its groups."""

    name: str
    width: int
    experts: int
    k: int
    groups: int = 1
    kept: int = 1


SHAPES = (Shape("Mixtral", 4096, 8, 2), Shape("Qwen3-MoE", 2048, 128, 8),
          Shape("DeepSeek-V3", 7168, 256, 8, 8, 4))


@dataclass(frozen=True)
class Ties:
    """Shares of the tokens: of all that were drawn, these have equal scores at the edge of the
    best; these get another set of experts than torch.topk chose, or the same in another order."""

    undetermined: float
    another_set: float
    another_order: float


def measure(shape: Shape, dtype: torch.dtype, tokens: int = _TOKENS, seed: int = 0) -> Ties:
    generator = torch.Generator().manual_seed(seed)
    weight = 0.02 * torch.randn(shape.experts, shape.width, generator=generator)
    bias = 0.01 * torch.randn(shape.experts, generator=generator)
    counts = torch.zeros(3)
    for _ in range(tokens // _CHUNK):
        h = torch.randn(_CHUNK, shape.width, generator=generator)
        # Products of what the dtype holds, rounded once: a linear layer of that dtype.
        logits = (h.to(dtype).float() @ weight.to(dtype).float().T).to(dtype)
        choice, theirs, ours = _select(shape, logits, bias)
        ranked = choice.sort(-1, descending=True).values
        undetermined = ranked[:, shape.k - 1] == ranked[:, shape.k]
        other = (theirs.sort(-1).values != ours.sort(-1).values).any(-1)
        counts += torch.stack([undetermined.sum(), other.sum(),
                               ((theirs != ours).any(-1) & ~other).sum()])
    return Ties(*(counts / (tokens // _CHUNK * _CHUNK)).tolist())


def _select(shape, logits, bias):
    """The scores that the model's last top-k sees, its experts, and ours."""
    if shape.groups == 1:
        scores = logits.softmax(-1, dtype=torch.float32)
        return scores, scores.topk(shape.k).indices, topk_renorm(logits, shape.k)[1]
    scores = logits.float().sigmoid() + bias
    groups = scores.unflatten(-1, (shape.groups, -1))
    best = groups.topk(2, dim=-1).values.sum(-1).topk(shape.kept, sorted=False).indices
    kept = torch.zeros(len(logits), shape.groups).scatter(1, best, 1).bool().unsqueeze(-1)
    scores = groups.masked_fill(~kept, -torch.inf).flatten(-2)
    ours = grouped_topk(logits, shape.k, bias=bias, score="sigmoid", n_group=shape.groups,
                        topk_group=shape.kept)[1]
    return scores, scores.topk(shape.k).indices, ours


def table(tokens: int = _TOKENS) -> str:
    rows = []
    for shape in SHAPES:
        for dtype in (torch.bfloat16, torch.float32):
            found = measure(shape, dtype, tokens)
            shares = (found.undetermined, found.another_set, found.another_order)
            cells = [f"{shape.name} ({shape.experts}, {shape.k})",
                     str(dtype).removeprefix("torch."), *(f"{x:.3%}" for x in shares)]
            rows.append(f"| {' | '.join(cells)} |\n")
    return _HEAD + "".join(rows)
