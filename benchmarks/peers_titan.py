"""torchtitan's own trainer on a shape of ours: FSDP2 or context parallelism, compiled.

Driven through its configuration objects. It trains on random tokens, because its wheel comes
without data or a tokenizer; nothing else of it is replaced. Called by `peers.py`.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.config import JobConfig
from torchtitan.models.llama3 import TransformerModelArgs, get_train_spec
from torchtitan.protocols.train_spec import register_train_spec
from torchtitan.train import Trainer

NAME = "llama3_random_tokens"


class RandomTokens(BaseDataLoader):
    """Rows of random tokens, the same shape at every step."""

    def __init__(self, vocab_size: int, rows: int, length: int) -> None:
        self._vocab_size, self._shape = vocab_size, (rows, length)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            ids = torch.randint(0, self._vocab_size, self._shape)
            yield {"input": ids}, ids.roll(-1, 1)

    def state_dict(self) -> dict[str, Any]:
        """Nothing to keep."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to take back."""


class TimedTrainer(Trainer):
    """Its trainer, with a clock around each step."""

    def __init__(self, config: JobConfig, times: list[float], tell: Any) -> None:
        super().__init__(config)
        self._times, self._tell = times, tell

    def train_step(self, data_iterator: Any) -> None:
        """One step, from a device that is idle to a device that is idle again."""
        torch.cuda.synchronize()
        started = time.perf_counter()
        super().train_step(data_iterator)
        torch.cuda.synchronize()
        self._times.append(time.perf_counter() - started)
        self._tell(self._times)


def model_args(sizes: dict[str, Any]) -> TransformerModelArgs:
    """The shape as torchtitan words it."""
    inner = sizes["intermediate_size"]
    return TransformerModelArgs(
        dim=sizes["hidden_size"],
        n_layers=sizes["num_hidden_layers"],
        n_heads=sizes["num_attention_heads"],
        n_kv_heads=sizes["num_key_value_heads"],
        vocab_size=sizes["vocab_size"],
        # its rule rounds 8/3 of the width up to a multiple: one multiple is the size wanted
        multiple_of=inner,
        ffn_dim_multiplier=inner / int(8 * sizes["hidden_size"] / 3),
        rope_theta=500000,
        max_seq_len=sizes["max_position_embeddings"],
    )


def job_config(request: dict[str, Any], folder: str) -> JobConfig:
    """Its defaults for this kind of work: fp32 weights, bf16 compute, compile."""
    config = JobConfig()
    config.job.dump_folder = folder
    config.model.name, config.model.flavor = NAME, "shape"
    config.training.steps = request["steps"]
    config.training.seq_len = request["sequence_len"]
    config.training.local_batch_size = request["batch"]
    config.optimizer.lr = 1e-5
    config.compile.enable = True
    config.metrics.log_freq = 10_000
    if "-cp" in request["peer"]:
        config.parallelism.context_parallel_degree = request["ranks"]
    if request["peer"].endswith("-ckpt"):
        config.activation_checkpoint.mode = "full"
    else:
        config.activation_checkpoint.mode = "selective"
        config.activation_checkpoint.selective_ac_option = "op"
    return config


def train(request: dict[str, Any], folder: str, tell: Any) -> None:
    """Train; `tell` hears the seconds of all steps so far after each of them."""

    def build_rows(**given: Any) -> RandomTokens:
        size = request["model"]["vocab_size"]
        return RandomTokens(size, request["batch"], request["sequence_len"])

    spec = replace(
        get_train_spec(),
        model_args={"shape": model_args(request["model"])},
        build_tokenizer_fn=None,
        build_dataloader_fn=build_rows,
        build_validator_fn=None,
    )
    register_train_spec(NAME, spec)
    trainer = TimedTrainer(job_config(request, folder), [], tell)
    trainer.train()
    trainer.close()
    torch.distributed.destroy_process_group()
