"""Pushing to a hub: what is uploaded, and a failure that leaves the folder and says what to do."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import HfHubHTTPError

from ndtrain.errors import MeshError
from ndtrain.train.hub import push_folder


def replace_hub(monkeypatch: pytest.MonkeyPatch, failure: Exception | None) -> list[Any]:
    calls: list[Any] = []

    class Hub:
        def create_repo(self, repo: str, **options: Any) -> str:
            calls.append(("create", repo, options))
            if failure is not None:
                raise failure
            return f"https://example.org/{repo}"

        def upload_folder(self, **options: Any) -> None:
            calls.append(("upload", options["repo_id"], options["folder_path"]))

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    return calls


def test_a_private_repository_gets_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = replace_hub(monkeypatch, None)
    assert push_folder(tmp_path, "me/model") == "https://example.org/me/model"
    assert calls == [
        ("create", "me/model", {"private": True, "exist_ok": True}),
        ("upload", "me/model", str(tmp_path)),
    ]


@pytest.mark.parametrize(
    "failure",
    [
        OSError("no network"),
        HfHubHTTPError("401: log in", response=SimpleNamespace(headers={}, request=None)),
    ],
)
def test_a_failure_says_where_the_model_is(
    failure: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = replace_hub(monkeypatch, failure)
    with pytest.raises(MeshError, match="cannot be pushed to 'me/model'") as caught:
        push_folder(tmp_path, "me/model")
    assert f"hf upload me/model {tmp_path}" in caught.value.hint
    assert [call[0] for call in calls] == ["create"]
