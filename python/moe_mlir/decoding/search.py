"""Which programs decoding needs: a search over the states that a cache comes to.

A program is traced for the first call that none of those before it serves. Which calls a program
serves, and what it makes of a cache, is known without running it: by its conditions on the numbers
of tokens and counters, and by what it changes.

Single tokens have a program in every state. Several tokens have one where it serves many numbers of
tokens: models whose own code is unrolled over the tokens have none, and run them one by one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import NamedTuple

from .states import CacheStates, State
from .traced import TracedProgram

# Of a decoder; each takes some seconds to trace, and more to compile.
MOST_PROGRAMS = 32
# For several tokens on an empty cache, and on one that holds some.
_MOST_OF_PROMPTS = 4
# Traces for a single number of tokens, after which there are no more for caches of that form; each
# is of more than twice as many as the one before, since few may be a case of their own.
_MOST_UNROLLED = 2


class Call(NamedTuple):
    """So many tokens of each sequence on a cache in a state, which holds others."""

    state: State
    position: int
    tokens: int

    @property
    def is_empty(self) -> bool:
        return self.position == 0

    def __str__(self) -> str:
        return (f"{self.tokens} token{'s' if self.tokens > 1 else ''} "
                f"{'of an empty cache' if self.is_empty else f'after {self.position}'}")


class Search:
    """Finds the programs of a decoder.

    Args:
        trace: makes a program that serves a call.
        room: the most tokens that a cache holds.
        later_prompts: whether calls with several tokens on a cache that holds some have programs.

    Attributes:
        programs: those found, the first that was needed first.
        longest_prompt: the most tokens of an empty cache that have a program.
    """

    def __init__(self, states: CacheStates, trace: Callable[[Call], TracedProgram], room: int,
                 later_prompts: bool):
        self._states, self._trace, self._room = states, trace, room
        self._later_prompts = later_prompts
        self.programs: list[TracedProgram] = []
        self.longest_prompt = 1
        # States by the fewest tokens that lead to them.
        self._to_visit: list[list[State]] = [[] for _ in range(room + 1)]
        self._seen: set[State] = set()
        # Of empty caches, and of forms of others.
        self._prompts: Counter[bool] = Counter()
        self._unrolled: defaultdict[tuple[bool, int], list[int]] = defaultdict(list)

    def run(self) -> None:
        self._visit_step(Call(self._states.initial, 0, 1))
        self._visit_empty()
        for position in range(1, self._room):
            for state in self._to_visit[position]:
                self._visit_step(Call(state, position, 1))
                if self._later_prompts:
                    self._visit_later(state, position)

    def _visit_step(self, call):
        program = self._find(call) or self._add(self._trace(call), call)
        self._reach(program, call)

    def _visit_empty(self):
        tokens = 2
        while tokens <= self._room:
            call = Call(self._states.initial, 0, tokens)
            program = self._program_of_many(call)
            if program is None:
                tokens += 1
                continue
            most = self.longest_prompt = program.most_tokens(call.state, tokens, self._room)
            for number in range(tokens, most + 1):
                self._reach(program, call._replace(tokens=number))
            tokens = most + 1

    def _visit_later(self, state, position):
        """Finds programs for several tokens on a cache that holds some.

        The states after the fewest and the most tokens of a program are visited: steps lead to
        those between.
        """
        tokens, last = 2, self._room - position
        while tokens <= last:
            call = Call(state, position, tokens)
            program = self._program_of_many(call)
            if program is None:
                tokens = max(tokens + 1, self._next_trace(call, last))
                continue
            most = program.most_tokens(state, tokens, last)
            for number in {tokens, most}:
                self._reach(program, call._replace(tokens=number))
            tokens = most + 1

    def _program_of_many(self, call) -> TracedProgram | None:
        """A program for a call with several tokens; None where there are to be no more of them."""
        program = self._find(call)
        if program is not None:
            return program
        if call.tokens < self._next_trace(call, self._room):
            return None
        program = self._trace(call)
        if not program.serves_many:
            self._unrolled[call.is_empty, call.state.form].append(call.tokens)
            return None
        self._prompts[call.is_empty] += 1
        return self._add(program, call)

    def _next_trace(self, call, last) -> int:
        """The number of tokens from which a trace is worth it; more than `last` where none is."""
        unrolled = self._unrolled[call.is_empty, call.state.form]
        if self._prompts[call.is_empty] == _MOST_OF_PROMPTS or len(unrolled) == _MOST_UNROLLED:
            return last + 1
        return 2 * unrolled[-1] + 1 if unrolled else 2

    def _find(self, call) -> TracedProgram | None:
        return next((program for program in self.programs
                     if program.serves(call.state, call.tokens)), None)

    def _add(self, program, call) -> TracedProgram:
        if len(self.programs) == MOST_PROGRAMS:
            raise ValueError(
                f"expected a model that {MOST_PROGRAMS} programs decode with room for {self._room} "
                f"tokens, found none among them for {call}; save it with less room")
        self.programs.append(program)
        return program

    def _reach(self, program, call):
        state = program.after(call.state, call.tokens)
        if state not in self._seen:
            self._seen.add(state)
            self._to_visit[call.position + call.tokens].append(state)


__all__ = ["MOST_PROGRAMS", "Call", "Search"]
