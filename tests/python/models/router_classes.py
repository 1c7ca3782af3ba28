"""Every router class of transformers, as a module with random weights.

    python tests/python/models/router_classes.py [NAME ..]

prints what the matcher does with each: raised and equal to eager, kept with a
reason, or not built and why.
"""

import importlib
import inspect
import logging
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "raising")]

from router_programs import Meaning, trace  # noqa: E402
from support import Selections  # noqa: E402

from moe_mlir.raising.match import find_selections  # noqa: E402

_CLASS = re.compile(r"^class (\w*(?:Router|TopKGating|MoEGate))\((?:nn\.Module|nn\.Linear)\):", re.M)
WIDTH, EXPERTS, TOKENS = 32, 8, 12
# What configurations call their sizes.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "ffn_dim"), WIDTH),
    **dict.fromkeys(_EXPERTS, EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k", "top_k"), 2),
    "n_group": 4, "topk_group": 2, "zero_expert_num": 0, "vocab_size": 64,
}


@dataclass(frozen=True)
class RouterClass:
    """One class and the file that has it."""

    folder: str
    name: str

    def build(self):
        """The router in eval mode; raises whatever its code raises where sizes do not fit."""
        module = importlib.import_module(
            f"transformers.models.{self.folder}.modeling_{self.folder}")
        kind = getattr(module, self.name)
        config = _config(module, inspect.signature(kind.__init__).parameters["config"].annotation)
        torch.manual_seed(0)
        router = kind(config).eval()
        with torch.no_grad():
            for name, tensor in (*router.named_parameters(), *router.named_buffers()):
                if tensor.is_floating_point():
                    shift = 1.0 if "norm" in name or "scale" in name else 0.0
                    tensor.copy_(torch.randn(tensor.shape) * 0.3 + shift)
        return router

    def inputs(self, router):
        """Examples that its forward may take, in the order to try."""
        parameters = list(inspect.signature(router.forward).parameters.values())
        extra = [x for x in parameters[1:] if (x.default is x.empty or "bias" in x.name)
                 and x.kind is x.POSITIONAL_OR_KEYWORD]
        generator = torch.Generator().manual_seed(1)
        more = [torch.randint(0, 64, (1, TOKENS), generator=generator) if "ids" in x.name
                else torch.rand(EXPERTS, generator=generator) for x in extra]
        for shape in ((TOKENS, WIDTH), (1, TOKENS, WIDTH)):
            yield (torch.randn(shape, generator=generator), *more)


def _config(module, annotation):
    if isinstance(annotation, str):
        annotation = getattr(module, annotation)
    kinds = [annotation] if annotation is not inspect.Parameter.empty else [
        x for name, x in vars(module).items() if name.endswith("Config") and name != "PreTrainedConfig"]
    configs = [config for kind in kinds for config in (kind(),)]
    configs = [getattr(config, "text_config", config) for config in configs]
    # A model of several parts has a configuration for each; that with experts is meant.
    config = next((c for c in configs if any(hasattr(c, name) for name in _EXPERTS)), configs[0])
    for name, size in _SIZES.items():
        if hasattr(config, name):
            try:
                setattr(config, name, size)
            except (AttributeError, ValueError, TypeError, NotImplementedError):
                continue  # a name for another one
    return config


def router_classes() -> list[RouterClass]:
    import transformers

    folder = Path(transformers.__file__).parent / "models"
    return [RouterClass(path.parent.name, name)
            for path in sorted(folder.glob("*/modeling_*.py"))
            if path.stem == f"modeling_{path.parent.name}"
            for name in _CLASS.findall(path.read_text())]


@dataclass(frozen=True)
class Verdict:
    """`state` is "equal", "kept", "no selection", "not built", or "differs"; `why` says more."""

    state: str
    why: str = ""


def judge(router_class: RouterClass) -> Verdict:
    try:
        router = router_class.build()
        args, wanted = _run(router, router_class.inputs(router))
        leaves, spec = torch.utils._pytree.tree_flatten(args)

        def function(*tensors):
            found = router(*torch.utils._pytree.tree_unflatten(tensors, spec))
            return [x for x in torch.utils._pytree.tree_leaves(found)
                    if isinstance(x, torch.Tensor)]
        with torch.no_grad():
            traced_sites, run = _traced(function, leaves)
    except Exception as error:  # the class asks for sizes or inputs of its own
        return Verdict("not built", f"{type(error).__name__}: {str(error).splitlines()[:1]}")
    if run is None:
        reasons = [site.reason for site in traced_sites]
        return Verdict("kept" if reasons else "no selection", "; ".join(reasons))
    with torch.no_grad():  # as while it was traced: a graph leaves the mode that it was traced in
        found = run(*leaves)
    for ours, eager in zip(found, wanted, strict=True):
        if ours.dtype != eager.dtype or ours.shape != eager.shape:
            return Verdict("differs", f"{ours.dtype} {ours.shape}, not {eager.dtype} {eager.shape}")
        close = torch.allclose(ours, eager, rtol=1e-5, atol=1e-6) if ours.is_floating_point() \
            else torch.equal(ours, eager)
        if not close:
            return Verdict("differs", f"{ours} instead of {eager}")
    return Verdict("equal", ", ".join(site.form for site in traced_sites))


def _run(router, candidates):
    """The first inputs that the router takes, and its tensors."""
    error = None
    for args in candidates:
        try:
            with torch.no_grad(), Selections(settle=True):
                found = router(*args)
            return args, [x for x in torch.utils._pytree.tree_leaves(found)
                          if isinstance(x, torch.Tensor)]
        except Exception as problem:  # tried with the next shape
            error = problem
    raise error


def _traced(function, leaves):
    """The sites of the router, and the raised graph; None where nothing is raised."""
    from torch.fx.experimental.proxy_tensor import make_fx

    plain = make_fx(function, tracing_mode="fake", pre_dispatch=True,
                    _allow_non_fake_inputs=True)(*leaves)
    sites = find_selections(plain.graph)
    count, raised = trace(function, *leaves)
    return sites, Meaning(raised).run if count else None


def main(names) -> int:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    states = {}
    for router_class in router_classes():
        if names and router_class.name not in names:
            continue
        verdict = judge(router_class)
        states[verdict.state] = states.get(verdict.state, 0) + 1
        print(f"{router_class.name}: {verdict.state} {verdict.why[:200]}", flush=True)
    print(states)
    return "differs" in states


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
