"""What transformers renames between its versions, as callers of compiled models meet it."""

import copy
import logging
import pathlib
import warnings

import pytest
import torch
import transformers

import moe_mlir
import moe_mlir.hf
from moe_mlir._transformers.names import CACHE_NAMES, cache_call, cache_name, with_cache_name
from moe_mlir.patching.router_modules import is_router
from moe_mlir_bench.models import FAMILIES

PROMPT, ROOM = 7, 16
OPTIONS = dict(max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
KEYWORDS = CACHE_NAMES[:2]


def ids(tokens=PROMPT, seed=0):
    return torch.randint(3, 64, (1, tokens), generator=torch.Generator().manual_seed(seed))


def cache_of(model):
    return transformers.StaticCache(config=model.config, max_cache_len=ROOM)


@pytest.fixture(scope="module", params=KEYWORDS)
def compiled(request):
    model = FAMILIES["Granite-MoE"].build(layers=2, attn_implementation="sdpa")
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # of a name that is deprecated
        return moe_mlir.compile(model, (ids(),), kwargs={request.param: cache_of(model)})


@pytest.mark.drawn(1)
@torch.no_grad()
def test_every_name_of_the_cache_serves(compiled, caplog):
    caplog.set_level(logging.INFO, "moe_mlir")  # says why a call is traced anew
    model, before = compiled.model, len(compiled._programs)
    for keyword in KEYWORDS:
        ours, theirs, tokens = cache_of(model), cache_of(model), ids()
        for _ in range(3):
            found = compiled(tokens, **{keyword: ours})
            expected = model(tokens, **cache_call(model, theirs))
            torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
            assert getattr(found, cache_name(model)) is ours
            tokens = expected.logits[:, -1:].argmax(-1)
    # The one for prompts was there; workers that share tests may have made others before.
    assert len(compiled._programs) <= before + 1, [record.getMessage() for record in caplog.records]


def test_two_names_at_once_are_an_error(compiled):
    with pytest.raises(TypeError, match="expected one cache, found inputs 'cache' and "
                                        "'past_key_values', which are names of the same"):
        compiled(ids(), **{keyword: cache_of(compiled.model) for keyword in KEYWORDS})


@pytest.mark.drawn(2)
@pytest.mark.parametrize("keyword", [None, *KEYWORDS])
def test_generate_takes_every_name(compiled, keyword):
    expected = compiled.model.generate(ids(), **OPTIONS)
    given = {} if keyword is None else {keyword: cache_of(compiled.model)}
    assert torch.equal(compiled.generate(ids(), **OPTIONS, **given), expected)


def test_a_module_of_another_kind_keeps_its_names():
    class Inner(torch.nn.Module):
        def forward(self, x, cache=None, **rest):
            return x + rest["past_key_values"]
    model = Inner()
    given = dict(past_key_values=1, cache=2)
    assert with_cache_name(model, given) == given and cache_name(model) is None
    compiled = moe_mlir.compile(model, (torch.ones(3),), kwargs=dict(past_key_values=torch.ones(3)))
    assert torch.equal(compiled(torch.ones(3), past_key_values=torch.ones(3)), torch.full((3,), 2.))


def test_a_model_that_kept_the_old_name_is_called_by_it():
    """As models whose code lies beside their weights do."""
    class Remote(transformers.PreTrainedModel):
        config_class = transformers.GraniteMoeConfig

        def forward(self, input_ids, past_key_values=None, **kwargs):
            return input_ids
    model = Remote(transformers.GraniteMoeConfig(num_hidden_layers=1))
    assert list(with_cache_name(model, dict(input_ids=1, cache=2, use_cache=3))) == [
        "input_ids", "past_key_values", "use_cache"]


@pytest.mark.skipif(not hasattr(transformers.cache_utils.StaticLayer, "crop"),
                    reason="transformers before 5.24 cannot crop such a cache")
@torch.no_grad()
def test_compiled_code_follows_a_cache_whose_last_tokens_were_removed(compiled):
    model, cache, other = compiled.model, cache_of(compiled.model), cache_of(compiled.model)
    for tokens in (ids(), ids(1)):
        compiled(tokens, cache=cache)
        model(tokens, **cache_call(model, other))
    for each in (cache, other):
        each.crop(-2)
    for seed in (5, 6):  # the second time as a known call
        found = compiled(ids(1, seed), cache=cache).logits
        expected = model(ids(1, seed), **cache_call(model, other)).logits
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_an_old_transformers_is_named(monkeypatch):
    model = FAMILIES["Granite-MoE"].build()  # whose module may import the name, too
    monkeypatch.delattr(transformers.configuration_utils, "get_head_shapes")
    with pytest.raises(ImportError, match="expected transformers 5.18 or newer for a cache of keys"):
        moe_mlir.compile(model, (ids(),), kwargs=dict(cache=cache_of(model)))


def test_one_module_knows_the_names():
    package = pathlib.Path(moe_mlir.__file__).parent
    for path in package.rglob("*.py"):
        if path.parts[-2:] != ("_transformers", "names.py"):
            assert not any(name in path.read_text() for name in CACHE_NAMES[1:]), path


@pytest.fixture(scope="module")
def in_f32(tmp_path_factory):
    """A bf16 checkpoint as it is loaded, whose routers have f32 weights."""
    folder = tmp_path_factory.mktemp("checkpoint")
    FAMILIES["DeepSeek-V3"].build(torch.bfloat16).save_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    routers = [m for m in model.modules() if is_router(m)]
    assert routers
    for router in routers:  # before 5.24 they are bf16
        router.weight.data = router.weight.data.float()
    return model


@pytest.mark.drawn(2)
@pytest.mark.parametrize("way", ["hf.patch", "backend", "compile"])
@torch.no_grad()
def test_routers_of_f32_in_a_model_of_bf16(in_f32, way):
    expected = in_f32(ids(), use_cache=False).logits
    model = copy.deepcopy(in_f32)
    if way == "hf.patch":
        assert moe_mlir.hf.patch(model) > 0
        model.set_experts_implementation("moe")
        found = model(ids(), use_cache=False).logits
    elif way == "backend":
        found = torch.compile(model, backend="moe")(ids(), use_cache=False).logits
    else:
        recognised = moe_mlir.explain(model, (ids(),), kwargs=dict(use_cache=False))
        assert recognised and all(router.recognised for router in recognised)
        found = moe_mlir.compile(model, (ids(),), kwargs=dict(use_cache=False))(ids()).logits
    assert found.dtype == expected.dtype
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()
