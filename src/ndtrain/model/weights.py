"""Fills a sharded model: every rank reads or draws only its own part of each parameter."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from ndtrain.errors import MeshError
from ndtrain.model.adapter_weights import fill_adapters
from ndtrain.model.key_map import KeyMap, assemble, homeless_keys, map_keys
from ndtrain.model.names import names_of_parameters, parse_name, plain_name
from ndtrain.model.quantised import QuantisedLinear, encode_rows
from ndtrain.model.random_weights import draw_weights, meta_twin, restore_buffers
from ndtrain.model.regions import Region, local_tensor, region_of, take_region
from ndtrain.model.staged_copies import StagedCopies
from ndtrain.model.weight_files import WeightFiles, open_weights
from ndtrain.plan.model_source import ModelSource

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

_SHOWN = 3
_MEAN_ROWS = 4096


@dataclass
class Target:
    """A parameter or buffer that the base model's weights fill, with the names it goes by."""

    tensor: torch.Tensor
    names: list[str] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor in the files."""
        return tuple(self.tensor.shape)

    @property
    def region(self) -> Region:
        """The part that this rank needs."""
        return region_of(self.tensor)

    def fill(self, whole: torch.Tensor, copies: StagedCopies) -> None:
        """Copy this rank's part out of the whole tensor."""
        self.put(take_region(whole, self.region) if whole.ndim else whole, copies)

    def put(self, part: torch.Tensor | None, copies: StagedCopies) -> None:
        """Take this rank's part; None when it holds nothing."""
        if part is not None:
            copies.copy(local_tensor(self.tensor), part)


@dataclass
class QuantisedTarget(Target):
    """The weight of a quantised linear: this rank's rows are encoded as they arrive."""

    linear: QuantisedLinear = field(kw_only=True)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight before it is encoded."""
        return (self.linear.out_features, self.linear.in_features)

    @property
    def region(self) -> Region:
        """Whole rows."""
        rows = region_of(self.linear.weight).dims[0]
        return Region((rows, ((0, self.linear.in_features),)))

    def put(self, part: torch.Tensor | None, copies: StagedCopies) -> None:
        """Encode this rank's rows."""
        if part is not None:
            values, scales = encode_rows(part.to(self.tensor.device), self.linear.bits)
            local_tensor(self.linear.weight).copy_(values)
            local_tensor(self.linear.scales).copy_(scales)


def materialize(model: nn.Module, device: torch.device) -> None:
    """Give a meta model memory on `device`, without values; shared parameters stay shared."""
    shared = [names for names in names_of_parameters(model).values() if len(names) > 1]
    model.to_empty(device=device)
    for first, *others in shared:
        parameter = model.get_parameter(first)
        for name in others:
            module, _, own = name.rpartition(".")
            setattr(model.get_submodule(module), own, parameter)


@torch.no_grad()
def load_weights(
    model: nn.Module,
    source: ModelSource,
    *,
    seed: int,
    device: torch.device | None = None,
    adapter: "Path | None" = None,
) -> None:
    """Fill parameters and buffers of a model; they may be plain or DTensors.

    Every rank of the mesh calls it.

    Args:
        model: built by `build_model`, possibly adapted, split and sharded.
        source: a folder or random weights.
        seed: for random weights, fresh adapters and added tokens.
        device: where the model gets its memory; None when it is materialized already.
        adapter: folder of an adapter to continue from; None: fresh ones.

    Raises:
        MeshError: keys or shapes of the files do not fit the model.
    """
    if device is not None:
        materialize(model, device)
    twin = meta_twin(model)
    targets = base_targets(model)
    if source.kind == "random":
        _draw(targets, twin, seed)
    elif source.path is None:
        raise ValueError(f"'{source.name}' is not on this machine")
    else:
        with open_weights(source.path) as files:
            _read(targets, twin, files, source)
    restore_buffers(model, twin)
    fill_adapters(model, seed=seed, folder=adapter)


def base_targets(model: nn.Module) -> list[Target]:
    """What the base model's weights fill: everything except adapters and fleeting buffers."""
    targets: dict[int, Target] = {}
    encoded: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, QuantisedLinear):
            names = [parse_name(f"{name}.weight").base]
            targets[id(module.weight)] = QuantisedTarget(module.weight, names, linear=module)
            encoded |= {id(module.weight), id(module.scales)}
    for name, tensor in _persistent(model):
        parsed = parse_name(name)
        if parsed.part is None and id(tensor) not in encoded:
            targets.setdefault(id(tensor), Target(tensor)).names.append(parsed.base)
    return list(targets.values())


def _persistent(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def _draw(targets: list[Target], twin: "PreTrainedModel", seed: int) -> None:
    wanted: dict[str, list[Target]] = {}
    for target in targets:
        for name in target.names:
            wanted.setdefault(name, []).append(target)
    first = local_tensor(targets[0].tensor)
    copies = StagedCopies(first.device)
    filled: set[int] = set()
    for name, whole in draw_weights(twin, seed=seed, device=first.device, dtype=torch.float32):
        for target in wanted.get(name, ()):
            if id(target) not in filled:  # tied weights come twice; the first name decides
                target.fill(whole, copies)
                filled.add(id(target))


def _read(
    targets: list[Target], twin: "PreTrainedModel", files: WeightFiles, source: ModelSource
) -> None:
    keys = map_keys(twin, files.keys)
    copies = StagedCopies(local_tensor(targets[0].tensor).device)
    pieces = {name: one for one in keys.assemblies for name in _made_names(one.name, twin, one)}
    missing: list[str] = []
    wrong: list[str] = []
    by_name: dict[str, list[Target]] = {}
    for target in targets:
        known = [name for name in target.names if name in keys.direct]
        if known:
            wrong += _read_direct(target, keys.direct[known[0]], files, twin, copies)
            _check_tie(target, [keys.direct[name] for name in known], files, source)
        elif any(name in pieces for name in target.names):
            for name in target.names:
                by_name.setdefault(name, []).append(target)
        else:
            missing.append(target.names[0])
    for assembly in keys.assemblies:
        for name, whole in assemble(assembly, files, twin).items():
            for target in by_name.get(name, ()):
                if tuple(whole.shape) != target.shape:
                    wrong.append(_shape_line(name, whole.shape, target.shape))
                else:
                    target.fill(whole, copies)
    _refuse(source, twin, missing, [*wrong, *_unused_lines(keys, twin)])


def _made_names(first: str, twin: "PreTrainedModel", assembly: object) -> list[str]:
    """Names of all parameters that an assembly makes; several when one key is cut up."""
    patterns = assembly.converter.target_patterns  # type: ignore[attr-defined]
    stem = next((pattern for pattern in patterns if pattern in first), None)
    if stem is None:
        return [first]
    return [first.replace(stem, pattern, 1) for pattern in patterns]


def _read_direct(
    target: Target,
    key: str,
    files: WeightFiles,
    twin: "PreTrainedModel",
    copies: StagedCopies,
) -> list[str]:
    """Fill `target` from one key; what is wrong with the shapes, if anything."""
    have, want = files.shape(key), target.shape
    if have != want and not _may_grow(target, have, twin):
        return [_shape_line(target.names[0], have, want)]
    if have != want:
        _read_and_grow(target, key, files, have[0])
        return []
    target.put(files.read(key, target.region), copies)
    return []


def _may_grow(target: Target, have: tuple[int, ...], twin: "PreTrainedModel") -> bool:
    """Whether only rows for added tokens are lacking."""
    want = target.shape
    if not have or have[1:] != want[1:] or have[0] > want[0]:
        return False
    vocabulary = {id(twin.get_input_embeddings()), id(twin.get_output_embeddings())}
    modules = {name: id(module) for name, module in twin.named_modules()}
    return any(modules.get(name.rpartition(".")[0]) in vocabulary for name in target.names)


def _read_and_grow(target: Target, key: str, files: WeightFiles, rows: int) -> None:
    """Rows of added tokens start as the mean of all others: a neutral token."""
    region = region_of(target.tensor)
    if region.is_empty:
        return
    old = tuple((min(start, rows), min(stop, rows)) for start, stop in region.dims[0])
    part = files.read(key, Region((old, *region.dims[1:])))
    values = local_tensor(target.tensor)
    known = 0
    if part is not None:
        known = part.shape[0]
        values[:known].copy_(part)
    if known < values.shape[0]:
        values[known:].copy_(_mean_row(key, files, rows, region))


def _mean_row(key: str, files: WeightFiles, rows: int, region: Region) -> torch.Tensor:
    total: torch.Tensor | None = None
    for start in range(0, rows, _MEAN_ROWS):
        stop = min(start + _MEAN_ROWS, rows)
        block = files.read(key, Region((((start, stop),), *region.dims[1:])))
        assert block is not None
        part = block.to(torch.float64).sum(0)
        total = part if total is None else total + part
    assert total is not None
    return total / rows


def _check_tie(target: Target, keys: list[str], files: WeightFiles, source: ModelSource) -> None:
    """Files may hold a tied weight twice, but then both must be the same."""
    for key in keys[1:]:
        if files.shape(key) != files.shape(keys[0]):
            continue
        region = region_of(target.tensor)
        one, other = files.read(keys[0], region), files.read(key, region)
        if one is not None and other is not None and not torch.equal(one, other):
            raise MeshError(
                f"config.json of '{source.name}' says that '{keys[0]}' and '{key}' are tied, but "
                "the files hold different values.",
                where=str(source.path),
                hint="Set tie_word_embeddings: false in its config.json.",
            )


def _shape_line(name: str, have: "tuple[int, ...]", want: "tuple[int, ...]") -> str:
    return f"'{name}' is {list(have)} in the files and {list(want)} in the model"


def _unused_lines(keys: KeyMap, twin: "PreTrainedModel") -> list[str]:
    return [f"'{key}' is in the files but not in the model" for key in homeless_keys(keys, twin)]


def _refuse(
    source: ModelSource, twin: "PreTrainedModel", missing: list[str], wrong: list[str]
) -> None:
    if wrong:
        raise MeshError(
            f"the weights of '{source.name}' do not fit its config.json: {_some(wrong)}.",
            where=str(source.path),
            hint="Use the config.json that belongs to these weights.",
        )
    if missing:
        head = twin.get_output_embeddings()
        names: Mapping[int, str] = {id(module): name for name, module in twin.named_modules()}
        hint = "Use the weights that belong to its config.json."
        if head is not None and missing == [f"{names[id(head)]}.weight"]:
            hint = "If its head is tied to the embedding, set tie_word_embeddings: true there."
        quoted = [f"'{plain_name(name)}'" for name in missing]
        raise MeshError(
            f"the weights of '{source.name}' lack {_some(quoted)}.",
            where=str(source.path),
            hint=hint,
        )


def _some(lines: list[str]) -> str:
    rest = len(lines) - _SHOWN
    return ", ".join(lines[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
