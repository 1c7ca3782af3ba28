"""Dynamic top-p (P3 C.10): as many experts as pass a threshold."""

import torch

from ._router import ComposedRouter, Routing, real_tokens


class DynamicTopP(ComposedRouter):
    """All experts with p > theta, their probabilities renormalised: P3 C.10.

    Despite the name a threshold; a token without any takes its best expert
    (E20). `base=ACMoE(...)` is the paper's ACMoE with dynamic routing.

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

    def __init__(
        self,
        d_model,
        num_experts,
        k=None,
        *,
        theta=0.05,
        learn_theta=False,
        straight_through=False,
        renorm=True,
        base=None,
        **options,
    ):
        k = k if k is not None else num_experts if base is None else base.k
        super().__init__(d_model, num_experts, k, base=base, **options)
        if straight_through and not learn_theta:
            raise ValueError(
                "DynamicTopP: expected learn_theta=True with 'straight_through', found False"
            )
        theta = float(theta)
        self.theta = torch.nn.Parameter(torch.tensor(theta)) if learn_theta else theta
        self.straight_through, self.renorm = straight_through, renorm

    def forward(self, h, mask=None, **state):
        h = real_tokens(h, mask)
        z = self.base.logits(h, mask, **state) if state else self.logits(h)
        p = z.softmax(dim=-1)
        best, indices = self.ops.topk_renorm(p, self.k, kind="probs", renorm=False, mask=mask)
        theta = self.theta
        if isinstance(theta, torch.Tensor) and not self.straight_through:
            theta = theta.detach()
        gates, count = self.ops.threshold_renorm(best, theta, renorm=self.renorm, mask=mask)
        place = torch.arange(self.k, device=h.device)
        indices = torch.where(place < count[..., None], indices, -1)
        gates = gates * self.route_scale
        carried = self.base.carried(h, gates, indices) if hasattr(self.base, "carried") else {}
        return Routing(gates, indices, probs=p, logits=z, count=count, state=carried)
