"""What changes after a patch: numbers, layers, weights and modes that a graph was traced with."""

import copy

import pytest
import torch
from support import Selections
from torch.nn.utils import parametrize

from moe_mlir import hf
from moe_mlir.patching import raised_forward
from moe_mlir_bench.models import FAMILIES

POWER = 1.0


class Config:
    def __init__(self):
        self.num_experts, self.top_k, self.scale = 8, 2, 1.5


class Router(torch.nn.Module):
    """A router as code that comes with a checkpoint has it, with a layer of its own."""

    def __init__(self):
        super().__init__()
        self.config = Config()
        self.renormalises = True
        self.activation = torch.sigmoid
        self.gate = torch.nn.Linear(16, 8, bias=False)
        self.register_buffer("bias", torch.linspace(0.3, -0.3, 8))

    def forward(self, x):
        logits = self.gate(x)
        scores = self.activation(logits)
        _, expert_ids = torch.topk(scores + self.bias, self.config.top_k, dim=-1)
        gates = scores.gather(-1, expert_ids)
        if self.renormalises:
            gates = gates / gates.sum(-1, keepdim=True)
        return {"logits": logits, "gates": gates ** POWER * self.config.scale, "ids": expert_ids}


class Writes(Router):
    def forward(self, x):
        self.seen = x.shape[0]
        return super().forward(x)


class Loops(Router):
    def forward(self, x):
        return {"experts": super().forward(x)} if x.sum() > 0 else {}


class Blocks(Router):
    def __init__(self):
        super().__init__()
        self.experts = torch.nn.ModuleList([torch.nn.Linear(16, 16)])


class Reads(Router):
    def __init__(self):
        super().__init__()
        self.ranks = [1, 2]

    def forward(self, x):
        return super().forward(x * self.ranks[0])


Router.forward.__module__ = "transformers_modules.model"
for kind in (Router, Writes, Loops, Blocks, Reads):
    kind.__module__ = "transformers_modules.model"


def pair():
    torch.manual_seed(0)
    router = Router()
    patched = copy.deepcopy(router)
    assert hf.patch(patched) == 1
    check(router, patched)
    return router, patched


def check(router, patched, shape=(5, 16)):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    with Selections(settle=True):
        expected = router(x)
    found = patched(x)
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def runs_graph(patched):
    return patched.forward.runner((torch.zeros(5, 16),), {}, []) is not None


class Scaled(torch.nn.Module):
    def forward(self, weight):
        return weight * 2


def set_top_k(router):
    router.config.top_k = 3


def set_scale_of_another_configuration(router):
    router.config = Config()
    router.config.scale = 4.0


def set_flag(router):
    router.renormalises = False


def set_activation(router):
    router.activation = torch.nn.functional.silu


def replace_layer(router):
    router.gate = torch.nn.Sequential(router.gate, torch.nn.Tanh())


def parametrize_weight(router):
    parametrize.register_parametrization(router.gate, "weight", Scaled())


def assign_bias(router):
    router.bias = router.bias * 10


CHANGES = [set_top_k, set_scale_of_another_configuration, set_flag, replace_layer,
           parametrize_weight, assign_bias]


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_after_the_patch_is_seen(change):
    router, patched = pair()
    change(router)
    change(patched)
    check(router, patched)
    assert runs_graph(patched)


def test_a_change_that_is_not_recognised_runs_the_modules_own_forward():
    router, patched = pair()
    set_activation(router)
    set_activation(patched)
    check(router, patched)
    assert not runs_graph(patched)


def test_a_variable_of_the_file_that_changes_is_seen(monkeypatch):
    router, patched = pair()
    monkeypatch.setitem(globals(), "POWER", 2.0)
    check(router, patched)
    assert runs_graph(patched)


def test_hooks_on_inner_layers_run():
    _, patched = pair()
    seen = []
    handle = patched.gate.register_forward_hook(lambda *_: seen.append(1))
    patched(torch.zeros(5, 16))
    assert seen and not runs_graph(patched)
    handle.remove()
    assert runs_graph(patched)


@pytest.mark.parametrize("shape", [(0, 16), (1, 16), (16,), (1, 1, 16), (3, 2, 16)])
def test_every_shape(shape):
    check(*pair(), shape)


def test_modes():
    router, patched = pair()
    for mode in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
        with mode:
            check(router, patched)
            assert runs_graph(patched)
    check(router.train(), patched.train())
    x = torch.randn(3, 5, 16)
    torch.testing.assert_close(torch.func.vmap(patched)(x), torch.func.vmap(router)(x))


def test_copies_hold_no_graphs():
    _, patched = pair()
    again = copy.deepcopy(patched)
    assert again.forward._known == {} and patched.forward._known
    assert hf._is_patched(again)


def test_graphs_are_shared_and_kinds_are_counted():
    router, patched = pair()
    before = len(raised_forward._TRACED)
    _, other = pair()
    assert len(raised_forward._TRACED) == before
    for tokens in range(2, 60):
        other(torch.zeros(tokens, 16))
    assert len(raised_forward._TRACED) == before
    for scale in range(60):  # a number that changes all the time is traced for a while
        router.config.scale = patched.config.scale = float(scale)
        check(router, patched)
    assert len(patched.forward._known) <= 32


@pytest.mark.parametrize("kind, reason", [
    (Writes, "its forward sets the attribute 'seen'"),
    (Loops, "its forward has control flow that depends on data"),
    (Blocks, r"the block selects experts in its own forward, which runs them as well \(in "
             "'experts'\\)"),
    (Reads, "its forward reads 'ranks', an object of list")])
def test_what_stays_is_named(kind, reason):
    layers = torch.nn.Sequential(kind(), torch.nn.Linear(2, 2), kind())
    with pytest.warns(UserWarning, match=rf"'0' and 1 other \({kind.__name__}\) stay as they are: "
                                         + reason) as found:
        assert hf.patch(layers) == 0
    assert len(found) == 1


def test_models_without_experts_are_silent(recwarn):
    import transformers
    config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48,
                                      num_hidden_layers=1, num_attention_heads=4)
    assert hf.patch(transformers.LlamaForCausalLM(config)) == 0
    assert not [w for w in recwarn if " stay" in str(w.message)]


def test_a_patched_model_compiles_with_any_backend():
    family = FAMILIES["Qwen3-MoE"]
    model, inputs = family.build(), family.example()
    expected = model(**inputs).logits
    hf.patch(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(**inputs).logits, expected, rtol=1e-5, atol=1e-5)
