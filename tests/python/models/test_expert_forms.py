"""The experts implementation "moe" on every form that transformers has, beside its own eager code."""

import copy
import importlib

import pytest
import torch

import moe_mlir.hf  # noqa: F401  registers the implementation
from moe_mlir._expert_forms import activation_of, find_activation
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
])
def test_activations_are_found_by_what_they_compute(function, known):
    assert find_activation(function, 6) == known
