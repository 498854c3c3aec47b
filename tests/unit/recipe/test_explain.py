import pytest


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("learning_rat: 1", "unknown key; did you mean 'learning_rate'?"),
        ("gradient_checkpoint: true", "unknown key; did you mean 'gradient_checkpointing'?"),
        ("quantizaton: 8", "unknown key; did you mean 'quantization'?"),
        ("flash_atention: true", "unknown key; did you mean 'flash_attention'?"),
        ("field_messages: a", "unknown key here; it belongs to 'datasets'."),
        ("pad_token: a", "unknown key here; it belongs to 'special_tokens'."),
        ("xyzzy: 1", "unknown key. `ndtrain schema` lists the known ones."),
        ("cutoff_len: 9", "unknown key; LLaMA-Factory's 'cutoff_len' is 'sequence_len' here."),
        ("num_epochs: x", "expected a number above 0, not 'x'."),
        ("num_epochs: [1]", "expected a number above 0, not '[1]'."),
        ("warmup_ratio: 2", "expected a number of at least 0 and up to 1, not '2'."),
        ("micro_batch_size: 0", "expected a whole number of at least 1, not '0'."),
        ("micro_batch_size: 1.5", "expected a whole number of at least 1, not '1.5'."),
        ("max_steps: true", "expected a whole number of at least 1, not 'true'."),
        ("val_set_size: true", "expected a number of at least 0, not 'true'."),
        (
            "seed: 4294967296",
            "expected a whole number of at least 0 and up to 4294967295, not '4294967296'.",
        ),
        (
            "report_to: wanbd",
            "'wanbd' is unknown; did you mean 'wandb'? Known: tensorboard, wandb, mlflow, trackio.",
        ),
        ("sample_packing: maybe", "expected true or false, not 'maybe'."),
        ("adapter: loar", "expected 'lora' or 'qlora', not 'loar'; did you mean 'lora'?"),
        ("bf16: sometimes", "expected true, false or 'auto', not 'sometimes'."),
        ("bf16: aut", "expected true, false or 'auto', not 'aut'; did you mean 'auto'?"),
        ("tokens: abc", "expected a list of texts, not 'abc'."),
        ("special_tokens: abc", "expected a mapping, not 'abc'."),
        ("chat_template_kwargs: 3", "expected a mapping, not '3'."),
        ("test_datasets: {path: a}", "expected a list of mappings, not '{'path': 'a'}'."),
    ],
)
def test_one_wrong_line_one_message(complaints, minimal, line: str, message: str) -> None:
    key = line.partition(":")[0]
    assert complaints(minimal + line + "\n") == [f"recipe.yaml:6:1: {key}: {message}"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["feild_messages: x"], "unknown key; did you mean 'field_messages'?"),
        (["learning_rate: 1"], "unknown key here; it belongs to the top level."),
        (["xyzzy: 1"], "unknown key. `ndtrain schema --field datasets` lists the known ones."),
        (["weight: none"], "expected a number above 0, not 'none'."),
        (["on_bad_row: skp"], "expected 'error' or 'skip', not 'skp'; did you mean 'skip'?"),
        (["roles: [a]"], "expected a mapping, not '['a']'."),
    ],
)
def test_wrong_lines_inside_a_dataset(complaints, minimal, lines: list[str], message: str) -> None:
    key = lines[0].partition(":")[0]
    text = minimal + "".join(f"    {line}\n" for line in lines)
    assert complaints(text) == [f"recipe.yaml:6:5: datasets[0].{key}: {message}"]


@pytest.mark.parametrize(
    ("line", "key", "message"),
    [
        ("roles: {user: Q}", "roles.user", "expected a list of texts, not 'Q'."),
        ("roles: {user: [Q, [R]]}", "roles.user[1]", "expected text, not '['R']'."),
        (
            "message_property_mappings: {role: [a]}",
            "message_property_mappings.role",
            "expected text, not '['a']'.",
        ),
    ],
)
def test_a_wrong_value_under_a_key_of_ones_own(
    complaints, minimal, line: str, key: str, message: str
) -> None:
    (found,) = complaints(f"{minimal}    {line}\n")
    assert found.startswith("recipe.yaml:6:")
    assert found.endswith(f": datasets[0].{key}: {message}")


def test_keys_of_a_format_mapping_are_checked_too(complaints, minimal) -> None:
    text = minimal + "    type:\n      field_instruktion: q\n      field_output: a\n"
    assert complaints(text) == [
        "recipe.yaml:7:7: datasets[0].type.field_instruktion: unknown key; did you mean "
        "'field_instruction'?"
    ]


def test_a_misspelt_required_key_is_not_also_missing(complaints, minimal) -> None:
    text = minimal.replace("learning_rate", "learning_rte").replace("path:", "pth:")
    assert complaints(text) == [
        "recipe.yaml:3:1: learning_rte: unknown key; did you mean 'learning_rate'?",
        "recipe.yaml:5:5: datasets[0].pth: unknown key; did you mean 'path'?",
    ]


def test_a_missing_required_key_is_shown_at_its_mapping(complaints, minimal) -> None:
    text = minimal.replace("path: synthetic", "name: en")
    (line,) = complaints(text)
    assert line.startswith("recipe.yaml:5:5: datasets[0].path: this required key is missing (text:")


def test_an_item_of_a_list_that_is_not_a_mapping(complaints, minimal) -> None:
    assert complaints(minimal + "  - rows.jsonl\n") == [
        "recipe.yaml:6:5: datasets[1]: expected a mapping, not 'rows.jsonl'."
    ]


def test_each_problem_of_a_list_is_told_once(complaints, minimal) -> None:
    text = minimal + "lr_groups:\n  - {name: a, modules: x, lr: -1}\n  - 5\ntokens: [a, [b]]\n"
    assert complaints(text) == [
        "recipe.yaml:7:15: lr_groups[0].modules: expected a list of texts, not 'x'.",
        "recipe.yaml:7:27: lr_groups[0].lr: expected a number above 0, not '-1'.",
        "recipe.yaml:8:5: lr_groups[1]: expected a mapping, not '5'.",
        "recipe.yaml:9:13: tokens[1]: expected text, not '['b']'.",
    ]
