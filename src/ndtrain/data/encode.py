"""From raw rows to token rows: parse, shape, tokenise, fit the length; count what is left out."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from ndtrain.data.batch import IGNORED
from ndtrain.data.chat_mask import MaskError, TrainRules, mark_chat
from ndtrain.data.chat_template import ChatTemplate
from ndtrain.data.formats.catalog import Format
from ndtrain.data.formats.chat import ROLES
from ndtrain.data.json_text import UnusableJson, check_characters
from ndtrain.data.report import UNKNOWN_ROLE
from ndtrain.data.rows import SKIP_ADVICE, RawRow, Row
from ndtrain.data.sample import Chat, Passage, Sample, Tokens
from ndtrain.data.tokens import Encoded, Ids, TextEncoder
from ndtrain.errors import DataError
from ndtrain.recipe.problem import nearest
from ndtrain.recipe.schema import DatasetSpec

BAD_ROW = "could not be used"
TOO_LONG = "longer than sequence_len"
TOO_SHORT = "under min_sample_len tokens"
NOTHING_TRAINED = "no trained token"
TRUNCATED = "truncated"
SPLIT = "split"
PREFERENCE = "preference rows: only the chosen answer is trained"
TWO_STARTS = "two start tokens"
TWO_ENDS = "two end tokens"
NO_END = "an answer without an end token"
SPLIT_END = "an end marker of several tokens"

_MOST_BROKEN = 5
"""Unusable rows that one message names."""


@dataclass(frozen=True)
class EncodeRules:
    """The options of a recipe that decide how a row becomes tokens."""

    sequence_len: int
    excess: Literal["drop", "truncate", "split", "raise"]
    min_len: int
    train_on_inputs: bool
    skip_bad_rows: bool
    default_system: str | None
    chat: TrainRules


@dataclass
class Chunk:
    """Token rows of some raw rows, end to end, with counts of what happened to the others."""

    rows_in: int = 0
    ids: list[Ids] = field(default_factory=list)
    labels: list[Ids] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, document: Encoded, where: str) -> None:
        """Take a finished row."""
        self.ids.append(document.ids)
        self.labels.append(document.labels)
        self.places.append(where)
        digest = hashlib.blake2b(document.ids.tobytes(), digest_size=16)
        digest.update(document.labels.tobytes())
        self.digests.append(digest.digest())

    def count(self, reason: str, where: str) -> None:
        """Count something that happened to a row, and keep the first place."""
        self.counts[reason] += 1
        self.examples.setdefault(reason, where)


class RowEncoder:
    """Turns the raw rows of one dataset into token rows."""

    def __init__(
        self,
        texts: TextEncoder,
        spec: DatasetSpec,
        read: Format,
        rules: EncodeRules,
        template: ChatTemplate | None,
    ) -> None:
        self.texts = texts
        self.spec = spec
        self.read = read
        self.rules = rules
        self.template = template
        self._doubts: dict[str, str] = {}
        self._vocabulary = len(texts.tokenizer)
        self._markers = () if template is None else template.end_markers
        self._marker_is_split = any(len(texts.ids(marker)) > 1 for marker in self._markers)

    def encode(self, raws: Sequence[RawRow]) -> Chunk:
        """Token rows of raw rows, in order.

        Raises:
            DataError: a row cannot be used, unless the dataset skips such rows.
        """
        chunk = Chunk(rows_in=len(raws))
        broken: list[DataError] = []
        for raw in raws:
            try:
                self._take(raw, chunk)
            except DataError as error:
                if self.rules.skip_bad_rows:
                    chunk.count(BAD_ROW, f"{error.where}: {error.message}")
                    continue
                broken.append(error)
                if len(broken) > _MOST_BROKEN:
                    break
        if broken:
            raise _all_broken(broken)
        return chunk

    def _take(self, raw: RawRow, chunk: Chunk) -> None:
        """One raw row as far as it goes."""
        row = raw.parse()
        try:
            self._add(row, self.read(row, self.spec), chunk)
        except UnusableJson as error:
            raise row.fail(f"the row cannot be used: {error}.", f"Fix it. {SKIP_ADVICE}") from None
        except RecursionError:
            raise row.fail("its values are nested too deep.", f"Fix it. {SKIP_ADVICE}") from None

    def _add(self, row: Row, sample: Sample, chunk: Chunk) -> None:
        """Tokenise one sample and take what fits."""
        match sample:
            case Chat():
                if not any(turn.role != "system" for turn in sample.turns):
                    chunk.count(NOTHING_TRAINED, row.where)
                    return
                self._note_roles(sample, row.where, chunk)
                whole = self._encode_chat(row, sample, chunk)
                if sample.is_preference:
                    chunk.count(PREFERENCE, row.where)
            case Passage():
                whole = self._encode_passage(sample)
            case Tokens():
                whole = self._check_tokens(row, sample)
        self._note_doubles(whole, row.where, chunk)
        splits = isinstance(sample, Passage) and sample.splits
        for piece in self._fit(whole, splits, row, chunk):
            if len(piece.ids) < self.rules.min_len:
                chunk.count(TOO_SHORT, row.where)
            elif not (piece.labels[1:] != IGNORED).any():
                chunk.count(NOTHING_TRAINED, row.where)
            else:
                chunk.add(piece, row.where)

    def _note_roles(self, chat: Chat, where: str, chunk: Chunk) -> None:
        """Count rows with a role that neither the recipe nor the template knows."""
        for role in {turn.role for turn in chat.turns}:
            if role not in self._doubts:
                self._doubts[role] = self._doubt(role)
            if self._doubts[role]:
                chunk.count(self._doubts[role], where)

    def _doubt(self, role: str) -> str:
        """What is wrong with a role; empty for one that is known."""
        template = "" if self.template is None else self.template.source
        known = {*ROLES.values(), *(self.spec.roles or ()), *self.spec.roles_to_train}
        if role in known or f"'{role}'" in template or f'"{role}"' in template:
            return ""
        close = nearest(role, [*sorted(known), *ROLES])
        advice = f"did you mean '{close}'?" if close else "name it in the dataset's roles"
        return f"{UNKNOWN_ROLE} '{role}'; {advice}"

    def _encode_chat(self, row: Row, chat: Chat, chunk: Chunk) -> Encoded:
        """A conversation through the template."""
        template = self.template
        assert template is not None
        adapted = template.adapt(chat, self.rules.default_system)
        try:
            marked = mark_chat(template, adapted, self.rules.chat)
        except MaskError as error:
            raise row.fail(
                f"{error} Roles of the row: {adapted.roles}.",
                "Fix the row, or set on_bad_row: skip for this dataset.",
            ) from None
        if marked.spans and not self.rules.chat.everything:
            stops = self.rules.chat.end_tokens != "none"
            if stops and not marked.text[: marked.spans[-1][1]].endswith(self._markers or "\0"):
                chunk.count(NO_END, row.where)
            if stops and self._marker_is_split:
                chunk.count(SPLIT_END, row.where)
        check_characters(marked.text)
        return self.texts.encode_spans(marked.text, marked.spans)

    def _encode_passage(self, passage: Passage) -> Encoded:
        """Segments one by one, between the start tokens and a trained end token."""
        for segment in passage.segments:
            check_characters(segment.text)
        pieces = [self.texts.ids(segment.text) for segment in passage.segments]
        starts = self.texts.starts
        brings_own = bool(starts and pieces) and pieces[0][: len(starts)] == starts
        ids: list[int] = list(starts) if passage.bounded and not brings_own else []
        labels = [IGNORED] * len(ids)
        for segment, piece in zip(passage.segments, pieces, strict=True):
            trained = segment.trained or self.rules.train_on_inputs
            ids += piece
            labels += piece if trained else [IGNORED] * len(piece)
        if passage.bounded and ids[-1:] != self.texts.ends:
            ids += self.texts.ends
            labels += self.texts.ends
        return Encoded(np.array(ids, dtype=np.int32), np.array(labels, dtype=np.int32))

    def _check_tokens(self, row: Row, sample: Tokens) -> Encoded:
        """Given ids and labels, which the vocabulary must hold."""
        top = max(max(numbers, default=0) for numbers in (sample.ids, sample.labels))
        if top >= self._vocabulary:
            kind = "token id" if top in sample.ids else "label"
            raise row.fail(
                f"{kind} {top} is outside the vocabulary of {self._vocabulary}.",
                "The rows were tokenised for another model.",
            )
        ids = np.array(sample.ids, dtype=np.int32)
        labels = ids if self.rules.train_on_inputs else np.array(sample.labels, dtype=np.int32)
        return Encoded(ids, labels)

    def _note_doubles(self, whole: Encoded, where: str, chunk: Chunk) -> None:
        """Count rows that begin or end with the same special token twice."""
        ids, tokenizer = whole.ids, self.texts.tokenizer
        if len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
            chunk.count(TWO_STARTS, where)
        if len(ids) > 1 and ids[-1] == ids[-2] == tokenizer.eos_token_id:
            chunk.count(TWO_ENDS, where)

    def _fit(self, whole: Encoded, splits: bool, row: Row, chunk: Chunk) -> Iterator[Encoded]:
        """The row, or what the strategy makes of one that is too long."""
        limit = self.rules.sequence_len
        length = len(whole.ids)
        if length <= limit:
            yield whole
            return
        strategy = "split" if splits and self.rules.excess != "raise" else self.rules.excess
        if strategy == "raise":
            raise row.fail(
                f"the row has {length} tokens, sequence_len is {limit}.",
                "Raise sequence_len, or set excess_length_strategy: drop, truncate or split.",
            )
        if strategy == "drop":
            chunk.count(TOO_LONG, row.where)
        elif strategy == "truncate":
            chunk.count(TRUNCATED, row.where)
            yield replace(whole, ids=whole.ids[:limit], labels=whole.labels[:limit])
        else:
            chunk.count(SPLIT, row.where)
            for start in range(0, length, limit):
                stop = start + limit
                yield replace(whole, ids=whole.ids[start:stop], labels=whole.labels[start:stop])


def _all_broken(broken: Sequence[DataError]) -> DataError:
    """The first unusable row in full, and the places of the next ones."""
    first, *others = broken
    if not others:
        return first
    places = ", ".join(error.where for error in others[: _MOST_BROKEN - 1])
    more = " and more" if len(broken) > _MOST_BROKEN else ""
    hint = f"{first.hint} Unusable too: {places}{more}.".lstrip()
    return DataError(first.message, where=first.where, hint=hint)
