"""What a person is shown of rows and counts."""

from collections.abc import Callable

import numpy as np
from transformers import PreTrainedTokenizerBase

from ndtrain.data.prepare import Prepared
from ndtrain.data.preview import describe_data, mark_plain, trained_stretches


def test_trained_text_is_in_brackets(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    ids = np.array([*b"ask", *b"tell", 258, 10], dtype=np.int32)
    labels = np.array([-100] * 3 + [*b"tell", 258, -100], dtype=np.int32)
    stretches = trained_stretches(ids, labels, byte_tokenizer)
    assert mark_plain(stretches) == "ask[[tell<|im_end|>]]\n"


def test_the_first_token_is_never_shown_as_trained(
    byte_tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Nothing comes before it that could predict it; the row itself is left as it is."""
    ids = np.array([*b"abc"], dtype=np.int32)
    labels = ids.copy()
    labels.flags.writeable = False
    assert mark_plain(trained_stretches(ids, labels, byte_tokenizer)) == "a[[bc]]"


def test_counts_as_lines(prepare_rows: Callable[..., Prepared]) -> None:
    rows = [{"text": "abc"}, {"text": "abc"}, {"text": ""}, {"text": "x" * 40}]
    prepared = prepare_rows(rows, "completion", sequence_len=32, sample_packing=True)
    place = prepared.train.place(0).removesuffix(":1")
    assert list(describe_data(prepared.report)) == [
        f"{place}: 4 rows read, 4 token rows, 1 of them duplicates",
        f"  dropped: 1 under min_sample_len tokens (first: {place}:3)",
        f"  changed: 1 split (first: {place}:4)",
        "training rows: 4, 49 tokens, 91.8% of them trained, longest row 32",
        "packed rows: 2, 76.6% full",
        "  up to       8 tokens         2 ████████████████████████",
        "  up to      16 tokens         1 ████████████",
        "  up to      32 tokens         1 ████████████",
    ]
