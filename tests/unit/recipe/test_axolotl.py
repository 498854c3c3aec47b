import re
from pathlib import Path

import pytest

from ndtrain import cli
from ndtrain.recipe.axolotl import FSDP_KEYS, foreign_dataset_keys, foreign_keys
from ndtrain.recipe.axolotl_keys import (
    CHOSEN,
    DATASET_CHOSEN,
    DATASET_RENAMED,
    DATASET_UNSUPPORTED,
    ELSEWHERE,
    RENAMED,
    UNSUPPORTED,
)
from ndtrain.recipe.schema import DatasetSpec, Recipe

HSDP_TP = """\
base_model: meta-llama/Llama-3.1-8B
plugins:
  - axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin
dp_shard_size: 4
dp_replicate_size: 2
tensor_parallel_size: 2
fsdp_version: 2
fsdp_config:
  offload_params: false
  state_dict_type: FULL_STATE_DICT
  auto_wrap_policy: TRANSFORMER_BASED_WRAP
  transformer_layer_cls_to_wrap: LlamaDecoderLayer
  reshard_after_forward: true
datasets:
  - path: tatsu-lab/alpaca
    type: alpaca
dataset_prepared_path: last_run_prepared
output_dir: ./outputs/ndp-out/
sequence_len: 2048
sample_packing: true
attn_implementation: flash_attention_2
gradient_accumulation_steps: 1
micro_batch_size: 1
num_epochs: 2
optimizer: adamw_torch_fused
lr_scheduler: constant_with_warmup
learning_rate: 2e-6
warmup_ratio: 0.1
bf16: true
tf32: true
logging_steps: 1
saves_per_epoch: 1
special_tokens:
  pad_token: <|end_of_text|>
"""

FSDP_TP_CP = (
    HSDP_TP.replace("meta-llama/Llama-3.1-8B", "Qwen/Qwen3-8B")
    .replace("dp_shard_size: 4", "dp_shard_size: 2")
    .replace("dp_replicate_size: 2", "context_parallel_size: 2")
    .replace("sequence_len: 2048", "sequence_len: 8192")
    .replace("LlamaDecoderLayer", "Qwen3DecoderLayer")
    .replace("  pad_token: <|end_of_text|>\n", "")
)


@pytest.mark.parametrize(
    ("text", "sizes"), [(HSDP_TP, (2, 4, 1, 2)), (FSDP_TP_CP, (1, 2, 2, 2))], ids=["hsdp", "cp"]
)
def test_axolotls_distributed_examples_load_as_they_are(load, text: str, sizes) -> None:
    loaded = load(text)
    recipe = loaded.recipe
    assert (
        recipe.dp_replicate_size,
        recipe.dp_shard_size,
        recipe.context_parallel_size,
        recipe.tensor_parallel_size,
    ) == sizes
    assert recipe.learning_rate == 2e-6
    assert recipe.reshard_after_forward is True
    told = [notice.split(": ")[1] for notice in loaded.notices]
    assert told == ["plugins", "fsdp_version", "fsdp_config", "attn_implementation", "tf32"]


@pytest.mark.parametrize(
    ("text", "world_size", "mesh", "batch"),
    [
        (
            HSDP_TP,
            "16",
            "dp_replicate 2 × dp_shard 4 × cp 1 × tp 2 = 16 ranks",
            "micro 1 × accumulation 1 × 8 data ranks = 8 packed rows = 16,384 tokens a step",
        ),
        (
            FSDP_TP_CP,
            "8",
            "dp_replicate 1 × dp_shard 2 × cp 2 × tp 2 = 8 ranks",
            "micro 1 × accumulation 1 × 2 data ranks = 2 packed rows = 16,384 tokens a step",
        ),
    ],
    ids=["hsdp", "cp"],
)
def test_axolotls_distributed_examples_say_mesh_batch_and_memory(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str,
    world_size: str,
    mesh: str,
    batch: str,
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    assert cli.run(["validate", str(path), "--world-size", world_size, "--gpu", "h100-80"]) == 0
    said = capsys.readouterr().out
    assert f"mesh: {mesh}\n" in said
    assert f"global batch = {batch}\n" in said
    memory = re.search(r"memory: ([\d.]+) of ([\d.]+) usable GiB on h100-80", said)
    assert memory is not None
    assert 0 < float(memory[1]) < float(memory[2])


def test_the_tables_are_disjoint_and_hold_no_key_of_ours() -> None:
    ours = set(Recipe.fields_by_key())
    tables = [set(CHOSEN), set(RENAMED), set(UNSUPPORTED), set(ELSEWHERE)]
    assert not any(table & ours for table in tables)
    assert sum(map(len, tables)) == len(set().union(*tables))
    assert set(RENAMED.values()) | {name for _, name in ELSEWHERE.values()} <= ours
    inside = [set(DATASET_CHOSEN), set(DATASET_RENAMED), set(DATASET_UNSUPPORTED)]
    assert not any(table & set(DatasetSpec.fields_by_key()) for table in inside)
    assert sum(map(len, inside)) == len(set().union(*inside))
    assert set(DATASET_RENAMED.values()) <= set(DatasetSpec.fields_by_key())


@pytest.mark.parametrize("key", CHOSEN)
def test_keys_that_only_pick_an_implementation_give_one_notice(load, minimal, key: str) -> None:
    (notice,) = load(f"{minimal}{key}: x\n").notices
    assert notice.endswith(f"recipe.yaml:6:1: {key}: not needed here: {CHOSEN[key]}.")


@pytest.mark.parametrize("key", UNSUPPORTED)
def test_keys_that_would_change_the_result_stop(complaints, minimal, key: str) -> None:
    (line,) = complaints(f"{minimal}{key}: 3\n")
    assert line == (
        f"recipe.yaml:6:1: {key}: known from Axolotl, but not supported, and leaving it out "
        f"would change the result. Remove it; {UNSUPPORTED[key]}."
    )


@pytest.mark.parametrize("value", ["", "null", "false", "0", "''", "[]", "{}"])
@pytest.mark.parametrize("key", ["deepspeed", "fp16", "rl", "relora", "neftune_noise_alpha"])
def test_a_key_that_is_off_asks_for_nothing(load, minimal, key: str, value: str) -> None:
    assert load(f"{minimal}{key}: {value}\n").notices == ()


@pytest.mark.parametrize("key", RENAMED)
def test_renamed_keys_are_read_with_a_notice(load, minimal, key: str) -> None:
    new = RENAMED[key]
    loaded = load(f"{minimal}{key}: 7\n")
    assert getattr(loaded.recipe, new) in (7, "7")
    assert loaded.origins[new].endswith("recipe.yaml:6:1")
    (notice,) = loaded.notices
    assert notice.endswith(f"recipe.yaml:6:1: {key}: is '{new}' here; read as that.")


def test_a_renamed_key_that_contradicts_ours_stops(complaints, minimal) -> None:
    text = minimal + "sequence_parallel_degree: 2\ncontext_parallel_size: 4\n"
    assert complaints(text) == [
        "recipe.yaml:6:1: sequence_parallel_degree: is 'context_parallel_size' here, which is "
        "given too. Keep one of them."
    ]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("batch_size: 8\nmicro_batch_size: 2\n", {"gradient_accumulation_steps": 4}),
        ("float32: true\n", {"bf16": False}),
        (
            "bfloat16: true\n",
            {"bf16": True, "param_dtype": "bf16", "optimizer_state_dtype": "bf16"},
        ),
        (
            "gradient_checkpointing: offload\n",
            {"gradient_checkpointing": True, "activation_offloading": True},
        ),
        ("optimizer: paged_adamw_32bit\n", {"optimizer": "adamw_torch_fused"}),
        (
            "optimizer: adamw_bnb_8bit\n",
            {"optimizer": "adamw_torch_fused", "optimizer_state_dtype": "8bit"},
        ),
        ("lr_scheduler: warmup_stable_decay\n", {"lr_scheduler": "wsd"}),
        ("use_tensorboard: true\n", {"report_to": ("tensorboard",)}),
        (
            "use_wandb: true\nuse_mlflow: true\nreport_to: [wandb]\n",
            {"report_to": ("wandb", "mlflow")},
        ),
        ("fsdp_config: {activation_checkpointing: true}\n", {"gradient_checkpointing": True}),
        (
            "fsdp_config: {fsdp_reshard_after_forward: false}\n",
            {"reshard_after_forward": False},
        ),
        ("metric_for_best_model: eval_loss\ngreater_is_better: false\n", {}),
        ("expert_parallel_size: 1\n", {}),
        ("base_model_config:\n", {}),
        ("plugins: [axolotl.integrations.liger.LigerPlugin]\n", {}),
    ],
)
def test_values_that_mean_the_same_are_converted(load, minimal, lines: str, expected) -> None:
    recipe = load(minimal + lines, check=False).recipe
    assert {key: getattr(recipe, key) for key in expected} == expected


def test_a_converted_value_remembers_its_line(load, minimal) -> None:
    loaded = load(minimal + "float32: true\noptimizer: adamw_8bit\n", check=False)
    assert loaded.position("bf16").endswith("recipe.yaml:6:1")
    assert loaded.origins["optimizer_state_dtype"].endswith("recipe.yaml:7:1")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("batch_size: 3\nmicro_batch_size: 2\n", "'3' is not a multiple of micro_batch_size '2'"),
        ("batch_size: 4\ngradient_accumulation_steps: 2\n", "Keep one of them."),
        ("plugins: [axolotl.integrations.kd.KDPlugin]\n", "no plugin 'axolotl.integrations.kd.KD"),
        ("metric_for_best_model: accuracy\n", "the evaluation loss decides"),
        ("greater_is_better: true\n", "less is better"),
        ("expert_parallel_size: 2\n", "use dp_shard_size"),
        ("base_model_config: other\n", "the base model's own configuration is used"),
        ("fsdp_config: {offload_parms: true}\n", "did you mean 'offload_params'?"),
        ("gradient_checkpointing: offload_disk\n", "expected true, false,"),
    ],
)
def test_values_that_mean_something_else_stop(complaints, minimal, lines: str, words: str) -> None:
    (line,) = complaints(minimal + lines)
    assert line.startswith("recipe.yaml:6:")
    assert words in line


@pytest.mark.parametrize("key", sorted(FSDP_KEYS))
def test_known_keys_of_fsdp_config_are_accepted(load, minimal, key: str) -> None:
    for name in (key, f"fsdp_{key}"):
        assert load(f"{minimal}fsdp_config: {{{name}: false}}\n").notices


@pytest.mark.parametrize("key", DATASET_CHOSEN)
def test_dataset_keys_that_are_not_needed(load, minimal, key: str) -> None:
    (notice,) = load(f"{minimal}    {key}: x\n").notices
    assert f"recipe.yaml:6:5: datasets[0].{key}: not needed here" in notice


@pytest.mark.parametrize("key", DATASET_UNSUPPORTED)
def test_dataset_keys_that_would_change_the_result(complaints, minimal, key: str) -> None:
    (line,) = complaints(f"{minimal}    {key}: x\n")
    assert line.startswith(f"recipe.yaml:6:5: datasets[0].{key}: known from Axolotl")


def test_renamed_dataset_keys(load, minimal) -> None:
    text = minimal + (
        "    train_on_eot: last\n    message_field_role: who\n    message_field_content: what\n"
    )
    loaded = load(text)
    dataset = loaded.recipe.datasets[0]
    assert dataset.train_on_eos == "last"
    assert dataset.message_property_mappings == {"role": "who", "content": "what"}
    assert len(loaded.notices) == 3


@pytest.mark.parametrize(
    "stream", ["rows", "{path: rows}", "[rows]", "[{path: rows, text_column: text}]"]
)
def test_a_stream_may_be_written_short(load, minimal, stream: str) -> None:
    text = minimal.replace("datasets:\n  - path: synthetic\n", "")
    loaded = load(f"{text}max_steps: 3\npretraining_dataset: {stream}\n")
    assert loaded.recipe.pretraining_dataset[0].path == "rows"


COMMON = [
    line
    for line in Path(__file__).with_name("axolotl-keys.txt").read_text().splitlines()
    if not line.startswith("#")
]


@pytest.mark.parametrize("key", COMMON)
def test_every_common_key_of_axolotl_is_known(key: str) -> None:
    if key.startswith("datasets."):
        known = set(DatasetSpec.fields_by_key()) | foreign_dataset_keys()
    else:
        known = set(Recipe.fields_by_key()) | foreign_keys()
    assert key.removeprefix("datasets.") in known


def test_switches_of_stretches_of_a_message_are_not_left_out(complaints, minimal) -> None:
    assert complaints(f"{minimal}    message_field_training_detail: train_detail\n") == [
        "recipe.yaml:6:5: datasets[0].message_field_training_detail: known from Axolotl, but not "
        "supported, and leaving it out would change the result. Remove it; write the content as "
        "a list of parts, {type: text, text: ..., train: true or false}."
    ]
