"""Which characters of a rendered conversation are trained.

Where the template tags answers with `generation` blocks, those are the answers. Elsewhere a
turn is found by rendering what stands before it: `messages[:i]` with the opening of an answer is
where the answer starts, `messages[:i+1]` is where it ends, and both must be a prefix of the whole
text. A template that rewrites earlier turns fails that check; then the turn is found by what
changes when its content does, and by its end marker; when that fails too, the row is refused:
nothing is masked by guess.
"""

from dataclasses import dataclass

from ndtrain.data.chat_template import ChatTemplate, Messages, TemplateRefusal
from ndtrain.data.sample import Chat, Turn
from ndtrain.recipe.data_keys import TurnRule

Span = tuple[int, int]
_PROBE = "7183920465"
"""Stands for the content of a turn in a trial rendering; digits survive `upper` and `trim`."""


class MaskError(Exception):
    """The conversation cannot be rendered, or an answer cannot be found in it."""


@dataclass(frozen=True)
class TrainRules:
    """What of a conversation is trained: turns by role, end tokens by rule, or everything."""

    roles: frozenset[str]
    end_tokens: TurnRule = "turn"
    everything: bool = False


@dataclass(frozen=True)
class Marked:
    """A rendered conversation and its trained spans, in order and without overlap."""

    text: str
    spans: tuple[Span, ...]


def mark_chat(template: ChatTemplate, chat: Chat, rules: TrainRules) -> Marked:
    """Render a conversation and find what is trained.

    Raises:
        MaskError: the template refuses the conversation, or a turn cannot be found.
    """
    return _Marker(template, chat, rules).mark()


class _Marker:
    """The work on one conversation: its text, its messages and the renderings of prefixes."""

    def __init__(self, template: ChatTemplate, chat: Chat, rules: TrainRules) -> None:
        self.template = template
        self.chat = chat
        self.rules = rules
        self.messages: Messages = template.messages_of(chat)
        self.text = ""

    def mark(self) -> Marked:
        wanted = [index for index, turn in enumerate(self.chat.turns) if self._wants(turn)]
        blocks: list[Span] | None = None
        try:
            if self.template.tracks_answers and not self.rules.everything:
                self.text, blocks = self.template.render_tracked(self.messages, self.chat.tools)
            else:
                self.text = self.template.render(self.messages, self.chat.tools)
        except TemplateRefusal as error:
            raise _refused(error) from None
        if self.rules.everything:
            return Marked(self.text, ((0, len(self.text)),))
        answers = [index for index, turn in enumerate(self.chat.turns) if turn.role == "assistant"]
        tagged: dict[int, Span] = {}
        if blocks is not None and len(blocks) == len(answers):
            tagged = dict(zip(answers, blocks, strict=True))
        with_ends = range(len(self.chat.turns)) if self.rules.end_tokens == "all" else wanted
        spans: list[Span] = []
        for index in with_ends:
            start, end = tagged.get(index) or self._find_turn(index)
            body_end, stop = self._split_end(start, end)
            if index in wanted:
                spans += self._body(index, start, body_end)
            if stop is not None and self._trains_end(index, wanted):
                spans.append((body_end, stop))
        return Marked(self.text, _join(spans))

    def _wants(self, turn: Turn) -> bool:
        """Whether the turn is trained, by its own wish or by its role."""
        return turn.trained if turn.trained is not None else turn.role in self.rules.roles

    def _trains_end(self, index: int, wanted: list[int]) -> bool:
        """Whether the end token of a turn is trained."""
        rule = self.rules.end_tokens
        return (
            rule == "all"
            or (rule == "turn" and index in wanted)
            or (rule == "last" and index == wanted[-1])
        )

    def _find_turn(self, index: int) -> Span:
        """Where the text of a turn starts and ends, by rendering prefixes."""
        turn = self.chat.turns[index]
        start = self._prefix(index, prompt=True) if turn.role == "assistant" and index else None
        if start is None:
            start = self._content_span(index)[0]
        last = index == len(self.messages) - 1
        end = len(self.text) if last else self._prefix(index + 1)
        if end is None:
            after = max(start, self._content_span(index)[1]) if turn.content else start
            end = self._next_marker(after)
        if end is None or end < start:
            raise MaskError(
                f"the end of turn {index + 1} ({turn.role}) cannot be found: the chat template "
                "rewrites earlier turns and writes no end token after them."
            )
        return start, end

    def _prefix(self, count: int, prompt: bool = False) -> int | None:
        """Length of the rendering of the first turns, if the whole text starts with it."""
        try:
            text = self.template.render(self.messages[:count], self.chat.tools, prompt)
        except TemplateRefusal:
            return None  # some templates refuse a conversation cut short; other ways are tried
        return len(text) if self.text.startswith(text) else None

    def _content_span(self, index: int) -> Span:
        """Where the content of a turn stands: the text that changes when the content does."""
        probe = _PROBE
        while probe in self.text:
            probe += "0"
        messages = [*self.messages]
        messages[index] = {**messages[index], "content": probe}
        try:
            probed = self.template.render(messages, self.chat.tools)
        except TemplateRefusal as error:
            raise _refused(error) from None
        before, found, after = probed.partition(probe)
        if not found:
            turn = self.chat.turns[index]
            raise MaskError(
                f"turn {index + 1} ({turn.role}) cannot be found in the rendered text: the chat "
                "template leaves its content out."
            )
        start = _same_start(before, self.text)
        same_end = _same_start(after[::-1], self.text[start:][::-1])
        return start, len(self.text) - same_end

    def _next_marker(self, begin: int) -> int | None:
        """Where the first end marker after a place ends."""
        found = [
            (place, place + len(marker))
            for marker in self.template.end_markers
            if (place := self.text.find(marker, begin)) >= 0
        ]
        return min(found)[1] if found else None

    def _split_end(self, start: int, end: int) -> tuple[int, int | None]:
        """End of the turn's own text, and end of the end token that closes it, if there is one."""
        body = self.text[start:end].rstrip()
        after = self.text[end:]
        for marker in self.template.end_markers:
            if body.endswith(marker):
                return start + len(body) - len(marker), start + len(body)
        for marker in self.template.end_markers:
            if after.startswith(marker):
                return end, end + len(marker)
        return end, None

    def _body(self, index: int, start: int, end: int) -> list[Span]:
        """The trained stretches of a turn's own text."""
        turn = self.chat.turns[index]
        if not turn.parts:
            return [(start, end)]
        place, _ = self._content_span(index)
        at = place
        if not self.text.startswith(turn.content.rstrip(), place):  # the template trims it
            at -= len(turn.content) - len(turn.content.lstrip())
            if not self.text.startswith(turn.content.strip(), place):
                raise MaskError(
                    f"the parts of turn {index + 1} ({turn.role}) cannot be told apart: the chat "
                    "template rewrites its content."
                )
        spans: list[Span] = []
        for part in turn.parts:
            if part.trained:
                spans.append((max(at, place), min(at + len(part.text), end)))
            at += len(part.text)
        return spans


def _refused(refusal: TemplateRefusal) -> MaskError:
    """The message for a conversation that the template fails on."""
    return MaskError(f"the chat template refuses the row: {str(refusal).rstrip('.')}.")


def _same_start(one: str, other: str) -> int:
    """How many characters two texts begin with in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _join(spans: list[Span]) -> tuple[Span, ...]:
    """Spans in order, touching ones joined, empty ones left out."""
    joined: list[Span] = []
    for start, end in sorted(span for span in spans if span[0] < span[1]):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return tuple(joined)
