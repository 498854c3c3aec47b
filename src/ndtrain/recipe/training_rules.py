"""Rules between the keys of the optimisation, of saving and of evaluation."""

from ndtrain.recipe.problem import Problem, both_given, unknown_word
from ndtrain.recipe.schema import Recipe
from ndtrain.recipe.words import LOW_BIT_OPTIMIZERS, OPTIMIZERS, SCHEDULES, TRACKERS

_MOST_PROFILED = 20
"""Steps that one profile records."""


def optimizer_exists(recipe: Recipe) -> Problem | None:
    """`optimizer` is one of the optimizers whose result does not depend on the mesh."""
    return unknown_word(("optimizer",), recipe.optimizer, OPTIMIZERS)


def schedule_exists(recipe: Recipe) -> Problem | None:
    """`lr_scheduler` is constant, constant_with_warmup, linear, cosine or wsd."""
    return unknown_word(("lr_scheduler",), recipe.lr_scheduler, SCHEDULES)


def trackers_exist(recipe: Recipe) -> Problem | None:
    """`report_to` names tensorboard, wandb, mlflow or trackio; `none` names none of them."""
    asked = (recipe.report_to,) if isinstance(recipe.report_to, str) else recipe.report_to
    problems = (unknown_word(("report_to",), name, TRACKERS) for name in asked if name != "none")
    return next((problem for problem in problems if problem), None)


def profile_names_its_steps(recipe: Recipe) -> Problem | None:
    """`profile` is `{steps: [first, last]}`, both from 1 on, in this order and at most 20 steps."""
    if recipe.profile is None:
        return None
    steps = recipe.profile.get("steps")
    pair = list(steps) if isinstance(steps, list | tuple) else []
    whole = len(pair) == 2 and all(type(number) is int for number in pair)
    if not (whole and set(recipe.profile) == {"steps"} and 1 <= pair[0] <= pair[1]):
        return Problem(
            ("profile",),
            "does not say which steps to profile.",
            "Write profile: {steps: [10, 12]}.",
        )
    if (count := pair[1] - pair[0] + 1) > _MOST_PROFILED:
        # other ranks wait while a trace is written, and a browser opens a few hundred MB
        return Problem(
            ("profile",),
            f"would record {count} steps, of which the trace takes minutes to write.",
            f"Name {_MOST_PROFILED} at most: profile: {{steps: [{pair[0]}, {pair[0] + 2}]}}.",
        )
    return None


def batch_given_once(recipe: Recipe) -> Problem | None:
    """`global_batch_size` and `gradient_accumulation_steps` exclude each other: one follows."""
    if recipe.global_batch_size and recipe.gradient_accumulation_steps:
        return both_given("global_batch_size", "gradient_accumulation_steps")
    return None


def warmup_given_once(recipe: Recipe) -> Problem | None:
    """`warmup_steps` and `warmup_ratio` exclude each other."""
    if recipe.warmup_steps is not None and recipe.warmup_ratio is not None:
        return both_given("warmup_ratio", "warmup_steps")
    return None


def saves_given_once(recipe: Recipe) -> Problem | None:
    """`save_steps` and `saves_per_epoch` exclude each other."""
    if recipe.save_steps is not None and recipe.saves_per_epoch is not None:
        return both_given("saves_per_epoch", "save_steps")
    return None


def evals_given_once(recipe: Recipe) -> Problem | None:
    """`eval_steps` and `evals_per_epoch` exclude each other."""
    if recipe.eval_steps is not None and recipe.evals_per_epoch is not None:
        return both_given("evals_per_epoch", "eval_steps")
    return None


def save_strategy_agrees(recipe: Recipe) -> Problem | None:
    """`save_strategy: no` (or `epoch`) contradicts a number of saves."""
    return _strategy_agrees(recipe, "save_strategy", ("save_steps", "saves_per_epoch"))


def eval_strategy_agrees(recipe: Recipe) -> Problem | None:
    """`eval_strategy: no` (or `epoch`) contradicts a number of evaluations."""
    return _strategy_agrees(recipe, "eval_strategy", ("eval_steps", "evals_per_epoch"))


def _strategy_agrees(recipe: Recipe, name: str, numbers: tuple[str, str]) -> Problem | None:
    strategy = getattr(recipe, name)
    given = [key for key in numbers if getattr(recipe, key) is not None]
    if given and strategy in ("no", "epoch"):
        return Problem((given[0],), f"contradicts {name}: {strategy}.", "Remove one.")
    if strategy == "steps" and not given:
        return Problem((name,), f"'steps' needs {' or '.join(numbers)}.", also=numbers)
    return None


def step_counts_are_whole(recipe: Recipe) -> Problem | None:
    """`save_steps` and `eval_steps` are a share below 1 or a whole number of steps."""
    for key in ("save_steps", "eval_steps"):
        steps = getattr(recipe, key)
        if steps is not None and steps >= 1 and steps != int(steps):
            return Problem((key,), f"'{steps}' is neither a share below 1 nor a whole number.")
    return None


def early_stopping_needs_evaluation(recipe: Recipe) -> Problem | None:
    """`early_stopping_patience` watches the evaluation loss, so it needs evaluation rows."""
    return _needs_evaluation(recipe, "early_stopping_patience")


def best_model_needs_evaluation(recipe: Recipe) -> Problem | None:
    """`load_best_model_at_end` is decided by the evaluation loss, so it needs evaluation rows."""
    return _needs_evaluation(recipe, "load_best_model_at_end")


def saving_the_best_needs_evaluation(recipe: Recipe) -> Problem | None:
    """`save_strategy: best` is decided by the evaluation loss, so it needs evaluation rows."""
    if recipe.save_strategy != "best":
        return None
    return _needs_evaluation(recipe, "save_strategy")


def evaluation_needs_rows(recipe: Recipe) -> Problem | None:
    """A number of evaluations needs evaluation rows, and so does an `eval_strategy` but `no`."""
    keys = ["eval_steps", "evals_per_epoch"]
    if recipe.eval_strategy != "no":
        keys.append("eval_strategy")
    return next(filter(None, (_needs_rows(recipe, key) for key in keys)), None)


def eval_length_needs_rows_of_its_own(recipe: Recipe) -> Problem | None:
    """Rows of `val_set_size` are as long as trained ones: `eval_sequence_len` is for others."""
    if recipe.eval_sequence_len in (None, recipe.sequence_len) or recipe.test_datasets:
        return None
    return Problem(
        ("eval_sequence_len",),
        "is the length of rows of test_datasets, and there are none.",
        "Remove it, or name test_datasets.",
        also=("test_datasets", "sequence_len"),
    )


def budget_needs_the_compiler(recipe: Recipe) -> Problem | None:
    """`gradient_checkpointing: budget` is the compiler's choice, so it needs `torch_compile`."""
    if recipe.gradient_checkpointing == "budget" and recipe.torch_compile is False:
        return Problem(
            ("gradient_checkpointing",),
            "'budget' needs torch_compile: true.",
            "Use 'attention' or 'full' without the compiler.",
            also=("torch_compile",),
        )
    return None


def early_step_needs_single_pass(recipe: Recipe) -> Problem | None:
    """`optimizer_in_backward` steps before a step is known: no accumulation, clip or skipping."""
    if not recipe.optimizer_in_backward:
        return None
    path = ("optimizer_in_backward",)
    if (recipe.gradient_accumulation_steps or 1) > 1:
        return Problem(
            path,
            "cannot go with gradient_accumulation_steps above 1.",
            also=("gradient_accumulation_steps",),
        )
    if recipe.max_grad_norm is not None:
        return Problem(
            path,
            "cannot clip, since no norm over all gradients is ever known.",
            "Add max_grad_norm: null.",
            also=("max_grad_norm",),
        )
    if recipe.skip_nonfinite:
        return Problem(
            path,
            "cannot leave a step out, since parts of it are done before all of it is known.",
            "Remove skip_nonfinite.",
            also=("skip_nonfinite",),
        )
    return None


def offloading_needs_recomputing(recipe: Recipe) -> Problem | None:
    """`activation_offloading` moves the inputs of recomputed blocks, so it needs whole ones."""
    if recipe.activation_offloading and recipe.gradient_checkpointing not in (True, "full"):
        return Problem(
            ("activation_offloading",),
            "moves the inputs of recomputed blocks, and none is recomputed as a whole.",
            "Add gradient_checkpointing: true.",
            also=("gradient_checkpointing",),
        )
    return None


def slices_need_a_tiled_mlp(recipe: Recipe) -> Problem | None:
    """`tiled_mlp_num_shards` does nothing without `tiled_mlp`: a notice says so."""
    if recipe.tiled_mlp_num_shards is None or recipe.tiled_mlp:
        return None
    return Problem(
        ("tiled_mlp_num_shards",),
        "does nothing without tiled_mlp: true.",
        "Add it, or remove this.",
        also=("tiled_mlp",),
        is_notice=True,
    )


def overlap_needs_shared_tokens(recipe: Recipe) -> Problem | None:
    """`async_tensor_parallel` hides the exchange of shared tokens; on one rank nothing travels."""
    if not recipe.async_tensor_parallel:
        return None
    if recipe.tensor_parallel_size == 1:
        return Problem(
            ("async_tensor_parallel",),
            "does nothing with tensor_parallel_size: 1.",
            "Remove it.",
            also=("tensor_parallel_size",),
            is_notice=True,
        )
    if recipe.tensor_sequence_parallel is False:
        return Problem(
            ("async_tensor_parallel",),
            "hides the exchange of tokens, of which every rank has all.",
            "Add tensor_sequence_parallel: auto.",
            also=("tensor_sequence_parallel",),
        )
    return None


def small_states_need_adamw(recipe: Recipe) -> Problem | None:
    """`optimizer_state_dtype: bf16` and `8bit` are there for AdamW."""
    if recipe.optimizer_state_dtype == "fp32" or recipe.optimizer in LOW_BIT_OPTIMIZERS:
        return None
    return Problem(
        ("optimizer_state_dtype",),
        f"'{recipe.optimizer_state_dtype}' states are there for {LOW_BIT_OPTIMIZERS[0]}, not for "
        f"{recipe.optimizer}.",
        f"Use optimizer: {LOW_BIT_OPTIMIZERS[0]}, or optimizer_state_dtype: fp32.",
        also=("optimizer",),
    )


def sample_prompts_need_evaluation(recipe: Recipe) -> Problem | None:
    """`sample_prompts` are answered at evaluations, which need rows to evaluate on."""
    return _needs_evaluation(recipe, "sample_prompts")


def float8_needs_bf16_and_trained_weights(recipe: Recipe) -> Problem | None:
    """`fp8` takes the place of bf16 products of trained weights: not of fp32, nor of an adapter."""
    if recipe.fp8 and recipe.bf16 is False:
        return Problem(
            ("fp8",), "casts from bf16, which is off.", "Use bf16: auto.", also=("bf16",)
        )
    if recipe.fp8 and recipe.adapter is not None:
        return Problem(
            ("fp8",),
            "is there for full fine-tuning, not for adapters.",
            "Remove one of them.",
            also=("adapter",),
        )
    return None


def half_sums_need_half_gradients(recipe: Recipe) -> Problem | None:
    """`reduce_dtype: bf16` sums bf16 gradients of ranks, and with every micro-batch."""
    if recipe.reduce_dtype == "fp32":
        return None
    if recipe.bf16 is False:
        return Problem(
            ("reduce_dtype",),
            "bf16 would round the gradients of a run in fp32.",
            "Use bf16: auto, or remove it.",
            also=("bf16",),
        )
    if recipe.sync_each_batch is False:
        return Problem(
            ("reduce_dtype",),
            "bf16 would add up the micro-batches of a step in bf16 where they are summed once.",
            "Remove sync_each_batch, or use reduce_dtype: fp32.",
            also=("sync_each_batch",),
        )
    return None


def _needs_evaluation(recipe: Recipe, key: str) -> Problem | None:
    if getattr(recipe, key) and recipe.eval_strategy == "no":
        return Problem(
            (key,),
            "needs evaluations, and eval_strategy: no makes none.",
            "Remove eval_strategy.",
            also=("eval_strategy",),
        )
    return _needs_rows(recipe, key)


def _needs_rows(recipe: Recipe, key: str) -> Problem | None:
    has_rows = bool(recipe.val_set_size or recipe.test_datasets)
    if getattr(recipe, key) and not has_rows:
        return Problem(
            (key,),
            "needs evaluation rows.",
            "Add val_set_size: 0.05 or test_datasets.",
            also=("val_set_size", "test_datasets"),
        )
    return None
