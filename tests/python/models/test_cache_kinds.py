"""moe_mlir.compile with caches of all kinds of layers: windows, chunks, state spaces, layers of users."""

import copy

import pytest
import torch
import transformers
from transformers.cache_utils import StaticLayer

import moe_mlir
from moe_mlir._transformers.cache_state import CacheTensors
from moe_mlir._transformers.names import cache_call
from moe_mlir_bench.models import FAMILIES

ROOM, WINDOW = 40, 8
KINDS = {
    "windows": ("gpt-oss", dict(sliding_window=WINDOW, attn_implementation="eager"), 2),
    "windows alone": ("Phi-MoE", dict(sliding_window=WINDOW), 1),
    # A layer of chunks, and one of full attention without positions; its default has three and one.
    "chunks": ("Llama4", dict(attention_chunk_size=WINDOW, no_rope_layers=[1, 0],
                              layer_types=["chunked_attention", "full_attention"]), 2),
    "state space": ("Jamba", {}, 2),
}


def build(kind):
    name, changes, layers = KINDS[kind]
    return FAMILIES[name].build(layers=layers, **{"attn_implementation": "sdpa", **changes})


def ids(tokens, seed=0, batch=1):
    return torch.randint(3, 64, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def cache_of(model, room=ROOM):
    return transformers.StaticCache(config=model.config, max_cache_len=room)


def require_equal(mine, other):
    """The state of two caches, in all that their layers keep."""
    mine, other = (CacheTensors.of(cache, lambda *_: False) for cache in (mine, other))
    assert mine.form == other.form
    for name, one, two in zip(mine.form.names, mine.state, other.state):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.drawn(2)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_prompts_and_steps_give_eagers_logits_and_cache(kind):
    """Prompts that fit into a window, fill it, go past its end, and follow after one that is full."""
    model = build(kind)
    compiled = moe_mlir.compile(model, (ids(5),), kwargs=dict(cache=cache_of(model)))
    for prompts in ([5, 1, 1, 1, 1, 1, 4], [WINDOW + 3, 1, 1], [6, 4, 1]):
        ours, theirs = cache_of(model), cache_of(model)
        for seed, tokens in enumerate(prompts):
            found = compiled(ids(tokens, seed), cache=ours)
            expected = model(ids(tokens, seed), **cache_call(model, theirs))
            torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
            require_equal(ours, theirs)


@torch.no_grad()
def test_a_window_has_a_program_until_it_is_full_and_one_after(monkeypatch):
    """All other steps are like an earlier one, which needs no further look."""
    model, looks = build("windows"), []
    compiled = moe_mlir.compile(model, (ids(1),), kwargs=dict(cache=cache_of(model)))
    look = compiled._values
    monkeypatch.setattr(compiled, "_values", lambda *given: looks.append(step) or look(*given))
    cache, other = cache_of(model), cache_of(model)
    for step in range(20):
        found = compiled(ids(1, step), cache=cache).logits
        expected = model(ids(1, step), **cache_call(model, other)).logits
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert len(compiled._programs) == (1 if step < WINDOW else 2)
    require_equal(cache, other)
    assert looks == [0, WINDOW]
    assert cache.layers[0].cumulative_length_int == 20
    cache.reset()
    compiled(ids(1), cache=cache)
    assert len(compiled._programs) == 2


@torch.no_grad()
def test_a_remembered_step_sees_what_else_changes():
    model = build("windows alone")
    compiled = moe_mlir.compile(model, (ids(1),), kwargs=dict(cache=cache_of(model)))
    cache = cache_of(model)
    for step in range(4):
        compiled(ids(1, step), cache=cache)
    cache.layers[0].cumulative_length.fill_(5)
    with pytest.raises(ValueError, match="one count of tokens, found 5 and 4"):
        compiled(ids(1), cache=cache)
    cache.layers[0].cumulative_length.fill_(4)
    compiled(ids(1), cache=cache)
    cache.layers[0].max_cache_len = 6  # another constant, which no program was made for
    cache.layers[0].keys = cache.layers[0].keys[:, :, :6].clone()
    cache.layers[0].values = cache.layers[0].values[:, :, :6].clone()
    other = copy.deepcopy(cache)
    found, programs = compiled(ids(1), cache=cache).logits, len(compiled._programs)
    torch.testing.assert_close(found, model(ids(1), **cache_call(model, other)).logits,
                               rtol=1e-4, atol=1e-4)
    assert programs == 2


@pytest.mark.drawn(2)
@pytest.mark.parametrize("kind", KINDS)
def test_generation_has_eagers_tokens(kind):
    """Of two sequences, one padded on the left."""
    model = build(kind)
    tokens, mask = ids(6, batch=2), torch.ones(2, 6).long()
    tokens[0, :2], mask[0, :2] = 0, 0
    options = dict(max_new_tokens=6, do_sample=False, eos_token_id=None, attention_mask=mask)
    expected = model.generate(tokens, cache_implementation="static", **options)
    compiled = moe_mlir.compile(model, (tokens,), kwargs=dict(use_cache=False))
    assert torch.equal(compiled.generate(tokens, **options), expected)


@torch.no_grad()
def test_a_window_whose_counts_disagree_is_an_error():
    model, cache = build("windows alone"), None
    compiled = moe_mlir.compile(model, (ids(3),), kwargs=dict(cache=cache_of(model)))
    cache = cache_of(model)
    compiled(ids(3), cache=cache)
    cache.layers[0].cumulative_length.fill_(99)
    with pytest.raises(ValueError, match="one count of tokens, found 99 and 3"):
        compiled(ids(1), cache=cache)


# ---- layers of users -----------------------------------------------------------------


class Counting(StaticLayer):
    """A layer that keeps more than keys and values: in a dictionary, a list, and as flags."""

    def __init__(self, max_cache_len):
        super().__init__(max_cache_len)
        self.sums, self.calls, self.texts, self.was_long = {"keys": None}, [0, 0], "none", False

    def update(self, key_states, value_states, *args, **kwargs):
        if self.sums["keys"] is None:
            self.sums["keys"] = torch.zeros_like(key_states[:, :, 0])
        # Another tensor in the place of the first.
        self.sums["keys"] = self.sums["keys"] + key_states.sum(2)
        self.calls[1] += key_states.shape[2]
        self.was_long = key_states.shape[2] > 3
        self.texts = "long" if self.was_long else "short"
        return super().update(key_states, value_states)

    def reset(self):
        super().reset()
        self.sums["keys"].zero_()
        self.calls, self.texts, self.was_long = [0, 0], "none", False


class Growing(Counting):
    def update(self, key_states, value_states, *args, **kwargs):
        found = super().update(key_states, value_states)
        self.sums["keys"] = torch.cat((self.sums["keys"], key_states[:, :, 0]))
        return found


class Sharing(StaticLayer):
    def lazy_initialization(self, key_states, value_states):
        super().lazy_initialization(key_states, value_states)
        self.first = self.keys[:, :, :1]


class Dropping(StaticLayer):
    def reset(self):
        super().reset()
        self.keys = None


class Hiding(StaticLayer):
    def __init__(self, max_cache_len):
        super().__init__(max_cache_len)
        self.hidden = (torch.zeros(2), object())


class Noticing(StaticLayer):
    """A layer that stores something else where it has tensors already."""

    def update(self, key_states, value_states, *args, **kwargs):
        return super().update(key_states, value_states * 2 if self.is_initialized else value_states)


def cache_with(layer):
    return transformers.Cache(layers=[layer(ROOM)])


@torch.no_grad()
def test_what_a_layer_of_a_user_keeps_is_updated():
    model = FAMILIES["Granite-MoE"].build(attn_implementation="sdpa")
    compiled = moe_mlir.compile(model, (ids(5),), kwargs=dict(cache=cache_with(Counting)))
    ours, theirs = cache_with(Counting), cache_with(Counting)
    for step, tokens in enumerate((5, 1, 1, 2, 6)):
        found = compiled(ids(tokens, step), cache=ours)
        expected = model(ids(tokens, step), **cache_call(model, theirs))
        torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
        require_equal(ours, theirs)
    assert ours.layers[0].calls == [0, 15]
    assert ours.layers[0].texts == "long"


@pytest.mark.parametrize(("layer", "message"), [
    (Growing, "whose tensors keep their sizes, found 'layers.0.sums.keys', which was"),
    (Sharing, "memory of their own, found 'layers.0.first' in that of 'layers.0.keys'"),
    (Dropping, r"whose reset\(\) keeps its tensors, found none at 'layers.0.keys' then"),
    (Noticing, "the same for an empty cache whether it has tensors or not, found other results"),
    (Hiding, "keeps tensors, numbers and flags.*found a tuple at 'layers.0.hidden'"),
])
def test_what_no_program_can_keep_is_an_error(layer, message):
    model = FAMILIES["Granite-MoE"].build(attn_implementation="sdpa")
    with pytest.raises(TypeError, match=message):
        moe_mlir.compile(model, (ids(5),), kwargs=dict(cache=cache_with(layer)))
