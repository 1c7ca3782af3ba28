"""Outputs of transformers' models, made without the work of their constructors.

`ModelOutput.__post_init__` looks at each field for whether it is a tensor, which takes
longer than all else that a call of a small compiled model does outside of its code.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any


def output_form(outputs: Any, leaves: Sequence[Any]) -> tuple[type, dict, dict] | None:
    """The class of a ModelOutput and, by name, the numbers of leaves in its items and attributes.

    None where these outputs are no ModelOutput, or hold something else than leaves and None.
    """
    utils = sys.modules.get("transformers.utils")
    if utils is None or not isinstance(outputs, utils.ModelOutput):
        return None
    kind, numbers = type(outputs), {id(leaf): number for number, leaf in enumerate(leaves)}
    items = {name: numbers.get(id(value)) for name, value in outputs.items()}
    attributes = {name: numbers.get(id(value)) for name, value in vars(outputs).items()}
    is_whole = len(numbers) == len(leaves) and None not in items.values() and all(
        number is not None or vars(outputs)[name] is None for name, number in attributes.items())
    return (kind, items, attributes) if is_whole and kind.__new__ is OrderedDict.__new__ else None
