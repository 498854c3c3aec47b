from collections.abc import Callable
from pathlib import Path

import pytest

from ndtrain.errors import NdtrainError, Problems, RecipeError
from ndtrain.recipe.load import LoadedRecipe, load_recipe

MINIMAL = """\
model_config: {model_type: llama}
tokenizer_config: bytes
learning_rate: 1e-4
datasets:
  - path: synthetic
"""

Load = Callable[..., LoadedRecipe]
Complaints = Callable[..., list[str]]


@pytest.fixture
def minimal() -> str:
    """A recipe of five lines that loads as it is; tests append to it, from line 6 on."""
    return MINIMAL


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Loads recipe text, with overrides and variables."""

    def run(
        text: str | bytes, *overrides: str, check: bool = True, **variables: str
    ) -> LoadedRecipe:
        path = tmp_path / "recipe.yaml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return load_recipe(path, overrides, check=check, lookup=variables.get)

    return run


@pytest.fixture
def complaints(load: Load, tmp_path: Path) -> Complaints:
    """The lines that a wrong recipe prints, without the folder; the exit code must be 2."""

    def run(text: str | bytes, *overrides: str, **variables: str) -> list[str]:
        with pytest.raises((Problems, RecipeError)) as caught:
            load(text, *overrides, **variables)
        error = caught.value
        assert isinstance(error, NdtrainError)
        assert error.exit_code == 2
        return str(error).replace(f"{tmp_path}/", "").splitlines()

    return run
