"""What a cache of transformers keeps, taken apart and put together again.

A cache is an object with layers. What a layer keeps differs with the kind of attention: keys and
values, states of convolutions in dictionaries, keys of an indexer, counts of tokens, flags. Here
none of them is known by its name. Tensors are what a program reads and updates. Integers that grow
with the tokens are open sizes of a program. All else is a condition of a program: a cache of other
flags is served by another one.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from .._torch.core import check_size, pytree

# Steps from a cache to something that it keeps: attributes of objects, keys and indices.
Path = tuple[Any, ...]

# An open integer is given as the size of an empty tensor, which torch traces as a symbol. It is
# larger by this, since torch takes the sizes 0 and 1 for cases of their own.
SMALLEST_SIZE = 2


class SizeText(str):
    """An integer that a call leaves in a cache, as a text over the open sizes of its program."""


class ResultNumber(int):
    """A tensor that a call leaves in a cache that grows: which of the results made for it."""


class Structure:
    """The objects, lists and dictionaries that a call leaves in a cache, without what they hold."""

    def __init__(self, cache: Any):
        self.frame = _copied(cache, lambda leaf: None)

    def make(self) -> Any:
        """A new cache that has it."""
        return _copied(self.frame, lambda leaf: leaf)

    def give(self, cache: Any) -> None:
        """Adds what a cache lacks of it, and ends what it no longer has."""
        _follow(cache, self.frame)


@dataclass(frozen=True)
class CacheForm:
    """What two caches have in common that one program serves.

    Attributes:
        constants: the path, type and value of all that is neither tensor nor counter.
        tensors: the paths of the tensors.
        counters: groups of paths to integers that are open sizes; those of a group are equal.
        same: paths to tensors that have an earlier path, too, with its number.
        grows: whether a call makes other tensors, which may be longer, in the place of these.
        kinds: of each tensor of a cache that grows its dtype and number of dims.
        frame: the cache without its tensors and counters.
    """

    constants: tuple[tuple[Path, type, Any], ...]
    tensors: tuple[Path, ...]
    counters: tuple[tuple[Path, ...], ...]
    same: tuple[tuple[Path, int], ...]
    grows: bool
    kinds: tuple[tuple[torch.dtype, int], ...]
    frame: Any = field(compare=False, repr=False)

    @property
    def names(self) -> list[str]:
        """A name for each tensor that a program takes for such a cache."""
        return [*self.tensor_names, *self.counter_names]

    @property
    def tensor_names(self) -> list[str]:
        return [_dotted(path) for path in self.tensors]

    @property
    def counter_names(self) -> list[str]:
        return [_dotted(group[0]) for group in self.counters]


class CacheTensors:
    """A cache as the tensors that a program takes: its own, and one for each counter."""

    def __init__(self, form: CacheForm, tensors: list, cache: Any = None):
        self.form, self.tensors, self.cache = form, tensors, cache

    @staticmethod
    def of(cache: Any, is_counter: Callable[[Any, Path], bool], grows: bool = False) -> CacheTensors:
        """A cache of which `is_counter(part, path in it)` says which integers are open."""
        found = list(leaves_of(cache))
        tensors = [(path, leaf) for path, _, leaf in found if isinstance(leaf, torch.Tensor)]
        tensors, same = _with_others(tensors) if grows else (tensors, [])
        groups: dict[int, list[Path]] = {}
        for path, (part, start), leaf in found:
            if type(leaf) is int and is_counter(part, path[start:]):
                groups.setdefault(leaf, []).append(path)
        counters = tuple(map(tuple, groups.values()))
        known = {path for path, _ in (*tensors, *same)} | {path for group in counters for path in group}
        constants = tuple((path, type(leaf), leaf) for path, _, leaf in found if path not in known)
        kinds = tuple((tensor.dtype, tensor.dim()) for _, tensor in tensors) if grows else ()
        form = CacheForm(constants, tuple(path for path, _ in tensors), counters, tuple(same), grows,
                         kinds, _copied(cache, lambda leaf: None if isinstance(leaf, torch.Tensor) else leaf))
        sizes = [torch.empty(count + SMALLEST_SIZE, 0) for count in groups]
        return CacheTensors(form, [*(tensor for _, tensor in tensors), *sizes], cache)

    def build(self) -> Any:
        """A cache around these tensors."""
        cache = _copied(self.form.frame, lambda leaf: leaf)
        for path, tensor in zip(self.form.tensors, self.tensors):
            put(cache, path, tensor)
        for path, number in self.form.same:
            put(cache, path, self.tensors[number])
        for group, tensor in zip(self.form.counters, self.counter_sizes):
            size = tensor.shape[0]
            # Otherwise torch takes what a count of tokens ends, such as keys[:count], for a size
            # that depends on data.
            check_size(size >= SMALLEST_SIZE)
            for path in group:
                put(cache, path, size - SMALLEST_SIZE)
        return cache

    @property
    def description(self) -> list:
        """What a program or a run depends on, but for the sizes and values of its tensors."""
        form = self.form
        return [form.constants, form.tensors, form.counters, form.same,
                [type(part) for part in (self.cache, *parts_of(self.cache))]]

    @property
    def state(self) -> list:
        """The tensors of the cache itself."""
        return self.tensors[:len(self.form.tensors)]

    @property
    def counter_sizes(self) -> list:
        """Of each counter an empty tensor, whose first size says it."""
        return self.tensors[len(self.form.tensors):]

    @property
    def sequences(self) -> int | None:
        """The number of sequences that it holds; None if no tensor says so."""
        return next((tensor.shape[0] for tensor in self.state if tensor.dim() > 1), None)

    def changes_of(self, cache: Any, is_new: bool = False) -> tuple[list[tuple[Path, Any]], list[torch.Tensor]]:
        """What a model changed in a cache that `build` made, and the tensors that it made for it.

        Where the model put another tensor in the place of one, the changes name it by its number;
        in a cache of fixed size, the one before takes its values. Of a new cache all is told.

        Raises:
            TypeError: a cache of fixed size has other tensors than before, or of other sizes.
        """
        before = dict(zip(self.form.tensors, self.tensors))
        start = self.build()
        built = {path: value for path, _, value in leaves_of(start)}
        changes: list[tuple[Path, Any]] = []
        if is_new or (self.form.grows and not _is_alike(start, cache)):
            changes.append(((), Structure(cache)))
        made: dict[int, int] = {}
        results: list[torch.Tensor] = []
        for path, _, now in leaves_of(cache):
            if isinstance(now, torch.SymBool):
                now = bool(now)  # what it depends on is a condition of the program
            if isinstance(now, torch.Tensor) and not self.form.grows:
                _keep_in_place(path, before.pop(path, None), now)
            elif isinstance(now, torch.Tensor):
                if now is not built.get(path):
                    if id(now) not in made:
                        made[id(now)] = len(results)
                        # A program's results have memory of their own.
                        results.append(now.clone() if any(now is x for x in self.tensors) else now)
                    changes.append((path, ResultNumber(made[id(now)])))
            elif path not in built or not _is_same(built[path], now):
                changes.append((path, now))
        if before and not self.form.grows:
            raise _grows(next(iter(before)), "a tensor", "none")
        return changes, results


pytree.register_pytree_node(
    CacheTensors, lambda parts: (parts.tensors, parts.form),
    lambda tensors, form: CacheTensors(form, list(tensors)),
    flatten_with_keys_fn=lambda parts: (
        [(pytree.MappingKey(n), t) for n, t in zip(parts.form.names, parts.tensors)], parts.form))


def _with_others(tensors):
    """The tensors, each at its first path, and the other paths with the numbers of these."""
    first: dict[int, int] = {}
    once: list[tuple[Path, torch.Tensor]] = []
    others: list[tuple[Path, int]] = []
    for path, tensor in tensors:
        number = first.setdefault(id(tensor), len(once))
        if number == len(once):
            once.append((path, tensor))
        else:
            others.append((path, number))
    return once, others


def is_cache(value: object) -> bool:
    """Whether it is a cache of transformers, which is imported then."""
    return isinstance(value, _classes(("Cache",)))


def parts_of(cache: Any) -> list[Any]:
    """The layers of a cache."""
    return list({id(part): part for _, (part, _), _ in leaves_of(cache) if part is not cache}.values())


def put(cache: Any, path: Path, value: Any) -> None:
    """Sets what is at a path."""
    *steps, last = path
    for step in steps:
        cache = _inside(cache)[step]
    _inside(cache)[last] = value


def _inside(value):
    """The dictionary or list in which a path goes on."""
    return value if isinstance(value, (dict, list)) else vars(value)


_PLAIN = (type(None), bool, int, float, str, torch.SymInt, torch.SymBool, torch.dtype,
          torch.device, torch.Size, type)
_PARTS = ("Cache", "CacheLayerMixin", "LinearAttentionCacheLayerMixin", "DummyLayer")


def _classes(names) -> tuple[type, ...]:
    """Those of transformers that have these names, in the version that is imported."""
    module = sys.modules.get("transformers.cache_utils")
    found = (getattr(module, name, None) for name in names)
    return tuple(kind for kind in found if kind is not None)


def leaves_of(cache) -> Iterator[tuple[Path, tuple[Any, int], Any]]:
    """Of all that a cache keeps its path, the layer that has it with where that begins, and itself."""
    parts = _classes(_PARTS)

    def visit(value, path, part):
        if isinstance(value, parts):
            for name, inner in vars(value).items():
                yield from visit(inner, (*path, name), (value, len(path)))
        elif type(value) is dict:
            for key, inner in value.items():
                yield from visit(inner, (*path, key), part)
        elif type(value) is list:
            for key, inner in enumerate(value):
                yield from visit(inner, (*path, key), part)
        else:
            if not isinstance(value, (torch.Tensor, *_PLAIN)) and not _is_configuration(value):
                raise TypeError(
                    f"expected a cache that keeps tensors, numbers and flags, in lists and "
                    f"dictionaries, found a {type(value).__name__} at '{_dotted(path)}'")
            yield path, part, value
    yield from visit(cache, (), (cache, 0))


def _is_configuration(value):
    return type(value).__name__.endswith("Config")


def _copied(value, leaf: Callable[[Any], Any]):
    """A copy of a cache whose tensors, numbers and all else are what `leaf` makes of them."""
    if isinstance(value, _classes(_PARTS)):
        made = copy.copy(value)
        vars(made).update({name: _copied(inner, leaf) for name, inner in vars(value).items()})
        return made
    if type(value) is dict:
        return {key: _copied(inner, leaf) for key, inner in value.items()}
    if type(value) is list:
        return [_copied(inner, leaf) for inner in value]
    return leaf(value)


def _is_container(value):
    return isinstance(value, _classes(_PARTS)) or type(value) in (dict, list)


def _items(value):
    """What a container holds, by its names, keys or numbers."""
    return dict(enumerate(value)) if type(value) is list else _inside(value)


def _is_alike(one, other):
    """Whether two have the same objects, lists and dictionaries, whatever these hold."""
    if not _is_container(one) or not _is_container(other):
        return _is_container(one) == _is_container(other)
    mine, theirs = _items(one), _items(other)
    return type(one) is type(other) and mine.keys() == theirs.keys() and all(
        _is_alike(value, theirs[key]) for key, value in mine.items())


def _follow(value, frame):
    """Gives a container the containers of `frame`; what both have stays the same object."""
    mine, wanted = _items(value), _items(frame)
    if type(value) is list:
        del value[len(frame):]
        value.extend(None for _ in range(len(frame) - len(value)))
    for key, inner in wanted.items():
        held = mine.get(key)
        if _is_container(inner) and type(held) is type(inner):
            _follow(held, inner)
        elif _is_container(inner) or key not in mine:
            _inside(value)[key] = _copied(inner, lambda leaf: None)


def _dotted(path):
    return ".".join(map(str, path))


def _keep_in_place(path, before, now) -> None:
    if before is now:
        return
    if before is None or before.shape != now.shape or before.dtype != now.dtype:
        raise _grows(path, "none" if before is None else _text(before), _text(now))
    before.copy_(now)


def _grows(path, before, now) -> TypeError:
    return TypeError(
        f"expected a cache whose tensors keep their sizes, found '{_dotted(path)}', which "
        f"was {before} before a call of the model and {now} after it; to generate with this model, "
        "use model.compile(backend=\"moe\", dynamic=True)")


def _text(tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _is_same(old, new) -> bool:
    """Whether a value is what it was, as far as that asks nothing of an open size."""
    if isinstance(old, torch.SymInt) or isinstance(new, torch.SymInt):
        return isinstance(old, torch.SymInt) and isinstance(new, torch.SymInt) and \
            old.node.expr == new.node.expr
    return old is new or (type(old) is type(new) and bool(old == new))


__all__ = ["SMALLEST_SIZE", "CacheForm", "CacheTensors", "Path", "ResultNumber", "SizeText", "Structure", "is_cache", "leaves_of", "parts_of", "put"]
