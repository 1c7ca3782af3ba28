"""What the importer writes: few operations, the user's lines, open sizes."""

import inspect
import re

import torch
import torch.nn.functional as F

import moe_mlir


class Projection(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 4)

    def forward(self, x):
        return self.layer(x).relu()


def text_of(model, *inputs, **options):
    return moe_mlir.export(model, inputs, **options).text


def test_a_linear_layer_reads_its_weight_in_place():
    text = text_of(Projection(), torch.randn(2, 3, 8))
    assert "linalg.transpose" not in text and "tensor.collapse_shape" not in text
    assert re.search(r"ins\(%arg2, %arg0 : tensor<\?x\?x8xf32>, tensor<4x8xf32>\)", text)
    assert "affine_map<(d0, d1, d2, d3) -> (d2, d3)>" in text


def test_products_with_broadcast_batches_have_projections_as_maps():
    """A constant in a map kept every pattern for products away: loops ran number by number."""
    class Scores(torch.nn.Module):
        def forward(self, q, k):
            return torch.matmul(q, k.transpose(-1, -2).unsqueeze(1)), torch.matmul(k[:1], q[0].mT)

    text = text_of(Scores(), torch.randn(2, 5, 4, 8), torch.randn(2, 8, 8))
    maps = [line for line in text.splitlines() if '"reduction"' in line]
    assert len(maps) == 2 and not any(re.search(r"-> \([^)]*\b0\b", line) for line in maps), maps


def test_token_dimensions_are_open_even_for_an_example_of_size_one():
    module = moe_mlir.export(Projection(), (torch.randn(1, 1, 8),))
    assert "tensor<?x?x8xf32>" in module.text
    assert len(module.program.symbols) == 2


def test_static_sizes_on_request():
    text = text_of(Projection(), torch.randn(2, 3, 8), dynamic_tokens=False)
    assert "tensor<2x3x8xf32>" in text and "?" not in text


def test_weights_are_arguments_with_their_names():
    module = moe_mlir.export(Projection(), (torch.randn(2, 3, 8),))
    assert '%arg0: tensor<4x8xf32> {moe.name = "layer.weight"}' in module.text
    assert '{moe.name = "x"}' in module.text
    assert list(module.state) == ["layer.weight", "layer.bias"]


def test_locations_name_the_line_and_the_module():
    text = text_of(Projection(), torch.randn(2, 3, 8))
    source, first = inspect.getsourcelines(Projection.forward)
    line = first + next(i for i, s in enumerate(source) if "relu" in s)
    assert f'"layer"("{__file__}":{line}:0)' in text


def test_masks_are_part_of_the_loop_that_applies_them():
    class Masked(torch.nn.Module):
        def forward(self, x):
            n = torch.arange(x.shape[1])
            return x.masked_fill((n[None, :] > 2)[..., None], 0.0)
    assert "xi1>" not in text_of(Masked(), torch.randn(2, 5, 8))


def test_a_router_imports_as_two_operations():
    class Router(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = torch.nn.Linear(8, 4, bias=False)

        def forward(self, x):
            values, indices = F.softmax(self.gate(x), -1).topk(2)
            return values / values.sum(-1, keepdim=True), indices
    text = text_of(Router(), torch.randn(2, 3, 8))
    assert re.findall(r"= (\w+\.\w+)", text.split("func.func")[1]).count("linalg.generic") == 0
    assert "moe.router_logits" in text and "moe.topk_renorm" in text


def test_save_chooses_the_form_by_the_suffix(tmp_path):
    import pytest
    module = moe_mlir.export(Projection(), (torch.randn(2, 3, 8),))
    module.save(tmp_path / "model.mlir")
    assert (tmp_path / "model.mlir").read_text() == module.text
    module.save(tmp_path / "model.mlirbc")
    assert (tmp_path / "model.mlirbc").read_bytes().startswith(b"ML\xefR")
    with pytest.raises(ValueError, match=r"\.mlir or \.mlirbc, found '.*model\.txt'"):
        module.save(tmp_path / "model.txt")
