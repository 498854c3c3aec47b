"""Names that a recipe may use for things which live in heavier layers.

A misspelt optimizer is found before torch is imported. A test holds each tuple to the registry it
stands for.
"""

OPTIMIZERS = (
    "adamw_torch_fused",
    "adamw_torch",
    "adam",
    "adamax",
    "nadam",
    "radam",
    "sgd",
    "adagrad",
    "rmsprop",
)

LOW_BIT_OPTIMIZERS = ("adamw_torch_fused", "adamw_torch")
"""Optimizers that can keep their states in fewer bits, and round bf16 weights by chance."""

OPTIMIZER_ARGS = {
    "adamw_torch_fused": ("amsgrad",),
    "adamw_torch": ("amsgrad",),
    "adam": ("amsgrad", "decoupled_weight_decay"),
    "adamax": (),
    "nadam": ("momentum_decay", "decoupled_weight_decay"),
    "radam": ("decoupled_weight_decay",),
    "sgd": ("momentum", "dampening", "nesterov"),
    "adagrad": ("lr_decay", "initial_accumulator_value", "eps"),
    "rmsprop": ("alpha", "eps", "momentum", "centered"),
}
"""What `optim_args` may hold: what changes the result and is no key of its own."""

SCHEDULES = ("constant", "constant_with_warmup", "linear", "cosine", "wsd")

DATASET_TYPES = ("alpaca", "chat_template", "sharegpt", "completion", "input_output")

FILE_KINDS = ("json", "csv", "parquet", "arrow", "text")
"""A dataset's `path` may name one of these, and its `data_files` the files."""

CHAT_TEMPLATES = ("chatml", "llama3", "qwen", "gemma", "mistral")

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
