"""The measurement of model.generate, on a model of small sizes."""

import pytest
import torch

from moe_mlir.frontends.dynamo import register
from moe_mlir_bench.models.generation import CACHES, WAYS, measure, table
from moe_mlir_bench.models.real_widths import build

_SMALL = dict(hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=4,
              num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, vocab_size=64)


def check(cache, ways):
    model = build("Granite-1B", "f32", _SMALL)
    row = measure("Granite-1B", "f32", model, cache, prompt=5, steps=3, rounds=1, ways=ways)
    assert all(row.agrees[way] and row.speed[way] > 0 for way in ways), row
    assert "eager's" in table([row])
    assert model.get_experts_implementation()[""] == "grouped_mm"
    assert "forward" not in vars(model.model.layers[0].block_sparse_moe.router)


def test_a_patched_model_gives_the_tokens_of_eager():
    check("dynamic", ["eager", "hf.patch"])


@pytest.mark.long
@pytest.mark.parametrize("cache", CACHES)
def test_every_way_gives_the_tokens_of_eager(cache):
    register()
    torch._dynamo.reset()
    check(cache, WAYS)
