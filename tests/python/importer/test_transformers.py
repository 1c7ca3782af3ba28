"""Whole transformers models with batched experts; `tests/python/models` has the other forms."""

import pytest
import torch
import transformers
from seeds import some

import moe_mlir

SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
             attn_implementation="eager", num_experts_per_tok=2, pad_token_id=0, bos_token_id=1,
             eos_token_id=2)
MODELS = {
    "Mixtral": ("MixtralConfig", dict(num_local_experts=8), "F1"),
    "GraniteMoe": ("GraniteMoeConfig", dict(num_local_experts=8), "F2"),
}


@pytest.mark.parametrize("name", some(MODELS))
def test_model(name):
    config_class, extra, form = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**SIZES, **extra)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.set_experts_implementation("batched_mm")
    options = dict(use_cache=False)
    example = dict(input_ids=torch.randint(0, 64, (2, 12)), **options)
    matches = moe_mlir.explain(model, (), kwargs=example)
    assert [m.form for m in matches] == [form, form] and all(m.recognised for m in matches)
    compiled = moe_mlir.compile(model, (), kwargs=example)
    for shape in ((2, 12), (3, 20)):
        inputs = dict(input_ids=torch.randint(0, 64, shape), **options)
        with torch.no_grad():
            expected = model(**inputs).logits
        torch.testing.assert_close(compiled(**inputs).logits, expected, rtol=1e-5, atol=1e-5)
