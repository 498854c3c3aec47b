"""A run on disk as something to load: its recipe, its base model and its newest checkpoint."""

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh

from ndtrain.errors import CheckpointError, RecipeError
from ndtrain.model.adapters import apply_adapter
from ndtrain.model.build import build_model
from ndtrain.model.names import names_of_parameters
from ndtrain.model.ready import ready_model
from ndtrain.model.regions import local_tensor, region_of, take_region
from ndtrain.model.serving import split_to_serve
from ndtrain.model.tokenizer import load_tokenizer
from ndtrain.model.weights import load_weights
from ndtrain.plan.model_source import ModelSource, find_model
from ndtrain.recipe.load import load_recipe
from ndtrain.recipe.schema import Recipe
from ndtrain.recipe.template_choice import choose_template
from ndtrain.report.run_directory import RunDirectory
from ndtrain.train.checkpoint import find_checkpoint
from ndtrain.train.checkpoint_files import FoundCheckpoint, step_of
from ndtrain.train.checkpoint_store import read_tensors, shapes

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_BATCH_BYTES = 256 * 2**20
_MODEL = "model."


@dataclass(frozen=True)
class StoredRun:
    """What is needed to load the model of a run.

    Attributes:
        path: the run directory.
        source: the base model, on this machine.
        checkpoint: the one that is taken.
    """

    path: Path
    recipe: Recipe
    source: ModelSource
    checkpoint: FoundCheckpoint

    @property
    def is_adapter(self) -> bool:
        """Whether only an adapter was trained."""
        return self.recipe.adapter is not None


def is_run(path: Path) -> bool:
    """Whether `path` is a run directory or one of its checkpoints."""
    return RunDirectory(run_path(path)).resolved.is_file()


def run_path(path: Path) -> Path:
    """The run directory of a run directory or of one of its checkpoints."""
    path = path.absolute()
    return path.parent.parent if step_of(path) is not None else path


def run_recipe(path: Path) -> Recipe:
    """The recipe that a run was started with.

    Raises:
        CheckpointError: `path` is no run.
    """
    directory = RunDirectory(run_path(path))
    if not directory.resolved.is_file():
        raise CheckpointError(
            "is not a run directory: it has no resolved.yaml.",
            where=str(path),
            hint="Name a folder that `ndtrain train` wrote, such as runs/quickstart.",
        )
    return load_recipe(directory.resolved, check=False).recipe


def open_run(path: Path) -> StoredRun:
    """The run at `path`, or the run of the checkpoint at `path`.

    Raises:
        CheckpointError: it is no run, or it has no whole checkpoint.
        MeshError: its base model is gone.
    """
    recipe = run_recipe(path)
    checkpoint = find_checkpoint(path)
    source = ready_model(find_model(recipe), trust_remote_code=recipe.trust_remote_code)
    return StoredRun(run_path(path), recipe, source, checkpoint)


def run_tokenizer(run: StoredRun) -> "PreTrainedTokenizerBase":
    """The run's tokenizer, with the chat template it was trained on."""
    tokenizer = load_tokenizer(run.source, run.recipe)
    set_chat_template(tokenizer, run.recipe)
    return tokenizer


def set_chat_template(tokenizer: "PreTrainedTokenizerBase", recipe: Recipe) -> None:
    """Let the tokenizer carry the prompt that the recipe trains on, if there is one.

    That is the chat template, the recipe's or the one on which its datasets agree, or the
    instruction form where no row has turns.
    """
    from ndtrain.data.instruction_template import instruction_template
    from ndtrain.data.parts import CHAT_TYPES
    from ndtrain.data.template_search import build_chat_template

    chats = [spec for spec in recipe.datasets if spec.type in CHAT_TYPES]
    choices = {choose_template(recipe, spec) for spec in chats}
    choice = choices.pop() if len(choices) == 1 else choose_template(recipe)
    is_default = choice.name == "tokenizer_default"
    if is_default:
        form = instruction_template(recipe.datasets, tokenizer)
        if form is not None:
            tokenizer.chat_template = form
            return
    try:
        template = build_chat_template(
            tokenizer, choice.name, choice.jinja, recipe.chat_template_kwargs
        )
    except RecipeError:
        if not is_default:
            raise
        return  # rows without turns need no template
    tokenizer.chat_template = template.source


@torch.no_grad()
def load_run_model(
    run: StoredRun,
    *,
    device: torch.device,
    dtype: torch.dtype,
    num_tokens: int = 0,
    tp: DeviceMesh | None = None,
) -> "PreTrainedModel":
    """The trained model of a run, whatever mesh it was trained on.

    Args:
        run: the run.
        device: of this process.
        dtype: of the base's parameters.
        num_tokens: size of the tokenizer.
        tp: ranks that share the model; None: this process holds it whole.
    """
    model = build_model(run.source, run.recipe, dtype=dtype, num_tokens=num_tokens)
    if run.is_adapter:
        apply_adapter(model, run.recipe)
    if tp is not None:
        split_to_serve(model, tp)
    load_weights(model, run.source, seed=run.recipe.seed, device=device)
    parameters = {
        name: parameter for parameter, names in names_of_parameters(model).items() for name in names
    }
    parameters |= dict(model.named_buffers())
    for name, tensor in trained_tensors(run, parameters):
        parameter = parameters[name]
        part = take_region(tensor, region_of(parameter)) if tensor.ndim else tensor
        if part is not None:
            local_tensor(parameter).copy_(part)
    return model


def stored_shapes(run: StoredRun) -> dict[str, tuple[int, ...]]:
    """Name and shape of every model tensor in the checkpoint."""
    return {
        name.removeprefix(_MODEL): tuple(shape)
        for name, shape in shapes(run.checkpoint.path).items()
        if name.startswith(_MODEL)
    }


def trained_tensors(run: StoredRun, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The named tensors of the checkpoint that it holds, whole, in order, a few at a time."""
    known = stored_shapes(run)
    batch: dict[str, torch.Tensor] = {}
    size = 0
    for name in names:
        if name not in known:
            continue
        tensor = torch.empty(known[name], dtype=torch.float32)
        batch[name] = tensor
        size += tensor.nbytes
        if size >= _BATCH_BYTES:
            yield from _read(run, batch)
            batch, size = {}, 0
    yield from _read(run, batch)


def _read(run: StoredRun, batch: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    if batch:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*assuming.*single process.*")
            read_tensors(
                {f"{_MODEL}{name}": tensor for name, tensor in batch.items()},
                run.checkpoint.path,
                None,
            )
    yield from batch.items()
