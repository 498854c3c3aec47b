"""What a user reads when a rule is broken: the line, the key, and what to do."""


def test_adapter_keys_without_an_adapter_are_a_notice(load, minimal) -> None:
    loaded = load(minimal + "lora_r: 8\nlora_alpha: 16\n")
    (notice,) = loaded.notices
    assert notice.endswith(
        "recipe.yaml:6:1: lora_r: does nothing without adapter (2 such keys); this is full "
        "fine-tuning. Add adapter: lora, or remove it."
    )


def test_an_unknown_word_of_a_layout_is_named_at_its_line(complaints, minimal) -> None:
    layout = "'[INST] {instruct} {instruction}'"
    assert complaints(f"{minimal}    type:\n      format: {layout}\n") == [
        "recipe.yaml:7:7: datasets[0].type.format: '{instruct}' is unknown. "
        "Known: {instruction}, {input}, {system}."
    ]


def test_problems_of_rules_cite_the_line(complaints, minimal) -> None:
    assert complaints(minimal + "warmup_steps: 3\nwarmup_ratio: 0.1\n") == [
        "recipe.yaml:7:1: warmup_ratio: excludes warmup_steps, which is given too. "
        "Remove one (`--set warmup_ratio=null` on the command line)."
    ]


def test_a_profile_of_many_steps_says_how_many_are_meant(load, complaints, minimal) -> None:
    assert load(f"{minimal}profile: {{steps: [10, 29]}}\n").notices == ()
    (line,) = complaints(f"{minimal}profile: {{steps: [10, 30]}}\n")
    assert line.endswith(
        "profile: would record 21 steps, of which the trace takes minutes to write. "
        "Name 20 at most: profile: {steps: [10, 12]}."
    )


def test_a_word_that_a_template_takes_for_true_is_a_notice(load, minimal) -> None:
    (notice,) = load(f"{minimal}chat_template_kwargs: {{enable_thinking: no}}\n").notices
    assert notice.endswith(
        "chat_template_kwargs.enable_thinking: is the text 'no', which a template takes for true. "
        "Write false if a switch is meant."
    )


def test_nothing_travels_that_could_be_hidden_on_one_rank(load, minimal) -> None:
    (notice,) = load(f"{minimal}async_tensor_parallel: true\n").notices
    assert notice.endswith("does nothing with tensor_parallel_size: 1. Remove it.")
