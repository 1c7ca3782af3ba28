"""Routers that do not train, or train only what makes them: SMoE-dropout, HyperRouter, THOR."""

from collections.abc import Callable
from typing import Any, Self

import torch

from ._router import Device, LinearRouter, Router, Routing, ScheduledK, Scores


class SMoEDropout(ScheduledK, LinearRouter):
    """SMoE with a fixed random router and a k that grows: P2 3.1, P0 D.3.

    Args:
        k: experts a token at the start.
        k_max: at `total_steps` optimizer steps (`moe_mlir.update_routers`).

    >>> router = SMoEDropout(16, 8, 2, k_max=8, total_steps=10)
    >>> router.set_step(5)
    >>> router(torch.randn(4, 16)).indices.shape
    torch.Size([4, 5])
    >>> [name for name, _ in router.named_parameters()]
    []
    """

    frozen = True

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        k: int,
        *,
        k_max: int | None = None,
        total_steps: int | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(d_model, num_experts, k, device=device, dtype=dtype, **options)
        self.schedule_k(k_max, total_steps)


class HyperRouter(ScheduledK, Router):
    """SMoE whose W and b a frozen random network makes of a trained embedding: P2 (2), C.1, C.4.

    (W, b) = W2 relu(W1 e + b1) + b2; only e trains. In evaluation they are
    computed once, at `eval()`: the model is then an SMoE, op for op.

    Args:
        k, k_max, total_steps: as in `SMoEDropout`.
        d_embedding: width of e; `d_hidden`: of the network. Default: d_model.

    >>> router = HyperRouter(16, 8, 2)
    >>> [name for name, _ in router.named_parameters()]
    ['embedding']
    >>> h = torch.randn(4, 16)
    >>> train, evaluation = router(h), router.eval()(h)
    >>> torch.equal(train.gates, evaluation.gates)
    True
    """

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        k: int,
        *,
        k_max: int | None = None,
        total_steps: int | None = None,
        d_embedding: int | None = None,
        d_hidden: int | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(d_model, num_experts, k, device=device, dtype=dtype, **options)
        self.schedule_k(k_max, total_steps)
        d_embedding, d_hidden = d_embedding or d_model, d_hidden or d_model
        for number, layer in enumerate(self._network(d_embedding, d_hidden, self._factory), 1):
            self.register_buffer(f"w{number}", layer.weight.detach().clone())
            self.register_buffer(f"b{number}", layer.bias.detach().clone())
        self.embedding = torch.nn.Parameter(torch.randn(d_embedding, **self._factory))
        # What the network gives for the present embedding; not saved, it follows.
        self._own_buffer("weight", num_experts, d_model, persistent=False)
        self._own_buffer("bias", num_experts, persistent=False)
        self.register_load_state_dict_post_hook(_fold)

    def _network(
        self, d_embedding: int, d_hidden: int, factory: dict[str, Any]
    ) -> tuple[torch.nn.Linear, torch.nn.Linear]:
        """Two random layers."""
        outputs = self.num_experts * (self.d_model + 1)
        return (torch.nn.Linear(d_embedding, d_hidden, **factory),
                torch.nn.Linear(d_hidden, outputs, **factory))  # fmt: skip

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        d_hidden, d_embedding = self.w1.shape
        factory = {"device": self.w1.device, "dtype": self.w1.dtype}
        for number, layer in enumerate(self._network(d_embedding, d_hidden, factory), 1):
            getattr(self, f"w{number}").copy_(layer.weight)
            getattr(self, f"b{number}").copy_(layer.bias)
        torch.nn.init.normal_(self.embedding)
        self.weight.zero_()
        self.bias.zero_()
        _fold(self, None)

    def repr_options(self) -> dict[str, Any]:
        d_hidden, d_embedding = self.w1.shape
        widths = {"d_embedding": d_embedding, "d_hidden": d_hidden}
        return {**widths, **super().repr_options()}

    # As `generate` gives them in training.
    wide_buffers = ("weight", "bias")

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        # The embedding may have been rounded.
        _fold(self, None)
        return self

    def generate(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The router's (weight, bias), differentiable in the embedding."""
        return self.ops.hyper_router(
            self.embedding, self.w1, self.b1, self.w2, self.b2, self.num_experts
        )

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        _fold(self, None)
        return self

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        weight, bias = self.generate() if self.training else (self.weight, self.bias)
        return self.ops.router_logits(h, weight, bias)


@torch.no_grad()
def _fold(router: HyperRouter, _: object) -> None:
    if router.training:
        return
    weight, bias = router.generate()
    router.weight.copy_(weight)
    router.bias.copy_(bias)


class THOR(Router):
    """Random experts with equal gates of 1/k: P2 4.1, Table A3.

    The random scores [.., experts] are an operand; `random` is drawn if absent.
    Training passes twice and adds the two passes' difference: `thor_loss`.

    >>> routing = THOR(16, 8, 2)(torch.randn(4, 16))
    >>> routing.gates.unique().tolist()
    [0.5]
    """

    kind = "probs"
    source = "its scores are random numbers"
    refuses_methods = "its scores are random numbers and its gates 1/k, whatever a method makes of them"

    def scores(
        self,
        h: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        random: torch.Tensor | None = None,
    ) -> Scores:
        if random is None:
            random = torch.rand(*h.shape[:-1], self.num_experts, device=h.device)
        return Scores(None, self.kind, random)

    def forward(
        self,
        h: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        random: torch.Tensor | None = None,
    ) -> Routing:
        random = self.scores(h, random=random).given
        _, indices = self.select(random, mask, kind="logits", renorm=True)
        return Routing(torch.where(indices >= 0, self.route_scale / self.k, 0.0), indices)


def thor_loss(
    logits_a: torch.Tensor,
    logits_b: torch.Tensor,
    targets: torch.Tensor,
    *,
    alpha: float = 5.0,
) -> torch.Tensor:
    """Mean cross entropy of two passes plus alpha times their symmetric KL divergence.

    >>> z, targets = torch.randn(6, 10), torch.arange(6)
    >>> same = torch.nn.functional.cross_entropy(z, targets)
    >>> bool((thor_loss(z, z, targets) - same).abs() < 1e-6)
    True
    """
    a, b = logits_a.flatten(0, -2).log_softmax(-1), logits_b.flatten(0, -2).log_softmax(-1)
    targets = targets.flatten()
    nll, kl = torch.nn.functional.nll_loss, torch.nn.functional.kl_div
    symmetric = kl(a, b, log_target=True, reduction="batchmean") + kl(
        b, a, log_target=True, reduction="batchmean"
    )
    return (nll(a, targets) + nll(b, targets)) / 2 + alpha * symmetric / 2
