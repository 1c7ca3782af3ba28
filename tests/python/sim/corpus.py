"""The corpus of correct kernels: inputs from a seed, launch, reference.

Every case names a kernel of ``tests/Simulator/corpus/ptx``, how it is launched,
and a function that makes its arguments and the expectation on each output.
Sizes are odd on purpose: a bound that is off by one must show. Cases stand in
the order of these modules, which register them.
"""

# isort: off
import corpus_threads  # noqa: F401
import corpus_matrices  # noqa: F401
import corpus_async  # noqa: F401
# isort: on
from corpus_case import CASES

__all__ = ["CASES"]
