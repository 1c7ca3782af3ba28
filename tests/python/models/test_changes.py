"""What packing, quantizing and patching say of what they did and what they left."""

import doctest
import pickle
import warnings

import pytest
import torch

import moe_mlir
from moe_mlir import hf, nn
from moe_mlir._support import changes
from moe_mlir_bench.models import FAMILIES


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(32, 64)
        self.layer = nn.MoELayer(nn.SMoE(64, 8, 2), 64, activation="swiglu")
        self.soft = nn.MoELayer(nn.SoftMoE(64, 4), 64)
        self.gate = torch.nn.Linear(64, 64)
        self.out = torch.nn.Linear(64, 128)
        self.narrow = torch.nn.Linear(64, 3)


def quietly(function, *arguments, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return function(*arguments, **options), [str(w.message) for w in caught]


def test_quantize():
    done, said = quietly(moe_mlir.quantize, Model(), "int4", activations="int8")
    assert done == 3 and isinstance(done, int) and repr(done) == f"{done}" == "3"
    assert dict(done.changed) == {
        "layer": "MoELayer, int4, group=32, activations=int8",
        "out": "QuantizedLinear, int4, group=32, activations=int8",
        "narrow": "QuantizedLinear, int4, group=32, activations=int8"}
    assert done.kept == {"soft": "a soft router uses its weights in other products",
                         "gate": "it is a router's, which stays recognised"}
    # By design is no warning.
    assert len(said) == 1 and "'soft' (MoELayer) is not quantized" in said[0]
    assert done.summary().splitlines() == [
        "3 modules changed", *(f"  {name}: {what}" for name, what in done.changed.items()),
        "2 modules stay as they are", *(f"  {name}: {why}" for name, why in done.kept.items())]
    assert pickle.loads(pickle.dumps(done)).summary() == done.summary()
    assert moe_mlir.quantize(torch.nn.Linear(64, 64)).summary() == (
        "1 module changed\n  the model: QuantizedLinear, int4, group=32")


def test_pack():
    model = Model().eval()
    done, said = quietly(moe_mlir.pack_experts, model)
    assert done == 1 and list(done.changed) == ["layer"] and list(done.kept) == ["soft"]
    assert len(said) == 1
    done, said = quietly(moe_mlir.pack_linears, model)
    assert list(done.changed) == ["out"] and done.changed["out"] == "PackedLinear, which was Linear"
    assert set(done.kept) == {"gate", "narrow"} and "columns" in done.kept["narrow"]
    assert len(said) == 1 and "'narrow'" in said[0]
    done, _ = quietly(moe_mlir.pack_linears, model)
    assert done == 0 and not done.changed and not done
    assert done.summary().startswith("0 modules changed")
    with pytest.raises(TypeError):
        done.kept["narrow"] = "a reason"


def test_patch():
    model = FAMILIES["Granite-MoE"].build(torch.float32, layers=2, attn_implementation="sdpa")
    done = hf.patch(model)
    assert done == 2 and not done.kept
    assert all("router by moe ops" in what for what in done.changed.values())
    assert "2 modules changed" in done.summary()
    again = hf.patch(model)
    assert again == 0 and again.summary() == "0 modules changed"


def test_patch_says_what_stays():
    model = FAMILIES["Granite-MoE"].build(torch.float32, layers=1, attn_implementation="sdpa")
    name, router = next((n, m) for n, m in model.named_modules() if n.endswith("router"))
    router.forward = lambda *args: None
    done, said = quietly(hf.patch, model)
    assert done == 0 and "expected the forward of its class" in done.kept[name]
    assert done.kept[name] in said[0] and done.kept[name] in done.summary()


def test_the_example_runs():
    names = dict(moe_mlir=moe_mlir, torch=torch)
    (test,) = [t for t in doctest.DocTestFinder().find(changes.Changes, "Changes", globs=names)
               if t.examples]
    assert doctest.DocTestRunner().run(test).failed == 0
