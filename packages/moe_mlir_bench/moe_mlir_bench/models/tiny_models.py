"""A small model of each folder of transformers that has experts, with random weights.

Sizes are set by what configurations call them, whatever the model: layers of each kind that the
default configuration has, windows and chunks so small that a test goes past their ends.
"""

import copy
import importlib
import re
from collections.abc import Iterator
from typing import Any

import torch

from .families import VOCABULARY, spread_weights

# The names of sizes, whole, and what they become; the first that fits. None: two or more layers.
_SIZES: list[tuple[str, Any]] = [
    (r"vocab_size|vocab_size_per_layer_input|unpadded_vocab_size", VOCABULARY),
    (r"hidden_size|d_model|out_hidden_size|moe_hidden_size", 32),
    (r"ngram_vocab_size_base", 64),
    (r".*intermediate_size(_mlp)?|.*ffn(_hidden_size|_dim)|d_ff|expert_ffn_hidden_size|mlp_dim", 48),
    (r"num_attention_heads|n_heads|(encoder|decoder)_attention_heads|swa_num_attention_heads|num_heads", 4),
    (r"num_key_value_heads|swa_num_key_value_heads|num_global_key_value_heads", 2),
    (r"head_dim|swa_head_dim|global_head_dim|d_kv|kv_channels|linear_(key_|value_)?head_dim", 8),
    (r"qk_nope_head_dim|qk_rope_head_dim|v_head_dim|index_head_dim|mamba_d_head|mamba_head_dim", 8),
    (r"qk_head_dim", 16),
    (r"rotary_dim", 4),
    (r".*_lora_rank|.*_rank|router_hidden_size|d_rel", 16),
    (r"linear_num_heads|linear_num_(key|value)_heads|index_n_heads|o_groups|hc_mult|hc_count", 2),
    (r"mamba_n_heads|mamba_num_heads", 8),
    (r"mamba_d_state|ssm_state_size|mamba_dt_rank", 4),
    (r"mamba_n_groups|n_groups", 1),
    (r"num_experts|n_routed_experts|num_local_experts|moe_num_experts", 8),
    (r"num_experts_per_tok(en)?|moe_topk|moe_top_k|moe_k|top_k_experts", 2),
    (r"n_group|num_expert_group", 2),
    (r"topk_group", 1),
    (r"zero_expert_num", 2),
    (r"first_k_dense_replace|num_dense_layers", 1),
    (r"sliding_window(_size)?|attention_chunk_size|rel_extent", 8),
    (r"(mamba_)?chunk_size|block_size|index_block_size|index_kpool", 8),
    (r"index_topk|indexer_budget", 8),
    (r"index_topk_blocks", 2),
    (r"max_position_embeddings|max_seq_len|model_max_length", 128),
    (r"hidden_size_per_layer_input|ple_embed_dim", 8),
    (r"expert_capacity", 4),
]
# Sizes and switches of single models.
SETTINGS: dict[str, dict[str, Any]] = {
    "dbrx": dict(attn_config=dict(kv_n_heads=2, rope_theta=1e4, clip_qkv=8.0),
                 ffn_config=dict(ffn_hidden_size=48, moe_num_experts=8, moe_top_k=2)),
    "deepseek_v2": dict(topk_method="group_limited_greedy", n_group=2, topk_group=1,
                        num_experts_per_tok=2),
    "deepseek_ocr2": dict(num_experts_per_tok=2, mlp_layer_types=["dense", "sparse"]),
    "doge": dict(is_moe=True, num_experts=16),
    "dots1": dict(n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2),
    "flint": dict(mlp_only_layers=[0]),
    "gemma4": dict(enable_moe_block=True, num_experts=8, top_k_experts=2, moe_intermediate_size=24),
    "diffusion_gemma": dict(num_experts=8, top_k_experts=2, moe_intermediate_size=24),
    # Of rotary positions in several dims, which have a part of a head each.
    "ernie4_5_vl_moe": dict(rope_parameters=dict(rope_type="default", rope_theta=1e4,
                                                 mrope_section=[1, 1, 2])),
    "glm4v_moe": dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[1, 1, 0],
                                           partial_rotary_factor=0.5)),
    "hy_v4_vl": dict(rope_parameters=dict(rope_type="default", rope_theta=1e4,
                                          mrope_section=[2, 1, 1])),
    "hunyuan_v1_moe": dict(head_dim=8, num_experts=8, moe_topk=2),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1, expert_layer_period=1,
                  expert_layer_offset=0),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"], num_hidden_layers=2),
    "llama4": dict(interleave_moe_layer_step=1),
    # Rotary positions are half of its width, and those of a head 8 wide.
    "mistral4": dict(head_dim=16),
    "mistral_large4": dict(kv_source_layers=None),
    # Its default has experts in every fourth layer.
    "nllb_moe": dict(encoder_sparse_step=1, decoder_sparse_step=1),
    "step3p7": dict(sliding_window=8),
    "switch_transformers": dict(num_sparse_encoder_layers=2, num_sparse_decoder_layers=2),
    "zaya": dict(num_experts_per_tok=1),
    # Its default has state spaces alone, of which a cache does not count tokens.
    "granitemoehybrid": dict(layer_types=["mamba", "attention"], num_hidden_layers=2),
    "qwen4_exp": dict(indexer_budget=8, indexer_compress_ratio=4, indexer_n_heads=2,
                      indexer_kv_heads=1, indexer_head_dim=8),
}
_LAYERS = re.compile(r"n_layers|num_layers|(num_)?(hidden|encoder|decoder)_layers|depth")
_LAYER_KINDS = ("layer_types", "layers_block_type")


def build(folder: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """A model of the folder in evaluation mode that gives logits for ids.

    Raises:
        ValueError: none can be made; the reasons of all classes.
    """
    reasons, settings = [], SETTINGS.get(folder, {})
    for kind in classes(folder):
        try:
            config = kind.config_class(**_small(kind.config_class(**copy.deepcopy(settings)), settings))
            torch.manual_seed(0)
            model = kind._from_config(config)
        except Exception as error:  # whatever sizes lead to that a model does not have
            reasons.append(f"{kind.__name__}: {type(error).__name__}: {error}")
            continue
        spread_weights(model, 0)
        return model.to(dtype).eval()
    raise ValueError(f"expected a model of '{folder}' of small sizes, found none: {reasons}")


def _small(config, settings) -> dict[str, Any]:
    """The arguments of a configuration of small sizes, like one of the default sizes."""
    from transformers import PreTrainedConfig

    arguments: dict[str, Any] = {}
    layers = _layers(config, settings)
    for name, value in vars(config).items():
        if name in settings:
            arguments[name] = copy.deepcopy(settings[name])  # parts change what they are given
        elif isinstance(value, PreTrainedConfig):
            arguments[name] = _small(value, settings)
        elif name in _LAYER_KINDS and value:
            arguments[name] = layers
        elif isinstance(value, (list, tuple)) \
                and len(value) == getattr(config, "num_hidden_layers", None):
            arguments[name] = _spread(value, len(layers))
        elif name.endswith("_token_id") and type(value) is int:
            arguments[name] = min(value, VOCABULARY - 1)
        elif name == "eos_token_id" and isinstance(value, list):
            arguments[name] = 2
        elif name == "num_key_value_heads" and vars(config).get("kv_lora_rank"):
            arguments[name] = 4  # of latent attention all heads
        elif type(value) is int and _LAYERS.fullmatch(name):
            arguments[name] = len(layers)
        elif type(value) is int:
            small = next((size for text, size in _SIZES if re.fullmatch(text, name)), None)
            if small is not None and value:
                arguments[name] = small
    return arguments


def _layers(config, settings) -> list:
    """A layer of each kind, in their order; two where the configuration names none."""
    values = {**vars(config), **settings}
    kinds = next((values[name] for name in _LAYER_KINDS if values.get(name)), None)
    if not kinds:
        return [None, None]
    unique = list(dict.fromkeys(kinds))
    return unique if len(unique) > 1 else unique * 2


def _spread(values, count):
    """So many of the values, from the first to the last."""
    return [values[round(i * (len(values) - 1) / max(count - 1, 1))] for i in range(count)]


def classes(folder: str) -> Iterator[Any]:
    """The models of a folder, those that generate text first."""
    from transformers import PreTrainedModel

    code = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    kinds: list[Any] = [
        kind for name, kind in vars(code).items()
        if isinstance(kind, type) and issubclass(kind, PreTrainedModel)
        and kind.__module__ == code.__name__ and getattr(kind, "config_class", None) is not None
        and not name.endswith("PreTrainedModel")
        and getattr(kind, "forward", None) is not torch.nn.Module.forward]
    order = ("ForCausalLM", "ForConditionalGeneration", "ForTokenClassification",
             "ForBlockDiffusion")
    return (kind for end in order for kind in kinds if kind.__name__.endswith(end))
