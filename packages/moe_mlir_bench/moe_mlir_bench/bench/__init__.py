"""The benchmark: `python -m moe_mlir_bench.bench`, or `./bench` from the root."""
