"""What the tensors of quantized checkpoints stand for, by the libraries that write them.

`compressed_tensors.safetensors` was written and read by compressed-tensors 0.20: for each scheme
the tensors of one weight, and what `decompress` makes of them; its metadata has the configurations.
"""

import json
from pathlib import Path

import pytest
import torch
from released_checkpoints import words
from safetensors import safe_open

from moe_mlir._transformers.released_formats import AWQ, FORMATS, GPTQ
from moe_mlir.ops._quantized import dequantize_codes

FILE = Path(__file__).with_name("compressed_tensors.safetensors")
with safe_open(FILE, framework="pt") as _opened:
    CONFIGS = json.loads(_opened.metadata()["configs"])
    TENSORS = {name: _opened.get_tensor(name) for name in _opened.keys()}  # noqa: SIM118


def floats(format, tensors):
    """The only weight of these tensors."""
    ((name, parts),) = format.weights(tensors).items()
    codes, scales, zeros = format.read(parts, tensors.__getitem__)
    assert name.endswith(".weight") and codes.dtype == torch.uint8
    format_of_codes, group, _ = format.quantization
    return dequantize_codes(codes, scales, zeros, format_of_codes, group)


@pytest.mark.parametrize("scheme", CONFIGS)
def test_compressed_tensors_reads_the_same_numbers(scheme):
    tensors = {name: tensor for name, tensor in TENSORS.items() if name.startswith(f"{scheme}.")}
    expected = tensors.pop(f"{scheme}.expected")
    found = floats(FORMATS["compressed-tensors"](CONFIGS[scheme]), tensors)
    # It multiplies the scales of nvfp4 in bfloat16.
    torch.testing.assert_close(found, expected, rtol=8e-3 if scheme == "nvfp4" else 1e-6, atol=0)


def example(out=16, width=64, group=32):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (out, width), generator=generator)
    zeros = torch.randint(1, 16, (out, width // group), generator=generator)
    scales = torch.rand(out, width // group, generator=generator).half()
    wide = scales.float().repeat_interleave(group, 1)
    return codes, scales, zeros, wide * (codes - zeros.repeat_interleave(group, 1))


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_gptq(version):
    """Words along the inputs; zeros are one less in the first version."""
    codes, scales, zeros, expected = example()
    tensors = {"l.qweight": words(codes).T.contiguous(), "l.scales": scales.T,
               "l.qzeros": words((zeros - int(version == "gptq")).T.contiguous()),
               "l.g_idx": torch.arange(64, dtype=torch.int32) // 32}
    format = GPTQ({"bits": 4, "group_size": 32, "checkpoint_format": version})
    assert torch.equal(floats(format, tensors), expected)
    tensors["l.g_idx"] = tensors["l.g_idx"].flip(0)
    with pytest.raises(ValueError, match="found the order of activations"):
        floats(format, tensors)


def test_awq():
    """Words along the outputs, of which a word's bits have 0, 2, 4, 6, 1, 3, 5, 7."""
    codes, scales, zeros, expected = example()
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    tensors = {"l.qweight": words(codes.T.contiguous(), order), "l.scales": scales.T,
               "l.qzeros": words(zeros.T.contiguous(), order)}
    assert torch.equal(floats(AWQ({"bits": 4, "group_size": 32}), tensors), expected)


@pytest.mark.parametrize(("method", "config", "message"), [
    ("gptq", {"bits": 3}, "expected weights of 4 or 8 bits, found 3"),
    ("awq", {"bits": 4, "version": "gemv"}, "AWQ's version 'gemm', found 4 and 'gemv'"),
    ("compressed-tensors", {}, "expected one scheme of compressed-tensors for all weights, found 0"),
    ("compressed-tensors", {"format": "sparse-24", "config_groups": {"g": {"weights": {"a": 1}}}},
     "expected a format of compressed-tensors of .*found 'sparse-24'"),
    ("compressed-tensors", {"format": "pack-quantized", "config_groups": {
        "g": {"weights": {"num_bits": 4, "actorder": "group"}}}}, "in the order of activations"),
])
def test_what_is_not_read_is_refused(method, config, message):
    with pytest.raises(ValueError, match=message):
        FORMATS[method](config)
