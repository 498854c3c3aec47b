"""From a recipe and a mesh to a model that is split, sharded, loaded and ready to train.

The order matters and is the same for every mesh: build (no memory) -> adapters -> attention ->
dropout -> tensor parallelism -> fp8 -> tiled MLP -> compile -> recompute -> sharding -> weights
-> optimizer.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from ndtrain.errors import MeshError
from ndtrain.model.adapters import apply_adapter
from ndtrain.model.attention import block_windows, use_attention
from ndtrain.model.attention_probe import check_attention
from ndtrain.model.build import build_model
from ndtrain.model.experts import use_experts
from ndtrain.model.flash_attention import use_flash_attention
from ndtrain.model.head_probe import check_head
from ndtrain.model.loss import Vocabulary
from ndtrain.model.split_plan import split_plan
from ndtrain.model.trainable import Trainable
from ndtrain.model.unfrozen import freeze_unnamed
from ndtrain.model.weights import load_weights
from ndtrain.parallel.context import SequenceSplit
from ndtrain.parallel.dropout import DropoutKeys, MeshDropout
from ndtrain.parallel.float8 import apply_float8
from ndtrain.parallel.mesh import Mesh
from ndtrain.parallel.offload import apply_offload
from ndtrain.parallel.own_shards import use_own_shards
from ndtrain.parallel.recompute import apply_compile, apply_recompute, ask_for_gradients
from ndtrain.parallel.shard import GradientSync, apply_sharding
from ndtrain.parallel.tensor import SplitPlan, apply_tensor_parallel, local_vocabulary
from ndtrain.parallel.tiled import apply_tiled_mlp
from ndtrain.plan.families import FAMILIES, USE_A_TESTED_ONE
from ndtrain.plan.model_source import ModelSource
from ndtrain.recipe.schema import Recipe
from ndtrain.train.early_step import EarlySteps
from ndtrain.train.optim import build_optimizer, optimizer_factory
from ndtrain.train.policy import Policy, decide_policy, keeps_frozen_whole, sums_each_batch


@dataclass(frozen=True)
class Engine:
    """Everything that takes part in a step.

    Attributes:
        trainable: the sharded module; calling it gives the loss sum of a micro-batch.
        model: the model inside it, whose parameter names are the checkpoint's.
        sync: when gradients are summed over ranks.
        early: steps parameters in the backward pass, where the recipe asks for it.
        partial: trained parameters whose gradients are summed over tp before clipping.
        block_windows: windows for which attention reads block masks.
    """

    recipe: Recipe
    mesh: Mesh
    policy: Policy
    trainable: Trainable
    model: nn.Module
    optimizer: Optimizer
    sync: GradientSync
    early: EarlySteps | None
    parameters: tuple[nn.Parameter, ...]
    partial: tuple[nn.Parameter, ...]
    split: SequenceSplit
    keys: DropoutKeys
    block_windows: tuple[int | None, ...] = ()

    @property
    def causal_lm(self) -> PreTrainedModel:
        """The transformers model."""
        return self.trainable.causal_lm


def use_mesh_dropout(model: nn.Module, keys: DropoutKeys, plan: SplitPlan, mesh: Mesh) -> None:
    """Replace the dropout modules by ones that do not depend on the mesh."""
    tp, tp_rank = mesh.plan.tp, mesh.tp_rank
    widths = [size for one in model.parameters() for size in one.shape]
    widths += [getattr(module, "in_features", 0) for module in model.modules()]
    keys.prepare(max(widths), mesh.device)
    number = 0
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Dropout):
            continue
        number += 1
        # an adapter on a row-split linear drops features of which this rank holds a part
        owner = name.partition(".lora_dropout")[0]
        first = 0
        if plan.modules.get(f"{owner}.base_layer") == "rowwise":
            features = model.get_submodule(f"{owner}.base_layer").in_features
            first = tp_rank * -(-int(features) // tp)  # type: ignore[arg-type]
        share = (tp, tp_rank) if name in plan.sliced else (1, 0)
        told_apart = torch.tensor(number, device=mesh.device)
        model.set_submodule(name, MeshDropout(module.p, told_apart, keys, first, share))


def build_split(mesh: Mesh, method: str) -> SequenceSplit:
    """How rows are shared out over the mesh's cp ranks, and over tp ranks between them."""
    slices = mesh.plan.tp if mesh.plan.sequence_parallel else 1
    if mesh.plan.cp == 1:
        return SequenceSplit(slices=slices)
    return SequenceSplit(method, mesh.plan.cp, mesh.cp_rank, mesh.cp_group, slices)


def decoder_blocks(causal_lm: PreTrainedModel) -> nn.ModuleList:
    """The repeated blocks of a model.

    Raises:
        MeshError: the architecture keeps them somewhere unknown.
    """
    blocks = getattr(causal_lm.base_model, "layers", None)
    if not isinstance(blocks, nn.ModuleList):
        raise MeshError(
            f"the architecture '{causal_lm.config.model_type}' is not supported: its base model "
            "has no list of blocks called 'layers'.",
            where="base_model",
            hint=USE_A_TESTED_ONE,
        )
    return blocks


def check_architecture(causal_lm: PreTrainedModel, sequence_len: int) -> None:
    """Refuse a model that would be computed differently from how transformers does.

    Args:
        causal_lm: as built, on the meta device.
        sequence_len: tokens of a row.

    Raises:
        MeshError: its blocks, its attention or its head are not of a kind that is known.
    """
    decoder_blocks(causal_lm)
    if causal_lm.config.get_text_config().model_type not in FAMILIES:
        check_head(causal_lm)
        check_attention(causal_lm, sequence_len)


def final_norms(causal_lm: PreTrainedModel) -> list[nn.Module]:
    """The norms between the last block and the head, whatever the architecture calls them."""
    children = causal_lm.base_model.children()
    return [one for one in children if "norm" in type(one).__name__.lower()]


def sharded_units(trainable: Trainable, blocks: nn.ModuleList) -> list[nn.Module]:
    """The modules whose weights are gathered one at a time, in the order in which they run.

    A tied head shares its matrix with the embedding; both then belong to the whole.
    """
    embedding = trainable.causal_lm.get_input_embeddings()
    if embedding.weight is trainable.head.head.weight:
        return list(blocks)
    return [embedding, *blocks, trainable.head]


def check_dropout(causal_lm: PreTrainedModel, mesh: Mesh) -> None:
    """Refuse attention dropout where it would depend on the mesh.

    Raises:
        MeshError: the model drops attention weights and ranks share heads or sequences.
    """
    share = getattr(causal_lm.config, "attention_dropout", 0.0)
    if share and mesh.plan.world_size > 1:
        raise MeshError(
            f"the model drops {share} of its attention weights, which differs between meshes.",
            where="base_model",
            hint="Set attention_dropout to 0 in its config.json, or train on one rank.",
        )


def assemble(recipe: Recipe, source: ModelSource, mesh: Mesh, *, num_tokens: int = 0) -> Engine:
    """Build everything a step needs.

    Args:
        recipe: the recipe.
        source: where configuration and weights come from.
        mesh: the mesh over the running process group.
        num_tokens: size of the tokenizer, when tokens were added to it.

    Raises:
        MeshError: the model cannot be split or built this way.
        RecipeError: adapter targets or parameter patterns match nothing.
    """
    plan = mesh.plan
    policy = decide_policy(recipe, mesh)
    causal_lm = build_model(source, recipe, dtype=policy.base_dtype, num_tokens=num_tokens)
    check_architecture(causal_lm, recipe.sequence_len)
    model: nn.Module = causal_lm
    if recipe.adapter is not None:
        model = apply_adapter(causal_lm, recipe)
    elif recipe.unfrozen_parameters:
        freeze_unnamed(model, recipe.unfrozen_parameters)
    use_attention(causal_lm)
    if recipe.flash_attention_impl is not None and mesh.device.type == "cuda":
        use_flash_attention(recipe.flash_attention_impl, mesh.device)
    check_dropout(causal_lm, mesh)

    keys = DropoutKeys()
    splits = SplitPlan()
    if plan.tp > 1:
        splits = split_plan(model, causal_lm, plan.tp, sequence_parallel=plan.sequence_parallel)
    use_mesh_dropout(model, keys, splits, mesh)
    vocab_size = causal_lm.get_output_embeddings().weight.shape[0]
    vocabulary = Vocabulary(0, vocab_size)
    if plan.tp > 1:
        apply_tensor_parallel(model, splits, mesh.tp, overlaps=plan.overlaps)
        vocabulary = Vocabulary(*local_vocabulary(vocab_size, mesh.tp), mesh.tp_group)
    uniform = use_experts(
        causal_lm,
        tp=plan.tp if splits.parameters else 1,
        item_size=policy.compute_dtype.itemsize,
    )
    blocks = decoder_blocks(causal_lm)
    if policy.float8 is not None:
        apply_float8(blocks, policy.float8)
    compiles = policy.compiles and uniform
    place = f"tp {mesh.tp_rank} of {plan.tp}" if plan.tp > 1 else ""
    if policy.tiles:
        slices = recipe.tiled_mlp_num_shards
        apply_tiled_mlp(blocks, keys, shards=slices, compiles=compiles, place=place)
    if compiles:
        apply_compile(blocks, policy.budget, whole=not policy.tiles, place=place)
        ask_for_gradients(causal_lm.get_input_embeddings())
        if plan.tp == 1:
            # a dozen passes over the hidden states, if left as it is
            apply_compile(final_norms(causal_lm), 1.0)
    if policy.recomputes_outside(compiles):
        apply_recompute(blocks, policy.recompute)
    if policy.offloads:
        apply_offload(blocks, mesh.device)
    trainable = Trainable(
        model,
        causal_lm,
        vocabulary,
        keys,
        chunk=recipe.loss_chunk_tokens,
        shares=plan.sequence_parallel,
    )
    whole: tuple[nn.Parameter, ...] = ()
    if keeps_frozen_whole(model, recipe, mesh):
        whole = tuple(p for p in model.parameters() if not p.requires_grad)
    apply_sharding(
        trainable,
        sharded_units(trainable, blocks),
        mesh,
        compute_dtype=policy.compute_dtype,
        reduce_dtype=policy.reduce_dtype,
        reshard=policy.reshard,
        whole=whole,
    )
    sync = GradientSync(
        trainable,
        each=sums_each_batch(model, recipe, mesh, policy),
        copies_too=policy.reduce_dtype != torch.float32,
    )
    adapter = Path(recipe.lora_model_dir).expanduser() if recipe.lora_model_dir else None
    load_weights(model, source, seed=recipe.seed, device=mesh.device, adapter=adapter)
    if plan.is_alone:
        use_own_shards(trainable)
    trainable.train()
    named = list(model.named_parameters())
    parameters = tuple(parameter for _, parameter in named if parameter.requires_grad)
    partial = tuple(
        parameter for name, parameter in named if name in splits.partial and parameter.requires_grad
    )
    optimizer = build_optimizer(named, recipe)
    early = None
    if recipe.optimizer_in_backward:
        make = optimizer_factory(recipe, [parameter.dtype for parameter in parameters])
        together = [block.parameters() for block in blocks]
        early = EarlySteps(optimizer, lambda groups: make(groups, recipe), together, partial)
    if mesh.device.type == "cuda":
        # what drawing or reading weights needed is no part of training's peak
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(mesh.device)
    windows: tuple[int | None, ...] = ()
    if mesh.device.type == "cuda":
        windows = block_windows(causal_lm.config.get_text_config(), fused=policy.segmented)
    return Engine(
        recipe=recipe,
        mesh=mesh,
        policy=policy,
        trainable=trainable,
        model=model,
        optimizer=optimizer,
        sync=sync,
        early=early,
        parameters=parameters,
        partial=partial,
        split=build_split(mesh, plan.cp_method),
        keys=keys,
        block_windows=windows,
    )
