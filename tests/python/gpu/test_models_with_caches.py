"""Models that keep keys and values of tokens, on sm_90a, in the simulator: written in place."""

import copy
import json

import numpy as np
import pytest
import torch
import transformers
from support import run_tool

import moe_mlir
from moe_mlir._transformers.names import cache_call
from moe_mlir.gpu.launch import LaunchPlan
from moe_mlir.sim.simulation import simulate
from moe_mlir_bench.models import FAMILIES

ROOM = 16
WITH_STATIC_CACHES = ("Mixtral", "Qwen2-MoE", "Qwen3-MoE", "OLMoE", "Granite-MoE", "DeepSeek-V2",
                      "DeepSeek-V3", "GLM4-MoE", "MiniMax-M2", "Ernie4.5-MoE", "Llama4", "Phi-MoE")


def ids(tokens, seed=0):
    return torch.randint(3, 64, (1, tokens), generator=torch.Generator().manual_seed(seed))


def on_gpu(compiled, *args, **kwargs):
    with simulate(chip="sm_90a"), torch.no_grad():
        return compiled(*args, **kwargs)


def compile_for_gpu(model, *args, **kwargs):
    return moe_mlir.compile(model, args, target="sm_90a", **kwargs)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", WITH_STATIC_CACHES)
@torch.no_grad()
def test_a_prompt_and_steps(name):
    model = FAMILIES[name].build(torch.float32, layers=1, attn_implementation="sdpa").eval()

    def new_cache():
        return transformers.StaticCache(config=model.config, max_cache_len=ROOM)
    compiled = compile_for_gpu(model, ids(7), kwargs=dict(cache=new_cache()))
    ours, theirs, tokens, places = new_cache(), new_cache(), ids(7), []
    for _ in range(3):
        found = on_gpu(compiled, tokens, cache=ours).logits
        expected = model(tokens, **cache_call(model, theirs)).logits
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        for mine, other in zip(ours.layers, theirs.layers):
            torch.testing.assert_close(mine.keys, other.keys, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(mine.values, other.values, rtol=1e-4, atol=1e-4)
            assert torch.equal(mine.cumulative_length, other.cumulative_length)
        places.append([layer.keys.data_ptr() for layer in ours.layers])
        tokens = expected[:, -1:].argmax(-1)
    assert places[1] == places[2]
    assert len(compiled._programs) == 2  # of prompts, and of one token


@pytest.mark.drawn(3)
@pytest.mark.parametrize("kind", ["windows", "windows alone", "chunks", "state space", "growing"])
@torch.no_grad()
def test_caches_of_other_kinds(kind):
    """A window that is not full yet and one that is, a state, and tensors that grow."""
    name, changes, layers = {
        "windows": ("gpt-oss", dict(sliding_window=8, attn_implementation="eager"), 2),
        "windows alone": ("Phi-MoE", dict(sliding_window=8), 1),
        "chunks": ("Llama4", dict(attention_chunk_size=8, no_rope_layers=[1, 0],
                                  layer_types=["chunked_attention", "full_attention"]), 2),
        "state space": ("Jamba", {}, 2),
        "growing": ("Qwen3-MoE", {}, 1)}[kind]
    model = FAMILIES[name].build(torch.float32, layers=layers,
                                 **{"attn_implementation": "sdpa", **changes}).eval()

    def new_cache():
        if kind == "growing":
            return transformers.DynamicCache(config=model.config)
        return transformers.StaticCache(config=model.config, max_cache_len=40)
    compiled = compile_for_gpu(model, ids(5), kwargs=dict(cache=new_cache()))
    ours, theirs = new_cache(), new_cache()
    for tokens in (5, 1, 1, 4, 1):
        given = ids(tokens, tokens)
        found = on_gpu(compiled, given, cache=ours).logits
        expected = model(given, **cache_call(model, theirs)).logits
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


class Put(torch.nn.Module):
    """Rows, slices and elements to places, the last of equal ones in the end."""

    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.zeros(2, 9, 5))

    def forward(self, rows, places, more, x):
        self.kept.index_copy_(1, places, rows)
        into = torch.zeros(9, 4, 3)
        into[places, more] = rows[0, :, :3]
        gates = torch.zeros(x.shape[0], 12).scatter(1, x.topk(3).indices, x[:, :3])
        columns = torch.zeros(4, 12).scatter(0, more[:, None].expand(-1, 12), x)
        return self.kept * 2, into, gates, columns


@pytest.mark.parametrize("count", [0, 1, 2, 70])
def test_the_last_of_equal_places_wins(count):
    generator = torch.Generator().manual_seed(count)
    model = Put()

    def inputs(n):
        return (torch.randn(2, n, 5, generator=generator), torch.randint(9, (n,), generator=generator),
                torch.randint(4, (n,), generator=generator),
                torch.randn(n, 12, generator=generator))
    compiled, on_cpu = compile_for_gpu(model, *inputs(5)), moe_mlir.compile(model, inputs(5))
    given = inputs(count)
    model.kept.zero_()
    found, kept = on_gpu(compiled, *given), model.kept.clone()
    model.kept.zero_()
    # One after the other, in the order of the rows.
    for expected, one in zip(on_cpu(*given), found):
        assert torch.equal(one, expected)
    assert torch.equal(kept, model.kept)
    for i, place in enumerate(given[1].tolist()):
        if place not in given[1].tolist()[i + 1:]:
            assert torch.equal(kept[:, place], given[0][:, i])


class Counter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        memory = torch.zeros(9)
        self.register_buffer("count", memory[1:5])  # no multiple of 16 bytes
        self.register_buffer("last", torch.zeros(3))

    def forward(self, x):
        self.count += x.sum()
        self.last.copy_(x[:3] + self.count[:3])
        return x * self.count[0]


def test_buffers_that_kernels_cannot_read_where_they_lie_are_updated():
    model = Counter()
    assert model.count.data_ptr() % 16
    compiled = compile_for_gpu(copy.deepcopy(model), torch.ones(4))
    ours, plain = compiled.model, copy.deepcopy(model)
    ours.count = torch.zeros(9)[1:5]
    for step in range(3):
        x = torch.arange(4.0) + step
        assert torch.equal(on_gpu(compiled, x), plain(x))
        assert torch.equal(ours.count, plain.count) and torch.equal(ours.last, plain.last)


def test_an_artifact_keeps_its_state_in_place(tmp_path):
    """No copy of a buffer that is updated, in a kernel or beside them."""
    model = Put()
    x = (torch.randn(2, 4, 5), torch.tensor([3, 8, 3, 0]), torch.tensor([1, 0, 1, 3]),
         torch.randn(4, 12))
    torch.export.save(torch.export.export(model, x), tmp_path / "put.pt2")
    done = run_tool("moe-compile", "put.pt2", "-o", "put", "--target=sm_90a", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (function,) = json.loads((tmp_path / "put" / "manifest.json").read_text())["functions"]
    assert [a.get("updated", False) for a in function["arguments"]].count(True) == 1
    assert len(LaunchPlan(function).results) == 4
    program = moe_mlir.load(tmp_path / "put")
    for name, value in zip(("rows", "places", "more", "x"), x):
        np.save(tmp_path / f"{name}.npy", value.numpy())
    for step in range(2):
        expected = model(*x)
        with simulate(chip="sm_90a"):
            found = program(*x)
        for one, other in zip(found, expected):
            torch.testing.assert_close(one, other)
        if step == 0:  # a process begins with the state of the file
            done = run_tool("moe-run", "put", "--device=sim",
                            *(f"--input={name}.npy" for name in ("rows", "places", "more", "x")),
                            *(f"--output=out{i}.npy" for i in range(4)), cwd=tmp_path)
            assert (done.returncode, done.stderr) == (0, "")
            for i, other in enumerate(expected):
                torch.testing.assert_close(torch.from_numpy(np.load(tmp_path / f"out{i}.npy")), other)
        x[0].mul_(2)


def test_a_layer_is_a_few_launches(monkeypatch):
    """Norms, residuals, rotations and casts are parts of kernels, not kernels."""
    counts = []
    launches = LaunchPlan.launches
    monkeypatch.setattr(LaunchPlan, "launches",
                        lambda plan, buffers: counts.append(launches(plan, buffers)) or counts[-1])

    def count(layers):
        config = transformers.Qwen3MoeConfig(
            hidden_size=512, intermediate_size=512, moe_intermediate_size=256, num_experts=8,
            num_experts_per_tok=2, num_hidden_layers=layers, num_attention_heads=8,
            num_key_value_heads=2, head_dim=64, vocab_size=64)
        model = transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16).eval()

        def new_cache():
            return transformers.StaticCache(config=config, max_cache_len=ROOM)
        compiled, cache = compile_for_gpu(model, ids(7), kwargs=dict(cache=new_cache())), new_cache()
        for tokens in (9, 1):
            on_gpu(compiled, ids(tokens), cache=cache)
        return len(counts[-2]), len(counts[-1])
    one, two = count(1), count(2)
    assert two[0] - one[0] <= 27 and two[1] - one[1] <= 25
