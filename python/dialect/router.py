"""Builds a router with MLIR's Python package, verifies it, and prints it.

    PYTHONPATH=build-dialect python router.py > router.mlir

The router takes tokens [n, 64] and weights [16, 64], and gives the best two of 16 experts for each
token: their gates [n, 2] and indices [n, 2].
"""

from mlir import ir
from mlir.dialects import arith, func, moe, tensor

WIDTH, EXPERTS, K = 64, 16, 2


def build() -> ir.Module:
    any_size = ir.ShapedType.get_dynamic_size()
    f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
    tokens = ir.RankedTensorType.get([any_size, WIDTH], f32)
    weights = ir.RankedTensorType.get([EXPERTS, WIDTH], f32)
    logits = ir.RankedTensorType.get([any_size, EXPERTS], f32)
    gates = ir.RankedTensorType.get([any_size, K], f32)
    indices = ir.RankedTensorType.get([any_size, K], i32)

    module = ir.Module.create()
    with ir.InsertionPoint(module.body):

        @func.FuncOp.from_py_func(tokens, weights, name="route")
        def route(h, weight):
            n = tensor.dim(h, arith.constant(ir.IndexType.get(), 0))
            z = moe.router_logits([logits], h, weight, [tensor.empty([n, EXPERTS], f32)])
            # Destinations give the results their sizes; k is the last one of theirs.
            return tuple(moe.topk_renorm(
                [gates, indices], z, [tensor.empty([n, K], f32), tensor.empty([n, K], i32)],
                kind=moe.ScoreKind.Logits, renorm=True))

    module.operation.verify()
    return module


if __name__ == "__main__":
    with ir.Context(), ir.Location.unknown():
        print(build())
