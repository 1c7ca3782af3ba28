"""moe_mlir.compile with caches that grow: DynamicCache, those of models' own, of encoder-decoders."""

import copy
import pickle

import pytest
import torch
import transformers
from transformers.cache_utils import DynamicLayer

import moe_mlir
from moe_mlir._transformers.cache_state import CacheTensors, ResultNumber, Structure
from moe_mlir._transformers.first_tokens import counters_of
from moe_mlir._transformers.growing_cache import contents_of, learn, open_dims
from moe_mlir._transformers.names import cache_call, cache_name
from moe_mlir_bench.models import FAMILIES, tiny_models

OPTIONS = dict(max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
# Layers of other kinds than full attention, and all that a call may change beside keys and values.
KINDS = ["gpt_oss", "deepseek_v32", "qwen3_next", "minimax"]


def ids(tokens, seed=0, batch=1):
    return torch.randint(3, 64, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def cache_of(model):
    return transformers.DynamicCache(config=model.config)


def require_equal(mine, other):
    """The state of two caches, in all that their layers keep."""
    mine, other = (CacheTensors.of(cache, lambda *_: False) for cache in (mine, other))
    assert mine.form == other.form
    for name, one, two in zip(mine.form.names, mine.state, other.state):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def require_steps(model, compiled, ours, theirs, calls, batch=1):
    for seed, tokens in enumerate(calls):
        found = compiled(ids(tokens, seed, batch), cache=ours)
        expected = model(ids(tokens, seed, batch), **cache_call(model, theirs))
        torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
        assert getattr(found, cache_name(model)) is ours
        require_equal(ours, theirs)


@pytest.fixture(scope="module")
def compiled():
    model = FAMILIES["Granite-MoE"].build(layers=1, attn_implementation="sdpa")
    return moe_mlir.compile(model, (ids(5),), kwargs=dict(use_cache=True))


@torch.no_grad()
def test_a_model_makes_its_cache_and_goes_on_with_it(compiled):
    model, name = compiled.model, cache_name(compiled.model)
    found, expected = compiled(ids(5), use_cache=True), model(ids(5), use_cache=True)
    for step in range(4):
        torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert type(ours) is transformers.DynamicCache and ours.get_seq_length() == 5 + step
        require_equal(ours, theirs)
        found, expected = compiled(ids(1, step), cache=ours), model(ids(1, step), **{name: theirs})
        assert getattr(found, name) is ours
    # One that makes a cache, and one for a step with it.
    assert len(compiled._programs) == 2
    assert getattr(compiled(ids(5), use_cache=False), name) is None


@torch.no_grad()
def test_two_calls_make_two_caches(compiled):
    name = cache_name(compiled.model)
    one, other = (getattr(compiled(ids(5, seed), use_cache=True), name) for seed in (0, 1))
    kept = copy.deepcopy(one)
    compiled(ids(1), cache=other)
    assert one.layers[0] is not other.layers[0]
    require_equal(one, kept)


@torch.no_grad()
def test_what_a_cache_holds_is_a_matter_of_sizes_alone(compiled):
    """Prompts in an empty cache, further prompts, a cache that eager filled, one for eager to go on."""
    model = compiled.model
    ours, theirs = cache_of(model), cache_of(model)
    require_steps(model, compiled, ours, theirs, [4, 1, 3, 1])
    model(ids(3, 9), **cache_call(model, ours))
    model(ids(3, 9), **cache_call(model, theirs))
    programs = len(compiled._programs)
    require_steps(model, compiled, ours, theirs, [1, 4, 1])
    assert len(compiled._programs) == programs


@torch.no_grad()
def test_a_cache_without_layers_gets_them(compiled):
    """Those of a DynamicCache without a configuration come with the first tokens."""
    ours, theirs = transformers.DynamicCache(), transformers.DynamicCache()
    require_steps(compiled.model, compiled, ours, theirs, [4, 1, 1])
    assert [type(layer).__name__ for layer in ours.layers] == ["DynamicLayer"]


@torch.no_grad()
def test_a_cropped_and_a_reordered_cache(compiled):
    model = compiled.model
    ours, theirs = cache_of(model), cache_of(model)
    require_steps(model, compiled, ours, theirs, [4, 1], batch=2)
    for cache in (ours, theirs):
        cache.crop(-2)
        cache.reorder_cache(torch.tensor([1, 0]))
    require_steps(model, compiled, ours, theirs, [1, 2, 1], batch=2)


@pytest.mark.parametrize("changes", [{}, dict(num_beams=2), dict(prompt_lookup_num_tokens=2)],
                         ids=["greedy", "beams", "assisted"])
def test_generation_has_eagers_tokens(compiled, changes):
    """Two sequences, one padded on the left; assisted decoding is of one, and crops the cache."""
    batch = 1 if "prompt_lookup_num_tokens" in changes else 2
    tokens, mask = ids(6, batch=batch), torch.ones(batch, 6).long()
    if batch == 2:
        tokens[0, :2], mask[0, :2] = 0, 0
    options = {**OPTIONS, **changes, "attention_mask": mask}
    expected = compiled.model.generate(tokens, **options)
    found = compiled.generate(tokens, cache_implementation="dynamic", **options)
    assert torch.equal(found, expected)


@torch.no_grad()
def test_a_copy_goes_on_with_the_same_cache(compiled):
    other = pickle.loads(pickle.dumps(compiled))
    ours, theirs = cache_of(other.model), cache_of(other.model)
    require_steps(other.model, other, ours, theirs, [4, 1])


@pytest.mark.drawn(1)
@pytest.mark.parametrize("folder", KINDS)
@torch.no_grad()
def test_layers_of_all_kinds(folder):
    """Prompts and steps up to the end of a window of 8 tokens and past it."""
    model = tiny_models.build(folder)
    compiled = moe_mlir.compile(model, (ids(6),), kwargs=dict(use_cache=True))
    name = cache_name(model)
    ours, theirs = (getattr(run(ids(6), use_cache=True), name) for run in (compiled, model))
    require_equal(ours, theirs)
    require_steps(model, compiled, ours, theirs, [1, 1, 1, 1, 3, 1])


@pytest.mark.drawn(1)
@pytest.mark.parametrize("folder", ["minimax", "inkling", "inkling2", "switch_transformers"])
def test_generation_of_models_without_a_cache_of_fixed_size(folder):
    """MiniMax has a cache of its own, Inkling misreads an empty one, Inkling2 gets other masks than
    it needs, Switch has an encoder."""
    model = tiny_models.build(folder)
    # In a trace, transformers' own encoder makes no mask.
    inputs = dict(decoder_input_ids=ids(2), attention_mask=torch.ones(1, 6).long()) \
        if folder == "switch_transformers" else {}
    compiled = moe_mlir.compile(model, (ids(6),), kwargs=dict(use_cache=False, **inputs))
    if inputs:
        model.generation_config.decoder_start_token_id = 0
    assert torch.equal(compiled.generate(ids(6), **OPTIONS), model.generate(ids(6), **OPTIONS))
    assert compiled._cache_implementation() == "dynamic"


def test_an_artifact_has_no_cache_among_its_inputs(compiled, tmp_path):
    module = moe_mlir.export(compiled.model, (ids(5),), kwargs=dict(use_cache=True))
    assert module.cache_results == [2]
    from moe_mlir.frontends.import_program import _describe

    with pytest.raises(ValueError, match="expected a model whose forward takes and returns no cache.*save_decoder"):
        _describe(module)


# ---- taking apart --------------------------------------------------------------------


def filled(layers=2):
    cache = transformers.DynamicCache()
    for layer in range(layers):
        cache.update(torch.ones(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), layer)
    return cache


def test_paths_to_one_tensor_are_one_input():
    """As in DeepSeek-V4, whose keys are its values."""
    cache = filled()
    cache.layers[1].values = cache.layers[1].keys
    parts = CacheTensors.of(cache, lambda *_: False, grows=True)
    assert parts.form.names == ["layers.0.keys", "layers.0.values", "layers.1.keys"]
    built = parts.build()
    assert built.layers[1].values is built.layers[1].keys is cache.layers[1].keys
    built.layers[1].keys = built.layers[1].values = torch.ones(1, 2, 4, 4)
    changes, results = parts.changes_of(built)
    assert [(path[-1], value) for path, value in changes] == [("keys", 0), ("values", 0)]
    assert all(type(value) is ResultNumber for _, value in changes) and len(results) == 1


def test_a_tensor_that_moves_is_a_result_of_its_own():
    parts = CacheTensors.of(filled(), lambda *_: False, grows=True)
    built = parts.build()
    built.layers[0].values = built.layers[0].keys
    (_, number), = parts.changes_of(built)[0]
    assert number == 0 and parts.changes_of(built)[1][0] is not built.layers[0].keys


def test_other_dtypes_and_ranks_are_another_form():
    one, other = filled(1), filled(1)
    other.layers[0].keys = other.layers[0].keys.half()
    forms = [CacheTensors.of(cache, lambda *_: False, grows=True).form for cache in (one, other)]
    assert forms[0] != forms[1]


class Fresh(DynamicLayer):
    """Of which no trace has seen one."""


def test_open_dims_are_of_tensors_with_as_many_dims():
    """An empty tensor of one dim, as a layer has before its first tokens, has none."""
    cache = filled(1)
    cache.layers[0].__class__ = Fresh
    learn(cache, [(("layers", 0, "keys"), ResultNumber(0))], [torch.ones(1, 2, 3, 4)], None)
    cache.layers[0].keys = torch.tensor([])
    assert open_dims(CacheTensors.of(cache, lambda *_: False, grows=True)) == [[], [1, 2]]


class Kind(DynamicLayer):
    limit, count = 7, 0


def test_numbers_of_a_new_layer_are_no_counters():
    """The width of a window is one; what a later call changes is another matter."""
    cache, layer = filled(1), Kind()
    layer.limit, layer.count = 7, 1
    cache.layers[0] = layer
    learn(cache, *contents_of(cache), None)
    assert counters_of(Kind) == set()
    learn(cache, [(("layers", 0, "count"), 2)], [],
          CacheTensors.of(cache, lambda *_: False, grows=True))
    assert counters_of(Kind) == {("count",)}


def test_a_structure_is_followed_in_place():
    cache, wanted = filled(1), filled(3)
    layer = cache.layers[0]
    Structure(wanted).give(cache)
    assert len(cache.layers) == 3 and cache.layers[0] is layer and layer.keys is not None
    assert cache.layers[2] is not wanted.layers[2] and cache.layers[2].keys is None
    Structure(filled(2)).give(cache)
    assert len(cache.layers) == 2


def test_a_new_cache_is_told_whole():
    cache = filled()
    changes, results = contents_of(cache)
    assert len(results) == 4 and isinstance(changes[0][1], Structure)
    made = changes[0][1].make()
    assert type(made) is type(cache) and made.layers[0].keys is None
    assert dict(changes[1:])["layers", 1, "is_initialized"] is True
