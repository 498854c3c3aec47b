"""Proofs on the real model, before training.

Documents of one row do not see each other, the parts of a row that is shared out do, and no token
sees a later one.

Shape letters: B rows, S tokens of a row, L local tokens, H hidden features.
"""

from dataclasses import replace

import torch
import torch.distributed as dist

from ndtrain.data.batch import IGNORED, MicroBatch
from ndtrain.errors import MeshError
from ndtrain.parallel.context import SequenceSplit
from ndtrain.plan.families import FAMILIES, USE_A_TESTED_ONE
from ndtrain.train.assemble import Engine
from ndtrain.train.policy import compute_dtype
from ndtrain.train.step import micro_batch_loss

_DOCUMENT = 8
"""Tokens of each of the probe's two documents, before rounding up to what the mesh needs."""
_STATES_ROW = 64
"""Tokens of a row whose hidden states are compared, likewise."""
_STATES_IN_FP32, _STATES_IN_BF16 = 1e-4, 0.1
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
def check_untested(engine: Engine) -> None:
    """Hold an architecture that no test compares to what every model here must do.

    No token sees a later one; and where ranks share a row, its states are those of the row read by
    one rank alone. Every rank calls it.

    Raises:
        MeshError: tokens see later ones, or meet where the ranks exchange nothing; or it cannot
            be computed in the dtype of the run.
    """
    config = engine.causal_lm.config.get_text_config()
    if config.model_type in FAMILIES:
        return
    length = -(-_STATES_ROW // engine.split.row_multiple) * engine.split.row_multiple
    ids = torch.arange(length)[None] * 7 % min(int(config.vocab_size), 64)
    columns = engine.split.columns(length, engine.split.rank, engine.mesh.device)
    alone = replace(engine, split=SequenceSplit(slices=engine.split.slices))
    engine.trainable.eval()
    try:
        states = _hidden_states(engine, ids)
        whole = states if engine.mesh.plan.cp == 1 else _hidden_states(alone, ids)[:, columns]
        ids[0, -1] = (ids[0, -1] + 1) % int(config.vocab_size)
        moved = _hidden_states(engine, ids)
    finally:
        engine.trainable.train()
    early = columns < length - 1
    in_fp32 = compute_dtype(engine.recipe, engine.mesh.device) == torch.float32
    allowed = _STATES_IN_FP32 if in_fp32 else _STATES_IN_BF16
    found = _distance(moved[:, early], states[:, early], worst=in_fp32)
    if not found <= allowed:
        raise MeshError(
            f"tokens of '{config.model_type}' see later ones: changing the last token of a row "
            f"moved hidden states before it by {found:.1g} of their size.",
            where="base_model",
            hint=USE_A_TESTED_ONE,
        )
    found = _distance(states, whole, worst=in_fp32)
    if not found <= allowed:
        raise MeshError(
            f"context_parallel_size is {engine.mesh.plan.cp}, but tokens of '{config.model_type}' "
            f"meet outside attention: on the mesh its hidden states are off by {found:.1g} of "
            f"their size, {allowed:g} is allowed.",
            where="context_parallel_size",
            hint="Use context_parallel_size: 1; dp_shard_size works.",
        )


def _distance(states: torch.Tensor, wanted: torch.Tensor, *, worst: bool) -> float:
    """How far tokens' states [B, L, H] are apart, relative to their size, on any rank.

    Args:
        worst: of the worst token, else of the middle one: in bf16 rounding may route a token to
            another expert.
    """
    distance = (states - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-12)
    found = distance.max() if worst else distance.median()
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found.item())


def _hidden_states(engine: Engine, ids: torch.Tensor) -> torch.Tensor:
    """What the base model gives for this rank's tokens of one row [1, S], fp32 [1, L, H]."""
    row = torch.zeros_like(ids)
    places = torch.arange(ids.shape[1])[None]
    batch = MicroBatch(ids.clone(), ids.roll(-1, 1), places, row, row[:, 0])
    taken: list[torch.Tensor] = []
    hook = engine.causal_lm.base_model.register_forward_hook(
        lambda _, __, output: taken.append(output.last_hidden_state.detach().float())
    )
    try:
        micro_batch_loss(engine, batch, 0)
    except RuntimeError as error:
        # some architectures make constants in fp32 that they multiply with whatever comes
        if "dtype" not in str(error):
            raise
        name = str(compute_dtype(engine.recipe, engine.mesh.device)).removeprefix("torch.")
        raise MeshError(
            f"'{engine.causal_lm.config.model_type}' cannot be computed in {name}: {error}.",
            where="bf16",
            hint="Set bf16: false.",
        ) from error
    finally:
        hook.remove()
    return taken[0]
