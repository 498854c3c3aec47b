"""YAML text as plain values that know their lines.

PyYAML's defaults surprise people who write recipes: `1e-5` is text, `no` is false, `012` is ten,
`12:30:45` a number, a date an object, and the last of two equal keys wins. This reader takes
YAML 1.2's plain words and decimal numbers, leaves everything else as the text it was, and reports
duplicate keys.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.constructor import SafeConstructor
from yaml.parser import Parser
from yaml.reader import Reader, ReaderError
from yaml.resolver import BaseResolver
from yaml.scanner import Scanner

from ndtrain.errors import RecipeError
from ndtrain.recipe.missing_recipe import advise_folder, advise_missing
from ndtrain.recipe.problem import KeyPath, Place, Problem
from ndtrain.recipe.yaml_mistakes import find_mistake

_TAG = "tag:yaml.org,2002:"
_MAX_DEPTH = 50
_MAX_NODES = 100_000


class _RecipeLoader(Reader, Scanner, Parser, Composer, SafeConstructor, BaseResolver):
    """Composes nodes; knows null, true/false, decimal numbers and merge keys, nothing else."""

    def __init__(self, stream: str) -> None:
        Reader.__init__(self, stream)
        Scanner.__init__(self)
        Parser.__init__(self)
        Composer.__init__(self)
        SafeConstructor.__init__(self)
        BaseResolver.__init__(self)


for _name, _pattern, _first in (
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"^[-+]?(?:0|[1-9][0-9]*)$", list("-+0123456789")),
    (
        "float",
        r"^[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$",
        list("-+.0123456789"),
    ),
    ("merge", r"^(?:<<)$", ["<"]),
):
    _RecipeLoader.add_implicit_resolver(_TAG + _name, re.compile(_pattern), _first)


@dataclass
class Document:
    """A parsed recipe: values, the place of each, the source text of scalars, and problems."""

    data: dict[str, Any]
    spots: dict[KeyPath, Place] = field(default_factory=dict)
    texts: dict[KeyPath, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def move(self, old: KeyPath, new: KeyPath) -> None:
        """What is known of `old` and everything in it holds for `new` too."""
        for path in [path for path in self.spots if path[: len(old)] == old]:
            self.spots[(*new, *path[len(old) :])] = self.spots[path]
        for path in [path for path in self.texts if path[: len(old)] == old]:
            self.texts[(*new, *path[len(old) :])] = self.texts[path]

    def forget(self, old: KeyPath) -> None:
        """Places and texts of what has been replaced no longer hold."""
        for table in (self.spots, self.texts):
            for path in [path for path in table if path[: len(old)] == old]:
                del table[path]


def read_text(path: Path, what: str = "recipe") -> str:
    """The file's text, UTF-8 with or without a byte order mark, whatever the locale.

    Args:
        path: the file.
        what: what it should hold, for messages.

    Raises:
        RecipeError: the file is missing, unreadable or not UTF-8.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        hint = advise_missing(path, bundled=what == "recipe")
        raise RecipeError(f"there is no such {what} file.", where=str(path), hint=hint) from None
    except IsADirectoryError:
        hint = f"Name the {what} file in it{advise_folder(path)}"
        raise RecipeError("is a folder.", where=str(path), hint=hint) from None
    except OSError as error:
        hint = "Name another file, or change its rights."
        raise RecipeError(
            f"cannot be read: {error.strerror}.", where=str(path), hint=hint
        ) from error
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        column = error.start - (raw.rfind(b"\n", 0, error.start) + 1) + 1
        raise RecipeError(
            f"byte '0x{raw[error.start]:02x}' is not UTF-8 text.",
            where=f"{path}:{line}:{column}",
            hint="Save the file as UTF-8.",
        ) from error


def compose(text: str, where: str) -> yaml.Node | None:
    """The node tree of one YAML document; None for an empty one.

    Raises:
        RecipeError: the text is not YAML; `where` names the file or flag.
    """
    loader: Any = None
    try:
        loader = _RecipeLoader(text)
        return loader.get_single_node()  # type: ignore[no-any-return]
    except RecursionError as error:
        hint = "A recipe needs a few levels only; look for brackets that are never closed."
        raise RecipeError("the YAML is nested too deeply.", where=where, hint=hint) from error
    except ReaderError as error:
        before = text[: error.position]
        line, column = before.count("\n") + 1, error.position - (before.rfind("\n") + 1) + 1
        raise RecipeError(
            f"the character '{ord(text[error.position]):#06x}' is not allowed in YAML.",
            where=f"{where}:{line}:{column}",
            hint="Remove it; an editor may not show it.",
        ) from error
    except yaml.MarkedYAMLError as error:
        found = find_mistake(text, error)
        spot = f"{where}:{found.line}:{found.column}" if found.line else where
        raise RecipeError(found.message, where=spot, hint=found.hint) from error


def parse_document(text: str, where: str, what: str = "recipe") -> Document:
    """The recipe, or another mapping, in `text`.

    Args:
        text: of the file.
        where: its name.
        what: what it should hold, for messages.

    Raises:
        RecipeError: it is not YAML, empty, or no mapping at the top.
    """
    root = compose(text, where)
    if root is None or (isinstance(root, yaml.ScalarNode) and root.tag == _TAG + "null"):
        start = "`ndtrain recipes copy quickstart` writes one to start from."
        raise RecipeError(
            f"the {what} is empty.", where=f"{where}:1:1", hint=start if what == "recipe" else ""
        )
    if not isinstance(root, yaml.MappingNode):
        kind = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
        raise RecipeError(
            f"the {what} is {kind} at the top, but must be `key: value` lines.",
            where=f"{where}:{root.start_mark.line + 1}:{root.start_mark.column + 1}",
        )
    document = Document({})
    reader = _NodeReader(document)
    document.data = reader.value(root, ())
    return document


def parse_value(text: str, where: str) -> Any:
    """The value of a `--set` flag, read like one in the file.

    A flag has no comments: a `#` in a plain value is part of it.

    Raises:
        RecipeError: it is not YAML.
    """
    node = compose(text, where)
    if "\n" not in text and _is_cut_off(node, text):
        return text.strip()
    document = Document({})
    value = None if node is None else _NodeReader(document).value(node, ())
    if document.problems:
        raise RecipeError(document.problems[0].message, where=where)
    return value


def _is_cut_off(node: yaml.Node | None, text: str) -> bool:
    """Whether YAML took the end of a plain value, or all of it, for a comment."""
    if node is None:
        return bool(text.strip())
    is_plain = isinstance(node, yaml.ScalarNode) and node.style is None
    return is_plain and bool(text[node.end_mark.index :].strip())


@dataclass
class _NodeReader:
    """Turns nodes into values, noting places; `open_nodes` finds anchors that hold themselves."""

    document: Document
    open_nodes: set[int] = field(default_factory=set)
    num_nodes: int = 0

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        """The plain value of `node`, which stands at `path`."""
        self.num_nodes += 1
        if id(node) in self.open_nodes or self.num_nodes > _MAX_NODES:
            self._problem(node, path, "aliases make this value endless.")
            return None
        if len(path) > _MAX_DEPTH:
            self._problem(node, path[:1], "is nested too deeply.")
            return None
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        self.open_nodes.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            if node.tag != _TAG + "seq":
                self._problem(node, path, f"the tag '{node.tag}' is not allowed.")
            return [self._item(item, (*path, number)) for number, item in enumerate(node.value)]
        finally:
            self.open_nodes.discard(id(node))

    def _item(self, node: yaml.Node, path: KeyPath) -> Any:
        self.document.spots[path] = _place(node)
        return self.value(node, path)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        if node.tag != _TAG + "map":
            self._problem(node, path, f"the tag '{node.tag}' is not allowed.")
        values: dict[str, Any] = {}
        first: dict[str, yaml.Node] = {}
        for key, child in node.value:
            if key.tag == _TAG + "merge":
                continue
            if not isinstance(key, yaml.ScalarNode):
                self._problem(key, path, "a key must be plain text; quote a value that has braces.")
                continue
            name = key.value
            if name in first:
                lines = f"lines {first[name].start_mark.line + 1} and {key.start_mark.line + 1}"
                self._problem(
                    key, (*path, name), f"duplicate key, given in {lines}.", "Keep one of them."
                )
                continue
            first[name] = key
            self.document.spots[(*path, name)] = _place(key)
            values[name] = self.value(child, (*path, name))
        for key, child in self._merged(node, path):
            name = key.value
            if name not in values:
                self.document.spots[(*path, name)] = _place(key)
                values[name] = self.value(child, (*path, name))
        return values

    def _merged(
        self, node: yaml.MappingNode, path: KeyPath
    ) -> Iterator[tuple[yaml.Node, yaml.Node]]:
        """The pairs that `<<` brings in, the first mapping that has a key winning."""
        for key, child in node.value:
            if key.tag != _TAG + "merge":
                continue
            sources = child.value if isinstance(child, yaml.SequenceNode) else [child]
            for source in sources:
                if not isinstance(source, yaml.MappingNode) or id(source) in self.open_nodes:
                    self._problem(key, path, "'<<' needs a mapping or a list of mappings.")
                    continue
                self.open_nodes.add(id(source))
                for pair in source.value:
                    if pair[0].tag != _TAG + "merge":
                        yield pair
                yield from self._merged(source, path)
                self.open_nodes.discard(id(source))

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        kind, text = node.tag.removeprefix(_TAG), node.value
        if kind not in {"null", "bool", "int", "float", "str"}:
            self._problem(node, path, f"the tag '{node.tag}' is not allowed.")
            return None
        self.document.texts[path] = text
        try:
            if kind == "int":
                return int(text)
            if kind == "float":
                return float(text)
        except ValueError:
            self._problem(node, path, f"'{text}' is not a number.")
            return None
        if kind == "bool":
            return text.lower() == "true"
        return None if kind == "null" else text

    def _problem(self, node: yaml.Node, path: KeyPath, message: str, hint: str = "") -> None:
        place = _place(node)
        known = any(
            problem.place == place and problem.message == message
            for problem in self.document.problems
        )
        if not known:
            self.document.problems.append(Problem(path, message, hint, place=place))


def _place(node: yaml.Node) -> Place:
    return Place.in_file(node.start_mark.line + 1, node.start_mark.column + 1)
