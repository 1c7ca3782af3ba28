"""Buffers that a program updates: state of a loaded artifact, in Python and in C++."""

import hashlib
import json
import shutil
import threading

import numpy as np
import pytest
import torch
import transformers
from support import rewrite_manifest, run_tool

import moe_mlir
from moe_mlir._transformers.names import cache_call
from moe_mlir._transformers.static_cache import take_apart

ROOM = 16


class Totals(torch.nn.Module):
    """Adds up what it is called with, and counts the calls from 1."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(4.0) + 1)
        self.register_buffer("total", torch.zeros(4))
        self.register_buffer("calls", torch.ones((), dtype=torch.int64), persistent=False)

    def forward(self, x):
        self.total.add_((x * self.weight).sum(0))
        self.calls += 1
        return self.total * 2, self.calls + 0


def compile_to(folder, model, inputs, *options, dims=None):
    with torch.no_grad(), torch.fx.experimental._config.patch(backed_size_oblivious=True):
        program = torch.export.export(model.eval(), inputs, dynamic_shapes=dims)
    torch.export.save(program, folder / "model.pt2")
    done = run_tool("moe-compile", folder / "model.pt2", "-o", folder / "artifact", *options)
    assert done.returncode == 0, done.stderr
    return folder / "artifact"


@pytest.fixture(scope="module")
def totals(tmp_path_factory):
    return compile_to(tmp_path_factory.mktemp("totals"), Totals(), (torch.ones(3, 4),))


def test_calls_go_on_from_where_the_last_one_ended(totals):
    one, other, model = moe_mlir.load(totals), moe_mlir.load(totals), Totals()
    x = torch.arange(12.0).view(3, 4)
    first = model(x)
    for expected in (first, model(x), model(x)):
        for found, wanted in zip(one(x), expected, strict=True):
            assert torch.equal(found, wanted)
    # Another loaded artifact has its own, and reset starts again.
    assert torch.equal(other(x)[0], first[0])
    one.reset()
    places = torch.empty(4), torch.empty((), dtype=torch.int64)
    assert one(x, out=places)[0] is places[0]
    assert torch.equal(places[0], first[0]) and places[1] == first[1]
    assert one.functions["main"].has_state


def test_zeros_are_not_stored(totals):
    described = json.loads((totals / "program.json").read_text())["arguments"]
    assert {a["name"]: a["stored_as"] for a in described if "updated_by" in a} == {
        "total": None, "calls": "calls.initial"}


def test_one_call_at_a_time_and_none_after_one_that_failed(totals, monkeypatch):
    def fail(*buffers):
        raise MemoryError
    model, x = moe_mlir.load(totals), torch.ones(3, 4)
    program = model.functions["main"]
    inside, done, run = threading.Event(), threading.Event(), program._run

    def slow(*arguments):
        inside.set()
        done.wait(60)
        return run(*arguments)
    program._run = slow
    thread = threading.Thread(target=model, args=(x,))
    thread.start()
    assert inside.wait(60)
    for misuse in (lambda: model(x), model.reset):
        with pytest.raises(RuntimeError, match="one call at a time of 'main'.* load the artifact once"):
            misuse()
    done.set()
    thread.join()
    program._run = run
    assert model(x)[1] == 3
    # A call that is refused changes nothing.
    with pytest.raises(ValueError, match=r"result 0 of 'main': expected shape \[4\], found \[9\]"):
        model(x, out=(torch.empty(9), torch.empty((), dtype=torch.int64)))
    assert model(x)[1] == 4
    monkeypatch.setattr(program.function, "_function", fail)
    with pytest.raises(MemoryError):
        model(x)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="expected a reset of 'main' after a call that failed"):
        model(x)
    model.reset()
    assert model(x)[1] == 2


def of_argument(name, **entries):
    def change(program):
        (argument,) = (a for a in program["arguments"] if a["name"] == name)
        argument.update(entries)
    return change


def without_update(program):
    for argument in program["arguments"]:
        argument.pop("updated_by", None)


WRONG_PROGRAMS = {
    "no update": (without_update, "expected"),
    "no such result": (of_argument("total", updated_by=99), "expected"),
    "an output": (of_argument("total", updated_by=2), "expected"),
    "negative": (of_argument("total", updated_by=-1), "expected"),
    "a weight": (of_argument("weight", updated_by=0), "expected"),
    "an input": (of_argument("x", updated_by=0), "expected"),
    "no text": (of_argument("calls", stored_as=3), "expected"),
    "a weight of zeros": (of_argument("weight", stored_as=None), "expected"),
    "another type": (of_argument("total", stored_as="calls.initial"), "expected"),
}


@pytest.mark.parametrize("case", WRONG_PROGRAMS)
def test_wrong_state_is_refused(totals, tmp_path, case):
    change, message = WRONG_PROGRAMS[case]
    folder = shutil.copytree(totals, tmp_path / "copy")
    program = json.loads((folder / "program.json").read_text())
    change(program)
    (folder / "program.json").write_text(json.dumps(program))
    digest = hashlib.sha256((folder / "program.json").read_bytes()).hexdigest()
    rewrite_manifest(folder, lambda m: m["files"]["program.json"].update(sha256=digest))
    with pytest.raises(ValueError, match=message):
        moe_mlir.load(folder)
    np.save(tmp_path / "x.npy", np.ones((3, 4), np.float32))
    done = run_tool("moe-run", folder, "--input", tmp_path / "x.npy")
    assert done.returncode == 1 and message in done.stderr, done


def test_state_on_a_gpu_lies_there(tmp_path):
    """Kernels write next to what they read; in the simulator."""
    folder = compile_to(tmp_path, Totals(), (torch.ones(3, 4),), "--target=sm_80")
    loaded, model, x = moe_mlir.load(folder), Totals(), torch.ones(3, 4)
    with moe_mlir.simulate():
        for _ in range(2):
            for found, wanted in zip(loaded(x), model(x), strict=True):
                assert torch.equal(found, wanted)
    np.save(tmp_path / "x.npy", x.numpy())
    done = run_tool("moe-run", folder, "--device=sim", "--input=x.npy", "--output=y.npy", "--repeat=2",
                    cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert np.array_equal(np.load(tmp_path / "y.npy"), Totals()(x)[0].detach().numpy())


def test_an_input_that_is_updated_is_refused(tmp_path):
    class Scales(torch.nn.Module):
        def forward(self, x):
            x.mul_(2)
            return x + 1
    torch.export.save(torch.export.export(Scales(), (torch.ones(3),)), tmp_path / "model.pt2")
    done = run_tool("moe-compile", tmp_path / "model.pt2", "-o", tmp_path / "artifact")
    assert done.returncode == 1 and "updates none of its inputs, found updates of ['x']" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt2"]


# ---- a language model ------------------------------------------------------------------


class Decoder(torch.nn.Module):
    """Ids [1, n] at positions [n] -> logits of the token after them; its cache lies in buffers."""

    def __init__(self, model, room):
        super().__init__()
        self.model = model
        self.cache = transformers.StaticCache(config=model.config, max_cache_len=room)
        take_apart(self.cache, model, {"input_ids": torch.zeros(1, 1, dtype=torch.int64)})
        for i, layer in enumerate(self.cache.layers):
            self.register_buffer(f"keys_{i}", layer.keys)
            self.register_buffer(f"values_{i}", layer.values)

    def forward(self, ids, positions):
        for i, layer in enumerate(self.cache.layers):
            layer.keys, layer.values = getattr(self, f"keys_{i}"), getattr(self, f"values_{i}")
            layer.cumulative_length = positions[0].clone()
        return self.model(ids, position_ids=positions[None], use_cache=True, logits_to_keep=1,
                          **cache_call(self.model, self.cache)).logits[:, -1].float()


@pytest.fixture(scope="module", params=["float32", "int4"])
def decoder(request, tmp_path_factory):
    """A tiny Granite with random weights, of 4 bits or not, and its artifact."""
    torch.manual_seed(0)
    config = transformers.GraniteMoeConfig(
        vocab_size=97, hidden_size=64, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2)
    model = transformers.GraniteMoeForCausalLM(config).eval().requires_grad_(False)
    model.set_experts_implementation("grouped_mm")
    if request.param == "int4":
        assert moe_mlir.quantize(model, "int4") > 4
    tokens = torch.export.Dim("tokens", max=ROOM - 1)
    folder = compile_to(tmp_path_factory.mktemp("decoder"), Decoder(model, ROOM),
                        (torch.tensor([[1, 2, 3]]), torch.arange(3)), dims=({1: tokens}, {0: tokens}))
    return model, folder


PROMPTS, COUNT = ([5, 17, 3], [9]), 8


def eager_tokens(model, prompt):
    ids = torch.tensor([prompt])
    for _ in range(COUNT):
        ids = torch.cat((ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)), 1)
    return ids[0, len(prompt):].tolist()


def test_greedy_tokens_are_eagers(decoder):
    model, folder = decoder
    step = moe_mlir.load(folder)
    for prompt in PROMPTS:
        step.reset()
        token = step(torch.tensor([prompt]), torch.arange(len(prompt))).argmax(-1)
        tokens = [int(token)]
        for position in range(len(prompt), len(prompt) + COUNT - 1):
            token = step(token[None], torch.tensor([position])).argmax(-1)
            tokens.append(int(token))
        assert tokens == eager_tokens(model, prompt)


def test_the_runtime_gives_eagers_first_token(decoder, tmp_path):
    """Twice the prompt at the same places: the second call overwrites what the first one kept."""
    model, folder = decoder
    prompt = PROMPTS[0]
    np.save(tmp_path / "ids.npy", np.array([prompt]))
    np.save(tmp_path / "positions.npy", np.arange(len(prompt)))
    done = run_tool("moe-run", folder, "--input=ids.npy", "--input=positions.npy", "--output=logits.npy",
                    "--repeat=2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert np.load(tmp_path / "logits.npy")[0].argmax() == eager_tokens(model, prompt)[0]
