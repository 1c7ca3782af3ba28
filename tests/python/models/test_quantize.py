"""Models whose weights are codes of 4 and 8 bits: what they compute, how they are kept."""

import copy
import pickle

import pytest
import torch
from test_expert_forms import FORMS, build, example
from test_packing import IDS, check_artifact

import moe_mlir
from moe_mlir.experts.quantized_weight import QuantizedWeight, bits_per_weight
from moe_mlir.nn import MoELayer, SMoE, SoftMoE
from moe_mlir.quantization import QuantizedLinear
from moe_mlir_bench.models import FAMILIES

FORMATS = ["int4", "int8", "fp8", "mxfp4", "mxfp8"]
# What rounding takes away from random weights, by norm.
ERRORS = {"int4": 0.12, "int8": 0.008, "fp8": 0.04, "mxfp4": 0.17, "mxfp8": 0.06}


def whole_model(dtype=torch.float32):
    model = FAMILIES["Granite-MoE"].build(dtype, layers=2, attn_implementation="sdpa",
                                          hidden_size=128, tie_word_embeddings=False)
    model.set_experts_implementation("moe")
    return model.eval()


def weights_of(model):
    return {name: module for name, module in model.named_modules()
            if isinstance(module, QuantizedWeight)}


def with_floats(model, quantized):
    """The model with the weights as floats that the codes of the other stand for."""
    model, found = copy.deepcopy(model), weights_of(quantized)
    state = {name: weight.dequantize() for name, weight in found.items()}
    model.load_state_dict(state, strict=False)
    return model


def error(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("format", FORMATS)
@torch.no_grad()
def test_a_layer_of_ours(format):
    torch.manual_seed(0)
    layer = MoELayer(SMoE(64, 8, 2), d_hidden=96)
    plain, h = copy.deepcopy(layer), torch.randn(3, 5, 64)
    assert moe_mlir.quantize(layer, format) == 1 and moe_mlir.quantize(layer, format) == 0
    found = layer(h)[0]
    torch.testing.assert_close(found, with_floats(plain, layer)(h)[0], rtol=1e-4, atol=1e-5)
    assert 0 < error(found, plain(h)[0]) < 2 * ERRORS[format]
    for name in ("w_in", "w_out"):
        weight = getattr(layer, name)
        assert error(weight.dequantize(), getattr(plain, name)) < ERRORS[format]
        assert weight.dequantize().shape == getattr(plain, name).shape
    assert repr(layer.w_in).startswith("QuantizedWeight([8, 96, 64], ")


@pytest.mark.parametrize(("name", "gate"), [
    (name, form[2].gate) for name, form in FORMS.items() if name not in ("muse_spark", "beam")])
@torch.no_grad()
def test_every_form_of_experts(name, gate):
    experts = build(name)
    plain = copy.deepcopy(experts)
    assert moe_mlir.quantize(experts, "int4") == 1
    assert experts.config._experts_implementation == "moe"
    x, indices, gates = example(torch.float32)
    plain = with_floats(plain, experts)
    torch.testing.assert_close(experts(x, indices, gates), plain(x, indices, gates),
                               rtol=1e-4, atol=1e-4)
    assert [weight.halves for weight in weights_of(experts).values()] == [
        gate == "concatenated", False]


@pytest.mark.parametrize("options", [
    dict(), dict(group=64, symmetric=False), dict(format="int8", group=0),
    dict(activations="int8")])
@torch.no_grad()
def test_a_model_is_quantized_saved_and_copied(options):
    model = whole_model()
    plain = copy.deepcopy(model)
    # Experts, attention and the head; no routers.
    assert moe_mlir.quantize(model, **options) == 2 + 2 * 4 + 1
    logits = model(IDS).logits
    expected = with_floats(plain, model)(IDS).logits
    assert error(logits, expected) < (0.1 if "activations" in options else 1e-4)
    other = copy.deepcopy(plain)
    moe_mlir.quantize(other, **options)
    assert list(other.state_dict()) == list(model.state_dict())
    for weight in weights_of(other).values():
        weight.codes.zero_()
    other.load_state_dict(model.state_dict())
    for each in (other, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(each(IDS).logits, logits)


def test_what_a_weight_takes():
    layer = MoELayer(SMoE(64, 8, 2), d_hidden=128)
    for format, group, bits in (("int4", 32, 4.5), ("int8", 64, 8.25), ("mxfp4", None, 4.5)):
        other = copy.deepcopy(layer)
        moe_mlir.quantize(other, format, group=group)
        assert bits_per_weight(other.w_in) == bits


@torch.no_grad()
def test_a_quantized_model_is_compiled():
    model = whole_model()
    moe_mlir.quantize(model)
    expected = model(IDS).logits
    compiled = moe_mlir.compile(model, (IDS,))
    for ids in (IDS, IDS[:, :1]):
        torch.testing.assert_close(compiled(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    text = compiled.module.text
    # Two products a layer of experts, four of attention, one of the head.
    assert text.count("#moe.weight_format<int4>") == 2 * 2 + 2 * 4 + 1
    found = torch.compile(model, backend="moe")(IDS).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_an_artifact_holds_the_codes(tmp_path):
    model = whole_model(torch.bfloat16)
    moe_mlir.quantize(model, symmetric=False)
    check_artifact(model, tmp_path)
    held = (tmp_path / "artifact" / "weights.safetensors").stat().st_size
    codes = sum(weight.nbytes for weight in weights_of(model).values())
    floats = sum(2 * weight.dequantize().numel() for weight in weights_of(model).values())
    assert codes < held < codes + 0.1 * floats


@torch.no_grad()
def test_a_cast_changes_what_is_computed_in_and_keeps_the_scales():
    model = whole_model()
    moe_mlir.quantize(model)
    scales = {name: weight.scales.clone() for name, weight in weights_of(model).items()}
    expected = model(IDS).logits
    model.to(torch.float16)
    found = model(IDS).logits
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)
    for name, weight in weights_of(model).items():
        assert weight.scales.dtype == torch.bfloat16 and torch.equal(weight.scales, scales[name])
        assert weight.dequantize().dtype == torch.float16


@torch.no_grad()
def test_codes_of_a_cpu_with_other_vectors_are_loaded(monkeypatch):
    layer = MoELayer(SMoE(64, 8, 2), d_hidden=100)
    plain, h = copy.deepcopy(layer), torch.randn(4, 64)
    moe_mlir.quantize(layer, symmetric=False)
    expected = layer(h)[0]
    found = layer.w_in.codes.shape[3]
    from moe_mlir.ops import _quantized
    monkeypatch.setattr(_quantized, "_columns_for", lambda cpu: 48 - found)
    moe_mlir.quantize(plain, symmetric=False)
    assert plain.w_in.codes.shape[3] == 48 - found
    state = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    monkeypatch.undo()
    layer.w_in.codes.zero_()
    layer.load_state_dict(state)
    assert torch.equal(layer(h)[0], expected)
    # What was given is as it was.
    assert all(torch.equal(state[name], tensor) for name, tensor in plain.state_dict().items())


def test_inputs_of_quantized_layers_have_gradients():
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 96)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), linear)
    floats = copy.deepcopy(model)
    moe_mlir.quantize(linear)
    assert type(linear) is QuantizedLinear and linear.bias.requires_grad
    with torch.no_grad():
        floats[1].weight.copy_(linear.weight.dequantize())
    x = torch.randn(5, 64)
    for each in (model, floats):
        each(x).square().sum().backward()
    torch.testing.assert_close(model[0].weight.grad, floats[0].weight.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(linear.bias.grad, floats[1].bias.grad, rtol=1e-4, atol=1e-4)
    with pytest.raises(RuntimeError, match="expected a weight that is not quantized, found codes"):
        linear.reset_parameters()


def tied(*layers):
    """An embedding and linear layers that have its weight."""
    model = torch.nn.Sequential(torch.nn.Embedding(96, 64), *layers)
    for layer in layers:
        layer.weight = model[0].weight
    return model


def test_a_tied_head_gets_codes_and_the_embedding_keeps_its_weight():
    model = tied(torch.nn.Linear(64, 96))
    before = model[0].weight
    values = before.detach().clone()
    assert moe_mlir.quantize(model, "int8") == 1
    assert model[0].weight is before and torch.equal(before, values)
    # One step of the largest weight, which is a 128th of it and what the largest code is short of
    # for a weight of the other sign, and the rounding of the scale to bf16.
    within = values.abs().max().item() * (2 ** -7 + 2 ** -9)
    torch.testing.assert_close(model[1].weight.dequantize(), values, rtol=0, atol=within)


def test_a_tied_model_of_transformers(tmp_path):
    torch.manual_seed(0)
    model = FAMILIES["Mixtral"].build(tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    moe_mlir.quantize(model, "int8")
    assert type(model.lm_head) is QuantizedLinear and not model.config.tie_word_embeddings
    model.tie_weights()     # as transformers does on many occasions
    assert type(model.lm_head.weight) is QuantizedWeight
    ids = torch.tensor([[5, 17, 3]])
    moe_mlir.save_pretrained(model, tmp_path)
    again = moe_mlir.from_pretrained(
        str(tmp_path), attn_implementation=model.config._attn_implementation)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
        compiled = moe_mlir.compile(model, (ids,), kwargs=dict(use_cache=False))
        torch.testing.assert_close(compiled(ids, use_cache=False).logits, model(ids).logits)


@pytest.mark.parametrize(("model", "message"), [
    (lambda: tied(torch.nn.Linear(64, 96), torch.nn.Linear(64, 96)),
     "its weights belong to other modules too"),
    (lambda: MoELayer(SoftMoE(16, 4, 2), 24), "a soft router uses its weights in other products"),
    (lambda: torch.nn.TransformerEncoderLayer(64, 4, 96),
     "a module around it reads its weight without calling it"),
    (lambda: torch.nn.Linear(64, 96, device="meta"), "expected its weights in memory"),
    (lambda: torch.nn.Linear(64, 96).double(), "expected float32, bfloat16 or float16"),
])
def test_layers_that_stay_as_they_are(model, message):
    with pytest.warns(UserWarning, match=message):
        assert moe_mlir.quantize(model()) == 0


def test_packed_layers_are_unpacked_first():
    layer = MoELayer(SMoE(64, 4, 2), 64)
    moe_mlir.pack_experts(layer)
    with pytest.warns(UserWarning, match="its weights are packed; call moe_mlir.unpack_experts"):
        assert moe_mlir.quantize(layer) == 0
    moe_mlir.unpack_experts(layer)
    assert moe_mlir.quantize(layer) == 1


def test_experts_alone():
    model = whole_model()
    assert moe_mlir.quantize(model, linears=False) == 2
    assert type(model.lm_head) is torch.nn.Linear
    assert moe_mlir.quantize(model) == 9


@pytest.mark.parametrize(("arguments", "message"), [
    (dict(format="int5"), "expected 'format' to be one of"),
    (dict(group=12), "expected 'group' to be 0 .a row., 8, 16 or a multiple of 32, found 12"),
    (dict(activations="fp8"), "expected 'activations' to be one of"),
    (dict(format="mxfp4", symmetric=False), "expected symmetric=True with 'mxfp4'"),
])
def test_wrong_arguments(arguments, message):
    layer = torch.nn.Linear(64, 96)
    with pytest.raises(ValueError, match=message):
        moe_mlir.quantize(layer, **arguments)
    assert type(layer) is torch.nn.Linear


def test_a_weight_that_is_not_finite_is_refused():
    layer = torch.nn.Linear(64, 96)
    with torch.no_grad():
        layer.weight[3, 5] = float("nan")
    with pytest.raises(ValueError, match="expected finite weights to quantize, found NaN"):
        moe_mlir.quantize(layer)
    assert type(layer) is torch.nn.Linear
    experts, h = MoELayer(SMoE(64, 4, 2), 64), torch.ones(2, 64)
    with torch.no_grad():
        experts.w_out[0, 0, 0] = float("inf")
    with pytest.raises(ValueError, match="expected finite weights"):
        moe_mlir.quantize(experts)
    assert experts(h)[0].shape == (2, 64) and type(experts.w_in) is torch.nn.Parameter
    with pytest.raises(TypeError, match="torch.nn.Module"):
        moe_mlir.quantize(layer.weight)
