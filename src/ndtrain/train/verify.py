"""A proof that an export is what was trained: plain libraries load it and compute the same logits.

Shape letters: S tokens of the probe, V vocabulary, T local tokens, W local part of the vocabulary.
"""

import contextlib
import io
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ndtrain.data.batch import MicroBatch
from ndtrain.errors import CheckpointError
from ndtrain.model.adapters import base_bits, quantised_names
from ndtrain.model.attention_probe import short_window
from ndtrain.model.model_folder import base_dtype
from ndtrain.model.quantised import round_linears
from ndtrain.model.row_files import stored_tensors
from ndtrain.model.weight_files import find_weight_files
from ndtrain.parallel.tensor import local_vocabulary
from ndtrain.plan.model_source import ModelSource
from ndtrain.recipe.schema import Recipe
from ndtrain.train.assemble import Engine
from ndtrain.train.policy import compute_dtype
from ndtrain.train.step import micro_batch_loss

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

_TOKENS = 16
_LONGEST = 1024
_BLOCK_MATRICES = 12
"""Weights of a usual block, in squares of the hidden size."""
_PRODUCTS = 4e11
"""Tokens times weights that one processor multiplies in some seconds."""
_LOGITS = 2**27
"""Numbers in fp32 that are half a GiB."""
_IN_FP32, _IN_BF16 = 1e-3, 0.1
"""Largest difference, relative to the logits' spread, by the dtype the run computes in. Unrelated
logits differ by 1.4."""


@dataclass(frozen=True)
class Verdict:
    """What the check found.

    Attributes:
        difference: of the logits, relative to their spread; None when it was not computed.
        reason: why not.
        rounded_to: dtype of the export, where that is shorter than the run's.
    """

    difference: float | None
    reason: str = ""
    rounded_to: str = ""

    def __str__(self) -> str:
        if self.difference is None:
            return f"The export was not reloaded: {self.reason}."
        rounded = (
            f", whose weights were rounded to {self.rounded_to} likewise,"
            if self.rounded_to
            else ""
        )
        if self.difference == 0:
            return f"The export was reloaded: its logits equal the run's{rounded} bit for bit."
        return (
            f"The export was reloaded: its logits differ from the run's{rounded} by "
            f"{self.difference:.1e} of their size."
        )


def probe_batch(engine: Engine) -> MicroBatch:
    """One row of one document, longer than the model's window where that is cheap."""
    tokens = probe_length(engine.causal_lm.config, engine.recipe.sequence_len)
    length = -(-tokens // engine.split.row_multiple) * engine.split.row_multiple
    vocabulary = int(engine.causal_lm.config.get_text_config().vocab_size)
    ids = (torch.arange(length)[None] * 7 + 3) % vocabulary
    return MicroBatch(
        input_ids=ids,
        targets=ids.roll(-1, 1),
        positions=torch.arange(length)[None],
        documents=torch.zeros_like(ids),
        row_ids=torch.zeros(1, dtype=torch.long),
    )


def probe_length(config: "PreTrainedConfig", sequence_len: int) -> int:
    """Tokens that show a window at work, or a few where no window does or they cost too much."""
    text = config.get_text_config()
    window = short_window(text, sequence_len)
    if window is None:
        return _TOKENS
    tokens = window[1] + _TOKENS
    weights = _BLOCK_MATRICES * int(text.num_hidden_layers) * int(text.hidden_size) ** 2
    cheap = tokens * weights <= _PRODUCTS and tokens * int(text.vocab_size) <= _LOGITS
    return tokens if tokens <= _LONGEST and cheap else _TOKENS


@torch.no_grad()
def sharded_logits(engine: Engine) -> torch.Tensor | None:
    """Logits [S, V] of the probe from the model on its mesh, on the main rank; all ranks call it.

    Scaled and capped, as its losses read them.
    """
    taken: list[torch.Tensor] = []
    head: nn.Module = engine.causal_lm.get_output_embeddings()
    hook = head.register_forward_hook(lambda _, __, logits: taken.append(logits.detach()))
    batch = probe_batch(engine)
    engine.trainable.eval()
    try:
        micro_batch_loss(engine, batch, 0)
    finally:
        hook.remove()
        engine.trainable.train()
    mesh, length = engine.mesh, batch.input_ids.shape[1]
    total = int(engine.causal_lm.config.get_text_config().vocab_size)
    first, _ = local_vocabulary(total, mesh.tp)
    own: tuple[torch.Tensor, int, torch.Tensor] | None = None
    if mesh.data_rank == 0:
        columns = engine.split.columns(length, engine.split.rank, torch.device("cpu"))
        logits = torch.cat(taken).flatten(0, -2).float()
        own = (columns, first, engine.trainable.head.shape(logits).cpu())
    gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(own, gathered, dst=0)
    if gathered is None:
        return None
    whole = torch.full((length, total), torch.nan)
    for one in gathered:
        if one is not None:
            columns, start, part = one
            whole[columns[:, None], torch.arange(start, start + part.shape[1])] = part
    return whole


@torch.no_grad()
def reloaded_logits(
    folder: Path, source: ModelSource, ids: torch.Tensor, recipe: Recipe
) -> torch.Tensor:
    """The same from the folder, through plain transformers (and peft) on the CPU in fp32."""
    from transformers import AutoModelForCausalLM

    is_adapter = (folder / "adapter_config.json").is_file()
    model: Any
    # transformers draws its own progress bar, out of step with what ndtrain prints
    with contextlib.redirect_stderr(io.StringIO()):
        if is_adapter:
            model = _adapter_on_base(folder, source, recipe)
        else:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits: torch.Tensor = model.eval()(input_ids=ids, use_cache=False).logits
    return logits[0].float()


def verify_export(engine: Engine, folder: Path, source: ModelSource) -> Verdict | None:
    """Compare the model on its mesh with what was written; every rank calls it.

    An export may be stored in a shorter dtype than it was trained in, and a young run's updates are
    partly smaller than that dtype's spacing. So the trained weights are rounded likewise first, in
    place: afterwards the model is the one that was stored.

    Returns:
        What was found, on the main rank.

    Raises:
        CheckpointError: on the main rank, when they differ.
    """
    rounded_to = ""
    if engine.recipe.adapter is None:
        stored = _stored_dtype(folder, source)
        if any(one.dtype.itemsize > stored.itemsize for one in engine.model.parameters()):
            rounded_to = str(stored).removeprefix("torch.")
        round_weights(engine.model, stored)
    logits = sharded_logits(engine)
    if logits is None:
        return None
    if (reason := _obstacle(folder, source)) is not None:
        return Verdict(None, reason)
    ids = probe_batch(engine).input_ids
    again = reloaded_logits(folder, source, ids, engine.recipe)
    difference = float((logits - again).norm() / (again - again.mean()).norm().clamp_min(1e-12))
    in_fp32 = compute_dtype(engine.recipe, engine.mesh.device) == torch.float32
    allowed = _IN_FP32 if in_fp32 else _IN_BF16
    if not difference <= allowed:
        raise CheckpointError(
            f"the export computes other logits than the trained model: they differ by "
            f"{difference:.2g} of their size, {allowed:g} is allowed.",
            where=str(folder),
            hint="Do not use it; the checkpoints are whole. Report this with `ndtrain env`.",
        )
    return Verdict(difference, rounded_to=rounded_to)


@torch.no_grad()
def round_weights(model: "nn.Module", dtype: torch.dtype) -> None:
    """Round every parameter, or this rank's part of it, to what `dtype` can hold, in place."""
    for parameter in model.parameters():
        part = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        part.copy_(part.to(dtype))


def _stored_dtype(folder: Path, source: ModelSource) -> torch.dtype:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return base_dtype(ModelSource("folder", str(folder), folder, config))


def _adapter_on_base(folder: Path, source: ModelSource, recipe: Recipe) -> Any:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32)
    rows = [
        one.shape[0]
        for key, one in stored_tensors([folder / "adapter_model.safetensors"]).items()
        if ".lora_" not in key and key.endswith("embed_tokens.weight")
    ]
    if rows and rows[0] != base.get_input_embeddings().weight.shape[0]:
        base.resize_token_embeddings(rows[0], mean_resizing=False)
    if (bits := base_bits(recipe)) is not None:
        round_linears(base, quantised_names(base, recipe, bits), bits)
    return PeftModel.from_pretrained(base, str(folder))


def _obstacle(folder: Path, source: ModelSource) -> str | None:
    """Why the folder cannot be reloaded here."""
    paths = []
    if (folder / "adapter_config.json").is_file():
        if source.path is None:
            return "its base has random weights that are stored nowhere"
        paths = find_weight_files(source.path)
    else:
        paths = find_weight_files(folder)
    elements = sum(
        one.row_bytes // one.dtype.itemsize * (one.shape[0] if one.shape else 1)
        for one in stored_tensors(paths).values()
    )
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if 4 * elements > memory // 4:
        return f"{4 * elements / 2**30:.0f} GiB in fp32 are too much for this machine's memory"
    return None
