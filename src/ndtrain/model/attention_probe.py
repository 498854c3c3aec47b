"""A look at an untested architecture before it gets memory: what its masks hide, and who is told.

ndtrain's attention makes its masks itself, from the documents of a row and from the window that a
model hands over, and transformers' masks are switched off. Here the model is called once on the
meta device with transformers' masks and an attention function that only compares the two.

Shape letters: B rows, H heads, S tokens, D head features, N queries that are looked at.
"""

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from ndtrain.errors import MeshError
from ndtrain.model.attention import untold
from ndtrain.plan.families import USE_A_TESTED_ONE

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedConfig, PreTrainedModel

NAME = "ndtrain_probe"
WINDOW_KEYS = ("sliding_window", "attention_chunk_size", "attention_window_size")
"""Keys by which configurations give the tokens that a query sees."""
_WINDOWED = {"sliding_attention", "chunked_attention"}
_QUERIES = 64
_LEAST_TOKENS = 256
_ALLOWED = "ndtrain_allowed"
"""The attribute of a mask on the meta device that holds what it allows, bool [N, S]."""


@dataclass
class Look:
    """What attention was called with; it travels in the place of a micro-batch's rows.

    Attributes:
        lost: whether a mask hides something that the call does not say.
        unread: whether a mask was changed on its way, so that it cannot be read.
        windowed: whether a call handed a window over.
    """

    lost: bool = False
    unread: bool = False
    windowed: bool = False


def check_attention(causal_lm: "PreTrainedModel", sequence_len: int) -> None:
    """Refuse a model whose attention does not say what its masks hide.

    Args:
        causal_lm: on the meta device; a copy of it is called.
        sequence_len: tokens of a row.

    Raises:
        MeshError: a window or another pattern is in the mask alone, or attention is not told
            where the tokens of a row stand, or the model takes no keyword arguments to hand on.
    """
    AttentionInterface.register(NAME, _look)
    AttentionMaskInterface.register(NAME, _readable_mask)
    twin = _callable_twin(causal_lm)
    look = Look()
    config = causal_lm.config.get_text_config()
    window = short_window(config, sequence_len)
    length = _row_length(config, sequence_len)
    ids = torch.zeros(1, length, dtype=torch.long, device="meta")
    # on the host, where some architectures look whether anything is padded
    present = torch.ones(1, length, dtype=torch.long)
    places = torch.arange(length, device="meta")[None]
    call: Callable[..., Any] = twin.base_model
    stopped: Exception | None = None
    try:
        with torch.no_grad():
            call(
                input_ids=ids,
                attention_mask=present,
                position_ids=places,
                use_cache=False,
                rows=look,
            )
    except (RuntimeError, NotImplementedError) as error:
        # values decide over what it computes, so that it does not run to its end without any
        stopped = error
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise MeshError(
            f"'{causal_lm.config.model_type}' does not take what its layers must know: {error}.",
            where="base_model",
            hint=USE_A_TESTED_ONE,
        ) from error
    unknown = (look.unread or stopped is not None) and not look.windowed
    if look.lost or (unknown and window is not None):
        raise _lost(causal_lm.config.model_type, window) from stopped


def short_window(config: "PreTrainedConfig", sequence_len: int) -> tuple[str, int] | None:
    """The key and the size of the shortest window that hides something in a row, if any."""
    kinds = getattr(config, "layer_types", None)
    if getattr(config, "use_sliding_window", True) is False or (kinds and not _WINDOWED & {*kinds}):
        return None
    sizes = [(getattr(config, key, None), key) for key in WINDOW_KEYS]
    short = [(size, key) for size, key in sizes if type(size) is int and size < sequence_len]
    return (min(short)[1], min(short)[0]) if short else None


def _row_length(config: "PreTrainedConfig", sequence_len: int) -> int:
    """Tokens S beyond every window; recurrent layers take each of them by itself, so no more."""
    sizes = [value for key, value in config.to_dict().items() if "window" in key]
    sizes += [getattr(config, key, None) for key in WINDOW_KEYS]
    longest = max((size for size in sizes if type(size) is int and size < sequence_len), default=0)
    return min(sequence_len, max(_LEAST_TOKENS, longest + _QUERIES))


def _lost(model_type: str, window: tuple[str, int] | None) -> MeshError:
    if window is None:
        return MeshError(
            f"'{model_type}' hides tokens by a mask of its own, which ndtrain's attention does "
            "not get.",
            where="base_model",
            hint=USE_A_TESTED_ONE,
        )
    key, size = window
    return MeshError(
        f"'{model_type}' keeps its {key} of {size} tokens in a mask of its own, which ndtrain's "
        "attention does not get: longer rows would be trained without it.",
        where="sequence_len",
        hint=f"Use sequence_len: {size} or less, or another architecture.",
    )


def _callable_twin(causal_lm: "PreTrainedModel") -> "PreTrainedModel":
    """The same architecture on the meta device, with attention that looks."""
    config = copy.deepcopy(causal_lm.config)
    architecture: Any = type(causal_lm)
    with torch.device("meta"):
        twin: PreTrainedModel = architecture._from_config(config, dtype=torch.float32)
    twin.set_attn_implementation(NAME)
    # the one of its ways that asks for no values
    twin.set_experts_implementation("batched_mm")
    return twin.eval()


def _queries(length: int) -> torch.Tensor:
    """Places of the queries that are looked at, the last one among them [N]."""
    return torch.linspace(0, length - 1, min(length, _QUERIES)).long()


def _readable_mask(
    *, batch_size: int, q_length: int, kv_length: int, mask_function: Any, **unused: Any
) -> torch.Tensor:
    """A mask [B, 1, S, S] without memory that knows what it allows."""
    queries = _queries(q_length)[:, None]
    allowed = torch.as_tensor(mask_function(0, 0, queries, torch.arange(kv_length)[None]))
    mask = torch.empty(batch_size, 1, q_length, kv_length, dtype=torch.bool, device="meta")
    if not allowed.is_meta:
        setattr(mask, _ALLOWED, allowed.expand(len(queries), kv_length))
    return mask


def _look(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    rows: Any = None,
    sliding_window: int | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Compare a mask with the window of the call; the output [B, S, H, D] has no values."""
    if not isinstance(rows, Look):
        raise untold(module)
    length = query.shape[2]
    rows.windowed |= sliding_window is not None
    allowed = getattr(attention_mask, _ALLOWED, None)
    if allowed is None:
        rows.unread = True
    else:
        distance = _queries(length)[:, None] - torch.arange(length)[None]
        reach = length if sliding_window is None else sliding_window
        rows.lost |= not torch.equal(allowed, (distance >= 0) & (distance < reach))
    return query.new_empty(query.shape[0], length, query.shape[1], value.shape[-1]), None
