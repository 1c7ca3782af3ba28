"""Routers and layers as modules: copied, saved, shared, checkpointed, compiled, on odd inputs."""

import concurrent.futures
import copy
import io
import pickle

import pytest
import torch
from composition import TOWERS, name_of, operands, stack
from methods import METHODS, D, K, make, normal
from op_judge import assert_close
from torch.utils.checkpoint import checkpoint

import moe_mlir
from moe_mlir import nn

H = normal(2, 9, D)


def layer_of(name, impl="moe"):
    """(a layer, its operands); routers by their name in `methods`, or a stack of classes."""
    if isinstance(name, tuple):
        router, inputs = stack(name, impl=impl), operands(name)
    else:
        router, inputs = make(name, impl)
    torch.manual_seed(1)
    return nn.MoELayer(router, 6, shared=1), inputs


LAYERS = [*METHODS, *TOWERS]


def id_of(name):
    return name if isinstance(name, str) else name_of(name)


every_layer = pytest.mark.parametrize("name", LAYERS, ids=id_of)


def saved(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@every_layer
def test_a_used_module_is_copied_pickled_and_saved(name):
    layer, inputs = layer_of(name)
    layer(H, **inputs)[0].sum().backward()
    moe_mlir.update_routers(layer)
    layer(H, **inputs)
    expected = layer.eval()(H, **inputs)[0]
    counts = {n: b.clone() for n, b in layer.named_buffers()}
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), saved(layer)):
        assert other.router.k == layer.router.k and other.router.inputs == layer.router.inputs
        assert all(torch.equal(b, counts[n]) for n, b in other.named_buffers())
        assert torch.equal(other(H, **inputs)[0], expected)
        # It is another module: what moves it leaves the first alone.
        other.train()(H, **inputs)
        moe_mlir.update_routers(other)
        assert all(torch.equal(b, counts[n]) for n, b in layer.named_buffers())


@every_layer
def test_a_state_dict_from_a_file_is_complete(name):
    layer, inputs = layer_of(name)
    layer(H, **inputs)
    moe_mlir.update_routers(layer)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other, _ = layer_of(name)
    for tensor in (*other.parameters(), *other.buffers()):
        tensor.data.zero_()
    other.load_state_dict(torch.load(file), strict=True)
    assert torch.equal(other.eval()(H, **inputs)[0], layer.eval()(H, **inputs)[0])


def some(inputs, batch, tokens):
    """The operands of the first sequences and tokens."""
    cut = {}
    for name, value in inputs.items():
        if name.endswith("wo"):
            cut[name] = value
        elif value.dim() == 4:
            cut[name] = value[:batch, :, :tokens]
        else:
            cut[name] = value[:batch, :tokens]
    return cut


@pytest.mark.parametrize("batch,tokens", [(2, 0), (0, 9), (1, 1)])
@every_layer
def test_no_token_or_one_goes_forward_backward_and_into_the_counts(name, batch, tokens):
    layer, inputs = layer_of(name)
    h = H[:batch, :tokens].clone().requires_grad_()
    before = {n: b.clone() for n, b in layer.named_buffers()}
    y, _ = layer(h, **some(inputs, batch, tokens))
    assert y.shape == h.shape
    y.sum().backward()
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in layer.parameters())
    moe_mlir.update_routers(layer)
    for n, b in layer.named_buffers():
        assert not b.is_floating_point() or bool(b.isfinite().all())
        # Nothing was seen, so nothing is learnt; a k schedule counts steps, not tokens.
        assert h.numel() or n.endswith("step") or torch.equal(b, before[n]), n


def laid_out(h):
    strided = torch.zeros(2, 9, 2 * D + 1)[..., 1::2]
    unaligned = torch.zeros(h.numel() + 1)[1:].view(h.shape)
    return {
        "strided": strided.copy_(h),
        "unaligned": unaligned.copy_(h),
        "transposed": h.transpose(0, 1).contiguous().transpose(0, 1),
        "reversed strides": h.permute(2, 1, 0).contiguous().permute(2, 1, 0),
    }


@every_layer
def test_the_layout_of_the_tokens_in_memory_is_no_matter(name):
    layer, inputs = layer_of(name)
    layer.eval()
    expected, _ = layer(H, **inputs)
    for what, h in laid_out(H).items():
        assert_close(layer(h, **inputs)[0], expected.detach().double(), 1e-6, what)
    one_row = H[:1, :1].expand(2, 9, D)
    assert_close(layer(one_row, **inputs)[0],
                 layer(one_row.contiguous(), **inputs)[0].detach().double(), 1e-6)  # fmt: skip


@every_layer
def test_inference_mode_gives_the_same_and_training_goes_on_behind_it(name):
    layer, inputs = layer_of(name)
    layer.eval()
    expected = layer(H, **inputs)[0].detach()
    with torch.inference_mode():
        assert torch.equal(layer(H, **inputs)[0], expected)
        layer.train()(H, **inputs)
        moe_mlir.update_routers(layer)
    layer(H, **inputs)[0].sum().backward()
    assert bool(layer.w_in.grad.any())


# ------------------------------------------------------------------ checkpoints

COUNTING = [n for n in LAYERS if any(
    getattr(m, "counters", ()) for m in layer_of(n)[0].modules())]  # fmt: skip


def counted(module):
    return {n: b.clone() for n, b in module.named_buffers() if not b.is_floating_point()}


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", COUNTING, ids=id_of)
def test_a_checkpointed_layer_counts_once_and_has_the_same_gradients(name, use_reentrant):
    (layer, inputs), (plain, _) = layer_of(name, "torch"), layer_of(name, "torch")
    h, expected_h = (H.clone().requires_grad_() for _ in range(2))
    # Two layers of the same weights: the inner one is recomputed inside of a backward.
    for _ in range(2):
        y = checkpoint(lambda x: layer(x, **inputs)[0], h, use_reentrant=use_reentrant)
        y = checkpoint(lambda x: layer(x, **inputs)[0], y, use_reentrant=use_reentrant)
        y.square().sum().backward()
        plain(plain(expected_h, **inputs)[0], **inputs)[0].square().sum().backward()
    for n, counts in counted(plain).items():
        assert torch.equal(counted(layer)[n], counts), n
    assert_close(h.grad, expected_h.grad.double(), 1e-5 * max(1, float(expected_h.grad.abs().max())))


# ------------------------------------------------------------------ threads and processes


@pytest.mark.parametrize("name", ["symphony_similarity", "deepseek_symphony", "attention_head"])
def test_threads_share_a_module_without_losing_a_count(name):
    layer, inputs = layer_of(name)
    plain, _ = layer_of(name)
    batches = [normal(2, 9, D, seed=s) for s in range(24)]
    expected = [plain(h, **inputs)[0].detach() for h in batches]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda h: layer(h, **inputs)[0].detach(), batches))
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
    for n, counts in counted(plain).items():
        assert torch.equal(counted(layer)[n], counts), n


class Routed(torch.utils.data.Dataset):
    """A data set whose items a router has seen."""

    def __init__(self, router):
        self.router = router

    def __len__(self):
        return 3

    def __getitem__(self, index):
        with torch.no_grad():
            return self.router(normal(1, 9, D, seed=index)).indices[0]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_a_data_loader_hold_a_module_that_was_used(method):
    router = nn.SimilaritySMoE(D, 8, K, causal=True, base=nn.XMoE(D, 8, K)).eval()
    data = Routed(router)
    expected = [data[i] for i in range(len(data))]
    loader = torch.utils.data.DataLoader(
        data, num_workers=1, multiprocessing_context=method, timeout=120
    )
    for found, wanted in zip(loader, expected, strict=True):
        assert torch.equal(found[0], wanted)


# ------------------------------------------------------------------ torch.compile


def compare_compiled(name, backend):
    """Forward, gradients and counts of a training step equal eager's."""
    torch._dynamo.reset()
    (layer, inputs), (plain, _) = layer_of(name), layer_of(name)
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    y, routing = compiled(H, **inputs)
    expected, wanted = plain(H, **inputs)
    assert torch.equal(routing.indices, wanted.indices)
    assert set(routing.state) == set(wanted.state)
    assert_close(y, expected.detach().double(), 1e-5)
    for out in (y, expected):
        out.square().sum().backward()
    for (n, a), b in zip(layer.named_parameters(), plain.parameters(), strict=True):
        if b.grad is not None:
            assert_close(a.grad, b.grad.double(), 2e-5 * max(1, float(b.grad.abs().max())), n)
    for (n, a), b in zip(layer.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(a, b), n


SHOWN = ["hyper_router", "top_p_ac", "symphony_similarity", "soft_ac", "deepseek_symphony",
         TOWERS[0], TOWERS[3]]  # fmt: skip


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", SHOWN, ids=id_of)
def test_a_layer_compiles_into_one_graph(name):
    compare_compiled(name, "aot_eager")


@pytest.mark.long
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@every_layer
def test_every_layer_compiles_into_one_graph(name, backend):
    compare_compiled(name, backend)


def test_scores_are_a_tuple_of_three():
    scores = nn.SMoE(16, 8, 2).scores(torch.randn(4, 16))
    probs, logits, state = scores
    assert len(scores) == 3 and torch.equal(scores[0], probs) and scores[1] is logits
    assert scores[-1] is state and scores[1:] == (logits, state)
    with pytest.raises(IndexError):
        scores[3]


class TakesNoMask(nn.LinearRouter):
    def forward(self, h):
        return self.logits(h).topk(self.k)


class ReturnsATuple(nn.LinearRouter):
    def forward(self, h, mask=None):
        return self.logits(h).topk(self.k)


class FourLogits(nn.LinearRouter):
    def logits(self, h):
        return super().logits(h)[..., :4]


class Thresholds(nn.LinearRouter):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.thresholds = torch.nn.Parameter(torch.zeros(8))


def test_errors_of_a_router_of_ones_own_say_what_is_expected():
    h = torch.randn(4, 16)
    with pytest.raises(TypeError, match=r"TakesNoMask.forward to take \(h, mask=None.*found \(h\)"):
        nn.MoELayer(TakesNoMask(16, 8, 2), d_hidden=32)
    with pytest.raises(TypeError, match="ReturnsATuple to return an nn.Routing, found a tuple of 2"):
        nn.MoELayer(ReturnsATuple(16, 8, 2), d_hidden=32)(h)
    with pytest.raises(ValueError, match=r"FourLogits: expected logits of 8 experts, found .*\[4, 4\]"):
        FourLogits(16, 8, 2)(h)
    with pytest.raises(KeyError, match="Thresholds: expected a parameter by a name .*'thresholds'"):
        Thresholds(16, 8, 2)
