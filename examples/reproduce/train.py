"""Trains one method with one seed and measures it; a finished run is never repeated."""

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import time

import torch
import torch.nn.functional as F

import moe_mlir
from moe_mlir import metrics, nn, reference
from moe_mlir_bench.demo.progress import Progress

from .model import LanguageModel, Sizes


@dataclasses.dataclass(frozen=True)
class Budget:
    """What every method gets alike."""

    steps: int = 150
    batch: int = 12
    learning_rate: float = 3e-3
    balance_weight: float = 0.01
    # Windows of the metrics; the last two probes give the fluctuation.
    windows: int = 6
    sizes: Sizes = Sizes()


@dataclasses.dataclass
class Run:
    """`histories` are those of `RoutingMonitor`, without the tensors."""

    method: str
    seed: int
    loss: float
    fluctuation: float | None
    entropy: float | None
    load_std: float
    instability: float | None
    router_share: float
    seconds: float
    losses: list
    history: dict


def run(method, seed, budget, corpus, folder):
    """The result of one training, from `folder` if it is there."""
    content = [dataclasses.asdict(budget), method.name, method.impl, seed, corpus.digest]
    key = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
    stem = "".join(c if c.isalnum() else "-" for c in method.name.lower())
    path = folder / f"{stem}-{seed}-{key}.json"
    if path.exists():
        return _load(path)
    with _one_thread():
        result = _train(method, seed, budget, corpus)
    folder.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(dataclasses.asdict(result), default=lambda t: t.tolist()))
    os.replace(partial, path)
    return _load(path)


def _load(path: pathlib.Path):
    result = Run(**json.loads(path.read_text()))
    graphs = result.history["adjacency"]
    result.history["adjacency"] = [
        [None if a is None else torch.tensor(a) for a in window] for window in graphs
    ]
    return result


@contextlib.contextmanager
def _one_thread():
    """The model is so small that a second thread waits more than it works."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _train(method, seed, budget, corpus):
    start = time.monotonic()
    torch.manual_seed(seed)
    model = LanguageModel(budget.sizes, method)
    optimizer = torch.optim.AdamW(model.parameters(), lr=budget.learning_rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, budget.learning_rate, total_steps=budget.steps, pct_start=0.1
    )
    monitor = metrics.RoutingMonitor(model)
    # The order of the text depends on the seed alone, so methods see the same bytes.
    order = torch.Generator().manual_seed(seed)
    progress = Progress(f"{method.name}, seed {seed}", budget.steps)
    probe = corpus.validation_batch(8, budget.sizes.context)[0]
    losses = []
    for step in range(budget.steps):
        inputs, targets = corpus.batch(order, budget.batch, budget.sizes.context)
        loss, objective = _objective(method, model, inputs, targets, budget)
        objective.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        moe_mlir.update_routers(model)
        losses.append(loss.item())
        if (step + 1) * budget.windows % budget.steps < budget.windows:
            _probe(model, monitor, probe)
        progress.update(step + 1, f"loss {losses[-1]:.3f}")

    model.eval()
    with torch.no_grad(), monitor.paused():
        inputs, targets = corpus.validation_batch(32, budget.sizes.context)
        logits, _ = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        share = _router_share(model, inputs)
    history = monitor.history()
    monitor.close()
    last = {name: windows[-1] for name, windows in history.items() if windows}
    return Run(
        method=method.name,
        seed=seed,
        loss=float(loss),
        fluctuation=_mean(last.get("fluctuation", [])),
        entropy=_mean(last["entropy"]),
        load_std=_mean(last["load_std"]),
        instability=_mean(last["instability"]),
        router_share=share,
        seconds=time.monotonic() - start,
        losses=losses,
        history=history,
    )


def _objective(method, model, inputs, targets, budget):
    """(cross entropy, what is minimised): balance of the load, and THOR's two passes."""
    logits, routings = model(inputs)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    if method.two_passes:
        second, _ = model(inputs)
        return loss, nn.thor_loss(logits, second, targets, alpha=1.0)
    balance = [
        reference.balance_loss(r.logits.softmax(dim=-1), r.indices)
        for r in routings
        if r.logits is not None
    ]
    return loss, loss + budget.balance_weight * sum(balance) / max(1, len(balance))


def _probe(model, monitor, tokens):
    model.eval()
    monitor.probe(lambda: model(tokens))
    model.train()
    monitor.end_window()


def _router_share(model, tokens, repeats=9):
    """CPU time of the routers over that of their MoE layers, in a forward without gradients."""
    seconds = {"router": [], "layer": []}
    started = {}

    def before(kind):
        def hook(module, args):
            started[kind, module] = time.process_time()

        return hook

    def after(kind):
        def hook(module, args, result):
            seconds[kind].append(time.process_time() - started.pop((kind, module)))

        return hook

    layers = [m for m in model.modules() if isinstance(m, nn.MoELayer)]
    timed = [("layer", m) for m in layers] + [("router", m.router) for m in layers]
    handles = [m.register_forward_pre_hook(before(kind)) for kind, m in timed]
    handles += [m.register_forward_hook(after(kind)) for kind, m in timed]
    shares = []
    for _ in range(repeats):
        for times in seconds.values():
            times.clear()
        model(tokens)
        shares.append(sum(seconds["router"]) / sum(seconds["layer"]))
    for handle in handles:
        handle.remove()
    return sorted(shares)[repeats // 2]


def _mean(layers):
    known = [x for x in layers if x is not None]
    return sum(known) / len(known) if known else None
