"""`sample_prompts:`: short answers of the model in training, so that progress can be read.

The growing rows run through the sharded model as training does: every rank calls, every rank
gets the same token. Nothing is cached between tokens, which is slow and needs no second model.

Shape letters: B prompts, S tokens of a row, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.fsdp import register_fsdp_forward_method

from ndtrain.data.batch import IGNORED, MicroBatch
from ndtrain.data.instruction_template import is_instruction_template
from ndtrain.errors import DataError, RecipeError
from ndtrain.model.generate import encode_prompt, end_tokens
from ndtrain.model.tokenizer import load_tokenizer
from ndtrain.parallel.context import split_rows
from ndtrain.plan.model_source import ModelSource
from ndtrain.recipe.schema import Recipe
from ndtrain.train.assemble import Engine
from ndtrain.train.stored_run import set_chat_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_NEW_TOKENS = 48


@dataclass(frozen=True)
class Prompt:
    """A prompt as the user wrote it and as the model sees it."""

    text: str
    ids: tuple[int, ...]


class Sampler:
    """Answers the recipe's prompts with the model on its mesh; all ranks call it together.

    Args:
        engine: the model; its methods for single tokens are made known to the sharding.
        source: the base model, for its tokenizer.

    Raises:
        RecipeError: the chat template refuses a prompt.
    """

    def __init__(self, engine: Engine, source: ModelSource) -> None:
        self._engine = engine
        self._tokenizer = load_tokenizer(source, engine.recipe)
        set_chat_template(self._tokenizer, engine.recipe)
        self._prompts = encode_prompts(engine.recipe, self._tokenizer)
        self._ends = set(end_tokens(engine.causal_lm, self._tokenizer) or ())
        # without it, sharded weights outside the blocks would not be gathered for these methods
        register_fsdp_forward_method(engine.trainable, "logits_at")
        register_fsdp_forward_method(engine.trainable.head, "logits")

    @torch.no_grad()
    def answer(self, *, stopped: Callable[[], object | None]) -> dict[str, str] | None:
        """The likeliest answer to each prompt; None when a stop cuts them off.

        Args:
            stopped: whether the run stops, the same on every rank.
        """
        rows = [list(prompt.ids) for prompt in self._prompts]
        length = self._padded(max(map(len, rows)) + MAX_NEW_TOKENS)
        open_rows = set(range(len(rows)))
        self._engine.trainable.eval()
        cut_off = False
        for _ in range(MAX_NEW_TOKENS):
            cut_off = stopped() is not None
            if cut_off:
                break
            tokens = self._next_tokens(rows, length)
            for row in sorted(open_rows):
                rows[row].append(tokens[row])
                if tokens[row] in self._ends:
                    open_rows.remove(row)
            if not open_rows:
                break
        self._engine.trainable.train()
        if cut_off:
            return None
        return {
            prompt.text: str(
                self._tokenizer.decode(row[len(prompt.ids) :], skip_special_tokens=True)
            )
            for prompt, row in zip(self._prompts, rows, strict=True)
        }

    def _padded(self, length: int) -> int:
        """One length for all tokens of an answer, so that compiled kernels are reused."""
        multiple = self._engine.split.row_multiple
        wanted = -(-length // self._engine.recipe.pad_to_multiple_of)
        wanted *= self._engine.recipe.pad_to_multiple_of
        return -(-wanted // multiple) * multiple

    def _next_tokens(self, rows: list[list[int]], length: int) -> list[int]:
        """The likeliest next token of every row, the same on every rank."""
        engine = self._engine
        device, split = engine.mesh.device, engine.split
        part, attention = split_rows(as_batch(rows, length), split)
        part, attention = part.to(device), attention.to(device)
        last = torch.tensor([len(row) - 1 for row in rows], device=device)
        columns = split.columns(length, split.rank, device)
        here = columns[None, :] == last[:, None]
        logits = engine.trainable.logits_at(part, attention, here.int().argmax(1)).float()
        first = engine.trainable.vocabulary.first
        ids = torch.arange(first, first + logits.shape[1], device=device)
        # rows of the embedding beyond the tokenizer stand for no text
        logits = logits.masked_fill(ids[None] >= len(self._tokenizer), -torch.inf)
        best, place = logits.max(1)
        best = best.masked_fill(~here.any(1), -torch.inf)
        return agree_on_tokens(best, ids[place])


def encode_prompts(recipe: Recipe, tokenizer: "PreTrainedTokenizerBase") -> tuple[Prompt, ...]:
    """The prompts as conversations; only the end of a prompt that is too long is kept.

    Raises:
        RecipeError: the chat template refuses one.
    """
    prompts = []
    for number, text in enumerate(recipe.sample_prompts):
        messages = [{"role": "user", "content": text}]
        # rows of the instruction form have no such message
        in_turns = not is_instruction_template(tokenizer.chat_template)
        if recipe.default_system_message and in_turns:
            messages.insert(0, {"role": "system", "content": recipe.default_system_message})
        try:
            ids = encode_prompt(tokenizer, messages)[0].tolist()
        except DataError as error:
            raise RecipeError(error.message, where=f"sample_prompts[{number}]") from error
        prompts.append(Prompt(text, tuple(ids[-max(1, recipe.sequence_len - MAX_NEW_TOKENS) :])))
    return tuple(prompts)


def as_batch(rows: list[list[int]], length: int) -> MicroBatch:
    """Rows of one document each, followed by padding that nothing attends to."""
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    documents = torch.ones_like(ids)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(row)
        documents[number, : len(row)] = 0
    return MicroBatch(
        input_ids=ids,
        targets=torch.full_like(ids, IGNORED),
        positions=torch.arange(length).expand(len(rows), length).contiguous(),
        documents=documents,
        row_ids=torch.arange(len(rows)),
    )


def agree_on_tokens(best: torch.Tensor, ids: torch.Tensor) -> list[int]:
    """The tokens with the highest logits over all ranks; ties go to the smallest id.

    Args:
        best: this rank's highest logit of each row [B]; minus infinity where it holds none.
        ids: their tokens [B].
    """
    own = torch.stack([best.double(), ids.double()])
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    logits, tokens = torch.stack(parts, 1)
    is_best = logits == logits.amax(0)
    chosen = tokens.masked_fill(~is_best, torch.inf).amin(0)
    return [int(token) for token in chosen.tolist()]
