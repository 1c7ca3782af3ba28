"""The main job: train a small MoE language model, compile it, run it, compare.

`python -m moe_mlir_bench.demo` does all of it; the files follow the road: data,
model, train, then compare (import, compile, run, measure) and report.
"""
