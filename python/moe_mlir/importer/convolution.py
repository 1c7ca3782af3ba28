"""Convolutions: one filter a channel in place, all others as products of patches and filters."""

from collections.abc import Sequence

import torch

from .builder import Dim, Operand, Value
from .matmul import accumulator, contract, require_one_dtype, round_to
from .registry import Unsupported, imports
from .shape import insert_slice, reshape

aten = torch.ops.aten


def _each(numbers: Sequence[int], dims: int) -> list[int]:
    """One number for each dim, where torch takes one for all."""
    return list(numbers) * dims if len(numbers) == 1 else list(numbers)


@imports(aten.convolution.default, implied=("output_padding",))
def _convolution(context, node, arguments):
    require_one_dtype(node)
    if arguments.transposed:
        raise Unsupported("a transposed convolution; write it as F.conv of a tensor with zeros "
                          "between its elements")
    builder, shape = context.builder, context.shape(node)
    x, weight = context.value(arguments.input), context.value(arguments.weight)
    dims = x.rank - 2
    stride, padding, dilation = (_each(numbers, dims) for numbers in (
        arguments.stride, arguments.padding, arguments.dilation))
    groups = arguments.groups
    if not all(isinstance(pad, int) for pad in padding) or (
            groups > 1 and not all(isinstance(size, int) for size in weight.shape[:2])):
        raise Unsupported("filters of an open size; make them a parameter")
    for size in shape[2:]:
        context.require(size, ">=", 1)
    x = _padded(builder, x, padding)
    bias = None if arguments.bias is None else context.value(arguments.bias)
    channels = groups * weight.shape[1]
    if dims == 1 and groups == channels == weight.shape[0] and stride == dilation == [1]:
        total = _of_each_channel(builder, x, weight, _with_bias(builder, bias, shape, 1, x.element))
        return round_to(builder, total, x.element)
    # Filters and channels in groups, which lie in front; their products add up over channels
    # and places in a filter.
    width = weight.shape[0] // groups
    filters = reshape(builder, weight, (groups, width, _product(weight.shape[1:])))
    patches = _patches(builder, x, weight.shape[1:], shape[2:], groups, stride, dilation)
    tokens = patches.shape[1:-1]
    loops = [f"d{i}" for i in range(dims + 4)]
    group, rows, feature, inner = loops[0], loops[1:-2], loops[-2], loops[-1]
    if bias is not None:
        bias = reshape(builder, bias, (groups, width))
    init = _with_bias(builder, bias, (groups, *tokens, width), (0, dims + 2), x.element)
    total = contract(builder, Operand.of(patches), Operand.of(filters), init,
                     [group, *rows, inner], [group, feature, inner], [group, *rows, feature],
                     dims + 4)
    total = round_to(builder, total, x.element)
    return _channels_first(builder, total, shape)


def _product(sizes: Sequence[int]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result


def _padded(builder, x: Value, padding: Sequence[int]) -> Value:
    """With zeros on both sides of each dim behind batch and channels."""
    if not any(padding):
        return x
    sizes = (*x.shape[:2], *(size + 2 * pad for size, pad in zip(x.shape[2:], padding)))
    zeros = builder.fill(builder.constant(0, x.element), sizes, x.element)
    return insert_slice(builder, x, zeros, [0, 0, *padding])


def _with_bias(builder, bias: Value | None, shape, dims, element: str) -> Value:
    """What the products are added onto: zeros, or a bias that lies along `dims` of the shape."""
    wide = accumulator(element)
    if bias is None:
        return builder.fill(builder.constant(0, wide), shape, wide)
    own = dims if isinstance(dims, tuple) else (dims,)
    return builder.map([Operand(bias, own, tuple(shape))], shape, wide,
                       lambda b: builder.convert(b, bias.element, wide))


def _of_each_channel(builder, x: Value, weight: Value, init: Value) -> Value:
    """A 1-d convolution of each channel by its own filter, as state-space models have."""
    return contract(builder, Operand.of(x), Operand.of(weight), init,
                    ["d0", "d1", "d2 + d3"], ["d1", "0", "d3"], ["d0", "d1", "d2"], 4)


def _patches(builder, x: Value, filters: Sequence[int], out: Sequence[Dim], groups: int,
             stride: Sequence[int], dilation: Sequence[int]) -> Value:
    """[group, batch, .. places, elements]: what each filter of a group is multiplied with.

    A copy, as large as the input times the filter over the strides; a product of matrices is
    many times faster than a loop over the input in place, which has no blocks.
    """
    channels, *kernel = filters
    dims = len(kernel)
    loops = [f"d{i}" for i in range(3 + 2 * dims)]
    group, batch, places = loops[0], loops[1], loops[2:2 + dims]
    channel, inner = loops[2 + dims], loops[3 + dims:]
    read = [batch, f"{group} * {channels} + {channel}" if groups > 1 else channel,
            *(f"{place} * {step} + {at} * {wide}"
              for place, step, at, wide in zip(places, stride, inner, dilation))]
    shape = (groups, x.shape[0], *out, channels, *kernel)
    copied = builder.generic(len(loops), [(x, read)], builder.empty(shape, x.element), loops,
                             lambda value, _: value, set(range(len(loops))))
    return reshape(builder, copied, (*shape[:2 + dims], channels * _product(kernel)))


def _channels_first(builder, total: Value, shape) -> Value | Operand:
    """[group, batch, .. places, filters] as the result, [batch, channels, .. places]."""
    groups, width = total.shape[0], total.shape[-1]
    places = len(shape) - 2
    if groups == 1:
        flat = reshape(builder, total, total.shape[1:])
        return Operand(flat, (0, *range(2, 2 + places), 1), shape)
    grouped = (shape[0], groups, width, *shape[2:])
    moved = builder.write(Operand(total, (1, 0, *range(3, 3 + places), 2), grouped))
    return reshape(builder, moved, shape)
