"""What a bug report needs to know of the machine: versions and devices, never secrets."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
from typing import Any

from ndtrain import __version__

PACKAGES = (
    "torch",
    "transformers",
    "datasets",
    "accelerate",
    "peft",
    "tokenizers",
    "safetensors",
    "huggingface-hub",
    "pydantic",
    "typer",
    "rich",
    "numpy",
    "pyarrow",
    "gguf",
    "bitsandbytes",
    "torchao",
    "liger-kernel",
    "triton",
)
"""Packages whose version can change a run."""


def describe_machine() -> dict[str, Any]:
    """Versions, processor, CUDA and GPUs; no environment variables, user names or paths."""
    return {
        "ndtrain": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "host_memory_gib": _host_memory_gib(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "cuda": _cuda(),
        "gpus": _gpus(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _host_memory_gib() -> float:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


def _cuda() -> str | None:
    """CUDA version that torch was built for."""
    if _version("torch") is None:
        return None
    import torch

    return torch.version.cuda


def _gpus() -> list[dict[str, str]]:
    """One entry a GPU, asked of the driver: a CUDA context here would break later forks."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    fields = ("name", "memory.total", "driver_version", "compute_cap")
    answer = subprocess.run(
        [program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    if answer.returncode != 0:
        return []
    return [
        dict(zip(fields, (part.strip() for part in line.split(",")), strict=False))
        for line in answer.stdout.splitlines()
        if line.strip()
    ]
