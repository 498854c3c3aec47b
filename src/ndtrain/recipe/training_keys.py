"""Recipe keys of the optimisation, the mesh, saving, evaluation and reporting."""

from typing import Annotated, Any, Literal

from pydantic import Field

from ndtrain.recipe.base import MAX_SEED, RecipePart, StrategyWord


class MeshKeys(RecipePart):
    """The sizes of the four axes, outermost first; their product is the world size."""

    dp_replicate_size: int = Field(1, ge=1, description="Copies of the model (outermost axis).")
    dp_shard_size: int | None = Field(
        None, ge=1, description="Ranks that share one copy's states; unset = what is left."
    )
    context_parallel_size: int = Field(1, ge=1, description="Ranks that share one sequence.")
    tensor_parallel_size: int = Field(1, ge=1, description="Ranks that share each big matrix.")
    context_parallel_method: Literal["auto", "ulysses", "allgather"] = Field(
        "auto", description="How ranks of a sequence exchange: auto = Ulysses where heads divide."
    )
    tensor_sequence_parallel: bool | Literal["auto"] = Field(
        False,
        description="Ranks that share matrices share the tokens too, where norms and residual sums "
        "work (Megatron's sequence parallelism); auto = wherever that changes no number.",
    )
    async_tensor_parallel: bool = Field(
        False,
        description="Multiply while tokens travel between ranks that share matrices; needs "
        "tensor_sequence_parallel.",
    )
    device: Literal["auto", "cuda", "cpu"] = Field("auto", description="auto = CUDA when present.")
    ddp_timeout: int = Field(
        1800, ge=10, description="Seconds after which a hanging collective stops the run."
    )


class LrGroup(RecipePart):
    """Parameters with a learning rate of their own."""

    name: str = Field(description="Name shown in reports.")
    modules: tuple[str, ...] = Field(description="Regular expressions of parameter names.")
    lr: float = Field(gt=0, description="Their learning rate.")


class OptimizerKeys(RecipePart):
    """Batch sizes, optimizer and schedule."""

    micro_batch_size: int = Field(1, ge=1, description="Rows in one forward pass of one rank.")
    gradient_accumulation_steps: int | None = Field(
        None, ge=1, description="Forward passes a step; default 1."
    )
    global_batch_size: int | None = Field(
        None, ge=1, description="Rows a step over all ranks: the same on every mesh."
    )
    num_epochs: float = Field(1.0, gt=0, description="Passes over the rows.")
    max_steps: int | None = Field(None, ge=1, description="Stop after so many steps.")
    learning_rate: float = Field(description="Peak learning rate.", gt=0)
    optimizer: str = Field("adamw_torch_fused", description="adamw_torch_fused, adamw_torch, ...")
    optim_args: dict[str, Any] = Field(default_factory=dict, description="Further arguments.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled decay of matrices.")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="Decay of the first moment.")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="Decay of the second moment.")
    adam_epsilon: float = Field(1e-8, gt=0, description="Term that keeps the division finite.")
    max_grad_norm: float | None = Field(1.0, gt=0, description="Gradients are scaled down to it.")
    embedding_lr: float | None = Field(None, gt=0, description="Learning rate of embeddings.")
    lr_groups: tuple[LrGroup, ...] = Field((), description="Learning rates by parameter name.")
    lr_scheduler: str = Field(
        "cosine", description="constant, constant_with_warmup, linear, cosine or wsd."
    )
    cosine_min_lr_ratio: float = Field(
        0.0, ge=0, le=1, description="Where cosine ends, as a ratio."
    )
    wsd_decay_ratio: float = Field(0.1, gt=0, le=1, description="Share of steps wsd decays over.")
    warmup_steps: int | None = Field(None, ge=0, description="Steps of linear warm-up.")
    warmup_ratio: float | None = Field(None, ge=0, le=1, description="The same as a share.")
    seed: int = Field(42, ge=0, le=MAX_SEED, description="Seed of weights, order and dropout.")
    skip_nonfinite: int = Field(0, ge=0, description="Non-finite steps to skip before stopping.")


class MemoryKeys(RecipePart):
    """How activations and kernels trade memory for time."""

    gradient_checkpointing: bool | Literal["auto", "attention", "full", "budget"] = Field(
        False,
        description="Recompute activations: true/full = whole blocks, attention = all but "
        "attention, budget = compiler's choice, auto = the plan decides.",
    )
    activation_memory_budget: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Share of activations that compiled blocks keep; above 0.7 only cheap "
        "element-wise work is done twice.",
    )
    activation_offloading: bool = Field(
        False,
        description="Keep the inputs of recomputed blocks in host memory; needs "
        "gradient_checkpointing: true.",
    )
    tiled_mlp: bool = Field(
        False,
        description="The MLP of a block works on one slice of the tokens after another, and again "
        "on each in the backward pass: for long rows.",
    )
    tiled_mlp_num_shards: int | None = Field(
        None, ge=1, description="Slices; default one for every hidden_size tokens of a rank."
    )
    torch_compile: bool | Literal["auto"] = Field(
        "auto", description="Compile each block; auto = on CUDA."
    )
    flash_attention_impl: Literal["FA3", "FA4"] | None = Field(
        None,
        description="On CUDA, flash-attn 3 or 4, where installed, in place of torch's own kernel "
        "for packed rows and windows.",
    )
    loss_chunk_tokens: int = Field(4096, ge=1, description="Tokens whose logits exist at one time.")
    reshard_after_forward: bool | Literal["auto"] = Field(
        "auto",
        description="Free gathered weights between forward and backward; auto = where weights are "
        "sharded.",
    )
    sync_each_batch: bool | Literal["auto"] = Field(
        "auto",
        description="With gradient accumulation, sum gradients over ranks at each micro-batch; "
        "false = once a step, which needs room for whole gradients; auto = once where they are "
        "small, as an adapter's.",
    )
    shard_frozen: bool | Literal["auto"] = Field(
        "auto",
        description="Shard the frozen base of an adapter; auto = only when one device cannot "
        "hold it, because whole frozen weights need no gathering.",
    )
    optimizer_state_dtype: Literal["fp32", "bf16", "8bit"] = Field(
        "fp32",
        description="Precision of AdamW's two states: 8, 4 or about 2 bytes a parameter in all.",
    )
    optimizer_in_backward: bool = Field(
        False, description="Step each parameter as its gradient is ready, and free the gradient."
    )
    fp8: bool | Literal["tensorwise", "rowwise"] = Field(
        False,
        description="8-bit float matmuls in the blocks, from hidden size 4096 on: true/tensorwise "
        "= one scale a tensor, rowwise = one a row, slower and closer to bf16.",
    )


class SaveKeys(RecipePart):
    """Where a run lives, when it saves and how it continues."""

    output_dir: str | None = Field(None, description="Run directory; default runs/<recipe name>.")
    save_steps: float | None = Field(
        None, gt=0, description="Steps between checkpoints; below 1 a share of all steps."
    )
    saves_per_epoch: int | None = Field(None, ge=1, description="Checkpoints an epoch.")
    save_strategy: Annotated[Literal["no", "steps", "epoch", "best"] | None, StrategyWord] = Field(
        None, description="no, steps, epoch or best; default: from save_steps, else at the end."
    )
    save_total_limit: int | None = Field(None, ge=1, description="Checkpoints kept.")
    save_async: bool = Field(True, description="Write checkpoints beside the training.")
    load_best_model_at_end: bool = Field(
        False, description="Export the best checkpoint by evaluation loss."
    )
    auto_resume_from_checkpoints: bool = Field(True, description="A rerun continues.")
    resume_from_checkpoint: str | None = Field(None, description="Checkpoint to continue from.")
    export: bool = Field(True, description="Write export/ at the end.")
    hub_model_id: str | None = Field(None, description="Hub repo that the export is pushed to.")


class EvalKeys(RecipePart):
    """When the model is evaluated and what that decides."""

    eval_steps: float | None = Field(
        None, gt=0, description="Steps between evaluations; below 1 a share of all steps."
    )
    evals_per_epoch: int | None = Field(None, ge=1, description="Evaluations an epoch.")
    eval_strategy: Annotated[Literal["no", "steps", "epoch"] | None, StrategyWord] = Field(
        None, description="no, steps or epoch; default: at the start and the end if there are rows."
    )
    eval_batch_size: int | None = Field(None, ge=1, description="Default: micro_batch_size.")
    early_stopping_patience: int | None = Field(
        None, ge=1, description="Evaluations without a better loss before stopping."
    )
    sample_prompts: tuple[str, ...] = Field((), description="Prompts answered at each evaluation.")


class ReportKeys(RecipePart):
    """What is written and printed."""

    logging_steps: int = Field(1, ge=1, description="Steps between progress lines and metrics.")
    report_to: tuple[str, ...] | str = Field((), description="tensorboard, wandb, mlflow, trackio.")
    wandb_project: str | None = Field(None, description="Project of the tracker run.")
    profile: dict[str, Any] | None = Field(
        None,
        description="{steps: [first, last]}: where these steps go, in words (profile.txt), "
        "and a trace.",
    )
