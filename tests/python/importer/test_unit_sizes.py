"""Examples with sizes of 1: the program serves the other sizes, too."""

import pytest
import torch

import moe_mlir
from moe_mlir import nn
from moe_mlir.raising.einsum import EinsumAsMatmul

EQUATIONS = ["bnep,bnd->bepd", "bij,bje->bie", "bid,bjd->bij", "abc,acd->abd", "ijk,lk->lij"]


class Einsum(torch.nn.Module):
    def __init__(self, equation):
        super().__init__()
        self.equation = equation

    def forward(self, a, b):
        return torch.einsum(self.equation, a, b)


def operands(equation, size):
    left, _, right = equation.partition("->")[0].partition(",")
    generator = torch.Generator().manual_seed(0)
    return [torch.randn([size(x) for x in term], generator=generator) for term in (left, right)]


@pytest.mark.parametrize("equation", [*EQUATIONS, "ij,jk->ki", "i,j->ij", "bi,bi->b", "ij,j->i",
                                      "...ij,...jk->...ik", "ab,cd->acbd", "ijk,ik->j", "ij,kj->k",
                                      "ii,ij->j"])
@pytest.mark.parametrize("first", [1, 3])
def test_einsum_as_matmul(equation, first):
    named = equation.replace("...", "ab")
    a, b = operands(named, lambda x: first if x in "abi" else ord(x) % 7 + 1)
    with EinsumAsMatmul():
        found = torch.einsum(equation, a, b)
    torch.testing.assert_close(found, torch.einsum(equation, a, b))


def test_an_einsum_of_other_dims_is_refused_as_by_torch():
    a, b = torch.randn(5, 3, 4), torch.randn(4, 6)
    with pytest.raises(RuntimeError, match="number of subscripts"), EinsumAsMatmul():
        torch.einsum("ij,jk->ik", a, b)


@pytest.mark.parametrize("equation", EQUATIONS)
def test_a_trace_of_one_serves_all_sizes(equation):
    last = {term[-1] for term in equation.partition("->")[0].split(",")}

    def sized(dynamic):
        # The last dim of an input is a width, which stays.
        return lambda x: 4 if x in last else dynamic
    compiled = moe_mlir.compile(Einsum(equation), tuple(operands(equation, sized(1))))
    for size in (1, 2, 5):
        a, b = operands(equation, sized(size))
        torch.testing.assert_close(compiled(a, b), torch.einsum(equation, a, b), rtol=1e-5,
                                   atol=1e-5)


def test_a_layer_traced_with_one_sequence():
    torch.manual_seed(0)
    layer = nn.MoELayer(nn.SoftMoE(16, 4, slots=2), d_hidden=8)
    compiled = moe_mlir.compile(layer, (torch.randn(1, 1, 16),))
    for shape in ((1, 1, 16), (1, 7, 16), (3, 1, 16), (2, 5, 16)):
        h = torch.randn(shape)
        with torch.no_grad():
            torch.testing.assert_close(compiled(h)[0], layer(h)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_mask_for_all_heads_is_broadcast(batch):
    class Attention(torch.nn.Module):
        def forward(self, x, mask):
            return torch.nn.functional.scaled_dot_product_attention(x, 2 * x, x, attn_mask=mask)

    def inputs(batch, n):
        return torch.randn(batch, 4, n, 8), torch.rand(batch, 1, n, n) > 0.4

    compiled = moe_mlir.compile(Attention(), inputs(batch, 6))
    for x in (inputs(batch, 6), inputs(3, 70)):
        torch.testing.assert_close(compiled(*x), Attention()(*x), rtol=1e-5, atol=1e-5)


class Decodes(torch.nn.Module):
    """Does something else for a single token."""

    def forward(self, x):
        return x * 2 if x.shape[1] == 1 else x.cumsum(1)


def test_a_model_that_asks_for_one_token_is_traced_with_it():
    compiled = moe_mlir.compile(Decodes(), (torch.randn(1, 1, 4),))
    x = torch.randn(3, 1, 4)
    torch.testing.assert_close(compiled(x), x * 2)
    several = torch.randn(3, 2, 4)
    torch.testing.assert_close(compiled(several), several.cumsum(1))
    exported = moe_mlir.compile(moe_mlir.export(Decodes(), (torch.randn(1, 1, 4),)))
    with pytest.raises(ValueError, match="expected shape"):
        exported(several)


def test_a_program_that_was_traced_with_several_refuses_one():
    compiled = moe_mlir.compile(moe_mlir.export(Decodes(), (torch.randn(1, 5, 4),)))
    x = torch.randn(3, 2, 4)
    torch.testing.assert_close(compiled(x), x.cumsum(1))
    with pytest.raises(ValueError, match=r"input 'x': expected dim 1 != 1, as the model's own code "
                                         "asked when it was traced, found 1; compile"):
        compiled(torch.randn(3, 1, 4))


class Broadcasts(torch.nn.Module):
    def forward(self, x, mask):
        return x.masked_fill(mask.expand(x.shape[0], -1)[..., None], 0.0)


def test_a_mask_of_one_row_is_traced_as_it_is():
    x, mask = torch.randn(4, 5, 3), torch.rand(1, 5) > 0.5
    compiled = moe_mlir.compile(Broadcasts(), (x, mask))
    torch.testing.assert_close(compiled(x, mask), Broadcasts()(x, mask))


class BroadcastsAlone(torch.nn.Module):
    def forward(self, x, mask):
        return x + mask


def test_one_row_beside_two_is_not_taken_for_two():
    x, mask = torch.randn(2, 5), torch.randn(1, 5)
    compiled = moe_mlir.compile(moe_mlir.export(BroadcastsAlone(), (x, mask)))
    torch.testing.assert_close(compiled(x, mask), x + mask)


@pytest.mark.parametrize("dims", [(), (1,), ((1, 2),), (-2,), (0,)])
@pytest.mark.parametrize("shape", [(5, 1, 4, 3), (1, 1, 1, 3), (5, 2, 1, 1), (3, 4, 5, 1)])
def test_squeeze_leaves_out_what_eager_leaves_out(dims, shape):
    class Squeezed(torch.nn.Module):
        def forward(self, x):
            return x.squeeze(*dims) * 2, torch.squeeze(x, *dims)

    model = Squeezed()
    compiled = moe_mlir.compile(model, (torch.randn(shape),))
    for sizes in (shape[:3], (5, 1, 4), (1, 1, 1), (2, 3, 1)):
        x = torch.randn(*sizes, shape[3])
        torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=0)


@pytest.mark.parametrize("function, shapes", [
    (lambda x: x.exp() + 1, [(2, 0, 3)]), (lambda x, y: x @ y, [(5, 0), (0, 4)]),
    (lambda x: x.softmax(-1), [(1, 0, 0)]), (lambda x: x.logical_not_() * 2, [(1, 0, 3)])],
    ids=["elementwise", "product", "softmax", "in place"])
def test_an_example_without_elements_is_traced(function, shapes):
    class Model(torch.nn.Module):
        def forward(self, *inputs):
            return function(*inputs)

    model = Model()
    compiled = moe_mlir.compile(model, tuple(map(torch.randn, shapes)))
    inputs = list(map(torch.randn, shapes))
    torch.testing.assert_close(compiled(*[x.clone() for x in inputs]), model(*inputs))
    if len(inputs) == 1:
        x = torch.randn(2, 3, shapes[0][-1])
        torch.testing.assert_close(compiled(x.clone()), model(x))
