"""Which prepared rows make up the training set: held-out rows, shares of datasets, repeats."""

from collections.abc import Sequence

import numpy as np

from ndtrain.data.token_rows import Index
from ndtrain.errors import DataError
from ndtrain.recipe.schema import DatasetSpec


def split_rows(count: int, held_out: float, seed: int) -> tuple[Index, Index]:
    """Numbers of the training rows and of the held-out rows, both ascending.

    Args:
        held_out: a share below 1, or a count.

    Raises:
        DataError: nothing is left to train on.
    """
    number = round(count * held_out) if held_out < 1 else int(held_out)
    if held_out > 0:
        number = max(1, number)
    if number >= count:
        raise DataError(
            f"val_set_size {held_out:g} holds out {number} of {count} rows: none is left to train.",
            where="val_set_size",
            hint=f"Use a share below 1, or a count below {count}.",
        )
    chosen = np.zeros(count, dtype=bool)
    chosen[np.random.default_rng([seed, 1]).permutation(count)[:number]] = True
    return np.flatnonzero(~chosen), np.flatnonzero(chosen)


def mix_rows(parts: Sequence[Index], specs: Sequence[DatasetSpec], seed: int) -> Index:
    """One order of row numbers, with each dataset present as its entry asks.

    `samples` is an exact count. `weight` is a share relative to the other datasets without
    `samples` (1 where it is not given), of as many rows as they have together. A dataset asked
    for more than it has gives whole copies and a random rest.
    """
    counts = [len(part) for part in parts]
    if any(spec.weight is not None for spec in specs):
        free = [place for place, spec in enumerate(specs) if spec.samples is None]
        weights = {place: specs[place].weight or 1.0 for place in free}
        total = sum(counts[place] for place in free)
        for place in free:
            share = weights[place] / sum(weights.values())
            counts[place] = max(1, round(total * share)) if len(parts[place]) else 0
    for place, spec in enumerate(specs):
        if spec.samples is not None and len(parts[place]):
            counts[place] = spec.samples
    chosen = [
        _draw(part, count, np.random.default_rng([seed, 2, place]))
        for place, (part, count) in enumerate(zip(parts, counts, strict=True))
    ]
    return np.concatenate(chosen) if chosen else np.zeros(0, dtype=np.int64)


def _draw(part: Index, count: int, generator: np.random.Generator) -> Index:
    """`count` of the rows: all of them as often as they fit, and a random rest, in order."""
    if count == len(part):
        return part
    copies, rest = divmod(count, len(part))
    extra = np.sort(generator.permutation(len(part))[:rest])
    return np.concatenate([*([part] * copies), part[extra]])
