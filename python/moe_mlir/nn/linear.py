"""Routers with linear logits: SMoE, Switch, GLaM, V-MoE."""

from typing import Any

import torch

from ._router import Device, LinearRouter


class SMoE(LinearRouter):
    """softmax(TopK(W h + b)): the sparse mixture of experts of P0 (2), P3 (1)(2), P4 (2).

    With renorm=False TopK(softmax(W h + b)): P4 (3). Note that k = 1 with
    renorm gives gates of 1 and no gradient to the router: use `Switch`.

    >>> routing = SMoE(d_model=16, num_experts=8, k=2)(torch.randn(4, 16))
    >>> routing.gates.shape, routing.indices.shape
    (torch.Size([4, 2]), torch.Size([4, 2]))
    """

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        k: int,
        *,
        renorm: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(d_model, num_experts, k, device=device, dtype=dtype, **options)
        self.renorm = renorm

    def repr_options(self) -> dict[str, Any]:
        return {"renorm": self.renorm, **super().repr_options()}

    @property
    def keeps_gates(self) -> bool:
        """Raw gates are asked for; a method on top leaves them raw."""
        return not self.renorm


class Switch(SMoE):
    """TopK(softmax(W h + b)) with k = 1 and the raw probability as the gate: P2 (1), P4 (3).

    >>> routing = Switch(16, 8)(torch.randn(4, 16))
    >>> routing.gates.shape, bool((routing.gates < 1).all())
    (torch.Size([4, 1]), True)
    """

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        k: int = 1,
        *,
        renorm: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(d_model, num_experts, k, renorm=renorm, device=device, dtype=dtype, **options)


class GLaM(SMoE):
    """SMoE with top-2 on every other layer: P0 C.1, P3 C.1.2, P4 D.1.

    >>> [GLaM.is_moe_layer(layer) for layer in range(4)]
    [False, True, False, True]
    """

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        k: int = 2,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(d_model, num_experts, k, device=device, dtype=dtype, **options)

    @staticmethod
    def is_moe_layer(layer: int) -> bool:
        """Whether layer 0, 1, .. of the transformer has experts instead of an MLP."""
        return layer % 2 == 1


class VMoE(LinearRouter):
    """V-MoE: raw top-2 of softmax(W h + noise), no bias: P0 C.2 and the public code.

    The noise of N(0, 1/E^2) is an operand: pass `noise` [.., experts], or let
    training draw it. V-MoE drops by batch priority: `MoELayer(router, ...,
    capacity_factor=1.05, priority="gate")`.

    >>> router = VMoE(16, 8)
    >>> a, b = router(torch.zeros(3, 16)), router.eval()(torch.zeros(3, 16))
    >>> bool(a.logits.any()), bool(b.logits.any())
    (True, False)
    """

    renorm = False

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        k: int = 2,
        *,
        noise_std: float | None = None,
        bias: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(d_model, num_experts, k, bias=bias, device=device, dtype=dtype, **options)
        self.noise_std = 1 / num_experts if noise_std is None else noise_std

    def repr_options(self) -> dict[str, Any]:
        return {"noise_std": self.noise_std, **super().repr_options()}

    def logits(self, h: torch.Tensor, noise: torch.Tensor | None = None) -> torch.Tensor:
        z = super().logits(h)
        if noise is None and self.training and self.noise_std:
            noise = self.noise_std * torch.randn_like(z)
        return z if noise is None else z + noise
