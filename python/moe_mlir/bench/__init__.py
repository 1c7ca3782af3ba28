"""The benchmark: `python -m moe_mlir.bench`, or `./bench` from the root."""
