"""LoRA of PEFT on a model whose weights are codes: what it computes and learns on their floats."""

import copy

import pytest
import torch

import moe_mlir
from moe_mlir.experts.quantized_weight import QuantizedWeight
from moe_mlir_bench.models import FAMILIES

peft = pytest.importorskip("peft")

IDS = torch.arange(24).view(2, 12) * 3 % 32


def with_floats(quantized, original):
    """The model with the floats that the codes of another stand for."""
    model = copy.deepcopy(original)
    for name, weight in quantized.named_modules():
        if isinstance(weight, QuantizedWeight):
            model.get_parameter(name).data.copy_(weight.dequantize())
    return model


def adapted(model):
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config).train()


def loss_of(model):
    return model(IDS, labels=IDS).loss


@pytest.mark.parametrize("format", ["int4", "mxfp4"])
def test_gradients_are_those_of_the_weights_as_floats(format):
    torch.manual_seed(0)
    original = FAMILIES["Mixtral"].build().float()
    model = copy.deepcopy(original)
    assert moe_mlir.quantize(model, format) > 2
    reference = adapted(with_floats(model, original))
    model = adapted(model)
    found, wanted = loss_of(model), loss_of(reference)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    found.backward()
    wanted.backward()
    learned = {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}
    assert learned and all("lora_" in name for name in learned)
    for name, grad in learned.items():
        torch.testing.assert_close(grad, reference.get_parameter(name).grad, rtol=1e-3, atol=1e-6)


def test_it_learns_and_codes_stay():
    torch.manual_seed(0)
    model = FAMILIES["Mixtral"].build().float()
    moe_mlir.quantize(model, "int4")
    codes = {name: weight.codes.clone() for name, weight in model.named_modules()
             if isinstance(weight, QuantizedWeight)}
    model = adapted(model)
    optimizer = torch.optim.Adam([w for w in model.parameters() if w.requires_grad], lr=1e-2)
    losses = []
    for _ in range(8):
        losses.append(loss_of(model))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 0.02
    for name, weight in model.get_base_model().named_modules():
        if isinstance(weight, QuantizedWeight):
            assert torch.equal(weight.codes, codes[name.replace(".base_layer", "")])
