"""Operators that move or make elements: views, permutations, slices, constants."""

import re
from collections.abc import Sequence

import sympy
import torch
from torch.fx import Node

from .builder import Dim, FunctionBuilder, Operand, Value, same_dim, tensor_type
from .context import Context, Deferred, Splat, broadcast
from .registry import Unsupported, imports

aten = torch.ops.aten


# ---- views ---------------------------------------------------------------------

@imports(aten.view.default, aten.reshape.default, aten._unsafe_view.default,
         aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default,
         aten._reshape_copy.default, aten.flatten.using_ints, complex=True,
         unsigned=True, implied=("shape", "dim", "start_dim", "end_dim"))
def _view(context, node, arguments):
    target = context.shape(node)
    raw = context.raw(arguments.self)
    context.require(_product(target), "==", _product(raw.shape))
    if isinstance(raw, Splat):
        return Splat(raw.scalar, target, raw.element)
    moved = _moved_dims(raw.shape, target)
    if isinstance(raw, Deferred) and moved is not None:
        inputs = tuple(_with_moved_dims(i, moved, target) for i in raw.inputs)
        return Deferred(inputs, target, raw.element, raw.body)
    if isinstance(raw, Operand):
        folded = (_view_of_permutation(context, raw, target) if moved is None
                  else _with_moved_dims(raw, moved, target))
        if folded is not None:
            return folded
    return reshape(context.builder, context.value(arguments.self), target)


def reshape(builder: FunctionBuilder, value: Value, target: Sequence[Dim]) -> Value:
    """Collapses then expands; both are free on contiguous memory."""
    target = tuple(target)
    if len(value.shape) == len(target) and all(map(same_dim, value.shape, target)):
        return value
    groups = match_groups(value.shape, target)
    if groups is None:
        # Dimensions that are equal at run time need not be the same symbol.
        return _reshape_by_sizes(builder, value, target)
    if not value.shape or not target:
        return _reshape_scalar(builder, value, target)
    middle = [_product(value.shape[i] for i in source) for source, _ in groups]
    if any(len(source) > 1 for source, _ in groups):
        value = _reassociate(builder, "collapse_shape", value, [s for s, _ in groups], middle)
    if any(sum(not isinstance(target[j], int) for j in result) > 1 for _, result in groups):
        return _reshape_by_sizes(builder, value, target)
    if any(len(result) > 1 for _, result in groups):
        value = _reassociate(builder, "expand_shape", value, [r for _, r in groups], target)
    return Value(value.name, target, value.element)


def match_groups(source: Sequence[Dim],
                 target: Sequence[Dim]) -> list[tuple[list[int], list[int]]] | None:
    """Pairs runs of dimensions with equal products; None if they do not line up."""
    groups, i, j = [], 0, 0
    while i < len(source) or j < len(target):
        left, right = [], []
        a, b = sympy.Integer(1), sympy.Integer(1)
        if i < len(source):
            left.append(i)
            a *= source[i]
            i += 1
        if j < len(target):
            right.append(j)
            b *= target[j]
            j += 1
        while not same_dim(a, b):
            # The side whose product divides the other's is the one to extend.
            if i < len(source) and (j >= len(target) or _divides(a, b)):
                a *= source[i]
                left.append(i)
                i += 1
            elif j < len(target):
                b *= target[j]
                right.append(j)
                j += 1
            else:
                return None
        groups.append((left, right))
    return _absorb_unit_groups(groups)


def _divides(a, b) -> bool:
    """Whether b is a multiple of a other than a itself."""
    ratio = sympy.cancel(sympy.sympify(b) / sympy.sympify(a))
    if ratio.is_number:
        return ratio > 1 and ratio.is_Integer
    return ratio.is_polynomial() and sympy.denom(ratio) == 1


def _absorb_unit_groups(groups):
    """Joins groups that lack one side (dimensions of size 1) to a neighbour."""
    joined: list[tuple[list[int], list[int]]] = []
    for left, right in groups:
        if joined and (not left or not right or not joined[-1][0] or not joined[-1][1]):
            joined[-1] = (joined[-1][0] + left, joined[-1][1] + right)
        else:
            joined.append((left, right))
    return joined


def _product(dims):
    result = sympy.Integer(1)
    for d in dims:
        result *= d
    return int(result) if result.is_Integer else sympy.expand(result)


def _reassociate(builder, op, value, groups, shape) -> Value:
    shape = tuple(shape)
    lists = ", ".join("[" + ", ".join(map(str, g)) + "]" for g in groups)
    sizes = ""
    if op == "expand_shape":
        sizes = f" output_shape [{', '.join(builder.size(d) for d in shape)}]"
    result = tensor_type(shape, value.element)
    return builder.tensor(
        f"tensor.{op} {value.name} [{lists}]{sizes} : {value.type} into {result}",
        shape, value.element)


def _reshape_by_sizes(builder, value: Value, target) -> Value:
    """For sizes that do not line up, and to split a dimension into several unknown ones.

    memref.expand_shape, which tensor.expand_shape becomes, is lowered upstream
    for one unknown size a group only; the sizes as a tensor know no such limit.
    """
    sizes = ", ".join(builder.index(d) for d in target)
    sizes_type = f"tensor<{len(target)}xindex>"
    vector = builder.op(f"tensor.from_elements {sizes} : {sizes_type}")
    return builder.tensor(
        f"tensor.reshape {value.name}({vector}) : ({value.type}, {sizes_type}) -> "
        f"{tensor_type(target, value.element)}", target, value.element)


def _reshape_scalar(builder, value, target) -> Value:
    """To or from a tensor without dimensions; the other side has only 1s."""
    op = "collapse_shape" if value.shape else "expand_shape"
    sizes = "" if value.shape else f" output_shape [{', '.join(map(str, target))}]"
    return builder.tensor(
        f"tensor.{op} {value.name} []{sizes} : {value.type} into "
        f"{tensor_type(target, value.element)}", target, value.element)


def _moved_dims(source, target):
    """Where each dimension goes if the view only adds or drops 1s; None otherwise."""
    old = [i for i, d in enumerate(source) if d != 1]
    new = [j for j, d in enumerate(target) if d != 1]
    if len(old) != len(new) or not all(same_dim(source[i], target[j]) for i, j in zip(old, new)):
        return None
    return dict(zip(old, new))


def _with_moved_dims(operand: Operand, moved, target) -> Operand:
    # A dimension of size 1 is read at 0 wherever it was.
    dims = tuple(None if d is None else moved.get(d) for d in operand.dims)
    return Operand(operand.value, dims, tuple(target))


def _view_of_permutation(context, raw: Operand, target):
    """A view of a permuted value as a permutation of a view, where dims allow.

    Merging is legal if the merged dimensions are neighbours, in order, in the
    value itself; splitting always is. So `view(permute(x))` copies nothing.
    """
    if None in raw.dims or len(raw.dims) != len(raw.shape):
        return None
    groups = match_groups(raw.shape, target)
    if groups is None or not target:
        return None
    at = {d: b for b, d in enumerate(raw.dims)}  # result dim -> the value's dim
    for left, _ in groups:
        if not left or any(at[left[0]] + i != at[d] for i, d in enumerate(left)):
            return None
    # The groups in the order in which they lie in the value.
    order = sorted(groups, key=lambda group: at[group[0][0]])
    shape = [target[j] for _, right in order for j in right]
    dims = tuple(j for _, right in order for j in right)
    value = reshape(context.builder, raw.value, shape)
    return Operand(value, dims, tuple(target))


@imports(aten.permute.default, unsigned=True)
def _permute(context, node, arguments):
    rank = len(arguments.dims)
    return permuted(context, node, arguments.self, [d % rank for d in arguments.dims])


@imports(aten.t.default, unsigned=True)
def _t(context, node, arguments):
    rank = len(context.shape(node))
    return permuted(context, node, arguments.self, list(range(rank))[::-1])


@imports(aten.transpose.int, unsigned=True)
def _transpose(context, node, arguments):
    order = list(range(len(context.shape(node))))
    a, b = arguments.dim0, arguments.dim1
    order[a], order[b] = order[b], order[a]
    return permuted(context, node, arguments.self, order)


def permuted(context: Context, node: Node, source: Node,
             order: Sequence[int]) -> Splat | Deferred | Operand | Value:
    raw = context.raw(source)
    if isinstance(raw, Splat):
        return Splat(raw.scalar, context.shape(node), raw.element)
    new_position = {old: new for new, old in enumerate(order)}
    shape = context.shape(node)

    def permute(operand):
        dims = tuple(None if d is None else new_position[d] for d in operand.dims)
        return Operand(operand.value, dims, shape)
    if isinstance(raw, Deferred):
        return Deferred(tuple(permute(i) for i in raw.inputs), shape, raw.element, raw.body)
    result = permute(context.operand(source))
    return result.value if result.is_identity else result


@imports(aten.expand.default, complex=True, unsigned=True)
def _expand(context, node, arguments):
    raw = context.raw(arguments.self)
    shape = context.shape(node)
    if isinstance(raw, Splat):
        return Splat(raw.scalar, shape, raw.element)
    if len(shape) == len(raw.shape) and all(map(same_dim, shape, raw.shape)):
        return raw
    if isinstance(raw, Deferred):
        inputs = tuple(broadcast(i, shape) for i in raw.inputs)
        return Deferred(inputs, shape, raw.element, raw.body)
    return broadcast(context.operand(arguments.self), shape)


@imports(aten.clone.default, aten.alias.default, aten.detach.default, aten.contiguous.default,
         aten.lift_fresh_copy.default, aten.dropout.default, complex=True, unsigned=True,
         implied=("p",))
def _same(context, node, arguments):
    if getattr(arguments, "train", False):
        raise Unsupported("dropout in training mode; call model.eval() first")
    return context.raw(arguments.self if hasattr(arguments, "self") else arguments.input)


# ---- slices and concatenation ---------------------------------------------------

def extract_slice(builder: FunctionBuilder, value: Value, offsets: Sequence[Dim | str],
                  sizes: Sequence[Dim | str], strides: Sequence[Dim | str],
                  shape: Sequence[Dim]) -> Value:
    """`shape` may drop dimensions of size 1."""
    if 0 in shape:
        # No offset is legal in a dimension of size 0, nor behind the end.
        return builder.empty(shape, value.element)

    def mixed(dims):
        return "[" + ", ".join(d if isinstance(d, str) else builder.size(d) for d in dims) + "]"
    result = tensor_type(shape, value.element)
    return builder.tensor(
        f"tensor.extract_slice {value.name}{mixed(offsets)} {mixed(sizes)} {mixed(strides)} : "
        f"{value.type} to {result}", shape, value.element)


def insert_slice(builder: FunctionBuilder, source: Value, into: Value, offsets: Sequence[Dim | str],
                 sizes: Sequence[Dim] | None = None, strides: Sequence[Dim] | None = None) -> Value:
    """`sizes` where `source` lacks dimensions of size 1."""
    if 0 in source.shape:
        return into

    def mixed(dims):
        return "[" + ", ".join(d if isinstance(d, str) else builder.size(d) for d in dims) + "]"
    return builder.tensor(
        f"tensor.insert_slice {source.name} into {into.name}{mixed(offsets)} "
        f"{mixed(sizes or source.shape)} {mixed(strides or [1] * into.rank)} : {source.type} into "
        f"{into.type}", into.shape, into.element)


def _slice_dim(context, source, dim, start, step, shape):
    value, size = context.value(source), shape[dim]
    # torch takes open sizes for larger than 0. What is empty may start anywhere.
    context.require(size, ">=", 0)
    context.require(size * (start + (size - 1) * step + 1 - value.shape[dim]), "<=", 0)
    offsets = [0] * value.rank
    offsets[dim] = start
    strides = [1] * value.rank
    strides[dim] = step
    return extract_slice(context.builder, value, offsets, shape, strides, shape)


def _position(context, source, dim, index):
    """An index that may be negative or symbolic, counted from the front."""
    index = index if index is not None else 0
    at, size = context.dim(index), context.shape(source)[dim]
    if isinstance(at, int):
        return at if at >= 0 else size + at
    if at.is_nonnegative:
        return at
    # Where x[:, -n:] starts, is known for some n > 0; where a count of tokens less a window does,
    # for sizes at which it has the sign that it has in the example.
    is_negative = at.is_nonpositive or context.hint(index) < 0
    context.require(at, "<" if is_negative else ">=", 0)
    return size + at if is_negative else at


def _clamped(start):
    """A slice that starts before the front starts at the front."""
    if isinstance(start, int):
        return max(start, 0)
    return start if start.is_nonnegative else sympy.Max(0, start)


@imports(aten.slice.Tensor, complex=True, unsigned=True, implied=("dim", "start", "end"))
def _slice(context, node, arguments):
    shape, source_shape = context.shape(node), context.shape(arguments.self)
    if arguments.step == 1 and all(map(same_dim, shape, source_shape)):
        return context.raw(arguments.self)
    dim = arguments.dim % node.meta["val"].dim()
    start = _clamped(_position(context, arguments.self, dim, arguments.start))
    return _slice_dim(context, arguments.self, dim, start, arguments.step, shape)


@imports(aten.slice_scatter.default, unsigned=True, implied=("end",))
def _slice_scatter(context, node, arguments):
    """A copy of the tensor with every `step`-th place along `dim` written anew."""
    into, source = context.value(arguments.self), context.value(arguments.src)
    dim = arguments.dim % into.rank
    offsets, strides = [0] * into.rank, [1] * into.rank
    offsets[dim] = _clamped(_position(context, arguments.self, dim, arguments.start))
    strides[dim] = arguments.step
    size = source.shape[dim]
    context.require(size * (offsets[dim] + (size - 1) * arguments.step + 1 - into.shape[dim]), "<=", 0)
    if 0 in source.shape:
        return into  # an empty slice may start behind the end, where no offset is legal
    return insert_slice(context.builder, source, into, offsets, strides=strides)


@imports(aten.copy.default, unsigned=True, implied=("self",))
def _copy(context, node, arguments):
    """The source in the target's shape and type."""
    element, source = context.element(node), context.raw(arguments.src)
    if source.element == element and len(source.shape) == len(context.shape(node)) \
            and all(map(same_dim, source.shape, context.shape(node))):
        return source
    return context.elementwise(context.shape(node), element, [arguments.src], [element], element,
                               lambda x: x)


@imports(aten.select.int, unsigned=True)
def _select(context, node, arguments):
    source = context.value(arguments.self)
    dim = arguments.dim % source.rank
    offsets, sizes = [0] * source.rank, list(source.shape)
    offsets[dim] = _position(context, arguments.self, dim, arguments.index)
    context.require(offsets[dim], ">=", 0)
    context.require(offsets[dim], "<", source.shape[dim])
    sizes[dim] = 1
    return extract_slice(context.builder, source, offsets, sizes, [1] * source.rank,
                         context.shape(node))


@imports(aten.split_with_sizes.default, aten.split.Tensor, aten.chunk.default,
         unsigned=True, implied=("split_sizes", "split_size", "chunks"))
def _split(context, node, arguments):
    dim = arguments.dim % len(context.shape(arguments.self))
    pieces, start = [], 0
    for piece in node.meta["val"]:
        shape = context.shape(piece)
        pieces.append(_slice_dim(context, arguments.self, dim, start, 1, shape))
        start = start + shape[dim]
    context.require(start, "==", context.shape(arguments.self)[dim])
    return pieces


@imports(aten.unbind.int, unsigned=True)
def _unbind(context, node, arguments):
    """One slice for each place along `dim`, without the dim."""
    source = context.value(arguments.self)
    dim, count = arguments.dim % source.rank, len(node.meta["val"])
    context.require(source.shape[dim], "==", count)
    sizes = [1 if i == dim else size for i, size in enumerate(source.shape)]
    shape = [size for i, size in enumerate(source.shape) if i != dim]
    return [extract_slice(context.builder, source, [at if i == dim else 0
                                                    for i in range(source.rank)],
                          sizes, [1] * source.rank, shape) for at in range(count)]


@imports(aten.cat.default, unsigned=True)
def _cat(context, node, arguments):
    shape, element = context.shape(node), context.element(node)
    dim = arguments.dim % len(shape)
    result, start = context.builder.empty(shape, element), 0
    for source in arguments.tensors:
        if 0 in context.shape(source):
            continue
        origin = context.element(source)
        # Of several types torch takes the one that holds all.
        piece = context.value(source) if origin == element else context.elementwise(
            context.shape(source), element, [source], [origin], origin, lambda x: x)
        offsets = [0] * len(shape)
        offsets[dim] = start
        result = insert_slice(context.builder, piece, result, offsets)
        start = start + piece.shape[dim]
    return result


@imports(aten.constant_pad_nd.default, unsigned=True)
def _pad(context, node, arguments):
    """Of each dim first what is cut off, then what is filled in."""
    builder, shape = context.builder, context.shape(node)
    source = context.value(arguments.self)
    pads = [context.dim(p) for p in arguments.pad]
    low, first, kept = [0] * source.rank, [0] * source.rank, list(source.shape)
    for i in range(len(pads) // 2):
        dim, before, after = source.rank - 1 - i, pads[2 * i], pads[2 * i + 1]
        for pad in (before, after):
            if not isinstance(pad, int):
                context.require(pad, ">=", 0)
        cut = [-pad if isinstance(pad, int) and pad < 0 else 0 for pad in (before, after)]
        low[dim], first[dim], kept[dim] = before + cut[0], cut[0], source.shape[dim] - sum(cut)
        context.require(kept[dim], ">=", 0)
    if any(first) or kept != list(source.shape):
        source = extract_slice(builder, source, first, kept, [1] * source.rank, tuple(kept))
    filled = builder.fill(context.scalar(arguments.value, source.element), shape, source.element)
    return insert_slice(builder, source, filled, low)


# ---- new tensors -----------------------------------------------------------------

@imports(aten.full.default, aten.full_like.default, aten.scalar_tensor.default,
         aten.zeros.default, aten.ones.default, aten.zeros_like.default, aten.ones_like.default,
         aten.fill.Scalar, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default,
         unsigned=True, implied=("self",))
def _full(context, node, arguments):
    named = {"zeros": 0, "ones": 1, "zeros_like": 0, "ones_like": 1, "new_zeros": 0,
             "new_ones": 1}
    name = node.target._opname
    if name in named:
        number = named[name]
    elif name == "scalar_tensor":
        number = arguments.s
    elif name == "fill":
        number = arguments.value
    else:
        number = arguments.fill_value
    element = context.element(node)
    return Splat(context.scalar(number, element), context.shape(node), element)


@imports(aten.empty.memory_format, aten.empty_permuted.default, aten.empty_like.default,
         aten.new_empty.default, unsigned=True, implied=("self", "physical_layout"))
def _empty(context, node, arguments):
    return context.builder.empty(context.shape(node), context.element(node))


@imports(aten.arange.start_step, aten.arange.default, aten.arange.start, unsigned=True,
         implied=("end",))
def _arange(context, node, arguments):
    builder, element = context.builder, context.element(node)
    ends = getattr(arguments, "start", 0), getattr(arguments, "step", 1)
    # torch counts fractions in float64, too.
    wide, kind = ("f64", "f") if any(isinstance(x, float) for x in ends) else ("i64", "i")
    start, step = (context.scalar(x, wide) for x in ends)

    def body():
        loop = builder.op("linalg.index 0 : index")
        count = builder.convert(builder.op(f"arith.index_cast {loop} : index to i64"), "i64", wide)
        scaled = builder.op(f"arith.mul{kind} {count}, {step} : {wide}")
        total = builder.op(f"arith.add{kind} {scaled}, {start} : {wide}")
        return builder.convert(total, wide, element)
    return builder.map([], context.shape(node), element, body)


@imports(aten.lift_fresh.default, unsigned=True)
def _lift(context, node, arguments):
    return context.raw(arguments.self)


@imports(aten._assert_tensor_metadata.default, aten._assert_scalar.default,
         aten.sym_constrain_range_for_size.default, aten.sym_constrain_range.default,
         unsigned=True, implied=("a", "self", "size", "stride", "assert_msg", "min", "max"))
def _nothing(context, node, arguments):
    """Checks that tracing made already, or that are conditions of the program's sizes."""
    return None


@imports(aten._assert_async.msg, aten._assert_async.default, aten._functional_assert_async.msg,
         unsigned=True, implied=("dep_token",))
def _assert(context, node, arguments):
    """An assertion on a value: the call ends with an error where it is 0."""
    value, builder = context.value(arguments.self), context.builder
    zeros = [builder.constant(0, "index")] * value.rank
    scalar = builder.op(f"tensor.extract {value.name}[{', '.join(zeros)}] : {value.type}")
    message = getattr(arguments, "assert_msg", "") or "expected a value other than 0, found 0"
    # No place for a value.
    message = re.sub(r"\{(\d)\}", r"{ \1 }", message)
    context.assert_holds(node, builder.convert(scalar, value.element, "i1"), "value", message)
    return context.raw(node.args[2]) if len(node.args) > 2 else None
