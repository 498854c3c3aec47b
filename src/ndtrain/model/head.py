"""The output head as a module that gives losses instead of logits.

Shape letters: T tokens, H hidden features, V vocabulary of this rank.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from ndtrain.model.loss import Vocabulary, chunked_loss_sum
from ndtrain.model.trained_tokens import select_tokens
from ndtrain.parallel.dropout import DropoutKeys

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_MULTIPLY_BY_SCALING = {"hyperclovax"}
"""Types that multiply by `logits_scaling`, which Granite divides by."""


class LogitShape:
    """What an architecture does to its logits after the head.

    Args:
        config: the model's configuration.
    """

    def __init__(self, config: "PreTrainedConfig") -> None:
        text = config.get_text_config()
        # Gemma and RecurrentGemma
        caps = (getattr(text, key, None) for key in ("final_logit_softcapping", "logits_soft_cap"))
        self.softcap: float | None = next((float(cap) for cap in caps if cap), None)
        # Cohere and Falcon-H1 multiply
        factors = [getattr(text, key, None) for key in ("logit_scale", "lm_head_multiplier")]
        scaling = getattr(text, "logits_scaling", None)
        if text.model_type in _MULTIPLY_BY_SCALING:
            factors.append(scaling)
        elif scaling is not None:
            factors.append(1.0 / float(scaling))
        self.scale = math.prod(float(factor) for factor in factors if factor is not None)

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Apply scale and cap."""
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


class TokenHead(nn.Module):
    """Hidden states to the sum of token losses, by chunks of tokens.

    Args:
        head: the model's output head, possibly split over the vocabulary or adapted.
        shape: what happens to the logits.
        vocabulary: the part of the vocabulary that the head gives logits of.
        keys: what dropout inside an adapted head reads.
        chunk: tokens whose logits exist at one time.
    """

    def __init__(
        self,
        head: nn.Module,
        shape: LogitShape,
        vocabulary: Vocabulary,
        keys: DropoutKeys,
        *,
        chunk: int,
    ) -> None:
        super().__init__()
        self.head = head
        self.vocabulary = vocabulary
        self.shape = shape
        self._keys = keys
        self._chunk = chunk

    @contextmanager
    def _dropout_at(self, tokens: torch.Tensor | None, place: slice) -> Iterator[None]:
        """Let dropout inside the head read the keys of one chunk of tokens."""
        before = self._keys.tokens
        if tokens is not None:
            self._keys.tokens = tokens.flatten()[place]
        try:
            yield
        finally:
            self._keys.tokens = before

    def forward(
        self, hidden: torch.Tensor, targets: torch.Tensor, places: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Sum of the losses of the trained tokens, fp32 scalar.

        Args:
            hidden: hidden states [T, H].
            targets: next tokens [T].
            places: tokens that have losses, all that are trained among them [N]; None: all.
        """
        tokens = self._keys.tokens
        hidden = select_tokens(hidden, places)
        if places is not None:
            targets = targets[places]
            tokens = None if tokens is None else tokens.flatten()[places]

        def logits(part: torch.Tensor, place: slice) -> torch.Tensor:
            with self._dropout_at(tokens, place):
                return self.shape(self.head(part))

        return chunked_loss_sum(
            hidden,
            targets,
            logits,
            tuple(self.head.parameters()),
            self.vocabulary,
            chunk=self._chunk,
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [T, V] of this rank's part of the vocabulary."""
        shaped: torch.Tensor = self.shape(self.head(hidden))
        return shaped
