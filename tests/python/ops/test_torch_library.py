"""The ops as torch.library ops: registration, tracing, export, dynamic token counts."""

import pytest
import torch
from op_calls import ALL_CALLS, normal

import moe_mlir
from moe_mlir import nn


@pytest.mark.drawn(14)
@pytest.mark.parametrize("name", ALL_CALLS)
def test_opcheck(name):
    """Schema, autograd registration, fake against real results, AOT with dynamic shapes."""
    torch.library.opcheck(getattr(torch.ops.moe, name).default, ALL_CALLS[name])


class Model(torch.nn.Module):
    """Each router once, over one block of tokens."""

    def __init__(self, impl="moe"):
        super().__init__()
        options = dict(d_model=12, num_experts=8, k=2, impl=impl)
        self.plain = nn.SMoE(**options)
        self.similar = nn.SimilaritySMoE(causal=True, learn_tau=True, similarity=True, **options)
        self.clustered = nn.ACMoE(**options)
        self.symphony = nn.SymphonySMoE(cold_start="base", **options)
        self.attentive = nn.AttentionSMoE(causal=True, **options)
        self.wo = torch.nn.Parameter(normal(2, 12, 6, seed=3))

    def forward(self, h):
        plain = self.plain(h)
        clustered = self.clustered(h, prev_indices=plain.indices, prev_gates=plain.gates, prev_h=h)
        heads = h.unflatten(-1, (2, 6)).transpose(1, 2)
        attentive = self.attentive(h, q=heads, k=heads, attn_output=h, v=heads, wo=self.wo)
        others = (clustered, attentive, self.similar(h), self.symphony(h))
        return plain.gates, *(routing.gates for routing in others)


@pytest.fixture
def one_graph():
    """A second graph for the same function is an error."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


def models():
    torch.manual_seed(0)
    compiled, plain = Model(), Model(impl="torch")
    plain.load_state_dict(compiled.state_dict())
    return compiled, plain


def test_one_graph_for_all_token_counts_in_inference(one_graph):
    model, _ = models()
    model.eval()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        for n in (7, 2, 3, 64, 300):
            h = normal(1, n, 12, seed=n)
            for actual, expected in zip(compiled(h), model(h), strict=True):
                torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


def test_one_graph_for_all_token_counts_in_training(one_graph):
    model, plain = models()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for n in (7, 3, 150):
        h = normal(2, n, 12, seed=n)
        for module in (model, plain):
            module.zero_grad()
        loss = sum((gates * normal(*gates.shape)).sum() for gates in compiled(h))
        loss.backward()
        loss = sum((gates * normal(*gates.shape)).sum() for gates in plain(h))
        loss.backward()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            scale = float(q.grad.abs().max())
            assert float((p.grad - q.grad).abs().max()) <= 1e-4 * max(scale, 1e-3), name


def test_export_keeps_the_ops_and_the_token_count_open():
    model, _ = models()
    model.eval()
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    program = torch.export.export(
        model, (normal(1, 9, 12),), dynamic_shapes=({1: tokens},), strict=False
    )
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    used = ("topk_renorm", "router_logits", "similarity_inform", "attention_posterior",
            "mad_dispersion", "adjacency_gate")  # fmt: skip
    expected = {f"moe.{name}.default" for name in used}
    assert expected <= called
    h = normal(1, 33, 12)
    with torch.no_grad():
        for actual, wanted in zip(program.module()(h), model(h), strict=True):
            torch.testing.assert_close(actual, wanted, rtol=0, atol=0)


def test_fake_results_have_the_shapes_and_dtypes_of_real_ones():
    for name, call in ALL_CALLS.items():
        op = getattr(torch.ops.moe, name)
        meta = [x.detach().to("meta") if isinstance(x, torch.Tensor) else x for x in call]
        real, fake = op(*call), op(*meta)
        pairs = zip(real, fake) if isinstance(real, tuple) else [(real, fake)]
        for a, b in pairs:
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride()), name


def test_an_argument_on_another_device_is_an_error():
    """Where one argument is on "meta", torch asks for shapes alone, whatever the others are."""
    for name, call in ALL_CALLS.items():
        op = getattr(torch.ops.moe, name)
        names = [argument.name for argument in op.default._schema.arguments]
        tensors = [i for i, x in enumerate(call) if isinstance(x, torch.Tensor)]
        for i in tensors[1:]:
            args = [*call[:i], call[i].detach().to("meta"), *call[i + 1 :]]
            with pytest.raises(ValueError, match=f"{name}: expected '{names[i]}' on cpu as "
                                                 f"'{names[tensors[0]]}', found meta"):
                op(*args)


def test_no_gradient_state_is_kept_without_need():
    z = normal(5, 8)
    gates, indices = moe_mlir.topk_renorm(z, 2)
    assert gates.grad_fn is None
    gates, indices = moe_mlir.topk_renorm(z.requires_grad_(), 2)
    assert gates.requires_grad and not indices.requires_grad
