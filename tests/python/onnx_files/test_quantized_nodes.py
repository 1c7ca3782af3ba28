"""Quantized layers and models as files: the numbers are those of our kernels."""

import pytest
import torch
import transformers
from sessions import File, error

import moe_mlir
from moe_mlir.onnx import code_blocks
from moe_mlir.onnx.code_blocks import Blocks
from moe_mlir_bench.models import FAMILIES

# onnxruntime rounds rows to 8 bits in front of weights of 8 bits, unless this is set.
EXACT = ("ORT_QMOE_CPU_QNBIT_GEMM", "fp32")
FORMATS = [("int4", {}), ("int8", {}), ("int4", dict(symmetric=False)), ("int4", dict(group=16)),
           ("int8", dict(symmetric=False, group=64)), ("int6", {}), ("int6", dict(symmetric=False)),
           ("mxfp4", {}), ("int4", dict(group=0))]
IDS = [f"{name}-{'-'.join(map(str, options.values()))}" for name, options in FORMATS]


class Experts(torch.nn.Module):
    """Experts of a model of transformers and a router, without what is around them."""

    def __init__(self):
        super().__init__()
        config = transformers.Qwen3MoeConfig(hidden_size=64, moe_intermediate_size=96,
                                             num_experts=8, num_experts_per_tok=2)
        config._experts_implementation = "eager"
        self.experts = transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeExperts(config)
        for weight in self.experts.parameters():
            torch.nn.init.normal_(weight, std=0.2)

    def forward(self, x, scores):
        gates, indices = scores.softmax(-1).topk(2)
        return self.experts(x, indices, gates)


def quantized(format, options):
    torch.manual_seed(0)
    model = Experts().eval()
    assert moe_mlir.quantize(model, format, **options) == 1
    return model


@pytest.mark.drawn(4)
@pytest.mark.parametrize("format,options", FORMATS, ids=IDS)
@torch.no_grad()
def test_a_quantized_layer(format, options, tmp_path, monkeypatch):
    monkeypatch.setenv(*EXACT)
    model = quantized(format, options)
    inputs = torch.randn(9, 64), torch.randn(9, 8)
    assert moe_mlir.onnx.export(model, inputs, tmp_path / "layer.onnx") == 1
    file = File(tmp_path / "layer.onnx")
    assert file.nodes["QMoE"] == 1 and not file.nodes["MoE"]
    for given in (inputs, (torch.randn(1, 64), torch.randn(1, 8))):
        assert error(file(*given)["output"], model(*given)) < 1e-5


@torch.no_grad()
def test_rows_rounded_to_8_bits(tmp_path):
    """By choice with 4 bits; by onnxruntime's kernels always with 8."""
    inputs = torch.randn(9, 64), torch.randn(9, 8)
    for format, options in (("int4", dict(activations="int8")), ("int8", {})):
        model = quantized(format, options)
        moe_mlir.onnx.export(model, inputs, tmp_path / "layer.onnx")
        difference = error(File(tmp_path / "layer.onnx")(*inputs)["output"], model(*inputs))
        assert difference < 0.03


@pytest.mark.drawn(1)
@pytest.mark.parametrize("format", ["int4", "int8"])
@torch.no_grad()
def test_a_quantized_model(format, tmp_path, monkeypatch):
    """Its linear layers are MatMulNBits; sizes that are no multiples of 32 have smaller blocks."""
    monkeypatch.setenv(*EXACT)
    torch.manual_seed(0)
    model = FAMILIES["Mixtral"].build(torch.float32, hidden_size=64, intermediate_size=48).eval()
    assert moe_mlir.quantize(model, format) > 1
    ids = torch.randint(0, model.config.vocab_size, (2, 7))
    moe_mlir.onnx.export(model, (ids,), tmp_path / "model.onnx", kwargs=dict(use_cache=False))
    file = File(tmp_path / "model.onnx")
    assert file.nodes["QMoE"] == 1 and file.nodes["MatMulNBits"] >= 4
    found, expected = file(ids)["logits"], model(ids, use_cache=False).logits
    assert error(found, expected) < 1e-5
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


def test_blocks_survive_their_attributes():
    blocks = Blocks(96, 64, "int4", 0, 32, halves=True, interleave=True)
    assert Blocks.of(blocks.attributes()) == blocks


def test_rows_of_halves_take_turns():
    rows = torch.arange(8).view(1, 8, 1)
    assert code_blocks.by_turns(rows).flatten().tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


@pytest.mark.parametrize("format,options,reason", [
    ("fp8", {}, "expected codes of int4, int6, int8, fp4_e2m1, found fp8_e4m3"),
    ("int4", dict(group=8), "multiples of 16, found rows of 64 in groups of 8"),
])
def test_other_codes_are_refused(format, options, reason, tmp_path):
    inputs = torch.randn(9, 64), torch.randn(9, 8)
    with pytest.raises(ValueError, match=reason):
        moe_mlir.onnx.export(quantized(format, options), inputs, tmp_path / "layer.onnx")
    assert not list(tmp_path.iterdir())


def test_zeros_that_are_no_codes_are_refused(tmp_path):
    model = quantized("int4", dict(symmetric=False))
    model.experts.down_proj.zeros.add_(0.5)
    with pytest.raises(ValueError, match="'experts': expected whole zeros from 0 to 15"):
        moe_mlir.onnx.export(model, (torch.randn(9, 64), torch.randn(9, 8)),
                             tmp_path / "layer.onnx")
