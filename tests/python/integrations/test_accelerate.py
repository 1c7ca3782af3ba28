"""A loop of accelerate against the plain one: weights, biases of routers, loads."""

import pytest
import torch
from training import (
    MICRO,
    Model,
    check_equal,
    loss_of,
    micro_batches,
    optimizer_of,
    trained_by_hand,
)

import moe_mlir

accelerate = pytest.importorskip(
    "accelerate", reason="accelerate is not installed; requirements.txt pins it")


@pytest.fixture(autouse=True)
def own_state():
    """The first Accelerator of a process decides for all others."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def train(compiled=lambda model: model, **options):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=MICRO, **options)
    model, loads = Model(), []
    loader = torch.utils.data.DataLoader(micro_batches(), batch_size=None)
    run, optimizer, loader = accelerator.prepare(compiled(model), optimizer_of(model), loader)
    for batch in loader:
        with accelerator.accumulate(run):
            accelerator.backward(loss_of(run, batch))
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                loads.append([router.load.clone() for router in model.routers])
                moe_mlir.update_routers(model)
    return model, loads


def test_gradient_accumulation():
    check_equal(*train(), *trained_by_hand())


def test_with_the_backend():
    check_equal(*train(lambda model: torch.compile(model, backend="moe")), *trained_by_hand())


def test_mixed_precision():
    """Loads are integers, and the model learns: gates and products round as bfloat16."""
    model, loads = train(mixed_precision="bf16")
    assert all(int(load.sum()) == MICRO * 12 * 2 for step in loads for load in step)
    wanted, _ = trained_by_hand()
    for name, weight in model.named_parameters():
        assert weight.dtype == torch.float32
        assert (weight - wanted.get_parameter(name)).norm() < 0.02 * weight.norm(), name
