"""Steps of a data rank: documents, positions and targets of every row, and what a step counts."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch

from ndtrain.data.batch import IGNORED, StepBatch
from ndtrain.data.loader import StepBatches
from ndtrain.data.prefetch import prefetch
from ndtrain.data.prepare import Prepared
from ndtrain.plan.plan import BatchPlan

PrepareRows = Callable[..., Prepared]


def make(
    prepared: Prepared,
    *,
    micro: int = 1,
    accumulation: int = 1,
    ranks: int = 1,
    rank: int = 0,
    **options: Any,
) -> StepBatches:
    defaults: dict[str, Any] = {"seed": 3, "sequence_len": 16, "packed": False}
    return StepBatches(
        prepared.train,
        batch=BatchPlan(micro, accumulation, ranks),
        data_rank=rank,
        **{**defaults, **options},
    )


@pytest.fixture
def three(prepare_rows: PrepareRows) -> Prepared:
    """Documents of 3, 4 and 6 tokens; the second trains only its last two."""
    rows = [
        {"input_ids": [11, 12, 13]},
        {"input_ids": [21, 22, 23, 24], "labels": [-100, -100, 23, 24]},
        {"input_ids": [31, 32, 33, 34, 35, 36]},
    ]
    return prepare_rows(rows, None, sequence_len=16)


def test_a_packed_row(three: Prepared) -> None:
    batches = make(three, packed=True, pad_to=16, shuffle=False)
    step = batches.at(0)
    (micro,) = step.micro
    assert micro.input_ids.tolist() == [
        [31, 32, 33, 34, 35, 36, 21, 22, 23, 24, 11, 12, 13, 0, 0, 0]
    ]
    no = IGNORED
    assert micro.targets.tolist() == [
        [32, 33, 34, 35, 36, no, no, 23, 24, no, 12, 13, no, no, no, no]
    ]
    assert micro.positions.tolist() == [[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 0, 1, 2, 0, 1, 2]]
    assert micro.documents.tolist() == [[0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 3, 3, 3]]
    assert micro.row_ids.tolist() == [0]
    assert (step.num_targets, step.num_tokens) == (9, 13)
    assert (batches.rows_per_epoch, batches.steps_per_epoch) == (1, 1)


def test_unpacked_rows_are_padded_to_the_multiple(three: Prepared) -> None:
    step = make(three, micro=3, row_multiple=4, shuffle=False).at(0)
    (micro,) = step.micro
    assert micro.input_ids.tolist() == [
        [31, 32, 33, 34, 35, 36, 0, 0],
        [21, 22, 23, 24, 0, 0, 0, 0],
        [11, 12, 13, 0, 0, 0, 0, 0],
    ]
    assert micro.documents.tolist() == [
        [0, 0, 0, 0, 0, 0, 1, 1],
        [0, 0, 0, 0, 1, 1, 1, 1],
        [0, 0, 0, 1, 1, 1, 1, 1],
    ]
    assert micro.positions[2].tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert micro.row_ids.tolist() == [2, 1, 0]
    assert all(
        tensor.dtype == torch.int64
        for tensor in (micro.input_ids, micro.targets, micro.positions, micro.documents)
    )


@pytest.mark.parametrize(
    ("multiple", "pad_to", "width"), [(1, None, 6), (5, None, 10), (1, 16, 16), (6, 16, 18)]
)
def test_width(three: Prepared, multiple: int, pad_to: int | None, width: int) -> None:
    step = make(three, micro=3, row_multiple=multiple, pad_to=pad_to).at(0)
    assert step.micro[0].input_ids.shape == (3, width)


def test_the_last_step_of_an_epoch_is_filled_with_empty_rows(three: Prepared) -> None:
    batches = make(three, micro=2)
    assert (batches.rows_per_epoch, batches.steps_per_epoch) == (3, 2)
    first, last, next_epoch = batches.at(0), batches.at(2), batches.at(3)
    assert (first.next_position, last.next_position, next_epoch.next_position) == (2, 3, 5)
    assert [round(step.epoch, 3) for step in (first, last, next_epoch)] == [0.667, 1.0, 1.667]
    empty = last.micro[0]
    assert empty.targets[1].tolist() == [IGNORED] * empty.targets.shape[1]
    assert empty.documents[1].tolist() == [0] * empty.targets.shape[1]
    assert first.num_targets + last.num_targets == 9
    assert first.num_tokens + last.num_tokens == 13


def test_three_rows_over_four_ranks_make_one_step(three: Prepared) -> None:
    """More ranks than rows: one step, and the rank without rows takes part with none."""
    steps = [make(three, ranks=4, rank=rank).at(0) for rank in range(4)]
    assert make(three, ranks=4).steps_per_epoch == 1
    targets = [int((step.micro[0].targets != IGNORED).sum()) for step in steps]
    assert sorted(targets) == [0, 2, 2, 5]
    assert {step.num_targets for step in steps} == {9}


def rows_in(step: StepBatch) -> list[tuple[int, ...]]:
    return [
        tuple(row[(row != 0) | (micro.positions[line] > 0)].tolist())
        for micro in step.micro
        for line, row in enumerate(micro.input_ids)
    ]


def test_steps_hold_the_same_rows_on_every_mesh(prepare_rows: PrepareRows) -> None:
    rows = [{"input_ids": [n, n, n][: 2 + n % 2]} for n in range(1, 24)]
    prepared = prepare_rows(rows, None)

    def step_rows(
        position: int, micro: int, accumulation: int, ranks: int
    ) -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = []
        for rank in range(ranks):
            batches = make(prepared, micro=micro, accumulation=accumulation, ranks=ranks, rank=rank)
            found += [row for row in rows_in(batches.at(position)) if any(row)]
        return sorted(tuple(token for token in row if token) for row in found)

    for position in (0, 8, 16, 23, 31):
        one = step_rows(position, 8, 1, 1)
        assert one == step_rows(position, 2, 2, 2) == step_rows(position, 1, 2, 4)
    epochs = [step_rows(0, 8, 1, 1), step_rows(23, 8, 1, 1)]
    assert epochs[0] != epochs[1]


def test_row_ids_do_not_depend_on_the_mesh(prepare_rows: PrepareRows) -> None:
    prepared = prepare_rows([{"input_ids": [n, n, n]} for n in range(1, 13)], None)

    def places(ranks: int) -> dict[int, int]:
        found: dict[int, int] = {}
        for rank in range(ranks):
            step = make(prepared, micro=8 // ranks, ranks=ranks, rank=rank).at(12)
            for micro in step.micro:
                found |= dict(
                    zip(micro.row_ids.tolist(), micro.input_ids[:, 0].tolist(), strict=True)
                )
        return found

    assert places(1) == places(2) == places(4)
    assert sorted(places(1)) == list(range(12, 20))


@pytest.mark.parametrize("workers", [0, 3])
def test_iteration_equals_single_steps_and_starts_anywhere(
    workers: int, prepare_rows: PrepareRows
) -> None:
    prepared = prepare_rows([{"input_ids": [n, n]} for n in range(1, 12)], None)
    batches = make(prepared, micro=2, accumulation=2, workers=workers)
    whole = list(batches.iterate(0, 7))
    assert [step.position for step in whole] == [0, 4, 8, 11, 15, 19, 22]
    for step, again in zip(whole[3:], batches.iterate(11, 4), strict=True):
        assert [m.input_ids.tolist() for m in step.micro] == [
            m.input_ids.tolist() for m in again.micro
        ]


@pytest.mark.parametrize("workers", [0, 3])
def test_iteration_can_be_left_early(workers: int, prepare_rows: PrepareRows) -> None:
    prepared = prepare_rows([{"input_ids": [1, 2]}] * 4, None)
    steps = make(prepared, workers=workers).iterate(0, 10**9)
    assert [step.position for step in islice(steps, 3)] == [0, 1, 2]
    steps.close()  # type: ignore[attr-defined]


def test_balanced_ranks_get_like_work(prepare_rows: PrepareRows) -> None:
    """One long document costs more attention than many short ones of as many tokens."""
    rows = [{"input_ids": [1] * 16}] * 4 + [{"input_ids": [1, 2]}] * 32
    prepared = prepare_rows(rows, None, sequence_len=16)

    def work(balance: bool) -> list[int]:
        sums = []
        for rank in range(2):
            total = 0
            batches = make(
                prepared, micro=4, ranks=2, rank=rank, packed=True, balance=balance, shuffle=False
            )
            for micro in batches.at(0).micro:
                for line in micro.documents:
                    total += sum(int(count) ** 2 for count in torch.bincount(line))
            sums.append(total)
        return sums

    assert len(set(work(balance=True))) == 1


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_prefetch_keeps_order_and_raises_in_place(ahead: int) -> None:
    def items() -> Any:
        yield from (1, 2)
        raise ValueError("third")

    found = prefetch(items(), ahead)
    assert [next(found), next(found)] == [1, 2]
    with pytest.raises(ValueError, match="third"):
        next(found)
