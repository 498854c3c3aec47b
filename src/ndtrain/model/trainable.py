"""The module that is trained: a micro-batch in, the sum of its token losses out.

Shape letters: B rows, L local tokens, T = B x L, H hidden features.
"""

import torch
from torch import nn
from transformers import PreTrainedModel

from ndtrain.data.batch import MicroBatch
from ndtrain.model.head import LogitShape, TokenHead
from ndtrain.model.loss import Vocabulary
from ndtrain.parallel.collectives import sum_gradient
from ndtrain.parallel.context import AttentionRows
from ndtrain.parallel.dropout import DropoutKeys
from ndtrain.parallel.sequence import gather_tokens


class Trainable(nn.Module):
    """A causal language model together with its loss.

    Args:
        model: the transformers model or the adapter wrapper around it; its parameter names are
            the ones in checkpoints.
        causal_lm: the transformers model itself.
        vocabulary: the part of the vocabulary this rank's head holds.
        keys: what the dropout modules read.
        chunk: tokens whose logits exist at one time.
        shares: the model's hidden states are those of this rank's share of the tokens.
    """

    def __init__(
        self,
        model: nn.Module,
        causal_lm: PreTrainedModel,
        vocabulary: Vocabulary,
        keys: DropoutKeys,
        *,
        chunk: int,
        shares: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self._shares = shares
        # a tuple, so that the same module is not registered under a second name
        self._causal_lm = (causal_lm,)
        self.head = TokenHead(
            causal_lm.get_output_embeddings(),
            LogitShape(causal_lm.config),
            vocabulary,
            keys,
            chunk=chunk,
        )

    @property
    def causal_lm(self) -> PreTrainedModel:
        """The transformers model inside."""
        return self._causal_lm[0]

    @property
    def vocabulary(self) -> Vocabulary:
        """The part of the vocabulary that this rank's head gives logits of."""
        return self.head.vocabulary

    def hidden(self, batch: MicroBatch, rows: AttentionRows) -> torch.Tensor:
        """Hidden states [B, L, H] before the head, whose gradient is summed over its parts."""
        states: torch.Tensor = self.causal_lm.base_model(
            input_ids=batch.input_ids,
            position_ids=batch.positions,
            attention_mask=None,
            use_cache=False,
            rows=rows,
        ).last_hidden_state
        group = self.vocabulary.group
        if group is None:
            return states
        if not self._shares:
            return sum_gradient(states, group)
        return gather_tokens(states, group).view(*batch.input_ids.shape, -1)

    def forward(
        self, batch: MicroBatch, rows: AttentionRows, places: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Sum of the losses of this rank's trained tokens, fp32 scalar.

        Args:
            batch: this rank's part of the rows.
            rows: where its tokens stand.
            places: the tokens among its T whose losses are computed; None: all.
        """
        hidden = self.hidden(batch, rows).flatten(0, 1)
        loss: torch.Tensor = self.head(hidden, batch.targets.flatten(), places)
        return loss

    def logits_at(
        self, batch: MicroBatch, rows: AttentionRows, columns: torch.Tensor
    ) -> torch.Tensor:
        """Logits of this rank's part of the vocabulary after one local token of each row [B, V].

        Args:
            batch: this rank's part of the rows.
            rows: where its tokens stand.
            columns: place of the token among the local ones [B].
        """
        hidden = self.hidden(batch, rows)
        picked = hidden[torch.arange(len(columns), device=hidden.device), columns]
        return self.head.logits(picked)
