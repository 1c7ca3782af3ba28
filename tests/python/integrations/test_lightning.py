"""Lightning's Trainer against the plain loop: weights, biases of routers, loads, monitors, checkpoints."""

import logging
import warnings

import pytest
import torch
from training import (
    MICRO,
    STEPS,
    Model,
    check_equal,
    loss_of,
    micro_batches,
    optimizer_of,
    trained_by_hand,
)

import moe_mlir
from moe_mlir import metrics

lightning = pytest.importorskip(
    "lightning", reason="Lightning is not installed; requirements.txt pins it")


class Module(lightning.LightningModule):
    def __init__(self, compiled=lambda model: model):
        super().__init__()
        self.model = Model()
        # Not a submodule, so that the weights have one name.
        self.run = [compiled(self.model)]
        self.monitor, self.loads = metrics.RoutingMonitor(self.model), []

    def training_step(self, batch, batch_idx):
        return loss_of(self.run[0], batch)

    def validation_step(self, batch, batch_idx):
        with self.monitor.paused():
            self.log("validation", loss_of(self.run[0], batch))

    def configure_optimizers(self):
        return optimizer_of(self.model)

    def optimizer_step(self, *args, **kwargs):
        """Runs the last forward of the step, too: counts are complete after it."""
        super().optimizer_step(*args, **kwargs)
        self.loads.append([router.load.clone() for router in self.model.routers])
        moe_mlir.update_routers(self.model)
        self.monitor.end_window()


def fit(module, folder, **options):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, accumulate_grad_batches=MICRO, logger=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder, **options)
    # A batch is as it stands: no sampler, and no workers, which is what Lightning warns of.
    loader = torch.utils.data.DataLoader(micro_batches(), batch_size=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, loader, loader)
    return trainer


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_gradient_accumulation(how, tmp_path):
    def compiled(model):
        return model if how == "eager" else torch.compile(model, backend="moe")

    module = Module(compiled)
    fit(module, tmp_path, enable_checkpointing=False)
    check_equal(module.model, module.loads, *trained_by_hand())


def test_a_monitors_window_is_one_optimizer_step(tmp_path):
    module = Module()
    fit(module, tmp_path, enable_checkpointing=False)
    loads = module.monitor.history()["load"]
    assert len(loads) == STEPS
    for window, counted in zip(loads, module.loads):
        for shares, load in zip(window, counted):
            torch.testing.assert_close(torch.tensor(shares), (load / load.sum()).float())


def test_a_checkpoint_has_the_state_of_the_routers(tmp_path):
    module = Module()
    trainer = fit(module, tmp_path)
    again = Module.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
    torch.testing.assert_close(again.state_dict(), module.state_dict(), rtol=0, atol=0)
    assert all(router.bias.abs().max() > 0 for router in again.model.routers)
