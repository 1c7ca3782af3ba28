"""torch's operators by torch's own samples: compiled code against eager.

    python tests/python/fuzz/torch_operators.py SEED OPERATORS SAMPLES

Draws operators of torch's database, of each a dtype and some samples. Each sample is compiled as a
module and run twice, on its own values and on those of another seed. Values, dtypes, shapes, and
what is written in place must be eager's. What is not compiled must be refused by an error of ours,
and must be in `REFUSED`; what eager refuses must be refused. Run it in a process of its own: a
finding may be a signal, and the last line of stderr says which operator ran. Prints the number of
samples and of refusals, and ends with status 1 at the first difference.
"""

import random
import sys
import warnings

import torch
from refused_operators import REFUSED
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

import moe_mlir
from moe_mlir.frontends.trace_errors import TraceFailed

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]
# Of results, relative to the largest one; integers are equal.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 4e-3, torch.bfloat16: 4e-2}
# Values of the memory as it is, and a function in Python that counts its chunks by open sizes.
LEFT_OUT = {"empty_like", "new_empty", "new_empty_strided", "nn_functional_linear_cross_entropy_chunked",
            "nn_functional_linear_cross_entropy_chunked_none"}
_TENSOR = object()


class Operator(torch.nn.Module):
    """A call of an operator as a function of its tensors."""

    def __init__(self, function, sample):
        super().__init__()
        leaves, self._spec = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
        self._function = function
        self._leaves = [_TENSOR if isinstance(x, torch.Tensor) else x for x in leaves]

    def forward(self, *tensors):
        rest = iter(tensors)
        args, kwargs = pytree.tree_unflatten(
            [next(rest) if x is _TENSOR else x for x in self._leaves], self._spec)
        return self._function(*args, **kwargs)


def main(seed, operators, samples):
    draw, counts = random.Random(seed), {"samples": 0, "refused": 0}
    for info in draw.sample(op_db, min(operators, len(op_db))):
        dtypes = [dtype for dtype in DTYPES if info.supports_dtype(dtype, "cpu")]
        if not dtypes or info.formatted_name in LEFT_OUT:
            continue
        dtype = draw.choice(dtypes)
        print(info.formatted_name, dtype, file=sys.stderr, flush=True)
        first, second = (_samples(info, dtype, s) for s in (seed, seed + 1))
        for number in draw.sample(range(len(first)), min(samples, len(first))):
            kind = _compare(info, first[number], second[number:number + 1])
            if kind is not None:
                counts["samples"] += 1
                counts["refused"] += kind == "refused"
    print(f"{counts['samples']} samples, {counts['refused']} refused")


def _samples(info, dtype, seed):
    torch.manual_seed(seed)
    random.seed(seed)
    return list(info.sample_inputs("cpu", dtype, requires_grad=False))


def _tensors(sample):
    leaves = pytree.tree_leaves(((sample.input, *sample.args), sample.kwargs))
    return [x.detach() for x in leaves if isinstance(x, torch.Tensor)]


def _clones(tensors):
    return [x.clone() for x in tensors]


def _compare(info, sample, others) -> str | None:
    """ "equal" or "refused"; None where a sample says nothing of ours."""
    tensors = _tensors(sample)
    if not tensors or any(x.is_complex() or x.layout is not torch.strided for x in tensors):
        return None
    model = Operator(info.op, sample).eval()
    try:
        if _difference(_run(model, tensors, 1), _run(model, tensors, 2)):
            return None  # random numbers
    except Exception:  # eager's own, of all kinds
        return None
    try:
        compiled = moe_mlir.compile(model, tuple(_clones(tensors)), pack=False)
    except (moe_mlir.MoeError, TraceFailed, TypeError) as error:
        _require_refusal(info, error)
        return "refused"
    for inputs in (tensors, *map(_tensors, others)):
        if [(x.shape, x.dtype) for x in inputs] == [(x.shape, x.dtype) for x in tensors]:
            _require_same(info, model, compiled, inputs)
    return "equal"


def _require_refusal(info, error) -> None:
    text = str(error)
    ours = isinstance(error, TraceFailed) or text.startswith(("cannot import the model:", "expected "))
    if info.formatted_name not in REFUSED or not ours or "please report it" in text:
        raise SystemExit(f"error: {info.formatted_name} is not compiled: {type(error).__name__}: {text}")


def _run(model, tensors, seed=0):
    """The results, and the inputs after the call."""
    torch.manual_seed(seed)
    inputs = _clones(tensors)
    with torch.no_grad():
        return model(*inputs), inputs


def _require_same(info, model, compiled, tensors) -> None:
    try:
        expected = _run(model, tensors)
    except Exception as error:  # eager's own, of all kinds
        expected = error
    try:
        found = _run(compiled, tensors)
    except Exception:
        if not isinstance(expected, Exception):
            raise
        return
    if isinstance(expected, Exception):
        raise SystemExit(f"error: {info.formatted_name}: eager refuses this: {expected}")
    difference = _difference(found, expected)
    if difference:
        raise SystemExit(f"error: {info.formatted_name} of {[tuple(x.shape) for x in tensors]}: {difference}")


def _difference(found, expected) -> str:
    (ours, structure), (eager, wanted) = pytree.tree_flatten(found), pytree.tree_flatten(expected)
    if str(structure) != str(wanted):
        return f"expected {wanted}, found {structure}"
    for one, other in zip(ours, eager, strict=True):
        if not isinstance(other, torch.Tensor):
            if type(one) is not type(other) or repr(one) != repr(other):
                return f"expected {other!r}, found {one!r}"
            continue
        room = TOLERANCES.get(other.dtype, 0)
        largest = other.double().nan_to_num(0, 0, 0).abs().max().item() if room and other.numel() else 0
        try:
            torch.testing.assert_close(one, other, rtol=room, atol=room * max(1, largest), equal_nan=True)
        except AssertionError as error:
            return str(error)
    return ""


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main(*map(int, sys.argv[1:4]))
