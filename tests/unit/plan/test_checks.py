"""Every rule on the sizes of a mesh: the message has the rule, the numbers and what works."""

import pytest

from ndtrain.errors import ExitCode, MeshError
from ndtrain.plan.checks import (
    check_adapters,
    check_early_step,
    check_heads,
    check_sequence,
    check_tensor_parallel,
    choose_cp_method,
    choose_exchange,
    describe_batch,
    describe_padding,
    local_heads,
    sequence_problem,
    valid_tensor_sizes,
    why_tokens_wait,
)
from ndtrain.plan.facts import facts_from_config
from ndtrain.plan.plan import BatchPlan, ParallelPlan, row_multiple
from ndtrain.recipe.schema import Recipe


def facts(model_type="llama", heads=32, kv_heads=8, **keys):
    config = {
        "model_type": model_type,
        "hidden_size": 64 * heads,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **keys,
    }
    return facts_from_config(config, name="model", source="recipe")


def recipe(**keys):
    return Recipe(**{"base_model": "m", "learning_rate": 1e-4, **keys})


def test_query_heads_must_divide():
    (problem,) = check_tensor_parallel(facts(), 3, where="recipe.yaml:4:1")

    assert problem.exit_code == ExitCode.MESH
    assert str(problem) == (
        "recipe.yaml:4:1: tensor_parallel_size is 3, but the model has 32 query heads (32 is not "
        "divisible by 3). Use 1, 2, 4, 8, 16 or 32."
    )


def test_nine_query_and_three_key_value_heads_allow_one_three_and_nine():
    odd = facts(heads=9, kv_heads=3)

    assert valid_tensor_sizes(odd) == (1, 3, 9)
    (problem,) = check_tensor_parallel(odd, 2)
    assert str(problem) == (
        "tensor_parallel_size is 2, but the model has 9 query heads (9 is not divisible by 2). "
        "Use 1, 3 or 9."
    )
    assert check_tensor_parallel(odd, 3) == []


def test_more_ranks_than_key_value_heads_is_fine():
    assert check_tensor_parallel(facts(heads=8, kv_heads=2), 4) == []
    assert check_tensor_parallel(facts(heads=8, kv_heads=1), 8) == []


def test_key_value_heads_that_divide_neither_way_are_refused():
    (problem,) = check_tensor_parallel(facts(heads=12, kv_heads=4), 6)

    assert str(problem) == (
        "tensor_parallel_size is 6, but the model has 4 key/value heads (4 is not divisible by 6, "
        "nor 6 by 4). Use 1, 2, 4 or 12."
    )


def test_vocabulary_and_intermediate_size_need_not_divide():
    assert check_tensor_parallel(facts(vocab_size=32001, intermediate_size=11007), 4) == []


def test_the_width_of_experts_must_divide_but_not_their_number():
    moe = facts("qwen3_moe", heads=12, kv_heads=12, num_experts=5, moe_intermediate_size=64)

    (problem,) = check_tensor_parallel(moe, 3)

    assert str(problem) == (
        "tensor_parallel_size is 3, but the model's 5 experts are 64 wide (64 is not divisible "
        "by 3). Use 1, 2 or 4."
    )
    assert check_tensor_parallel(moe, 4) == []


def test_attention_that_is_not_split_by_heads_puts_no_rule_on_key_value_heads():
    assert check_tensor_parallel(facts("olmo2", heads=12, kv_heads=4), 6) == []


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "cp", "method"),
    [
        (32, 8, 1, 1, "none"),
        (32, 8, 1, 2, "ulysses"),
        (32, 8, 1, 8, "ulysses"),
        (32, 8, 1, 16, "allgather"),
        (32, 8, 4, 2, "ulysses"),
        (32, 8, 4, 4, "allgather"),
        (8, 2, 4, 2, "allgather"),
        (9, 3, 1, 2, "allgather"),
        (9, 3, 1, 3, "ulysses"),
    ],
)
def test_ulysses_where_local_heads_divide_else_allgather(heads, kv_heads, tp, cp, method):
    assert choose_cp_method(facts(heads=heads, kv_heads=kv_heads), tp, cp) == method


def test_the_wanted_method_wins_where_it_works():
    assert choose_cp_method(facts(), 1, 2, "allgather") == "allgather"
    assert choose_cp_method(facts(), 1, 2, "ulysses") == "ulysses"
    assert choose_cp_method(facts(), 1, 1, "ulysses") == "none"


def test_ulysses_asked_for_where_heads_do_not_divide_is_refused():
    with pytest.raises(MeshError) as caught:
        choose_cp_method(facts(heads=9, kv_heads=3), 1, 2, "ulysses", where="r.yaml:3:1")

    assert str(caught.value) == (
        "r.yaml:3:1: context_parallel_method is 'ulysses' and context_parallel_size is 2, but a "
        "rank has 9 query and 3 key/value heads to deal. Use context_parallel_size 1 or 3, or "
        "context_parallel_method: allgather."
    )


def test_heads_of_one_rank():
    assert local_heads(facts(), 4) == (8, 2)
    assert local_heads(facts(heads=8, kv_heads=2), 4) == (2, 1)
    assert local_heads(facts("olmo2"), 4) == (32, 8)


def test_rows_are_padded_to_what_the_split_needs():
    assert row_multiple(1, "none") == 1
    assert row_multiple(4, "ulysses") == 4
    assert row_multiple(4, "allgather") == 8
    assert row_multiple(1, "none", 3) == 3
    assert row_multiple(2, "ulysses", 4) == 8
    assert row_multiple(2, "allgather", 2) == 4
    assert row_multiple(2, "allgather", 3) == 12
    ulysses = ParallelPlan(cp=2, cp_method="ulysses")
    assert describe_padding(recipe(sequence_len=8), ulysses) is None
    allgather = ParallelPlan(cp=2, cp_method="allgather")
    assert describe_padding(recipe(sequence_len=7), allgather) == (
        "sequence_len 7 is not a multiple of 4, which cp 2 (allgather) needs: rows are padded to "
        "8. The padding is masked, the loss is the same."
    )
    shared = ParallelPlan(cp=2, tp=2, cp_method="ulysses", sequence_parallel=True)
    assert describe_padding(recipe(sequence_len=7), shared) == (
        "sequence_len 7 is not a multiple of 4, which cp 2 (ulysses) and tp 2 (sequence parallel) "
        "need: rows are padded to 8. The padding is masked, the loss is the same."
    )


@pytest.mark.parametrize(
    ("model_type", "wanted", "tp", "shares"),
    [
        ("llama", "auto", 2, True),
        ("llama", True, 2, True),
        ("llama", False, 2, False),
        ("llama", "auto", 1, False),
        ("phi3", "auto", 2, True),
        ("gpt_oss", "auto", 2, False),
        ("qwen3_moe", "auto", 2, False),
        ("deepseek_v3", "auto", 2, False),
        ("falcon", "auto", 2, False),
    ],
)
def test_tokens_are_shared_over_tp_where_the_model_allows_it(model_type, wanted, tp, shares):
    asked = recipe(tensor_sequence_parallel=wanted)

    mesh = choose_exchange(facts(model_type), asked, ParallelPlan(tp=tp, cp=2))

    assert mesh == ParallelPlan(tp=tp, cp=2, cp_method="ulysses", sequence_parallel=shares)


@pytest.mark.parametrize(
    ("keys", "shares"),
    [
        ({}, True),
        ({"bf16": False}, False),
        ({"device": "cpu"}, False),
        ({"device": "cpu", "bf16": True}, True),
        ({"device": "cpu", "tensor_sequence_parallel": True}, True),
        ({"device": "cpu", "adapter": "lora"}, True),
    ],
)
def test_gradients_in_fp32_that_are_kept_in_bf16_are_not_summed_from_rounded_parts(keys, shares):
    asked = recipe(**{"param_dtype": "bf16", "tensor_sequence_parallel": "auto", **keys})
    mesh = choose_exchange(facts(), asked, ParallelPlan(tp=2))

    assert mesh.sequence_parallel == shares


@pytest.mark.parametrize(
    ("keys", "tp", "why"),
    [
        ({}, 2, ""),
        ({"async_tensor_parallel": False}, 2, None),
        ({"tensor_sequence_parallel": False}, 2, "every rank has all tokens"),
        ({"fp8": True}, 2, "fp8 scales what it multiplies as a whole"),
        ({}, 8, "the 92 features of an MLP do not divide by tensor_parallel_size 8"),
    ],
)
def test_products_wait_for_tokens_where_parts_are_not_equal(keys, tp, why):
    known = facts(heads=8, intermediate_size=92)
    given = {"async_tensor_parallel": True, "tensor_sequence_parallel": True, **keys}
    asked = recipe(**given)

    mesh = choose_exchange(known, asked, ParallelPlan(tp=tp))

    assert mesh.overlaps == (why == "")
    if why is not None:
        assert why_tokens_wait(known, asked, mesh) == why


def test_shared_tokens_asked_for_where_the_model_needs_all_are_refused():
    asked = recipe(tensor_sequence_parallel=True)
    moe, where = facts("qwen3_moe"), lambda key: f"r:{key}"

    (problem,) = check_sequence(moe, asked, ParallelPlan(tp=2), where)

    assert str(problem) == (
        "r:tensor_sequence_parallel: tensor_sequence_parallel is true, but parts of qwen3_moe are "
        "split by transformers, which needs all tokens. Use tensor_sequence_parallel: auto."
    )
    assert check_sequence(moe, asked, ParallelPlan(dp_shard=2), where) == []
    assert check_sequence(facts(), asked, ParallelPlan(tp=2), where) == []
    assert sequence_problem(facts("falcon")) == (
        "'falcon' is not among the architectures ndtrain is tested with"
    )


def test_batch_arithmetic_is_spelled_out():
    assert describe_batch(BatchPlan(2, 4, 4), 2048, packed=True) == (
        "global batch = micro 2 × accumulation 4 × 4 data ranks = 32 packed rows = 65,536 tokens "
        "a step"
    )
    assert describe_batch(BatchPlan(1, 1, 1), 512, packed=False) == (
        "global batch = micro 1 × accumulation 1 × 1 data rank = 1 row = up to 512 tokens a step"
    )


@pytest.mark.parametrize("key", ["load_in_4bit", "load_in_8bit"])
def test_quantised_bases_are_sharded_but_not_split_by_heads(key):
    quantised = recipe(adapter="lora", **{key: True})

    (problem,) = check_adapters(quantised, ParallelPlan(tp=2), lambda name: f"r:{name}")

    assert str(problem) == (
        f"r:{key}: {key} stores a row's weights together as bytes, which tensor_parallel_size 2 "
        "cannot split. Set tensor_parallel_size: 1; dp_shard_size and context_parallel_size work."
    )
    assert check_adapters(quantised, ParallelPlan(dp_shard=2, cp=2), lambda name: name) == []


def test_an_optimizer_in_the_backward_pass_takes_its_batch_in_one_pass():
    early = recipe(optimizer_in_backward=True, max_grad_norm=None, global_batch_size=16)

    (problem,) = check_early_step(early, BatchPlan(2, 4, 2), lambda name: f"r:{name}")

    assert str(problem) == (
        "r:optimizer_in_backward: optimizer_in_backward steps within one pass, but "
        "global_batch_size 16 takes 4 passes of 2 on each of 2 data ranks. Set micro_batch_size: "
        "8, or leave optimizer_in_backward out."
    )
    assert check_early_step(early, BatchPlan(8, 1, 2), lambda name: name) == []
    assert check_early_step(recipe(), BatchPlan(2, 4, 2), lambda name: name) == []


@pytest.mark.parametrize(("heads", "kv_heads"), [(24, 6), (32, 8), (9, 3), (30, 6)])
def test_the_engine_refuses_what_planning_refuses_in_the_same_words(heads, kv_heads):
    for tp in range(1, 33):
        planned = [
            str(error) for error in check_tensor_parallel(facts("llama", heads, kv_heads), tp)
        ]
        said: list[str] = []
        try:
            check_heads(heads, kv_heads, tp)
        except MeshError as error:
            said.append(f"{error.message} {error.hint}")
        assert said == planned
