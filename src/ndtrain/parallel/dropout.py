"""Dropout that does not depend on the mesh.

The usual dropout draws from the rank's random state, so that another mesh drops other elements.
Here each element's fate is a hash of (seed, step, row, column, module, feature): the same on every
mesh, the same when a block is computed again, and different wherever the data differs.

Shape letters: B rows, S tokens, F features.
"""

from dataclasses import dataclass

import torch
from torch import nn

from ndtrain.parallel.sequence import own_tokens

_MIX = 0x9E3779B97F4A7C15 - (1 << 64)  # 2**64 / golden ratio, as a signed integer


def _scramble(value: torch.Tensor) -> torch.Tensor:
    """Spread every input bit over the output (the finaliser of splitmix64, Steele et al. 2014)."""
    value = value + _MIX
    value = (value ^ ((value >> 30) & 0x3FFFFFFFF)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    value = (value ^ ((value >> 27) & 0x1FFFFFFFFF)) * (0x94D049BB133111EB - (1 << 64))
    return value ^ ((value >> 31) & 0x1FFFFFFFF)


@dataclass
class DropoutKeys:
    """What the dropout modules of one model read; the trainer sets it before each forward pass.

    Attributes:
        tokens: one key per token of the micro-batch, int64, shaped like the inputs less features.
        features: one key per feature, int64, as many as the widest input has. They are made here
            and read there: inside a compiled block they would be sums of a constant of 64 bits
            and a place of 32, which Triton refuses.
    """

    tokens: torch.Tensor | None = None
    features: torch.Tensor | None = None

    def prepare(self, width: int, device: torch.device) -> None:
        """Make the keys of up to `width` features."""
        self.features = _scramble(torch.arange(width, device=device))

    def set(self, seed: int, step: int, row_ids: torch.Tensor, columns: torch.Tensor) -> None:
        """Set the keys of a micro-batch.

        Args:
            seed: the run's seed.
            step: number of the optimizer step.
            row_ids: place of each row in the run [B].
            columns: place of each local token in its row [S].
        """
        # on the host, and handed on as a number: a copy to the device would wait for all its work
        base = _scramble(_scramble(torch.tensor(seed)) + step)
        rows = _scramble(row_ids + int(base))
        self.tokens = _scramble(rows[:, None] + columns[None, :])


class MeshDropout(nn.Module):
    """Dropout keyed by place instead of by random state.

    Args:
        probability: share of elements set to zero; the others are scaled up.
        number: distinguishes this module from the others of the model; a tensor, because blocks
            that differ in a plain number would each be compiled for themselves.
        keys: the model's keys.
        first_feature: number of the first feature that this rank's inputs hold.
        share: ranks that share the tokens of the inputs, and this one's place among them.
    """

    def __init__(
        self,
        probability: float,
        number: torch.Tensor,
        keys: DropoutKeys,
        first_feature: int = 0,
        share: tuple[int, int] = (1, 0),
    ) -> None:
        super().__init__()
        self.p = probability
        self._number = number
        self._keys = keys
        self._first_feature = first_feature
        self._share = share

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Drop elements of inputs [B, S, F], or of the same tokens laid end to end."""
        if not self.training or self.p == 0:
            return inputs
        tokens, features = self._keys.tokens, self._keys.features
        assert tokens is not None, "dropout keys are set before the forward pass"
        assert features is not None, "dropout keys are prepared with the model"
        if self._share[0] > 1:
            tokens = own_tokens(tokens, *self._share)
        tokens = tokens.reshape(inputs.shape[:-1])
        own = features.narrow(0, self._first_feature, inputs.shape[-1])
        keys = _scramble(tokens + self._number)[..., None] + own
        kept = (_scramble(keys) & 0xFFFFFF) >= int(self.p * (1 << 24))
        return inputs * kept / (1 - self.p)
