"""What holds for any documents, any mesh and any conversation."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ndtrain.data.batch import IGNORED
from ndtrain.data.chat_mask import TrainRules, mark_chat
from ndtrain.data.loader import StepBatches
from ndtrain.data.order import RowOrder
from ndtrain.data.pack import pack
from ndtrain.data.sample import Chat, Turn
from ndtrain.data.template_search import build_chat_template
from ndtrain.data.tokens import TextEncoder
from ndtrain.model.byte_tokenizer import build_byte_tokenizer
from ndtrain.plan.plan import BatchPlan

TOKENIZER = build_byte_tokenizer()
LENGTHS = st.lists(st.integers(1, 64), min_size=1, max_size=120)


@given(LENGTHS, st.integers(64, 200))
def test_packing_loses_and_doubles_nothing(lengths: list[int], capacity: int) -> None:
    packing = pack(lengths, capacity)
    rows = [packing.documents(row).tolist() for row in range(len(packing))]
    assert sorted(document for row in rows for document in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[document] for document in row) <= capacity for row in rows)
    assert [row.tolist() for row in np.split(packing.order, packing.starts[1:-1])] == rows


@given(LENGTHS, st.integers(64, 200))
def test_no_two_rows_would_fit_into_one(lengths: list[int], capacity: int) -> None:
    """A consequence of best fit: a new row is opened only when nothing had room."""
    packing = pack(lengths, capacity)
    sums = sorted(
        sum(lengths[document] for document in packing.documents(row).tolist())
        for row in range(len(packing))
    )
    assert len(sums) < 2 or sums[0] + sums[1] > capacity


@given(LENGTHS, st.integers(0, 5), st.integers(0, 9), st.booleans(), st.booleans())
def test_every_epoch_is_a_permutation(
    lengths: list[int], epoch: int, seed: int, packed: bool, shuffle: bool
) -> None:
    sizes = np.array(lengths, dtype=np.int32)
    order = RowOrder(sizes, seed=seed, shuffle=shuffle, packed=packed, sequence_len=64)
    rows = order.epoch(epoch)
    assert len(rows) == order.num_rows
    assert sorted(rows.order.tolist()) == list(range(len(lengths)))
    for row in range(len(rows)):
        assert 0 < sizes[rows.documents(row)].sum() <= 64
    again = RowOrder(sizes, seed=seed, shuffle=shuffle, packed=packed, sequence_len=64)
    assert again.epoch(epoch).order.tolist() == rows.order.tolist()


class MadeUpRows:
    """Token rows in memory: document `n` holds only the id `n + 1`."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = np.array(lengths, dtype=np.int32)
        self.target_counts = self.lengths - 1

    def __len__(self) -> int:
        return len(self.lengths)

    def row(self, number: int) -> tuple[Any, Any]:
        ids = np.full(int(self.lengths[number]), number + 1, dtype=np.int32)
        return ids, ids


MESHES = st.sampled_from([(1, 1, 1), (1, 1, 2), (2, 1, 2), (1, 3, 2), (2, 2, 4), (3, 1, 1)])


@settings(deadline=None)
@given(
    LENGTHS, MESHES, st.integers(0, 9), st.booleans(), st.booleans(), st.sampled_from([1, 8, 24])
)
def test_an_epoch_reads_every_document_once_on_any_mesh(
    lengths: list[int],
    mesh: tuple[int, int, int],
    seed: int,
    packed: bool,
    balance: bool,
    multiple: int,
) -> None:
    micro, accumulation, ranks = mesh
    rows: Any = MadeUpRows(lengths)
    loaders = [
        StepBatches(
            rows,
            batch=BatchPlan(micro, accumulation, ranks),
            data_rank=rank,
            seed=seed,
            sequence_len=64,
            packed=packed,
            balance=balance,
            row_multiple=multiple,
        )
        for rank in range(ranks)
    ]
    seen: list[int] = []
    position = loaders[0].rows_per_epoch  # the second epoch
    for _ in range(loaders[0].steps_per_epoch):
        steps = [loader.at(position) for loader in loaders]
        assert len({(s.num_targets, s.num_tokens, s.next_position, s.epoch) for s in steps}) == 1
        targets = tokens = 0
        for step in steps:
            assert len(step.micro) == accumulation
            for batch in step.micro:
                assert batch.input_ids.shape == batch.targets.shape == batch.documents.shape
                assert batch.input_ids.shape[1] % multiple == 0
                for line in range(micro):
                    ids, numbers = batch.input_ids[line], batch.documents[line]
                    wanted, places = batch.targets[line], batch.positions[line]
                    assert numbers[0] == 0
                    assert (numbers.diff() >= 0).all()
                    starts = [0, *(numbers.diff().nonzero().flatten() + 1).tolist()]
                    assert places[starts].tolist() == [0] * len(starts)
                    assert (places.diff()[numbers.diff() == 0] == 1).all()
                    assert (wanted[:-1][numbers.diff() != 0] == IGNORED).all()
                    assert (wanted[ids == 0] == IGNORED).all()
                    assert (wanted[wanted != IGNORED] == ids[wanted != IGNORED]).all()
                    seen += [int(ids[start]) for start in starts if ids[start]]
                    targets += int((wanted != IGNORED).sum())
                    tokens += int((ids != 0).sum())
        assert (targets, tokens) == (steps[0].num_targets, steps[0].num_tokens)
        position = steps[0].next_position
    assert position == 2 * loaders[0].rows_per_epoch
    assert sorted(seen) == list(range(1, len(lengths) + 1))


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="<>\r"), max_size=12)


@settings(deadline=None)
@pytest.mark.parametrize("name", ["tokenizer_default", "chatml", "llama3", "gemma", "qwen"])
@given(st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=4), st.data())
def test_masks_of_conversations(
    name: str, pairs: list[tuple[str, str]], data: st.DataObject
) -> None:
    """Spans are inside the text, in order, apart, and label exactly the tokens they cover."""
    turns: list[Turn] = []
    for question, answer in pairs:
        wish = data.draw(st.sampled_from([None, True, False]))
        turns += [Turn("user", question), Turn("assistant", answer, trained=wish)]
    template = build_chat_template(TOKENIZER, name)
    marked = mark_chat(template, Chat(tuple(turns)), TrainRules(frozenset({"assistant"})))
    edges = [edge for span in marked.spans for edge in span]
    assert edges == sorted(set(edges))
    assert all(0 <= edge <= len(marked.text) for edge in edges)
    assert len(marked.spans) == sum(
        turn.role == "assistant" and turn.trained is not False for turn in turns
    )
    encoded = TextEncoder(TOKENIZER).encode_spans(marked.text, marked.spans)
    assert len(encoded.ids) == len(encoded.labels)
    assert encoded.ids.tolist() == TOKENIZER.encode(marked.text, add_special_tokens=False)
    kept = encoded.labels != IGNORED
    assert (encoded.labels[kept] == encoded.ids[kept]).all()
    trained = "".join(marked.text[start:end] for start, end in marked.spans)
    assert TOKENIZER.decode(encoded.labels[kept].tolist()) == trained
    pieces, at = [], 0
    for edge in [*edges, len(marked.text)]:
        pieces.append(marked.text[at:edge])
        at = edge
    assert "".join(pieces) == template.render(template.messages_of(Chat(tuple(turns))), ())
