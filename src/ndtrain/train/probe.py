"""A proof on the real model, before training: documents of one row do not see each other."""

import torch
import torch.distributed as dist

from ndtrain.data.batch import IGNORED, MicroBatch
from ndtrain.errors import MeshError
from ndtrain.train.assemble import Engine
from ndtrain.train.step import micro_batch_loss

_DOCUMENT = 8
"""Tokens of each of the probe's two documents, before rounding up to what the mesh needs."""


def probe_batch(engine: Engine, first_token: int) -> MicroBatch:
    """One row of two documents; only the second has targets.

    Args:
        engine: the model on its mesh.
        first_token: the token that starts the first document.
    """
    length = 2 * _DOCUMENT
    length = -(-length // engine.split.row_multiple) * engine.split.row_multiple
    vocab_size = int(engine.causal_lm.config.get_text_config().vocab_size)
    ids = torch.arange(length)[None] % min(vocab_size, 64)
    ids[0, 0] = first_token % vocab_size
    documents = (torch.arange(length)[None] >= _DOCUMENT).long()
    positions = torch.cat([torch.arange(_DOCUMENT), torch.arange(length - _DOCUMENT)])[None]
    targets = torch.full((1, length), IGNORED)
    targets[:, _DOCUMENT:-1] = ids[:, _DOCUMENT + 1 :]
    return MicroBatch(ids, targets, positions, documents, torch.zeros(1, dtype=torch.long))


@torch.no_grad()
def check_isolation(engine: Engine) -> None:
    """Change a token of the first document; the second one's loss must not move.

    Every rank calls it.

    Raises:
        MeshError: documents see each other.
    """
    engine.trainable.eval()
    losses = []
    for token in (1, 2):
        total = micro_batch_loss(engine, probe_batch(engine, token), 0)
        dist.all_reduce(total, group=engine.mesh.loss)
        losses.append(total.item())
    engine.trainable.train()
    config = engine.causal_lm.config.get_text_config()
    # experts multiply the tokens routed to them together, so only rounding may differ
    experts = any("expert" in name for name in config.to_dict())
    allowed = 1e-5 * abs(losses[0]) if experts else 0.0
    if not abs(losses[0] - losses[1]) <= allowed:
        raise MeshError(
            "documents of one packed row see each other: changing the first moved the second's "
            f"loss from {losses[0]} to {losses[1]}.",
            where="sample_packing",
            hint="Set sample_packing: false, and report this model: it must not happen.",
        )
