"""Names of parameters as the base model's files know them, whatever was wrapped around modules."""

import re
from dataclasses import dataclass
from typing import Literal

from torch import nn

AdapterPart = Literal["lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "magnitude"]

_WRAPPERS = re.compile(r"(?<![^.])(_checkpoint_wrapped_module|_orig_mod|_fsdp_wrapped_module)\.")
_PEFT_PREFIX = "base_model.model."
_ADAPTER = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|"
    r"lora_magnitude_vector)\.(?P<adapter>[^.]+)(\.weight)?"
)


@dataclass(frozen=True)
class ParameterName:
    """A parameter's place in the base model.

    Attributes:
        base: name in the base model; of an adapter part the adapted module's weight.
        part: which part of an adapter it is, None for the base model's own.
    """

    base: str
    part: AdapterPart | None = None


def plain_name(name: str) -> str:
    """The name without what checkpointing, compiling and peft put around modules."""
    return _WRAPPERS.sub("", name.removeprefix(_PEFT_PREFIX))


def parse_name(name: str) -> ParameterName:
    """What a parameter of a possibly wrapped and adapted model is."""
    name = plain_name(name)
    match = _ADAPTER.fullmatch(name)
    if match:
        part = match["part"].replace("lora_magnitude_vector", "magnitude")
        return ParameterName(f"{match['module']}.weight", part)  # type: ignore[arg-type]
    return ParameterName(name.replace(".base_layer.", "."))


def names_of_parameters(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Every parameter once, with all names under which it is known (two when weights are tied)."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names
