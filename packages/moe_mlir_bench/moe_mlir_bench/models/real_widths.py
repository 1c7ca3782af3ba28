"""Models whose widths are those of released ones, with random weights and fewer layers."""

from typing import Any

import torch

# (class of the configuration, class of the model, sizes).
SIZES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Granite-1B": ("GraniteMoeConfig", "GraniteMoeForCausalLM", dict(
        vocab_size=49155, hidden_size=1024, intermediate_size=512, num_hidden_layers=24,
        num_attention_heads=16, num_key_value_heads=8, num_local_experts=32,
        num_experts_per_tok=8, max_position_embeddings=4096, attention_multiplier=0.015625,
        embedding_multiplier=12.0, residual_multiplier=0.22, logits_scaling=6.0,
        tie_word_embeddings=True)),
    "OLMoE": ("OlmoeConfig", "OlmoeForCausalLM", dict(
        vocab_size=50304, hidden_size=2048, intermediate_size=1024, num_hidden_layers=2,
        num_attention_heads=16, num_key_value_heads=16, num_experts=64, num_experts_per_tok=8)),
    "Qwen3-MoE": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", dict(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768,
        num_hidden_layers=2, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        num_experts=128, num_experts_per_tok=8, norm_topk_prob=True)),
    "gpt-oss": ("GptOssConfig", "GptOssForCausalLM", dict(num_local_experts=32, num_hidden_layers=2)),
    "Qwen3-Next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", dict(
        num_hidden_layers=2, num_experts=128, layer_types=["linear_attention", "full_attention"])),
    "Gemma 4": ("Gemma4TextConfig", "Gemma4ForCausalLM", dict(
        hidden_size=2816, intermediate_size=2112, num_attention_heads=16, num_key_value_heads=8,
        num_global_key_value_heads=2, attention_k_eq_v=True, sliding_window=1024,
        hidden_size_per_layer_input=0, enable_moe_block=True, num_experts=128, top_k_experts=8,
        moe_intermediate_size=704, num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"])),
    "DeepSeek-V3.2": ("DeepseekV32Config", "DeepseekV32ForCausalLM", dict(
        num_hidden_layers=2, n_routed_experts=32, vocab_size=32768,
        mlp_layer_types=["sparse", "sparse"])),
    "GLM-5": ("GlmMoeDsaConfig", "GlmMoeDsaForCausalLM", dict(
        num_hidden_layers=2, n_routed_experts=32, vocab_size=32768,
        mlp_layer_types=["sparse", "sparse"])),
    "DeepSeek-V4": ("DeepseekV4Config", "DeepseekV4ForCausalLM", dict(
        num_hidden_layers=2, n_routed_experts=32, vocab_size=32768,
        layer_types=["heavily_compressed_attention", "compressed_sparse_attention"],
        mlp_layer_types=["hash_moe", "moe"])),
}
# What else is less than in the released model, so that two copies fit 24 GB.
_LESS = {
    "Qwen3-Next": "128 of 512 experts",
    **dict.fromkeys(("DeepSeek-V3.2", "GLM-5", "DeepSeek-V4"), "32 of 256 experts, 32768 words"),
}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def build(name: str, dtype: str, sizes: dict[str, Any]) -> Any:
    """A model with random weights, made in its own dtype; `sizes` replace its own."""
    import transformers

    config, model, own = SIZES[name]
    sizes = _of_layers({**own, **sizes})
    torch.manual_seed(0)
    kind = getattr(transformers, model)
    # Not that of gpt-oss, whose softmax has one more term.
    attention = "sdpa" if kind._supports_sdpa else "eager"
    return kind._from_config(getattr(transformers, config)(**sizes),
                             dtype=DTYPES[dtype], attn_implementation=attention).eval()


def _of_layers(sizes):
    """With as many kinds of layers as there are layers."""
    count = sizes["num_hidden_layers"]
    return {name: value[:count] if name.endswith("layer_types") else value
            for name, value in sizes.items()}


def describe_depths() -> str:
    """The layers of each model, and what else is less than in the released one."""
    depths = (f"{name} {sizes['num_hidden_layers']}" for name, (*_, sizes) in SIZES.items())
    return "; ".join(f"{depth} ({_LESS[name]})" if name in _LESS else depth
                     for name, depth in zip(SIZES, depths, strict=True))
