"""What to do when the recipe file that a command names is none."""

from pathlib import Path

from ndtrain.recipe.catalog import list_examples
from ndtrain.recipe.problem import nearest

_ENDINGS = (".yaml", ".yml")


def advise_missing(path: Path, *, bundled: bool = True) -> str:
    """The file that was probably meant, or the bundled recipe and how to get it.

    Args:
        path: where there is no file.
        bundled: whether a bundled recipe could be meant.
    """
    name = _bare(path.name)
    here = _yaml_files(path.parent)
    names = [example.name for example in list_examples()] if bundled else []
    if name not in names or name in here:
        close = nearest(name, here)
        if close:
            return f"Did you mean {here[close]}?"
    close = name if name in names else nearest(name, names)
    if close is None:
        return "List the bundled ones with `ndtrain recipes`." if bundled else ""
    copy = f"`ndtrain recipes copy {close}`"
    if close == name:
        return f"It is a bundled recipe: {copy} writes it to edit."
    return f"Did you mean the bundled recipe '{close}'? {copy} writes it."


def advise_folder(folder: Path) -> str:
    """The files in a folder that could be the one that was meant."""
    files = [str(file) for file in _yaml_files(folder).values()]
    return f": {' or '.join(files)}." if 0 < len(files) <= 3 else "."


def _yaml_files(folder: Path) -> dict[str, Path]:
    """YAML files of a folder by their names without the ending."""
    if not folder.is_dir():
        return {}
    files = sorted(file for file in folder.glob("*.y*ml") if file.suffix in _ENDINGS)
    return {_bare(file.name): file for file in files}


def _bare(name: str) -> str:
    for ending in _ENDINGS:
        name = name.removesuffix(ending)
    return name
