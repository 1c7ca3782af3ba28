"""Entries of the disk cache that hold what the code of a model gave, found again by that code."""

from __future__ import annotations

import logging
import os
import pickle
import warnings
from typing import Any

import torch

from .._support.log import logger
from ..compiler import cache
from .trace_key import NoKey, trace_key


class ModelEntry:
    """One entry, or none where the disk cache is off or the model's code has no key.

    Args:
        sort: what it holds, as a word.
        model: the module whose code gave it.
        others: what else that depends on, as objects that `trace_key` takes.

    `MOE_MLIR_CACHE_TRACES=0` turns all of them off.
    """

    def __init__(self, sort: str, model: torch.nn.Module, *others: Any):
        self._model = model
        self._store: cache.Cache | None = None
        if os.environ.get("MOE_MLIR_CACHE_TRACES") == "0" or (store := cache.open_default()) is None:
            return
        try:
            self._key = cache.make_key(sort, trace_key(model, *others))
        except NoKey as reason:
            why = str(reason)
        except Exception as error:  # of objects of others, which do in attributes what they like
            why = repr(error)
        else:
            self._store = store
            return
        self.log("traced in each process, since its code has %s", why, level=logging.INFO)

    @property
    def exists(self) -> bool:
        """Whether something can be stored."""
        return self._store is not None

    def load(self) -> Any:
        """What was stored; None if that is nothing, or cannot be read."""
        payload = None if self._store is None else self._store.load(self._key)
        try:
            with warnings.catch_warnings():
                # torch's tree specs read what it deprecated itself.
                warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
                return None if payload is None else pickle.loads(payload)
        except Exception as error:  # of classes that are no longer where they were
            self.log("what is stored cannot be read: %r", error)
            return None

    def store(self, found: Any) -> None:
        """Stores it, where that is possible."""
        if self._store is None:
            return
        try:
            payload = pickle.dumps(found)
        except Exception as error:  # of whatever a model's outputs hold
            self.log("nothing is stored: %r", error)
            return
        self._store.store(self._key, payload)

    @property
    def name(self) -> str:
        """The begin of its key."""
        return self._key[:16]

    def log(self, text: str, *values: Any, level: int = logging.DEBUG) -> None:
        """A message about the entry, with the model's class in front."""
        logger("cache").log(level, f"%s: {text}", type(self._model).__name__, *values)
