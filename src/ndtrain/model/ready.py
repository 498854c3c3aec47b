"""Makes a model's files ready before any rank needs them: downloads and converts, once.

Runs in the parent, before processes and process groups exist, so that no rank waits in a
collective for a download.
"""

from collections.abc import Sequence
from pathlib import Path

from ndtrain.errors import MeshError
from ndtrain.model.gguf_cache import converted_folder
from ndtrain.model.weight_files import find_weight_files
from ndtrain.plan.model_source import ModelSource, is_offline, looks_like_folder, read_config

_WANTED = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.json",
    "*.model",
    "*.txt",
    "*.jinja",
    "*.tiktoken",
)
_CODE = "*.py"


def ready_model(
    source: ModelSource, *, trust_remote_code: bool = False, where: str = "base_model"
) -> ModelSource:
    """The same model as a folder on this machine; random weights stay as they are.

    Args:
        source: the model.
        trust_remote_code: also fetch code that comes with it.
        where: how messages call the place of its name.

    Raises:
        MeshError: the model cannot be downloaded or converted, or its weights are missing.
    """
    ready = source
    if source.kind == "gguf":
        ready = converted_folder(source)
    elif source.kind == "hub":
        ready = _downloaded(source, trust_remote_code, where)
    if ready.path is not None:
        find_weight_files(ready.path)  # weights that are missing are missed here, not by the ranks
    return ready


def hub_folder(name: str, *, where: str) -> Path:
    """The folder of what the hub keeps under `name`, a model or an adapter, downloaded.

    Raises:
        MeshError: it cannot be downloaded.
    """
    return _snapshot(name, None, _WANTED, where)


def tokenizer_folder(source: ModelSource, *, trust_remote_code: bool, where: str) -> Path:
    """The folder of a hub model's small files, downloaded without its weights.

    Raises:
        MeshError: it cannot be downloaded.
    """
    small = tuple(pattern for pattern in _WANTED if "safetensors" not in pattern)
    wanted = (*small, _CODE) if trust_remote_code else small
    return _snapshot(source.name, source.revision, wanted, where)


def _downloaded(source: ModelSource, trust_remote_code: bool, where: str) -> ModelSource:
    wanted = (*_WANTED, _CODE) if trust_remote_code else _WANTED
    folder = _snapshot(source.name, source.revision, wanted, where)
    config = read_config(folder, source.name, where)
    return ModelSource("hub", source.name, folder, config, source.revision)


def _no_folder(name: str) -> str:
    """How a message begins where a hub id is rather meant as a folder."""
    return f"there is no folder '{name}' here, and " if looks_like_folder(name) else ""


def _snapshot(name: str, revision: str | None, wanted: Sequence[str], where: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=list(wanted),
                ignore_patterns=["original/*", "consolidated*"],
                local_files_only=is_offline(),
            )
        )
    except GatedRepoError as error:
        raise MeshError(
            f"the model '{name}' is gated.",
            where=where,
            hint=f"Accept its terms at https://huggingface.co/{name}, then run hf auth "
            "login on this machine.",
        ) from error
    except RevisionNotFoundError as error:
        raise MeshError(
            f"the model '{name}' has no revision '{revision}'.",
            where="revision_of_model",
            hint="Name a branch, tag or commit of its repository.",
        ) from error
    except RepositoryNotFoundError as error:
        raise MeshError(
            f"{_no_folder(name)}the hub has no model '{name}', or it is private.",
            where=where,
            hint="Check the spelling; for a private model run hf auth login first.",
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        if is_offline():
            reason = "it is not in the local hub cache, and the hub is switched off"
        raise MeshError(
            f"{_no_folder(name)}the model '{name}' cannot be downloaded: {reason.rstrip('.')}.",
            where=where,
            hint="Check the network, or name a folder or .gguf file on this machine.",
        ) from error
