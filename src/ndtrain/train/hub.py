"""Pushes an export or adapter to a model hub."""

from pathlib import Path

from ndtrain.errors import MeshError


def push_folder(folder: Path, repo: str, *, private: bool = True) -> str:
    """Upload `folder` to the model repository `repo`, made when it does not exist.

    Returns:
        The address of the repository.

    Raises:
        MeshError: not logged in, no rights, or no network; the folder stays where it is.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

    api = HfApi()
    try:
        address = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=str(folder), commit_message="Add the model")
    except (HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise MeshError(
            f"the model cannot be pushed to '{repo}': {reason}",
            where="hub_model_id",
            hint=f"It is complete in '{folder}'; log in with hf auth login and push it again with "
            f"hf upload {repo} {folder}.",
        ) from error
    return str(address)
