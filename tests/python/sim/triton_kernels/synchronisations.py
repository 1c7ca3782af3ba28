"""Mutants of Triton's kernels that lack a synchronisation."""

import functools

from mutate import mutants

from .redundancy import why_redundant

OPERATORS = ("delete-", "skip-mbarrier-wait", "vote-instead-of-barrier", "wait-for-one-group-less",
             "wait-for-one-wgmma-less", "relax-order", "fence-for-the-block-only")


def deletions(case):
    """The mutants of a kernel with one synchronisation less."""
    return [m for m in mutants(case.text, case.kernel) if m.operator.startswith(OPERATORS)]


@functools.cache
def proof(case, key):
    """Why a mutant is a correct kernel, or None."""
    mutant = next(m for m in deletions(case) if m.key == key)
    return why_redundant(case.text, case.kernel, mutant)
