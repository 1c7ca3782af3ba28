"""Whole models as files: logits, greedy tokens, open sizes, caches, ties."""

import copy

import pytest
import torch
import transformers
from sessions import File, error

import moe_mlir
from moe_mlir_bench.models import FAMILIES
from moe_mlir_bench.models.ties import LowestIndexFirst

# Relative to the largest logit: eager float32 is as far from float64.
TOLERANCE = 1e-5
# Which has what: gates of a softmax, renormalised or not; a clamp and biases; a sigmoid with a bias
# for the choice, in groups; transposed weights; gates that are scaled.
MODELS = ["Mixtral", "Qwen3-MoE", "OLMoE", "gpt-oss", "Granite-MoE", "DeepSeek-V3", "GLM4-MoE",
          "Qwen2-MoE", "MiniMax-M2", "Ernie4.5-MoE", "Phi-MoE"]


def build(name):
    torch.manual_seed(0)
    model = FAMILIES[name].build(torch.float32).eval()
    for buffer_name, buffer in model.named_buffers():
        if "correction_bias" in buffer_name:
            torch.nn.init.normal_(buffer, std=0.3)
    return model


def ids_of(model, *shape):
    return torch.randint(0, model.config.vocab_size, shape)


def double(model):
    model = copy.deepcopy(model).double()
    model.set_experts_implementation("eager")
    return model


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    model = build("Mixtral")
    path = tmp_path_factory.mktemp("mixtral") / "model.onnx"
    assert moe_mlir.onnx.export(model, (ids_of(model, 2, 6),), path,
                                kwargs=dict(use_cache=False)) == 1
    return model, File(path)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_logits_of_a_model(name, tmp_path):
    model = build(name)
    count = moe_mlir.onnx.export(model, (ids_of(model, 2, 6),), tmp_path / "model.onnx",
                                 kwargs=dict(use_cache=False))
    file = File(tmp_path / "model.onnx")
    assert file.nodes["MoE"] == count >= 1 and file.outputs == ["logits"]
    exact = double(model)
    for shape in ((2, 6), (1, 13), (3, 2), (1, 1)):
        ids = ids_of(model, *shape)
        found = file(ids)["logits"]
        assert error(found, exact(ids, use_cache=False).logits) < TOLERANCE
        assert torch.equal(found.argmax(-1), model(ids, use_cache=False).logits.argmax(-1))


@torch.no_grad()
def test_a_model_stays_as_it_was(tmp_path):
    model = build("OLMoE")
    before = model.config._experts_implementation
    state = {name: weight.clone() for name, weight in model.state_dict().items()}
    moe_mlir.onnx.export(model, (ids_of(model, 1, 4),), tmp_path / "model.onnx",
                         kwargs=dict(use_cache=False))
    assert model.config._experts_implementation == before
    assert all(torch.equal(weight, state[name]) for name, weight in model.state_dict().items())


@torch.no_grad()
def test_greedy_tokens(mixtral):
    model, file = mixtral
    ids = ids_of(model, 1, 5)
    expected = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0,
                              eos_token_id=None)
    while ids.shape != expected.shape:
        ids = torch.cat([ids, file(ids)["logits"][:, -1:].argmax(-1)], dim=1)
    assert torch.equal(ids, expected)


@torch.no_grad()
def test_of_equal_scores_the_lower_index_is_chosen(mixtral, tmp_path):
    model = copy.deepcopy(mixtral[0])
    for name, weight in model.named_parameters():
        if name.endswith("gate.weight"):
            weight[1::2] = weight[::2]  # experts in pairs of equal scores
    ids = ids_of(model, 2, 9)
    moe_mlir.onnx.export(model, (ids,), tmp_path / "model.onnx", kwargs=dict(use_cache=False))
    with LowestIndexFirst():
        expected = model(ids, use_cache=False).logits
    assert error(File(tmp_path / "model.onnx")(ids)["logits"], expected) < TOLERANCE


@torch.no_grad()
def test_a_mask_is_an_input(tmp_path):
    model = build("Granite-MoE")
    ids, mask = ids_of(model, 2, 6), torch.ones(2, 6, dtype=torch.int64)
    mask[1, :3] = 0
    moe_mlir.onnx.export(model, (ids,), tmp_path / "model.onnx",
                         kwargs=dict(attention_mask=mask, use_cache=False))
    file = File(tmp_path / "model.onnx")
    assert file.inputs == ["input_ids", "attention_mask"]
    expected = model(ids, attention_mask=mask, use_cache=False).logits
    assert error(file(ids, mask)["logits"][mask > 0], expected[mask > 0]) < TOLERANCE


def cache_of(model, ids):
    return model(ids, use_cache=True).cache


def tensors_of(cache):
    return [x for layer in cache.layers for x in (layer.keys, layer.values)]


@torch.no_grad()
def test_a_cache_that_grows(tmp_path):
    """The tensors of a cache are inputs, and new ones come back, for any number of sequences."""
    model = build("Mixtral")
    ids = ids_of(model, 2, 5)
    moe_mlir.onnx.export(model, (ids[:, 3:],), tmp_path / "model.onnx",
                         kwargs=dict(cache=cache_of(model, ids[:, :3])))
    file = File(tmp_path / "model.onnx")
    assert file.inputs[1:] == ["cache.layers.0.keys", "cache.layers.0.values"]
    assert file.outputs == ["logits", *(f"new.{name}" for name in file.inputs[1:])]
    ids = ids_of(model, 3, 4)
    expected = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0,
                              eos_token_id=None)
    past = [x[:, :, :0] for x in tensors_of(cache_of(model, ids))]  # none yet
    given = ids
    for _ in range(5):
        logits, *past = file(given, *past).values()
        given = logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, given], dim=1)
    assert torch.equal(ids, expected)


def test_a_cache_of_fixed_size_is_refused(tmp_path):
    model = build("Mixtral")
    cache = transformers.StaticCache(config=model.config, max_cache_len=8)
    with pytest.raises(ValueError, match="expected a model that changes no inputs .*DynamicCache"):
        moe_mlir.onnx.export(model, (ids_of(model, 1, 4),), tmp_path / "model.onnx",
                             kwargs=dict(cache=cache))
    assert not list(tmp_path.iterdir())
