"""The arithmetic of merging an adapter into base weights, one block of rows at a time, in fp32."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ndtrain.model.names import AdapterPart


@dataclass(frozen=True)
class Delta:
    """What an adapter adds to one weight.

    Attributes:
        parts: the adapter's tensors by part.
        scale: alpha over r, or over its root.
        transposed: the weight is stored as [in, out], as GPT-2's projections are.
    """

    parts: Mapping[AdapterPart, torch.Tensor]
    scale: float
    transposed: bool = False

    def merge_rows(self, rows: torch.Tensor, start: int) -> torch.Tensor:
        """Rows of the base weight, from `start` on, with the adapter added, in fp32."""
        merged = rows.to(torch.float32, copy=True)
        left, right = self._factors(start, start + rows.shape[0])
        merged.addmm_(left, right, alpha=self.scale)
        magnitude = self.parts.get("magnitude")
        if magnitude is None:
            return merged
        # DoRA: each output row gets the trained length.
        wanted = magnitude.reshape(-1)[start : start + rows.shape[0]].to(torch.float32)
        lengths = torch.linalg.vector_norm(merged, dim=1)
        scaled: torch.Tensor = merged * (wanted / lengths).unsqueeze(1)
        return scaled

    def _factors(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Two matrices whose product is what rows `start` to `stop` gain."""
        if "lora_embedding_A" in self.parts:
            first, second = self.parts["lora_embedding_A"], self.parts["lora_embedding_B"]
            return first[:, start:stop].T.float(), second.T.float()
        first, second = self.parts["lora_A"].float(), self.parts["lora_B"].float()
        if self.transposed:
            return first[:, start:stop].T, second.T
        return second[start:stop], first


def adapter_scale(config: Mapping[str, object], module: str) -> float:
    """The factor before B A, from peft's adapter configuration.

    Args:
        config: adapter_config.json.
        module: full name of the adapted module, for its own rank and alpha.
    """
    rank = _of_module(config.get("rank_pattern"), module, config["r"])
    alpha = _of_module(config.get("alpha_pattern"), module, config["lora_alpha"])
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def _of_module(pattern: object, module: str, default: object) -> float:
    if isinstance(pattern, Mapping):
        for name, value in pattern.items():
            if module == name or module.endswith(f".{name}"):
                return float(value)
    return float(str(default))
