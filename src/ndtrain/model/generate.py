"""Answers prompts with a model in memory: greedy by default, sampled on request, streamed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ndtrain.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Message = Mapping[str, str]


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: 0 takes the likeliest token.
        top_p: draw from the likeliest tokens that together have this probability.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 42

    def arguments(self) -> dict[str, Any]:
        """The same in transformers' words."""
        if self.temperature == 0:
            return {
                "max_new_tokens": self.max_new_tokens,
                "do_sample": False,
                "temperature": None,
                "top_p": None,
                "top_k": None,
            }
        return {
            "max_new_tokens": self.max_new_tokens,
            "do_sample": True,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": 0,
        }


@dataclass(frozen=True)
class Answer:
    """What a model said; cut off where it had not come to its end."""

    text: str
    is_cut_off: bool


class PieceStreamer:
    """Hands out an answer in readable pieces while it grows; transformers calls it with tokens.

    A piece is held back while the bytes of its last character are incomplete.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", on_text: Callable[[str], None]
    ) -> None:
        self._tokenizer = tokenizer
        self._on_text = on_text
        self._tokens: list[int] = []
        self._shown = ""
        self._prompt_seen = False

    def put(self, tokens: torch.Tensor) -> None:
        """Take the prompt (first call) or the next token."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self._tokens += tokens.reshape(-1).tolist()
        text = self._text()
        if not text.endswith("�"):
            self._show(text)

    def end(self) -> None:
        """Show what was held back."""
        self._show(self._text())

    def _text(self) -> str:
        return str(self._tokenizer.decode(self._tokens, skip_special_tokens=True))

    def _show(self, text: str) -> None:
        if text.startswith(self._shown) and len(text) > len(self._shown):
            self._on_text(text[len(self._shown) :])
            self._shown = text


def encode_prompt(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message]
) -> torch.Tensor:
    """Token ids [1, S] of a conversation; without a chat template, of the last text as it is.

    Raises:
        DataError: the template refuses the conversation, or nothing is left to continue.
    """
    if tokenizer.chat_template is None:
        ids = tokenizer(str(messages[-1]["content"]))["input_ids"]
    else:
        from jinja2 import TemplateError

        try:
            ids = tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=True,
                return_dict=True,
            )["input_ids"]
        except (TemplateError, TypeError, KeyError) as error:
            raise DataError(
                f"the chat template refuses this conversation: {error}", where="--prompt"
            ) from error
    if not ids:
        raise DataError("the prompt is empty.", where="--prompt", hint="Give it some text.")
    return torch.tensor([ids])


@torch.inference_mode()
def answer(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    sampling: Sampling,
    on_text: Callable[[str], None] | None = None,
) -> Answer:
    """The model's next turn.

    Args:
        model: in memory, in evaluation mode.
        tokenizer: with the chat template that the model was trained on.
        messages: the conversation so far.
        sampling: how tokens are chosen.
        on_text: receives the answer piece by piece.
    """
    ids = encode_prompt(tokenizer, messages).to(model.device)
    torch.manual_seed(sampling.seed)
    streamer = PieceStreamer(tokenizer, on_text) if on_text else None
    ends = end_tokens(model, tokenizer)
    tokens = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        streamer=streamer,
        eos_token_id=ends,
        pad_token_id=tokenizer.pad_token_id,
        use_cache=True,
        **sampling.arguments(),
    )
    said = tokens[0, ids.shape[1] :].tolist()
    is_cut_off = len(said) == sampling.max_new_tokens and said[-1] not in (ends or ())
    return Answer(str(tokenizer.decode(said, skip_special_tokens=True)), is_cut_off)


def end_tokens(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> list[int] | None:
    """Every token that ends an answer, by the model's files and by the tokenizer."""
    known = model.generation_config.eos_token_id if model.generation_config else None
    ends = {known} if isinstance(known, int) else set(known or ())
    if tokenizer.eos_token_id is not None:
        ends.add(int(tokenizer.eos_token_id))
    return sorted(ends) or None
