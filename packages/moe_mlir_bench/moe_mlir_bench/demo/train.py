"""Trains the model, or loads the checkpoint that an earlier run left."""

import hashlib
import json
import pathlib
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import safetensors.torch
import torch
import torch.nn.functional as F

from moe_mlir import nn
from moe_mlir._support import files

from .data import Corpus
from .model import Config, LanguageModel
from .progress import Progress


@dataclass
class Trained:
    model: LanguageModel
    losses: list
    validation_loss: float
    seconds: float
    reused: bool


def checkpoint_key(config: Config, corpus: Corpus) -> str:
    """Names a checkpoint after everything that it depends on."""
    content = json.dumps([config.as_dict(), corpus.digest, torch.__version__], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def balance_loss(routings: Sequence[nn.Routing], experts: int) -> torch.Tensor:
    """E sum_e f_e P_e, averaged over layers: least when load is spread evenly."""
    total = torch.zeros(())
    for routing in routings:
        assert routing.logits is not None  # of the demonstration's routers
        share = F.one_hot(routing.indices, experts).float().mean(dim=(0, 1, 2))
        mean = routing.logits.softmax(dim=-1).mean(dim=(0, 1))
        total = total + experts * (share * mean).sum()
    return total / len(routings)


@contextmanager
def _one_thread():
    """The model is so small that a second thread waits more than it works."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def train_or_load(config: Config, corpus: Corpus, folder: pathlib.Path) -> Trained:
    key = checkpoint_key(config, corpus)
    weights = folder / f"{config.method}-{key}.safetensors"
    record = folder / f"{config.method}-{key}.json"
    torch.manual_seed(config.seed)
    model = LanguageModel(config)
    if weights.exists() and record.exists():
        model.load_state_dict(safetensors.torch.load_file(weights))
        known = json.loads(record.read_text())
        return Trained(model.eval(), known["losses"], known["validation_loss"],
                       known["seconds"], True)
    start = time.monotonic()
    with _one_thread():
        losses = _train(model, config, corpus)
    validation = validation_loss(model, config, corpus)
    trained = Trained(model.eval(), losses, validation, time.monotonic() - start, False)
    folder.mkdir(parents=True, exist_ok=True)
    files.write(weights, safetensors.torch.save(model.state_dict()))
    # The record last: without it the weights are not taken for those of a finished training.
    files.write(record, json.dumps({"config": config.as_dict(), "losses": losses,
                                     "validation_loss": validation, "seconds": trained.seconds}))
    return trained


def _train(model, config: Config, corpus: Corpus) -> list:
    generator = torch.Generator().manual_seed(config.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate,
                                  betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, config.learning_rate, total_steps=config.steps, pct_start=0.1)
    progress = Progress(f"training {config.method}", config.steps)
    losses = []
    model.train()
    for step in range(config.steps):
        inputs, targets = corpus.batch(generator, config.batch, config.context)
        logits, routings = model.route(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        losses.append(loss.item())
        (loss + config.balance_weight * balance_loss(routings, config.experts)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        progress.update(step + 1, f"loss {losses[-1]:.3f}")
    return losses


@torch.no_grad()
def validation_loss(model: LanguageModel, config: Config, corpus: Corpus) -> float:
    model.eval()
    inputs, targets = corpus.validation_batch(16, config.context)
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).item()
