import json
import math
import resource

import pytest

from ndtrain.errors import CheckpointError
from ndtrain.report.events import EvalDone, Notice, RunEnded, RunStarted
from ndtrain.report.history import History
from ndtrain.report.metrics import (
    MetricsWriter,
    decode_record,
    encode_record,
    read_history,
    read_metrics,
)


def write_all(path, events):
    writer = MetricsWriter(path)
    for event in events:
        writer.write(event)
    writer.close()


def resumed_at(started: RunStarted, step: int) -> RunStarted:
    return RunStarted(**{**vars(started), "start_step": step})


def test_every_line_is_an_event_with_a_version(tmp_path, events):
    path = tmp_path / "metrics.jsonl"
    write_all(path, events)
    lines = path.read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["event"] for record in records] == [event.event for event in events]
    assert all(record["v"] == 1 for record in records)
    assert records[3] == {
        "v": 1,
        "event": "step",
        "step": 1,
        "epoch": 0.25,
        "loss": 2.75,
        "grad_norm": 0.5,
        "lr": 1e-4,
        "tokens": 100,
        "seen_tokens": 100,
        "step_seconds": 2.0,
        "tokens_per_second": 50.0,
        "tokens_per_second_per_device": 25.0,
        "tflops_per_device": None,
        "mfu": None,
        "memory_gib": 1.5,
    }


def test_floats_keep_every_bit(tmp_path, started, step):
    loss = 0.1 + 0.2
    path = tmp_path / "metrics.jsonl"
    write_all(path, [started, step(1, loss)])
    assert read_metrics(path)[1]["loss"].hex() == loss.hex()


def test_a_line_is_there_before_the_next_event(tmp_path, started, step):
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    writer.write(started)
    writer.write(step(1))
    assert [record["event"] for record in read_metrics(path)] == ["start", "step"]
    writer.close()


def test_nonfinite_values_are_strict_json_and_come_back(tmp_path, started, step):
    path = tmp_path / "metrics.jsonl"
    write_all(
        path,
        [started, step(1, math.nan, grad_norm=math.inf), EvalDone(1, 1.0, 4, {"a": -math.inf})],
    )
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    written = json.loads(path.read_text().splitlines()[1])
    assert written["loss"] is None
    assert written["nonfinite"] == {"loss": "nan", "grad_norm": "inf"}
    _, first, evaluation = read_metrics(path)
    assert math.isnan(first["loss"])
    assert first["grad_norm"] == math.inf
    assert "nonfinite" not in first
    assert evaluation["by_dataset"] == {"a": -math.inf}


def test_text_with_odd_line_ends_stays_on_one_line(tmp_path, started):
    path = tmp_path / "metrics.jsonl"
    write_all(path, [started, Notice("a\u2028b\x85c\nd")])
    assert read_metrics(path)[1]["text"] == "a\u2028b\x85c\nd"


def test_resuming_drops_what_is_done_again(tmp_path, events, started, step):
    path = tmp_path / "metrics.jsonl"
    write_all(path, events[:-3])  # killed in step 6; the newest checkpoint is step 3
    write_all(path, [resumed_at(started, 3), step(4, 9.0), step(5), step(6), events[-1]])
    records = read_metrics(path)
    assert [record["step"] for record in records if record["event"] == "step"] == [1, 2, 3, 4, 5, 6]
    assert [record["loss"] for record in records if record["event"] == "step"][3] == 9.0
    assert [record["event"] for record in records[:9]] == [event.event for event in events[:9]]
    # steps 4 and 5 are done again, but not measured again
    assert [record["event"] for record in records[9:11]] == ["profile", "start"]


def test_starting_over_drops_everything(tmp_path, events, started, step):
    path = tmp_path / "metrics.jsonl"
    write_all(path, events[:5])
    write_all(path, [started, events[2], step(1, 9.0)])
    assert [record["event"] for record in read_metrics(path)] == ["start", "eval", "step"]


def test_a_notice_before_the_start_survives_the_rewrite(tmp_path, events, started):
    path = tmp_path / "metrics.jsonl"
    write_all(path, events[:5])
    write_all(path, [Notice("resuming"), resumed_at(started, 1)])
    assert [record.get("text") for record in read_metrics(path)][-2:] == ["resuming", None]


def test_an_evaluation_done_before_the_restart_stands_once(tmp_path, started, events):
    path = tmp_path / "metrics.jsonl"
    write_all(path, events[:9])
    write_all(path, [resumed_at(started, 3), EvalDone(3, 2.4, 40, {"faq": 2.4})])
    evals = [record["step"] for record in read_metrics(path) if record["event"] == "eval"]
    assert evals == [0, 3]


def test_a_run_that_never_starts_still_tells_its_end(tmp_path, events):
    path = tmp_path / "metrics.jsonl"
    write_all(path, events)
    write_all(path, [RunEnded("already finished", 6, 0)])
    assert [record["event"] for record in read_metrics(path)][-2:] == ["end", "end"]
    assert len(read_metrics(path)) == len(events) + 1


def test_a_last_line_cut_short_is_left_out_and_removed(tmp_path, events, started, step):
    path = tmp_path / "metrics.jsonl"
    write_all(path, events[:5])
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    assert [record["event"] for record in read_metrics(path)] == ["notice", "start", "eval", "step"]
    write_all(path, [resumed_at(started, 1), step(2)])
    assert [record["event"] for record in read_metrics(path)][-2:] == ["start", "step"]


def test_a_broken_line_in_the_middle_is_named(tmp_path, events):
    path = tmp_path / "metrics.jsonl"
    write_all(path, events)
    lines = path.read_text().splitlines()
    lines[4] = lines[4][:20]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(CheckpointError) as caught:
        read_metrics(path)
    assert caught.value.where == f"{path}:5"


def test_a_missing_file_is_one_clear_error(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read: No such file or directory"):
        read_metrics(tmp_path / "metrics.jsonl")
    assert read_history(tmp_path / "metrics.jsonl") == History()


def test_a_full_disk_is_one_clear_error_and_leaves_whole_lines(tmp_path, started, step):
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    writer.write(started)
    writer.write(step(1))
    room = path.stat().st_size + 50  # less than a line: the next write stops half-way
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        with pytest.raises(CheckpointError) as caught:
            writer.write(step(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.where == str(path)
    assert caught.value.message == "cannot be written: File too large."
    assert path.read_bytes().endswith(b"}\n")
    writer.write(step(2))
    writer.close()
    assert [record["event"] for record in read_metrics(path)] == ["start", "step", "step"]


def test_the_history_follows_the_file(tmp_path, events, started, step):
    path = tmp_path / "metrics.jsonl"
    write_all(path, events[:11])
    history = History()
    writer = MetricsWriter(path, history)
    for event in (resumed_at(started, 3), step(4, 1.25)):
        writer.write(event)
    writer.close()
    assert history == read_history(path)
    assert history.curve("loss") == [(1, 2.75), (2, 2.5), (3, 2.25), (4, 1.25)]
    assert history.eval_curve() == [(0, 3.0), (3, 2.4)]
    assert history.curve("mfu") == []


def test_encoding_and_decoding_agree():
    record = {"v": 1, "event": "x", "a": {"b": {"c": math.inf}}, "d": [1], "e": None}
    assert decode_record(encode_record(record)) == record
