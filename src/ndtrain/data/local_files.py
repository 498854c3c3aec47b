"""Which files of this disk a dataset entry means, and of which kind each of them is.

A folder is read as the hub reads one: hidden files, descriptions and what `datasets` writes about
its own files are no rows, and of files that belong to splits those of one split are taken.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath

from ndtrain.errors import DataError, RecipeError
from ndtrain.recipe.addresses import PACKAGE, resolve_address
from ndtrain.recipe.schema import DatasetSpec
from ndtrain.recipe.splits import split_name, splits_of

SUFFIXES: Mapping[str, str] = {
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
    ".md": "text",
}
_DESCRIPTION = ".md"
"""Read where it is named, not where it lies in a folder."""
_ABOUT_ROWS = frozenset(
    {"config.json", "dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json"}
)


def kind_of(path: PurePath) -> str | None:
    """The file kind that the suffix names."""
    return SUFFIXES.get(plain_suffix(path))


def plain_suffix(path: PurePath) -> str:
    """The suffix in small letters, of a packed file the one before .gz."""
    return (PurePath(path.stem) if path.suffix.lower() == ".gz" else path).suffix.lower()


def choose_files(path: Path, spec: DatasetSpec) -> Sequence[Path]:
    """The files behind a path: itself, those in a folder, or those that data_files names.

    Raises:
        RecipeError: there is no such file; `where` names the key of the entry.
        DataError: the folder has no files of the split.
    """
    if path.is_file():
        return [path]
    if spec.data_files is not None:
        return match_files(path, spec.data_files)
    files = [
        file.relative_to(path)
        for file in sorted(path.rglob("*"))
        if _may_hold_rows(file.relative_to(path)) and file.is_file()
    ]
    if spec.ds_type is not None:
        files = [file for file in files if kind_of(file) == spec.ds_type]
    if not files:
        kind, key = ("data", "path") if spec.ds_type is None else (spec.ds_type, "ds_type")
        raise RecipeError(
            f"the folder '{path}' holds no {kind} file ({_suffixes(spec.ds_type)}).", where=key
        )
    splits = splits_of(files)
    wanted = spec.split if spec.split in splits else split_name(spec.split)
    if wanted not in splits:
        known = ", ".join(f"'{name}'" for name in sorted(splits))
        raise DataError(
            f"the folder has no split '{spec.split}': by their names its files are of {known}.",
            where=str(path),
            hint="Set split to one of these, or name the files with data_files.",
        )
    return [path / file for file in splits[wanted]]


def match_files(folder: Path, data_files: Sequence[str] | str) -> Sequence[Path]:
    """The files that names or patterns choose, in the order of the patterns.

    Raises:
        RecipeError: nothing has such a name.
    """
    patterns = (data_files,) if isinstance(data_files, str) else data_files
    chosen: list[Path] = []
    for pattern in patterns:
        found = _match(folder, pattern)
        if not found:
            raise RecipeError(f"no file matches '{folder / pattern}'.", where="data_files")
        chosen += found
    return chosen


def _match(folder: Path, pattern: str) -> Sequence[Path]:
    """The files of one name or pattern, sorted; a pattern takes no hidden files."""
    if pattern.startswith(PACKAGE):
        address = resolve_address(pattern)
        return [address] if address is not None and address.is_file() else []
    written = Path(pattern).expanduser()
    if (folder / written).is_file():
        return [folder / written]
    base = Path(written.anchor) if written.is_absolute() else folder
    inside = written.relative_to(written.anchor)
    if not inside.parts:
        return []
    try:
        found = sorted(base.glob(str(inside)))
    except ValueError as error:  # such as '**.json'
        raise RecipeError(
            f"'{pattern}' is neither a file nor a pattern: {error}.", where="data_files"
        ) from None
    return [
        file
        for file in found
        if file.is_file()
        and not _is_about_rows(file)
        and not _hidden_parts(file.relative_to(base)) - _hidden_parts(inside)
    ]


def _hidden_parts(path: PurePath) -> set[str]:
    """The files and folders of a path that are not shown to people."""
    return {part for part in path.parts if part.startswith(".") and part != ".."}


def _may_hold_rows(file: PurePath) -> bool:
    """Whether a file in a folder is read when nobody names it."""
    described = file.suffix.lower() == _DESCRIPTION or _is_about_rows(file)
    return kind_of(file) is not None and not described and not _hidden_parts(file)


def _is_about_rows(file: PurePath) -> bool:
    """Whether a file says something about the rows beside it."""
    return file.stem.lower() == "readme" or file.name in _ABOUT_ROWS


def _suffixes(kind: str | None) -> str:
    """The suffixes that a folder's files of a kind, or of any, have."""
    return ", ".join(
        name for name, of in SUFFIXES.items() if kind in (None, of) and name != _DESCRIPTION
    )
