"""Experts that run in a Python loop: replaced where the numbers are the same, else named."""

import copy
import importlib
import warnings

import pytest
import torch

import moe_mlir
from moe_mlir import hf
from moe_mlir.patching.expert_loops import is_expert_loop, loop_forward


def made(folder, name, config, **sizes):
    """A module of transformers with random weights, by the names of its class and configuration."""
    models = f"transformers.models.{folder}"
    configuration = getattr(importlib.import_module(f"{models}.configuration_{folder}"), config)
    kind = getattr(importlib.import_module(f"{models}.modeling_{folder}"), name)
    torch.manual_seed(0)
    module = kind(configuration(**sizes)).eval()
    with torch.no_grad():
        for weight in module.parameters():
            scale = weight.shape[-1] ** -0.5 if weight.dim() > 1 else 0.1
            weight.copy_(torch.randn(weight.shape) * scale + (weight.dim() == 1))
    return module


STEP = dict(vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=24,
            num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
            num_local_experts=8, num_experts_per_tok=2, n_routed_experts=8, sliding_window=8,
            mlp_layer_types=["sparse"])
EXPERTS = {
    "step3p7": ("Step3p7Experts", "Step3p7TextConfig", STEP),
    "longcat_flash": ("LongcatFlashExperts", "LongcatFlashConfig", dict(
        hidden_size=32, expert_ffn_hidden_size=24, n_routed_experts=8, zero_expert_num=4)),
    "dbrx": ("DbrxExperts", "DbrxFFNConfig", dict(
        hidden_size=32, ffn_hidden_size=24, moe_num_experts=8)),
}


def inputs_of(folder, tokens, dtype):
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(*((1, tokens) if folder == "dbrx" else (tokens,)), 32, generator=generator)
    ids = torch.rand(tokens, 12 if folder == "longcat_flash" else 8, generator=generator)
    gates = torch.rand(tokens, 3, generator=generator)
    return x.to(dtype), ids.argsort(-1)[:, :3], gates.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("folder", EXPERTS)
def test_loops_equal_eager_and_train(folder, dtype):
    name, config, sizes = EXPERTS[folder]
    loop = made(folder, name, config, **sizes).to(dtype)
    patched = copy.deepcopy(loop)
    assert is_expert_loop(loop) and hf.patch(patched) == 0 and hf._is_patched(patched)
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    for tokens in (0, 1, 9):
        results = []
        for module in (loop, patched):
            module.zero_grad()
            x, ids, gates = inputs_of(folder, tokens, dtype)
            x.requires_grad_()
            gates.requires_grad_()
            y = module(x, ids, gates)
            if tokens:
                y.float().square().sum().backward()
            results.append((y.detach(), x.grad, gates.grad, *(p.grad for p in module.parameters())))
        for expected, found in zip(*results, strict=True):
            assert (expected is None) == (found is None)
            if expected is not None and expected.numel():
                assert found.shape == expected.shape and found.dtype == expected.dtype
                scale = expected.abs().max().clamp(min=1e-3)
                assert (found - expected).abs().max() <= 10 * tolerance * scale
    assert hf.unpatch(patched) == 0 and not hf._is_patched(patched)


def test_a_loop_that_computes_otherwise_stays_with_a_reason():
    loop = made("step3p7", *EXPERTS["step3p7"][:2], **STEP)

    class Other(type(loop)):
        def forward(self, hidden_states, top_k_index, top_k_weights):
            torch.nn.functional.one_hot(top_k_index).nonzero()
            return super().forward(hidden_states, top_k_index, top_k_weights) + 1
    Other.__module__ = "transformers_modules.other"
    loop.__class__ = Other
    assert is_expert_loop(loop)
    function, reason = loop_forward(loop)
    assert function is None and "gives other numbers than the known layouts" in reason
    with pytest.warns(UserWarning, match=r"'' \(Other\) stays as it is: its experts run in a loop"):
        hf.patch(loop)


def test_weights_of_zeros_show_nothing():
    loop = made("step3p7", *EXPERTS["step3p7"][:2], **{**STEP, "num_local_experts": 7,
                                                                  "n_routed_experts": 7})
    weight = loop.down_proj.detach().clone()
    with torch.no_grad():
        loop.down_proj.zero_()
        assert "no numbers to compare" in loop_forward(loop)[1]
        loop.down_proj.copy_(weight)
    assert loop_forward(loop)[1] == ""


def test_a_model_with_a_loop_compiles_whole_and_is_left_as_it_was():
    model = made("step3p7", "Step3p7TextModel", "Step3p7TextConfig", **STEP)
    ids = torch.randint(3, 64, (2, 12))
    with torch.no_grad():
        expected = model(ids, use_cache=False)[0]
    (router,) = moe_mlir.explain(model, (ids,), kwargs=dict(use_cache=False))
    assert router.recognised
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = moe_mlir.compile(model, (ids,), kwargs=dict(use_cache=False), pack=False)
    assert not any("forward" in vars(m) for m in model.modules())
    torch.testing.assert_close(compiled(ids, use_cache=False)[0], expected, rtol=1e-4, atol=1e-4)


def runs_of_rows(kind=None, dtype=torch.float32):
    """JetMoE's experts, which split rows by a list of how many each expert has."""
    from transformers.models.jetmoe.modeling_jetmoe import JetMoeParallelExperts

    torch.manual_seed(0)
    loop = (kind or JetMoeParallelExperts)(4, 32, 24)
    torch.nn.init.normal_(loop.weight)
    return loop.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("sizes", [[3, 0, 5, 1], [0, 0, 0, 9], [0, 0, 0, 0]])
def test_runs_of_rows_equal_eager_and_train(sizes, dtype):
    loop = runs_of_rows(dtype=dtype)
    patched = copy.deepcopy(loop)
    assert is_expert_loop(loop) and hf.patch(patched) == 0 and hf._is_patched(patched)
    results = []
    for module in (loop, patched):
        rows = torch.randn(sum(sizes), 32, generator=torch.Generator().manual_seed(1)).to(dtype)
        rows.requires_grad_()
        y = module(rows, sizes)
        y.float().square().sum().backward()
        results.append((y.detach(), rows.grad, module.weight.grad))
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    for ours, eager in zip(*reversed(results), strict=True):
        assert ours.dtype == eager.dtype and ours.shape == eager.shape
        torch.testing.assert_close(ours, eager, rtol=tolerance,
                                   atol=tolerance * max(eager.abs().max().item(), 1) if eager.numel() else 0)


def test_runs_of_rows_that_are_changed_on_the_way_stay():
    from transformers.models.jetmoe.modeling_jetmoe import JetMoeParallelExperts

    class Scaled(JetMoeParallelExperts):
        def forward(self, inputs, expert_size):
            return super().forward(inputs, expert_size) * 1.5
    Scaled.__module__ = JetMoeParallelExperts.__module__
    loop = runs_of_rows(Scaled)
    assert is_expert_loop(loop)
    assert loop_forward(loop) == (None, "its experts run in a loop that gives other numbers than the "
                                        "known layouts")
