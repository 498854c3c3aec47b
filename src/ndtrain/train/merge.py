"""`ndtrain merge RUN DEST`: the base model with an adapter merged in, ready to be served.

Base weights stream from file to file by blocks of rows; sums are taken in fp32 and stored in the
dtype of the base, so that neither memory nor the result is larger than it has to be.
"""

import json
import math
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ndtrain.errors import MeshError, RecipeError
from ndtrain.model.adapter_base import ADAPTER_CONFIG, base_of_adapter, is_adapter, named_base
from ndtrain.model.adapter_weights import PEFT_PREFIX
from ndtrain.model.build import build_from_config, read_model_config, widen_vocabulary
from ndtrain.model.key_map import map_keys
from ndtrain.model.merging import Delta, adapter_scale
from ndtrain.model.model_folder import (
    appearing_folder,
    base_dtype,
    check_destination,
    check_free_space,
    write_side_files,
    written_dtype,
)
from ndtrain.model.names import names_of_parameters, parse_name
from ndtrain.model.row_files import StoredTensor, stored_tensors
from ndtrain.model.shard_files import ShardFiles, TensorSpec
from ndtrain.model.tokenizer import has_tokenizer, read_tokenizer
from ndtrain.model.weight_files import find_weight_files
from ndtrain.plan.model_source import ModelSource

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_WORTH_A_WORD = 0.05
"""Share of an adapter's change that rounding may take in silence."""


@dataclass
class Rounding:
    """The difference between merged values and what is stored of them.

    Attributes:
        largest: largest difference, and the tensor it is in.
        lost: sum of squared differences.
        gained: sum of squares of what the adapter changed.
    """

    largest: float = 0.0
    name: str = ""
    lost: float = 0.0
    gained: float = 0.0

    @property
    def lost_share(self) -> float:
        """Norm of what rounding took, over the norm of what the adapter changed."""
        return math.sqrt(self.lost / self.gained) if self.gained else 0.0

    def note(
        self, name: str, exact: torch.Tensor, stored: torch.Tensor, before: torch.Tensor
    ) -> None:
        """Compare one block with what is stored and with what it was; `exact` is used up."""
        if not exact.numel():
            return
        if before.shape == exact.shape:
            self.gained += float((exact - before).square_().sum(dtype=torch.float64))
        lost = exact.sub_(stored)
        self.lost += float(lost.square().sum(dtype=torch.float64))
        error = float(lost.abs_().max())
        if error > self.largest or not self.name:
            self.largest, self.name = error, name


@dataclass
class Merge:
    """What becomes of each stored tensor.

    Attributes:
        tensors: the base's stored tensors by key.
        deltas: adapters by the key they change.
        replaced: tensors trained whole, by key, in the adapter's file.
        split: keys that shared another one's tensor and get their own: key to source.
        untied: the configuration must no longer say that embedding and head are one.
        dtype: of the written floats; None: as the base stores each.
    """

    tensors: dict[str, StoredTensor]
    deltas: dict[str, Delta] = field(default_factory=dict)
    replaced: dict[str, StoredTensor] = field(default_factory=dict)
    split: dict[str, str] = field(default_factory=dict)
    untied: bool = False
    dtype: torch.dtype | None = None

    def specs(self) -> list[TensorSpec]:
        """Everything that is written, in order."""
        return [self._spec(key) for key in [*self.tensors, *self.split]]

    def blocks(self, key: str, rounding: Rounding) -> Iterator[torch.Tensor]:
        """The values of `key`, block by block."""
        stored = self.tensors[self.split.get(key, key)]
        dtype = self._dtype(stored)
        whole = self.replaced.get(key)
        delta = self.deltas.get(key)
        if whole is not None:
            for start, stop in whole.blocks():
                new = whole.rows(start, stop)
                # a widened vocabulary has rows that the base does not have
                before = stored.rows(start, stop) if whole.shape == stored.shape else new
                rounded = new.to(dtype)
                rounding.note(key, new.to(torch.float32, copy=True), rounded, before)
                yield rounded
            return
        for start, stop in stored.blocks():
            rows = stored.rows(start, stop)
            if delta is None:
                yield rows.to(dtype)
                continue
            exact = delta.merge_rows(rows, start)
            rounded = exact.to(dtype, copy=True)
            rounding.note(key, exact, rounded, rows)
            yield rounded

    def _dtype(self, stored: StoredTensor) -> torch.dtype:
        wanted = self.dtype if stored.dtype.is_floating_point else None
        return wanted or stored.dtype

    def _spec(self, key: str) -> TensorSpec:
        stored = self.tensors[self.split.get(key, key)]
        whole = self.replaced.get(key)
        return TensorSpec(key, self._dtype(stored), (whole or stored).shape)


def merge(run: Path, destination: Path, *, dtype: str | None = None) -> int:
    """Write the base with the adapter of `run` merged in.

    Args:
        run: a run directory, one of its checkpoints, or an adapter folder.
        destination: a new folder, or an older model folder, which is replaced in one step.
        dtype: `bf16` or `fp32`; None: as the base is stored.

    Raises:
        RecipeError: unknown dtype, or the destination holds other things, the adapter or its
            base.
        MeshError: there is no adapter, or it does not fit its base.
        CheckpointError: the folder cannot be written.
    """
    wanted = None if dtype is None else written_dtype(dtype)
    place = check_destination(destination)
    with tempfile.TemporaryDirectory(prefix="ndtrain-merge-") as scratch:
        adapter, source, notes = find_adapter(run, Path(scratch))
        sources = {"adapter": adapter, "base": source.path}
        for what, path in sources.items():
            if path is not None and path.resolve() == place:
                raise RecipeError(
                    f"is the {what} that is merged.", where=str(destination), hint="Name another."
                )
        rounding = merge_adapter(adapter, source, destination, dtype=wanted)
    for note in notes:
        print(note)
    stored_as = str(wanted or base_dtype(source)).removeprefix("torch.")
    print(
        f"Merged into {destination}, stored as {stored_as}; largest rounding error "
        f"{rounding.largest:.3g} in {rounding.name}."
    )
    if rounding.lost_share > _WORTH_A_WORD:
        print(
            f"Rounding took {rounding.lost_share:.0%} of what the adapter changes: its updates are "
            "small beside the weights. --dtype fp32 keeps them."
        )
    print(f'Next: ndtrain generate {shlex.quote(str(destination))} --prompt "..."')
    return 0


def find_adapter(run: Path, scratch: Path) -> tuple[Path, ModelSource, list[str]]:
    """The adapter folder of `run`, its base, and what the user should know about both.

    Args:
        run: a run directory, a checkpoint or an adapter folder.
        scratch: where the adapter of a run without an export is written.

    Raises:
        MeshError: there is no adapter, or its base is stored nowhere.
    """
    export = run / "export"
    folder = export if named_base(export) is not None else run
    if is_adapter(folder):
        source = base_of_adapter(folder)
        return folder, source, _notes(str(named_base(folder)), quantised=False)
    from ndtrain.train.export_command import write_run_adapter
    from ndtrain.train.stored_run import open_run

    stored = open_run(run)
    if not stored.is_adapter:
        raise MeshError(
            "the run trained the whole model; there is no adapter to merge.",
            where=str(run),
            hint=f"Use ndtrain export {shlex.quote(str(run))} DEST.",
        )
    if stored.source.path is None:
        raise MeshError(
            "the base has random weights that are stored nowhere.",
            where=str(run),
            hint="Merge adapters of models with a base_model.",
        )
    folder = scratch / "adapter"
    write_run_adapter(stored, folder)
    quantised = stored.recipe.load_in_4bit or stored.recipe.load_in_8bit
    return folder, stored.source, _notes(str(stored.recipe.base_model), quantised=quantised)


def merge_adapter(
    adapter: Path, source: ModelSource, dest: Path, *, dtype: torch.dtype | None = None
) -> Rounding:
    """Write the merged model; returns what rounding took.

    Args:
        adapter: a folder in peft's format.
        source: the base, as a folder on this machine.
        dest: replaced in one step.
        dtype: of the written weights; None: as the base stores them.
    """
    assert source.path is not None
    with_tokenizer = next((one for one in (adapter, source.path) if has_tokenizer(one)), None)
    tokenizer = None
    if with_tokenizer is not None:
        place = ModelSource("folder", str(with_tokenizer), with_tokenizer, source.config)
        tokenizer = read_tokenizer(place)
    config = read_model_config(source)
    widen_vocabulary(config, _saved_vocabulary(adapter))
    written = dtype or base_dtype(source)
    twin = build_from_config(config, dtype=written)
    plan = plan_merge(twin, source.path, adapter)
    plan.dtype = dtype
    if plan.untied:
        twin.config.get_text_config().tie_word_embeddings = False
        twin.config.tie_word_embeddings = False
        source = ModelSource(
            source.kind, source.name, source.path, {**source.config, "tie_word_embeddings": False}
        )
    rounding = Rounding()
    specs = plan.specs()
    check_free_space(dest, sum(spec.nbytes for spec in specs))
    with appearing_folder(dest) as folder:
        write_side_files(folder, twin, source, tokenizer, written)
        with ShardFiles(folder, specs) as files:
            for spec in specs:
                files.write(spec.name, plan.blocks(spec.name, rounding))
    return rounding


def plan_merge(twin: "PreTrainedModel", base: Path, adapter: Path) -> Merge:
    """Match the adapter's tensors with the base's stored ones.

    Raises:
        MeshError: the adapter changes something that the base does not hold.
    """
    config = json.loads((adapter / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    plan = Merge(stored_tensors(find_weight_files(base)))
    keys = map_keys(twin, plan.tensors).direct
    parts: dict[str, dict[Any, torch.Tensor]] = {}
    for key, tensor in stored_tensors([adapter / "adapter_model.safetensors"]).items():
        name = _live_name(key.removeprefix(PEFT_PREFIX))
        parsed = parse_name(name)
        if parsed.part is not None:
            parts.setdefault(parsed.base, {})[parsed.part] = tensor.rows(0, tensor.shape[0])
        else:
            plan.replaced[_stored_key(parsed.base, keys, twin, plan, adapter)] = tensor
    for name, tensors in parts.items():
        module = name.removesuffix(".weight")
        key = _stored_key(name, keys, twin, plan, adapter)
        transposed = bool(config.get("fan_in_fan_out")) or _is_transposed(twin, module)
        plan.deltas[key] = Delta(tensors, adapter_scale(config, module), transposed)
    _settle_ties(plan, twin, keys)
    return plan


def _live_name(key: str) -> str:
    """The name a stored adapter tensor has in a model: with the adapter's own name in it."""
    for part in ("lora_A", "lora_B"):
        key = key.replace(f".{part}.weight", f".{part}.default.weight")
    for part in ("lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector"):
        if key.endswith(f".{part}"):
            key += ".default"
    return key


def _stored_key(
    name: str,
    keys: Mapping[str, str],
    twin: "PreTrainedModel",
    plan: Merge,
    adapter: Path,
) -> str:
    """The base's key behind a parameter; a tied head gets a key of its own."""
    if name in keys:
        return keys[name]
    same = [
        other
        for other, tensor in twin.state_dict(keep_vars=True).items()
        if other in keys and tensor is _parameter(twin, name)
    ]
    if not same:
        raise MeshError(
            f"the adapter changes '{name}', which the base does not store as one tensor.",
            where=str(adapter),
            hint="Merge it with the base_model it was trained on.",
        )
    plan.split[name] = keys[same[0]]
    return name


def _parameter(twin: "PreTrainedModel", name: str) -> torch.Tensor | None:
    return dict(twin.named_parameters(remove_duplicate=False)).get(name)


def _settle_ties(plan: Merge, twin: "PreTrainedModel", keys: Mapping[str, str]) -> None:
    """Shared weights stay shared when they change alike; otherwise each is stored on its own."""
    for names in names_of_parameters(twin).values():
        stored = [name for name in names if name in keys]
        if len(names) < 2 or not stored:
            continue
        own = [keys.get(name, name) for name in names]
        if _change_alike(plan, own):
            for key in own:
                if plan.split.pop(key, None):
                    plan.replaced.pop(key, None)
        else:
            plan.untied = True
            for name in names:
                if name not in keys:
                    plan.split[name] = keys[stored[0]]


def _change_alike(plan: Merge, keys: list[str]) -> bool:
    if any(key in plan.deltas for key in keys):
        return False
    whole = [plan.replaced[key] for key in keys if key in plan.replaced]
    if not whole:
        return True
    return len(whole) == len(keys) and all(_equal(whole[0], one) for one in whole[1:])


def _equal(first: StoredTensor, second: StoredTensor) -> bool:
    return first.shape == second.shape and all(
        torch.equal(first.rows(*block), second.rows(*block)) for block in first.blocks()
    )


def _is_transposed(twin: "PreTrainedModel", module: str) -> bool:
    return type(twin.get_submodule(module)).__name__ == "Conv1D"


def _saved_vocabulary(adapter: Path) -> int:
    """Rows of an embedding that the adapter holds whole; 0 when it holds none."""
    header = stored_tensors([adapter / "adapter_model.safetensors"])
    rows = [
        one.shape[0]
        for key, one in header.items()
        if ".lora_" not in key and key.endswith(("embed_tokens.weight", "wte.weight"))
    ]
    return max(rows, default=0)


def _notes(base: str, *, quantised: bool) -> list[str]:
    notes = []
    if base.lower().endswith(".gguf") or "/ndtrain/gguf/" in base:
        notes.append("The base comes from a GGUF file: its own rounding stays in the weights.")
    if quantised:
        notes.append(
            "The adapter was trained on a quantised base and is merged into the full weights."
        )
    return notes
