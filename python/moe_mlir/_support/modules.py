"""What functions that change a model ask of it."""

import torch


def require_module(model: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"expected 'model' to be a torch.nn.Module, found {type(model).__name__}")
