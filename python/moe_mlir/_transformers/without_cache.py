"""transformers' models without the cache of keys and values that they return by default.

Most calls of a compiled model are of its logits alone. So a model that would make a
cache unasked is traced with `use_cache=False`, unless it is given a cache, or is
called with `use_cache=True`.
"""

import inspect

from .._support.log import warn_user
from .names import cache_name, given_cache, with_cache_name


def without_cache(model, args, kwargs) -> dict:
    """The keyword inputs as the model names them, with `use_cache=False` where it would make a
    cache unasked."""
    kwargs = with_cache_name(model, kwargs or {})
    return {**kwargs, "use_cache": False} if _makes_cache(model, _given(model, args, kwargs)) else kwargs


def warn_without_cache(model, args, kwargs) -> None:
    """Says that the cache will be missing in the outputs, unless the caller said so."""
    if _makes_cache(model, _given(model, args, kwargs or {})):
        warn_user(f"{type(model).__name__} is compiled with use_cache=False: its outputs hold no "
                  f"{cache_name(model) or 'cache'!r}; pass kwargs=dict(use_cache=False) to say so "
                  "yourself, or use_cache=True")


def _makes_cache(model, given) -> bool:
    """Whether the configuration asks for a cache, the forward can do without, and nobody chose."""
    config = getattr(model, "config", None)
    config = getattr(config, "get_text_config", lambda: config)()
    return (getattr(config, "use_cache", None) is True and given.get("use_cache") is None
            and given_cache(given) is None and _takes(model, "use_cache"))


def _takes(model, name) -> bool:
    parameters = inspect.signature(model.forward).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _given(model, args, kwargs) -> dict:
    """The inputs by name, as far as the forward's signature names them."""
    try:
        return {**inspect.signature(model.forward).bind(*args, **kwargs).arguments, **kwargs}
    except TypeError:
        return dict(kwargs)
