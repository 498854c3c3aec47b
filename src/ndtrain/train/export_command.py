"""`ndtrain export RUN DEST`: a run's newest checkpoint as a folder that transformers loads.

Needs no GPU and no process group: tensors are read from the checkpoint a few at a time.
"""

import shlex
from pathlib import Path

import torch

from ndtrain.errors import CheckpointError
from ndtrain.model.adapter_files import adapter_names, check_adapter, write_adapter
from ndtrain.model.adapters import apply_adapter
from ndtrain.model.build import build_model
from ndtrain.model.key_map import to_file_tensors
from ndtrain.model.model_folder import (
    appearing_folder,
    check_destination,
    check_free_space,
    plan_files,
    write_side_files,
    written_dtype,
)
from ndtrain.model.shard_files import ShardFiles
from ndtrain.report.model_card import write_model_card
from ndtrain.train.hub import push_folder
from ndtrain.train.stored_run import (
    StoredRun,
    open_run,
    run_tokenizer,
    stored_shapes,
    trained_tensors,
)


def export(run: Path, destination: Path, *, dtype: str, push_to: str | None) -> int:
    """Write the run's model, or its adapter, to `destination`.

    Args:
        run: a run directory or one of its checkpoints.
        destination: a new folder, or an older model folder, which is replaced in one step.
        dtype: `bf16` or `fp32`; adapters keep fp32.
        push_to: hub repository that also gets it.

    Raises:
        RecipeError: unknown dtype, or the destination holds other things.
        CheckpointError: no whole checkpoint, or the folder cannot be written.
    """
    stored_as = written_dtype(dtype)
    check_destination(destination)
    stored = open_run(run)
    for reason in stored.checkpoint.skipped:
        print(f"Passed over {reason}.")
    if stored.is_adapter:
        write_run_adapter(stored, destination)
    else:
        _export_whole(stored, destination, stored_as)
    step = stored.checkpoint.step
    write_model_card(destination, stored.path, step=step, is_adapter=stored.is_adapter)
    kind = "adapter" if stored.is_adapter else "model"
    print(f"Wrote the {kind} of step {step} to {destination}.")
    if push_to:
        print(f"Pushed to {push_folder(destination, push_to)}.")
    # only the run can build a random base again
    asked = run if stored.is_adapter and stored.source.path is None else destination
    print(f'Next: ndtrain generate {shlex.quote(str(asked))} --prompt "..."')
    return 0


@torch.no_grad()
def _export_whole(run: StoredRun, dest: Path, dtype: torch.dtype) -> None:
    tokenizer = run_tokenizer(run)
    twin = build_model(run.source, run.recipe, num_tokens=len(tokenizer))
    expected = [*(name for name, _ in twin.named_parameters()), *_persistent_buffers(twin)]
    shapes = stored_shapes(run)
    lacking = [name for name in expected if name not in shapes]
    if lacking:
        raise CheckpointError(
            f"the checkpoint lacks '{lacking[0]}' and {len(lacking) - 1} more.",
            where=str(run.checkpoint.path),
            hint="Choose another checkpoint.",
        )
    plan = plan_files(twin, expected, dtype)
    check_free_space(dest, plan.nbytes)
    with appearing_folder(dest) as folder:
        write_side_files(folder, twin, run.source, tokenizer, dtype)
        with ShardFiles(folder, plan.specs) as files:
            for name, whole in trained_tensors(run, expected):
                for key, tensor in to_file_tensors(twin, name, whole).items():
                    files.write(key, [tensor])


@torch.no_grad()
def write_run_adapter(run: StoredRun, dest: Path) -> None:
    """Write the adapter in a run's checkpoint in peft's format.

    Raises:
        CheckpointError: the checkpoint lacks parts, or the adapter is broken.
    """
    tokenizer = run_tokenizer(run)
    twin = build_model(run.source, run.recipe, num_tokens=len(tokenizer))
    apply_adapter(twin, run.recipe)
    names = adapter_names(twin)
    tensors = dict(trained_tensors(run, names))
    lacking = [name for name in names if name not in tensors]
    if lacking:
        raise CheckpointError(
            f"the checkpoint lacks '{lacking[0]}' and {len(lacking) - 1} more.",
            where=str(run.checkpoint.path),
            hint="Choose another checkpoint.",
        )
    check_adapter(tensors, trained=run.checkpoint.step > 0)
    with appearing_folder(dest) as folder:
        write_adapter(folder, tensors, names, twin.peft_config["default"], run.source)
        tokenizer.save_pretrained(str(folder))


def _persistent_buffers(twin: torch.nn.Module) -> list[str]:
    return [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in twin.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]
