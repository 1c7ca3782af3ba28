"""Language models with their caches as artifacts, for programs without Python."""

from .save import save_decoder

__all__ = ["save_decoder"]
