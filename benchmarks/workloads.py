"""The work that ndtrain and its peers are measured on: random weights of well-known shapes."""

from dataclasses import dataclass, field, replace
from typing import Any

LLAMA_3_8B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
}
LLAMA_3_1B: dict[str, Any] = {
    **LLAMA_3_8B,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
QWEN3_600M: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
LLAMA_3_8B_LONG: dict[str, Any] = {**LLAMA_3_8B, "max_position_embeddings": 2**20}
TINY: dict[str, Any] = {
    **LLAMA_3_8B,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TINY_WIDE: dict[str, Any] = {**TINY, "hidden_size": 4096, "head_dim": 16}
"""As wide as fp8 asks for, and narrow everywhere else."""
ASYNC_TP: dict[str, Any] = {"tensor_sequence_parallel": True, "async_tensor_parallel": True}
BF16_STATES: dict[str, Any] = {"param_dtype": "bf16", "optimizer_state_dtype": "bf16"}


@dataclass(frozen=True)
class Work:
    """One piece of work.

    Attributes:
        model: sizes, as in a recipe's `model_config`.
        lora: adapters of rank 16 on every linear instead of full fine-tuning.
        keys: further recipe keys of our own run.
        peers: names of the peers in `peers.py`, with their batch size.
        rows: train on the chat rows named on the command line instead of random full rows.
        steps: of a run; None: as many as the command line says.
        warm_up: steps before the first that counts.
        profiles: the last two steps are traced and do not count.
    """

    model: dict[str, Any]
    sequence_len: int
    batch: int
    lora: bool = False
    ranks: int = 1
    keys: dict[str, Any] = field(default_factory=dict)
    peers: tuple[tuple[str, int], ...] = ()
    rows: bool = False
    steps: int | None = None
    warm_up: int = 4
    profiles: bool = False

    def steps_of(self, default: int) -> int:
        """How many steps a run takes."""
        return default if self.steps is None else self.steps

    def tiny(self) -> "Work":
        """The same keys and mesh on a model that any machine trains in seconds."""
        model = TINY_WIDE if "fp8" in self.keys else TINY
        steps = None if self.steps is None else min(self.steps, 5)
        keys = {**self.keys, "save_steps": 2} if "save_steps" in self.keys else self.keys
        return replace(
            self,
            model=model,
            sequence_len=256,
            steps=steps,
            warm_up=min(self.warm_up, 2),
            keys=keys,
        )


def _cp(size: int) -> dict[str, Any]:
    return {"dp_shard_size": 1, "context_parallel_size": size}


def _mesh(replicate: int, shard: int, tp: int) -> dict[str, Any]:
    return {
        "dp_replicate_size": replicate,
        "dp_shard_size": shard,
        "tensor_parallel_size": tp,
    }


WORKS: dict[str, Work] = {
    "8b-lora": Work(
        LLAMA_3_8B,
        8192,
        1,
        lora=True,
        peers=(("accelerate", 1), ("accelerate-ckpt", 1)),
        profiles=True,
    ),
    "1b-full": Work(LLAMA_3_1B, 8192, 4, peers=(("accelerate", 1), ("accelerate-ckpt", 1))),
    "qwen3-0.6b-full": Work(QWEN3_600M, 4096, 8, peers=(("trainer", 8),)),
    # there is room for the copies of the weights that are computed with
    "8b-full-bf16-states": Work(
        LLAMA_3_8B, 4096, 2, keys={**BF16_STATES, "reshard_after_forward": False}
    ),
    "8b-full-8bit-states": Work(
        LLAMA_3_8B, 4096, 2, keys={**BF16_STATES, "optimizer_state_dtype": "8bit"}
    ),
    "8b-full-in-backward": Work(
        LLAMA_3_8B,
        4096,
        2,
        keys={**BF16_STATES, "optimizer_in_backward": True, "max_grad_norm": None},
    ),
    "8b-full-fp8": Work(LLAMA_3_8B, 4096, 2, keys={**BF16_STATES, "fp8": "tensorwise"}),
    "8b-full-fp8-rowwise": Work(LLAMA_3_8B, 4096, 2, keys={**BF16_STATES, "fp8": "rowwise"}),
    "8b-full-offload": Work(
        LLAMA_3_8B,
        4096,
        4,
        keys={**BF16_STATES, "gradient_checkpointing": True, "activation_offloading": True},
    ),
    "8b-full-4": Work(
        LLAMA_3_8B,
        8192,
        1,
        ranks=4,
        peers=(("accelerate-fsdp", 1), ("accelerate-fsdp-ckpt", 1), ("torchtitan", 1)),
        profiles=True,
    ),
    "8b-full-4-packed": Work(
        LLAMA_3_8B, 8192, 1, ranks=4, keys={"sample_packing": True}, rows=True
    ),
    "8b-full-4-bf16-reduce": Work(LLAMA_3_8B, 8192, 1, ranks=4, keys={"reduce_dtype": "bf16"}),
    "8b-full-2": Work(
        LLAMA_3_8B,
        8192,
        2,
        ranks=2,
        peers=(("accelerate-fsdp-ckpt", 1), ("torchtitan", 1)),
        profiles=True,
    ),
    "8b-cp2-32k": Work(
        LLAMA_3_8B,
        32768,
        1,
        ranks=2,
        keys=_cp(2),
        peers=(("accelerate-cp-ckpt", 1),),
        steps=8,
        warm_up=3,
    ),
    "8b-lora-4": Work(LLAMA_3_8B, 8192, 1, lora=True, ranks=4),
    "8b-cp4-32k": Work(LLAMA_3_8B, 32768, 1, ranks=4, keys=_cp(4), steps=8, warm_up=3),
    "8b-cp4-64k": Work(LLAMA_3_8B, 65536, 1, ranks=4, keys=_cp(4), steps=7, warm_up=3),
    "8b-cp4-128k": Work(
        LLAMA_3_8B,
        131072,
        1,
        ranks=4,
        keys={**_cp(4), "gradient_checkpointing": "attention"},
        peers=(("accelerate-cp-ckpt", 1),),
        steps=5,
        warm_up=2,
    ),
    # the second step is the first that holds optimizer states and activations together
    "8b-cp4-512k": Work(
        LLAMA_3_8B_LONG,
        524288,
        1,
        ranks=4,
        keys={**_cp(4), "gradient_checkpointing": True},
        steps=2,
        warm_up=1,
    ),
    "8b-cp4-512k-tiled": Work(
        LLAMA_3_8B_LONG,
        524288,
        1,
        ranks=4,
        keys={**_cp(4), "gradient_checkpointing": True, "tiled_mlp": True},
        steps=2,
        warm_up=1,
    ),
    # a row is shared by the ranks of a group: one would be too little work for each
    "8b-tp2-shard2": Work(LLAMA_3_8B, 8192, 4, ranks=4, keys=_mesh(1, 2, 2)),
    "8b-tp4": Work(LLAMA_3_8B, 8192, 4, ranks=4, keys=_mesh(1, 1, 4)),
    "8b-tp2-shard2-async": Work(LLAMA_3_8B, 8192, 4, ranks=4, keys={**_mesh(1, 2, 2), **ASYNC_TP}),
    "8b-tp4-async": Work(LLAMA_3_8B, 8192, 4, ranks=4, keys={**_mesh(1, 1, 4), **ASYNC_TP}),
    "8b-replicate2-shard2": Work(LLAMA_3_8B, 8192, 1, ranks=4, keys=_mesh(2, 2, 1)),
    # 96 GB a save: short rows, so that many steps go by while one is written
    "8b-checkpoint-4": Work(
        LLAMA_3_8B,
        2048,
        1,
        ranks=4,
        keys={"save_strategy": "steps", "save_steps": 200, "save_total_limit": 1},
        steps=401,
    ),
    "alpaca-packed": Work(
        {**LLAMA_3_1B, "vocab_size": 49152},
        4096,
        4,
        keys={"sample_packing": True},
        peers=(("trl", 16), ("trl-packing-liger", 4)),
        rows=True,
    ),
    "1b-full-4k": Work({**LLAMA_3_1B, "vocab_size": 49152}, 4096, 4),
    "tiny-rows": Work(
        {**TINY, "vocab_size": 49152},
        512,
        2,
        keys={"sample_packing": True},
        peers=(("trl", 4),),
        rows=True,
    ),
    "tiny": Work(TINY, 256, 2, peers=(("accelerate", 2), ("accelerate-ckpt", 2))),
    "tiny-lora": Work(TINY, 256, 2, lora=True, peers=(("accelerate", 2),)),
}
