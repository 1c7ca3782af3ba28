"""LoRA of PEFT on attention, experts and routers: transformers' own results, gradients and errors."""

import copy

import pytest
import torch
import transformers

import moe_mlir
import moe_mlir.hf
from moe_mlir_bench.models import FAMILIES

peft = pytest.importorskip("peft", reason="PEFT is not installed; requirements.txt pins it")

IDS = torch.arange(24).view(2, 12) * 3 % 32
ATTENTION = ["q_proj", "v_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.fixture(params=["Qwen3-MoE", "Mixtral", "gpt-oss"])
def model(request):
    torch.manual_seed(0)
    return FAMILIES[request.param].build(torch.float32)


def mixtral():
    torch.manual_seed(0)
    return FAMILIES["Mixtral"].build(torch.float32)


def adapted(model, r=4, **targets):
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=r, init_lora_weights=False, **targets))


def replaced(model):
    """With our routers and experts, in place."""
    model.set_experts_implementation("moe")
    assert moe_mlir.hf.patch(model) == 1
    return model


def loss_and_gradients(model):
    loss = model(IDS, labels=IDS).loss
    loss.backward()
    return loss.detach(), {name: weight.grad for name, weight in model.named_parameters()
                           if weight.requires_grad}


@torch.no_grad()
def logits(model):
    return model(IDS).logits


def check_equal(model, wanted, count):
    (loss, gradients), (wanted_loss, wanted_gradients) = map(loss_and_gradients, (model, wanted))
    torch.testing.assert_close(loss, wanted_loss, rtol=1e-5, atol=1e-6)
    assert set(gradients) == set(wanted_gradients) and len(gradients) == count
    for name, gradient in gradients.items():
        assert gradient.norm() > 0, name
        torch.testing.assert_close(gradient, wanted_gradients[name], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("first", ["adapters", "replacement"])
def test_attention_and_experts(model, first):
    targets = dict(target_modules=ATTENTION, target_parameters=EXPERTS)
    model.set_experts_implementation("eager")
    wanted = adapted(copy.deepcopy(model), **targets).train()
    if first == "replacement":
        found = adapted(replaced(model), **targets)
    else:
        found = adapted(model, **targets)
        replaced(found.get_base_model())
    check_equal(found.train(), wanted, count=8)


def test_a_router():
    targets = dict(target_parameters=["mlp.gate.weight"])
    wanted = adapted(mixtral(), **targets).train()
    found = adapted(replaced(mixtral()), **targets).train()
    check_equal(found, wanted, count=2)


def test_disabled_adapters_leave_the_model_as_it_was():
    model = replaced(mixtral()).eval()
    expected = logits(model)
    model = adapted(model, target_modules=ATTENTION, target_parameters=EXPERTS).eval()
    assert (logits(model) - expected).abs().max() > 0.1
    with model.disable_adapter():
        assert torch.equal(logits(model), expected)


def test_a_compiled_model_with_adapters():
    model = adapted(mixtral(), target_modules=ATTENTION, target_parameters=EXPERTS).eval()
    expected = logits(model)
    compiled = moe_mlir.compile(model, (IDS,), kwargs=dict(use_cache=False))
    torch.testing.assert_close(logits(compiled), expected, rtol=1e-4, atol=1e-5)
    _, gradients = loss_and_gradients(model.train())
    assert len(gradients) == 8 and all(gradient is not None for gradient in gradients.values())


# ---- packed and quantized weights --------------------------------------------------


def test_experts_with_adapters_are_not_packed_until_they_are_merged():
    model = adapted(replaced(mixtral()), target_parameters=EXPERTS).eval()
    expected = logits(model)
    with pytest.warns(UserWarning, match=r"an adapter of PEFT adds .* model.merge_and_unload\(\)"):
        assert moe_mlir.pack_experts(model) == 0
    assert torch.equal(logits(model), expected)
    merged = model.merge_and_unload()
    assert moe_mlir.pack_experts(merged) == 1
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("change", [moe_mlir.pack_linears, moe_mlir.quantize])
@pytest.mark.filterwarnings("ignore:.*is not packed")
def test_adapters_stay_floats_and_learn(change):
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=4, num_local_experts=4)
    # So wide that the matrices of the adapters could be packed.
    model = adapted(transformers.MixtralForCausalLM(config), r=64, target_modules=ATTENTION)
    before = {name: weight.clone() for name, weight in model.named_parameters() if weight.requires_grad}
    assert change(model) > 0
    _, gradients = loss_and_gradients(model.train())
    assert set(gradients) == set(before) and len(before) == 4
    for name, weight in before.items():
        assert torch.equal(model.get_parameter(name), weight)
        assert gradients[name].norm() > 0


def test_a_layer_that_peft_trains_whole_stays_floats():
    model = adapted(mixtral(), target_modules=ATTENTION, modules_to_save=["lm_head"])
    moe_mlir.quantize(model, "int8")
    _, gradients = loss_and_gradients(model.train())
    assert any("lm_head.modules_to_save" in name for name in gradients)


def test_merging_into_codes_says_what_to_do():
    model = mixtral()
    moe_mlir.quantize(model, "int4")
    model = adapted(model, target_modules=ATTENTION)
    with pytest.raises(TypeError, match=r"expected a weight of floats, found codes \(int4\); merge "
                                        r"adapters before moe_mlir.quantize"):
        model.merge_and_unload()
