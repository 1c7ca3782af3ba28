"""moe_mlir.compile of models with a cache of keys and values: prompts, steps, generation."""

import pytest
import torch
import transformers

import moe_mlir
from moe_mlir._transformers.names import cache_call, cache_name
from moe_mlir._transformers.token_inputs import token_count
from moe_mlir_bench.models import FAMILIES

PROMPT, ROOM = 7, 16


def ids(tokens, seed=0):
    return torch.randint(3, 64, (1, tokens), generator=torch.Generator().manual_seed(seed))


def build(name="Granite-MoE", dtype=torch.float32, layers=1):
    return FAMILIES[name].build(dtype, layers=layers, attn_implementation="sdpa")


def cache_of(model):
    return transformers.StaticCache(config=model.config, max_cache_len=ROOM)


def addresses(cache):
    return [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers]


@pytest.fixture(scope="module")
def compiled():
    model = build(layers=3)
    return moe_mlir.compile(model, (ids(PROMPT),), kwargs=dict(cache=cache_of(model)))


@torch.no_grad()
def test_prompt_and_steps_give_eagers_logits_and_cache(compiled):
    model, ours = compiled.model, cache_of(compiled.model)
    theirs, tokens = cache_of(compiled.model), ids(PROMPT)
    for step in range(4):
        found = compiled(tokens, cache=ours)
        if step == 0:
            kept = addresses(ours)  # the first call makes the tensors
        expected = model(tokens, **cache_call(model, theirs))
        torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
        assert getattr(found, cache_name(compiled.model)) is ours
        assert addresses(ours) == kept
        for mine, other in zip(ours.layers, theirs.layers):
            torch.testing.assert_close(mine.keys, other.keys, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(mine.values, other.values, rtol=1e-4, atol=1e-4)
            assert torch.equal(mine.cumulative_length, other.cumulative_length)
        tokens = expected.logits[:, -1:].argmax(-1)
    # One program for prompts, one for steps.
    assert len(compiled._programs) == 2


@torch.no_grad()
def test_another_cache_and_prompt_need_no_other_program(compiled):
    programs, cache = len(compiled._programs), cache_of(compiled.model)
    found = compiled(ids(3, seed=1), cache=cache)
    expected = compiled.model(ids(3, seed=1), **cache_call(compiled.model, cache_of(compiled.model)))
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
    assert len(compiled._programs) == programs


def test_a_full_cache_is_an_error(compiled):
    cache = cache_of(compiled.model)
    compiled(ids(PROMPT), cache=cache)
    with pytest.raises(ValueError, match=r"expected at most 9 tokens.*found 10"):
        compiled(ids(10), cache=cache)


def mask_of(tokens, held=0):
    """A 4-D mask of a call with so many tokens, behind so many that a cache holds."""
    mask = torch.zeros(1, 1, tokens, ROOM, dtype=torch.bool)
    for row in range(tokens):
        mask[..., row, : held + row + 1] = True
    return mask


@pytest.mark.drawn(2)
@pytest.mark.parametrize("tokens", [ROOM + 1, ROOM])
@pytest.mark.parametrize("form", ["2-D", "4-D"])
@torch.no_grad()
def test_the_tokens_are_counted_whatever_stands_first(form, tokens):
    model, held = build(), 5
    masks = [torch.ones(1, held).long(), torch.ones(1, tokens).long()] if form == "2-D" else [
        mask_of(held), mask_of(tokens - held, held)]
    prompt, more = ids(held), ids(tokens - held, seed=1)
    cache, other = cache_of(model), cache_of(model)
    compiled = moe_mlir.compile(model, (), kwargs=dict(
        attention_mask=masks[0], input_ids=prompt, cache=cache_of(model)))
    first = dict(attention_mask=masks[0], input_ids=prompt)
    torch.testing.assert_close(compiled(**first, cache=cache).logits,
                               model(**first, **cache_call(model, other)).logits, rtol=1e-4, atol=1e-4)
    second = dict(attention_mask=masks[1], input_ids=more)
    if tokens > ROOM:
        with pytest.raises(ValueError, match=r"expected at most 11 tokens.*found 12"):
            compiled(**second, cache=cache)
        return
    for _ in range(2):  # the second time as a known call
        torch.testing.assert_close(compiled(**second, cache=cache).logits,
                                   model(**second, **cache_call(model, other)).logits,
                                   rtol=1e-4, atol=1e-4)
        for each in (cache, other):
            for layer in each.layers:
                layer.cumulative_length.fill_(held)


@pytest.mark.parametrize(("args", "kwargs", "expected"), [
    ((torch.zeros(2, 3),), {}, 3),
    ((), dict(attention_mask=torch.zeros(2, 9), input_ids=torch.zeros(2, 3)), 3),
    ((), dict(mask=torch.zeros(2, 1, 3, 9), inputs_embeds=torch.zeros(2, 4, 8)), 4),
    ((), dict(encoder_hidden_states=torch.zeros(2, 7, 8), decoder_input_ids=torch.zeros(2, 5),
              input_ids=torch.zeros(2, 7)), 5),
    ((), dict(y=torch.zeros(2, 9), x=torch.zeros(2, 6)), 6),
    ((), {}, 1),
])
def test_what_counts_the_tokens(args, kwargs, expected):
    class Model(torch.nn.Module):
        def forward(self, x=None, y=None, **named):
            pass
    values = {**dict(enumerate(args)), **kwargs}
    assert token_count(values, Model()) == expected
    assert token_count({**values, "cache_position": torch.arange(expected)}, Model()) == expected
    with pytest.raises(ValueError, match=f"the places of {expected} tokens, found {expected + 1}"):
        token_count({**values, "cache_position": torch.arange(expected + 1)}, Model())


def test_steps_read_and_write_the_cache_where_it_lies(compiled):
    compiled(ids(1), cache=cache_of(compiled.model))
    text = compiled._programs[0].module.text
    assert text.count("moe.updates") == 9
    # The keys of two heads, repeated for the four heads of the queries.
    assert "1x2x2x16x8" not in text


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", ["Granite-MoE", "Qwen3-MoE"])
def test_generation_has_eagers_tokens(name):
    model = build(name)
    options = dict(max_new_tokens=4, do_sample=False, eos_token_id=None)
    expected = model.generate(ids(PROMPT), cache_implementation="static", **options)
    compiled = moe_mlir.compile(model, (ids(PROMPT),), kwargs=dict(use_cache=False))
    assert torch.equal(compiled.generate(ids(PROMPT), **options), expected)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", ["DeepSeek-V2", "DeepSeek-V3"])
@torch.no_grad()
def test_latent_attention_has_keys_and_values_of_its_own_widths(name):
    model, calls = build(name), []
    example = cache_of(model)
    model.register_forward_pre_hook(lambda *_: calls.append(None))
    compiled = moe_mlir.compile(model, (ids(PROMPT),), kwargs=dict(cache=example))
    calls.clear()
    for seed in (0, 1):
        ours, theirs, tokens = cache_of(model), cache_of(model), ids(PROMPT, seed)
        for _ in range(4):
            found = compiled(tokens, cache=ours).logits
            # What a new cache is of, is known from the example.
            assert not calls or seed == 0
            expected = model(tokens, **cache_call(model, theirs)).logits
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
            tokens = expected[:, -1:].argmax(-1)
            calls.clear()
    for mine, other in zip(ours.layers, theirs.layers):
        assert mine.keys.shape != mine.values.shape
        torch.testing.assert_close(mine.keys, other.keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(mine.values, other.values, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_bf16_model_has_a_bf16_cache():
    model = build("OLMoE", torch.bfloat16)
    cache = cache_of(model)
    compiled = moe_mlir.compile(model, (ids(PROMPT),), kwargs=dict(cache=cache))
    found = compiled(ids(PROMPT), cache=cache).logits
    expected = model(ids(PROMPT), **cache_call(model, cache_of(model))).logits
    assert cache.layers[0].keys.dtype == torch.bfloat16
    assert (found - expected).abs().max() < 0.1 * expected.abs().max()


@pytest.fixture(scope="module")
def exportable():
    """What transformers itself exports: a module whose buffers are the cache."""
    from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

    model = build()
    model.generation_config.cache_implementation = "static"
    return TorchExportableModuleWithStaticCache(model, batch_size=1, max_cache_len=ROOM)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("strict", [None, False, True])
@torch.no_grad()
def test_a_module_whose_buffers_are_the_cache(exportable, strict):
    """As a module, and as programs of both of torch.export's ways to trace it."""
    inputs = dict(input_ids=ids(1), cache_position=torch.tensor([0]))
    source = exportable if strict is None else torch.export.export(exportable, (), inputs,
                                                                   strict=strict)
    compiled = moe_mlir.compile(source, () if strict is None else None,
                                kwargs=inputs if strict is None else None)
    tokens = ids(5)
    found = [compiled(input_ids=tokens[:, i:i + 1], cache_position=torch.tensor([i]))
             for i in range(5)]
    expected = exportable.model(tokens, use_cache=False).logits
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=1e-4, atol=1e-4)
