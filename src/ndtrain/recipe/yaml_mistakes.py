"""What a YAML parser complains of, at the line of the mistake and in the words of who made it.

A parser stops where it can no longer go on, which is often the line behind the mistake, or the end
of the file.
"""

import re
from dataclasses import dataclass

import yaml


@dataclass(frozen=True)
class Mistake:
    """A mistake in the text; line and column are counted from 1, 0 where they are not known."""

    line: int
    column: int
    message: str
    hint: str


def find_mistake(text: str, error: yaml.MarkedYAMLError) -> Mistake:
    """The mistake in `text` behind a parser's complaint."""
    problem = error.problem or "it is not YAML"
    mark, context = error.problem_mark or error.context_mark, error.context_mark
    if mark is None:
        return Mistake(0, 0, *_plain_words(problem))
    lines = text.splitlines()
    if problem == "could not find expected ':'" and context is not None:
        return _without_colon(lines, context.line)
    if error.context == "while scanning a quoted scalar" and context is not None:
        message = "a quote is opened here and never closed."
        return Mistake(context.line + 1, context.column + 1, message, "Close it behind the value.")
    before = _line_before(lines, mark.line)
    if problem == "mapping values are not allowed here" and before is not None:
        here, there = lines[mark.line], lines[before]
        if _has_colon(here[: mark.column]):
            return Mistake(mark.line + 1, mark.column + 1, *_plain_words(problem))
        if _indent(here) > _content_indent(there):
            return _misplaced(mark.line, _indent(here), {_content_indent(there)})
        if not _has_colon(there):
            return _without_colon(lines, before)
    fits_nowhere = problem.startswith(("expected <block end>, but found '<block", "expected '<doc"))
    if fits_nowhere and before is not None:
        around = {_content_indent(lines[before])}
        if context is not None:
            around.add(context.column)
        return _misplaced(mark.line, mark.column, around)
    return Mistake(mark.line + 1, mark.column + 1, *_plain_words(problem))


def _without_colon(lines: list[str], number: int) -> Mistake:
    shown = lines[number].strip()
    return Mistake(
        number + 1,
        _indent(lines[number]) + 1,
        f"'{shown}' has no ': '.",
        "Write `key: value`, with a space behind the colon.",
    )


def _misplaced(number: int, indent: int, around: set[int]) -> Mistake:
    neighbours = " or ".join(str(one) for one in sorted(around))
    return Mistake(
        number + 1,
        indent + 1,
        f"the line is indented by {indent}, its neighbours by {neighbours}.",
        "Keys of one mapping start in the same column.",
    )


def _line_before(lines: list[str], number: int) -> int | None:
    """The nearest line above that is neither blank nor a comment."""
    return next(
        (
            above
            for above in range(number - 1, -1, -1)
            if lines[above].strip() and not lines[above].lstrip().startswith("#")
        ),
        None,
    )


def _has_colon(text: str) -> bool:
    """Whether a key ends in the text."""
    return re.search(r":(\s|$)", text) is not None


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _content_indent(line: str) -> int:
    """Where the content of a line starts, behind the dashes of list entries."""
    found = re.match(r" *(?:- +)*", line)
    return found.end() if found else 0


def _plain_words(problem: str) -> tuple[str, str]:
    """The parser's complaint in words that say what to do."""
    if "'\\t'" in problem:
        return "a tab cannot indent YAML.", "Use spaces."
    if "cannot start any token" in problem:
        found = re.search(r"'(.)'", problem)
        shown = found.group(1) if found else "it"
        return f"a value cannot start with '{shown}'.", "Put the value in quotes."
    if problem == "mapping values are not allowed here":
        return "a second ':' in this line, or wrong indentation.", "Quote text that holds ': '."
    if "expected a single document" in problem or "but found another document" in problem:
        return "a second document starts here.", "A recipe is one YAML document; remove '---'."
    return f"not valid YAML: {problem}.", "Check indentation, quotes and brackets."
