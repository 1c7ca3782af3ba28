"""Checkpoints as they are released in 4 and 8 bits: the numbers that transformers makes of them."""

import json

import pytest
import torch
import transformers
from released_checkpoints import (
    gpt_oss,
    qwen,
    qwen_of_integers,
    write_index,
)
from safetensors.torch import load_file, save_file
from test_packing import IDS

import moe_mlir
from moe_mlir.experts.quantized_weight import QuantizedWeight
from moe_mlir.ops._quantized import Quantization
from moe_mlir.quantization import QuantizedLinear
from moe_mlir_bench.models import FAMILIES


def quantized_weights(model):
    return {name: module for name, module in model.named_modules()
            if isinstance(module, QuantizedWeight)}


def error(found, expected):
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


@torch.no_grad()
def compare(folder, tolerance=0.0):
    """Ours and what transformers makes of the same files, on a CPU floats."""
    ours = moe_mlir.from_pretrained(folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert type(ours) is type(theirs) and ours.dtype == theirs.dtype and not ours.training
    weights, floats = quantized_weights(ours), theirs.state_dict()
    for name, weight in weights.items():
        assert weight.shape == floats[name].shape
        assert error(weight.dequantize(), floats[name]) <= tolerance, name
    for name, tensor in ours.state_dict().items():
        if name in floats:
            assert torch.equal(tensor, floats[name]), name
    assert set(floats) == {name for name in ours.state_dict()
                           if name.rpartition(".")[0] not in weights} | set(weights)
    assert error(ours(IDS).logits, theirs(IDS).logits) < 0.03
    return ours


def test_gpt_oss_in_mxfp4_has_the_same_weights(tmp_path):
    gpt_oss(tmp_path)
    model = compare(tmp_path)
    assert len(quantized_weights(model)) == 4
    assert model.config._experts_implementation == "moe"
    assert not hasattr(model.config, "quantization_config")


@torch.no_grad()
def test_a_loaded_model_generates_and_is_compiled(tmp_path):
    gpt_oss(tmp_path)
    model = moe_mlir.from_pretrained(tmp_path, activations="int8", attn_implementation="eager")
    assert model.config._attn_implementation == "eager"
    assert model.generate(IDS, max_new_tokens=3, do_sample=False).shape == (1, IDS.shape[1] + 3)
    experts = model.model.layers[0].mlp.experts
    assert experts.gate_up_proj.quantization.activations == "int8"
    x = torch.randn(5, 64).bfloat16()
    compiled = moe_mlir.compile(experts, (x, torch.arange(10).view(5, 2) % 4,
                                          torch.rand(5, 2).bfloat16()))
    indices, gates = torch.arange(6).view(3, 2) % 4, torch.rand(3, 2).bfloat16()
    torch.testing.assert_close(compiled(x[:3], indices, gates), experts(x[:3], indices, gates),
                               rtol=2e-2, atol=2e-2)


def test_experts_of_their_own_names_are_stacked(tmp_path):
    """FP8 in blocks: their floats are rounded to bfloat16, ours are not."""
    qwen(tmp_path)
    assert (tmp_path / "model.safetensors.index.json").exists()
    model = compare(tmp_path, tolerance=2.0 ** -8)
    # Two of each layer's experts, and its four projections of attention.
    assert len(quantized_weights(model)) == 2 * 2 + 2 * 4
    assert type(model.model.layers[0].self_attn.q_proj) is QuantizedLinear
    assert type(model.lm_head) is torch.nn.Linear


@pytest.mark.parametrize("checkpoint", [
    # transformers divides such a weight in blocks of one size, which is not how they are stored.
    lambda folder: qwen(folder, width=160, inner=96), qwen_of_integers])
def test_weights_are_those_of_the_checkpoint(tmp_path, checkpoint):
    floats = checkpoint(tmp_path)
    model = moe_mlir.from_pretrained(tmp_path, dtype=torch.float32)
    layer = model.model.layers[1]
    torch.testing.assert_close(layer.self_attn.o_proj.weight.dequantize(),
                               floats["model.layers.1.self_attn.o_proj.weight"])
    for name, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        expected = torch.stack([torch.cat([
            floats[f"model.layers.1.mlp.experts.{expert}.{part}.weight"] for part in parts])
            for expert in range(4)])
        torch.testing.assert_close(getattr(layer.mlp.experts, name).dequantize(), expected)
    assert model(IDS).logits.isfinite().all()


def test_scales_that_are_powers_of_two(tmp_path):
    qwen(tmp_path, block=(1, 32), scales=lambda x: x.log2().ceil().exp2())
    model = compare(tmp_path)
    weight = model.model.layers[0].mlp.experts.gate_up_proj
    assert weight.quantization == Quantization("fp8_e4m3", 32)
    assert weight.scales.dtype == torch.bfloat16


def test_a_checkpoint_of_floats_is_loaded_as_ever(tmp_path):
    model = FAMILIES["Granite-MoE"].build()
    model.save_pretrained(tmp_path)
    loaded = moe_mlir.from_pretrained(tmp_path)
    assert not quantized_weights(loaded)
    assert all(torch.equal(tensor, model.state_dict()[name])
               for name, tensor in loaded.state_dict().items())


def rewrite(folder, change):
    for file in folder.glob("*.safetensors"):
        save_file({name: change(name, tensor) for name, tensor in load_file(file).items()}, file,
                  metadata={"format": "pt"})


def test_codes_and_scales_that_are_no_numbers_are_refused(tmp_path):
    gpt_oss(tmp_path)
    rewrite(tmp_path, lambda name, x: x.fill_(255) if name.endswith("_scales") else x)
    with pytest.raises(ValueError, match="expected scales that are powers of two, found NaN"):
        moe_mlir.from_pretrained(tmp_path)


def test_float8_that_is_nan_is_refused(tmp_path):
    qwen(tmp_path)
    rewrite(tmp_path, lambda name, x: x.view(torch.uint8).fill_(127).view(x.dtype)
            if x.dtype == torch.float8_e4m3fn else x)
    with pytest.raises(ValueError, match="expected .*_proj.weight' to be finite, found NaN"):
        moe_mlir.from_pretrained(tmp_path)


@pytest.mark.parametrize(("quantization", "error", "message"), [
    ({"quant_method": "aqlm"}, ValueError, "expected a checkpoint quantized by .*found 'aqlm'; load"),
    ({"quant_method": "fp8", "weight_block_size": [128, 40]}, ValueError, "expected 'group' to be"),
])
def test_other_checkpoints_are_refused(tmp_path, quantization, error, message):
    qwen(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    with pytest.raises(error, match=message):
        moe_mlir.from_pretrained(tmp_path)


def test_a_missing_file_and_a_wrong_argument(tmp_path):
    gpt_oss(tmp_path)
    with pytest.raises(ValueError, match="expected 'activations' to be one of"):
        moe_mlir.from_pretrained(tmp_path, activations="fp8")
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(FileNotFoundError, match="save the checkpoint as safetensors"):
        moe_mlir.from_pretrained(tmp_path)


def test_a_weight_without_a_kernel_is_loaded_as_floats(tmp_path, monkeypatch):
    from moe_mlir.weights.model_layers import ModelLayers
    gpt_oss(tmp_path)
    monkeypatch.setattr(ModelLayers, "why_no_kernel", lambda self, module: "its norm")
    with pytest.warns(UserWarning, match="gate_up_proj' is loaded as floats: its norm"):
        model = moe_mlir.from_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not quantized_weights(model)
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)


def test_a_layer_of_which_half_is_quantized_is_loaded_as_floats(tmp_path):
    gpt_oss(tmp_path)
    floats = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    for file in tmp_path.glob("*.safetensors"):
        state = load_file(file)
        for name in [name for name in state if "layers.1." in name and "down_proj_" in name
                     and not name.endswith("bias")]:
            whole = name.rpartition("_")[0]
            del state[name]
            state[whole] = floats[whole].contiguous()
        save_file(state, file, metadata={"format": "pt"})
    write_index(tmp_path)
    with pytest.warns(UserWarning, match="loaded as floats: 'down_proj' beside it is not quantized"):
        model = moe_mlir.from_pretrained(tmp_path)
    assert set(quantized_weights(model)) == {
        "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"}
    assert torch.equal(model.state_dict()["model.layers.1.mlp.experts.gate_up_proj"],
                       floats["model.layers.1.mlp.experts.gate_up_proj"])
