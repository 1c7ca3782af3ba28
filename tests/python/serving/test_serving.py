"""vLLM serves small checkpoints with the experts, routers and linear layers of this package."""

import json

import pytest
import torch
import transformers

pytest.importorskip("vllm", reason="needs vLLM: utils/check_vllm.py")

from released_checkpoints import (  # noqa: E402
    gpt_oss,
    qwen,
    qwen_of_awq,
    qwen_of_gptq,
    qwen_of_integers,
)
from served import generate, modules, serving, worst_error  # noqa: E402
from vllm.model_executor.layers.fused_moe import RoutedExperts  # noqa: E402
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner  # noqa: E402

import moe_mlir  # noqa: E402
from moe_mlir.vllm.experts import MoEMlirExperts  # noqa: E402
from moe_mlir.vllm.router import MoEMlirRouter  # noqa: E402

SIZES = dict(vocab_size=96, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=32, initializer_range=0.2, max_position_embeddings=128)
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=48)

# A model for each way to select experts and to run them that vLLM has.
MODELS = {
    "Mixtral": dict(num_local_experts=8, num_experts_per_tok=2, intermediate_size=48),
    "Qwen3Moe": dict(num_experts=8, norm_topk_prob=False, intermediate_size=96, **EXPERTS),
    # A shared expert, with a gate of its own.
    "Qwen2Moe": dict(num_experts=6, shared_expert_intermediate_size=96, intermediate_size=96,
                     num_attention_heads=2, **EXPERTS),
    # Groups of experts, sigmoid scores with a bias, shared experts, a factor of all gates.
    "Glm4Moe": dict(n_routed_experts=8, n_group=2, topk_group=1, n_shared_experts=1,
                    first_k_dense_replace=1, routed_scaling_factor=1.5, intermediate_size=96,
                    **EXPERTS),
    # Sigmoid scores with a bias and no groups, which vLLM's own router of a CPU refuses.
    "MiniMaxM2": dict(num_local_experts=8, num_experts_per_tok=2, intermediate_size=48,
                      scoring_func="sigmoid", use_routing_bias=True, rotary_dim=32),
    # Gates and factors in turns, with limits and biases.
    "GptOss": dict(num_local_experts=4, num_experts_per_tok=2, intermediate_size=96,
                   sliding_window=16),
}


def build(name, **changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **MODELS[name], **changes})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if "bias" in key:
                tensor.normal_(0, 0.2)
    return model


def uses_our_kernels(llm):
    runners, layers = modules(llm, MoERunner), modules(llm, RoutedExperts)
    return bool(runners) and all(type(each.router) is MoEMlirRouter for each in runners.values()) \
        and all(type(each.quant_method.moe_kernel.fused_experts) is MoEMlirExperts
                for each in layers.values())


@pytest.mark.parametrize("name", MODELS)
def test_a_model_in_float32_is_served_as_transformers_runs_it(tmp_path, name):
    model = build(name)
    model.save_pretrained(tmp_path)
    with serving(tmp_path) as llm:
        assert uses_our_kernels(llm)
        assert worst_error(llm, model) < 1e-4


def test_a_model_in_bfloat16(tmp_path):
    # All experts: one that rounding selects instead of another would be a difference of its own.
    model = build("Mixtral", num_experts_per_tok=8).bfloat16()
    model.save_pretrained(tmp_path)
    with serving(tmp_path, dtype="bfloat16") as llm:
        assert uses_our_kernels(llm)
        # As far as models are from each other that round to 8 bits after other sums.
        assert worst_error(llm, model.float()) < 0.05


def qwen_of_integers_and_zeros(folder):
    qwen_of_integers(folder, symmetric=False)


@pytest.mark.parametrize("write", [gpt_oss, qwen, qwen_of_integers, qwen_of_integers_and_zeros,
                                   qwen_of_gptq, qwen_of_awq])
def test_a_checkpoint_is_served_as_it_was_released(tmp_path, write):
    """MXFP4, FP8 in blocks, compressed-tensors, GPTQ and AWQ."""
    write(tmp_path)
    model = moe_mlir.from_pretrained(tmp_path).float()
    # vLLM takes these formats in bfloat16 and float16 alone.
    with serving(tmp_path, dtype="bfloat16") as llm:
        assert uses_our_kernels(llm)
        assert all(each.quant_method.moe_kernel.fused_experts.codes
                   for each in modules(llm, RoutedExperts).values())
        assert worst_error(llm, model) < 0.05


@pytest.mark.parametrize("format", ["int4", "int6", "int8", "fp8", "mxfp4", "mxfp8"])
def test_weights_are_rounded_as_quantize_does(tmp_path, format):
    model = build("Mixtral")
    model.save_pretrained(tmp_path)
    moe_mlir.quantize(model, format)
    with serving(tmp_path, quantization=f"moe_{format}") as llm:
        assert uses_our_kernels(llm)
        assert worst_error(llm, model) < 1e-4


def test_options_of_rounding(tmp_path):
    model = build("Qwen2Moe")
    model.save_pretrained(tmp_path)
    moe_mlir.quantize(model, "int4", group=16, symmetric=False, linears=False)
    options = dict(quant_method="moe_mlir", format="int4", group=16, symmetric=False, linears=False)
    with serving(tmp_path, hf_overrides={"quantization_config": options}) as llm:
        assert worst_error(llm, model) < 1e-4


def test_a_compiled_graph_gives_the_same_tokens(tmp_path):
    """vLLM's default: it traces the model with torch.compile, our calls in it."""
    build("Mixtral").save_pretrained(tmp_path)
    with serving(tmp_path, quantization="moe_int4") as llm:
        expected = [tokens for tokens, _ in generate(llm)]
    with serving(tmp_path, quantization="moe_int4", enforce_eager=False) as llm:
        assert [tokens for tokens, _ in generate(llm)] == expected


@pytest.mark.parametrize("by_experts", [False, True], ids=["features", "experts"])
def test_two_processes_give_the_same_tokens(tmp_path, by_experts):
    """Each has a part of every expert, or half of the experts."""
    build("Mixtral").save_pretrained(tmp_path)
    with serving(tmp_path) as llm:
        expected = [tokens for tokens, _ in generate(llm)]
    with serving(tmp_path, tensor_parallel_size=2, enable_expert_parallel=by_experts) as llm:
        assert [tokens for tokens, _ in generate(llm)] == expected


@pytest.mark.parametrize(("change", "message"), [
    ({"format": "int5"}, "expected 'format' to be one of 'int4'.*found 'int5'"),
    ({"groups": 32}, "expected 'names' to be one of 'format'.*found 'groups'"),
    ({"format": "fp8", "symmetric": False}, "expected symmetric=True with 'fp8'"),
])
def test_wrong_options_are_refused(tmp_path, change, message):
    build("Mixtral").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "moe_mlir", **change}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message), serving(tmp_path):
        pass
