"""What `validate` says of whole recipes: the mistakes that other tools find too late or never."""

import json

import pytest

from ndtrain.errors import ExitCode, MeshError, NdtrainError, Problems
from ndtrain.plan.machines import Machines
from ndtrain.plan.plan_command import plan
from ndtrain.plan.validate import validate_recipe
from ndtrain.plan.validate_command import validate
from ndtrain.recipe.load import load_recipe
from ndtrain.train.command import train


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a recipe of a small random llama with more keys."""
    monkeypatch.chdir(tmp_path)
    sizes = "model_type: llama, hidden_size: 72, num_attention_heads: 9, num_key_value_heads: 3"

    def written(*lines, model=f"model_config: {{{sizes}, num_hidden_layers: 2}}"):
        path = tmp_path / "recipe.yaml"
        head = [model, "tokenizer_config: bytes"] if model.startswith("model_config") else [model]
        text = [*head, "datasets: [{path: synthetic, type: completion}]", "learning_rate: 1e-4"]
        path.write_text("\n".join([*text, *lines]) + "\n")
        return path

    return written


def check(path, *overrides, **machines):
    return validate_recipe(load_recipe(path, overrides, check=False), Machines(**machines))


def problems(path, **machines):
    return [str(problem) for problem in check(path, **machines).problems]


def test_a_sound_recipe_has_no_problem(write):
    found = check(write("tensor_parallel_size: 3", "dp_replicate_size: 2"), world_size=12)

    assert found.problems == ()
    assert found.plan.parallel.sizes == (2, 2, 1, 3)


def test_each_problem_names_its_place_in_the_file(write):
    path = write("tensor_parallel_size: 2", "global_batch_size: 5")

    assert problems(path, world_size=4) == [
        f"{path}:5:1: tensor_parallel_size is 2, but the model has 9 query heads (9 is not "
        "divisible by 2). Use 1, 3 or 9.",
        f"{path}:6:1: global_batch_size 5 is not a multiple of micro_batch_size 1 × 2 data ranks "
        "= 2. Use a multiple of 2, or a smaller micro_batch_size.",
    ]


def test_a_wrong_product_advises_only_sizes_that_the_heads_allow(write):
    path = write("tensor_parallel_size: 5")

    (product, heads) = problems(path, world_size=6)

    assert product.endswith(
        "= 5 ranks, but 6 were started. Set tensor_parallel_size: 1 or 3, or start 5 ranks."
    )
    assert heads.endswith("(9 is not divisible by 5). Use 1, 3 or 9.")


def test_ulysses_names_the_sizes_that_its_heads_allow(write):
    path = write("context_parallel_size: 2", "context_parallel_method: ulysses")

    assert problems(path, world_size=2) == [
        f"{path}:6:1: context_parallel_method is 'ulysses' and context_parallel_size is 2, but a "
        "rank has 9 query and 3 key/value heads to deal. Use context_parallel_size 1 or 3, or "
        "context_parallel_method: allgather."
    ]


def test_a_layer_class_is_never_asked_for(write):
    """Another tool's block that names the wrong class: sharding finds the layers itself."""
    block = "fsdp_config: {transformer_layer_cls_to_wrap: NoSuchLayer, offload_params: false}"
    found = check(write("fsdp_version: 2", block, "dp_shard_size: 2"), world_size=2)

    assert found.problems == ()
    assert any("fsdp_config: not needed here: sharding is always on" in n for n in found.notices)


def test_an_override_is_named_as_the_place(write):
    found = check(write(), "tensor_parallel_size=2")

    assert found.problems[0].where == "--set tensor_parallel_size"


@pytest.mark.parametrize(
    ("family", "keys", "lines"),
    [
        ("llama with a vocabulary that does not divide", "vocab_size: 32001", "3"),
        ("llama with an intermediate size that does not divide", "intermediate_size: 113", "3"),
        ("tied embeddings", "tie_word_embeddings: true", "3"),
    ],
)
def test_what_other_tools_refuse_or_break_on_is_fine(write, family, keys, lines):
    model = (
        "model_config: {model_type: llama, hidden_size: 72, num_attention_heads: 9, "
        f"num_key_value_heads: 3, num_hidden_layers: 2, {keys}}}"
    )

    assert problems(write(f"tensor_parallel_size: {lines}", model=model)) == [], family


def test_8_bit_matmuls_of_a_narrow_model_are_refused_before_the_launch(write):
    path = write("fp8: true")

    (text,) = problems(path)
    assert text.startswith(f"{path}:5:1: fp8 makes a model of hidden size ")
    assert text.endswith("below 4096 the casts cost more than the products gain. Remove fp8.")


def test_adapters_go_with_every_axis(write):
    path = write(
        "adapter: lora",
        "lora_target_linear: true",
        "tensor_parallel_size: 3",
        "context_parallel_size: 3",
        "dp_replicate_size: 2",
    )

    assert problems(path) == []


def test_packing_and_windows_go_with_context_parallelism(write):
    model = (
        "model_config: {model_type: gemma3_text, hidden_size: 64, num_attention_heads: 4, "
        "num_key_value_heads: 2, head_dim: 16, num_hidden_layers: 2}"
    )
    found = check(write("context_parallel_size: 2", "sample_packing: true", model=model))

    assert found.problems == ()
    assert found.plan.parallel.cp_method == "ulysses"


def test_a_length_of_seven_is_padded_not_cut(write):
    found = check(write("context_parallel_size: 2", "sequence_len: 7"))

    assert found.problems == ()
    assert found.notices == (
        "sequence_len 7 is not a multiple of 4, which cp 2 (allgather) needs: rows are padded to "
        "8. The padding is masked, the loss is the same.",
    )


def test_an_architecture_without_a_known_plan_is_noticed(write):
    model = "model_config: {model_type: stablelm, hidden_size: 64, num_attention_heads: 4}"
    found = check(write("tensor_parallel_size: 2", model=model))

    assert found.problems == ()
    assert found.notices == (
        "'stablelm' is not among the architectures ndtrain is tested with: tensor_parallel_size 2 "
        "works if transformers has a tensor-parallel plan for it. `ndtrain parity` compares its "
        "mesh with one process.",
    )


@pytest.mark.parametrize("key", ["dp_replicate_size", "dp_shard_size", "context_parallel_size"])
def test_an_architecture_without_tests_is_noticed_on_every_mesh(key, write):
    model = "model_config: {model_type: phi, hidden_size: 64, num_attention_heads: 4}"
    found = check(write(f"{key}: 2", model=model))

    assert found.problems == ()
    assert found.notices == (
        "'phi' is not among the architectures ndtrain is tested with. `ndtrain parity` compares "
        "its mesh with one process.",
    )
    assert check(write(model=model)).notices == ()


def test_layers_that_mix_tokens_outside_attention_refuse_a_split_row(write):
    model = "model_config: {model_type: lfm2, layer_types: [conv, full_attention]}"
    found = check(write("context_parallel_size: 2", model=model))

    (problem,) = found.problems
    assert problem.exit_code == ExitCode.MESH
    assert "recipe.yaml:" in problem.where
    assert problem.message == (
        "context_parallel_size is 2, but 'lfm2' has layers of kind 'conv': there the parts of a "
        "row would not see each other."
    )
    assert check(write("dp_shard_size: 2", model=model)).problems == ()


def test_attention_that_every_rank_repeats_is_noticed(write):
    model = "model_config: {model_type: gpt_oss, num_local_experts: 4, hidden_size: 64}"
    lines = ("tensor_parallel_size: 2", "tensor_sequence_parallel: auto")
    found = check(write(*lines, model=model))

    assert any("gpt_oss repeats its attention on every rank" in n for n in found.notices)
    assert (
        "tensor_sequence_parallel is off: parts of gpt_oss are split by transformers, which needs "
        "all tokens."
    ) in found.notices


def test_what_the_rules_let_pass_is_noticed(write):
    found = check(write("lora_r: 8", "async_tensor_parallel: true"))

    assert found.problems == ()
    lora, overlap = (notice.partition(": ")[2] for notice in found.notices)
    assert lora.startswith("lora_r: does nothing without adapter")
    assert overlap == (
        "async_tensor_parallel: does nothing with tensor_parallel_size: 1. Remove it."
    )


def test_products_that_wait_for_their_tokens_are_noticed(write):
    model = "model_config: {model_type: gpt_oss, num_local_experts: 4, hidden_size: 64}"
    shared = ("tensor_parallel_size: 2", "tensor_sequence_parallel: auto")
    found = check(write(*shared, "async_tensor_parallel: true", model=model))

    assert "async_tensor_parallel is off: every rank has all tokens." in found.notices


def test_a_run_directory_that_is_taken_is_noticed(write, tmp_path):
    path = write()
    folder = tmp_path / "runs" / "recipe"
    folder.mkdir(parents=True)
    (folder / "status.json").write_text("{}")

    assert check(path).warnings == (
        "'runs/recipe' already holds a run: a start would continue it.",
    )
    assert check(path, "auto_resume_from_checkpoints=false").warnings == (
        "'runs/recipe' already holds a run: choose another output_dir, or start with --restart.",
    )


def test_a_disk_that_is_too_small_is_noticed(write, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "none"))
    path = write(
        "save_steps: 10", "save_total_limit: 9", model="base_model: deepseek-ai/DeepSeek-V3"
    )

    (warning,) = [w for w in check(path).warnings if "GB free" in w]

    assert warning.startswith("10 checkpoints of 8052.3 GB and the export need 81865 GB, but '")
    assert warning.endswith("GB free. Set save_total_limit, or another output_dir.")


def test_gpus_that_stay_idle_are_noticed(write):
    found = check(write("dp_shard_size: 2"), found=("h200",) * 4)

    assert "2 of this machine's 4 GPUs would stay idle." in found.warnings


def test_all_gpus_of_the_machine_are_taken_when_the_size_is_open(write):
    assert check(write(), found=("h200",) * 4).plan.parallel.dp_shard == 4
    assert check(write("tensor_parallel_size: 3"), found=("h200",) * 7).plan.parallel.dp_shard == 2
    assert check(write("device: cpu"), found=("h200",) * 4).plan.parallel.dp_shard == 1


def test_memory_and_placement_are_judged_when_the_gpu_is_known(write, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "none"))
    path = write("dp_replicate_size: 8", model="base_model: meta-llama/Llama-3.1-8B")

    found = check(path, gpu="h100-80")

    assert found.predicted is not None
    assert not found.predicted.fits
    assert any(w.startswith("dp_replicate_size 8 keeps whole copies") for w in found.warnings)
    assert check(path).predicted is None


def test_the_report_reads_well(write, capsys, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    path = write("micro_batch_size: 2", "gradient_accumulation_steps: 4", "sample_packing: true")

    assert validate(path, world_size=4) == ExitCode.OK
    lines = capsys.readouterr().out.splitlines()

    assert lines[0] == (
        "llama (from the recipe): 4.83 M parameters, 2 layers, 9 query / 3 key-value heads, "
        "hidden 72, vocabulary 320"
    )
    assert lines[1] == "mesh: dp_replicate 1 × dp_shard 4 × cp 1 × tp 1 = 4 ranks"
    assert lines[2] == (
        "global batch = micro 2 × accumulation 4 × 4 data ranks = 32 packed rows = 65,536 tokens "
        "a step"
    )
    assert lines[-1] == f"{path} is valid. Its rows were not read; --data reads them too."


def test_the_book_is_named_as_the_source(write, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "none"))
    validate(write(model="base_model: Qwen/Qwen3-8B"))

    assert "Qwen/Qwen3-8B (from the book, 2026-" in capsys.readouterr().out


def test_a_mesh_problem_ends_with_exit_code_3(write, capsys):
    with pytest.raises(NdtrainError) as caught:
        validate(write("tensor_parallel_size: 2"))

    assert caught.value.exit_code == ExitCode.MESH


def test_a_recipe_problem_ends_with_exit_code_2_and_mesh_problems_are_said_too(write):
    path = write("tensor_parallel_size: 2", "save_steps: 3", "saves_per_epoch: 1")

    with pytest.raises(Problems) as caught:
        validate(path)

    assert caught.value.exit_code == ExitCode.RECIPE
    assert len(caught.value.problems) == 2


def test_json_has_everything_a_script_needs(write, capsys):
    code = validate(write("tensor_parallel_size: 3"), world_size=6, gpu="h200", as_json=True)
    result = json.loads(capsys.readouterr().out)

    assert code == ExitCode.OK
    assert result["ok"] is True
    assert result["mesh"] == {
        "dp_replicate": 1,
        "dp_shard": 2,
        "cp": 1,
        "tp": 3,
        "cp_method": "none",
        "sequence_parallel": False,
        "async_tensor_parallel": False,
        "world_size": 6,
    }
    assert result["batch"]["tokens_per_step"] == 2 * 2048
    assert result["model"]["parameters"] == 4_829_544
    assert result["memory_gib"]["total"] < result["memory_gib"]["limit"]


def test_json_of_a_broken_recipe_has_the_problems_and_the_exit_code(write, capsys, tmp_path):
    assert validate(write("tensor_parallel_size: 2"), as_json=True) == ExitCode.MESH
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem["hint"] == "Use 1, 3 or 9."
    assert problem["where"].endswith("recipe.yaml:5:1")

    (tmp_path / "bad.yaml").write_text("a: [")
    assert validate(tmp_path / "bad.yaml", as_json=True) == ExitCode.RECIPE
    assert json.loads(capsys.readouterr().out)["ok"] is False


@pytest.mark.parametrize("gpu", [None, "h100-80"])
def test_ranks_must_be_dealt_evenly_to_the_nodes(write, gpu):
    """With and without a GPU, and in the words of `plan` and of a start."""
    words = (
        "8 ranks cannot be dealt evenly to 3 nodes. Use 1, 2, 4 or 8 nodes, or other axis sizes."
    )
    path = write("dp_shard_size: 8")

    assert problems(path, world_size=8, nodes=3, gpu=gpu) == [f"--nodes: {words}"]
    assert problems(path, world_size=8, nodes=4, gpu=gpu) == []
    with pytest.raises(MeshError) as refused:
        plan(path, world_size=8, nodes=3, gpu=gpu)
    assert str(refused.value) == f"--nodes: {words}"
    with pytest.raises(MeshError) as refused:
        train(path, nnodes=3, node_rank=0, rdzv_endpoint="127.0.0.1:1", dry_run=True)
    assert str(refused.value) == f"--nnodes: {words}"


def test_an_unknown_gpu_stands_beside_the_other_problems(write):
    (heads, unknown) = problems(write("tensor_parallel_size: 2"), world_size=2, gpu="tpu")

    assert "9 query heads" in heads
    assert unknown.startswith("--gpu: 'tpu' is not a GPU of the hardware book")
