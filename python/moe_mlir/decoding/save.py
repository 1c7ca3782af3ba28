"""moe_mlir.save_decoder: a language model with its cache as an artifact."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

import torch

from .._native import native
from .._support.log import logger, warn_user
from .._support.progress import Clock
from .._support.tools import find_tool
from .._transformers.growing_cache import empty_cache
from .._transformers.static_cache import take_apart, unfit_for_fixed_size
from ..artifact import weights_file
from ..compiled.lent_weights import export_lent
from ..compiler.uncached import target_cpu
from ..packing import give_back, lend, lent
from .description import describe, name_of
from .last_logits import LastLogits
from .search import Call, Search
from .states import CacheStates
from .traced import TracedProgram

_log = logger("compile")


def save_decoder(
    model: torch.nn.Module,
    path: str | os.PathLike[str],
    *,
    room: int,
    sequences: int = 1,
    later_prompts: bool = True,
    pack: bool = True,
) -> None:
    """Compiles a language model of transformers to an artifact that decodes without Python.

    The artifact holds the model's weights, code for prompts and for steps, and the form of the
    cache: a `transformers.StaticCache` of whatever layers the model has, or, of a model that can
    have none (DeepSeek-V4, MiniMax), the cache that it makes itself, whose tensors grow from call
    to call. `moe_mlir.load` and the class `moe::runtime::Decoder` of `libmoe_runtime` run it:

        moe_mlir.save_decoder(model, "decoder.artifact", room=4096)
        decoder = moe_mlir.load("decoder.artifact").decoder
        logits = decoder(torch.tensor([[5, 17, 3]]))     # of the token after these
        logits = decoder(logits.argmax(-1)[None])        # and after that one
        decoder.reset()

    Args:
        model: a language model with experts or without, in evaluation mode, on the CPU.
        path: the folder to write. An artifact that is there is replaced.
        room: the number of tokens of a sequence, prompt and answer, for which the cache has room.
        sequences: how many are decoded together, token by token.
        later_prompts: compiles code for several tokens after others, such as the next prompt of a
            conversation. Without it they are run one by one. Models whose attention sees a window,
            or that keep a state, need more code for it.
        pack: stores weights in the order in which the kernels read them, as `moe_mlir.compile`
            does. The model gets its weights back as they were.

    Raises:
        ValueError: the model is in training mode, or needs too many programs.
        TypeError: its cache keeps what no artifact can keep.
        ImportFailed: every unsupported operation of the model, with its lines.
        MoeError: the compiler's diagnostics.

    The CPU is this machine's; the environment variable MOE_MLIR_CPU names another, such as
    "x86-64-v3".
    """
    _require_model(model, room, sequences)
    is_first = not lent(model)
    try:
        if pack:
            lend(model)
        decoder = _Decoder(model, room, sequences)
        decoder.find_programs(later_prompts)
        decoder.write(Path(path))
    finally:
        if is_first:
            give_back(model)


def _require_model(model, room, sequences) -> None:
    if not isinstance(model, torch.nn.Module) or getattr(model, "config", None) is None:
        raise TypeError("expected 'model' to be a language model of transformers, found "
                        f"{type(model).__name__}")
    if model.training:
        raise ValueError("expected a model in evaluation mode, found one in training mode; call its "
                         "eval()")
    devices = {str(weight.device) for weight in model.parameters()} - {"cpu"}
    if devices:
        raise ValueError(f"expected the weights of the model on the CPU, found {min(devices)}; "
                         "call model.to('cpu')")
    for name, value in (("room", room), ("sequences", sequences)):
        if type(value) is not int or value < 1:
            raise ValueError(f"expected '{name}' to be a positive integer, found {value!r}")


class _Decoder:
    """A model with an empty cache, and the programs that decode it."""

    def __init__(self, model: torch.nn.Module, room: int, sequences: int):
        self._model, self._room, self._sequences = model, room, sequences
        self._wrapper = LastLogits(model)
        self._states = self._cache_states()
        self._programs: list[TracedProgram] = []

    def _cache_states(self) -> CacheStates:
        """Those of a cache of fixed size, or of the one that the model makes itself."""
        import transformers

        config, ids = self._model.config, self._ids(min(2, self._room))
        if not getattr(config, "is_encoder_decoder", False) and unfit_for_fixed_size(self._model):
            return CacheStates(empty_cache(self._model, ids), grows=True)
        cache = transformers.StaticCache(config=config, max_cache_len=self._room)
        # Makes the tensors of the cache.
        take_apart(cache, self._model, {0: ids})
        return CacheStates(cache)

    def _ids(self, tokens) -> torch.Tensor:
        return torch.zeros(self._sequences, tokens, dtype=torch.int64)

    def find_programs(self, later_prompts: bool) -> None:
        """Traces the model for each kind of call that decoding has."""
        search = Search(self._states, self._trace, self._room, later_prompts)
        search.run()
        self._programs = search.programs
        if search.longest_prompt < self._room:
            warn_user(
                f"{type(self._model).__name__} is saved with code for prompts of up to "
                f"{search.longest_prompt} tokens at once; of longer ones the rest is run one token after "
                "the other, since the model's own code is another one for each length")

    def _trace(self, call: Call) -> TracedProgram:
        _log.info("tracing a program for %s", call)
        with Clock(f"tracing {type(self._model).__name__} for {call}"):
            program = self._traced(call)
            if not program.serves(call.state, call.tokens):
                # torch takes open sizes for larger than they may be.
                program = self._traced(call, dynamic_tokens=False)
        if not program.serves(call.state, call.tokens):
            raise ValueError(f"expected a program that serves the call that it was traced for, {call}, "
                             f"found the conditions {program.module.conditions}")
        return program

    def _traced(self, call, **options) -> TracedProgram:
        parts = self._states.at(call.state)
        module = export_lent(self._wrapper, (self._ids(call.tokens), parts), **options)
        return TracedProgram(module, self._states, call.state, call.tokens, self._sequences, parts)

    @property
    def _vocabulary(self) -> int:
        """The rows of the embedding."""
        embedding = self._model.get_input_embeddings()
        weight = getattr(embedding, "weight", None)
        if isinstance(weight, torch.Tensor):
            return weight.shape[0]
        return self._model.config.get_text_config().vocab_size

    def write(self, path: Path) -> None:
        """Compiles the programs to an artifact."""
        description, tensors = describe(self._programs, self._states, self._room, self._sequences,
                                        self._vocabulary)
        # Beside the artifact, into which the weights are moved.
        path = Path(os.path.abspath(path))
        with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
            for number, program in enumerate(self._programs):
                Path(folder, f"{name_of(number)}.mlir").write_text(program.module.text)
            entry = weights_file.write(os.path.join(folder, weights_file.NAME), tensors)
            Path(folder, "files.json").write_text(json.dumps({weights_file.NAME: entry}))
            Path(folder, "decoder.json").write_text(json.dumps(description, indent=1))
            with Clock(f"compiling {len(self._programs)} programs of {type(self._model).__name__}"):
                _compile(folder, path)


def _compile(folder: str, path: Path) -> None:
    tool = find_tool("moe-compile")
    if tool is None:
        raise FileNotFoundError("expected moe-compile beside the package, found none; build or install "
                                "moe-mlir whole")
    done = subprocess.run([tool, folder, "-o", path, "--target=cpu", f"--cpu={target_cpu()}"],
                          capture_output=True, text=True)
    if done.returncode != 0:
        raise native().MoeError(done.stderr.strip() or f"moe-compile ended with {done.returncode}")


__all__ = ["save_decoder"]
