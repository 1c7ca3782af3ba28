"""Proof and speed of the kernels on a GPU, on a machine without a compiler, in eight minutes.

    python -m moe_mlir_bench.gpu_check pack FOLDER     here: kernels and what runs them
    python FOLDER/run.py                         there: every check, then times

What comes back is the folder gpu-check-report: report.jsonl has one line of JSON a case,
written when the case ends; failures/ the tensors of what is wrong; instructions/ what the
hardware answered to chosen operands, which

    python -m moe_mlir_bench.gpu_check fixtures gpu-check-report

makes tests of the simulator. The groups run in this order, each until its share of the time is
over: `once` (a kernel of each kind), `instructions` (wgmma in every layout, mma, conversions,
functions), `forms` (sizes, unaligned views, graphs, kernels of an older chip), `large` (values
at sizes of models), `times` (against torch, SDPA, grouped_mm and a Triton router) and
`sanitizer` (compute-sanitizer, where there is one). Cases run in a process that is replaced
when one of them spoils it, ends it, or does not end. `run.py --device=sim` rehearses all of it
in the simulator, `--plan` prints the cases and seconds, `--groups=faults` proves that a fault
costs its line.
"""
