"""moe_mlir.save_decoder: language models with caches of every kind, in C++ and in Python."""

import hashlib
import json
import re
import shutil
import subprocess
import threading
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from support import PACKAGE, rewrite_manifest, run_tool

import moe_mlir
from moe_mlir._transformers.names import cache_call
from moe_mlir_bench.models import FAMILIES
from moe_mlir_bench.models.folders import TOLERANCE

ROOT = Path(__file__).resolve().parents[3]
ROOM, WINDOW = 24, 8
KINDS = {
    "plain": ("Granite-MoE", dict(attn_implementation="sdpa")),
    "plain of 4 bits": ("Granite-MoE", dict(attn_implementation="sdpa", hidden_size=64)),
    "windows": ("gpt-oss", dict(layers=2, sliding_window=WINDOW)),
    "latent": ("DeepSeek-V3", dict(attn_implementation="sdpa")),
    "state space": ("Jamba", dict(attn_implementation="sdpa")),
}
# Prompts, steps, and later prompts: below, at and past the end of a window.
CALLS = [[5, 1, 1, 1, 1, 1, 4], [WINDOW, 1, 2, 1], [WINDOW + 3, 1, 1, WINDOW], [1, 1, 9, 1]]


def build(kind):
    name, changes = KINDS[kind]
    model = FAMILIES[name].build(**changes).requires_grad_(False)
    if "4 bits" in kind:
        model.set_experts_implementation("moe")
        assert moe_mlir.quantize(model, "int4") > 0
    return model


def ids(tokens, seed=0, sequences=1):
    return torch.randint(3, 64, (sequences, tokens), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def eager_logits(model, calls, kind=""):
    """The last logits of each call, on one cache.

    Eager Jamba forgets its state where several tokens follow after others in one call.
    """
    cache, found = transformers.StaticCache(config=model.config, max_cache_len=ROOM), []
    for number, tokens in enumerate(calls):
        for piece in tokens.split(1, 1) if number and kind == "state space" else [tokens]:
            logits = model(piece, **cache_call(model, cache)).logits
        found.append(logits[:, -1].float())
    return found


def require_close(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= TOLERANCE * other.abs().max()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """kind -> its model and the artifact, saved at the first use."""
    made = {}

    def save(kind):
        if kind not in made:
            model, folder = build(kind), tmp_path_factory.mktemp("decoder") / "artifact"
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                moe_mlir.save_decoder(model, folder, room=ROOM)
            said = [str(w.message) for w in warned if "saved with code for prompts" in str(w.message)]
            assert len(said) == (kind == "state space")
            made[kind] = model, folder
        return made[kind]
    return save


def build_program(source, folder):
    compiler = shutil.which("g++") or shutil.which("clang++")
    program = folder / Path(source).stem
    built = subprocess.run(
        [compiler, "-std=c++20", "-Wall", source, "-I", ROOT / "include", "-L", PACKAGE,
         f"-Wl,-rpath,{PACKAGE}", "-lmoe_runtime", "-o", program], capture_output=True, text=True)
    assert built.returncode == 0 and not built.stderr, built.stderr
    return program


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """The program of examples/deploy/generate.cpp."""
    return build_program(ROOT / "examples/deploy/generate.cpp", tmp_path_factory.mktemp("example"))


@pytest.fixture(scope="module")
def in_cpp(tmp_path_factory):
    """Runs decoder_calls.cpp; returns its lines."""
    program = build_program(Path(__file__).with_name("decoder_calls.cpp"),
                            tmp_path_factory.mktemp("program"))

    def run(folder, *calls):
        texts = [call if isinstance(call, str) else ",".join(map(str, call.flatten().tolist()))
                 for call in calls]
        done = subprocess.run([program, folder, *texts], capture_output=True, text=True)
        assert done.returncode in (0, 1) and not done.stderr, done
        return done.stdout.splitlines()
    return run


def numbers(line):
    return torch.tensor([[float(text) for text in line.split()]])


# ---- what it gives -----------------------------------------------------------------------


@pytest.mark.drawn(2, like="kinds of decoders")
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_eagers_in_python_and_cpp(saved, in_cpp, kind):
    model, folder = saved(kind)
    decoder = moe_mlir.load(folder).decoder
    for lengths in CALLS:
        calls = [ids(tokens, seed) for seed, tokens in enumerate(lengths)]
        expected = eager_logits(model, calls, kind)
        decoder.reset()
        found = [decoder(tokens) for tokens in calls]
        require_close(found, expected)
        assert decoder.position == sum(lengths)
        *lines, last = in_cpp(folder, *calls)
        for line, logits in zip(lines, found, strict=True):
            assert torch.equal(numbers(line), logits)
        assert last == (f"{sum(lengths)} of {ROOM}, 0 of {ROOM}; 1 sequences, 64 words")


@pytest.mark.drawn(2, like="kinds of decoders")
@pytest.mark.parametrize("kind", KINDS)
def test_the_example_generates_eagers_tokens(saved, example, kind):
    """Of a prompt that fits a window, with steps past its end, and of a longer one."""
    model, folder = saved(kind)
    prompts, count = (ids(3), ids(WINDOW + 2, 1)), 10
    done = subprocess.run([example, folder, str(count), *" -- ".join(
        " ".join(map(str, prompt[0].tolist())) for prompt in prompts).split()],
        capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for line, prompt in zip(done.stdout.splitlines(), prompts, strict=True):
        tokens = model.generate(prompt, max_new_tokens=count, do_sample=False, eos_token_id=None,
                                cache_implementation="static", attention_mask=torch.ones_like(prompt))
        assert [int(token) for token in line.split()] == tokens[0, prompt.shape[1]:].tolist()
    said = done.stderr.splitlines()
    for line, prompt in zip(said, prompts, strict=False):
        assert re.fullmatch(rf"prompt: {prompt.shape[1]} tokens in [\d.]+ s \(CPU [\d.]+ s\); steps: "
                            rf"{count - 1} tokens in [\d.]+ s \(CPU [\d.]+ s\), \d+ tokens/s", line)
    assert re.fullmatch(r"first token after [\d.]+ s, \d+ MB resident", said[2])


def test_reset_starts_again_and_two_decoders_are_independent(saved, in_cpp):
    _, folder = saved("plain")
    one, other = moe_mlir.load(folder), moe_mlir.load(folder)
    first = one(ids(5))
    after = one(ids(1, 1))
    assert torch.equal(other(ids(5)), first) and other.decoder.position == 5
    one.reset()
    assert one.decoder.position == 0 and torch.equal(one(ids(5)), first)
    assert torch.equal(other(ids(1, 1)), after)
    numpy_logits = moe_mlir.load(folder).decoder(ids(5).numpy())
    assert torch.equal(torch.from_numpy(numpy_logits), first)
    place = torch.empty_like(first)
    other.reset()
    assert other(ids(5), out=place) is place and torch.equal(place, first)
    five, one_more = ("".join(f"{int(i)}," for i in x[0]) for x in (ids(5), ids(1, 1)))
    lines = in_cpp(folder, five, "+" + five, one_more, "reset", "+" + one_more, five)
    for line, expected in zip(lines, (first, first, after, after, first), strict=False):
        assert torch.equal(numbers(line), expected)
    assert lines[5].startswith(f"5 of {ROOM}, 6 of {ROOM}")


def test_several_sequences(tmp_path, in_cpp):
    model = build("plain")
    moe_mlir.save_decoder(model, tmp_path / "two", room=ROOM, sequences=2)
    decoder = moe_mlir.load(tmp_path / "two").decoder
    calls = [ids(tokens, seed, sequences=2) for seed, tokens in enumerate((4, 1, 3))]
    found = [decoder(tokens) for tokens in calls]
    require_close(found, eager_logits(model, calls))
    lines = in_cpp(tmp_path / "two", *calls, "1,2,3")
    for line, logits in zip(lines, found, strict=False):
        assert torch.equal(numbers(line).view(2, -1), logits)
    assert lines[3] == ("error: expected ids of 2 sequences, at least one of each and as many of each, "
                        "found 3")
    with pytest.raises(ValueError, match=r"expected ids of shape \[2, tokens\], found \[1, 4\]"):
        decoder(ids(4))


def test_programs_share_weights_and_the_model_gets_them_back(saved):
    model, folder = saved("windows")
    described = json.loads((folder / "decoder.json").read_text())
    programs = described["programs"]
    assert len(programs) == 6
    weights = [{a["stored_as"] for a in program["arguments"] if a["kind"] == "weight"}
               for program in programs]
    assert "model.layers.0.self_attn.q_proj.weight" in set.intersection(*weights)
    assert {tensor["stored_as"] for tensor in described["state"]} == {None}
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    assert (folder / "weights.safetensors").stat().st_size < 2 * size
    assert not any(hasattr(weight, "loan") for weight in model.parameters())
    assert json.loads((folder / "manifest.json").read_text())["format_version"] == 3
    assert moe_mlir.load(folder).decoder.room == ROOM


# ---- errors ------------------------------------------------------------------------------


CALL_ERRORS = {
    "ids above": ([70, 3], r"expected ids in \[0, 63\], found .*70"),
    "ids below": ([3, -1], r"expected ids in \[0, 63\], found .*-1"),
    "room": ([3] * (ROOM + 1), r"expected at most 24 tokens, which the decoder of room 24 has room for "
                               r"beside the 0 that it holds, found 25; call reset"),
}


@pytest.mark.parametrize("case", CALL_ERRORS)
def test_a_call_that_is_refused_changes_nothing(saved, in_cpp, case):
    _, folder = saved("plain")
    given, message = CALL_ERRORS[case]
    decoder = moe_mlir.load(folder).decoder
    with pytest.raises(ValueError, match=message):
        decoder(torch.tensor([given]))
    first = decoder(ids(4))
    error, found, _ = in_cpp(folder, torch.tensor([given]), ids(4))
    assert re.match(f"error: {message}", error)
    assert torch.equal(numbers(found), first)


def test_other_things_than_ids_are_refused(saved):
    decoder = moe_mlir.load(saved("plain")[1]).decoder
    for given, message in ((ids(3).float(), "of int64, found torch.float32"), ([[3]], "found list")):
        with pytest.raises(TypeError, match=f"expected ids as a tensor.*{message}"):
            decoder(given)
    for given in (ids(3)[0], ids(0)):
        with pytest.raises(ValueError, match=r"expected ids of shape \[1, tokens\]"):
            decoder(given)


def test_tokens_without_code_at_once_run_one_by_one(saved, in_cpp, tmp_path):
    """After as many as an empty cache can take."""
    model, folder = saved("windows")

    def leave_steps_and_one_window(decoder):
        decoder["programs"] = [decoder["programs"][i] for i in (0, 1, 4)]
    copy = damage(folder, tmp_path / "copy", leave_steps_and_one_window)
    calls = [ids(12), ids(5, 1), ids(1, 2)]
    decoder = moe_mlir.load(copy).decoder
    ran = []
    for number, program in enumerate(decoder._programs):
        def run(tokens, *rest, number=number, run=program.run):
            ran.append((number, tokens.shape[1]))
            run(tokens, *rest)
        program.run = run
    found = [decoder(tokens) for tokens in calls]
    assert ran == [(1, WINDOW), *[(2, 1)] * 10]
    require_close(found, eager_logits(model, calls))
    *lines, last = in_cpp(copy, *calls)
    for line, logits in zip(lines, found, strict=True):
        assert torch.equal(numbers(line), logits)
    assert last.startswith(f"18 of {ROOM}")


def test_a_state_without_code_is_an_error(saved, in_cpp, tmp_path):
    _, folder = saved("windows")
    copy = damage(folder, tmp_path / "copy", lambda decoder: decoder["programs"].pop(4))
    message = "expected a number of tokens that the artifact has code for, found 1 after 8"
    decoder = moe_mlir.load(copy).decoder
    decoder(ids(WINDOW))
    with pytest.raises(ValueError, match=message):
        decoder(ids(1))
    assert decoder.position == WINDOW
    assert in_cpp(copy, ids(WINDOW), ids(1))[1].startswith(f"error: {message}")


def test_a_model_that_is_unrolled_over_tokens_has_steps_alone(saved):
    _, folder = saved("state space")
    programs = json.loads((folder / "decoder.json").read_text())["programs"]
    assert [(p["form"], p["next_form"]) for p in programs] == [(0, 1), (1, 1)]


def test_one_call_at_a_time_and_none_after_one_that_failed(saved, monkeypatch):
    decoder = moe_mlir.load(saved("plain")[1]).decoder
    first = decoder(ids(4))
    program = decoder._programs[1]
    inside, done, run = threading.Event(), threading.Event(), program.run

    def slow(*arguments):
        inside.set()
        done.wait(60)
        run(*arguments)
    monkeypatch.setattr(program, "run", slow)
    thread = threading.Thread(target=decoder, args=(ids(4),))
    thread.start()
    assert inside.wait(60)
    for misuse in (lambda: decoder(ids(1)), decoder.reset):
        with pytest.raises(RuntimeError, match="one call of a decoder at a time"):
            misuse()
    done.set()
    thread.join()

    def fail(*_):
        raise MemoryError
    monkeypatch.setattr(program, "run", fail)
    with pytest.raises(MemoryError):
        decoder(ids(4))
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="expected a reset of the decoder after a call that failed"):
        decoder(ids(1))
    decoder.reset()
    assert torch.equal(decoder(ids(4)), first)


def test_a_decoder_is_no_artifact_of_functions(saved, tmp_path):
    _, folder = saved("plain")
    done = run_tool("moe-run", folder, "--list")
    assert done.returncode == 0 and "function: program_1" in done.stdout
    done = run_tool("moe-run", folder, "--function=program_1")
    assert done.returncode == 1 and "found a decoder; load it with moe::runtime::Decoder" in done.stderr


def test_models_that_cannot_be_saved(tmp_path):
    model = build("plain")
    with pytest.raises(ValueError, match="expected 'room' to be a positive integer, found 0"):
        moe_mlir.save_decoder(model, tmp_path / "a", room=0)
    with pytest.raises(ValueError, match="in evaluation mode, found one in training mode"):
        moe_mlir.save_decoder(model.train(), tmp_path / "a", room=4)
    with pytest.raises(TypeError, match="a language model of transformers, found Linear"):
        moe_mlir.save_decoder(torch.nn.Linear(3, 3), tmp_path / "a", room=4)
    assert not list(tmp_path.iterdir())


def test_a_place_that_is_taken_stays(tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "note.txt").write_text("mine")
    with pytest.raises(moe_mlir.MoeError, match="to be free, empty or an older artifact alone"):
        moe_mlir.save_decoder(build("plain"), tmp_path / "taken", room=4, later_prompts=False)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
    assert (tmp_path / "taken" / "note.txt").read_text() == "mine"


def test_moe_compile_takes_no_other_folders(tmp_path):
    (tmp_path / "in").mkdir()
    done = run_tool("moe-compile", tmp_path / "in", "-o", tmp_path / "out")
    assert done.returncode == 1 and "expected 'decoder.json' in '" in done.stderr
    function = "func.func @{}(%x: tensor<3xf32>) -> tensor<3xf32> {{ return %x : tensor<3xf32> }}\n"
    (tmp_path / "in" / "a.mlir").write_text(function.format("f") + function.format("g"))
    (tmp_path / "in" / "decoder.json").write_text("{}")
    (tmp_path / "in" / "files.json").write_text("{}")
    done = run_tool("moe-compile", tmp_path / "in", "-o", tmp_path / "out")
    assert done.returncode == 1
    assert "expected one public function in each program, found a second 'a'" in done.stderr
    assert not (tmp_path / "out").exists()


# ---- damaged descriptions ----------------------------------------------------------------


def set_top(**entries):
    return lambda decoder: decoder.update(entries)


def in_program(**entries):
    return lambda decoder: decoder["programs"][0].update(entries)


def in_argument(kind, /, **entries):
    def change(decoder):
        argument = next(a for a in decoder["programs"][0]["arguments"] if a["kind"] == kind)
        argument.update(entries)
    return change


def without(name):
    return lambda decoder: decoder.pop(name)


DAMAGES = {
    "no room": set_top(room=0),
    "no sequences": set_top(sequences=-1),
    "other sequences": set_top(sequences=3),
    "no vocabulary": set_top(vocabulary="64"),
    "no programs": set_top(programs=[]),
    "no state": set_top(state=[]),
    "state twice": lambda decoder: decoder["state"].append(decoder["state"][0]),
    "state of no program": lambda decoder: decoder["state"].append(
        dict(name="more", dtype="f32", shape=[2**33], stored_as=None)),
    "a type of state": lambda decoder: decoder["state"][0].update(dtype="f64"),
    "an unknown type": lambda decoder: decoder["state"][0].update(dtype="f31"),
    "sizes of state": lambda decoder: decoder["state"][0].update(shape=[1, -2, 24, 8]),
    "huge state": lambda decoder: decoder["state"][0].update(shape=[2**40, 2**40]),
    "no first value": lambda decoder: decoder["state"][0].update(stored_as="nothing"),
    "another first value": lambda decoder: decoder["state"][0].update(
        stored_as="model.norm.weight"),
    "a counter below 0": set_top(counters=[-1]),
    "a counter above the room": set_top(counters=[10**12]),
    "no counter": set_top(counters=[]),
    "no such function": in_program(function="program_9"),
    "a function twice": lambda decoder: decoder["programs"][1].update(function="program_0"),
    "fewer arguments": lambda decoder: decoder["programs"][0]["arguments"].pop(),
    "no such weight": in_argument("weight", stored_as="nothing"),
    "another weight": in_argument("weight", stored_as="model.norm.weight"),
    "a weight as state": in_argument("weight", kind="state"),
    "state as a weight": in_argument("state", kind="weight", stored_as="model.norm.weight"),
    "state as ids": in_argument("state", kind="ids"),
    "ids as a counter": in_argument("ids", kind="counter", counters=[0]),
    "ids as state": in_argument("ids", kind="state"),
    "an unknown kind": in_argument("ids", kind="other"),
    "no such counter": in_argument("counter", counters=[7]),
    "a negative counter": in_argument("counter", counters=[-1]),
    "no counters": in_argument("counter", counters=[]),
    "unknown names": in_program(conditions=[["other + 1", ">=", 2]]),
    "an unknown relation": in_program(conditions=[["2", "~", 2]]),
    "a symbol of no argument": in_program(symbols={"s0": [999, 0]}),
    "a symbol of no dim": in_program(symbols={"s0": [0, 9]}),
    "changes of no counter": in_program(changes=[[5, 1]]),
    "changes by unknown names": in_program(changes=[[0, "other"]]),
    "no conditions": lambda decoder: decoder["programs"][0].pop("conditions"),
    "no form": without("form"),
    "a form that is a text": in_program(form="0"),
}


def damage(folder, copy, change):
    """A copy of the artifact with another decoder.json, and digests that fit."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    decoder = json.loads((copy / "decoder.json").read_text())
    change(decoder)
    (copy / "decoder.json").write_text(json.dumps(decoder))
    digest = hashlib.sha256((copy / "decoder.json").read_bytes()).hexdigest()
    rewrite_manifest(copy, lambda m: m["files"]["decoder.json"].update(sha256=digest))
    return copy


def test_damaged_descriptions_are_refused(saved, in_cpp, tmp_path):
    _, folder = saved("windows")
    assert "counter" in (folder / "decoder.json").read_text()
    for case, change in DAMAGES.items():
        copy = damage(folder, tmp_path / "copy", change)
        with pytest.raises(ValueError, match="expected"):
            moe_mlir.load(copy)
            pytest.fail(f"{case} was loaded")
        (line,) = in_cpp(copy, ids(3))
        assert line.startswith("error: ") and "expected" in line, (case, line)
    # Nor is a file taken whose digest does not fit.
    copy = shutil.copytree(folder, tmp_path / "flipped")
    text = (copy / "decoder.json").read_text()
    (copy / "decoder.json").write_text(text.replace('"room": 24', '"room": 25'))
    with pytest.raises(ValueError, match="the artifact is damaged"):
        moe_mlir.load(copy)
    (line,) = in_cpp(copy, ids(3))
    assert "the artifact is damaged" in line


def test_code_never_leaves_its_tensors(saved, in_cpp, tmp_path):
    """Even if the description says that it may: it checks indices itself."""
    _, folder = saved("plain")
    copy = damage(folder, tmp_path / "copy", set_top(vocabulary=10**9, room=10**6))
    decoder = moe_mlir.load(copy).decoder
    with pytest.raises(IndexError, match="less than 64, found 99999"):
        decoder(torch.tensor([[3, 99999]]))
    with pytest.raises(RuntimeError, match="expected a reset"):
        decoder(ids(1))
    decoder.reset()
    decoder(ids(ROOM))
    with pytest.raises(IndexError, match="less than 24, found 24"):
        decoder(ids(1))
    lines = in_cpp(copy, torch.tensor([[3, 99999]]), ids(1), "reset", ids(ROOM), ids(1))
    assert "less than 64, found 99999" in lines[0] and "expected a reset" in lines[1]
    assert "less than 24, found 24" in lines[3]


def test_programs_of_a_small_room_are_those_of_a_large_one():
    """Their conditions tell which calls they serve: none of 4096 states needs another."""
    from moe_mlir.decoding.save import _Decoder
    from moe_mlir.decoding.search import Search

    model = build("windows")
    small, large = (_Decoder(model, room, 1) for room in (ROOM, 4096))
    small.find_programs(later_prompts=False)
    assert len(small._programs) == 4
    traced = []
    search = Search(large._states, traced.append, 4096, later_prompts=False)
    search.programs = small._programs
    search.run()
    assert traced == [] and len(search._seen) == 4096 and search.longest_prompt == 4096


def test_a_search_skips_what_is_unrolled():
    """Programs of one number of tokens are not kept; one of more is tried with twice as many."""
    from moe_mlir.decoding.search import Search
    from moe_mlir.decoding.states import State

    class Program:
        def __init__(self, call):
            # Five tokens and more, or one number.
            self.form, self.tokens, self.serves_many = call.state.form, call.tokens, call.tokens >= 5
            traced.append((call.position, call.tokens))

        def serves(self, state, tokens):
            return state.form == self.form and (
                tokens >= 5 if self.serves_many else tokens == self.tokens)

        def most_tokens(self, state, tokens, most):
            return most if self.serves_many else tokens

        def after(self, state, tokens):
            return State(1, (state.counters[0] + tokens,))

    class States:
        initial = State(0, (0,))

    for last, later in ((3, False), (20, False), (20, True)):
        traced = []
        search = Search(States, Program, last, later)
        search.run()
        assert traced == [(0, 1), (0, 2), *([(0, 5)] if last > 5 else []), (1, 1),
                          *([(1, 2), (1, 5)] if later else [])]
        assert len(search.programs) == (2 if last < 5 else 3 + later)
        assert search.longest_prompt == (1 if last < 5 else last)
