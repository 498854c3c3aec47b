"""From text to token ids, and which ids lie inside trained spans of characters.

Texts are encoded one by one and never through the tokenizer library's own thread pool: a process
that has used that pool cannot be forked without a warning and slower children.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from ndtrain.data.batch import IGNORED

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Encoded:
    """Token ids and aligned labels of one document."""

    ids: Ids
    labels: Ids


class TextEncoder:
    """A tokenizer as the pipeline needs it: ids of a text, and ids with trained spans.

    Attributes:
        starts: ids the tokenizer puts before a text of its own accord.
        ends: the id that closes a document, empty when the tokenizer has none.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()
        self.starts = self._start_ids()
        end = tokenizer.eos_token_id
        self.ends: list[int] = [end] if isinstance(end, int) else []

    def ids(self, text: str) -> list[int]:
        """Ids of a text, with no special token added."""
        if self._backend is not None:
            return list(self._backend.encode(text, add_special_tokens=False).ids)
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def encode_spans(self, text: str, spans: Sequence[tuple[int, int]]) -> Encoded:
        """Ids of a text; a token is trained when it starts inside one of the ordered spans.

        A token that straddles the start of a span belongs to what comes before: the model would
        have to write it from the middle.
        """
        if self._backend is None:
            return self._encode_pieces(text, spans)
        encoding = self._backend.encode(text, add_special_tokens=False)
        ids = np.array(encoding.ids, dtype=np.int32)
        labels = np.full_like(ids, IGNORED)
        for start, end in spans:
            first = _first_token(encoding, start, len(text), len(ids))
            last = _first_token(encoding, end, len(text), len(ids))
            labels[first:last] = ids[first:last]
        return Encoded(ids, labels)

    def _encode_pieces(self, text: str, spans: Sequence[tuple[int, int]]) -> Encoded:
        """For tokenizers that do not tell which characters a token covers: piece by piece."""
        ids: list[int] = []
        labels: list[int] = []
        at = 0
        for start, end in spans:
            before, inside = self.ids(text[at:start]), self.ids(text[start:end])
            ids += before + inside
            labels += [IGNORED] * len(before) + inside
            at = end
        rest = self.ids(text[at:])
        return Encoded(
            np.array(ids + rest, dtype=np.int32),
            np.array(labels + [IGNORED] * len(rest), dtype=np.int32),
        )

    def _start_ids(self) -> list[int]:
        """Ids before a text that the tokenizer's own post-processing adds."""
        plain = self.ids("a")
        if self._backend is not None:
            whole = list(self._backend.encode("a", add_special_tokens=True).ids)
        else:
            whole = list(self.tokenizer.encode("a"))
        for place in range(len(whole) - len(plain) + 1):
            if whole[place : place + len(plain)] == plain:
                return whole[:place]
        return []


def _first_token(encoding: Any, place: int, text_length: int, count: int) -> int:
    """Number of the first token that starts at or after a character."""
    while place < text_length:
        token = encoding.char_to_token(place)
        if token is not None:
            starts_before = encoding.token_to_chars(token)[0] < place
            return int(token) + 1 if starts_before else int(token)
        place += 1
    return count
