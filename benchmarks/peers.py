"""The engines that users would otherwise pick, each as its own documentation sets it up.

Called by `speed.py` and `all_rows.py` in processes of its own with one JSON argument. The first
rank prints a RESULT line after each step that counts, so that a run cut off has one too.
"""

import contextlib
import importlib.util
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import CONFIG_MAPPING, AutoModelForCausalLM


def build(request: dict[str, Any], dtype: torch.dtype) -> Any:
    """A model with random weights on the device, adapted when asked."""
    sizes = dict(request["model"])
    config = CONFIG_MAPPING[sizes.pop("model_type")](**sizes)
    config.use_cache = False
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if request["lora"]:
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(
            r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        model.enable_input_require_grads()
        model = get_peft_model(model, adapters)
    if request["peer"].endswith("-ckpt"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def tell(request: dict[str, Any], times: list[float], tokens: float | None = None) -> None:
    """Print what the steps so far come to.

    Args:
        times: seconds of each step, NaN where a step's beginning was not seen.
        tokens: of a rank's step; None: whole rows.
    """
    counted = times[request["warm_up"] :]
    if not counted or os.environ.get("RANK", "0") != "0":
        return
    result = {
        "seconds": statistics.median(counted),
        "tokens": tokens or request["batch"] * request["sequence_len"],
        **({} if math.isnan(times[0]) else {"first_step": times[0]}),
        "memory_gib": (
            torch.cuda.max_memory_reserved() / 2**30 if torch.cuda.is_available() else 0.0
        ),
        "counted_steps": len(counted),
    }
    print("RESULT " + json.dumps(result), flush=True)


def engine_for(request: dict[str, Any]) -> Accelerator:
    """Accelerate in bf16: one process, FSDP2, or context parallelism through FSDP2."""
    options: dict[str, Any] = {}
    if "fsdp" in request["peer"] or "-cp" in request["peer"]:
        from accelerate import FullyShardedDataParallelPlugin

        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", reshard_after_forward=True
        )
    if "-cp" in request["peer"]:
        from accelerate.utils import ParallelismConfig

        options["parallelism_config"] = ParallelismConfig(cp_size=request["ranks"])
    on_cuda = torch.cuda.is_available()
    return Accelerator(mixed_precision="bf16" if on_cuda else "no", cpu=not on_cuda, **options)


def accelerate(request: dict[str, Any]) -> None:
    """Accelerate's own loop: bf16 autocast, AdamW."""
    engine = engine_for(request)
    on_cuda = torch.cuda.is_available()
    model = build(request, torch.bfloat16 if request["lora"] and on_cuda else torch.float32)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=on_cuda)
    model, optimizer = engine.prepare(model, optimizer)
    model.train()
    times: list[float] = []
    vocab_size = request["model"]["vocab_size"]
    shape = (request["batch"], request["sequence_len"])
    for _ in range(request["steps"]):
        ids = torch.randint(0, vocab_size, shape, device=engine.device)
        batch = {"input_ids": ids, "labels": ids}
        context: Any = contextlib.nullcontext()
        if "-cp" in request["peer"]:
            # every rank passes the whole row; the context cuts it, so labels are shifted before
            batch = {
                "input_ids": ids,
                "labels": ids.clone(),
                "shift_labels": ids.roll(-1, 1),
                "position_ids": torch.arange(shape[1], device=engine.device).repeat(shape[0], 1),
            }
            parts = list(batch.values())
            context = engine.maybe_context_parallel(
                buffers=parts, buffer_seq_dims=[1] * len(parts), no_restore_buffers=set(parts)
            )
        if on_cuda:
            torch.cuda.synchronize()
        started = time.perf_counter()
        with context:
            loss = model(**batch).loss
            engine.backward(loss)
            engine.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if on_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
        tell(request, times)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def torchtitan(request: dict[str, Any]) -> None:
    """torchtitan's trainer, where it can be imported."""
    if importlib.util.find_spec("torchtitan") is None:
        if os.environ.get("RANK", "0") == "0":
            print('RESULT {"not_importable": "torchtitan is not installed"}', flush=True)
        return
    from peers_titan import train

    with tempfile.TemporaryDirectory() as folder:
        train(request, folder, lambda times: tell(request, times))


def trainer(request: dict[str, Any]) -> None:
    """transformers' Trainer with its defaults in bf16."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    marks: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            marks.append(time.perf_counter())

    model = build(request, torch.float32)
    rows = [
        {"input_ids": ids, "labels": ids}
        for ids in torch.randint(
            0,
            request["model"]["vocab_size"],
            (request["batch"] * request["steps"], request["sequence_len"]),
        )
    ]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=request["batch"],
            max_steps=request["steps"],
            bf16=torch.cuda.is_available(),
            save_strategy="no",
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
        )
        Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[Clock()]).train()
    # a step ends where the next one begins: the first one's length is not known
    times = [after - before for before, after in itertools.pairwise(marks)]
    tell(request, [math.nan, *times])


def trl(request: dict[str, Any]) -> None:
    """TRL's SFTTrainer: its defaults, or packing with Liger; useful tokens are counted."""
    if importlib.util.find_spec("trl") is None:
        print('RESULT {"not_importable": "trl is not installed"}', flush=True)
        return
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    marks: list[float] = []
    useful: list[int] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            marks.append(time.perf_counter())

    tokenizer = AutoTokenizer.from_pretrained(request["tokenizer"])
    lines = Path(request["rows"]).read_text(encoding="utf-8").splitlines()
    rows = Dataset.from_list([json.loads(line) for line in lines])
    packs = "packing" in request["peer"]
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            output_dir=folder,
            per_device_train_batch_size=request["batch"],
            max_steps=request["steps"],
            max_length=request["sequence_len"],
            packing=packs,
            use_liger_kernel="liger" in request["peer"],
            bf16=torch.cuda.is_available(),
            use_cpu=not torch.cuda.is_available(),
            save_strategy="no",
            report_to=[],
            **({"gradient_checkpointing": False} if packs else {}),
        )
        engine = SFTTrainer(
            model=build(request, torch.float32),
            args=arguments,
            train_dataset=rows,
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
        step = engine.training_step

        def counted(model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
            mask = inputs.get("attention_mask")
            count = inputs["input_ids"].numel() if mask is None else int(mask.sum())
            useful.append(count)
            return step(model, inputs, *rest, **more)

        engine.training_step = counted
        engine.train()
    times = [after - before for before, after in itertools.pairwise(marks)]
    start = request["warm_up"] - 1
    speeds = [n / t for n, t in zip(useful[1:], times, strict=False)][start:]
    seconds = statistics.median(times[start:])
    tell(request, [math.nan, *times], statistics.median(speeds) * seconds)


def main() -> None:
    """Run the engine that the argument names."""
    request = json.loads(sys.argv[1])
    engines = {
        "trainer": trainer,
        "trl": trl,
        "accelerate": accelerate,
        "torchtitan": torchtitan,
    }
    engines[request["peer"].partition("-")[0]](request)


if __name__ == "__main__":
    main()
