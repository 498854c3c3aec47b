"""A look at what an architecture does between its last hidden states and its logits.

ndtrain calls the base model and the output head by itself. The architecture's own way from one to
the other is walked here once, with a few numbers in the place of both, and compared.

Shape letters: S tokens, H hidden features, V features of the stand-in for logits.
"""

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ndtrain.errors import MeshError
from ndtrain.model.head import LogitShape
from ndtrain.plan.families import USE_A_TESTED_ONE

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOKENS, _LOGITS = 4, 8
_ALLOWED = 0.02
"""Relative distance that rounding to a head's bf16 may cause."""


class _States(dict[str, Any]):
    """What a base model returns: hidden states, and nothing under every other name."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)

    def __getitem__(self, key: Any) -> Any:
        return self["last_hidden_state"] if key == 0 else super().__getitem__(key)


def check_head(causal_lm: "PreTrainedModel") -> None:
    """Refuse a model whose logits are not its head's, scaled and capped as known.

    Args:
        causal_lm: as built, on the meta device.

    Raises:
        MeshError: something else stands between hidden states and logits.
    """
    features = int(causal_lm.get_output_embeddings().weight.shape[1])
    # large enough that a cap bends them
    hidden = 20 * torch.linspace(-1, 1, _TOKENS * features).sin().view(1, _TOKENS, features)
    expected = LogitShape(causal_lm.config)(_stand_in(hidden))
    reason: Exception | None = None
    found: torch.Tensor | None = None
    try:
        with torch.no_grad():
            found = _own_way(causal_lm, hidden)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        # it computes with weights, of which there are none yet, or with what no decoder returns
        reason = error
    if found is None or not _agree(found, expected):
        raise MeshError(
            f"'{causal_lm.config.model_type}' computes its logits in a way that is not known here: "
            "between hidden states and logits stands more than a head, a scale and a cap.",
            where="base_model",
            hint=USE_A_TESTED_ONE,
        ) from reason


def _agree(found: torch.Tensor, expected: torch.Tensor) -> bool:
    if found.shape != expected.shape or found.is_meta:
        return False
    return bool((found - expected).norm() <= _ALLOWED * expected.norm())


def _stand_in(hidden: torch.Tensor) -> torch.Tensor:
    """Logits in the place of a head's: some of the features [1, S, V]."""
    return hidden[..., :_LOGITS].float()


def _own_way(causal_lm: "PreTrainedModel", hidden: torch.Tensor) -> torch.Tensor:
    """What the architecture makes of hidden states, with stand-ins for base model and head."""
    walked = copy.copy(causal_lm)
    walked._modules = dict(walked._modules)
    base, head = causal_lm.base_model, causal_lm.get_output_embeddings()
    _replace(walked, base, lambda *_, **__: _States(last_hidden_state=hidden))
    _replace(walked, head, _stand_in)
    logits: torch.Tensor = walked(
        input_ids=torch.zeros(1, _TOKENS, dtype=torch.long), use_cache=False
    ).logits
    return logits.float()


def _replace(model: nn.Module, part: nn.Module, forward: Callable[..., Any]) -> None:
    """Put a copy of a direct or inner part that computes something else in its place."""
    name = next((name for name, one in model.named_modules() if one is part), "")
    owner, _, own = name.rpartition(".")
    stand_in = copy.copy(part)
    stand_in.forward = forward
    model.get_submodule(owner)._modules[own] = stand_in
