"""The list of commands in `ndtrain --help`: by section, in plain text.

typer's own sections are drawn with rich, whose import takes as long as all else that help needs.
"""

from typing import Any

import typer
from typer.core import TyperGroup


class SectionedGroup(TyperGroup):
    """A group whose commands stand under the section that each is registered with."""

    def format_commands(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        """Write name and first sentence of each command, section by section."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is None or command.hidden:
                continue
            section = getattr(command, "rich_help_panel", None)
            title = section if isinstance(section, str) else "Commands"
            text = (command.help or "").partition("\n\n")[0]
            sections.setdefault(title, []).append((name, " ".join(text.split())))
        longest = max((len(name) for rows in sections.values() for name, _ in rows), default=0)
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(longest), text) for name, text in rows])
