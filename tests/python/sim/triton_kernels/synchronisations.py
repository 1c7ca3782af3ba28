"""Mutants of Triton's kernels that lack a synchronisation."""

import functools

import mutation
from mutate import mutants

from .redundancy import why_redundant

OPERATORS = ("delete-", "skip-mbarrier-wait", "vote-instead-of-barrier", "wait-for-one-group-less",
             "wait-for-one-wgmma-less", "relax-order", "fence-for-the-block-only")


def deletions(case):
    """The mutants of a kernel with one synchronisation less."""
    return [m for m in mutants(case.text, case.kernel) if m.operator.startswith(OPERATORS)]


@functools.cache
def proof(case, key, traced=True):
    """Why a mutant is a correct kernel, or None; `traced` proofs take some seconds."""
    mutant = next(m for m in deletions(case) if m.key == key)
    trace = functools.partial(traces, case) if traced else None
    return why_redundant(case.text, case.kernel, mutant, trace)


@functools.lru_cache(maxsize=4)
def traces(case):
    """What the launches that judge a mutant do to shared memory."""
    return [case.launch(seed, policy, data=seed, module=case.kernels[case.step],
                        trace_shared=True)[0].shared_trace
            for seed in range(mutation.SEEDS) for policy in mutation.POLICIES]
