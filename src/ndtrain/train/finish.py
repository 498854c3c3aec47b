"""What a finished run leaves for others: export, proof, model card, and the hub if asked."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ndtrain.errors import NdtrainError
from ndtrain.model.tokenizer import load_tokenizer
from ndtrain.parallel.runtime import Runtime
from ndtrain.plan.model_source import ModelSource
from ndtrain.report.model_card import write_model_card
from ndtrain.report.run_directory import RunDirectory
from ndtrain.train.assemble import Engine
from ndtrain.train.export import agree, export_adapter, export_model
from ndtrain.train.hub import push_folder
from ndtrain.train.stored_run import set_chat_template
from ndtrain.train.verify import verify_export

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def leave_model(
    engine: Engine,
    source: ModelSource,
    run_dir: RunDirectory,
    *,
    runtime: Runtime,
    step: int,
    tell: Callable[[str], None],
    dtype: torch.dtype | None = None,
) -> None:
    """Write export/ and prove it; every rank calls it.

    Args:
        engine: the trained model on its mesh.
        source: the base model.
        run_dir: where export/ goes.
        runtime: this rank.
        step: whose weights they are.
        tell: receives what the user should know, on the main rank.
        dtype: of the stored weights; None: the base's.

    Raises:
        CheckpointError: it could not be written, or is not what was trained.
        MeshError: it could not be pushed.
    """
    recipe, folder = engine.recipe, run_dir.export
    is_adapter = recipe.adapter is not None
    tokenizer = _tokenizer(engine, source) if runtime.is_main else None
    if is_adapter:
        trained = step > 0
        export_adapter(engine.model, tokenizer, source, folder, runtime=runtime, trained=trained)
    else:
        export_model(engine.model, tokenizer, source, folder, runtime=runtime, dtype=dtype)
    failure: NdtrainError | None = None
    try:
        verdict = verify_export(engine, folder, source)
        if runtime.is_main:
            tell(str(verdict))
            write_model_card(folder, run_dir.path, step=step, is_adapter=is_adapter)
            if recipe.hub_model_id:
                tell(f"Pushed to {push_folder(folder, recipe.hub_model_id)}.")
    except NdtrainError as error:
        failure = error
    agree(failure, folder)


def _tokenizer(engine: Engine, source: ModelSource) -> "PreTrainedTokenizerBase":
    tokenizer = load_tokenizer(source, engine.recipe)
    set_chat_template(tokenizer, engine.recipe)
    return tokenizer
