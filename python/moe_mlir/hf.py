"""Runs the routers and experts of transformers models by moe ops, without a compiler.

    moe_mlir.hf.patch(model)                    # routers; weights stay where they are
    model.set_experts_implementation("moe")     # experts; importing this module registers it

Both keep the numerics of the model: the dtypes of scores and gates, the
renormalisation, and its eps. `torch.compile(backend="moe")` needs neither. Patch a
Switch model before you compile it: this replaces its loop over experts, which
cannot be traced.
"""

import functools

import torch
from torch.nn.functional import one_hot

from ._support.log import warn_user
from ._support.modules import require_module
from ._transformers.names import has_post_expert_norm
from .experts import run_experts, run_rows
from .experts.activation_detection import activation_of
from .experts.packed_weight import operand_of
from .experts.quantized_weight import QuantizedWeight
from .ops import grouped_topk, topk_renorm
from .ops._panels import is_packed

# ---- routers: forwards with the signatures of the classes that they replace --------


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


def _mixtral(self, hidden_states):
    hidden_states = hidden_states.reshape(-1, self.hidden_dim)
    logits = linear(hidden_states, self.weight)
    gates, indices = topk_renorm(logits, self.top_k)
    return logits, gates, indices


def _qwen(self, hidden_states):
    hidden_states = hidden_states.reshape(-1, self.hidden_dim)
    logits = linear(hidden_states, self.weight)
    gates, indices = topk_renorm(logits, self.top_k, renorm=bool(self.norm_topk_prob))
    return logits, gates.to(logits.dtype), indices


def _gpt_oss(self, hidden_states):
    hidden_states = hidden_states.reshape(-1, self.hidden_dim)
    logits = linear(hidden_states, self.weight, self.bias)
    gates, indices = topk_renorm(logits, self.top_k)
    return logits, gates.to(logits.dtype), indices


def _granite(self, hidden_states):
    logits = linear(hidden_states, self.weight).float()
    gates, indices = topk_renorm(logits, self.top_k)
    return logits, gates.type_as(hidden_states), indices


def _jamba(self, hidden_states):
    logits = linear(hidden_states, self.weight)
    gates, indices = topk_renorm(logits, self.top_k, renorm=False)
    return logits, gates.to(hidden_states.dtype), indices


def _deepseek_v2(self, hidden_states):
    hidden_states = hidden_states.view(-1, self.hidden_dim)
    logits = linear(hidden_states.float(), self.weight.float())
    grouped = self.topk_method == "group_limited_greedy"
    gates, indices = grouped_topk(
        logits, self.top_k, score="softmax", n_group=self.num_group if grouped else 1,
        topk_group=self.topk_group if grouped else 1, group_score="max", renorm=False,
        route_scale=self.routed_scaling_factor)
    return logits, gates, indices


def _deepseek_v3(self, hidden_states):
    hidden_states = hidden_states.view(-1, self.hidden_dim)
    logits = linear(hidden_states.float(), self.weight.float())
    gates, indices = grouped_topk(
        logits, self.top_k, bias=self.e_score_correction_bias, score="sigmoid",
        n_group=self.num_group, topk_group=self.topk_group, renorm=bool(self.norm_topk_prob),
        eps=1e-20 if self.norm_topk_prob else 0.0, route_scale=self.routed_scaling_factor)
    return logits, gates, indices


def _minimax_m2(self, hidden_states, e_score_correction_bias):
    hidden_states = hidden_states.reshape(-1, self.hidden_dim)
    logits = linear(hidden_states.to(self.weight.dtype), self.weight)
    gates, indices = grouped_topk(logits, self.top_k, bias=e_score_correction_bias, score="sigmoid")
    return logits, gates, indices


def _ernie(self, hidden_states):
    with torch.autocast(hidden_states.device.type, enabled=False):
        logits = linear(hidden_states.float(), self.weight.float())
        # By its forward, which brings an offloaded bias.
        bias = self.moe_statics(logits.new_zeros(self.num_experts))
        gates, indices = grouped_topk(logits, self.top_k, bias=bias, score="softmax", renorm=False)
        gates = gates / torch.clamp(gates.sum(dim=-1, keepdim=True), min=self.norm_min)
    return logits, gates.to(hidden_states.dtype), indices


def _llama4(self, hidden_states):
    from .ops import densify
    logits = linear(hidden_states, self.weight)
    gates, indices = grouped_topk(logits, self.top_k, score="sigmoid", renorm=False)
    return densify(gates, indices, self.num_experts).to(logits.dtype), logits


def _phimoe(self, hidden_states):
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


def _switch(self, hidden_states):
    """One expert a token, as long as it has room in the token's sequence."""
    if _has_hooks(self):
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


def _switch_experts(self, hidden_states, selected_experts, routing_weights):
    """A token without room has no expert and adds nothing."""
    if _has_hooks(self):
        return type(self).forward(self, hidden_states, selected_experts, routing_weights)
    chosen = selected_experts.squeeze(1)
    indices = torch.where(chosen.sum(-1) > 0, chosen.argmax(-1), -1).unsqueeze(-1)
    experts = list(self.values())
    first = experts[0]
    return run_experts(
        hidden_states, routing_weights, indices, torch.stack([e.wi.weight for e in experts]),
        torch.stack([e.wo.weight for e in experts]),
        activation=lambda h: first.dropout(first.act(h)))


def _has_hooks(module) -> bool:
    """Whether hooks of accelerate bring the weights of inner layers when those are called."""
    return any("_hf_hook" in vars(layer) for layer in module.modules() if layer is not module)


# The classes whose routers are known.
ROUTERS = {
    "DeepseekV2TopkRouter": _deepseek_v2,
    "DeepseekV3TopkRouter": _deepseek_v3,
    "Ernie4_5_MoeTopKRouter": _ernie,
    "Glm4MoeTopkRouter": _deepseek_v3,
    "GptOssTopKRouter": _gpt_oss,
    "GraniteMoeTopKRouter": _granite,
    "JambaTopKRouter": _jamba,
    "Llama4Router": _llama4,
    "MiniMaxM2TopKRouter": _minimax_m2,
    "MixtralTopKRouter": _mixtral,
    "OlmoeTopKRouter": _qwen,
    "PhimoeTopKRouter": _phimoe,
    "Qwen2MoeTopKRouter": _qwen,
    "Qwen3MoeTopKRouter": _qwen,
    "SwitchTransformersTop1Router": _switch,
}
# Not routers: layers without which a patched router would still not compile.
_OTHERS = {"SwitchTransformersExperts": _switch_experts}


def patch(model: torch.nn.Module) -> int:
    """Makes the routers of a transformers model run on moe ops, in place.

    Parameters and their names do not change, so checkpoints and optimizers keep
    working; `unpatch` undoes it. Hooks of accelerate are kept, so a model that is
    offloaded or distributed by a device map can be patched before or after.

    Args:
        model: any module; routers of unknown classes are not changed.

    Returns:
        the number of newly patched routers. If a router of a known class cannot be patched,
        a warning gives the reason.
    """
    require_module(model)
    replaced = 0
    for name, module in model.named_modules():
        function = _replacement(module)
        if function is None or _is_patched(module):
            continue
        place = _place_of_forward(module)
        if reason := _why_not(module, place):
            warn_user(f"'{name}' ({type(module).__name__}) stays as it is: {reason}")
            continue
        # A partial, not a method: a method is pickled by a name that the class does not have.
        setattr(module, place, functools.partial(function, module))
        replaced += type(module).__name__ in ROUTERS
    return replaced


def unpatch(model: torch.nn.Module) -> int:
    """Undoes `patch`; returns the number of routers."""
    require_module(model)
    restored = 0
    for module in model.modules():
        if not _is_patched(module):
            continue
        place = _place_of_forward(module)
        if place == "forward":
            del module.forward
        else:
            setattr(module, place, type(module).forward.__get__(module))
        restored += type(module).__name__ in ROUTERS
    return restored


def _replacement(module):
    """The forward for a module of transformers' own code; None for all others."""
    name, source = type(module).__name__, type(module).__module__
    known = source.startswith("transformers.models.")
    return (ROUTERS.get(name) or _OTHERS.get(name)) if known else None


def _place_of_forward(module) -> str:
    """The attribute that holds the forward: accelerate's hooks keep it in one of their own."""
    return "_old_forward" if "_hf_hook" in vars(module) else "forward"


def _is_patched(module) -> bool:
    forward = vars(module).get(_place_of_forward(module))
    return (isinstance(forward, functools.partial) and forward.func is _replacement(module)
            and forward.args == (module,))


def _why_not(module, place) -> str:
    """Why a router must keep the forward that it has; empty if ours computes the same."""
    forward = vars(module).get(place)
    if forward is None or getattr(forward, "__func__", None) is type(module).forward:
        return ""
    return ("expected the forward of its class, found another on the instance, "
            f"{getattr(forward, '__qualname__', type(forward).__name__)}; patch the model before "
            "what wraps it")


# ---- experts -----------------------------------------------------------------------


def experts_forward(
    self: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """transformers' interface of experts, on dispatch, grouped layers and combine.

    An expert of another rank, by the id `num_experts` of expert parallelism, adds nothing.
    """
    first = operand_of(self.gate_up_proj if self.has_gate else self.up_proj)
    bias = self.gate_up_proj_bias if self.has_gate and self.has_bias else \
        self.up_proj_bias if self.has_bias else None
    last_bias = self.down_proj_bias if self.has_bias else None
    x = hidden_states.to(first.dtype)
    if not has_post_expert_norm(self):
        activation = activation_of(self) or (self._apply_gate if self.has_gate else self.act_fn)
        # Panels are made of either order.
        transposed = self.is_transposed and not (
            isinstance(first, QuantizedWeight) or is_packed(first))
        y = run_experts(x, top_k_weights, top_k_index, first, self.down_proj, b_in=bias,
                        b_out=last_bias, activation=activation, transposed=transposed)
        return y.to(hidden_states.dtype)

    def expert(rows, offsets):
        hidden = _layer(self, rows, first, bias, offsets)
        hidden = self._apply_gate(hidden) if self.has_gate else self.act_fn(hidden)
        return self.post_expert_norm(_layer(self, hidden, self.down_proj, last_bias, offsets))
    y = run_rows(x, top_k_weights, top_k_index, self.num_experts, expert)
    return y.to(hidden_states.dtype)


def _layer(experts, rows, weight, bias, offsets):
    # Stored as [experts, in, out] if transposed, else as [experts, out, in].
    return torch.ops.moe.grouped_linear(rows.to(weight.dtype), weight, bias, offsets, None,
                                        experts.is_transposed)


def register_experts() -> None:
    """Makes "moe" an experts implementation of transformers; done when this module is imported."""
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:
        raise ImportError("expected transformers 5 or later for moe_mlir.hf, found none that has "
                          f"an experts interface: {error}; pip install 'transformers>=5'"
                          ) from error
    ALL_EXPERTS_FUNCTIONS.register("moe", experts_forward)


register_experts()

__all__ = ["experts_forward", "patch", "register_experts", "unpatch"]
