"""Whether several query heads share one key head, as torch's attention functions ask it."""

import torch


def has_grouped_heads(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether `query` has more heads than `key`; in both, heads are dimension 1.

    In a model whose layers differ in heads, the compiler makes their number a symbol, and so a
    comparison of two of them; the attention functions take a plain bool only. To branch on the
    comparison makes the compiler settle it, with a graph for either answer.
    """
    if query.shape[1] != key.shape[1]:  # noqa: SIM103  the branch is what settles it
        return True
    return False
