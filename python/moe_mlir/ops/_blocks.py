"""Blocks of queries for the backwards of the mixing ops.

A backward recomputes the weights from the saved log-sum-exp, one block of
queries at a time, so that its memory is linear in the number of tokens.
"""

# Rows of the weight matrix that are held at once, of each sequence and head.
QUERY_BLOCK = 128


def query_blocks(queries):
    """Slices that cover range(queries)."""
    for start in range(0, queries, QUERY_BLOCK):
        yield slice(start, min(start + QUERY_BLOCK, queries))


def without_padding(x, mask):
    """x in float32 with masked tokens (dim -2) set to 0: their garbage must not leak (E11)."""
    x = x.float()
    return x if mask is None else x.masked_fill(~mask[..., None], 0.0)
