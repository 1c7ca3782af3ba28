"""What transformers calls things, by its versions; no other module names what differs.

| what | before 5.24 | since 5.24 |
|---|---|---|
| the cache, as an input and in outputs | past_key_values, cache_params | cache |
| dtype of a cache's layer | layer.dtype | layer.keys.dtype |
| StaticLayer.crop(-n) | none | lowers the count, in place |
| weights of 30 routers | the model's dtype | f32 |

The last three need no code: tensors are asked for their dtypes, and a call reads
the count of tokens from the cache. Calls of compiled models may use every name
of the cache, whatever the version. Caches need 5.18, which has `get_head_shapes`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any

# The names of a cache among a model's inputs, the newest first.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")


def head_shapes(config: Any) -> tuple[Any, Any]:
    """The heads of keys and values, and their widths; for each layer where these differ.

    Raises:
        ImportError: a transformers that is too old to tell, whose caches are of another form.
    """
    try:
        from transformers.configuration_utils import get_head_shapes
    except ImportError:
        import transformers

        raise ImportError(
            "expected transformers 5.18 or newer for a cache of keys and values in compiled code, "
            f"found {transformers.__version__}; pip install -U transformers, or pass "
            "use_cache=False") from None
    return get_head_shapes(config.get_text_config())


def has_post_expert_norm(experts: object) -> bool:
    """Whether what each expert gives is normalised; those of 5.18 do not say, and have none."""
    return getattr(experts, "has_post_expert_norm", False)


def is_model(value: object) -> bool:
    """Whether it is a model of transformers, which is imported then."""
    module = sys.modules.get("transformers.modeling_utils")
    return module is not None and isinstance(value, module.PreTrainedModel)


def untie(model: Any, name: str) -> None:
    """Lets models of transformers in `model` no longer take this weight for that of an embedding."""
    for prefix, module in model.named_modules():
        start = f"{prefix}." if prefix else ""
        if is_model(module) and name.startswith(start) and \
                module.all_tied_weights_keys.pop(name.removeprefix(start), None):
            module.config.tie_word_embeddings = False


def cache_name(model: object) -> str | None:
    """The name of the cache among the inputs of a model of transformers; None if it takes none."""
    if not is_model(model):
        return None
    parameters = inspect.signature(model.forward).parameters  # type: ignore[attr-defined]
    return next((name for name in CACHE_NAMES if name in parameters), None)


def with_cache_name(model: object, named: Mapping[Any, Any]) -> dict[Any, Any]:
    """Inputs by name, with the cache under the name that this model's forward has for it.

    Raises:
        TypeError: the inputs have the cache twice, under two names.
    """
    found = [name for name in CACHE_NAMES if name in named]
    own = cache_name(model) if found else None
    if own is None or found == [own]:
        return dict(named)
    if len(found) > 1:
        raise TypeError(f"expected one cache, found inputs {' and '.join(map(repr, found))}, which "
                        f"are names of the same; {type(model).__name__} has {own!r}")
    return {own if name in found else name: value for name, value in named.items()}


def given_cache(named: Mapping[Any, Any]) -> Any:
    """The cache among inputs by name; None if there is none."""
    return next((named[name] for name in CACHE_NAMES if named.get(name) is not None), None)


def cache_call(model: object, cache: object) -> dict[str, Any]:
    """The keyword with which a model of transformers is called with a cache."""
    return {cache_name(model) or CACHE_NAMES[0]: cache}
