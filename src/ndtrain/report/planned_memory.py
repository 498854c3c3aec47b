"""The planned memory of a rank as `plan.json` holds it, by part."""

from collections.abc import Mapping
from typing import Any

_GIB = 2**30
_NOT_PARTS = ("total", "peak", "reserved", "capacity", "limit", "context")


def planned_gib(memory: Any) -> dict[str, float]:
    """GiB of each part that torch allocates; sums, limits and empty parts are left out.

    `memory` maps parts to bytes, or to GiB where the name ends in `_gib`; a mapping of parts may
    stand under `parts`. What CUDA and NCCL hold outside torch is not in `memory_gib` of a step
    either.
    """
    if not isinstance(memory, Mapping):
        return {}
    if isinstance(memory.get("parts"), Mapping):
        memory = memory["parts"]
    parts = {}
    for key, value in memory.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            continue
        name = str(key)
        if name.startswith(_NOT_PARTS):
            continue
        gib = float(value) if name.endswith("_gib") else value / _GIB
        parts[name.removesuffix("_gib").removesuffix("_bytes").replace("_", " ")] = gib
    return parts
