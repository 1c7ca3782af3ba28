"""Greedy tokens that are not eager's: a near tie of logits, or a fault?

Models in bf16 round logits so that the best ones often differ by less than that, and
the scores of their routers, so that one token in six of a Qwen3-MoE with random
weights gets another expert than in f32, in eager as in ours. A run of the same weights
in twice the bits says what each token is worth: one of a near tie has a logit there that
is below the best by no more than the largest error that eager's own logits have at any
token of the sequence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Verdict:
    """Of the tokens of one way, by the logits of the run in twice the bits."""

    below: float   # how far a chosen token is from the best, at most
    error: float   # of eager's logits at any token of the sequence, at most
    first: int     # the first token that is another than eager's, from 0

    @property
    def is_near_tie(self) -> bool:
        return self.below <= self.error

    def __str__(self) -> str:
        return (f"from token {self.first + 1} on the tokens are others than eager's; one has a logit "
                f"{self.below:.2g} below the best, and eager's logits are off by up to "
                f"{self.error:.2g}, by the same weights in twice the bits")


def judge(model: Any, prompt: torch.Tensor, eager: Sequence[int],
          others: Mapping[str, Sequence[int]]) -> dict[str, Verdict]:
    """The verdict on each way whose tokens differ from eager's.

    The model is converted in place, once for all: there is room for one of its size.
    """
    if not others:
        return {}
    found = _logits(model, prompt, eager)
    _widen(model)
    error = float((found - _logits(model, prompt, eager)).abs().max())
    verdicts = {}
    for name, tokens in others.items():
        logits = _logits(model, prompt, tokens)[-len(tokens):]
        chosen = logits.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        below = float((logits.amax(-1) - chosen).max())
        first = next(i for i, (a, b) in enumerate(zip(tokens, eager)) if a != b)
        verdicts[name] = Verdict(below, error, first)
    return verdicts


def _widen(model) -> None:
    """Weights in twice the bits, with transformers' plain loop over experts, which takes all types."""
    wide = torch.float64 if model.dtype == torch.float32 else torch.float32
    model.to(wide).set_experts_implementation("eager")


def _logits(model, prompt, tokens) -> torch.Tensor:
    """[prompt and tokens - 1, words]: what each token of the whole sequence is followed by."""
    ids = torch.cat((prompt, torch.tensor([tokens[:-1]], dtype=prompt.dtype)), 1)
    return model(ids, use_cache=False).logits[0]
