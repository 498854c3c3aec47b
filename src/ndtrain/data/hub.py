"""Rows of a dataset on the hub; the only file that needs the `datasets` library."""

from collections.abc import Iterator
from contextlib import contextmanager
from logging import ERROR
from typing import Any

from ndtrain.data.rows import RawRow
from ndtrain.errors import RecipeError
from ndtrain.recipe.schema import DatasetSpec

_COMMIT_DIGITS = 40


class HubSource:
    """A hub dataset, read row by row so that columns stay as they were written."""

    def __init__(self, spec: DatasetSpec, streaming: bool = False) -> None:
        self.spec = spec
        self.streaming = streaming
        self.size: int | None = None

    def fingerprint(self) -> str:
        """The commit that the revision stands for now; offline, that of the local copy."""
        from huggingface_hub import HfApi

        spec = self.spec
        what = f"{spec.path} {spec.name} {spec.split} {spec.data_files}"
        if spec.revision is not None and len(spec.revision) == _COMMIT_DIGITS:
            return f"hub {what} {spec.revision}"
        try:
            commit = HfApi().dataset_info(spec.path, revision=spec.revision, timeout=20).sha
        except Exception:  # without a connection, the kind depends on the transport in use
            copy = self._load(streaming=False)
            return f"hub {what} {copy._fingerprint}"
        return f"hub {what} {commit}"

    def rows(self) -> Iterator[RawRow]:
        """The rows of the split."""
        for number, columns in enumerate(self._load(self.streaming), 1):
            yield RawRow(f"{self.spec.path}: row {number}", dict(columns))

    def _load(self, streaming: bool) -> Any:
        """The split as `datasets` gives it."""
        from datasets import load_dataset

        spec = self.spec
        files = list(spec.data_files) if isinstance(spec.data_files, tuple) else spec.data_files
        try:
            with _without_retries_told():
                return load_dataset(
                    spec.path,
                    spec.name,
                    split=spec.split,
                    revision=spec.revision,
                    data_files=files,
                    streaming=streaming,
                )
        except Exception as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> RecipeError:
        """The message for a dataset that cannot be had."""
        reason = (str(error).strip().split("\n")[0] or type(error).__name__).rstrip(".")
        return RecipeError(
            f"dataset '{self.spec.path}' is neither a file here nor readable from the hub: "
            f"{reason}.",
            where="path",
            hint="Check the spelling, the connection and, for gated data, your hub login.",
        )


@contextmanager
def _without_retries_told() -> Iterator[None]:
    """The hub's client names each of its many attempts; one message says how they ended."""
    from huggingface_hub.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity(ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(before)
