"""A model of the time of GPU kernels, from their machine code and the simulator's counters.

No GPU takes part. `chips` has the rates of the chips with their sources, `sass` reads
machine code, `timeline` walks through it as one warp would, `kernel_time` puts the terms
together, `calls` has the calls of this package at named sizes, `published` kernels of
others whose times are known.
"""
