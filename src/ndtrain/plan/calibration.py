"""What training steps were measured to reach of the hardware's rates: one set of constants."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Calibration:
    """The constants of `reached` in the hardware book; their units are explained there."""

    matmul: float
    narrow_matmul: float
    attention: float
    attention_narrow_head: float
    attention_varlen: float
    moe_matmul: float
    tp_matmul: float
    link: float
    all_to_all: float
    gather_copies: float
    reduce_copies: float
    elementwise: float
    elementwise_budget: float
    elementwise_eager: float
    loss_eager: float
    loss_compiled: float
    loss_in_place: float
    lora: float
    lora_shared: float
    state: float
    cast: float
    kept: float
    kept_budget: float
    workspace: float
    logit_bytes_eager: float
    base_gib: float
    fragmentation: float
    context_gib: float
    nccl_gib: float
    process_gib: float
    usable: float


def read_calibration(book: Mapping[str, Any]) -> Calibration:
    """The constants out of the hardware book."""
    values = book["reached"]
    return Calibration(**{field.name: float(values[field.name]) for field in fields(Calibration)})
