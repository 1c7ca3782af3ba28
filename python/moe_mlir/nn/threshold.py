"""Dynamic top-p (P3 C.10): as many experts as pass a threshold."""

from typing import Any, Literal

import torch

from ..formulas import ratio
from ._composed import ComposedRouter
from ._router import Device, Router


class DynamicTopP(ComposedRouter):
    """All experts with p > theta, their probabilities renormalised: P3 C.10.

    Despite the name a threshold; a token without any takes its best expert
    (E20). `base=ACMoE(...)` is the paper's ACMoE with dynamic routing. Where
    the base has a bias for the choice, p and the bias pass theta together.

    `gates` and `indices` list the experts best first; -1 behind the last that
    passed, whose number is `count`.

    Args:
        k: experts a token at most; default all.
        theta: the threshold; `learn_theta` makes it a parameter, which learns
            only with `straight_through`.
        straight_through: dtheta = - sum over the selected of gate dgate; the
            paper's learnable threshold has no gradient (3.9).

    >>> routing = DynamicTopP(16, 8, theta=0.1)(torch.randn(4, 16))
    >>> bool((routing.count >= 1).all()), routing.indices.shape
    (True, torch.Size([4, 8]))
    """

    thresholds = True
    keeps_gates = True

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        k: int | None = None,
        *,
        theta: float = 0.05,
        learn_theta: bool = False,
        straight_through: bool = False,
        base: Router | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        k = k if k is not None else getattr(base, "k", num_experts)
        super().__init__(d_model, num_experts, k, base=base, device=device, dtype=dtype, **options)
        if straight_through and not learn_theta:
            raise ValueError(
                "DynamicTopP: expected learn_theta=True with 'straight_through', found False"
            )
        self._own_number("theta", theta, learn_theta)
        self.straight_through = straight_through

    def repr_options(self) -> dict[str, Any]:
        mine = {"theta": self.theta, "straight_through": self.straight_through}
        return {**mine, **super().repr_options()}

    def check_base(self, base: Router) -> None:
        super().check_base(base)
        found = type(base).__name__
        if base.thresholds:
            raise ValueError(
                f"DynamicTopP: expected a 'base' without a threshold, found {found}: of two "
                "thresholds on the same scores only the larger would act"
            )
        if base.keeps_gates and base.k == 1:
            raise ValueError(
                f"DynamicTopP: expected a 'base' of more than one expert a token, found {found} "
                "with k = 1: its best expert always passes, so the threshold would never act"
            )

    @property
    def kind(self) -> Literal["logits", "probs"]:
        return "logits" if self.base is None else self.base.kind

    def mix(
        self, h: torch.Tensor, p: torch.Tensor, z: torch.Tensor | None, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        return p, {}

    def choose(
        self,
        p: torch.Tensor | None,
        z: torch.Tensor | None,
        mask: torch.Tensor | None,
        *,
        renorm: bool | None = None,
        scale: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        renorm = self.renorm if renorm is None else renorm
        best, indices = super().choose(p, z, mask, renorm=False, scale=1.0)
        theta = self.theta
        if isinstance(theta, torch.Tensor) and not self.straight_through:
            theta = theta.detach()
        if self.choice_bias is None:
            gates, count = self.ops.threshold_renorm(best, theta, renorm=renorm, mask=mask)
            chosen = self.first(count)
        else:
            gates, chosen = self.biased(best, indices, theta, mask, renorm)
        gates = gates * (self.gate_scale if scale is None else scale)
        return gates, torch.where(chosen, indices, -1)

    def first(self, count: torch.Tensor) -> torch.Tensor:
        """The first `count` of the k places, where the best experts stand."""
        return torch.arange(self.k, device=count.device) < count[..., None]

    def biased(
        self,
        best: torch.Tensor,
        indices: torch.Tensor,
        theta: torch.Tensor | float,
        mask: torch.Tensor | None,
        renorm: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and the bias pass the threshold; gates are of the scores."""
        bias = self.choice_bias
        assert bias is not None
        choice = best.detach() + bias[indices.clamp(min=0)]
        fixed = theta.detach() if isinstance(theta, torch.Tensor) else theta
        chosen = self.first(self.ops.threshold_renorm(choice, fixed, mask=mask)[1])
        gates = torch.where(chosen, best, 0.0)
        gates = ratio(gates, gates.sum(dim=-1, keepdim=True)) if renorm else gates
        if isinstance(theta, torch.Tensor):
            gates = gates * (1 + (theta.detach() - theta))
        return gates, chosen
