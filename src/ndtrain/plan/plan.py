"""The shape of a run: axis sizes, batch arithmetic and the facts they were checked against."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from ndtrain.errors import MeshError
from ndtrain.plan.facts import ModelFacts
from ndtrain.plan.numbers import divisors, either
from ndtrain.recipe.schema import Recipe

AXES = ("dp_replicate", "dp_shard", "cp", "tp")
"""The mesh axes, outermost first: neighbouring ranks differ in tp."""


def row_multiple(cp: int, method: str, slices: int = 1) -> int:
    """What the length of a row must be a multiple of, so that it can be dealt out evenly.

    All-gather deals each rank one piece from the head and one from the tail of a row, so that
    all have equally much to attend to.

    Args:
        slices: tp ranks that share the tokens which a cp rank holds.
    """
    return cp * math.lcm(2 if method == "allgather" else 1, slices)


@dataclass(frozen=True)
class ParallelPlan:
    """Sizes of the four axes; their product is the number of ranks.

    Attributes:
        cp_method: how the ranks of a sequence exchange: `none`, `ulysses` or `allgather`.
        sequence_parallel: tp ranks share the tokens wherever they do not share the features.
        overlaps: products are computed while those tokens travel.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    cp_method: str = "none"
    sequence_parallel: bool = False
    overlaps: bool = False

    @property
    def row_multiple(self) -> int:
        """What the length of a row must be a multiple of; shorter rows are padded to it."""
        return row_multiple(self.cp, self.cp_method, self.tp if self.sequence_parallel else 1)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The sizes in axis order."""
        return (self.dp_replicate, self.dp_shard, self.cp, self.tp)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def data_ranks(self) -> int:
        """Number of ranks that read different rows."""
        return self.dp_replicate * self.dp_shard

    @property
    def is_alone(self) -> bool:
        """Whether no other rank has a share of the rows: nothing is gathered or summed then."""
        return self.data_ranks * self.cp == 1

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where `rank` stands on each axis."""
        place = {}
        for axis, size in zip(reversed(AXES), reversed(self.sizes), strict=True):
            rank, place[axis] = divmod(rank, size)
        return {axis: place[axis] for axis in AXES}

    def __str__(self) -> str:
        return (
            f"dp_replicate {self.dp_replicate} × dp_shard {self.dp_shard} × cp {self.cp} × "
            f"tp {self.tp} = {self.world_size} rank{'s' if self.world_size > 1 else ''}"
        )


@dataclass(frozen=True)
class BatchPlan:
    """How the rows of one optimizer step are dealt out."""

    micro_batch: int
    accumulation: int
    data_ranks: int

    @property
    def global_batch(self) -> int:
        """Rows of a step over all ranks."""
        return self.micro_batch * self.accumulation * self.data_ranks


@dataclass(frozen=True)
class Plan:
    """Everything decided before launch."""

    parallel: ParallelPlan
    batch: BatchPlan
    facts: ModelFacts | None
    notices: tuple[str, ...] = ()


def plan_mesh(
    recipe: Recipe,
    world_size: int | None,
    *,
    where: str = "",
    tp_works: Callable[[int], bool] = lambda size: True,
) -> ParallelPlan:
    """The axis sizes for `world_size` ranks (None: exactly what the recipe asks for).

    Args:
        where: what messages name as the place of the sizes.
        tp_works: whether the model can be split over so many ranks; only such sizes are advised.

    Raises:
        MeshError: the sizes do not multiply to the world size.
    """
    others = recipe.dp_replicate_size * recipe.context_parallel_size * recipe.tensor_parallel_size
    shard = recipe.dp_shard_size
    if shard is None:
        shard = max(1, (world_size or others) // others)
    sizes = ParallelPlan(
        dp_replicate=recipe.dp_replicate_size,
        dp_shard=shard,
        cp=recipe.context_parallel_size,
        tp=recipe.tensor_parallel_size,
    )
    if world_size is not None and sizes.world_size != world_size:
        message = f"{sizes}, but {world_size} were started."
        raise MeshError(message, where=where, hint=_size_hint(sizes, others, world_size, tp_works))
    return sizes


def _size_hint(
    sizes: ParallelPlan, others: int, world_size: int, tp_works: Callable[[int], bool]
) -> str:
    """What would make the product right."""
    start = f"start {sizes.world_size}"
    if world_size % others == 0:
        return f"Set dp_shard_size: {world_size // others}, or {start}."
    keys = {
        "tensor_parallel_size": sizes.tp,
        "context_parallel_size": sizes.cp,
        "dp_replicate_size": sizes.dp_replicate,
    }
    for key, size in keys.items():
        if world_size % size:
            divide = divisors(world_size)
            fitting = [d for d in divide if key != "tensor_parallel_size" or tp_works(d)]
            return f"Set {key}: {either(fitting or [1])}, or {start} ranks."
    return f"Lower one of {', '.join(keys)} so that their product divides {world_size}, or {start}."


def ranks_per_node(world_size: int, nodes: int, *, option: str = "--nodes") -> int:
    """How many of the ranks each node gets: every node as many as the others.

    Args:
        option: that named the nodes, for messages.

    Raises:
        MeshError: the ranks cannot be dealt evenly.
    """
    ranks, rest = divmod(world_size, nodes)
    if rest or not ranks:
        raise MeshError(
            f"{world_size} rank{'s' if world_size > 1 else ''} cannot be dealt evenly to {nodes} "
            "nodes.",
            where=option,
            hint=f"Use {either(divisors(world_size))} nodes, or other axis sizes.",
        )
    return ranks


def plan_batch(recipe: Recipe, data_ranks: int) -> BatchPlan:
    """Batch arithmetic of a step.

    Raises:
        MeshError: `global_batch_size` cannot be dealt out evenly.
    """
    accumulation = recipe.gradient_accumulation_steps or 1
    if recipe.global_batch_size is not None:
        per_pass = recipe.micro_batch_size * data_ranks
        accumulation, rest = divmod(recipe.global_batch_size, per_pass)
        if rest or not accumulation:
            raise MeshError(
                f"global_batch_size {recipe.global_batch_size} is not a multiple of "
                f"micro_batch_size {recipe.micro_batch_size} × {data_ranks} data ranks = "
                f"{per_pass}.",
                where="global_batch_size",
                hint=f"Use a multiple of {per_pass}, or a smaller micro_batch_size.",
            )
    return BatchPlan(recipe.micro_batch_size, accumulation, data_ranks)


def rows_of_step(recipe: Recipe, world_size: int) -> int:
    """Rows of a step of the recipe as written; an open dp_shard_size takes the ranks given.

    Args:
        world_size: ranks that an open `dp_shard_size` is filled up to.
    """
    if recipe.global_batch_size is not None:
        return recipe.global_batch_size
    others = recipe.dp_replicate_size * recipe.context_parallel_size * recipe.tensor_parallel_size
    shard = recipe.dp_shard_size or max(1, world_size // others)
    return plan_batch(recipe, recipe.dp_replicate_size * shard).global_batch
