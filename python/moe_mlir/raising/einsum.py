"""einsum as a matmul, without asking a size whether it is 1.

Torch's own leaves out dims that have size 1 in the example: its program is one
for that size alone.
"""

import math
import string

import torch
from torch.overrides import TorchFunctionMode


class EinsumAsMatmul(TorchFunctionMode):
    """Calls of torch.einsum with two operands become matmuls between permutations."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.einsum and not kwargs and isinstance(args[0], str):
            operands = args[1] if isinstance(args[1], (list, tuple)) else args[1:]
            terms = _parse(args[0], operands)
            if terms is not None:
                return _matmul(terms, *operands)
        return function(*args, **(kwargs or {}))


def _parse(equation, operands):
    """((left, right), result) as lists of letters; None where a letter does more than name a dim."""
    equation = _without_ellipsis(equation.replace(" ", ""), operands)
    terms, arrow, result = equation.partition("->")
    terms = terms.split(",")
    plain = len(operands) == len(terms) == 2 and bool(arrow) and "." not in equation \
        and all(len(t) == x.dim() for t, x in zip(terms, operands, strict=True))
    if not plain or any(len(set(t)) != len(t) for t in (*terms, result)):
        return None
    return tuple(map(list, terms)), list(result)


def _without_ellipsis(equation, operands):
    """The equation with letters for `...`, where all operands have as many dims there."""
    terms = equation.partition("->")[0].split(",")
    counts = {x.dim() - len(t.replace("...", "")) for t, x in zip(terms, operands) if "..." in t}
    if len(counts) != 1:
        return equation
    unused = [x for x in string.ascii_letters if x not in equation]
    return equation.replace("...", "".join(unused[:counts.pop()]))


def _matmul(terms, a, b):
    (left, right), result = terms
    a, left = _sum_unshared(a, left, right + result)
    b, right = _sum_unshared(b, right, left + result)
    batch = [x for x in left if x in right and x in result]
    inner = [x for x in left if x in right and x not in result]
    rows = [x for x in left if x not in right]
    columns = [x for x in right if x not in left]
    sizes = dict(zip(left, a.shape)) | dict(zip(right, b.shape))
    product = torch.matmul(_grouped(a, left, batch, rows, inner, sizes),
                           _grouped(b, right, batch, inner, columns, sizes))
    order = batch + rows + columns
    if len(rows) != 1 or len(columns) != 1:
        product = product.reshape([sizes[x] for x in order])
    return _permuted(product, order, result)


def _sum_unshared(tensor, letters, used):
    gone = [i for i, x in enumerate(letters) if x not in used]
    return (tensor.sum(dim=gone) if gone else tensor), [x for x in letters if x in used]


def _grouped(tensor, letters, batch, first, second, sizes):
    """The tensor as `[*batch, first, second]`, each group of letters one dim."""
    tensor = _permuted(tensor, letters, batch + first + second)
    if len(first) == 1 and len(second) == 1:
        return tensor
    return tensor.reshape([sizes[x] for x in batch] + [math.prod(sizes[x] for x in group)
                                                       for group in (first, second)])


def _permuted(tensor, letters, order):
    if letters == order:
        return tensor
    return tensor.permute([letters.index(x) for x in order])
