"""The bundled question-and-answer rows: well formed, distinct, and true where a machine can tell.

Two texts count as near twins when their sets of lower-cased words overlap too much (Jaccard) or
when difflib finds too long a common run of characters. Held-out rows may have no near twin among
the training rows, so that the held-out loss measures learning and not recall.
"""

import difflib
import json
import re
import unicodedata
from functools import cache
from pathlib import Path

import pytest

DATA = Path(__file__).parents[2] / "examples" / "data"
TRAIN = DATA / "parallelism-faq.jsonl"
HELD_OUT = DATA / "parallelism-faq-heldout.jsonl"
FILES = pytest.mark.parametrize("path", [TRAIN, HELD_OUT], ids=lambda path: path.stem)

MAX_JACCARD = 0.6
MAX_RATIO = 0.8
EXIT_CODES = {0, 1, 2, 3, 4, 5, 6, 7, 130, 143}
COMMANDS = {
    *("train", "validate", "plan", "parity", "preprocess", "evaluate", "recipes", "export"),
    *("merge", "merge-lora", "generate", "launch", "compare", "schema", "env"),
}


@cache
def read_rows(path: Path) -> list[tuple[str, str]]:
    """Question and answer of every row."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        question, answer = json.loads(line)["messages"]
        rows.append((question["content"], answer["content"]))
    return rows


def words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", text.lower()))


def jaccard(left: str, right: str) -> float:
    """Shared words over all words of both texts; 1.0 for the same set of words."""
    return len(words(left) & words(right)) / len(words(left) | words(right))


def is_near_twin(left: str, right: str) -> bool:
    if jaccard(left, right) >= MAX_JACCARD:
        return True
    matcher = difflib.SequenceMatcher(None, left.lower(), right.lower(), autojunk=False)
    # quick_ratio is an upper bound of ratio and much cheaper.
    return matcher.quick_ratio() >= MAX_RATIO and matcher.ratio() >= MAX_RATIO


def test_there_are_enough_training_rows() -> None:
    assert len(read_rows(TRAIN)) >= 240


def test_there_are_24_held_out_rows() -> None:
    assert len(read_rows(HELD_OUT)) == 24


@FILES
def test_every_line_is_one_user_and_one_assistant_turn(path: Path) -> None:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        row = json.loads(line)
        assert set(row) == {"messages"}, number
        assert [set(turn) for turn in row["messages"]] == [{"role", "content"}] * 2, number
        assert [turn["role"] for turn in row["messages"]] == ["user", "assistant"], number
        for turn in row["messages"]:
            assert turn["content"], number
            assert turn["content"] == turn["content"].strip(), number


@FILES
def test_text_is_clean(path: Path) -> None:
    raw = path.read_bytes().decode("utf-8")
    assert raw.endswith("\n")
    assert "\r" not in raw
    for question, answer in read_rows(path):
        for text in (question, answer):
            assert unicodedata.is_normalized("NFC", text), text
            assert not [c for c in text if unicodedata.category(c).startswith("C")], text
            assert "  " not in text


@FILES
def test_answers_are_short(path: Path) -> None:
    wrong = [answer for _, answer in read_rows(path) if not 20 <= len(answer.split()) <= 60]
    assert wrong == []


def test_no_question_is_asked_twice() -> None:
    questions = [" ".join(q.lower().split()) for q, _ in read_rows(TRAIN) + read_rows(HELD_OUT)]
    assert len(questions) == len(set(questions))


def test_no_training_answer_is_given_twice() -> None:
    answers = [answer for _, answer in read_rows(TRAIN)]
    assert len(answers) == len(set(answers))


@pytest.mark.parametrize("part", [0, 1], ids=["questions", "answers"])
def test_held_out_rows_have_no_near_twin_in_training(part: int) -> None:
    twins = [
        (held_out[part], trained[part])
        for held_out in read_rows(HELD_OUT)
        for trained in read_rows(TRAIN)
        if is_near_twin(held_out[part], trained[part])
    ]
    assert twins == []


def test_near_twins_are_recognised() -> None:
    assert is_near_twin("What does dp_shard do?", "What does dp_shard do ?")
    assert is_near_twin("Which key sets the replicas?", "Which key sets the replica?")
    assert not is_near_twin("What is a rank?", "How do I merge an adapter into its base model?")


@FILES
def test_sums_in_answers_are_right(path: Path) -> None:
    """Every `2 x 4 x 1 x 4 = 32` holds, also with names of axes before the numbers."""
    found = 0
    for _, answer in read_rows(path):
        text = re.sub(r"\b(dp_replicate|dp_shard|cp|tp) (?=\d)", "", answer)
        text = re.sub(r"(?<=\d),(?=\d{3})", "", text)
        for sum_, result in re.findall(r"([(\d][\d.x+/() ]*) = (\d+(?:\.\d+)?)", text):
            # Only digits, brackets and operators can be in it.
            assert eval(sum_.replace("x", "*")) == pytest.approx(float(result)), answer
            found += 1
    assert found >= 3


@FILES
def test_only_real_exit_codes_and_commands_are_named(path: Path) -> None:
    for question, answer in read_rows(path):
        text = f"{question} {answer}"
        codes = {int(code) for code in re.findall(r"[Ee]xit code (\d+)", text)}
        assert codes <= EXIT_CODES, text
        assert set(re.findall(r"`ndtrain ([a-z-]+)", text)) <= COMMANDS, text
