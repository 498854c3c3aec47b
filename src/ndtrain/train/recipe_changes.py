"""What a recipe's changes since the checkpoint mean for continuing it.

A new key counts as changing the result until it is listed here as harmless or impossible.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ndtrain.errors import CheckpointError
from ndtrain.report.wording import value_change

HARMLESS = frozenset(
    {
        # where things go and how often they are told
        "output_dir",
        "save_steps",
        "saves_per_epoch",
        "save_strategy",
        "save_total_limit",
        "save_async",
        "load_best_model_at_end",
        "auto_resume_from_checkpoints",
        "resume_from_checkpoint",
        "export",
        "hub_model_id",
        "eval_steps",
        "evals_per_epoch",
        "eval_strategy",
        "eval_batch_size",
        "eval_sample_packing",
        "sample_prompts",
        "logging_steps",
        "report_to",
        "wandb_project",
        "profile",
        # who computes what: equal but for rounding
        "dp_replicate_size",
        "dp_shard_size",
        "context_parallel_size",
        "tensor_parallel_size",
        "context_parallel_method",
        "tensor_sequence_parallel",
        "async_tensor_parallel",
        "device",
        "ddp_timeout",
        "gradient_checkpointing",
        "activation_memory_budget",
        "activation_offloading",
        "tiled_mlp",
        "tiled_mlp_num_shards",
        "torch_compile",
        "loss_chunk_tokens",
        "reshard_after_forward",
        "optimizer_in_backward",
        # how the same rows are prepared
        "dataset_num_proc",
        "dataset_prepared_path",
        # only read before the first step
        "peft_init_lora_weights",
        "lora_model_dir",
        "skip_nonfinite",
    }
)

IMPOSSIBLE = frozenset(
    {
        # other parameters
        "model_config",
        "tokens",
        "adapter",
        "lora_r",
        "lora_target_modules",
        "lora_target_linear",
        "lora_modules_to_save",
        "peft_use_dora",
        "unfrozen_parameters",
        # other optimizer states
        "optimizer",
        "optimizer_state_dtype",
    }
)

BATCH_KEYS = frozenset({"micro_batch_size", "gradient_accumulation_steps", "global_batch_size"})

ChangedValues = Mapping[str, Mapping[str, Any]]
"""The value `before` and `after`, by key."""

SAME_STATES = ({"adamw_torch_fused", "adamw_torch", "adam"},)
"""Optimizers that keep the same states, so that one continues the other."""


@dataclass(frozen=True)
class Change:
    """One key whose value is another than at the save."""

    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return value_change(self.key, self.before, self.after)


@dataclass(frozen=True)
class RecipeChanges:
    """All changes, by what they mean."""

    harmless: tuple[Change, ...] = ()
    changes_result: tuple[Change, ...] = ()
    impossible: tuple[Change, ...] = ()

    def notices(self) -> tuple[str, ...]:
        """Lines for the user about what can be continued, none when nothing changed."""
        lines = []
        if self.changes_result:
            listed = "; ".join(str(change) for change in self.changes_result)
            lines.append(f"Changed since the checkpoint, and the result with it: {listed}.")
        if self.harmless:
            listed = "; ".join(str(change) for change in self.harmless)
            lines.append(f"Changed since the checkpoint, without effect on the result: {listed}.")
        return tuple(lines)

    def values(self) -> ChangedValues:
        """In full, what makes the result another one."""
        return {
            change.key: {"before": change.before, "after": change.after}
            for change in self.changes_result
        }

    def require_possible(self, where: str) -> None:
        """Refuse to continue what cannot be continued.

        Raises:
            CheckpointError: naming every impossible change.
        """
        if self.impossible:
            listed = "; ".join(str(change) for change in self.impossible)
            raise CheckpointError(
                f"This checkpoint cannot be continued with another model or optimizer: {listed}.",
                where=where,
                hint="Undo the change, or start over with --restart.",
            )


def compare_recipes(
    saved: Mapping[str, Any],
    current: Mapping[str, Any],
    *,
    saved_batch: int | None = None,
    current_batch: int | None = None,
) -> RecipeChanges:
    """Sort the differences between two resolved recipes.

    Args:
        saved: values by key, as in the checkpoint's meta.json.
        current: values by key, in the same JSON form.
        saved_batch: rows of a step then; with an equal number now, how they are dealt out to
            ranks and passes does not matter.
        current_batch: rows of a step now.
    """
    harmless, changes_result, impossible = [], [], []
    same_batch = saved_batch is not None and saved_batch == current_batch
    for key in sorted(saved.keys() | current.keys()):
        change = Change(key, saved.get(key), current.get(key))
        if change.before == change.after:
            continue
        if key in HARMLESS or (key in BATCH_KEYS and same_batch):
            harmless.append(change)
        elif key in IMPOSSIBLE and not _keeps_states(change):
            impossible.append(change)
        else:
            changes_result.append(change)
    return RecipeChanges(tuple(harmless), tuple(changes_result), tuple(impossible))


def _keeps_states(change: Change) -> bool:
    return change.key == "optimizer" and any(
        {change.before, change.after} <= family for family in SAME_STATES
    )
