"""Proof and speed of the kernels on a GPU, on a machine without a compiler.

    python -m moe_mlir.gpu_check pack FOLDER     here: kernels and what runs them
    python FOLDER/run.py                         there: every check, then the benchmark

`cases` lists what is checked, `benchmark` what is timed against torch, SDPA and
a Triton router. `run.py --device=sim` runs the checks in the simulator.
"""
