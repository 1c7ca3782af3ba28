"""Quantized models as folders: what save_pretrained writes and from_pretrained reads."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_packing import IDS

import moe_mlir
from moe_mlir_bench.models import FAMILIES


@pytest.mark.parametrize("family", ["Mixtral", "gpt-oss"])
def test_a_folder_holds_the_codes(family, tmp_path):
    torch.manual_seed(0)
    model = FAMILIES[family].build()
    moe_mlir.quantize(model, "int4", symmetric=False, activations="int8")
    moe_mlir.save_pretrained(model, tmp_path, max_shard_size="100KB")
    assert not hasattr(model.config, "quantization_config")
    again = moe_mlir.from_pretrained(str(tmp_path), dtype=torch.float32,
                                     attn_implementation=model.config._attn_implementation)
    found, wanted = again.state_dict(), model.state_dict()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, model(IDS).logits)
    # transformers does not load it without the codes.
    with pytest.raises(ValueError, match="quant_method"):
        type(model).from_pretrained(tmp_path)


def test_a_folder_needs_quantized_weights(tmp_path):
    with pytest.raises(ValueError, match="expected a model with quantized weights, found none"):
        moe_mlir.save_pretrained(FAMILIES["Mixtral"].build(), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_without_a_part_is_an_error(tmp_path):
    model = FAMILIES["Mixtral"].build()
    moe_mlir.quantize(model, "int8")
    moe_mlir.save_pretrained(model, tmp_path)
    path = tmp_path / "model.safetensors"
    state = load_file(path)
    gone = next(name for name in state if name.endswith("experts.down_proj.scales"))
    del state[gone]
    save_file(state, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"expected '{gone}' in the checkpoint, found none"):
        moe_mlir.from_pretrained(str(tmp_path))


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3-MoE"])
def test_a_folder_of_the_models_own_method_is_an_error(family, tmp_path):
    """transformers loads it, with random numbers in the place of the weights."""
    model = FAMILIES[family].build()
    model.save_pretrained(tmp_path / "floats")
    moe_mlir.quantize(model, "int4")
    model.save_pretrained(tmp_path / "codes")
    with pytest.raises(ValueError, match="saved by its own save_pretrained; quantize it again"):
        moe_mlir.from_pretrained(str(tmp_path / "codes"))
    assert moe_mlir.from_pretrained(str(tmp_path / "floats")).config.model_type == model.config.model_type
