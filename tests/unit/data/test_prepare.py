"""Preparing whole datasets: what is dropped, counted, refused, held out and mixed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase

from ndtrain.data.loader import StepBatches
from ndtrain.data.prepare import Prepared, open_prepared, prepare
from ndtrain.data.preview import describe_data
from ndtrain.errors import DataError, RecipeError
from ndtrain.model.byte_tokenizer import build_byte_tokenizer
from ndtrain.plan.plan import BatchPlan
from ndtrain.recipe.load import load_recipe
from ndtrain.recipe.schema import Recipe

PrepareRows = Callable[..., Prepared]
ALPACA = {"instruction": "i", "output": "o"}


def messages(*turns: tuple[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


TALK = messages(("user", "Hi"), ("assistant", "Yo"))


def contents(prepared: Prepared) -> list[tuple[list[int], list[int]]]:
    rows = prepared.train
    return [
        (rows.row(place)[0].tolist(), rows.row(place)[1].tolist()) for place in range(len(rows))
    ]


def test_json_and_jsonl_of_the_same_rows_give_the_same_tokens(
    tmp_path: Path, prepare_file: PrepareRows
) -> None:
    rows = [{"instruction": f"say {n}", "input": "", "output": str(n)} for n in range(5)]
    lines, array = tmp_path / "a.jsonl", tmp_path / "a.json"
    lines.write_text("\n".join(json.dumps(row) for row in rows))
    array.write_text(json.dumps(rows, indent=2))
    assert contents(prepare_file(lines)) == contents(prepare_file(array))


def test_padding_with_the_end_token_still_trains_the_end(
    prepare_rows: PrepareRows, byte_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Padding is known by its place: real end tokens stay targets, whatever fills the rest."""
    prepared = prepare_rows([ALPACA, {"instruction": "long " * 9, "output": "o"}])
    batches = StepBatches(
        prepared.train,
        batch=BatchPlan(2, 1, 1),
        data_rank=0,
        seed=0,
        sequence_len=4096,
        packed=False,
    )
    micro = batches.at(0).micro[0]
    end = byte_tokenizer.eos_token_id
    assert (micro.targets == end).sum(dim=1).tolist() == [1, 1]
    padding = micro.documents == 1
    assert padding.sum(dim=1).tolist() == [0, 44]
    assert (micro.targets[padding] == -100).all()


def test_double_tokens_are_reported(
    byte_tokenizer: PreTrainedTokenizerBase, prepare_rows: PrepareRows
) -> None:
    row = {"input_ids": [258, 258, 5, 258, 258]}
    assert prepare_rows([row], None).report.sources[0].warnings == {"two end tokens": 1}


def test_own_end_and_start_tokens_are_not_doubled(prepare_rows: PrepareRows, expect: Any) -> None:
    prepared = prepare_rows([{"text": "ab<|im_end|>"}], "completion")
    assert contents(prepared) == [expect([("ab<|im_end|>", True)])]


def test_start_token_is_added_once(prepare_rows: PrepareRows) -> None:
    """A tokenizer that puts a start token before every text, and a text that brings its own."""
    tokenizer = build_byte_tokenizer()
    start = "<|im_start|>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{start} $A", special_tokens=[(start, 257)]
    )
    tokenizer.bos_token = start
    rows = [{"text": "ab"}, {"text": f"{start}ab"}, {"text": f"{start}{start}ab"}]
    prepared = prepare_rows(rows, "completion", tokenizer=tokenizer)
    once = ([257, 97, 98, 258], [-100, 97, 98, 258])
    assert contents(prepared)[0] == once
    assert contents(prepared)[1][0] == once[0]
    assert prepared.report.sources[0].warnings == {"two start tokens": 1}
    chat = prepare_rows([TALK], "chat_template", tokenizer=tokenizer)
    assert contents(chat)[0][0].count(257) == 2  # one a turn, as the template writes it


def test_preference_rows_are_counted(prepare_rows: PrepareRows) -> None:
    prepared = prepare_rows([{"prompt": "a", "chosen": "b", "rejected": "c"}], "chat_template")
    changed = prepared.report.sources[0].changed
    assert changed == {"preference rows: only the chosen answer is trained": 1}


def test_answers_without_an_end_token_are_reported(prepare_rows: PrepareRows) -> None:
    bare = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    keys = {"chat_template": "jinja", "chat_template_jinja": bare}
    warnings = prepare_rows([TALK], "chat_template", **keys).report.sources[0].warnings
    assert warnings == {"an answer without an end token": 1}


def test_end_marker_that_the_vocabulary_lacks_is_reported(prepare_rows: PrepareRows) -> None:
    warnings = prepare_rows([TALK], "chat_template", chat_template="llama3").report.sources[0]
    assert warnings.warnings == {"an end marker of several tokens": 1}


def test_held_out_rows_are_disjoint_and_stay_the_same(prepare_rows: PrepareRows) -> None:
    rows = [{"text": f"row {n}"} for n in range(40)]
    first = prepare_rows(rows, "completion", val_set_size=0.25)
    assert (len(first.train), len(first.evals["validation"])) == (30, 10)
    training = {first.train.place(place) for place in range(30)}
    held = {first.evals["validation"].place(place) for place in range(10)}
    assert len(training | held) == 40
    again = prepare_rows(rows, "completion", val_set_size=0.25, sequence_len=999)
    assert held == {again.evals["validation"].place(place) for place in range(10)}
    other = prepare_rows(rows, "completion", val_set_size=10, preprocessing_seed=7)
    assert held != {other.evals["validation"].place(place) for place in range(10)}


def test_holding_everything_out_is_refused(prepare_rows: PrepareRows) -> None:
    with pytest.raises(DataError, match="holds out 3 of 3 rows: none is left"):
        prepare_rows([{"text": "ab"}] * 3, "completion", val_set_size=3)


def test_duplicates_are_counted_and_dropped_on_request(prepare_rows: PrepareRows) -> None:
    rows = [{"text": "ab"}, {"text": "cd"}, {"text": "ab"}]
    kept = prepare_rows(rows, "completion")
    assert (len(kept.train), kept.report.sources[0].duplicates) == (3, 1)
    dropped = prepare_rows(rows, "completion", dataset_exact_deduplication=True)
    assert (len(dropped.train), dropped.report.sources[0].duplicates) == (2, 1)


def test_evaluation_sets_are_named_after_their_files(
    write_jsonl: Any, prepare_file: PrepareRows
) -> None:
    train = write_jsonl({"text": "ab"}, name="train.jsonl")
    held = write_jsonl({"text": "cd"}, {"text": "ef"}, name="held.jsonl")
    sets = [{"path": str(held), "type": "completion"}] * 2
    prepared = prepare_file(train, "completion", test_datasets=sets)
    assert {name: len(rows) for name, rows in prepared.evals.items()} == {"held": 2, "held-2": 2}
    assert prepared.report.eval_rows == {"held": 2, "held-2": 2}


def test_no_evaluation_set_takes_the_place_of_another_or_of_the_training_rows(
    write_jsonl: Any, prepare_file: PrepareRows, tmp_path: Path
) -> None:
    rows = write_jsonl({"text": "ab"}, {"text": "cd"})
    sets = []
    for number, name in enumerate(("train", "a", "a-2", "a", "a", "validation")):
        (tmp_path / str(number)).mkdir()
        held = write_jsonl({"text": f"held {number}"}, name=f"{number}/{name}.jsonl")
        sets.append({"path": str(held), "type": "completion"})
    prepared = prepare_file(rows, "completion", test_datasets=sets)
    assert [prepared.train.place(place) for place in range(2)] == [f"{rows}:1", f"{rows}:2"]
    assert {name: held.place(0) for name, held in prepared.evals.items()} == {
        name: f"{sets[number]['path']}:1"
        for number, name in enumerate(("train", "a", "a-2", "a-3", "a-4", "validation"))
    }


def test_weights_and_samples(write_jsonl: Any, prepare_file: PrepareRows) -> None:
    small = write_jsonl(*({"text": f"s{n}"} for n in range(10)), name="small.jsonl")
    large = write_jsonl(*({"text": f"l{n}"} for n in range(30)), name="large.jsonl")

    def shares(**second: Any) -> tuple[int, int]:
        sets = [
            {"path": str(small), "type": "completion"},
            {"path": str(large), "type": "completion", **second},
        ]
        train = prepare_file(small, datasets=sets).train
        names = [Path(train.place(place)).name[0] for place in range(len(train))]
        return names.count("s"), names.count("l")

    assert shares() == (10, 30)
    assert shares(weight=1.0) == (20, 20)
    assert shares(weight=3.0) == (10, 30)
    assert shares(samples=7) == (10, 7)
    assert shares(samples=65) == (10, 65)


def test_samples_of_an_evaluation_set(write_jsonl: Any, prepare_file: PrepareRows) -> None:
    train = write_jsonl({"text": "ab"}, name="rows.jsonl")
    held = write_jsonl(*({"text": f"h{n}"} for n in range(9)), name="held.jsonl")

    def places(samples: int) -> list[str]:
        sets = [{"path": str(held), "type": "completion", "samples": samples}]
        prepared = prepare_file(train, "completion", test_datasets=sets)
        rows = prepared.evals["held"]
        assert prepared.report.eval_rows == {"held": samples}
        assert prepared.report.sources[1].rows_taken == samples
        return [rows.place(place) for place in range(len(rows))]

    every = [f"{held}:{line}" for line in range(1, 10)]
    assert places(9) == every
    some = places(4)
    assert some == sorted(set(some))
    assert len(some) == 4
    assert set(some) < set(every)
    assert places(11)[:9] == every


def test_rows_that_each_dataset_gives(write_jsonl: Any, prepare_file: PrepareRows) -> None:
    small = write_jsonl(*({"text": f"s{n}"} for n in range(10)), name="small.jsonl")
    large = write_jsonl(*({"text": f"l{n}"} for n in range(30)), name="large.jsonl")
    held = write_jsonl(*({"text": f"h{n}"} for n in range(5)), name="held.jsonl")
    sets = [
        {"path": str(small), "type": "completion", "weight": 1.0},
        {"path": str(large), "type": "completion", "weight": 1.0},
    ]
    tests = [{"path": str(held), "type": "completion"}]
    report = prepare_file(small, datasets=sets, test_datasets=tests).report
    assert [source.rows_taken for source in report.sources] == [20, 20, 5]
    assert list(describe_data(report))[:3] == [
        f"{small}: 10 rows read, 10 token rows, 20 taken",
        f"{large}: 30 rows read, 30 token rows, 20 taken",
        f"{held}: 5 rows read, 5 token rows",
    ]
    halved = prepare_file(large, "completion", val_set_size=0.5).report
    assert [source.rows_taken for source in halved.sources] == [15]


def test_report_adds_up(prepare_rows: PrepareRows) -> None:
    rows = [{"text": "ab" * n} for n in range(1, 9)]
    prepared = prepare_rows(rows, "completion", sample_packing=True, sequence_len=32)
    report = prepared.report
    assert report.tokens == int(prepared.train.lengths.sum()) == sum(2 * n + 1 for n in range(1, 9))
    assert report.trained_tokens == report.tokens - 8
    assert sum(rows for _, rows in report.lengths) == report.train_rows == 8
    assert report.longest == 17
    assert report.packed_rows == 3
    assert report.fill == pytest.approx(80 / 96)
    assert report.trained_share == pytest.approx(72 / 80)
    assert open_prepared(prepared.path).report == report


def test_text_stream_stops_when_the_run_has_enough(
    write_jsonl: Any, prepare_file: PrepareRows, tmp_path: Path, byte_tokenizer: Any
) -> None:
    path = write_jsonl(*({"body": "abcdefg"} for _ in range(5000)))
    stream = {"path": str(path), "text_column": "body", "skip": 3}
    keys = {"pretraining_dataset": [stream], "learning_rate": 1e-3, "sequence_len": 64}
    whole = prepare(Recipe.model_validate(keys), byte_tokenizer, "b", tmp_path / "cache")
    assert len(whole.train) == 4997
    assert whole.train.place(0) == f"{path}:4"
    bounded = Recipe.model_validate({**keys, "max_steps": 4, "global_batch_size": 2})
    part = prepare(bounded, byte_tokenizer, "b", tmp_path / "cache")
    assert 4 * 2 * 64 <= part.report.tokens < whole.report.tokens / 5


@pytest.mark.parametrize(
    ("line", "key", "message"),
    [
        ("path: {tmp}/none.jsonl", "path", "does not exist"),
        ("path: {tmp}/rows.jsonl\n    type: alpacca", "type", "dataset type 'alpacca' is unknown"),
        ("path: {tmp}/rows.jsonl\n    chat_template: no", "chat_template", "'no' is unknown"),
    ],
)
def test_a_wrong_entry_is_named_by_its_line(
    line: str, key: str, message: str, tmp_path: Path, write_jsonl: Any, byte_tokenizer: Any
) -> None:
    write_jsonl(TALK)
    recipe = tmp_path / "r.yaml"
    text = line.format(tmp=tmp_path).replace(": no", ": 'no'")
    recipe.write_text(f"model_config: {{}}\nlearning_rate: 1\ndatasets:\n  - {text}\n")
    loaded = load_recipe(recipe, check=False)
    with pytest.raises(RecipeError, match=message) as caught:
        prepare(loaded, byte_tokenizer, "b", tmp_path / "cache")
    number = 4 + text.splitlines().index(next(x for x in text.splitlines() if key in x))
    assert caught.value.where.startswith(f"{recipe}:{number}:")


def test_folders_and_patterns(tmp_path: Path, prepare_file: PrepareRows) -> None:
    for name in ("b.jsonl", "a.jsonl", "note.xyz"):
        (tmp_path / "rows").mkdir(exist_ok=True)
        (tmp_path / "rows" / name).write_text(json.dumps({"text": name}) + "\n")
    both = prepare_file(tmp_path / "rows", "completion").train
    assert [Path(both.place(place)).name for place in range(2)] == ["a.jsonl:1", "b.jsonl:1"]
    one = prepare_file(tmp_path / "rows", "completion", entry={"data_files": "b*"}).train
    assert Path(one.place(0)).name == "b.jsonl:1"
    entry = {"data_files": str(tmp_path / "rows" / "a.jsonl")}
    assert len(prepare_file("json", "completion", entry=entry).train) == 1


def test_tokenising_in_processes_gives_the_same_rows(prepare_rows: PrepareRows) -> None:
    rows = [{"text": f"row {n % 4000}"} for n in range(5000)]
    alone = prepare_rows(rows, "completion", dataset_num_proc=1)
    together = prepare_rows(
        rows, "completion", dataset_num_proc=3, dataset_prepared_path="x", seed=42
    )
    assert contents(alone) == contents(together)
    assert alone.report.sources[0].duplicates == 1000


def test_an_error_in_a_process_is_the_same_error(prepare_rows: PrepareRows, tmp_path: Path) -> None:
    rows: list[Any] = [{"text": "ab"} for _ in range(5000)]
    rows[4700] = {"txt": "ab"}
    with pytest.raises(DataError, match="column 'text' is missing") as caught:
        prepare_rows(rows, "completion", dataset_num_proc=2)
    assert caught.value.where == f"{tmp_path / 'rows.jsonl'}:4701"


def test_results_larger_than_a_pipe_do_not_block(prepare_rows: PrepareRows) -> None:
    """Both directions of a worker's pipe are full at the same time."""
    rows = [{"text": "x" * 700} for _ in range(6000)]
    prepared = prepare_rows(rows, "completion", dataset_num_proc=2)
    assert len(prepared.train) == 6000


def test_an_early_error_ends_with_workers_busy(prepare_rows: PrepareRows, tmp_path: Path) -> None:
    rows: list[Any] = [{"text": "x" * 700} for _ in range(6000)]
    rows[2] = {"txt": ""}
    with pytest.raises(DataError) as caught:
        prepare_rows(rows, "completion", dataset_num_proc=2)
    assert caught.value.where == f"{tmp_path / 'rows.jsonl'}:3"
