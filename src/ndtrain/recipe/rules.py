"""What one key says about another.

Each rule is a small pure function from a recipe to a problem or None; its docstring is its text in
the documentation. To add one, write the function in the module of its keys and put it in RULES;
the tests ask for an example that passes and one that fails.
"""

from collections.abc import Callable, Iterator

from ndtrain.recipe import data_rules, model_rules, optimizer_rules, training_rules
from ndtrain.recipe.problem import Problem
from ndtrain.recipe.schema import Recipe

Rule = Callable[[Recipe], Problem | None]

RULES: tuple[Rule, ...] = (
    training_rules.optimizer_exists,
    training_rules.schedule_exists,
    optimizer_rules.optim_args_are_known,
    optimizer_rules.patterns_can_be_read,
    training_rules.trackers_exist,
    training_rules.profile_names_its_steps,
    data_rules.dataset_types_exist,
    data_rules.layouts_hold_their_words,
    data_rules.file_kinds_name_their_files,
    data_rules.chat_templates_exist,
    model_rules.model_given_once,
    model_rules.config_names_its_architecture,
    model_rules.config_needs_a_tokenizer,
    data_rules.rows_given_once,
    data_rules.stream_needs_max_steps,
    data_rules.stream_has_no_held_out_share,
    data_rules.one_source_of_evaluation_rows,
    data_rules.held_out_share_or_count,
    training_rules.batch_given_once,
    training_rules.warmup_given_once,
    training_rules.saves_given_once,
    training_rules.evals_given_once,
    training_rules.save_strategy_agrees,
    training_rules.eval_strategy_agrees,
    training_rules.step_counts_are_whole,
    training_rules.early_stopping_needs_evaluation,
    training_rules.best_model_needs_evaluation,
    training_rules.saving_the_best_needs_evaluation,
    training_rules.evaluation_needs_rows,
    training_rules.eval_length_needs_rows_of_its_own,
    training_rules.sample_prompts_need_evaluation,
    model_rules.lora_keys_need_an_adapter,
    model_rules.qlora_needs_four_bits,
    model_rules.quantised_base_needs_an_adapter,
    model_rules.adapters_start_from_a_seed,
    model_rules.one_quantisation,
    model_rules.adapter_targets_given_once,
    model_rules.adapter_has_targets,
    data_rules.jinja_template_given,
    data_rules.one_template_at_a_level,
    data_rules.template_variables_are_free,
    data_rules.template_switches_are_no_words,
    data_rules.shares_or_counts,
    data_rules.all_or_no_weights,
    data_rules.evaluation_has_no_shares,
    training_rules.budget_needs_the_compiler,
    training_rules.early_step_needs_single_pass,
    training_rules.offloading_needs_recomputing,
    training_rules.slices_need_a_tiled_mlp,
    training_rules.overlap_needs_shared_tokens,
    training_rules.small_states_need_adamw,
    training_rules.float8_needs_bf16_and_trained_weights,
    training_rules.half_sums_need_half_gradients,
)


def broken_rules(recipe: Recipe) -> Iterator[Problem]:
    """What the rules find, problems and notices."""
    for rule in RULES:
        problem = rule(recipe)
        if problem:
            yield problem
