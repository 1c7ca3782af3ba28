"""A language model in an artifact, with what it keeps of the tokens that it has seen."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from . import weights_file
from .arguments import DTYPES
from .decoder_program import DecoderProgram, DecoderState, refuse
from .functions import ArtifactFunction

NAME = "decoder.json"


class ArtifactDecoder:
    """The model of `moe_mlir.save_decoder`: ids in, the logits of the token after them out.

    Attributes:
        room: the most tokens of a sequence.
        sequences: how many are decoded together.
        vocabulary_size: ids are below it.
        position: how many tokens of each sequence it holds.
    """

    name = "decoder"
    position: int

    def __init__(self, files: Mapping[str, Any], functions: Mapping[str, ArtifactFunction]):
        try:
            self._read(json.loads(files[NAME]), files, functions)
        except (KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            raise ValueError(f"{NAME}: expected a description of a decoder, found another: "
                             f"{type(error).__name__}: {error}") from None
        self._under_way = threading.Lock()
        self._restart()

    def _read(self, description, files, functions) -> None:
        self.room, self.sequences, self.vocabulary_size = (
            _positive(description, name) for name in ("room", "sequences", "vocabulary"))
        stored = weights_file.tensors_of(files[weights_file.NAME])
        self._tensors = _read_state(description, stored)
        self._initial = _read_initial(description, self.room, self._tensors)
        self._programs = _read_programs(description, functions, stored, self._tensors, self._initial,
                                        self.sequences)

    def __call__(self, ids: Any, *, out: Any = None) -> Any:
        """The logits float32 [sequences, words] of the token after `ids` [sequences, tokens].

        They come after the tokens of earlier calls. Where there is no code for so many at once, as
        many as there is code for run first, and then one after the other.

        Raises:
            ValueError: the ids are of another shape or not in the vocabulary, or there is no room
                left for them. Such a call changes nothing.
            RuntimeError: another call is under way, or one before failed within the code.
        """
        with self._acquired():
            self._require_whole()
            tokens = self._require_ids(ids)
            calls = self._plan(tokens)
            logits = calls[0].program.allocate(ids, out)
            self._is_whole = False
            for call in calls:
                piece = ids[:, call.begin:call.begin + call.tokens]
                call.program.run(piece, call.state, call.after, self._values, logits)
            self._is_whole = True
            self._state, self.position = calls[-1].after, self.position + tokens
        return logits

    def _plan(self, tokens) -> list[_Call]:
        """The calls of programs: one for all tokens, or the most that an empty cache can take, and
        one for each token after these."""
        calls: list[_Call] = []
        state, begin = self._state, 0
        while begin < tokens:
            rest = tokens - begin
            is_empty = self.position == 0 and begin == 0
            sizes = range(rest, 0, -1) if is_empty else (rest, 1)
            found = (self._call(state, begin, number) for number in sizes)
            call = next((call for call in found if call is not None), None)
            if call is None:
                raise ValueError(f"expected a number of tokens that the artifact has code for, found "
                                 f"{rest} after {self.position + begin}; save it again")
            calls.append(call)
            state, begin = call.after, begin + call.tokens
        return calls

    def _call(self, state, begin, tokens) -> _Call | None:
        for program in self._programs:
            symbols = program.sizes_of(state, tokens)
            if symbols is not None:
                return _Call(program, begin, tokens, state, program.after(state, symbols))
        return None

    def reset(self) -> None:
        """Forgets all tokens."""
        with self._acquired():
            self._restart()

    def _restart(self) -> None:
        self._values = {name: tensor.first() for name, tensor in self._tensors.items()}
        self._state, self.position, self._is_whole = self._initial, 0, True

    @contextmanager
    def _acquired(self) -> Iterator[None]:
        if not self._under_way.acquire(blocking=False):
            raise RuntimeError("expected one call of a decoder at a time, found another under way; load "
                               "the artifact once for each sequence")
        try:
            yield
        finally:
            self._under_way.release()

    def _require_whole(self) -> None:
        if not self._is_whole:
            raise RuntimeError("expected a reset of the decoder after a call that failed, which may have "
                               "updated a part of its state, found another call")

    def _require_ids(self, ids) -> int:
        """The number of tokens of each sequence."""
        shape, dtype = getattr(ids, "shape", None), str(getattr(ids, "dtype", ""))
        if shape is None or dtype.removeprefix("torch.") != "int64":
            raise TypeError(f"expected ids as a tensor of int64, found "
                            f"{dtype or type(ids).__name__}")
        if len(shape) != 2 or shape[0] != self.sequences or shape[1] < 1:
            raise ValueError(f"expected ids of shape [{self.sequences}, tokens], found {list(shape)}")
        if int(ids.min()) < 0 or int(ids.max()) >= self.vocabulary_size:
            raise ValueError(f"expected ids in [0, {self.vocabulary_size - 1}], found "
                             f"{int(ids.min())} to {int(ids.max())}")
        left = self.room - self.position
        if shape[1] > left:
            raise ValueError(
                f"expected at most {left} tokens, which the decoder of room {self.room} has room for "
                f"beside the {self.position} that it holds, found {shape[1]}; call reset, or save a "
                "decoder with more room")
        return int(shape[1])

    def __repr__(self):
        return f"<decoder with room for {self.room} tokens, which holds {self.position}>"


class _Call(NamedTuple):
    """Of one program, for a part of the tokens."""

    program: DecoderProgram
    begin: int
    tokens: int
    state: DecoderState
    after: DecoderState


class _StateTensor(NamedTuple):
    """A tensor that calls update or make: its first type, and its first value, None for zeros."""

    dtype: str
    shape: list[int]
    initial: Any

    def first(self) -> Any:
        """Memory of its own with the first value."""
        if self.initial is None:
            return weights_file.zeros(self.shape, DTYPES[self.dtype])
        return self.initial.clone() if hasattr(self.initial, "clone") else self.initial.copy()


def _positive(description, name) -> int:
    if _integer(description, name) < 1:
        refuse(f"a positive '{name}', found {description[name]!r}")
    return description[name]


def _integer(description, name) -> int:
    if type(description[name]) is not int:
        refuse(f"an integer as '{name}', found {description[name]!r}")
    return description[name]


def _read_state(description, stored) -> dict[str, _StateTensor]:
    tensors: dict[str, _StateTensor] = {}
    for entry in description["state"]:
        name, dtype, shape, stored_as = (entry[key] for key in ("name", "dtype", "shape", "stored_as"))
        if dtype not in DTYPES or not all(type(size) is int and size >= 0 for size in shape):
            refuse(f"a type and sizes of '{name}', found {dtype} {shape}")
        if name in tensors:
            refuse(f"each tensor of the state once, found '{name}' again")
        initial = None if stored_as is None else \
            weights_file.first_value(stored, stored_as, name, dtype, shape, NAME)
        tensors[name] = _StateTensor(dtype, shape, initial)
    return tensors


def _read_initial(description, room, tensors) -> DecoderState:
    counters = description["counters"]
    if not all(type(counter) is int and 0 <= counter <= room for counter in counters):
        refuse(f"counters within the room for {room} tokens, found {counters}")
    return DecoderState(_integer(description, "form"), tuple(counters),
                        {name: tensor.shape for name, tensor in tensors.items()})


def _read_programs(description, functions, stored, tensors, initial, sequences):
    programs: list[DecoderProgram] = []
    left = dict(functions)
    types = {name: tensor.dtype for name, tensor in tensors.items()}
    made = {made["name"] for entry in description["programs"] for made in entry.get("makes", [])}
    for name in made & tensors.keys():
        # Of others the code says the size.
        if tensors[name].initial is None and 0 not in tensors[name].shape:
            refuse(f"a first value of '{name}', which calls make, or no elements, found "
                   f"{tensors[name].shape}")
    for entry in description["programs"]:
        function = left.pop(entry["function"], None)
        if function is None:
            refuse(f"a function of the manifest once for each program, found '{entry['function']}'")
        for name in ("form", "next_form"):
            _integer(entry, name)
        programs.append(DecoderProgram(entry, function, stored, types, made, initial, sequences))
        if programs[-1].words != programs[0].words:
            refuse(f"logits of {programs[0].words} words, found {programs[-1].words} of "
                   f"'{entry['function']}'")
    if not programs:
        refuse("a program, found none")
    # What none uses may be of any size.
    unused = tensors.keys() - {name for program in programs for name in program.state}
    if unused:
        refuse(f"a program for each tensor of the state, found none for '{min(unused)}'")
    return programs
