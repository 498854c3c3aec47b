"""Newer flash attention kernels in place of torch's own, where their package is installed.

Torch keeps a list of implementations that can take the place of its flash attention
(`torch.nn.attention.activate_flash_attention_impl`); with it goes attention over documents of
variable length, which runs through the same operation.
"""

import torch
from torch.nn.attention import activate_flash_attention_impl

from ndtrain.errors import RecipeError

_KEY = "flash_attention_impl"
_PACKAGES = {"FA3": "flash-attn-3 (module flash_attn_interface)", "FA4": "flash-attn-4"}
_GENERATIONS = {"FA3": (9,), "FA4": (9, 10)}
"""First number of the compute capability: 9 is Hopper, 10 Blackwell."""


def use_flash_attention(name: str, device: torch.device) -> None:
    """Let this process's flash attention run through another implementation.

    Args:
        name: `FA3` or `FA4`, as torch calls them.
        device: a CUDA device.

    Raises:
        RecipeError: the device or this installation does not have it.
    """
    major, minor = torch.cuda.get_device_capability(device)
    if major not in _GENERATIONS[name]:
        raise RecipeError(
            f"{name} has no kernels for {torch.cuda.get_device_name(device)} "
            f"(compute capability {major}.{minor}).",
            where=_KEY,
            hint=f"Remove {_KEY}: torch's own kernels run everywhere.",
        )
    activate(name)


def activate(name: str) -> None:
    """Activate an implementation that torch knows.

    Raises:
        RecipeError: torch does not know it, or its package is missing or another version.
    """
    try:
        activate_flash_attention_impl(name)
    except (ImportError, RuntimeError, ValueError, AttributeError) as error:
        raise RecipeError(
            f"{name} cannot be used here: {error}.".replace("..", "."),
            where=_KEY,
            hint=f"Install {_PACKAGES.get(name, name)} for this torch, or remove the key.",
        ) from error
