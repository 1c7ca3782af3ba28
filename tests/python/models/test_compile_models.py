"""moe_mlir.compile(model, (ids,)), as GettingStarted teaches it, on transformers models."""

import subprocess
import sys
import warnings

import pytest
import torch
from seeds import some

import moe_mlir
from moe_mlir._transformers.names import cache_name
from moe_mlir_bench.models import FAMILIES


def tokens(*shape):
    return torch.randint(3, 64, shape)


def check(compiled, *args, **kwargs):
    """The outputs of the model itself, in its own type."""
    found = compiled(*args, **kwargs)
    with torch.no_grad():
        expected = compiled.model(*args, **{**kwargs, "use_cache": False})
    assert type(found) is type(expected) and found.keys() == expected.keys()
    for key in expected:
        torch.testing.assert_close(found[key], expected[key], rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def granite():
    model = FAMILIES["Granite-MoE"].build(attn_implementation="sdpa")
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="GraniteMoeForCausalLM is compiled with use_cache=False") as seen:
        compiled = moe_mlir.compile(model, (tokens(2, 12),))
    assert [w.filename for w in seen if "use_cache" in str(w.message)] == [__file__]
    return compiled


@pytest.mark.drawn(2)
@pytest.mark.parametrize("shape", [(3, 7), (1, 9), (4, 1), (1, 1)])
def test_other_batches_and_token_counts(granite, shape):
    """The model's own code goes other ways for one sequence and for one token."""
    check(granite, tokens(*shape))


def test_the_models_own_keywords(granite):
    mask = torch.ones(2, 9).long()
    mask[0, :4] = 0  # padding on the left
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    ids, before = tokens(2, 9), len(granite._programs)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        check(granite, input_ids=ids, attention_mask=mask, position_ids=positions)
        check(granite, ids, mask, positions)
        check(granite, ids, attention_mask=None, use_cache=False)
    assert len(granite._programs) == before + 1


def test_a_cache_is_made_only_for_those_who_ask(granite):
    name = cache_name(granite.model)
    assert getattr(granite(tokens(2, 12)), name) is None
    assert getattr(granite(tokens(2, 12), use_cache=True), name).get_seq_length() == 12
    assert getattr(granite(tokens(2, 12)), name) is None


@pytest.mark.parametrize("name", some(["Mixtral", "OLMoE", "Qwen3-MoE", "DeepSeek-V3"]))
def test_one_example_serves_the_rest(name):
    """Traced with one token of one sequence; then several, padded."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        compiled = moe_mlir.compile(FAMILIES[name].build(), (tokens(1, 1),),
                                    kwargs=dict(use_cache=False))
    check(compiled, tokens(1, 1))
    mask = torch.ones(3, 8).long()
    mask[1, :5] = 0
    check(compiled, tokens(3, 8), attention_mask=mask)


def test_an_object_among_the_outputs_is_named():
    class Bag:
        pass

    class Returns(torch.nn.Module):
        def forward(self, x):
            return x + 1, Bag()
    with pytest.raises(ValueError, match="expected outputs made of tensors, found an object of "
                                         ".*Bag among them; leave it out, or register"):
        moe_mlir.compile(Returns(), (torch.ones(2),))


def test_a_saved_program_is_read_where_transformers_is_not_loaded_yet(tmp_path):
    """Its outputs and operators are transformers' own, which torch knows only once it is imported."""
    model, path = FAMILIES["Qwen3-MoE"].build(), tmp_path / "lm.pt2"
    program = torch.export.export(model, (), dict(input_ids=tokens(2, 12), use_cache=False))
    torch.export.save(program, path)
    done = subprocess.run([sys.executable, "-m", "moe_mlir.frontends.import_program", path, tmp_path],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "moe.topk_renorm" in (tmp_path / "program.mlir").read_text()
