"""Models as functions of compiled code: `moe_mlir.compile`."""
