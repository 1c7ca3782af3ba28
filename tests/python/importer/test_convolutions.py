"""Convolutions of one and two dims against eager torch."""

import pytest
import torch
import torch.nn.functional as F
from test_operators import Function, check

import moe_mlir
from moe_mlir.importer import ImportFailed


@pytest.mark.parametrize("bias", [True, False])
def test_of_each_channel(bias):
    def function(x, weight, *rest):
        return F.conv1d(x, weight, *rest, padding=2, groups=6)
    rest = (torch.randn(6),) if bias else ()
    check(function, (torch.randn(2, 6, 5),), torch.randn(6, 1, 3), *rest)
    # In place: no copy of patches.
    text = moe_mlir.export(Function(function, torch.randn(6, 1, 3), *rest),
                           (torch.randn(2, 6, 5),)).text
    assert "d2 + d3" in text and "expand_shape" not in text


def test_one_dim():
    def function(x, full, pair, single, bias):
        x = x.mT
        return (F.conv1d(x, full, bias), F.conv1d(x, full, stride=2, padding=3, dilation=2),
                F.conv1d(x, pair, bias, groups=3), F.conv1d(x, pair, groups=3, stride=3, padding=1),
                F.conv1d(x, single, groups=6, dilation=2, padding=2),
                F.conv1d(x, single[:, :, :1], groups=6, stride=2),
                F.conv1d(x, torch.cat((single, single * 2)), groups=6, padding="same"),
                F.conv1d(x[0], full, padding=1))
    check(function, (torch.randn(2, 9, 6),), torch.randn(9, 6, 3), torch.randn(9, 2, 3),
          torch.randn(6, 1, 3), torch.randn(9), later=(torch.randn(1, 14, 6),), rtol=1e-4, atol=1e-5)


def test_two_dims():
    def function(x, patch, small, bias, grouped):
        x = x.permute(0, 3, 1, 2)
        embedded = F.conv2d(x, patch, bias, stride=(2, 4))
        return (embedded, embedded.flatten(2).transpose(1, 2),
                F.conv2d(x, small, padding=1), F.conv2d(x, small, bias, 2, (0, 2), (2, 1)),
                F.conv2d(x, grouped, groups=2, padding=(2, 0)),
                F.conv2d(x, small[:, :, :1, :1]))
    check(function, (torch.randn(2, 8, 12, 4),), torch.randn(6, 4, 2, 4), torch.randn(6, 4, 3, 3),
          torch.randn(6), torch.randn(6, 2, 3, 2), later=(torch.randn(1, 6, 7, 4),), rtol=1e-4,
          atol=1e-5)


def test_three_dims():
    check(lambda x, w: F.conv3d(x, w, stride=2), (torch.randn(2, 2, 4, 5, 6),),
          torch.randn(3, 2, 2, 2, 3), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_types(dtype):
    check(lambda x, w, b: F.conv1d(x, w, b, padding=1), (torch.randn(2, 4, 5, dtype=dtype),),
          torch.randn(3, 4, 3, dtype=dtype), torch.randn(3, dtype=dtype), rtol=1e-2, atol=1e-2)


def test_a_filter_longer_than_the_input_is_an_error():
    def function(x, w):
        return F.conv1d(x.mT, w)
    compiled = moe_mlir.compile(Function(function, torch.randn(3, 4, 3)), (torch.randn(2, 5, 4),))
    with pytest.raises((ValueError, RuntimeError)):
        compiled(torch.randn(2, 2, 4))


def test_a_transposed_convolution_is_told():
    with pytest.raises(ImportFailed, match="a transposed convolution; write it as"):
        moe_mlir.export(torch.nn.ConvTranspose1d(4, 4, 3), (torch.randn(2, 4, 5),))


def test_filters_in_groups_are_read_of_a_constant():
    """The channels of the input are open sizes in a trace."""
    torch.manual_seed(0)
    filters, bias = torch.randn(6, 2, 3), torch.randn(6)
    check(lambda x, w, b: F.conv1d(x, w, b, padding="same", groups=2), (torch.randn(2, 4, 8),), filters, bias,
          later=(torch.randn(3, 4, 8),))


def test_filters_of_an_open_size_are_told():
    model = Function(lambda x, w: F.conv1d(x, w, groups=2))
    with pytest.raises(ImportFailed, match="filters of an open size; make them a parameter"):
        moe_mlir.export(model, (torch.randn(2, 4, 8), torch.randn(2, 2, 3)))
