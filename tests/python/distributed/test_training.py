"""DistributedDataParallel and fully_shard on Gloo: two ranks train as one process does.

A step is two forwards, the gradients of the first without synchronisation, and
then `update_routers`.
"""

import contextlib

import pytest
import torch
import torch.distributed as dist
from support import run_ranks
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from moe_mlir import nn
from moe_mlir.nn import update_routers

RANKS, STEPS, FORWARDS, D, E = 2, 3, 2, 8, 4


class Model(torch.nn.Module):
    """Routers with counts, with a bias that follows loads, and with neither."""

    def __init__(self):
        super().__init__()
        routers = [
            nn.SymphonySMoE(D, E, 2, cold_start="base"), nn.DeepSeekV3Router(D, E, 2), nn.SMoE(D, E, 2),
        ]
        self.layers = torch.nn.ModuleList(nn.MoELayer(router, 8, shared=1) for router in routers)

    def forward(self, h):
        for layer in self.layers:
            h = h + layer(h)[0]
        return h


def model():
    torch.manual_seed(0)
    return Model()


def tokens(step, forward, rank):
    """The same numbers whoever asks."""
    seed = (step * FORWARDS + forward) * RANKS + rank
    return torch.randn(12, D, generator=torch.Generator().manual_seed(seed))


def train(model, batch, accumulate):
    """`batch(step, forward)` are tokens; `accumulate` a context for all forwards but the last."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model.train()
    for step in range(STEPS):
        optimizer.zero_grad()
        for forward in range(FORWARDS):
            with accumulate() if forward + 1 < FORWARDS else contextlib.nullcontext():
                model(batch(step, forward)).square().mean().backward()
        optimizer.step()
        update_routers(model)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def data_parallel(rank):
    wrapped = DistributedDataParallel(model())
    assert wrapped.broadcast_buffers
    train(wrapped, lambda *at: tokens(*at, rank), wrapped.no_sync)
    return wrapped.module


def fully_sharded(rank):
    sharded = model()
    for layer in sharded.layers:
        fully_shard(layer)
    fully_shard(sharded)

    @contextlib.contextmanager
    def without_synchronisation():
        sharded.set_requires_gradient_sync(False)
        yield
        sharded.set_requires_gradient_sync(True)

    train(sharded, lambda *at: tokens(*at, rank), without_synchronisation)
    return sharded


def checkpointed(rank):
    """Recomputed forwards count once."""
    from torch.utils.checkpoint import checkpoint

    wrapped = DistributedDataParallel(model(), static_graph=False)
    module = wrapped.module
    layers = list(module.layers)

    def forward(h):
        for layer in layers:
            h = h + checkpoint(lambda h, layer=layer: layer(h)[0], h, use_reentrant=False)
        return h

    module.forward = forward
    train(wrapped, lambda *at: tokens(*at, rank), wrapped.no_sync)
    return module


WAYS = [data_parallel, fully_sharded, checkpointed]


def work(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank,
                            world_size=RANKS)  # fmt: skip
    torch.set_num_threads(1)
    states = {}
    for way in WAYS:
        trained = way(rank)
        states[way.__name__] = {name: whole(x) for name, x in trained.state_dict().items()}
    torch.save(states, f"{folder}/{rank}")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("training")
    run_ranks(work, (str(folder),), RANKS)
    return [torch.load(folder / str(rank)) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def alone():
    """One process with the tokens of all ranks."""
    one = model()
    train(one, lambda *at: torch.cat([tokens(*at, rank) for rank in range(RANKS)]),
          contextlib.nullcontext)  # fmt: skip
    return one.state_dict()


@pytest.mark.parametrize("way", [way.__name__ for way in WAYS])
def test_ranks_train_as_one_process(ranks, alone, way):
    start = model().state_dict()
    for rank in ranks:
        state = rank[way]
        assert state.keys() == alone.keys()
        for name, expected in alone.items():
            torch.testing.assert_close(state[name], expected, rtol=1e-4, atol=1e-6, msg=name)
            # Every rank has the same bits, or the ranks would drift apart.
            assert torch.equal(state[name], ranks[0][way][name]), name
    moved = [name for name, x in alone.items() if not torch.equal(x, start[name])]
    assert any("adjacency" in n for n in moved) and any("bias" in n for n in moved)
