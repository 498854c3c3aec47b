"""Streamed files are what safetensors itself writes and reads."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from ndtrain.model.row_files import stored_tensors
from ndtrain.model.shard_files import INDEX_FILE, ShardFiles, TensorSpec, plan_shards

TENSORS = {
    "one": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 3),
    "half": torch.linspace(-1, 1, 10, dtype=torch.bfloat16).reshape(5, 2),
    "count": torch.tensor([2**40], dtype=torch.int64),
    "flags": torch.tensor([True, False]),
}
SPECS = [TensorSpec(name, one.dtype, tuple(one.shape)) for name, one in TENSORS.items()]


def write(folder: Path, **options: int) -> None:
    with ShardFiles(folder, SPECS, **options) as files:  # type: ignore[arg-type]
        for name, tensor in TENSORS.items():
            files.write(name, tensor.split(2) if tensor.ndim else [tensor])


def test_one_file(tmp_path: Path) -> None:
    write(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
    loaded = load_file(tmp_path / "model.safetensors")
    assert set(loaded) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_several_files_with_an_index(tmp_path: Path) -> None:
    write(tmp_path, shard_bytes=50)
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    assert index["metadata"]["total_size"] == sum(one.nbytes for one in TENSORS.values())
    assert set(index["weight_map"]) == set(TENSORS)
    names = sorted(set(index["weight_map"].values()))
    assert names == [f"model-{n:05d}-of-{len(names):05d}.safetensors" for n in range(1, 3)]
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], TENSORS[name])


def test_shards_stay_below_the_limit_unless_one_tensor_is_larger() -> None:
    specs = [TensorSpec(str(n), torch.uint8, (size,)) for n, size in enumerate([4, 4, 30, 1, 9])]
    sizes = [[spec.nbytes for spec in shard] for shard in plan_shards(specs, 10)]
    assert sizes == [[4, 4], [30], [1, 9]]


@pytest.mark.parametrize(
    ("name", "blocks", "message"),
    [
        ("scalar", [TENSORS["scalar"]], "'one' comes next, not 'scalar'"),
        ("one", [TENSORS["one"][:2]], "'one' has 32 bytes instead of 48"),
    ],
)
def test_mistakes_are_refused(
    name: str, blocks: list[torch.Tensor], message: str, tmp_path: Path
) -> None:
    with (
        pytest.raises(ValueError, match=message),
        ShardFiles(tmp_path, SPECS) as files,
    ):
        files.write(name, blocks)


def test_a_tensor_that_was_forgotten_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="'scalar' and what follows it were never written"),
        ShardFiles(tmp_path, SPECS) as files,
    ):
        files.write("one", [TENSORS["one"]])


def test_blocks_of_rows_read_back(tmp_path: Path) -> None:
    write(tmp_path, shard_bytes=50)
    stored = stored_tensors(sorted(tmp_path.glob("*.safetensors")))
    assert set(stored) == set(TENSORS)
    for name, tensor in TENSORS.items():
        parts = [stored[name].rows(start, stop) for start, stop in stored[name].blocks()]
        whole = torch.cat(parts) if tensor.ndim and parts else (parts or [tensor])[0]
        assert torch.equal(whole, tensor), name
    assert torch.equal(stored["half"].rows(3, 5), TENSORS["half"][3:])
