"""A language model with its cache in buffers, which an artifact keeps as state (docs/Deploying.md)."""

import torch

from moe_mlir._torch.core import size_oblivious_export
from moe_mlir._transformers.names import cache_call
from moe_mlir._transformers.static_cache import take_apart


class Decoder(torch.nn.Module):
    """Ids [1, n] at positions [n] -> logits f32 [1, words] of the token after them."""

    def __init__(self, model: torch.nn.Module, room: int) -> None:
        super().__init__()
        import transformers

        self.model = model
        self.cache = transformers.StaticCache(config=model.config, max_cache_len=room)
        take_apart(self.cache, model, {"input_ids": torch.zeros(1, 1, dtype=torch.int64)})
        for i, layer in enumerate(self.cache.layers):
            self.register_buffer(f"keys_{i}", layer.keys)
            self.register_buffer(f"values_{i}", layer.values)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.cache.layers):
            layer.keys, layer.values = getattr(self, f"keys_{i}"), getattr(self, f"values_{i}")
            layer.cumulative_length = positions[0].clone()
        return self.model(ids, position_ids=positions[None], use_cache=True, logits_to_keep=1,
                          **cache_call(self.model, self.cache)).logits[:, -1].float()


def export(model: torch.nn.Module, room: int) -> torch.export.ExportedProgram:
    """The program of a decoder that takes 1 to `room - 1` tokens at a time."""
    tokens = torch.export.Dim("tokens", max=room - 1)
    # One token is a size like any other.
    with torch.no_grad(), size_oblivious_export():
        return torch.export.export(
            Decoder(model, room), (torch.tensor([[1, 2, 3]]), torch.arange(3)),
            dynamic_shapes=({1: tokens}, {0: tokens}))
