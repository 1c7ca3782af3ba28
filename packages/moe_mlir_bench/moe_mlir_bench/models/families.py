"""Mixture-of-experts models of transformers, each as a tiny configuration with random weights."""

from dataclasses import dataclass, field
from typing import Any

import torch

VOCABULARY = 64

# Sizes that most configurations name alike.
_SIZES = dict(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48,
              num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
              attn_implementation="eager", num_experts_per_tok=2, pad_token_id=0, bos_token_id=1,
              eos_token_id=2)
# Multi-head latent attention.
_LATENT = dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
               v_head_dim=8, num_key_value_heads=4)
_SHARED = dict(moe_intermediate_size=24, n_routed_experts=8, n_shared_experts=1,
               first_k_dense_replace=0, routed_scaling_factor=2.5)


@dataclass(frozen=True)
class Family:
    """How to build one model, and what its routers are.

    `form` is the matcher's name of the routers. `dynamic` is false where the
    model's own code is unrolled over the tokens, so that a graph serves one
    token count.
    """

    config: str
    model: str
    form: str
    sizes: dict = field(default_factory=dict)
    # The name of the number of layers, the fewest that have a router, and those without one.
    depth: str = "num_hidden_layers"
    layers: int = 1
    dense: int = 0
    # Every how many layers there is a router.
    period: int = 1
    # The names of the width of a token and of the number of experts.
    width: str = "hidden_size"
    experts: str = "num_local_experts"
    # Names of further numbers that are the number of layers.
    follow: tuple = ()
    inputs: tuple = ("input_ids",)
    # Sizes under names of their own: nothing of `_SIZES` applies.
    own_sizes: bool = False
    # The name of a mask that the model's own code cannot do without.
    mask: str | None = None
    dynamic: bool = True

    def routers(self, layers: int | None = None) -> int:
        """The number of routers of a model; an encoder and a decoder have one stack each."""
        stacks = len(self.inputs)
        return stacks * ((layers or self.layers) // self.period) - self.dense

    def configure(self, layers: int | None = None, **changes: Any) -> Any:
        """transformers' configuration; `changes` replace sizes."""
        import transformers

        depth = dict.fromkeys((self.depth, *self.follow), layers or self.layers)
        sizes = {**({} if self.own_sizes else _SIZES), **depth, **self.sizes, **changes}
        return getattr(transformers, self.config)(**sizes)

    def wide(self) -> dict:
        """Sizes at which times say something: 64 experts, tokens of 256 features."""
        return {self.width: 256, self.experts: 64}

    def build(self, dtype: torch.dtype = torch.float32, seed: int = 0, layers: int | None = None,
              **changes: Any) -> torch.nn.Module:
        """A model in eval mode whose weights have the scale of trained ones."""
        import transformers

        torch.manual_seed(seed)
        model = getattr(transformers, self.model)._from_config(self.configure(layers, **changes))
        spread_weights(model, seed)
        return model.to(dtype).eval()

    def example(self, batch: int = 2, tokens: int = 12, seed: int = 0) -> dict[str, Any]:
        """Keyword inputs of the model."""
        generator = torch.Generator().manual_seed(seed)
        ids = {name: torch.randint(3, VOCABULARY, (batch, tokens), generator=generator)
               for name in self.inputs}
        mask = {} if self.mask is None else {self.mask: torch.ones(batch, tokens).long()}
        return {**ids, **mask, "use_cache": False}


def spread_weights(model, seed):
    """Random weights that tell experts apart.

    Initial weights are so small that all experts are nearly equal, and
    selection biases are zero: a router would hardly be tested.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("e_score_correction_bias"):
                tensor.copy_(torch.rand(tensor.shape, generator=generator) * 0.2)
            elif isinstance(tensor, torch.nn.Parameter) and tensor.dim() > 1:
                scale = tensor.shape[-1] ** -0.5
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * scale)


FAMILIES = {
    "Mixtral": Family("MixtralConfig", "MixtralForCausalLM", "F1", dict(num_local_experts=8)),
    "Qwen2-MoE": Family(
        "Qwen2MoeConfig", "Qwen2MoeForCausalLM", "F3",
        dict(num_experts=8, moe_intermediate_size=24, shared_expert_intermediate_size=24),
        experts="num_experts"),
    "Qwen3-MoE": Family(
        "Qwen3MoeConfig", "Qwen3MoeForCausalLM", "F1",
        dict(num_experts=8, moe_intermediate_size=24, head_dim=8, norm_topk_prob=True),
        experts="num_experts"),
    "OLMoE": Family("OlmoeConfig", "OlmoeForCausalLM", "F3", dict(num_experts=8),
                    experts="num_experts"),
    "gpt-oss": Family("GptOssConfig", "GptOssForCausalLM", "F2",
                      dict(num_local_experts=8, head_dim=8, sliding_window=8)),
    "Granite-MoE": Family("GraniteMoeConfig", "GraniteMoeForCausalLM", "F2",
                          dict(num_local_experts=8)),
    "DeepSeek-V2": Family(
        "DeepseekV2Config", "DeepseekV2ForCausalLM", "F6",
        {**_SHARED, **_LATENT, "n_group": 4, "topk_group": 2,
         "topk_method": "group_limited_greedy"}, experts="n_routed_experts"),
    "DeepSeek-V3": Family(
        "DeepseekV3Config", "DeepseekV3ForCausalLM", "F4",
        {**_SHARED, **_LATENT, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1},
        layers=2, dense=1, experts="n_routed_experts"),
    "GLM4-MoE": Family("Glm4MoeConfig", "Glm4MoeForCausalLM", "F4",
                       {**_SHARED, "n_group": 2, "topk_group": 1, "head_dim": 8},
                       experts="n_routed_experts"),
    "MiniMax-M2": Family("MiniMaxM2Config", "MiniMaxM2ForCausalLM", "F4",
                         dict(num_local_experts=8, head_dim=8)),
    "Ernie4.5-MoE": Family(
        "Ernie4_5_MoeConfig", "Ernie4_5_MoeForCausalLM", "F5",
        dict(moe_num_experts=8, moe_k=2, moe_intermediate_size=24, moe_num_shared_experts=1,
             moe_layer_start_index=0), experts="moe_num_experts"),
    "Phi-MoE": Family("PhimoeConfig", "PhimoeForCausalLM", "F9", dict(num_local_experts=8)),
    "Llama4": Family(
        "Llama4TextConfig", "Llama4ForCausalLM", "F7",
        dict(num_local_experts=8, intermediate_size_mlp=48, head_dim=8, num_experts_per_tok=2,
             attention_chunk_size=32)),
    "Jamba": Family(
        "JambaConfig", "JambaForCausalLM", "F3",
        dict(num_experts=8, expert_layer_period=2, expert_layer_offset=1, attn_layer_period=2,
             attn_layer_offset=1, mamba_d_state=4, mamba_dt_rank=4),
        layers=2, period=2, dynamic=False, experts="num_experts"),
    "Switch": Family(
        "SwitchTransformersConfig", "SwitchTransformersForConditionalGeneration", "F8",
        dict(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_heads=4, num_experts=8,
             expert_capacity=4, decoder_start_token_id=0, dropout_rate=0.0),
        depth="num_layers", inputs=("input_ids", "decoder_input_ids"), own_sizes=True,
        follow=("num_sparse_encoder_layers", "num_decoder_layers", "num_sparse_decoder_layers"),
        mask="attention_mask", experts="num_experts", width="d_model"),
}
