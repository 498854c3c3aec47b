"""The hardware book: GPUs, links and what a training step reaches of their rates."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import yaml

from ndtrain.errors import RecipeError
from ndtrain.plan.calibration import Calibration, read_calibration
from ndtrain.plan.plan import ranks_per_node

GIB = 1024**3
_GIGABYTES = re.compile(r"(\d+(?:\.\d+)?)\s*(?:gb|gib|g)", re.IGNORECASE)
_DRIVER = Path("/proc/driver/nvidia/gpus")
DEFAULT_INTER = "ib-ndr"
HOST = "cpu"
"""Name of the device of a run without GPUs; its memory is a rank's share of the host's."""


Exchange = Literal["all_gather", "all_reduce", "all_to_all"]


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU.

    Attributes:
        memory_gib: total memory of the device.
        bf16_tf: bf16 matrix TFLOP/s, dense.
        memory_gbs: memory bandwidth in GB/s.
        link: name of the link between the GPUs of one node.
        source: where the numbers come from.
    """

    name: str
    memory_gib: float
    bf16_tf: float
    fp8_tf: float | None
    memory_gbs: float
    link: str
    source: str
    date: str


@dataclass(frozen=True)
class Link:
    """How GPUs reach each other: GB/s of one GPU in one direction.

    Attributes:
        gbs: rate of the hardware.
        per_node: the GPUs of a node share it.
        measured: GB/s that one rank sends in each kind of exchange, where somebody has measured.
    """

    name: str
    gbs: float
    latency_us: float
    source: str
    date: str
    per_node: bool = False
    measured: Mapping[Exchange, float] = field(default_factory=dict)

    @property
    def is_fast(self) -> bool:
        """Whether it carries tensor parallelism: NVLink class, not PCIe or a network."""
        return self.gbs >= 100


@dataclass(frozen=True)
class Cluster:
    """The machines a plan is made for.

    Attributes:
        gpus_per_node: GPUs of one node.
        intra: link inside a node.
        inter: link between nodes.
        gpu_is_assumed: the user named only a memory size, the rates are those of `gpu`.
        rates: where speed comes from; `guessed` rates order settings and say nothing of seconds.
    """

    gpu: Gpu
    gpus_per_node: int
    nodes: int
    intra: Link
    inter: Link
    gpu_is_assumed: bool = False
    rates: Literal["book", "measured", "guessed"] = "book"

    @property
    def world_size(self) -> int:
        """GPUs of the whole cluster."""
        return self.gpus_per_node * self.nodes

    @property
    def has_gpus(self) -> bool:
        """Whether ranks run on GPUs, not as processes of a host."""
        return self.gpu.name != HOST

    def link_over(self, ranks: int) -> Link:
        """The link that limits a collective over `ranks` neighbouring ranks."""
        return self.intra if ranks <= self.gpus_per_node else self.inter

    def gbs_over(self, ranks: int) -> float:
        """GB/s one GPU gets in a collective over `ranks` neighbouring ranks."""
        link = self.link_over(ranks)
        return link.gbs / self.gpus_per_node if link.per_node else link.gbs

    def rate_over(self, ranks: int, exchange: Exchange, constants: Calibration) -> float:
        """Bytes a second that one of `ranks` neighbouring ranks sends in an exchange."""
        measured = self.link_over(ranks).measured.get(exchange)
        if measured is not None:
            return measured * 1e9
        share = constants.all_to_all if exchange == "all_to_all" else constants.link
        return self.gbs_over(ranks) * 1e9 * share


@cache
def _book() -> Mapping[str, Any]:
    text = (files("ndtrain.plan") / "hardware.yaml").read_text(encoding="utf-8")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    book: Mapping[str, Any] = yaml.load(text, Loader=loader)
    return book


def calibration() -> Calibration:
    """What training steps reach of the rates."""
    return read_calibration(_book())


def probe_shares() -> Mapping[str, float]:
    """What the probes of `plan --measure` read on the calibrated machine, over the book's rates."""
    probe: Mapping[str, float] = _book()["probe"]
    return probe


def gpu_names() -> tuple[str, ...]:
    """All GPUs of the book."""
    return tuple(_book()["gpus"])


def link_names() -> tuple[str, ...]:
    """All links of the book."""
    return tuple(_book()["links"])


def find_gpu(word: str) -> tuple[Gpu, bool]:
    """The GPU a user means by `h100-80`, `H100` or `80GB`, and whether its kind was assumed.

    Raises:
        RecipeError: no such GPU, with the names there are.
    """
    key = word.strip().lower().replace("_", "-").replace(" ", "-")
    names = gpu_names()
    if key in names:
        return _gpu(key), False
    if match := _GIGABYTES.fullmatch(word.strip()):
        size = float(match[1])
        nearest = min(names, key=lambda name: abs(_gpu(name).memory_gib - size))
        base = _gpu(nearest)
        # A device shows about 1 % less than the gigabytes on its box.
        memory = base.memory_gib if abs(base.memory_gib - size) < 2 else size * 0.985
        return Gpu(**{**vars(base), "memory_gib": memory}), True
    starts = [name for name in names if name.startswith(key) or name.replace("-", "") == key]
    if starts:
        return _gpu(starts[0]), False
    raise RecipeError(
        f"'{word}' is not a GPU of the hardware book.",
        where="--gpu",
        hint=f"Use a memory size such as 80GB, or one of {', '.join(names)}.",
    )


def find_link(word: str, option: str) -> Link:
    """The link named on the command line.

    Raises:
        RecipeError: no such link, with the names there are.
    """
    key = word.strip().lower().replace("_", "-")
    links = _book()["links"]
    if key not in links:
        raise RecipeError(
            f"'{word}' is not a link of the hardware book.",
            where=option,
            hint=f"Use one of {', '.join(links)}.",
        )
    entry = dict(links[key])
    entry["date"] = str(entry["date"])
    return Link(name=key, **entry)


def build_cluster(
    gpu: str | Gpu,
    *,
    world_size: int,
    nodes: int | None = None,
    intra: str | None = None,
    inter: str | None = None,
) -> Cluster:
    """A cluster of `world_size` equal GPUs; without `nodes`, eight to a node.

    Raises:
        RecipeError: an unknown part.
        MeshError: the GPUs cannot be dealt evenly to the nodes.
    """
    kind, assumed = (gpu, False) if isinstance(gpu, Gpu) else find_gpu(gpu)
    if nodes is None:
        nodes = -(-world_size // 8)
    return Cluster(
        gpu=kind,
        gpus_per_node=ranks_per_node(world_size, nodes),
        nodes=nodes,
        intra=find_link(intra or kind.link, "--intra"),
        inter=find_link(inter or DEFAULT_INTER, "--inter"),
        gpu_is_assumed=assumed,
    )


def build_host(name: str, *, memory_gib: float, world_size: int, nodes: int = 1) -> Cluster:
    """Ranks as processes of hosts, each with `memory_gib` of its host's memory."""
    entry = dict(_book()["hosts"][name])
    entry["date"] = str(entry["date"])
    device = Gpu(name=name, memory_gib=memory_gib, **entry)
    return Cluster(
        gpu=device,
        gpus_per_node=ranks_per_node(world_size, nodes),
        nodes=nodes,
        intra=find_link(device.link, "--intra"),
        inter=find_link("ethernet-10", "--inter"),
        rates="guessed",
    )


def local_gpus(driver: Path = _DRIVER) -> tuple[str, ...]:
    """Names in the book of this machine's NVIDIA GPUs, read from the driver without torch.

    A GPU the book does not know is `unknown`.
    """
    return tuple(_book_name(model) if model else "unknown" for model in gpu_models(driver))


def gpu_models(driver: Path = _DRIVER) -> tuple[str, ...]:
    """What the driver calls this machine's NVIDIA GPUs, empty where it gives no name."""
    if not driver.is_dir():
        return ()
    found = []
    for folder in sorted(driver.iterdir()):
        text = (folder / "information").read_text(encoding="utf-8", errors="replace")
        match = re.search(r"^Model:\s*(.+)$", text, re.MULTILINE)
        found.append(match[1].strip() if match else "")
    return tuple(found)


def _book_name(model: str) -> str:
    """`NVIDIA H100 80GB HBM3` is h100-80 in the book."""
    words = re.sub(r"[^a-z0-9]+", " ", model.lower()).split()
    best, score = "unknown", 0
    for name in gpu_names():
        parts = name.split("-")
        hits = sum(part in words or f"{part}gb" in words for part in parts)
        if parts[0] in words or (parts[0] == "rtx" and parts[1] in words):
            value = 10 * hits - len(parts)
            if value > score:
                best, score = name, value
    return best


def _gpu(name: str) -> Gpu:
    entry = dict(_book()["gpus"][name])
    entry["date"] = str(entry["date"])
    return Gpu(name=name, **entry)
