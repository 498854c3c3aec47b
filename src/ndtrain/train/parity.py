"""`ndtrain parity`: the recipe's own mesh against one process, on a shrunk copy of the model.

A recipe with 8-bit matmuls is also held to the same steps in bf16.
"""

import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ndtrain.environment import launched_rank
from ndtrain.errors import ExitCode, MeshError
from ndtrain.launch import LaunchOptions, launch
from ndtrain.plan.decide import decide
from ndtrain.plan.facts import facts_from_config
from ndtrain.plan.hardware import local_gpus
from ndtrain.plan.model_source import ModelSource, find_model
from ndtrain.plan.plan import ParallelPlan, Plan
from ndtrain.plan.setting import float8_kind
from ndtrain.recipe.load import LoadedRecipe, load_recipe
from ndtrain.recipe.schema import Recipe
from ndtrain.train.command import make_plan

if TYPE_CHECKING:
    from ndtrain.train.cells import Cell, Trace

LONGEST = 128
"""Rows are cut to so many tokens."""

_MOST_ROWS = 2
"""Rows of a micro-batch, and micro-batches of a step."""

_USUAL_SPREAD = 0.02
"""Weights as models are drawn before training: large ones would blow up the rounding of 8 bits."""

_NUMBERED_LAYER = re.compile(r"(layers\\?\.)(\d+)")


def parity(recipe_path: Path, *, overrides: Sequence[str], steps: int, debug: bool) -> int:
    """Print how far the recipe's mesh is from one process, and fp8 from bf16.

    Returns the exit code.

    Args:
        recipe_path: the recipe; its mesh is used.
        overrides: `--set` values.
        steps: optimizer steps to compare.
        debug: let errors keep their tracebacks.

    Raises:
        MeshError: the mesh computes something else, or cannot be built, or fp8 leaves bf16.
    """
    if launched_rank() is not None:
        raise MeshError(
            "parity starts its processes itself, but a launcher started this one.",
            where="environment: WORLD_SIZE",
            hint="Run `ndtrain parity` without torchrun, srun or accelerate launch.",
        )
    loaded = load_recipe(recipe_path, overrides)
    source = find_model(loaded.recipe, where=loaded.position("base_model"))
    plan = make_plan(loaded, source, None, None, 1)
    kind = float8_kind(loaded.recipe)
    if plan.parallel.world_size == 1 and kind is None:
        print("The recipe's mesh is one process: there is nothing to compare it with.")
        return ExitCode.OK
    meshed, alone = _cells(loaded, source, plan, steps)
    if plan.parallel.world_size > 1:
        _compare_meshes(meshed, alone, recipe_path)
    if kind is not None:
        _compare_formats(alone, kind, recipe_path)
    return ExitCode.OK


def _compare_meshes(meshed: "Cell", alone: "Cell", recipe_path: Path) -> None:
    """Print the mesh's steps beside those of one process."""
    from ndtrain.train.compare import compare_traces

    print(f"mesh   {meshed.plan.parallel}, against 1 process, on {meshed.recipe.device}")
    print(f"model  {describe(meshed.source.config)}")
    print(f"rows   {_describe_rows(meshed)}", flush=True)
    # the mesh goes first: its ranks are forked from a process without a process group
    comparison = compare_traces(*_traces(mesh=meshed, one=alone))
    print(comparison.table())
    if comparison.differences:
        raise MeshError(
            f"the mesh {meshed.plan.parallel} does not compute what one process does: "
            f"{'; '.join(comparison.differences)}.",
            where=str(recipe_path),
            hint="Train on a mesh that passes, and report the recipe and this table.",
        )


def _compare_formats(alone: "Cell", kind: str, recipe_path: Path) -> None:
    """Print losses with 8-bit matmuls beside those of the same steps in bf16."""
    from ndtrain.train.compare import LossReport

    print(f"fp8    {kind}, against bf16, 1 process on {alone.recipe.device}")
    print(f"model  {describe(alone.source.config, 'bf16')}")
    print(f"rows   {_describe_rows(alone)}", flush=True)
    config = {**alone.source.config, "initializer_range": _USUAL_SPREAD}
    source = replace(alone.source, config=config)
    both = {"model_config_": config, "bf16": True}
    eight, sixteen = (
        replace(alone, source=source, recipe=alone.recipe.model_copy(update={**both, "fp8": fp8}))
        for fp8 in (kind, False)
    )
    traces = _traces(fp8=eight, bf16=sixteen)
    report = LossReport(tuple(zip(*(trace.losses for trace in traces), strict=True)))
    print(report.table())
    if not report.passes:
        raise MeshError(
            f"fp8: {kind} moves the loss by {report.difference:.1e} from bf16's on a shrunk model.",
            where=str(recipe_path),
            hint="Train without fp8, or compare two short runs of the real model with "
            "`ndtrain compare`.",
        )


def _traces(**cells: "Cell") -> list["Trace"]:
    """The traces of cells, run one after another."""
    with tempfile.TemporaryDirectory(prefix="ndtrain-parity-") as folder:
        return [_trace(cell, Path(folder) / name) for name, cell in cells.items()]


def shrink_recipe(recipe: Recipe, config: Mapping[str, Any], device: str) -> Recipe:
    """The recipe with a shrunk random model in fp32, short rows and steps at the peak rate.

    Args:
        recipe: the user's recipe.
        config: the shrunk model.
        device: where it runs.
    """
    layers = len(config.get("layer_types") or range(2))
    return recipe.model_copy(
        update={
            "base_model": None,
            "model_config_": dict(config),
            "lora_model_dir": None,
            "unfrozen_parameters": tuple(
                _NUMBERED_LAYER.sub(lambda found: f"{found[1]}{int(found[2]) % layers}", pattern)
                for pattern in recipe.unfrozen_parameters
            ),
            "param_dtype": "fp32",
            "reduce_dtype": "fp32",
            "bf16": False,
            "torch_compile": False,
            "fp8": False,
            # rounded by chance, and stepped within one pass
            "optimizer_state_dtype": "fp32",
            "optimizer_in_backward": False,
            "device": device,
            "sequence_len": min(recipe.sequence_len, LONGEST),
            "micro_batch_size": min(recipe.micro_batch_size, _MOST_ROWS),
            "loss_chunk_tokens": min(recipe.loss_chunk_tokens, LONGEST // 2),
            # large steps, so that a wrong gradient shows in the parameters; Adam would blow up
            # the rounding of gradients below epsilon
            "learning_rate": 1e-3,
            "adam_epsilon": max(recipe.adam_epsilon, 1e-6),
            "lr_scheduler": "constant",
            "warmup_steps": 0,
            "warmup_ratio": None,
        }
    )


def describe(config: Mapping[str, Any], dtype: str = "fp32") -> str:
    """The shrunk model in a line."""
    words = [
        f"{config['model_type']} shrunk to {config['num_hidden_layers']} layers",
        f"{config['num_attention_heads']} query and "
        f"{config.get('num_key_value_heads') or config['num_attention_heads']} key/value heads",
        f"vocabulary {config['vocab_size']}",
    ]
    if config.get("sliding_window"):
        words.append(f"window {config['sliding_window']}")
    if config.get("tie_word_embeddings"):
        words.append("tied embeddings")
    return ", ".join(words) + f"; random weights, {dtype}"


def _describe_rows(cell: "Cell") -> str:
    recipe, batch = cell.recipe, cell.plan.batch
    kind = "packed rows" if recipe.sample_packing else "rows"
    return (
        f"{batch.global_batch} {kind} a step of up to {recipe.sequence_len} tokens "
        f"(micro {batch.micro_batch} × accumulation {batch.accumulation} × "
        f"{batch.data_ranks} data ranks)"
    )


def _cells(
    loaded: LoadedRecipe, source: ModelSource, plan: Plan, steps: int
) -> tuple["Cell", "Cell"]:
    """The same steps on the mesh and in one process."""
    from ndtrain.data.prepare import prepare
    from ndtrain.model.shrink import complete_config, shrink_config
    from ndtrain.model.tokenizer import load_tokenizer, tokenizer_key
    from ndtrain.train.cells import Cell

    recipe = loaded.recipe
    tokenizer = load_tokenizer(source, recipe)
    rows = prepare(loaded, tokenizer, tokenizer_key(tokenizer), data_ranks=plan.parallel.data_ranks)
    full = complete_config(source)
    full["vocab_size"] = max(full["vocab_size"], len(tokenizer))
    config = shrink_config(
        full, sequence_len=min(recipe.sequence_len, LONGEST), tp=plan.parallel.tp
    )
    small = shrink_recipe(recipe, config, _device(recipe, plan.parallel))
    small_source = ModelSource("random", source.name, None, config)
    facts = facts_from_config(config, name=source.name, source="recipe")
    batch = replace(
        plan.batch,
        micro_batch=small.micro_batch_size,
        accumulation=min(plan.batch.accumulation, _MOST_ROWS),
    )
    size = {"global_batch_size": batch.global_batch, "gradient_accumulation_steps": None}
    axes = {
        "dp_replicate_size": 1,
        "dp_shard_size": 1,
        "context_parallel_size": 1,
        "tensor_parallel_size": 1,
    }
    found = []
    for changed, world_size in ((size, plan.parallel.world_size), (size | axes, 1)):
        own = small.model_copy(update=changed)
        found.append(
            Cell(
                own,
                small_source,
                decide(own, facts, world_size=world_size, where=loaded.position),
                rows.path,
                steps,
                vocab_size=config["vocab_size"],
                longest=own.sequence_len,
            )
        )
    return found[0], found[1]


def _device(recipe: Recipe, parallel: ParallelPlan) -> str:
    """GPUs where this machine has one for each rank, else the CPU."""
    if recipe.device != "cpu" and len(local_gpus()) >= parallel.world_size:
        return "cuda"
    return "cpu"


def _trace(cell: "Cell", folder: Path) -> "Trace":
    from ndtrain.train.cells import CellsJob, run_cells

    (folder / "logs").mkdir(parents=True)
    job = CellsJob((cell,), folder)
    options = LaunchOptions(
        world_size=cell.plan.parallel.world_size,
        run_dir=folder,
        device=cell.recipe.device,
        timeout_seconds=cell.recipe.ddp_timeout,
    )
    launch(job, run_cells, options)
    return job.trace(0)
