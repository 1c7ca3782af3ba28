"""Every model of transformers with experts: patched, compiled whole, decoded, and trained by the backend.

    python -m moe_mlir_bench.models.folders [FOLDER ..] [--page docs/Models.md]

Each is a small model with random weights (`tiny_models`), in a process of its own. A part that does
not work has its reason.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from . import page, tiny_models
from .every_model import WITHOUT_ROUTER, folders
from .families import VOCABULARY
from .ties import LowestIndexFirst

# Seconds for one folder: the largest take two minutes alone.
_LIMIT = 900
# Relative to the largest logit, in f32: sums of other orders differ by a few times 1e-7 a layer.
TOLERANCE = 1e-4
# A prompt, steps up to the end of a window of 8 and past it, and a second prompt.
CALLS = (6, 1, 1, 1, 1, 3, 1, 1)
_ROOM = 40
# How the text of a part begins that is not asked for.
_NO_ROUTER, _NO_DECODER = "no router", "no decoder alone"
PARTS = ("patched", "whole", "decoded", "artifact", "backend")
# Of a decoder a prompt and steps past the end of a window, and a prompt that is longer than one.
_DECODER_CALLS = ((6, 1, 1, 1, 1), (13, 1, 1))


def ids(batch: int, tokens: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, tokens), generator=generator)


def check(folder: str, parts: Sequence[str] = PARTS) -> dict[str, str]:
    """What each part gives for the folder's model: a text that ends in ", ok", or why not."""
    if folder in WITHOUT_ROUTER:
        return dict.fromkeys(parts, f"{_NO_ROUTER}: {WITHOUT_ROUTER[folder]}")
    try:
        model = tiny_models.build(folder)
    except Exception as error:  # of a model's own code
        return dict.fromkeys(parts, f"no small model: {_brief(error)}")
    functions = dict(zip(PARTS, (_patched, _whole, _decoded, _artifact, _backend), strict=True))
    found = {}
    for part in parts:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found[part] = functions[part](model)
        except _NotDecodable as reason:
            found[part] = str(reason)
        except Exception as error:
            found[part] = _brief(error)
    return found


def _brief(error) -> str:
    text = " ".join(str(error).split())
    text = re.sub(r"/\S*/", "", text)  # of a place the file alone
    return f"{type(error).__name__}: {text[:240]}"


def _patched(model) -> str:
    from moe_mlir import hf
    from moe_mlir.patching.router_modules import is_router

    routers = sum(map(is_router, model.modules()))
    count = hf.patch(model)
    hf.unpatch(model)
    return f"{count} of {max(routers, count)}" + (", ok" if count >= max(routers, 1) else "")


def _inputs(model, tokens) -> dict[str, Any]:
    if model.config.is_encoder_decoder:
        return dict(input_ids=tokens, attention_mask=torch.ones_like(tokens), decoder_input_ids=tokens)
    return dict(input_ids=tokens)


def _difference(found, expected) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


def _verdict(worst: float) -> str:
    return f"{worst:.0e}" + (", ok" if worst <= TOLERANCE else ", wrong")


@torch.no_grad()
def _whole(model) -> str:
    """Compiled for a prompt, run for that and a longer one in one sequence."""
    import moe_mlir

    cache = {} if model.config.is_encoder_decoder or "use_cache" not in vars(model.config) else \
        dict(use_cache=False)
    compiled = moe_mlir.compile(model, (), kwargs={**_inputs(model, ids(2, 6)), **cache}, pack=False)
    worst = 0.0
    for tokens in (ids(2, 6), ids(1, 13, seed=1)):
        inputs = {**_inputs(model, tokens), **cache}
        with LowestIndexFirst():
            expected = model(**inputs).logits
        worst = max(worst, _difference(compiled(**inputs).logits, expected))
    return _verdict(worst)


class _NotDecodable(Exception):
    """A model that does not decode by transformers' own code; the text of its cell."""


def _cache(model):
    import transformers

    return transformers.StaticCache(config=model.config, max_cache_len=_ROOM)


def _tokens(encoded, tokens) -> dict[str, Any]:
    return {"decoder_input_ids" if encoded else "input_ids": tokens}


def _logits(model, run, cache, calls: Sequence[int], encoded: dict[str, Any]) -> list[torch.Tensor]:
    """Those of each call of so many tokens, one after the other in one cache, or in the model's own."""
    from moe_mlir._transformers.names import cache_call, given_cache

    first: list[torch.Tensor] = []
    if cache is None:
        outputs = run(**encoded, **_tokens(encoded, ids(1, calls[0])), use_cache=True)
        cache, first = given_cache(outputs), [outputs.logits]
    return [*first, *(run(**encoded, **_tokens(encoded, ids(1, tokens, seed)),
                          **cache_call(model, cache)).logits
                      for seed, tokens in list(enumerate(calls))[len(first):])]


def _eager_logits(model, calls: Sequence[int], is_fixed: bool = True) -> list[torch.Tensor]:
    """The logits of eager, or why transformers does not decode this model."""
    if not model.can_generate() or (is_fixed and model.config.is_encoder_decoder):
        raise _NotDecodable(_NO_DECODER)
    try:
        with LowestIndexFirst():
            return _logits(model, model, _cache(model) if is_fixed else None, calls, _encoded(model))
    except Exception as error:  # of a model's own code
        raise _NotDecodable(f"not by transformers: {_brief(error)}") from error


def _encoded(model) -> dict[str, Any]:
    """What an encoder gives, of a model that has one."""
    return dict(encoder_outputs=model.get_encoder()(ids(1, 7, 99))) if model.config.is_encoder_decoder \
        else {}


@torch.no_grad()
def _decoded(model) -> str:
    """In a cache of fixed size; in the model's own, which grows, where it can have no other."""
    import moe_mlir
    from moe_mlir._transformers.static_cache import unfit_for_fixed_size

    is_fixed = unfit_for_fixed_size(model) is None
    expected, encoded = _eager_logits(model, CALLS, is_fixed), _encoded(model)
    cache = dict(cache=_cache(model)) if is_fixed else dict(use_cache=True)
    compiled = moe_mlir.compile(model, (), kwargs={**encoded, **_tokens(encoded, ids(1, CALLS[0])), **cache})
    found = _logits(model, compiled, _cache(model) if is_fixed else None, CALLS, encoded)
    verdict = _verdict(max(map(_difference, found, expected)))
    return verdict if is_fixed else f"its own cache: {verdict}"


@torch.no_grad()
def _artifact(model) -> str:
    """`moe_mlir.save_decoder`, loaded in Python, whose runtime calls the same code as that of C++."""
    import moe_mlir
    from moe_mlir._transformers.static_cache import unfit_for_fixed_size

    # A model with an encoder is no decoder alone.
    is_fixed = model.config.is_encoder_decoder or unfit_for_fixed_size(model) is None
    expected = [_eager_logits(model, calls, is_fixed) for calls in _DECODER_CALLS]
    with tempfile.TemporaryDirectory() as folder:
        moe_mlir.save_decoder(model, Path(folder, "artifact"), room=_ROOM, later_prompts=False)
        decoder = moe_mlir.load(Path(folder, "artifact")).decoder
    worst = 0.0
    for calls, logits in zip(_DECODER_CALLS, expected, strict=True):
        decoder.reset()
        for seed, tokens in enumerate(calls):
            worst = max(worst, _difference(decoder(ids(1, tokens, seed)), logits[seed][:, -1]))
    return _verdict(worst) if is_fixed else f"its own cache: {_verdict(worst)}"


# What routers and experts become, as a profile names it.
_SELECTIONS = ("moe::topk_renorm", "moe::grouped_topk")
_LAYERS = ("moe::grouped_linear",)


def _backend(model) -> str:
    """`torch.compile(backend="moe")`, with gradients. The model is patched, as one whose experts run
    in a loop must be.

    torch's kernels run the rest, which takes little time to compile. Of a transposed tensor torch's
    softplus has another layout in its backward than torch traces; there Inductor runs the rest.
    """
    try:
        return _by_backend(model, "eager")
    except RuntimeError as error:
        if "view size is not compatible" not in str(error):
            raise
        return _by_backend(model, "inductor")


def _by_backend(model, rest: str) -> str:
    from moe_mlir import hf
    from moe_mlir.patching.router_modules import is_router, selects_experts

    inputs = _inputs(model, ids(2, 6))
    # Those that text reaches: a model of images has routers for their tokens alone.
    reached: set[torch.nn.Module] = set()
    hooks = [m.register_forward_hook(lambda m, *_: reached.add(m)) for m in model.modules()
             if is_router(m) or selects_experts(m)]
    expected = _trained(model, model, inputs)
    for hook in hooks:
        hook.remove()
    hf.patch(model)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="moe", options={"rest": rest})
    worst = _worst_of(_trained(model, compiled, inputs), expected)
    # What runs, not what was compiled: layers may share a graph.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        compiled(**inputs)
    hf.unpatch(model)
    calls = {event.key: event.count for event in profile.key_averages()}
    selections, layers = (sum(calls.get(name, 0) for name in names) for names in (_SELECTIONS, _LAYERS))
    text = f"{selections} selections of {len(reached)} routers, {layers} layers of experts, {worst:.0e}"
    if worst > TOLERANCE:
        return f"{text}, wrong"
    return text + (", ok" if selections >= max(len(reached), 1) else "")


def _trained(model, run, inputs) -> list[torch.Tensor]:
    """The logits, and the gradient of each parameter, of a loss in which every logit counts."""
    model.zero_grad(set_to_none=True)
    logits = run(**inputs).logits
    generator = torch.Generator().manual_seed(2)
    (logits * torch.randn(logits.shape, generator=generator)).sum().backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return [logits.detach(), *gradients]


def _worst_of(found, expected) -> float:
    """Of logits relative to their largest, of a gradient to its own, unless that is rounding alone."""
    floor = 1e-3 * max(x.abs().max().item() for x in expected[1:])
    errors = [_difference(found[0], expected[0])]
    errors += [(x - y).abs().max().item() / max(y.abs().max().item(), floor)
               for x, y in zip(found[1:], expected[1:], strict=True)]
    return max(errors)


def check_apart(folder: str, parts: Sequence[str] = PARTS, limit: int = _LIMIT) -> dict[str, str]:
    """`check` in a process of its own, which may crash or take too long."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", __spec__.name, folder, "--one", file.name]
        command += [word for part in parts for word in ("--part", part)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
        except subprocess.TimeoutExpired:
            return dict.fromkeys(parts, f"more than {limit} s")
        if done.returncode:
            return dict.fromkeys(parts, f"ended with {done.returncode}: {done.stderr[-200:]}")
        return json.loads(Path(file.name).read_text())


def _is_short(text: str) -> bool:
    return not text.endswith(", ok") and not text.startswith((_NO_ROUTER, _NO_DECODER))


def table(results: dict[str, dict[str, str]]) -> str:
    """The results as a table, with the reasons below it."""
    lines = ["| folder | routers patched | compiled whole | decoded | artifact | trained by the backend |",
             "|---|---|---|---|---|---|"]
    reasons: list[str] = []

    def cell(folder, part):
        text = results[folder].get(part)
        if text is None:
            return ""
        if not _is_short(text):
            return text.removesuffix(", ok") if text.endswith(", ok") else "-"
        reasons.append(f"- {folder}, {part}: {text.replace('|', '/')}")
        return "no"
    for folder in sorted(results):
        lines.append("| " + " | ".join([folder, *(cell(folder, part) for part in PARTS)]) + " |")
    return "\n".join([*lines, "", *reasons])


_SECTION = """\
Generated by `python -m moe_mlir_bench.models.folders --page docs/Models.md` with torch {torch} and
transformers {transformers}; do not edit. All {count} folders that have experts, each as a small model
with random weights in f32, with a layer of each kind of its attention.

{table}
{beside}
- **routers patched**: by `moe_mlir.hf.patch`, of all that the model has.
- **compiled whole**: `moe_mlir.compile` for a prompt; the largest difference from eager's logits at that
  and a longer prompt, relative to the largest logit, by one program or several.
- **decoded**: `moe_mlir.compile` with a `StaticCache`, or, where the model can have none, with the cache
  that it makes itself; the same for a prompt, steps up to the end of a window of 8 tokens and past it,
  and more tokens at once.
- **artifact**: `moe_mlir.save_decoder`, with the same cache; the same for a prompt with steps, and for one
  that is longer than a window.
- **trained by the backend**: `torch.compile(backend="moe")` of a patched model: the selections that ran
  as ops of ours, the layers of experts, and the largest difference of logits and of any gradient.
- Eager chooses the lowest index of equal scores here, as compiled code does; torch promises no order.
- **-**: experts without a router, a model that does not generate, or, under "artifact", one with an
  encoder. "not by transformers": its own code fails with such a cache. **no**: a line below the table
  gives the reason. Empty: not checked in this run.
- Programs that show what is a fault of torch or transformers are on a
  [page of their own](UpstreamFaults.md), among them those of NLLB-MoE, Inkling and Inkling2.
"""


def describe_beside(version: str, results: dict[str, dict[str, str]],
                    newer: dict[str, dict[str, str]]) -> str:
    """Which folders are short with another version of transformers, with the reasons that are others."""
    lines = [f"\nWith transformers {version}, which has {len(results)} of these folders, each column holds for all of them but:\n"]
    for part in PARTS:
        short = [name for name in sorted(results) if _is_short(results[name].get(part, ""))]
        reasons = [f"{name} ({results[name].get(part, 'not run')})" if not _is_short(newer.get(name, {}).get(part, ""))
                   else name for name in short]
        lines.append(f"- {part}: {', '.join(reasons).replace('|', '/') or 'none'}")
    return "\n".join(lines) + "\n"


def section(results: dict[str, dict[str, str]], beside: str = "") -> str:
    """The results as a section of docs/Models.md."""
    import transformers

    return _SECTION.format(torch=torch.__version__, transformers=transformers.__version__,
                           count=len(results), table=table(results), beside=beside)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m moe_mlir_bench.models.folders",
                                     description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("folders", nargs="*", help="the folders (default: all that have experts)")
    parser.add_argument("--part", choices=PARTS, action="append", dest="parts", help="default: all")
    parser.add_argument("--json", type=Path, help="read results from a file, and add what it lacks")
    parser.add_argument("--page", type=Path, help="the page whose section of all models is replaced")
    parser.add_argument("--beside", nargs=2, metavar=("VERSION", "FILE"),
                        help="results that --json wrote with another version of transformers, of which "
                        "the page says what is short")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    parts = options.parts or PARTS
    if options.one:
        options.one.write_text(json.dumps(check(options.folders[0], parts)))
        return 0
    results: dict[str, dict[str, str]] = {}
    if options.json and options.json.exists():
        results = json.loads(options.json.read_text())
    names = options.folders or folders()
    for number, folder in enumerate(names, 1):
        found = results.setdefault(folder, {})
        missing = [part for part in parts if part not in found]
        if missing:
            found.update(check_apart(folder, missing))
            print(f"[{number}/{len(names)}] {folder}: {found}", file=sys.stderr, flush=True)
        if missing and options.json:
            options.json.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    if options.page:
        beside = ""
        if options.beside:
            version, file = options.beside
            beside = describe_beside(version, json.loads(Path(file).read_text()), results)
        page.write(options.page, page.FOLDERS, section(results, beside))
    else:
        print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
