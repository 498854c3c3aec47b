"""Who sees whom, block by block: what FlexAttention reads in place of a mask of all pairs.

Shape letters: B rows, Q queries, K keys, M and N blocks of them.
"""

from dataclasses import dataclass

import torch
from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128


@dataclass(frozen=True)
class _Ranges:
    """Smallest and largest number in each block of 128 places [..., M]."""

    lowest: torch.Tensor
    highest: torch.Tensor

    @staticmethod
    def of(numbers: torch.Tensor) -> "_Ranges":
        """Of numbers [..., Q]; the last block is filled up with its last number."""
        missing = -numbers.shape[-1] % BLOCK
        if missing:
            filling = numbers[..., -1:].expand(*numbers.shape[:-1], missing)
            numbers = torch.cat([numbers, filling], -1)
        blocks = numbers.view(*numbers.shape[:-1], -1, BLOCK)
        return _Ranges(blocks.amin(-1), blocks.amax(-1))


def build_block_mask(
    query_columns: torch.Tensor,
    key_columns: torch.Tensor,
    query_documents: torch.Tensor,
    key_documents: torch.Tensor,
    window: int | None,
) -> BlockMask:
    """Same document, not later, within the window.

    Args:
        query_columns: place in the row of each query [Q].
        key_columns: the same of each key [K].
        query_documents: document of each query [B, Q].
        key_documents: document of each key [B, K].
        window: how many tokens back a query sees, itself included; None for all.
    """
    places, key_places = _Ranges.of(query_columns), _Ranges.of(key_columns)
    owners, key_owners = _Ranges.of(query_documents), _Ranges.of(key_documents)
    nearest = places.highest[:, None] - key_places.lowest[None, :]
    some = nearest >= 0
    every = places.lowest[:, None] - key_places.highest[None, :] >= 0
    if window is not None:
        some = some & (places.lowest[:, None] - key_places.highest[None, :] < window)
        every = every & (nearest < window)
    meet = (owners.lowest[:, :, None] <= key_owners.highest[:, None, :]) & (
        key_owners.lowest[:, None, :] <= owners.highest[:, :, None]
    )
    alone = (owners.lowest == owners.highest)[:, :, None]
    key_alone = (key_owners.lowest == key_owners.highest)[:, None, :]
    every = every[None] & meet & alone & key_alone
    some = some[None] & meet & ~every

    def sees(
        row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        distance = query_columns[query] - key_columns[key]
        near = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        return near & (query_documents[row, query] == key_documents[row, key])

    return BlockMask.from_kv_blocks(
        *_listed(some),
        *_listed(every),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(len(query_columns), len(key_columns)),
    )


def _listed(wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers [B, 1, M] and places [B, 1, M, N] of the wanted blocks, those first."""
    order = wanted.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    counts = wanted.sum(-1)
    return counts[:, None].to(torch.int32), order[:, None].to(torch.int32)
