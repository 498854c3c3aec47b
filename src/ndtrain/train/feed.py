"""Token rows to the steps of this rank."""

import math
from collections.abc import Callable, Iterator

from ndtrain.data.batch import StepBatch
from ndtrain.data.loader import StepBatches
from ndtrain.data.prepare import Prepared
from ndtrain.data.token_rows import TokenRows
from ndtrain.plan.plan import BatchPlan
from ndtrain.recipe.schema import Recipe
from ndtrain.train.assemble import Engine


def build_batches(
    rows: TokenRows,
    recipe: Recipe,
    batch: BatchPlan,
    engine: Engine,
    *,
    shuffle: bool,
    evaluates: bool = False,
) -> StepBatches:
    """This rank's steps over `rows`; evaluation rows have a length and a packing of their own."""
    packed = recipe.sample_packing
    sequence_len = recipe.sequence_len
    if evaluates:
        packed = packed if recipe.eval_sample_packing is None else recipe.eval_sample_packing
        sequence_len = max(recipe.eval_sequence_len or sequence_len, int(rows.lengths.max()))
    pad_to_end = recipe.pad_to_sequence_len
    if pad_to_end is None:
        pad_to_end = packed
    on_cuda = engine.mesh.device.type == "cuda"
    pin = recipe.dataloader_pin_memory
    return StepBatches(
        rows,
        batch=batch,
        data_rank=engine.mesh.data_rank,
        seed=recipe.seed,
        sequence_len=sequence_len,
        packed=packed,
        row_multiple=math.lcm(recipe.pad_to_multiple_of, engine.split.row_multiple),
        shuffle=shuffle and recipe.shuffle_merged_datasets,
        pad_to=sequence_len if pad_to_end else None,
        balance=recipe.balance_by_attention,
        prefetch_steps=recipe.dataloader_prefetch_factor,
        workers=recipe.dataloader_num_workers,
        pin_memory=on_cuda if pin is None else pin,
    )


def build_evals(
    prepared: Prepared, recipe: Recipe, engine: Engine
) -> dict[str, Callable[[], Iterator[StepBatch]]]:
    """How to walk once over each held-out dataset."""
    plan = engine.mesh.plan
    size = recipe.eval_batch_size or recipe.micro_batch_size
    batch = BatchPlan(size, 1, plan.data_ranks)
    evals: dict[str, Callable[[], Iterator[StepBatch]]] = {}
    for name, rows in prepared.evals.items():
        if len(rows):
            steps = build_batches(rows, recipe, batch, engine, shuffle=False, evaluates=True)
            evals[name] = lambda steps=steps: steps.iterate(0, steps.steps_per_epoch)  # type: ignore[misc]
    return evals
