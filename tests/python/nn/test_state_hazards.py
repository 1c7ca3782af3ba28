"""State that a forward touches while a backward still needs it: the measured ways to go wrong.

A router that moves its graph in the forward gets silently wrong gradients
under Inductor and under activation checkpointing. Ours counts in the forward
and moves once per optimizer step; each test below fails for a router that
does not.
"""

import copy

import pytest
import torch
import torch.multiprocessing
from composition import TOWERS, name_of, operands, stack
from methods import METHODS, D, E, K, normal
from methods import make as make_method
from op_judge import assert_close
from support import run_ranks
from torch.utils.checkpoint import checkpoint

import moe_mlir
from moe_mlir import nn, reference

STATEFUL = {
    "symphony": lambda impl: nn.SymphonySMoE(D, E, K, init="uniform", impl=impl),
    "symphony_soft": lambda impl: nn.SymphonySoftMoE(D, E, K, init="uniform", impl=impl),
    "deepseek_symphony": lambda impl: nn.DeepSeekV3Router(
        D, E, K, symphony=True, cold_start="base", impl=impl
    ),
    "similarity_symphony": lambda impl: nn.SymphonySMoE(
        D, E, K, init="uniform", base=nn.SimilaritySMoE(D, E, K, causal=True, impl=impl), impl=impl
    ),
}


def make(name, impl="torch"):
    torch.manual_seed(0)
    return STATEFUL[name](impl)


def weights_of(routing):
    return routing.gates if routing.combine is None else routing.combine


def loss_of(router, h, run=None):
    out = weights_of(router(h)) if run is None else run(h)
    weight = normal(*out.shape, seed=11).to(out.dtype)
    return (out * weight).sum()


def gradients(loss, router):
    parameters = [p for p in router.parameters() if p.requires_grad]
    return torch.autograd.grad(loss, parameters)


def stateless_gradients(name, h):
    """Of the same router in evaluation, where nothing counts."""
    router = make(name).eval()
    return gradients(loss_of(router, h), router)


H = normal(2, 9, D)


def counted(router):
    return {n: b.clone() for n, b in router.named_buffers() if not b.is_floating_point()}


@pytest.mark.parametrize("impl", ["torch", "moe"])
@pytest.mark.parametrize("name", STATEFUL)
def test_a_forward_moves_no_graph(name, impl):
    router = make(name, impl)
    before = router.adjacency.clone()
    grads = gradients(loss_of(router, H), router)
    assert torch.equal(router.adjacency, before)
    assert bool(router.co_selections.any())
    for actual, expected in zip(grads, stateless_gradients(name, H), strict=True):
        assert_close(actual, expected.double(), 1e-5)


@pytest.mark.parametrize("name", STATEFUL)
def test_forwards_before_the_backwards_count_once_each(name):
    """Accumulated micro-batches: the second forward must not disturb the first backward."""
    router = make(name)
    losses = [loss_of(router, normal(2, 9, D, seed=s)) for s in range(3)]
    for seed, loss in enumerate(losses):
        expected = stateless_gradients(name, normal(2, 9, D, seed=seed))
        for actual, wanted in zip(gradients(loss, router), expected, strict=True):
            assert_close(actual, wanted.double(), 1e-5)
    singly = make(name)
    total = sum(counted_after(singly, normal(2, 9, D, seed=s)) for s in range(3))
    assert torch.equal(router.co_selections, total)


def counted_after(router, h):
    router.co_selections.zero_()
    router(h)
    return router.co_selections.clone()


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", STATEFUL)
def test_checkpointing_recomputes_the_forward_and_counts_it_once(name, use_reentrant):
    router, plain = make(name), make(name)
    h = H.clone().requires_grad_()
    run = lambda x: weights_of(router(x))  # noqa: E731
    out = checkpoint(run, h, use_reentrant=use_reentrant)
    (out * normal(*out.shape, seed=11)).sum().backward()
    plain(H)
    for (buffer, value), expected in zip(counted(router).items(), counted(plain).values()):
        assert torch.equal(value, expected), buffer
    actual = [p.grad for p in router.parameters() if p.requires_grad]
    for grad, expected in zip(actual, stateless_gradients(name, H), strict=True):
        assert_close(grad, expected.double(), 1e-6)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_training_has_the_gradients_and_counts_of_eager(backend):
    torch._dynamo.reset()
    router, plain = make("symphony"), make("symphony")
    compiled = torch.compile(lambda h: weights_of(router(h)), backend=backend, fullgraph=True)
    for seed in range(2):
        h = normal(2, 9, D, seed=seed)
        for module in (router, plain):
            module.zero_grad()
        loss_of(router, h, compiled).backward()
        loss_of(plain, h).backward()
        for a, b in zip(router.parameters(), plain.parameters(), strict=True):
            assert_close(a.grad, b.grad.double(), 1e-5)
        assert torch.equal(router.co_selections, plain.co_selections)
        for module in (router, plain):
            moe_mlir.update_routers(module)
        assert torch.equal(router.adjacency, plain.adjacency)


@pytest.mark.parametrize("impl", ["torch", "moe"])
def test_an_update_between_forward_and_backward_is_right_or_refused(impl):
    """Never silently wrong: the graph of the forward, or autograd's error."""
    router = make("symphony", impl)
    loss = loss_of(router, H)
    moe_mlir.update_routers(router)
    try:
        grads = gradients(loss, router)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return
    for actual, expected in zip(grads, stateless_gradients("symphony", H), strict=True):
        assert_close(actual, expected.double(), 1e-5)


def test_evaluation_counts_nothing():
    for name in STATEFUL:
        router = make(name).eval()
        before = copy.deepcopy(router.state_dict())
        router(H)
        moe_mlir.update_routers(router)
        for key, value in router.state_dict().items():
            assert torch.equal(value, before[key]), key


def test_the_average_moves_once_a_step_however_many_micro_batches():
    router = make("symphony")
    a, idx = router.adjacency.double(), []
    for seed in range(3):
        h = normal(2, 9, D, seed=seed)
        idx.append(reference.topk_renorm(router.logits(h), K)[1].reshape(-1, K))
        router(h)
    moe_mlir.update_routers(torch.nn.Sequential(router))
    expected = reference.adjacency_update(a, torch.cat(idx))
    assert_close(router.adjacency, expected, 1e-6)
    # Nothing was counted since: the graph stays.
    before = router.adjacency.clone()
    moe_mlir.update_routers(router)
    assert torch.equal(router.adjacency, before)


def _rank(rank, folder, results):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    torch.set_num_threads(1)
    router = make("symphony")
    router(normal(2, 9, D, seed=rank))
    moe_mlir.update_routers(router)
    results[rank] = router.adjacency.tolist()
    torch.distributed.destroy_process_group()


def test_ranks_sum_their_counts_before_the_average_moves(tmp_path):
    with torch.multiprocessing.Manager() as manager:
        results = manager.dict()
        run_ranks(_rank, (str(tmp_path), results), 2)
        ranks = [torch.tensor(results[r]) for r in range(2)]
    together = make("symphony")
    for seed in range(2):
        together(normal(2, 9, D, seed=seed))
    moe_mlir.update_routers(together)
    assert torch.equal(ranks[0], together.adjacency) and torch.equal(ranks[1], together.adjacency)


def _ddp_rank(rank, folder, backend, results):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    torch.set_num_threads(1)
    router = make("deepseek_symphony" if backend is None else "symphony")
    # A level further down, as in a model.
    model = torch.nn.Sequential(router)
    ddp = torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=True)
    run = ddp if backend is None else torch.compile(ddp, backend=backend)
    for step in range(2):
        losses = [weights_of(run(normal(2, 9, D, seed=10 * step + 2 * i + rank))).square().sum()
                  for i in range(3)]  # fmt: skip
        sum(losses).backward()
        moe_mlir.update_routers(ddp)
        ddp.zero_grad()
    state = {n: t.tolist() for n, t in router.named_buffers() if t.is_floating_point()}
    results[rank] = state
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_ddp_leaves_the_counts_of_several_forwards_a_step_alone(tmp_path, backend):
    """Before each forward it gives all ranks the buffers of rank 0; counts are of each rank."""
    with torch.multiprocessing.Manager() as manager:
        results = manager.dict()
        run_ranks(_ddp_rank, (str(tmp_path), backend, results), 2)
        ranks = [dict(results[r]) for r in range(2)]
    together = make("deepseek_symphony" if backend is None else "symphony")
    for step in range(2):
        for seed in range(6):
            together(normal(2, 9, D, seed=10 * step + seed))
        moe_mlir.update_routers(together)
    for name in ranks[0]:
        expected = getattr(together, name)
        for rank in ranks:
            assert_close(torch.tensor(rank[name]), expected.double(), 1e-7, name)


# ------------------------------------------------------------------ every method and tower


def tower(classes):
    return stack(classes, impl="torch"), operands(classes)


def every_router():
    for name in METHODS:
        yield pytest.param(lambda name=name: make_method(name), id=name)
    for classes in TOWERS:
        yield pytest.param(lambda classes=classes: tower(classes), id=name_of(classes))


def moving(router):
    """What update_routers may move, by name."""
    return {n: b.clone() for n, b in router.named_buffers()}


@pytest.mark.parametrize("made", [*every_router()])
def test_a_second_update_without_a_forward_moves_no_average(made):
    router, inputs = made()
    router(H, **inputs)
    moe_mlir.update_routers(router)
    before = moving(router)
    moe_mlir.update_routers(router)
    for name, buffer in moving(router).items():
        # A schedule counts optimizer steps, whatever was seen.
        assert name.endswith("step") or torch.equal(buffer, before[name]), name


@pytest.mark.parametrize("made", [*every_router()])
def test_evaluation_between_training_forwards_leaves_no_trace(made):
    (router, inputs), (plain, _) = made(), made()
    for seed in range(2):
        for r in (router, plain):
            r.train()(normal(2, 9, D, seed=seed), **inputs)
        router.eval()(normal(2, 9, D, seed=90), **inputs)
        with torch.no_grad():
            router(normal(2, 9, D, seed=91), **inputs)
    for r in (router.train(), plain):
        moe_mlir.update_routers(r)
    folded = ("weight", "bias") if isinstance(router, nn.HyperRouter) else ()
    for name, buffer in moving(plain).items():
        assert name in folded or torch.equal(moving(router)[name], buffer), name


@pytest.mark.parametrize("made", [*every_router()])
def test_a_frozen_router_routes_the_same_and_passes_gradients_to_the_tokens(made):
    (router, inputs), (frozen, _) = made(), made()
    frozen.requires_grad_(False)
    grads = []
    for r in (router, frozen):
        h = H.clone().requires_grad_()
        out = weights_of(r(h, **inputs))
        loss = (out * normal(*out.shape, seed=11)).sum()
        grads.append(torch.autograd.grad(loss, h)[0] if loss.requires_grad else torch.zeros(1))
    assert torch.equal(*grads)
    assert all(p.grad is None for p in frozen.parameters())
    for (name, a), b in zip(frozen.named_buffers(), router.buffers(), strict=True):
        assert torch.equal(a, b), name  # it counts all the same


@pytest.mark.parametrize("made", [*every_router()])
def test_micro_batches_give_the_gradients_and_the_state_of_their_sum(made):
    (router, inputs), (singly, _) = made(), made()
    batches = [normal(2, 9, D, seed=s) for s in range(3)]
    losses = [loss_of_routing(router(h, **inputs)) for h in batches]
    if losses[0].requires_grad:
        sum(losses).backward()
    for h in batches:
        loss = loss_of_routing(singly(h, **inputs))
        if loss.requires_grad:
            loss.backward()
    for (name, a), b in zip(router.named_parameters(), singly.parameters(), strict=True):
        if b.grad is not None:
            assert_close(a.grad, b.grad.double(), 1e-5 * max(1, float(b.grad.abs().max())), name)
    for r in (router, singly):
        moe_mlir.update_routers(r)
    for (name, a), b in zip(router.named_buffers(), singly.buffers(), strict=True):
        assert torch.equal(a, b), name


def loss_of_routing(routing):
    out = weights_of(routing)
    return (out * normal(*out.shape, seed=11)).sum()


@pytest.mark.parametrize("impl", ["torch", "moe"])
@pytest.mark.parametrize("method", [nn.SimilaritySMoE, nn.DynamicTopP, nn.SymphonySMoE])
def test_a_cold_graph_under_a_method_routes_nothing_and_then_learns(method, impl):
    """E17 holds below a method: gates of 0, not 0/0, and gradients of 0."""
    torch.manual_seed(0)
    base = nn.SymphonySMoE(D, E, K, impl=impl)
    options = dict(causal=True) if method is nn.SimilaritySMoE else {}
    router = method(D, E, K, base=base, impl=impl, **options)
    h = H.clone().requires_grad_()
    routing = router(h)
    assert not routing.gates.any() and bool(routing.gates.isfinite().all())
    loss_of_routing(routing).backward()
    assert bool(h.grad.isfinite().all()) and bool(base.weight.grad.isfinite().all())
    for _ in range(2):  # the upper graph sees nothing but ties before the lower one moved
        moe_mlir.update_routers(router)
        gates = router(H).gates
    assert bool(gates.any()) and bool(gates.isfinite().all())
