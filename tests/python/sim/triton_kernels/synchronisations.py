"""Mutants of Triton's kernels that lack a synchronisation."""

from mutate import mutants

OPERATORS = ("delete-", "skip-mbarrier-wait", "vote-instead-of-barrier", "wait-for-one-", "relax-order",
             "fence-for-the-block-only")


def deletions(case):
    """The mutants of a kernel with one synchronisation less."""
    return [m for m in mutants(case.text, case.kernel) if m.operator.startswith(OPERATORS)]
