"""Small checkpoints as they are released in 4 and 8 bits."""

import json

import torch
import transformers
from safetensors.torch import load_file, save_file

from moe_mlir.experts.quantized_weight import quantize_weight
from moe_mlir.ops._quantized import Quantization, dequantize_codes

MXFP4 = Quantization("fp4_e2m1", 32)


def words(codes, order=range(8)):
    """Eight codes of 4 bits a word along the last dim, the first in the lowest bits."""
    nibbles = codes.long().unflatten(-1, (-1, 8))[..., list(order)]
    total = (nibbles << 4 * torch.arange(8)).sum(-1)
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)


def write_index(folder):
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = {name: file.name for file in folder.glob("*.safetensors")
                 for name in load_file(file)}
        index.write_text(json.dumps({"metadata": {}, "weight_map": files}))


def write(folder, model, quantization, change):
    """The model's checkpoint with `change(name, tensor)` in the place of each of its tensors."""
    model.save_pretrained(folder, max_shard_size="200KB")
    for file in folder.glob("*.safetensors"):
        state = {}
        for name, tensor in load_file(file).items():
            state |= {key: value.contiguous() for key, value in change(name, tensor).items()}
        save_file(state, file, metadata={"format": "pt"})
    write_index(folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))


def gpt_oss(folder):
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_local_experts=4,
        num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        vocab_size=96, sliding_window=16)).bfloat16()

    def change(name, tensor):
        if not name.endswith(("gate_up_proj", "down_proj")):
            return {name: tensor}
        codes, scales, _ = quantize_weight(tensor.mT.float(), MXFP4, exponents=True,
                                           dtype=torch.float32)
        pairs = codes.unflatten(-1, (-1, 16, 2))
        return {f"{name}_blocks": pairs[..., 0] | pairs[..., 1] << 4,
                f"{name}_scales": (scales.log2() + 127).to(torch.uint8)}
    write(folder, model, {"quant_method": "mxfp4"}, change)
    return model


def qwen_model(width=256, inner=128):
    torch.manual_seed(0)
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(
        hidden_size=width, intermediate_size=64, moe_intermediate_size=inner, num_hidden_layers=2,
        num_experts=4, num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=4,
        head_dim=32, vocab_size=96)).bfloat16()


def qwen(folder, block=(128, 128), scales=lambda x: x, **sizes):
    """The floats of the checkpoint that it writes, by the names in it."""
    model, floats = qwen_model(**sizes), {}

    def change(name, tensor):
        if not name.endswith("_proj.weight"):
            return {name: tensor}
        rows, columns = block
        out, width = tensor.shape
        pad = (0, -width % columns, 0, -out % rows)
        blocks = torch.nn.functional.pad(tensor.float(), pad)
        blocks = blocks.unflatten(0, (-1, rows)).unflatten(-1, (-1, columns))
        scale = scales(blocks.abs().amax((1, 3)) / 448)
        scale = scale[:, None, :, None]
        codes = (blocks / scale).to(torch.float8_e4m3fn)
        floats[name] = (codes.float() * scale).flatten(2).flatten(0, 1)[:out, :width]
        codes, scale = codes.flatten(2).flatten(0, 1)[:out, :width], scale[:, 0, :, 0]
        stored = (scale.log2() + 127).to(torch.uint8) if block[0] == 1 else scale
        return {name: codes, f"{name}_scale_inv": stored}
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic",
                    "weight_block_size": list(block), "modules_to_not_convert": [
                        "lm_head", *(f"model.layers.{i}.mlp.gate" for i in range(2))]}
    if block[0] == 1:
        quantization["scale_fmt"] = "ue8m0"
    write(folder, model, quantization, change)
    return floats


def qwen_of_integers(folder, symmetric=True):
    """Codes of 4 bits in int32 words along the inputs, as compressed-tensors has them."""
    model, floats = qwen_model(), {}

    def change(name, tensor):
        if not name.endswith("_proj.weight"):
            return {name: tensor}
        codes, scales, zeros = quantize_weight(tensor, Quantization("int4", 32), symmetric=symmetric)
        floats[name] = dequantize_codes(codes, scales, zeros, "int4", 32)
        stored = {f"{name}_packed": words(codes), f"{name}_scale": scales,
                  f"{name}_shape": torch.tensor(tensor.shape)}
        if zeros is not None:
            stored[f"{name}_zero_point"] = words(zeros.T.to(torch.uint8)).T
        return stored
    write(folder, model, {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "ignore": ["lm_head", "re:.*mlp.gate$"], "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": {
                "num_bits": 4, "group_size": 32, "strategy": "group", "symmetric": symmetric,
                "type": "int"}}}}, change)
    return floats


def qwen_of_gptq(folder):
    """Symmetric codes of 4 bits in words along the inputs, as GPTQModel has them."""
    def change(name, tensor):
        if not name.endswith("_proj.weight"):
            return {name: tensor}
        codes, scales, _ = quantize_weight(tensor, Quantization("int4", 32), dtype=torch.float16)
        stem, (out, width) = name.removesuffix(".weight"), tensor.shape
        # The zero 8 is stored as what is one less.
        zeros = torch.full((width // 32, out), 7)
        return {f"{stem}.qweight": words(codes).T, f"{stem}.qzeros": words(zeros),
                f"{stem}.scales": scales.T, f"{stem}.g_idx": torch.arange(width).int() // 32}
    write(folder, qwen_model(), {"quant_method": "gptq", "bits": 4, "group_size": 32,
                                 "desc_act": False, "sym": True, "checkpoint_format": "gptq"}, change)


def qwen_of_awq(folder):
    """Codes of 4 bits with zeros in words along the outputs, as AutoAWQ has them."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def change(name, tensor):
        if not name.endswith("_proj.weight"):
            return {name: tensor}
        codes, scales, zeros = quantize_weight(tensor, Quantization("int4", 32), symmetric=False,
                                               dtype=torch.float16)
        stem = name.removesuffix(".weight")
        return {f"{stem}.qweight": words(codes.T, order), f"{stem}.scales": scales.T,
                f"{stem}.qzeros": words(zeros.T.to(torch.uint8), order)}
    write(folder, qwen_model(), {"quant_method": "awq", "bits": 4, "group_size": 32,
                                 "zero_point": True, "version": "gemm"}, change)
