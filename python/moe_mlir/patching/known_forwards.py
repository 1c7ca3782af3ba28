"""Forwards of modules whose own a graph of operators does not hold.

Switch assigns its layers in its forward, and runs its experts in a loop over those that were hit;
PhiMoE's samples in training, with a gradient of its own. All other routers are traced.
"""

import torch
from torch.nn.functional import one_hot

from ..experts import run_experts
from ..ops import topk_renorm


def linear(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """torch's, which gives memory that nobody has written where the weight is on "meta"."""
    if weight.is_meta and not hidden_states.is_meta:
        raise ValueError(
            "expected the weight of a router in memory, found it on the device 'meta'; load it, or "
            "leave the hooks on that bring it")
    return torch.nn.functional.linear(hidden_states, weight, bias)


def phimoe(self, hidden_states):
    """Two top-1 selections; in training their sampling is the model's own."""
    if self.training:
        return type(self).forward(self, hidden_states)
    logits = linear(hidden_states, self.weight, self.bias)
    rest, gates, indices = logits, [], []
    for _ in range(2):
        largest = rest.max(dim=-1, keepdim=True).values.detach()
        distance = (largest - logits) / logits.abs().clamp(min=largest)
        near = rest.masked_fill(distance.detach() > 2 * self.router_jitter_noise, float("-inf"))
        gate, index = topk_renorm(near, 1, renorm=False)
        gates.append(gate.to(logits.dtype))
        indices.append(index)
        rest = logits.scatter(-1, index, float("-inf"))
    return logits, torch.cat(gates, dim=-1), torch.cat(indices, dim=-1)


def switch(self, hidden_states):
    """One expert a token, as long as it has room in the token's sequence."""
    if has_hooks(self):
        return type(self).forward(self, hidden_states)
    source = hidden_states.dtype
    hidden_states = hidden_states.to(self.dtype)
    if self.training and self.jitter_noise > 0:
        noise = torch.empty_like(hidden_states).uniform_(1 - self.jitter_noise,
                                                         1 + self.jitter_noise)
        hidden_states = hidden_states * noise
    layer = self.classifier
    bias = None if layer.bias is None else layer.bias.to(self.dtype)
    logits = linear(hidden_states, layer.weight.to(self.dtype), bias)
    # The largest of the probabilities as the model rounds them: an argmax takes the first of equal.
    probabilities = logits.softmax(dim=-1, dtype=self.dtype).to(source)
    gates, indices = topk_renorm(probabilities, 1, kind="probs", renorm=False)
    chosen = one_hot(indices.squeeze(-1), self.num_experts)
    chosen = chosen * (chosen.cumsum(dim=-2) <= self.expert_capacity)
    return chosen, gates.to(source), logits


def switch_experts(self, hidden_states, selected_experts, routing_weights):
    """A token without room has no expert and adds nothing."""
    if has_hooks(self):
        return type(self).forward(self, hidden_states, selected_experts, routing_weights)
    chosen = selected_experts.squeeze(1)
    indices = torch.where(chosen.sum(-1) > 0, chosen.argmax(-1), -1).unsqueeze(-1)
    experts = list(self.values())
    first = experts[0]
    return run_experts(
        hidden_states, routing_weights, indices, torch.stack([e.wi.weight for e in experts]),
        torch.stack([e.wo.weight for e in experts]),
        activation=lambda h: first.dropout(first.act(h)))


def has_hooks(module) -> bool:
    """Whether hooks of accelerate bring the weights of inner layers when those are called."""
    return any("_hf_hook" in vars(layer) for layer in module.modules() if layer is not module)


# The classes of transformers that have these forwards.
ROUTERS = {"PhimoeTopKRouter": phimoe, "SwitchTransformersTop1Router": switch}
EXPERTS = {"SwitchTransformersExperts": switch_experts}
