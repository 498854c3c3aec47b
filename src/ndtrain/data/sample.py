"""What a row becomes before it is tokenised: one of three shapes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Segment:
    """A stretch of text that is trained as a whole or not at all."""

    text: str
    trained: bool


@dataclass(frozen=True)
class Passage:
    """Text without turns; its segments are tokenised one by one and joined.

    Attributes:
        bounded: whether the tokenizer's start token and a trained end token are put around it.
        splits: whether a text longer than a row becomes several rows, whatever the strategy.
    """

    segments: tuple[Segment, ...]
    bounded: bool = True
    splits: bool = False


@dataclass(frozen=True)
class Turn:
    """One message of a conversation.

    Attributes:
        content: its text, empty when the turn only calls tools.
        trained: the row's own wish for this turn; None leaves it to `roles_to_train`.
        parts: the stretches of `content` with switches of their own; empty = one stretch.
        extra: what else the template may read: tool_calls, reasoning_content, name, ...
    """

    role: str
    content: str
    trained: bool | None = None
    parts: tuple[Segment, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Chat:
    """A conversation, rendered by a chat template.

    Attributes:
        is_preference: whether the row also has a rejected answer, which is not used.
    """

    turns: tuple[Turn, ...]
    tools: Sequence[Mapping[str, Any]] = ()
    is_preference: bool = False

    @property
    def roles(self) -> str:
        """The role sequence, for messages."""
        return " ".join(turn.role for turn in self.turns) or "empty"


@dataclass(frozen=True)
class Tokens:
    """A row that is tokenised already; labels are aligned with the ids, -100 = not trained."""

    ids: Sequence[int]
    labels: Sequence[int]


Sample = Passage | Chat | Tokens
