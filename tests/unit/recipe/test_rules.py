"""Each rule has an example that it lets pass and one that it stops, both close to each other."""

from typing import Any

import pytest

from ndtrain.recipe.problem import Problem
from ndtrain.recipe.rules import RULES
from ndtrain.recipe.schema import Recipe

RANDOM = {"model_config": {"model_type": "llama"}, "tokenizer_config": "bytes"}
ROWS = [{"path": "a"}]
BASE: dict[str, Any] = {"base_model": "m", "learning_rate": 1e-4, "datasets": ROWS}

EXAMPLES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    # rule: (passes, fails, key that the problem names)
    "model_given_once": ({}, {"model_config": {"model_type": "llama"}}, "model_config"),
    "config_names_its_architecture": (
        {"base_model": None, **RANDOM},
        {"base_model": None, **RANDOM, "model_config": {"hidden_size": 8}},
        "model_config",
    ),
    "config_needs_a_tokenizer": (
        {"base_model": None, **RANDOM},
        {"base_model": None, "model_config": {"model_type": "llama"}},
        "model_config",
    ),
    "rows_given_once": ({}, {"pretraining_dataset": ROWS}, "pretraining_dataset"),
    "stream_needs_max_steps": (
        {"datasets": [], "pretraining_dataset": ROWS, "max_steps": 5},
        {"datasets": [], "pretraining_dataset": ROWS},
        "pretraining_dataset",
    ),
    "stream_has_no_held_out_share": (
        {"datasets": [], "pretraining_dataset": ROWS, "max_steps": 5, "test_datasets": ROWS},
        {"datasets": [], "pretraining_dataset": ROWS, "max_steps": 5, "val_set_size": 0.1},
        "val_set_size",
    ),
    "one_source_of_evaluation_rows": (
        {"val_set_size": 0.1},
        {"val_set_size": 0.1, "test_datasets": ROWS},
        "val_set_size",
    ),
    "sample_prompts_need_evaluation": (
        {"sample_prompts": ["Hi."], "val_set_size": 0.1},
        {"sample_prompts": ["Hi."]},
        "sample_prompts",
    ),
    "held_out_share_or_count": ({"val_set_size": 20}, {"val_set_size": 2.5}, "val_set_size"),
    "batch_given_once": (
        {"global_batch_size": 8},
        {"global_batch_size": 8, "gradient_accumulation_steps": 2},
        "global_batch_size",
    ),
    "warmup_given_once": (
        {"warmup_steps": 0},
        {"warmup_steps": 0, "warmup_ratio": 0.0},
        "warmup_ratio",
    ),
    "saves_given_once": (
        {"save_steps": 10},
        {"save_steps": 10, "saves_per_epoch": 1},
        "saves_per_epoch",
    ),
    "evals_given_once": (
        {"eval_steps": 10, "val_set_size": 1},
        {"eval_steps": 10, "evals_per_epoch": 1, "val_set_size": 1},
        "evals_per_epoch",
    ),
    "save_strategy_agrees": (
        {"save_strategy": "steps", "save_steps": 5},
        {"save_strategy": "no", "save_steps": 5},
        "save_steps",
    ),
    "eval_strategy_agrees": (
        {"eval_strategy": "epoch", "val_set_size": 1},
        {"eval_strategy": "epoch", "evals_per_epoch": 2, "val_set_size": 1},
        "evals_per_epoch",
    ),
    "step_counts_are_whole": ({"save_steps": 0.5}, {"save_steps": 1.5}, "save_steps"),
    "early_stopping_needs_evaluation": (
        {"early_stopping_patience": 2, "val_set_size": 0.1},
        {"early_stopping_patience": 2},
        "early_stopping_patience",
    ),
    "best_model_needs_evaluation": (
        {"load_best_model_at_end": True, "test_datasets": ROWS},
        {"load_best_model_at_end": True},
        "load_best_model_at_end",
    ),
    "saving_the_best_needs_evaluation": (
        {"save_strategy": "best", "val_set_size": 1},
        {"save_strategy": "best"},
        "save_strategy",
    ),
    "evaluation_needs_rows": (
        {"eval_steps": 5, "val_set_size": 0.1},
        {"eval_steps": 5},
        "eval_steps",
    ),
    "lora_keys_need_an_adapter": ({"adapter": "lora", "lora_r": 8}, {"lora_r": 8}, "lora_r"),
    "qlora_needs_four_bits": (
        {"adapter": "qlora", "load_in_4bit": True},
        {"adapter": "qlora"},
        "adapter",
    ),
    "quantised_base_needs_an_adapter": (
        {"adapter": "lora", "load_in_8bit": True},
        {"load_in_8bit": True},
        "load_in_8bit",
    ),
    "adapters_start_from_a_seed": (
        {"adapter": "lora", "peft_init_lora_weights": "orthogonal", "lora_r": 8},
        {"adapter": "lora", "peft_init_lora_weights": "pissa"},
        "peft_init_lora_weights",
    ),
    "one_quantisation": (
        {"adapter": "qlora", "load_in_4bit": True},
        {"adapter": "qlora", "load_in_4bit": True, "load_in_8bit": True},
        "load_in_8bit",
    ),
    "adapter_targets_given_once": (
        {"adapter": "lora", "lora_target_linear": True, "lora_target_modules": ["embed_tokens"]},
        {"adapter": "lora", "lora_target_linear": True, "lora_target_modules": "q_proj"},
        "lora_target_modules",
    ),
    "adapter_has_targets": (
        {"adapter": "lora", "lora_target_linear": True, "lora_target_modules": []},
        {"adapter": "lora", "lora_target_modules": []},
        "lora_target_modules",
    ),
    "optim_args_are_known": (
        {"optimizer": "rmsprop", "optim_args": {"eps": 1e-6, "momentum": 0.5}},
        {"optim_args": {"eps": 1e-6}},
        "optim_args",
    ),
    "patterns_can_be_read": (
        {"unfrozen_parameters": [r"layers\.(0|1)\."]},
        {"unfrozen_parameters": ["layers", "("]},
        "unfrozen_parameters",
    ),
    "eval_length_needs_rows_of_its_own": (
        {"eval_sequence_len": 64, "test_datasets": ROWS},
        {"eval_sequence_len": 64, "val_set_size": 2},
        "eval_sequence_len",
    ),
    "jinja_template_given": (
        {"chat_template": "jinja", "chat_template_jinja": "{{ messages }}"},
        {"chat_template": "jinja"},
        "chat_template",
    ),
    "one_template_at_a_level": (
        {"chat_template": "llama3", "datasets": [{"path": "a", "chat_template_jinja": "{{ x }}"}]},
        {"chat_template": "llama3", "chat_template_jinja": "{{ x }}"},
        "chat_template_jinja",
    ),
    "template_variables_are_free": (
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": {"tools": []}},
        "chat_template_kwargs",
    ),
    "template_switches_are_no_words": (
        {"chat_template_kwargs": {"enable_thinking": False, "style": "none"}},
        {"chat_template_kwargs": {"enable_thinking": "No"}},
        "chat_template_kwargs",
    ),
    "overlap_needs_shared_tokens": (
        {
            "async_tensor_parallel": True,
            "tensor_parallel_size": 2,
            "tensor_sequence_parallel": "auto",
        },
        {"async_tensor_parallel": True, "tensor_parallel_size": 2},
        "async_tensor_parallel",
    ),
    "shares_or_counts": (
        {"datasets": [{"path": "a", "weight": 1}]},
        {"datasets": [{"path": "a", "weight": 1, "samples": 3}]},
        "datasets",
    ),
    "all_or_no_weights": (
        {"datasets": [{"path": "a", "weight": 1}, {"path": "b", "weight": 2}]},
        {"datasets": [{"path": "a", "weight": 1}, {"path": "b"}]},
        "datasets",
    ),
    "evaluation_has_no_shares": (
        {"test_datasets": [{"path": "a", "samples": 3}]},
        {"test_datasets": [{"path": "a", "weight": 3}]},
        "test_datasets",
    ),
    "budget_needs_the_compiler": (
        {"gradient_checkpointing": "budget"},
        {"gradient_checkpointing": "budget", "torch_compile": False},
        "gradient_checkpointing",
    ),
    "early_step_needs_single_pass": (
        {"optimizer_in_backward": True, "max_grad_norm": None},
        {"optimizer_in_backward": True},
        "optimizer_in_backward",
    ),
    "optimizer_exists": ({"optimizer": "sgd"}, {"optimizer": "adamw_torhc"}, "optimizer"),
    "schedule_exists": ({"lr_scheduler": "wsd"}, {"lr_scheduler": "cosin"}, "lr_scheduler"),
    "profile_names_its_steps": (
        {"profile": {"steps": [10, 12]}},
        {"profile": {"steps": [12, 10]}},
        "profile",
    ),
    "trackers_exist": ({"report_to": ["wandb", "none"]}, {"report_to": "wanbd"}, "report_to"),
    "float8_needs_bf16_and_trained_weights": (
        {"fp8": "rowwise"},
        {"fp8": True, "adapter": "lora"},
        "fp8",
    ),
    "half_sums_need_half_gradients": (
        {"reduce_dtype": "bf16", "sync_each_batch": True},
        {"reduce_dtype": "bf16", "sync_each_batch": False},
        "reduce_dtype",
    ),
    "offloading_needs_recomputing": (
        {"activation_offloading": True, "gradient_checkpointing": True},
        {"activation_offloading": True, "gradient_checkpointing": "attention"},
        "activation_offloading",
    ),
    "slices_need_a_tiled_mlp": (
        {"tiled_mlp": True, "tiled_mlp_num_shards": 4},
        {"tiled_mlp_num_shards": 4},
        "tiled_mlp_num_shards",
    ),
    "small_states_need_adamw": (
        {"optimizer_state_dtype": "8bit"},
        {"optimizer_state_dtype": "bf16", "optimizer": "sgd"},
        "optimizer_state_dtype",
    ),
    "chat_templates_exist": (
        {"chat_template": "tokenizer_default_fallback_chatml"},
        {"datasets": [{"path": "a", "chat_template": "chatmll"}]},
        "datasets",
    ),
    "layouts_hold_their_words": (
        {"datasets": [{"path": "a", "type": {"format": '{"q": "{instruction}", "of": {input}}'}}]},
        {"datasets": [{"path": "a", "type": {"format": "Q: {input}"}}]},
        "datasets",
    ),
    "file_kinds_name_their_files": (
        {"datasets": [{"path": "json", "data_files": "a.json"}, {"path": "./json"}]},
        {"datasets": [{"path": "json"}]},
        "datasets",
    ),
    "dataset_types_exist": (
        {"datasets": [{"path": "a", "type": None}, {"path": "b", "type": "sharegpt"}]},
        {"datasets": [{"path": "a", "type": "alpacca"}]},
        "datasets",
    ),
}

MORE_FAILURES = [
    (
        "adapters_start_from_a_seed",
        {"adapter": "lora", "peft_init_lora_weights": "orthogonal", "lora_r": 3},
    ),
    ("model_given_once", {"base_model": None}),
    ("rows_given_once", {"datasets": []}),
    ("save_strategy_agrees", {"save_strategy": "epoch", "saves_per_epoch": 2}),
    ("save_strategy_agrees", {"save_strategy": "steps"}),
    ("eval_strategy_agrees", {"eval_strategy": "no", "eval_steps": 2, "val_set_size": 1}),
    ("eval_strategy_agrees", {"eval_strategy": "steps", "val_set_size": 1}),
    ("step_counts_are_whole", {"eval_steps": 2.5, "val_set_size": 1}),
    ("evaluation_needs_rows", {"evals_per_epoch": 1}),
    ("evaluation_needs_rows", {"eval_strategy": "epoch"}),
    (
        "early_stopping_needs_evaluation",
        {"early_stopping_patience": 2, "eval_strategy": "no", "val_set_size": 1},
    ),
    (
        "saving_the_best_needs_evaluation",
        {"save_strategy": "best", "eval_strategy": "no", "val_set_size": 1},
    ),
    ("optim_args_are_known", {"optimizer": "sgd", "optim_args": {"nestrov": True}}),
    ("optim_args_are_known", {"optim_args": {"fused": False}}),
    (
        "patterns_can_be_read",
        {"lr_groups": [{"name": "a", "modules": ["ok", "[a"], "lr": 1e-5}]},
    ),
    ("patterns_can_be_read", {"adapter": "lora", "lora_target_modules": ".*q_proj("}),
    ("quantised_base_needs_an_adapter", {"load_in_4bit": True}),
    (
        "early_step_needs_single_pass",
        {"optimizer_in_backward": True, "max_grad_norm": None, "gradient_accumulation_steps": 2},
    ),
    ("float8_needs_bf16_and_trained_weights", {"fp8": True, "bf16": False}),
    ("half_sums_need_half_gradients", {"reduce_dtype": "bf16", "bf16": False}),
    (
        "early_step_needs_single_pass",
        {"optimizer_in_backward": True, "max_grad_norm": None, "skip_nonfinite": 1},
    ),
    ("chat_templates_exist", {"chat_template": "lama3"}),
    ("chat_templates_exist", {"chat_template": "tokenizer_default_fallback_x"}),
    ("file_kinds_name_their_files", {"test_datasets": [{"path": "parquet"}]}),
    (
        "layouts_hold_their_words",
        {"datasets": [{"path": "a", "type": {"no_input_format": "{instruct}"}}]},
    ),
    (
        "layouts_hold_their_words",
        {"test_datasets": [{"path": "a", "type": {"system_format": "Be kind."}}]},
    ),
    ("file_kinds_name_their_files", {"test_datasets": [{"path": "imagefolder"}]}),
    ("jinja_template_given", {"datasets": [{"path": "a", "chat_template": "jinja"}]}),
    (
        "one_template_at_a_level",
        {
            "datasets": [
                {"path": "a", "chat_template": "chatml", "chat_template_jinja": "{{ messages }}"}
            ]
        },
    ),
    ("dataset_types_exist", {"test_datasets": [{"path": "a", "type": "chat"}]}),
]


def recipe_of(changes: dict[str, Any]) -> Recipe:
    return Recipe.model_validate({**BASE, **changes})


def findings(changes: dict[str, Any]) -> dict[str, Problem]:
    found = {rule.__name__: rule(recipe_of(changes)) for rule in RULES}
    return {name: problem for name, problem in found.items() if problem}


def test_every_rule_has_an_example_and_a_docstring() -> None:
    assert {rule.__name__ for rule in RULES} == set(EXAMPLES)
    assert all((rule.__doc__ or "").strip().endswith(".") for rule in RULES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_passing_example_breaks_no_rule(name: str) -> None:
    assert findings(EXAMPLES[name][0]) == {}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_failing_example_breaks_the_rule_at_its_key(name: str) -> None:
    _, fails, key = EXAMPLES[name]
    problem = findings(fails)[name]
    assert problem.path[0] == key
    assert problem.message.endswith((".", "?"))


@pytest.mark.parametrize(("name", "fails"), MORE_FAILURES)
def test_the_other_ways_to_break_a_rule(name: str, fails: dict[str, Any]) -> None:
    assert name in findings(fails)


def test_strategies_by_steps_may_be_counted_by_the_epoch() -> None:
    by_epoch = {"saves_per_epoch": 4, "evals_per_epoch": 2, "val_set_size": 1}
    assert findings({**by_epoch, "save_strategy": "steps", "eval_strategy": "steps"}) == {}


def test_an_argument_with_a_key_of_its_own_is_sent_there() -> None:
    problem = findings({"optim_args": {"betas": [0.9, 0.9]}})["optim_args_are_known"]
    assert problem.path == ("optim_args", "betas")
    assert problem.hint == "Use the key adam_beta1 and adam_beta2."
