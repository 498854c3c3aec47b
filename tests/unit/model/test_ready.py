"""Downloads: what is asked for, and one clear message for each way in which they fail."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ndtrain.errors import MeshError
from ndtrain.model.byte_tokenizer import build_byte_tokenizer
from ndtrain.model.ready import hub_folder, ready_model
from ndtrain.model.tokenizer import read_tokenizer
from ndtrain.plan.model_source import ModelSource

SOURCE = ModelSource("hub", "some/model", None, {}, "v1")
RESPONSE: Any = SimpleNamespace(headers={}, request=None)


def answer_with(monkeypatch: pytest.MonkeyPatch, outcome: Any) -> list[dict[str, Any]]:
    """Let the hub return a folder or raise; returns the calls."""
    calls: list[dict[str, Any]] = []

    def snapshot_download(name: str, **options: Any) -> str:
        calls.append({"name": name, **options})
        if isinstance(outcome, Exception):
            raise outcome
        return str(outcome)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def model_folder(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").touch()


def test_a_downloaded_model_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_folder(tmp_path)
    calls = answer_with(monkeypatch, tmp_path)
    ready = ready_model(SOURCE)
    assert (ready.kind, ready.path, ready.config) == ("hub", tmp_path, {"model_type": "llama"})
    assert calls[0]["name"] == "some/model"
    assert calls[0]["revision"] == "v1"
    assert "*.safetensors" in calls[0]["allow_patterns"]
    assert not any(".bin" in pattern for pattern in calls[0]["allow_patterns"])
    assert "*.py" not in calls[0]["allow_patterns"]


def test_code_is_only_fetched_when_it_may_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_folder(tmp_path)
    calls = answer_with(monkeypatch, tmp_path)
    ready_model(SOURCE, trust_remote_code=True)
    assert "*.py" in calls[0]["allow_patterns"]


@pytest.mark.parametrize(
    ("error", "message", "hint", "where"),
    [
        (GatedRepoError("no", response=RESPONSE), "is gated", "Accept its terms", "base_model"),
        (
            RepositoryNotFoundError("no", response=RESPONSE),
            "the hub has no model 'some/model'",
            "Check the spelling",
            "base_model",
        ),
        (
            RevisionNotFoundError("no", response=RESPONSE),
            "has no revision 'v1'",
            "Name a branch",
            "revision_of_model",
        ),
        (
            LocalEntryNotFoundError("not in cache"),
            "cannot be downloaded: not in cache",
            "Check the network",
            "base_model",
        ),
        (OSError(28, "No space left on device"), "No space left", "Check", "base_model"),
    ],
)
def test_failures(
    error: Exception, message: str, hint: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_with(monkeypatch, error)
    with pytest.raises(MeshError, match=message) as caught:
        ready_model(SOURCE)
    assert caught.value.hint.startswith(hint)
    assert caught.value.where == where
    assert "Traceback" not in str(caught.value)


def test_folders_and_random_weights_stay_as_they_are(tmp_path: Path) -> None:
    model_folder(tmp_path)
    for source in (ModelSource("folder", "x", tmp_path, {}), ModelSource("random", "llama")):
        assert ready_model(source) is source


def test_missing_weights_are_missed_before_any_rank_starts(tmp_path: Path) -> None:
    model_folder(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model.bin")
    with pytest.raises(MeshError, match="pickled"):
        ready_model(ModelSource("folder", "x", tmp_path, {}))


def test_what_the_hub_keeps_is_a_folder_whatever_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = answer_with(monkeypatch, tmp_path)
    assert hub_folder("some/adapter", where="MODEL") == tmp_path
    assert {"*.safetensors", "*.json"} <= set(calls[0]["allow_patterns"])
    answer_with(monkeypatch, LocalEntryNotFoundError("long words of the library"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(MeshError, match="not in the local hub cache, and the hub is switched off"):
        hub_folder("some/adapter", where="MODEL")


def test_a_hub_models_tokenizer_comes_without_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_byte_tokenizer().save_pretrained(str(tmp_path))
    calls = answer_with(monkeypatch, tmp_path)
    tokenizer = read_tokenizer(ModelSource("hub", "some/model"))
    assert tokenizer("ab")["input_ids"] == [97, 98]
    assert not any("safetensors" in pattern for pattern in calls[0]["allow_patterns"])


def test_a_tokenizer_that_cannot_be_had_is_said_once_with_its_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer_with(monkeypatch, LocalEntryNotFoundError("Got: ConnectError: no name"))
    with pytest.raises(MeshError) as caught:
        read_tokenizer(ModelSource("hub", "some/model"), where="tokenizer_config")
    assert str(caught.value) == (
        "tokenizer_config: the model 'some/model' cannot be downloaded: Got: ConnectError: no name"
        ". Check the network, or name a folder or .gguf file on this machine."
    )
