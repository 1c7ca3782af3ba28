"""Models with the weights of their experts in panels: the same bits, the same checkpoints."""

import copy
import gc
import pickle

import pytest
import torch
from support import run_tool
from test_expert_forms import FORMS, build, example
from torch.multiprocessing.reductions import StorageWeakRef

import moe_mlir
from moe_mlir.nn import MoELayer, SMoE, SoftMoE
from moe_mlir_bench.models import FAMILIES


def run(experts, dtype):
    x, indices, gates = example(dtype)
    with torch.no_grad():
        return experts(x, indices, gates)


@pytest.mark.drawn(4)
@pytest.mark.parametrize(("name", "dtype"), [
    *((name, torch.float32) for name in FORMS if name != "muse_spark"),
    ("nemotron_h", torch.float16), ("mixtral", torch.float16),
])
def test_every_form_computes_the_same_bits(name, dtype):
    experts = build(name, dtype)
    experts.config._experts_implementation = "moe"
    expected, state = run(experts, dtype), copy.deepcopy(experts.state_dict())
    old = [StorageWeakRef(w.untyped_storage()) for w in experts.parameters() if w.dim() == 3]
    assert moe_mlir.pack_experts(experts) == 1
    gc.collect()
    assert all(w.expired() for w in old)  # one copy
    assert torch.equal(run(experts, dtype), expected)
    # Checkpoints know nothing of it.
    found = experts.state_dict()
    assert list(found) == list(state) and all(torch.equal(found[n], w) for n, w in state.items())
    doubled = {n: 2 * w for n, w in state.items()}
    experts.load_state_dict(doubled)
    changed = run(experts, dtype)
    assert not torch.equal(changed, expected)
    assert moe_mlir.pack_experts(experts) == 0
    assert moe_mlir.unpack_experts(experts) == 1
    assert all(torch.equal(w, doubled[n]) and w.requires_grad
               for n, w in experts.named_parameters())
    assert torch.equal(run(experts, dtype), changed)
    assert moe_mlir.unpack_experts(experts) == 0


def whole_model(dtype=torch.float32):
    model = FAMILIES["Granite-MoE"].build(dtype, layers=2, attn_implementation="sdpa")
    model.set_experts_implementation("moe")
    return model


IDS = torch.arange(3, 14)[None]


@torch.no_grad()
def test_a_model_is_packed_saved_and_copied(tmp_path):
    model = whole_model()
    expected, state = model(IDS).logits, copy.deepcopy(model.state_dict())
    assert moe_mlir.pack_experts(model) == 2
    assert torch.equal(model(IDS).logits, expected)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(IDS).logits, expected)
        assert moe_mlir.unpack_experts(other) == 2
        assert torch.equal(other(IDS).logits, expected)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="sdpa")
    assert all(torch.equal(w, state[n]) for n, w in loaded.state_dict().items())
    loaded.set_experts_implementation("moe")
    assert torch.equal(loaded(IDS).logits, expected)
    model.set_experts_implementation("grouped_mm")
    # Which gets the weights as they were.
    torch.testing.assert_close(model(IDS).logits, expected)


@torch.no_grad()
def test_a_packed_model_is_compiled():
    model = whole_model()
    expected = model(IDS).logits
    plain = moe_mlir.compile(model, (IDS,), pack=False)
    torch.testing.assert_close(plain(IDS).logits, expected, rtol=1e-4, atol=1e-4)
    moe_mlir.pack_experts(model)
    packed = moe_mlir.compile(model, (IDS,))
    torch.testing.assert_close(packed(IDS).logits, expected, rtol=1e-4, atol=1e-4)
    # Compiled again for weights that lie otherwise.
    torch.testing.assert_close(plain(IDS).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
@torch.no_grad()
def test_packed_experts_in_a_compiled_graph(name):
    experts = build(name)
    experts.config._experts_implementation = "moe"
    expected = run(experts, torch.float32)
    moe_mlir.pack_experts(experts)
    compiled = torch.compile(experts, backend="moe", fullgraph=True)
    torch.testing.assert_close(run(compiled, torch.float32), expected)
    if name == "gpt_oss":
        # What was known at packing no longer holds.
        experts.limit = 0.5
        changed = run(experts, torch.float32)
        assert not torch.equal(changed, expected)
        with pytest.raises(Exception, match="an activation that kernels know"):
            run(compiled, torch.float32)


@torch.no_grad()
def check_artifact(model, folder):
    """An artifact that moe-compile makes of a bf16 model has the model's logits."""
    program = torch.export.export(model, (), dict(input_ids=IDS, use_cache=False))
    torch.export.save(program, folder / "model.pt2")
    done = run_tool("moe-compile", folder / "model.pt2", "-o", folder / "artifact")
    assert done.returncode == 0, done.stderr
    found = moe_mlir.load(folder / "artifact")(IDS)
    torch.testing.assert_close(found, model(IDS).logits, rtol=5e-2, atol=5e-2)


def test_an_artifact_holds_the_panels(tmp_path):
    model = whole_model(torch.bfloat16)
    moe_mlir.pack_experts(model)
    check_artifact(model, tmp_path)


def test_layers_of_our_own():
    torch.manual_seed(0)
    layer = MoELayer(SMoE(16, 4, 2), 24)
    h = torch.randn(3, 5, 16)
    with torch.no_grad():
        expected = layer(h)[0]
        assert moe_mlir.pack_experts(layer) == 1
        assert torch.equal(layer(h)[0], expected)
    with pytest.warns(UserWarning, match="a soft router uses its weights in other products"):
        assert moe_mlir.pack_experts(MoELayer(SoftMoE(16, 4, 2), 24)) == 0


def shared(experts):
    other = torch.nn.Module()
    other.w, other.experts = experts.down_proj, experts
    return other


@pytest.mark.parametrize(("name", "change", "message"), [
    ("muse_spark", lambda e: e, "its experts end with a norm"),
    ("mixtral", lambda e: setattr(e.config, "_experts_implementation", "eager") or e,
     "expected the experts implementation 'moe', found 'eager'"),
    ("mixtral", lambda e: e.to(torch.float64), "expected float32, bfloat16 or float16"),
    ("mixtral", lambda e: e.to(torch.bfloat16), "an even number of hidden features in bfloat16"),
    ("mixtral", lambda e: e.to("meta"), "expected its weights in memory"),
    ("mixtral", shared, "its weights belong to other modules too"),
    ("mixtral", lambda e: setattr(e, "act_fn", torch.nn.Softsign()) or e,
     "an activation that kernels know"),
])
def test_layers_that_stay_as_they_are(name, change, message):
    experts = build(name)
    experts.config._experts_implementation = "moe"
    changed = change(experts)
    before = [(n, id(w)) for n, w in changed.named_parameters()]
    with pytest.warns(UserWarning, match=message):
        assert moe_mlir.pack_experts(changed) == 0
    assert [(n, id(w)) for n, w in changed.named_parameters()] == before


def test_only_modules_are_packed():
    for function in (moe_mlir.pack_experts, moe_mlir.unpack_experts):
        with pytest.raises(TypeError, match="expected 'model' to be a torch.nn.Module, found dict"):
            function({})
