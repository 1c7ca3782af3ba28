"""What all routers share: the result, the scores to start from, composition, updates."""

import math
from dataclasses import dataclass, field
from fractions import Fraction

import torch

from .. import reference


@dataclass
class Routing:
    """Where tokens go. `gates` and `indices` are [.., k], the others [.., experts].

    An index of -1 is nowhere. `state` goes to the next call (or the next
    layer) as `**state`. Soft routers also give `dispatch` and `combine`, each
    [.., tokens, experts, slots]; a threshold router gives `count` [..].
    """

    gates: torch.Tensor
    indices: torch.Tensor
    probs: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    state: dict = field(default_factory=dict)
    count: torch.Tensor | None = None
    dispatch: torch.Tensor | None = None
    combine: torch.Tensor | None = None


# A model may return a Routing and still be exported.
torch.utils._pytree.register_dataclass(Routing)


class Router(torch.nn.Module):
    """Sizes, the implementation of the ops, and selection.

    Args:
        d_model: features of a token.
        num_experts: experts to choose from.
        k: experts a token.
        route_scale: factor of all gates.
        impl: "moe" for compiled kernels, "torch" for the plain-torch meaning.
    """

    def __init__(self, d_model, num_experts, k, *, route_scale=1.0, impl="moe"):
        super().__init__()
        if not 1 <= k <= num_experts:
            raise ValueError(
                f"{type(self).__name__}: expected 'k' in [1, {num_experts}] "
                f"(the number of experts), found {k}"
            )
        if impl not in ("moe", "torch"):
            raise ValueError(
                f"{type(self).__name__}: expected 'impl' to be 'moe' or 'torch', found {impl!r}"
            )
        self.d_model, self.num_experts, self.k = d_model, num_experts, k
        self.route_scale, self.impl = route_scale, impl

    # Whether `scores` are more than the softmax of `logits`.
    mixes = False

    @property
    def ops(self):
        """The namespace of the routing ops: compiled kernels or plain torch."""
        if self.impl == "torch":
            return reference
        from .. import ops

        return ops

    def logits(self, h):
        raise NotImplementedError(f"{type(self).__name__} has no router logits")

    def scores(self, h, mask=None):
        """(probabilities before the selection, logits), each [.., experts]."""
        z = self.logits(h)
        return z.softmax(dim=-1), z

    def select(self, scores, mask, *, kind, renorm):
        return self.ops.topk_renorm(
            scores, self.k, kind=kind, renorm=renorm, route_scale=self.route_scale, mask=mask
        )

    def update(self, process_group=None):
        """Applies what was counted since the last optimizer step; see `update_routers`."""

    def counts_now(self):
        """Whether this forward counts: in training, and not when a checkpoint recomputes it."""
        if not self.training or torch.compiler.is_compiling():
            return self.training
        # Inside a backward there is a graph task: the forward was counted before.
        return torch._C._current_graph_task_id() == -1

    def extra_repr(self):
        return f"d_model={self.d_model}, num_experts={self.num_experts}, k={self.k}"


class LinearRouter(Router):
    """Logits W h + b. `weight` [E, D] and `bias` [E] train, or are fixed where `frozen`."""

    frozen = False

    def __init__(self, d_model, num_experts, k, *, bias=True, **options):
        super().__init__(d_model, num_experts, k, **options)
        self._own("weight", torch.empty(num_experts, d_model))
        self._own("bias", torch.empty(num_experts) if bias else None)
        self.reset_parameters()

    def _own(self, name, value):
        if self.frozen or value is None:
            self.register_buffer(name, value)
        else:
            self.register_parameter(name, torch.nn.Parameter(value))

    def reset_parameters(self):
        bound = 1 / math.sqrt(self.d_model)
        torch.nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def logits(self, h):
        return self.ops.router_logits(h, self.weight, self.bias)


class ComposedRouter(Router):
    """A method on top of another router's scores, by default of a linear router's.

    Args:
        base: the router that gives the scores (`XMoE`, `SMoEDropout`, ...). It
            decides k; without it the router has its own `weight` and `bias`.
    """

    def __init__(self, d_model, num_experts, k, *, base=None, bias=True, **options):
        super().__init__(d_model, num_experts, k, **options)
        if base is None:
            linear = LinearRouter(d_model, num_experts, k, bias=bias)
            self.weight, self.bias = linear.weight, linear.bias
        elif (base.d_model, base.num_experts, base.k) != (d_model, num_experts, k):
            raise ValueError(
                f"{type(self).__name__}: expected 'base' with d_model, num_experts, k = "
                f"{(d_model, num_experts, k)}, found "
                f"{(base.d_model, base.num_experts, base.k)}"
            )
        self.base = base

    @property
    def k(self):
        """The base's k where there is one: a schedule may move it."""
        base = self._modules.get("base")
        return self._k if base is None else base.k

    @k.setter
    def k(self, k):
        self._k = k

    def logits(self, h):
        if self.base is None:
            return self.ops.router_logits(h, self.weight, self.bias)
        return self.base.logits(h)

    def base_scores(self, h, mask=None):
        """The (probabilities, logits) that the method starts from."""
        if self.base is None:
            z = self.logits(h)
            return z.softmax(dim=-1), z
        return self.base.scores(h, mask)

    def select_base(self, p, z, mask):
        """Indices of the top k of the base scores; logits keep the order where softmax is 0."""
        mixed = self.base is not None and self.base.mixes
        scores, kind = (p, "probs") if mixed else (z, "logits")
        return self.select(scores.detach(), mask, kind=kind, renorm=True)[1]


def real_tokens(h, mask):
    """h with masked tokens at 0, so that their garbage reaches no gradient (E11)."""
    return h if mask is None else torch.where(mask[..., None], h, torch.zeros_like(h))


def linear_increase(step, total_steps, k_min, k_max):
    """clip(round_half_even((k_max - k_min) step / total) + k_min, k_min, k_max); docs/Spec.md 3.2.

    >>> [linear_increase(step, 8, 2, 6) for step in range(0, 10)]
    [2, 2, 3, 4, 4, 4, 5, 6, 6, 6]
    """
    grown = round(Fraction((k_max - k_min) * step, total_steps)) + k_min
    return min(max(grown, k_min), k_max)


class ScheduledK:
    """A k that grows with the optimizer steps; `update_routers` advances it.

    The step is saved with the model as a buffer; what runs reads Python numbers
    only, so that nothing is read back from the device.
    """

    def schedule_k(self, k_max, total_steps):
        if k_max is not None and not self.k <= k_max <= self.num_experts:
            raise ValueError(
                f"{type(self).__name__}: expected 'k_max' in [{self.k}, {self.num_experts}] "
                f"(k and the number of experts), found {k_max}"
            )
        if (k_max is None) != (total_steps is None):
            raise ValueError(
                f"{type(self).__name__}: expected 'k_max' and 'total_steps' together, "
                f"found {k_max} and {total_steps}"
            )
        self.k_min, self.k_max, self.total_steps = self.k, k_max, total_steps
        self.steps_done = 0
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        self.register_load_state_dict_post_hook(_follow_step)

    def set_step(self, step):
        self.step.fill_(step)
        self.steps_done = step
        if self.total_steps is not None:
            self.k = linear_increase(step, self.total_steps, self.k_min, self.k_max)

    def update(self, process_group=None):
        self.set_step(self.steps_done + 1)


def _follow_step(router, _):
    router.set_step(int(router.step))


@torch.no_grad()
def update_routers(model, *, process_group=None):
    """Once per optimizer step: adjacencies, expert biases and k schedules move on.

    Routers only count in a forward. A forward that changed what a backward
    still reads would give silently wrong gradients, under activation
    checkpointing in any form. Where torch.distributed runs, the counts are
    summed over the ranks of `process_group` first.
    """
    for module in model.modules():
        if isinstance(module, Router):
            module.update(process_group)


def sum_over_ranks(counts, process_group):
    """Adds the counts of all ranks in place, if there are ranks."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(counts, group=process_group)
    return counts
