"""Memory by part: exact states, the guide's own number, and what each switch changes."""

from dataclasses import replace

import pytest

from ndtrain.plan.book import facts_from_book
from ndtrain.plan.checks import choose_cp_method
from ndtrain.plan.facts import facts_from_config
from ndtrain.plan.hardware import GIB, calibration
from ndtrain.plan.memory import kept_bytes, predict_memory, score_matrix_bytes
from ndtrain.plan.plan import BatchPlan, ParallelPlan
from ndtrain.plan.setting import Precision, frozen_is_whole, setting_of
from ndtrain.plan.shapes import count_parameters, lora_parameters
from ndtrain.plan.tables import describe_scores
from ndtrain.recipe.schema import Recipe

LLAMA = facts_from_book("meta-llama/Llama-3.1-8B")
PARAMETERS = 8_030_261_248


def setting(parallel=None, *, passes=1, **keys):
    parallel = parallel or ParallelPlan()
    method = choose_cp_method(LLAMA, parallel.tp, parallel.cp)
    given = {"base_model": "m", "learning_rate": 1e-4, "sequence_len": 8192, **keys}
    batch = BatchPlan(given.get("micro_batch_size", 1), passes, parallel.data_ranks)
    return setting_of(Recipe(**given), LLAMA, replace(parallel, cp_method=method), batch)


def split(parallel=None, *, passes=1, **keys):
    return predict_memory(LLAMA, setting(parallel, passes=passes, **keys), calibration())


def test_the_guides_own_number_32_heads_at_128k_tokens():
    assert score_matrix_bytes(LLAMA, 131072) == 1024 * GIB
    assert describe_scores(LLAMA, 131072, None) == (
        "attention scores written out would take 1.00 TiB a layer and row (32 heads × 131,072² × "
        "2 bytes); fused attention never writes them."
    )


def test_states_of_full_fine_tuning_are_sixteen_bytes_a_parameter():
    parts = split(passes=2)

    assert count_parameters(LLAMA) == PARAMETERS
    assert parts.weights == 4 * PARAMETERS
    assert parts.gradients == 4 * PARAMETERS
    assert parts.optimizer == 8 * PARAMETERS


@pytest.mark.parametrize("parallel", [ParallelPlan(dp_shard=4), ParallelPlan(cp=4)])
def test_states_are_sharded_over_dp_shard_and_cp(parallel):
    assert split(parallel).optimizer == 8 * PARAMETERS / 4


def test_replication_shards_nothing():
    assert split(ParallelPlan(dp_replicate=4)).optimizer == 8 * PARAMETERS


def test_tensor_parallelism_splits_all_but_the_norms():
    norms = (2 * 32 + 1) * 4096

    states = split(ParallelPlan(tp=4))

    assert states.weights == 4 * ((PARAMETERS - norms) / 4 + norms)


@pytest.mark.parametrize(
    ("keys", "saved"),
    [
        # the inputs of recomputed blocks
        ({"gradient_checkpointing": True}, 2),
        # what a compiled block keeps: its input and the residual sum behind attention
        ({"torch_compile": True, "activation_memory_budget": 0.7}, 4),
        # norms keep fp32 values; what attention and MLP read stays whole
        ({"torch_compile": False}, 14),
    ],
)
def test_shared_tokens_divide_what_is_kept_between_attention_and_mlp(keys, saved):
    constants = replace(calibration(), kept_budget=1.0)
    whole, shared = (
        kept_bytes(LLAMA, setting(ParallelPlan(tp=4, sequence_parallel=on), **keys), constants)
        for on in (False, True)
    )

    assert whole - shared == pytest.approx(saved * 4096 * 3 / 4)


def test_adapters_have_states_and_the_base_is_held_in_bf16():
    parts = split(adapter="lora")
    adapters = lora_parameters(LLAMA, 16)

    assert adapters == 41_943_040
    assert parts.weights == 2 * PARAMETERS + 4 * adapters
    assert parts.optimizer == 8 * adapters


def test_a_frozen_base_is_kept_whole_where_it_is_small_enough():
    four = ParallelPlan(dp_shard=4)

    assert split(four, adapter="lora").weights > 2 * PARAMETERS
    assert split(four, adapter="lora").buffers == 0
    assert split(four, adapter="lora", shard_frozen=True).weights < PARAMETERS
    assert not frozen_is_whole(
        Recipe(base_model="m", learning_rate=1e-4, adapter="lora"), LLAMA, Precision(), 1, 24.0
    )


def test_a_base_in_four_bits_takes_nine_sixteenths_of_a_byte_a_weight():
    ends = 2 * 128256 * 4096
    adapters = lora_parameters(LLAMA, 16)

    held = split(adapter="qlora", load_in_4bit=True).weights - 4 * adapters

    assert held == pytest.approx(0.56 * (PARAMETERS - ends) + 2 * ends)


def test_bf16_weights_have_bf16_gradients_and_states_of_their_own_key():
    halved = split(param_dtype="bf16", passes=2)
    assert (halved.weights, halved.gradients) == (2 * PARAMETERS, 2 * PARAMETERS)
    assert halved.optimizer == 8 * PARAMETERS
    assert split(param_dtype="bf16", optimizer_state_dtype="bf16").optimizer == 4 * PARAMETERS


def test_one_rank_that_keeps_the_copies_it_computes_with_holds_those_in_another_dtype():
    assert split().buffers == 0
    kept = split(reshard_after_forward=False)
    assert kept.buffers == pytest.approx(2 * PARAMETERS, rel=1e-3)
    # weights in the dtype of the computation are computed with as they are
    assert split(param_dtype="bf16", reshard_after_forward=False).buffers == 0


def test_eight_bit_moments_have_a_scale_for_256():
    assert split(optimizer_state_dtype="8bit").optimizer == 2 * (1 + 4 / 256) * PARAMETERS
    assert split(optimizer="sgd").optimizer == 4 * PARAMETERS


def test_policies_keep_less_and_less():
    kept = [
        split(gradient_checkpointing=value, activation_memory_budget=budget).activations
        for value, budget in ((False, 1), ("budget", 0.9), ("budget", 0.5), ("attention", 0.9))
    ]
    full = split(gradient_checkpointing="full").activations

    assert kept == sorted(kept, reverse=True)
    assert full == 32 * 8192 * 2 * 4096  # one bf16 hidden state a layer and token
    assert kept[-1] > full


def test_a_compiled_block_has_a_budget_unless_it_is_one():
    assert split().activations == split(gradient_checkpointing="budget").activations
    assert split(activation_memory_budget=1).activations > split().activations


def test_without_the_compiler_attention_alone_is_kept_by_name():
    parts = split(gradient_checkpointing="attention", torch_compile=False)

    assert parts.activations == 32 * 8192 * (2 * 4096 + 2 * 4096 + 4 * 32)


def test_without_the_compiler_more_is_kept():
    assert split(torch_compile=False).activations > split().activations


def test_a_longer_chunk_of_logits_takes_more():
    short, long = split(loss_chunk_tokens=1024).loss, split(loss_chunk_tokens=4096).loss

    assert long - short == pytest.approx(3072 * 128256 * 2), (
        "a logit in bf16, which its gradient takes the place of"
    )


def test_the_heads_gradient_is_held_whole_unless_it_is_frozen():
    held = split().loss - split(adapter="lora").loss

    assert held == pytest.approx(128256 * 4096 * (4 + 2))


def test_weights_that_stay_gathered_take_their_place():
    kept = split(ParallelPlan(dp_shard=4), reshard_after_forward=False).buffers
    freed = split(ParallelPlan(dp_shard=4)).buffers

    assert 12e9 < kept - freed < 16.1e9


def test_gradients_of_one_rank_and_one_pass_lie_where_activations_were():
    """The backward pass frees the one as it makes the other: the larger of both is the peak."""
    few, many = split(sequence_len=1024), split(sequence_len=32768)
    assert few.gradients + few.activations == 4 * PARAMETERS
    assert many.gradients == 0
    assert many.activations > 4 * PARAMETERS
    # not so with gradients of an earlier pass, or of another stream
    assert split(sequence_len=32768, passes=2).gradients == 4 * PARAMETERS
    assert split(ParallelPlan(dp_replicate=2), sequence_len=32768).gradients == 4 * PARAMETERS


def test_gradients_used_up_block_by_block():
    assert split(optimizer_in_backward=True).gradients < split().gradients / 10


def test_unfrozen_parameters_alone_have_gradients():
    head = split(unfrozen_parameters=("lm_head",), passes=2)

    assert head.gradients == 4 * 128256 * 4096


def test_patterns_add_to_what_an_adapter_trains():
    lora = {"adapter": "lora", "lora_target_modules": ("q_proj",)}
    alone = split(**lora, passes=2)
    beside = split(**lora, unfrozen_parameters=("lm_head",), passes=2)

    assert beside.gradients - alone.gradients == 4 * 128256 * 4096


def test_fused_attention_is_not_had_with_softcap():
    gemma = facts_from_config({"model_type": "gemma2"}, name="g", source="recipe")
    config = Recipe(base_model="m", learning_rate=1e-4, sequence_len=32768)
    plan = setting_of(config, gemma, ParallelPlan(), BatchPlan(1, 1, 1), policy="full")

    scores = 8 * 32768**2 * 6

    assert predict_memory(gemma, plan, calibration()).activations > scores
    assert describe_scores(gemma, 32768, None).endswith(
        "gemma2 needs them for its softcap, split over cp and tp."
    )


def test_parts_add_up():
    parts = split(ParallelPlan(dp_shard=2, cp=2, tp=2))

    assert parts.total == pytest.approx(sum(parts.gib().values()) * GIB)
    assert parts.total - parts.reserved == pytest.approx(parts.context)


def test_of_a_tiled_mlp_no_wide_value_is_kept():
    f, wide = 14336, {"gradient_checkpointing": False, "activation_memory_budget": 1}
    kept = {tiled: split(tiled_mlp=tiled, **wide).activations for tiled in (True, False)}
    eager = {
        tiled: split(tiled_mlp=tiled, torch_compile=False).activations for tiled in (True, False)
    }

    assert kept[False] - kept[True] == pytest.approx(calibration().kept * 6 * f * 8192 * 32)
    assert eager[False] - eager[True] == 8 * f * 8192 * 32


def test_a_tiled_mlp_makes_again_one_slice_of_what_a_block_makes():
    full = {"gradient_checkpointing": True, "sequence_len": 131072, "adapter": "lora"}
    plain, tiled = split(**full), split(tiled_mlp=True, **full)
    f, left = 14336, 131072 - 4096

    assert plain.activations == tiled.activations
    again, gradients = 6 * f, calibration().workspace * 8 * f
    # adapters alone are trained: nothing of the weights is summed
    assert plain.workspace - tiled.workspace == pytest.approx((again + gradients) * left)


def test_slices_of_trained_weights_leave_a_gradient_and_its_sum_in_fp32():
    keys = {"gradient_checkpointing": True, "sequence_len": 8192, "tiled_mlp": True}
    one = split(tiled_mlp_num_shards=1, **keys).workspace
    two = split(**keys).workspace
    f, h = 14336, 4096

    wide = (6 * f + calibration().workspace * 8 * f) * 4096
    assert two - one == pytest.approx((2 + 4) * 3 * f * h - wide)
