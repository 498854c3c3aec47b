"""Files that an option of the command line names, such as `--write job.sbatch`."""

from pathlib import Path

from ndtrain.errors import NO_SPACE, RecipeError


def write_named(path: Path, text: str, *, option: str, hint_to_replace: str = "") -> None:
    """Write a file where the user wants it; folders above it are made.

    Args:
        path: the file.
        text: its content.
        option: what named it, such as `with --plot`; ends the message.
        hint_to_replace: when given, an existing file is kept, and this says what to do then.

    Raises:
        RecipeError: the file cannot be written, or exists and is kept.
        OSError: the disk is full.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x" if hint_to_replace else "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
    except OSError as error:
        if error.errno in NO_SPACE:
            raise
        if hint_to_replace and path.is_file() and isinstance(error, FileExistsError):
            raise RecipeError(
                "this file exists already.", where=str(path), hint=hint_to_replace
            ) from error
        message = "is a folder." if path.is_dir() else f"cannot be written: {error.strerror}."
        raise RecipeError(message, where=str(path), hint=f"Name another file {option}.") from error
