"""Proofs on the real model, before training.

Documents of one row do not see each other, and the parts of a row that is shared out do.

Shape letters: B rows, L local tokens, H hidden features.
"""

from dataclasses import replace

import torch
import torch.distributed as dist

from ndtrain.data.batch import IGNORED, MicroBatch
from ndtrain.errors import MeshError
from ndtrain.parallel.context import SequenceSplit
from ndtrain.plan.families import FAMILIES
from ndtrain.train.assemble import Engine
from ndtrain.train.policy import compute_dtype
from ndtrain.train.step import micro_batch_loss

_DOCUMENT = 8
"""Tokens of each of the probe's two documents, before rounding up to what the mesh needs."""
_SPLIT_ROW = 64
"""Tokens of a row that is read whole and in parts, likewise."""
_SPLIT_IN_FP32, _SPLIT_IN_BF16 = 1e-4, 0.1
"""Largest distance of a token's states, relative to their size, by the dtype of the products."""


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


@torch.no_grad()
def check_split_rows(engine: Engine) -> None:
    """Read one row shared out over the cp ranks and by every rank alone; the states must agree.

    Only for architectures that no test holds to this. Every rank calls it.

    Raises:
        MeshError: tokens meet in a layer that the ranks do not exchange anything for.
    """
    config = engine.causal_lm.config.get_text_config()
    if engine.mesh.plan.cp == 1 or config.model_type in FAMILIES:
        return
    length = -(-_SPLIT_ROW // engine.split.row_multiple) * engine.split.row_multiple
    ids = torch.arange(length)[None] * 7 % min(int(config.vocab_size), 64)
    row = torch.zeros_like(ids)
    batch = MicroBatch(ids, ids.roll(-1, 1), torch.arange(length)[None], row, row[:, 0])
    alone = replace(engine, split=SequenceSplit(slices=engine.split.slices))
    engine.trainable.eval()
    part, whole = (_hidden_states(one, batch) for one in (engine, alone))
    engine.trainable.train()
    device = engine.mesh.device
    wanted = whole[:, engine.split.columns(length, engine.split.rank, device)]
    distance = (part - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-12)
    in_fp32 = compute_dtype(engine.recipe, device) == torch.float32
    # one token that is routed to another expert by rounding may not decide in bf16
    found = distance.max() if in_fp32 else distance.median()
    dist.all_reduce(found, dist.ReduceOp.MAX)
    allowed = _SPLIT_IN_FP32 if in_fp32 else _SPLIT_IN_BF16
    if not found.item() <= allowed:
        raise MeshError(
            f"context_parallel_size is {engine.mesh.plan.cp}, but tokens of '{config.model_type}' "
            f"meet outside attention: on the mesh its hidden states are off by {found.item():.1g} "
            f"of their size, {allowed:g} is allowed.",
            where="context_parallel_size",
            hint="Use context_parallel_size: 1; dp_shard_size works.",
        )


def _hidden_states(engine: Engine, batch: MicroBatch) -> torch.Tensor:
    """What the base model gives for this rank's tokens, fp32 [B, L, H]."""
    taken: list[torch.Tensor] = []
    hook = engine.causal_lm.base_model.register_forward_hook(
        lambda _, __, output: taken.append(output.last_hidden_state.detach().float())
    )
    try:
        micro_batch_loss(engine, batch, 0)
    finally:
        hook.remove()
    return taken[0]
