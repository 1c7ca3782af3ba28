"""The experts implementation "moe" on every form that transformers has, beside its own eager code."""

import copy
import importlib

import pytest
import torch
import torch.nn.functional as F

import moe_mlir.hf  # noqa: F401  registers the implementation
from moe_mlir.experts.activation_detection import activation_of, find_activation
from moe_mlir.frontends import dynamo
from moe_mlir.ops._expert_activation import ExpertActivation

E, K, D, H, T = 5, 2, 33, 7, 11
SIZES = dict.fromkeys(("hidden_size", "moe_hidden_size"), D) | dict.fromkeys(
    ("intermediate_size", "moe_intermediate_size"), H) | dict.fromkeys(
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), E)
SWIGLU = ExpertActivation("silu", gate="concatenated")
# module: its class, its config, what it computes between the layers
FORMS = {
    "mixtral": ("MixtralExperts", "MixtralConfig", SWIGLU),
    "aria": ("AriaExperts", "AriaTextConfig", SWIGLU),  # transposed
    "beam": ("BeamExperts", "BeamConfig", SWIGLU),  # in float32
    "gemma4": ("Gemma4TextExperts", "Gemma4TextConfig",
               ExpertActivation("gelu_tanh", gate="concatenated")),
    "nemotron_h": ("NemotronHExperts", "NemotronHConfig", ExpertActivation("relu2")),  # no gate
    "gpt_oss": ("GptOssExperts", "GptOssConfig",
                ExpertActivation("silu", 1.702, "interleaved", limit=7.0, up_offset=1.0)),
    "openai_privacy_filter": (
        "OpenAIPrivacyFilterExperts", "OpenAIPrivacyFilterConfig",
        ExpertActivation("silu", 1.702, "concatenated", limit=7.0, up_offset=1.0)),
    "deepseek_v4": ("DeepseekV4Experts", "DeepseekV4Config",
                    ExpertActivation("silu", gate="concatenated", limit=10.0)),
    "inkling2": ("Inkling2Experts", "Inkling2TextConfig",
                 ExpertActivation("silu", gate="concatenated", bound="softcap", limit=4.0,
                                  up_limit=25.0)),
    "muse_spark": ("MuseSparkExperts", "MuseSparkTextConfig", SWIGLU),  # a norm behind the experts
}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def build(name, dtype=torch.float32):
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    class_name, config_name, _ = FORMS[name]
    config = getattr(module, config_name)()
    for key, size in SIZES.items():
        if hasattr(config, key):
            setattr(config, key, size)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    experts = getattr(module, class_name)(config)
    for parameter in experts.parameters():
        # Far enough out for limits to count.
        torch.nn.init.normal_(parameter, std=3.0 / parameter.shape[-1] ** 0.5)
    return experts.to(dtype).eval()


def example(dtype, experts=E):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(T, D, generator=generator).to(dtype)
    scores = torch.rand(T, experts - 1, generator=generator)  # the last expert is idle
    return x, scores.topk(K).indices, torch.rand(T, K, generator=generator).to(dtype)


def run(experts, implementation, inputs):
    experts.config._experts_implementation = implementation
    x, indices, gates = inputs
    x, gates = x.detach().requires_grad_(), gates.detach().requires_grad_()
    with torch.no_grad():
        alone = experts(x, indices, gates)
    y = experts(x, indices, gates)
    leaves = [x, gates, *experts.parameters()]
    return alone, y.detach(), torch.autograd.grad(y, leaves, torch.ones_like(y), allow_unused=True)


def assert_near(found, expected, dtype):
    scale = expected.abs().max().clamp(min=1e-6)
    torch.testing.assert_close(found.double() / scale, expected.double() / scale, rtol=0,
                               atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_transformers_own(name, dtype):
    experts = build(name, dtype)
    assert activation_of(experts) == FORMS[name][2]
    inputs = example(dtype)
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    _, expected, gradients = run(copy.deepcopy(experts).double(), "eager", wide)
    alone, y, found = run(experts, "moe", inputs)
    assert alone.dtype == y.dtype == dtype
    assert_near(alone, expected, dtype)
    assert_near(y, expected, dtype)
    for a, b in zip(found, gradients, strict=True):
        assert_near(a, b, dtype)


def test_a_gate_that_nobody_knows_runs_as_it_is(monkeypatch):
    experts = build("mixtral")
    monkeypatch.setattr(type(experts), "_apply_gate",
                        lambda self, z: torch.tanh(z.chunk(2, -1)[0]) * z.chunk(2, -1)[1])
    assert activation_of(experts) is None
    inputs = example(torch.float32)
    expected = torch.zeros_like(inputs[0])
    for t in range(T):
        for e, gate in zip(inputs[1][t], inputs[2][t]):
            z = experts.gate_up_proj[e] @ inputs[0][t]
            expected[t] += gate * (experts.down_proj[e] @ experts._apply_gate(z))
    assert_near(run(experts, "moe", inputs)[0], expected, torch.float32)


def test_another_limit_is_noticed():
    experts = build("gpt_oss")
    assert activation_of(experts).limit == 7.0
    experts.limit = 3.0
    assert activation_of(experts).limit == 3.0
    experts.limit = 2
    assert activation_of(experts).limit == 2.0
    experts.limit = 1
    assert activation_of(experts).limit == 1.0


def test_another_number_of_the_activation_is_noticed():
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.alpha = 1.702

        def forward(self, x):
            return x * torch.sigmoid(self.alpha * x)
    experts = build("nemotron_h")
    experts.act_fn = Scaled()
    assert activation_of(experts) == ExpertActivation("silu", 1.702)
    experts.act_fn.alpha = 3
    assert activation_of(experts) == ExpertActivation("silu", 3.0)


def test_an_activation_that_writes_its_argument_is_found():
    experts = build("nemotron_h")
    experts.act_fn = torch.nn.SiLU(inplace=True)
    assert activation_of(experts) == ExpertActivation("silu")


def test_experts_of_other_ranks_add_nothing():
    """As transformers' expert parallelism says it: id E, weight 0."""
    experts = build("mixtral")
    experts._is_expert_parallel = True
    x, indices, gates = example(torch.float32)
    indices[::2, 1], gates[::2, 1] = E, 0.0
    indices[4] = E
    gates[4] = 0.0
    expected = run(experts, "eager", (x, indices, gates))
    found = run(experts, "moe", (x, indices, gates))
    for a, b in zip((*found[:2], *found[2]), (*expected[:2], *expected[2]), strict=True):
        assert_near(a, b, torch.float32)
    assert not found[2][1][::2, 1].any()


@pytest.mark.parametrize("function, known", [
    (torch.nn.functional.silu, ExpertActivation("silu")),
    (lambda z: z * torch.sigmoid(1.702 * z), ExpertActivation("silu", 1.702)),
    (lambda z: torch.nn.functional.gelu(z.float(), approximate="tanh"), ExpertActivation("gelu_tanh")),
    (torch.tanh, None),
    (lambda z: torch.nn.functional.silu(z) * (z < 50), None),
    (lambda z: z.view(-1, 3, 4), None),
    (lambda z: z / (1 + torch.exp(-z)), ExpertActivation("silu")),
    (lambda z: torch.clamp_min(z, 0) ** 2, ExpertActivation("relu2")),
    (lambda z: 0.5 * z * (1 + torch.tanh(0.7978845608028654 * (z + 0.044715 * z ** 3))),
     ExpertActivation("gelu_tanh")),
    (lambda z: 0.5 * z * (1 + torch.tanh(z * 0.7978845608 * (1 + 0.044715 * z * z))),
     ExpertActivation("gelu_tanh")),
    (lambda z: z * 0.5 * (1 + torch.erf(z / 2 ** 0.5)), ExpertActivation("gelu")),
    (lambda z: F.relu(z[..., :3]) * z[..., 3:], ExpertActivation("relu", gate="concatenated")),
    (lambda z: (z[..., 1::2] + 1) * F.silu(z[..., 0::2]),
     ExpertActivation("silu", gate="interleaved", up_offset=1.0)),
    # Equal to one of them nearly everywhere: no number of samples tells.
    (lambda z: torch.where(z > 0.1, z, 0.0), None),
    (lambda z: F.threshold(z, 0.1, 0.0), None),
    (lambda z: torch.where(z.abs() < 1e6, F.silu(z), 0.0), None),
    (lambda z: F.silu(z.clamp(-1e5, 1e5)), None),
    (lambda z: F.silu(torch.nan_to_num(z)), None),
    (lambda z: F.hardshrink(z, 1e-3), None),
    (lambda z: F.silu(z.to(torch.bfloat16)).to(z.dtype), None),
    (lambda z: F.silu(z.int().float()), None),
    (lambda z: F.silu(z) + 1e-9, None),
    (lambda z: F.silu(z) if z.sum() > 0 else z, None),
    (lambda z: F.silu(z[..., :3]) * z[..., :3], None),
    (lambda z: F.silu(z[..., 3:]) * z[..., :3], None),
    (lambda z: F.silu(z) * 0 + z, None),
    (lambda z: z - z + F.relu(z), None),
    (lambda z: F.dropout(F.silu(z)), None),
])
def test_activations_are_found_by_their_formula(function, known):
    assert find_activation(function, 6) == known


@pytest.mark.parametrize("gate", ["none", "concatenated", "interleaved"])
def test_every_activation_has_a_formula_of_its_own(gate):
    from moe_mlir.experts.activation_detection import _candidates
    from moe_mlir.experts.symbolic_features import Features

    candidates = list(_candidates([7.0], [1.3], gate))
    formulas = [candidate(Features.of_layer(6)) for candidate in candidates]
    for i, formula in enumerate(formulas):
        same = {candidates[j] for j in range(len(formulas)) if formulas[j] == formula}
        # Formulas count what reals do: of one formula, candidates are equal on tensors.
        z = torch.linspace(-9, 9, 600, dtype=torch.float64).view(100, 6)
        for other in same - {candidates[i]}:
            torch.testing.assert_close(other(z), candidates[i](z))


def test_another_activation_is_noticed_where_it_differs():
    experts = build("nemotron_h")
    experts.act_fn = torch.nn.Threshold(0.1, 0.0)
    assert activation_of(experts) is None


# ---- torch.compile(backend="moe") on transformers' own grouped_mm ---------------------


class Spy:
    """The backend without Inductor; keeps the moe ops of each graph that it makes."""

    def __init__(self):
        self.seen = []

    def __call__(self, module, inputs):
        raised = dynamo._raise_before_autograd(module, dynamo._trains(inputs)) or module
        self.seen.append([node.target for node in raised.graph.nodes if node.op == "call_function"])
        return dynamo._run_eagerly(raised, inputs)

    def calls(self, op):
        return [targets.count(getattr(torch.ops.moe, op).default) for targets in self.seen]

    @property
    def sorts(self):
        return [sum("sort" in str(target) for target in targets) for targets in self.seen]


def compiled(experts):
    torch._dynamo.reset()
    spy = Spy()
    experts.compile(backend=spy, fullgraph=True)
    return spy


def assert_equal_runs(found, expected, dtype):
    for a, b in zip((*found[:2], *found[2]), (*expected[:2], *expected[2]), strict=True):
        assert_near(a, b, dtype)


@pytest.mark.drawn(6)
@pytest.mark.parametrize("dtype, implementation", [(torch.float32, "grouped_mm"),
                                                   (torch.bfloat16, "moe")])
@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_one_call_where_nothing_is_trained(name, dtype, implementation):
    experts = build(name, dtype)
    inputs = example(dtype)
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    expected = run(copy.deepcopy(experts).double(), "eager", wide)
    spy = compiled(experts)
    assert_equal_runs(run(experts, implementation, inputs), expected, dtype)
    # Without gradients, then with them; a norm behind the experts is between the ops.
    assert spy.calls("run_experts") == [0 if name == "muse_spark" else 1, 0]
    assert spy.calls("grouped_linear") == [2 if name == "muse_spark" else 0, 2]
    assert spy.sorts == [0, 0]


@pytest.mark.parametrize("name", ["gpt_oss", "mixtral", "muse_spark"])
def test_experts_of_other_ranks_add_nothing_in_a_compiled_graph(name):
    experts = build(name)
    experts._is_expert_parallel = True
    x, indices, gates = example(torch.float32)
    indices[::2, 1], gates[::2, 1] = E, 0.0
    expected = run(experts, "batched_mm", (x, indices, gates))
    spy = compiled(experts)
    found = run(experts, "grouped_mm", (x, indices, gates))
    assert_equal_runs(found, expected, torch.float32)
    assert not found[2][1][::2, 1].any()
    assert spy.sorts == [0, 0] and spy.calls("dispatch") == [int(name == "muse_spark"), 1]


def test_another_limit_is_noticed_by_a_compiled_graph():
    experts = build("gpt_oss")
    inputs = example(torch.float32)
    spy = compiled(experts)
    # The second is one of an open number, which a graph with it in an op must not keep open.
    for limit in (7.0, 0.5, 1.5, 7.0):
        experts.limit = limit
        expected = copy.deepcopy(experts)
        expected._compiled_call_impl = None
        assert_near(run(experts, "grouped_mm", inputs)[0], run(expected, "eager", inputs)[0],
                    torch.float32)
    assert set(spy.calls("run_experts")) == {0, 1}


@pytest.mark.parametrize("read", [lambda z: z + 1, lambda z: z.relu_()])
def test_experts_whose_rows_are_read_elsewhere_stay(monkeypatch, read):
    """Our rows may stand in another order than theirs."""
    experts, inputs = build("mixtral"), example(torch.float32)
    experts.config._experts_implementation = "grouped_mm"
    kept = []
    gate = type(experts)._apply_gate

    def keeping_gate(self, z):
        kept.append(z)
        return gate(self, z)
    monkeypatch.setattr(type(experts), "_apply_gate", keeping_gate)

    def run_and_read(x, indices, gates):
        kept.clear()
        y = experts(x, indices, gates)
        return y, read(kept[0])
    spy = Spy()
    with torch.no_grad():
        # Compiled, too: transformers' eager code has a product that wants other widths.
        expected = torch.compile(run_and_read, backend="eager")(*inputs)
        torch._dynamo.reset()
        found = torch.compile(run_and_read, backend=spy)(*inputs)
    for a, b in zip(found, expected, strict=True):
        assert_near(a, b, torch.float32)
    assert sum(spy.sorts) == 1 and not any(spy.calls("dispatch"))


def test_experts_under_autocast_stay():
    experts, inputs = build("mixtral"), example(torch.float32)
    experts.config._experts_implementation = "grouped_mm"
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = torch.compile(experts, backend="eager")(*inputs)
        spy = compiled(experts)
        assert_near(experts(*inputs), expected, torch.bfloat16)
    assert spy.sorts == [1]
