"""A model that answers: found at an address of any kind, loaded by one process or split over many.

Finding downloads and converts, once, before any rank exists; loading reads what a rank needs.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh

from ndtrain.errors import MeshError
from ndtrain.launch.status import read_status
from ndtrain.model.adapter_base import base_of_adapter, is_adapter, named_base
from ndtrain.model.adapter_weights import saved_key
from ndtrain.model.build import build_from_config, build_model, read_model_config
from ndtrain.model.ready import hub_folder, ready_model
from ndtrain.model.serving import split_to_serve
from ndtrain.model.tokenizer import load_tokenizer, read_tokenizer
from ndtrain.model.weight_files import open_weights
from ndtrain.model.weights import load_weights
from ndtrain.plan.model_source import ModelSource, find_address, find_model, is_hub_id
from ndtrain.recipe.schema import Recipe
from ndtrain.report.model_card import exported_step
from ndtrain.report.run_directory import RunDirectory
from ndtrain.train.checkpoint_files import newest_checkpoint
from ndtrain.train.stored_run import (
    StoredRun,
    load_run_model,
    open_run,
    run_tokenizer,
    set_chat_template,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_MODEL = "MODEL"
"""The argument's name on the command line."""


@dataclass(frozen=True)
class Speaker:
    """A model ready to answer."""

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    name: str


@dataclass(frozen=True)
class FoundSpeaker:
    """What is loaded, on this machine.

    Attributes:
        name: what the user called it.
        source: the base model.
        adapter: folder of an adapter on it.
        run: a run whose checkpoint is taken, in place of files of its own.
        recipe: of a base model as a recipe names it, with its tokens and template.
    """

    name: str
    source: ModelSource
    adapter: Path | None = None
    run: StoredRun | None = None
    recipe: Recipe | None = None


@dataclass(frozen=True)
class Place:
    """Where a model is loaded.

    Attributes:
        tp: the ranks that share it; None: this process holds it whole.
    """

    device: torch.device
    dtype: torch.dtype
    tp: DeviceMesh | None = None


def own_place(device: str = "auto") -> Place:
    """The first GPU in bf16, or the CPU in fp32; `cpu` asks for the latter."""
    if device != "cpu" and torch.cuda.is_available():
        return Place(torch.device("cuda", 0), torch.bfloat16)
    return Place(torch.device("cpu"), torch.float32)


def find_speaker(address: str) -> FoundSpeaker:
    """The model at an address: a base of any kind, a run, a checkpoint, an adapter or an export.

    Raises:
        MeshError: it cannot be found, downloaded or converted.
    """
    path = Path(address)
    if path.suffix in (".yaml", ".yml"):
        raise MeshError(
            f"'{address}' is a recipe, not a model.",
            where=_MODEL,
            hint=f"Name its run folder, such as {Path('runs') / path.stem}.",
        )
    if path.parent.name == "runs" and not path.exists():
        raise MeshError(
            f"there is no folder '{address}'.",
            where=_MODEL,
            hint="Name a run that `ndtrain train` wrote, an export, a hub id or a .gguf file.",
        )
    export = path / "export"
    # only the run itself can build a random base again
    usable = (export / "config.json").is_file() or named_base(export) is not None
    if usable and not _is_outdated(export, path):
        return _find_folder(address, export)
    if path.is_dir() and not any(path.glob("*config.json")):
        run = open_run(path)
        return FoundSpeaker(address, run.source, run=run)
    return _find_folder(address, path if path.is_dir() else None)


def _is_outdated(export: Path, run: Path) -> bool:
    """Whether training went on after an export: a run that has ended exports what it should."""
    status, step = read_status(RunDirectory(run).status), exported_step(export)
    if step is None or status is None or status.state == "finished":
        return False
    newest = newest_checkpoint(RunDirectory(run).checkpoints)
    return newest is not None and newest.step > step


def find_base(recipe: Recipe) -> FoundSpeaker:
    """The base model of a recipe, before any training."""
    source = ready_model(find_model(recipe), trust_remote_code=recipe.trust_remote_code)
    plain = recipe.model_copy(update={"adapter": None})
    return FoundSpeaker(recipe.base_model or "random weights", source, recipe=plain)


def load_speaker(found: FoundSpeaker, place: Place) -> Speaker:
    """Load a model with its tokenizer and chat template; every rank of `place.tp` calls it.

    Raises:
        MeshError: its files do not fit together, or it cannot be split.
    """
    if found.run is not None:
        tokenizer = run_tokenizer(found.run)
        model = load_run_model(
            found.run,
            device=place.device,
            dtype=place.dtype,
            num_tokens=len(tokenizer),
            tp=place.tp,
        )
    elif found.recipe is not None:
        tokenizer = load_tokenizer(found.source, found.recipe)
        set_chat_template(tokenizer, found.recipe)
        model = build_model(
            found.source, found.recipe, dtype=place.dtype, num_tokens=len(tokenizer)
        )
        load_weights(model, found.source, seed=found.recipe.seed, device=place.device)
    else:
        tokenizer = read_tokenizer(_tokenizer_source(found))
        model = _load_files(found, place, len(tokenizer))
    model.config.use_cache = True
    model.requires_grad_(False)
    return Speaker(model.eval(), tokenizer, found.name)


def _find_folder(address: str, folder: Path | None) -> FoundSpeaker:
    """A model or an adapter, in a folder, on the hub or in a file."""
    if folder is None and is_hub_id(address, where=_MODEL):
        folder = _hub_or_nothing(address)
    if folder is None or not is_adapter(folder):
        base = str(folder) if folder is not None else address
        return FoundSpeaker(address, ready_model(find_address(base, where=_MODEL), where=_MODEL))
    return FoundSpeaker(address, base_of_adapter(folder), folder)


def _hub_or_nothing(address: str) -> Path:
    """The folder of a hub id, of which nobody knows yet whether it is one."""
    try:
        return hub_folder(address, where=_MODEL)
    except MeshError as error:
        raise MeshError(
            f"there is no folder '{address}' here, and as a hub id: {error.message}",
            where=_MODEL,
            hint=error.hint,
        ) from error


def _tokenizer_source(found: FoundSpeaker) -> ModelSource:
    """An adapter brings its tokenizer when tokens or a template were added."""
    adapter = found.adapter
    if adapter is not None and (adapter / "tokenizer_config.json").is_file():
        return ModelSource("folder", str(adapter), adapter, found.source.config)
    return found.source


def _load_files(found: FoundSpeaker, place: Place, num_tokens: int) -> "PreTrainedModel":
    config = read_model_config(found.source)
    if found.adapter is not None:
        text = config.get_text_config()
        text.vocab_size = max(text.vocab_size, num_tokens)
    model = build_from_config(config, dtype=place.dtype)
    if place.tp is None and place.device.type == "cuda" and not _fits(model, place.device):
        return _spread(found, place.dtype)
    if found.adapter is not None:
        _inject(model, found.adapter)
    if place.tp is not None:
        split_to_serve(model, place.tp)
    load_weights(model, found.source, seed=0, device=place.device, adapter=found.adapter)
    return model


def _inject(model: "PreTrainedModel", adapter: Path) -> None:
    """Put the adapter's modules in place; `load_weights` fills them."""
    from peft import PeftConfig, inject_adapter_in_model

    from ndtrain.model.adapters import quiet_peft

    config = PeftConfig.from_pretrained(str(adapter))
    config.modules_to_save = None
    with quiet_peft():
        inject_adapter_in_model(config, model)
    with open_weights(adapter, "adapter_model") as files:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".lora_" in name or saved_key(name) in files)


def _fits(model: "PreTrainedModel", device: torch.device) -> bool:
    """Whether one device holds the model, with room for its answers."""
    needed = sum(one.numel() * one.element_size() for one in model.parameters())
    free, _ = torch.cuda.mem_get_info(device)
    return 1.1 * needed < free or torch.cuda.device_count() == 1


def _spread(found: FoundSpeaker, dtype: torch.dtype) -> "PreTrainedModel":
    """A model larger than one device, its layers dealt out over all of them."""
    from transformers import AutoModelForCausalLM

    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        found.source.path, dtype=dtype, device_map="auto"
    )
    if found.adapter is not None:
        from peft import PeftModel

        PeftModel.from_pretrained(model, str(found.adapter))  # changes the model in place
    return model
