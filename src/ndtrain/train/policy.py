"""Which dtype, kernels and recomputation a run uses on its device, out of recipe and hardware."""

from dataclasses import dataclass

import torch
from torch import nn

from ndtrain.errors import RecipeError
from ndtrain.parallel.mesh import Mesh
from ndtrain.plan.setting import ATTENTION_BUDGET, FROZEN_SHARE, float8_kind, syncs_each_batch
from ndtrain.recipe.schema import Recipe
from ndtrain.train.optim import rounds_by_chance

_FIRST_WITH_FLOAT8 = (8, 9)
"""CUDA compute capability."""


@dataclass(frozen=True)
class Policy:
    """What the recipe leaves to the machine, decided.

    Attributes:
        compute_dtype: of matrix products.
        reduce_dtype: of gradients while they are summed over ranks; those of a computation in
            fp32 are summed in fp32.
        base_dtype: of stored weights; a frozen base is stored as it is computed.
        compiles: compile each block.
        budget: share of activations that compiled blocks keep.
        recompute: `none`, `attention` or `full`: what an uncompiled block recomputes, or `full` one
            with a tiled MLP.
        reshard: free gathered blocks between forward and backward.
        segmented: attention reads documents one by one or through a kernel of variable length,
            without masks.
        adapts: an adapter is trained, in fp32, on a frozen base.
        state_dtype: of optimizer states: `fp32`, `bf16` or `8bit`.
        by_chance: what has fewer bits than fp32 is rounded by chance when it is updated.
        float8: how 8-bit matmuls of the blocks are scaled, None without them.
        offloads: inputs of recomputed blocks are kept in host memory.
        tiles: the MLP of a block works on slices of the tokens.
    """

    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype
    base_dtype: torch.dtype
    compiles: bool
    budget: float
    recompute: str
    reshard: bool
    segmented: bool
    adapts: bool
    state_dtype: str
    by_chance: bool
    offloads: bool
    tiles: bool
    float8: str | None

    def recomputes_outside(self, compiled: bool) -> bool:
        """Whether a block is recomputed by autograd instead of within its compiled graph."""
        if compiled:
            return self.tiles and self.recompute == "full"
        return self.recompute != "none"

    @property
    def trained_dtype(self) -> torch.dtype:
        """Of trained weights and of their gradients between passes and steps."""
        return torch.float32 if self.adapts else self.base_dtype

    def describe(self) -> str:
        """The dtypes of a run, in one line."""
        names = {torch.float32: "fp32", torch.bfloat16: "bf16"}
        stored, computed = names[self.base_dtype], names[self.compute_dtype]
        trained, states = names[self.trained_dtype], self.state_dtype.replace("8bit", "8-bit")
        what = {
            "trained weights": trained,
            "frozen weights": stored if self.adapts else "fp32",
            "computation": computed,
            "gradients added up over micro-batches": trained,
            "gradients summed over ranks": names[self.reduce_dtype],
            "optimizer states": states,
        }
        others = [f"{name} {dtype}" for name, dtype in what.items() if dtype != "fp32"]
        if self.float8 is not None:
            others.append(f"matmuls of the blocks fp8, {self.float8}")
        if not others:
            return "everything is computed and kept in fp32"
        line = f"precision is fp32, except {', '.join(others)}"
        if self.by_chance:
            return f"{line}; rounded by chance when updated"
        if self.trained_dtype == torch.bfloat16:
            return f"{line}; updated weights are rounded to the nearest bf16"
        return line


def decide_policy(recipe: Recipe, mesh: Mesh) -> Policy:
    """Decide what the recipe leaves open.

    Raises:
        RecipeError: the device cannot do what a key asks for.
    """
    if recipe.fp8 and mesh.device.type == "cuda":
        _require_float8_units(mesh.device)
    on_cuda = mesh.device.type == "cuda"
    compute = compute_dtype(recipe, mesh.device)
    base = torch.bfloat16 if recipe.param_dtype == "bf16" else torch.float32
    if recipe.adapter is not None:
        base = compute
    compiles = on_cuda if recipe.torch_compile == "auto" else recipe.torch_compile
    wanted = recipe.gradient_checkpointing
    recompute = {True: "full", "full": "full", "attention": "attention"}.get(wanted, "none")
    # a compiled block is one operation to the world outside: the compiler recomputes, by budget
    budgets = {"none": recipe.activation_memory_budget, "attention": ATTENTION_BUDGET, "full": 0.0}
    if recipe.tiled_mlp:
        # then it is two, with slices between them: recomputed as a whole, it is so from outside
        budgets["full"] = 1.0
    shards = mesh.plan.dp_shard * mesh.plan.cp
    reshard = recipe.reshard_after_forward
    trained = torch.float32 if recipe.adapter is not None else base
    return Policy(
        compute_dtype=compute,
        reduce_dtype=torch.float32 if recipe.reduce_dtype == "fp32" else compute,
        base_dtype=base,
        compiles=compiles,
        budget=budgets[recompute],
        recompute=recompute,
        # a rank alone frees copies in another dtype at most, and has none to gather
        reshard=shards > 1 if reshard == "auto" else reshard,
        # on a CPU document by document, which no compiler can follow
        segmented=compute == torch.bfloat16 if on_cuda else not compiles,
        adapts=recipe.adapter is not None,
        state_dtype=recipe.optimizer_state_dtype,
        by_chance=rounds_by_chance(recipe, [trained]),
        offloads=recipe.activation_offloading,
        tiles=recipe.tiled_mlp,
        float8=float8_kind(recipe),
    )


def _require_float8_units(device: torch.device) -> None:
    if torch.cuda.get_device_capability(device) < _FIRST_WITH_FLOAT8:
        raise RecipeError(
            f"{torch.cuda.get_device_name(device)} has no 8-bit float matmuls.",
            where="fp8",
            hint="Remove fp8, or use a GPU of the Ada or Hopper generation or later.",
        )


def compute_dtype(recipe: Recipe, device: torch.device) -> torch.dtype:
    """The dtype of matrix products: bf16 on CUDA devices that have it, unless the recipe says."""
    wanted = recipe.bf16
    if wanted == "auto":
        wanted = device.type == "cuda" and torch.cuda.is_bf16_supported()
    return torch.bfloat16 if wanted else torch.float32


def keeps_frozen_whole(model: nn.Module, recipe: Recipe, mesh: Mesh) -> bool:
    """Whether every rank holds the frozen parameters whole.

    On CPU they are sharded unless the recipe says otherwise, because the ranks of one host share
    its memory.
    """
    if recipe.adapter is None:
        return False
    if recipe.shard_frozen != "auto":
        return not recipe.shard_frozen
    if mesh.device.type != "cuda":
        return False
    frozen = sum(
        parameter.numel() * parameter.element_size()
        for parameter in model.parameters()
        if not parameter.requires_grad
    )
    total = torch.cuda.get_device_properties(mesh.device).total_memory
    return frozen / mesh.plan.tp < FROZEN_SHARE * total


def sums_each_batch(model: nn.Module, recipe: Recipe, mesh: Mesh, policy: Policy) -> bool:
    """Whether gradients are summed over ranks at each micro-batch instead of once a step."""
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    memory = 0
    if mesh.device.type == "cuda":
        memory = torch.cuda.get_device_properties(mesh.device).total_memory
    return syncs_each_batch(
        recipe.sync_each_batch,
        trained / mesh.plan.tp,
        memory,
        reduced_in=policy.reduce_dtype.itemsize,
    )
