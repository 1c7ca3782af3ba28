"""hf.patch beside what else changes a model: accelerate, checkpointing, copies, files."""

import copy
import functools
import io
import warnings

import accelerate
import pytest
import torch
from support import Selections

from moe_mlir import hf
from moe_mlir.patching.router_modules import is_router
from moe_mlir_bench.models import FAMILIES

# Ernie's bias, Switch's classifier and experts are in layers of their own, whose hooks bring them.
HOOKED = ["Mixtral", "DeepSeek-V3", "Ernie4.5-MoE", "Switch"]


def offload(model, folder):
    return accelerate.cpu_offload(model, execution_device="cpu")


def offload_whole_layers(model, folder):
    """As device maps do: one hook brings the weights of a layer with all inside."""
    return accelerate.dispatch_model(model, device_map(model, "cpu"), main_device="cpu",
                                     offload_dir=folder, force_hooks=True)


def spread_to_disk(model, folder):
    return accelerate.dispatch_model(model, device_map(model, "disk"), main_device="cpu",
                                     offload_dir=folder, force_hooks=True)


def device_map(model, place):
    """Blocks with routers at `place`, the rest on the CPU."""
    blocks = {name.rpartition(".")[0] for name, module in model.named_modules()
              if is_router(module)}
    places = {name: place for name in blocks}
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
    for name, _ in tensors:
        owner = name.rpartition(".")[0]
        if not any(owner == b or owner.startswith(b + ".") for b in blocks):
            places[owner] = "cpu"
    return places


def logits(model, inputs):
    with torch.no_grad():
        return model(**inputs).logits


def runs_ours(model):
    """The number of routers whose forward is ours, beneath hooks or not."""
    return sum(hf._is_patched(m) for m in model.modules() if is_router(m))


@pytest.mark.parametrize("spread", [offload, offload_whole_layers, spread_to_disk])
@pytest.mark.parametrize("name, first", [*((name, "hooks") for name in HOOKED), ("Switch", "patch")])
def test_models_that_accelerate_spreads(name, spread, first, tmp_path):
    family = FAMILIES[name]
    model, inputs = family.build(), family.example()
    expected = logits(model, inputs)
    steps = {"patch": lambda m: hf.patch(m), "hooks": lambda m: spread(m, str(tmp_path))}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="(?s).*stay")
        order = ("patch", "hooks") if first == "patch" else ("hooks", "patch")
        results = {step: steps[step](model) for step in order}
    assert results["patch"] == family.routers() == runs_ours(model)
    assert hf.patch(model) == 0
    torch.testing.assert_close(logits(model, inputs), expected, rtol=1e-5, atol=1e-5)
    assert hf.unpatch(model) == family.routers() and runs_ours(model) == 0
    torch.testing.assert_close(logits(model, inputs), expected, rtol=0, atol=0)
    hf.patch(model)
    accelerate.hooks.remove_hook_from_submodules(model)
    if spread is not spread_to_disk:
        torch.testing.assert_close(logits(model, inputs), expected, rtol=1e-5, atol=1e-5)
    assert runs_ours(model) == family.routers()


def test_offloaded_experts():
    family = FAMILIES["Qwen3-MoE"]
    model, inputs = family.build(), family.example()
    expected = logits(model, inputs)
    model.set_experts_implementation("moe")
    accelerate.cpu_offload(model, execution_device="cpu")
    assert hf.patch(model) == 1
    torch.testing.assert_close(logits(model, inputs), expected, rtol=1e-5, atol=1e-5)


def test_a_compiled_model_needs_its_weights():
    import moe_mlir
    family = FAMILIES["Qwen3-MoE"]
    model = accelerate.cpu_offload(family.build(), execution_device="cpu")
    with pytest.raises(ValueError, match="expected weights in memory, found '.*' on the device 'meta'; "
                                         "if accelerate offloads it"):
        moe_mlir.compile(model, (), kwargs=family.example())


# ---- what is not replaced says why ----------------------------------------------------


def test_a_forward_of_somebody_else_stays_with_a_warning():
    model = FAMILIES["Mixtral"].build()
    router = model.model.layers[0].mlp.gate
    router.forward = functools.partial(type(router).forward, router)
    with pytest.warns(UserWarning, match=r"'model.layers.0.mlp.gate' \(MixtralTopKRouter\) stays as it "
                                         "is: expected the forward of its class"):
        assert hf.patch(model) == 0


def test_a_class_that_only_has_the_name_of_a_router_stays():
    class MixtralTopKRouter(torch.nn.Module):
        def forward(self, x):
            return x + 1
    router = MixtralTopKRouter()
    assert hf.patch(router) == 0
    assert torch.equal(router(torch.zeros(2)), torch.ones(2))


# ---- copies and files -----------------------------------------------------------------


def copied(model, folder):
    return copy.deepcopy(model)


def pickled(model, folder):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("again", [copied, pickled])
@pytest.mark.parametrize("name", ["Mixtral", "Switch"])
def test_copies_stay_patched_and_own_their_weights(name, again, tmp_path):
    family = FAMILIES[name]
    model, inputs = family.build(), family.example()
    hf.patch(model)
    expected = logits(model, inputs)
    other = again(model, tmp_path)
    assert runs_ours(other) == family.routers() and hf.patch(other) == 0
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    torch.testing.assert_close(logits(other, inputs), expected, rtol=0, atol=0)


def test_a_saved_model_is_the_models_own(tmp_path):
    import transformers
    family = FAMILIES["Mixtral"]
    model, inputs = family.build(), family.example()
    expected = logits(model, inputs)
    hf.patch(model)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager").eval()
    assert runs_ours(loaded) == 0
    torch.testing.assert_close(logits(loaded, inputs), expected, rtol=1e-5, atol=1e-5)


def test_weights_that_are_not_there_are_an_error():
    family = FAMILIES["Qwen3-MoE"]
    model = family.build()
    hf.patch(model)
    model.model.layers[0].mlp.gate.to(device="meta")
    with pytest.raises(ValueError, match="expected the weight of a router in memory, found it on the "
                                         "device 'meta'"):
        logits(model, family.example())


def scale_in_place(model):
    with torch.no_grad():
        model.model.layers[0].mlp.gate.weight.mul_(-1.5)


@pytest.mark.parametrize("change", [
    scale_in_place, lambda m: m.half(), lambda m: m.to(torch.bfloat16),
    lambda m: m.load_state_dict({n: 1.5 * t for n, t in m.state_dict().items()}, assign=True)])
def test_weights_that_change_after_the_patch(change):
    family = FAMILIES["Qwen3-MoE"]
    model, inputs = family.build(), family.example()
    patched = copy.deepcopy(model)
    hf.patch(patched)
    change(model)
    change(patched)
    found = logits(patched, inputs)
    with Selections(settle=True):
        expected = logits(model, inputs)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


# ---- training -------------------------------------------------------------------------


def train(model, steps=3):
    """Losses of a few steps, as a Trainer takes them on a CPU."""
    worker = accelerate.Accelerator(cpu=True)
    model, optimizer = worker.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    losses = []
    for step in range(steps):
        tokens = FAMILIES["Qwen3-MoE"].example(seed=step)["input_ids"]
        loss = model(input_ids=tokens, labels=tokens).loss
        worker.backward(loss)
        worker.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("experts", ["eager", "moe"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_takes_the_same_steps(experts, checkpointing):
    model = FAMILIES["Qwen3-MoE"].build(layers=2).train()
    patched = copy.deepcopy(model)
    hf.patch(patched)
    patched.set_experts_implementation(experts)
    if checkpointing:
        patched.gradient_checkpointing_enable()
    torch.testing.assert_close(train(patched), train(model), rtol=1e-4, atol=1e-4)
    for (name, a), b in zip(patched.named_parameters(), model.parameters()):
        assert (a - b).abs().max() < 2e-3, name
