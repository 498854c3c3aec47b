"""Adapters: what is adapted, what is trained, and what is said when nothing matches."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict

from ndtrain.errors import CheckpointError, MeshError, RecipeError
from ndtrain.model.adapter_base import base_address
from ndtrain.model.adapter_files import adapter_names, check_adapter
from ndtrain.model.adapter_weights import saved_key
from ndtrain.model.adapters import apply_adapter, find_targets, report_trainable
from ndtrain.model.build import build_model
from ndtrain.model.names import parse_name
from ndtrain.model.random_weights import meta_twin, restore_buffers
from ndtrain.model.weights import load_weights, materialize
from ndtrain.plan.model_source import ModelSource, find_model
from ndtrain.recipe.schema import Recipe
from ndtrain.train.optim import build_optimizer

CONFIG = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 40,
}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}


def recipe(**keys: Any) -> Recipe:
    config = {**CONFIG, **keys.pop("config", {})}
    return Recipe(model_config=config, learning_rate=1.0, adapter="lora", lora_r=2, **keys)


def adapted(wanted: Recipe, dtype: torch.dtype = torch.float32) -> Any:
    source = find_model(wanted)
    model = apply_adapter(build_model(source, wanted, dtype=dtype), wanted)
    load_weights(model, source, seed=3, device=torch.device("cpu"))
    return model


def adapted_leaves(model: Any) -> set[str]:
    return {
        name.split(".lora_")[0].rpartition(".")[2]
        for name, _ in model.named_parameters()
        if ".lora_" in name
    }


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, ATTENTION | MLP),
        ({"lora_target_linear": True}, ATTENTION | MLP),
        ({"lora_target_modules": "all-linear"}, ATTENTION | MLP),
        ({"lora_target_modules": ("q_proj", "v_proj")}, {"q_proj", "v_proj"}),
        ({"lora_target_modules": ("self_attn.q_proj", "lm_head")}, {"q_proj", "lm_head"}),
        ({"lora_target_modules": r".*\.mlp\..*_proj"}, MLP),
        ({"lora_target_modules": "q_proj"}, {"q_proj"}),
        ({"lora_target_modules": ("embed_tokens",)}, {"embed_tokens"}),
        (
            {"lora_target_linear": True, "lora_target_modules": ("lm_head",)},
            ATTENTION | MLP | {"lm_head"},
        ),
    ],
)
def test_targets(keys: dict[str, Any], expected: set[str]) -> None:
    model = adapted(recipe(**keys))
    assert adapted_leaves(model) == expected
    assert set(model.peft_config["default"].target_modules) == expected


def test_a_pattern_for_one_layer_only_keeps_full_names() -> None:
    model = adapted(recipe(lora_target_modules=r"model\.layers\.1\.self_attn\.q_proj"))
    assert model.peft_config["default"].target_modules == {"model.layers.1.self_attn.q_proj"}


@pytest.mark.parametrize(
    ("targets", "hint"),
    [
        (("q_projj",), "Did you mean 'q_proj'? It has down_proj, gate_proj, k_proj, lm_head"),
        (("q_proj", "wq"), "It has down_proj, gate_proj"),
        ("model.layers.q_proj", "It has down_proj, gate_proj"),
    ],
)
def test_targets_that_match_nothing_list_the_linears(targets: Any, hint: str) -> None:
    wanted = recipe(lora_target_modules=targets)
    model = build_model(find_model(wanted), wanted)
    with pytest.raises(RecipeError, match="matches no linear of the model") as caught:
        find_targets(model, wanted)
    assert caught.value.hint.startswith(hint)
    assert caught.value.where == "lora_target_modules"


def test_a_broken_pattern_and_a_missing_module_to_save() -> None:
    wanted = recipe(lora_target_modules="q_(proj")
    with pytest.raises(RecipeError, match="is not a regular expression"):
        adapted(wanted)
    with pytest.raises(RecipeError, match="'embed_token' matches no module") as caught:
        adapted(recipe(lora_modules_to_save=("embed_token",)))
    assert caught.value.hint == "Did you mean 'embed_tokens'?"


def test_only_adapters_train_in_fp32_over_a_bf16_base() -> None:
    model = adapted(recipe(), torch.bfloat16)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad is (".lora_" in name), name
        assert parameter.dtype == (torch.float32 if ".lora_" in name else torch.bfloat16), name


def test_the_report_counts_what_is_trained() -> None:
    report = report_trainable(adapted(recipe(lora_target_modules=("q_proj",))))
    assert report.trainable == 2 * (2 * 16 + 16 * 2)
    assert report.adapted == ("q_proj",)
    base = build_model(find_model(recipe()), recipe())
    assert report.total == report.trainable + sum(one.numel() for one in base.parameters())


def test_fresh_adapters_start_as_nothing_and_depend_on_the_seed() -> None:
    model = adapted(recipe())
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            assert not parameter.any(), name
        elif "lora_A" in name:
            bound = (1 / parameter.shape[1]) ** 0.5 * 3**0.5  # uniform as in a plain linear
            assert parameter.abs().max() <= bound, name
            assert parameter.std() > 0.2 * bound, name
    again = adapted(recipe())
    other = build_model(find_model(recipe()), recipe())
    apply_adapter(other, recipe())
    load_weights(other, find_model(recipe()), seed=4, device=torch.device("cpu"))
    name = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert torch.equal(model.get_parameter(name), again.get_parameter(name))
    assert not torch.equal(model.get_parameter(name), other.get_parameter(name))


def test_dora_magnitudes_are_the_lengths_of_the_base_rows() -> None:
    model = adapted(recipe(peft_use_dora=True, lora_target_modules=("q_proj",)))
    projection = model.model.layers[0].self_attn.q_proj
    lengths = projection.base_layer.weight.norm(dim=1)
    assert torch.allclose(projection.lora_magnitude_vector["default"].weight, lengths)


@pytest.mark.parametrize("targets", [("q_proj", "down_proj", "lm_head"), "all-linear"])
@pytest.mark.parametrize("bias", [False, True])
def test_dora_computes_what_peft_computes(targets: Any, bias: bool, tmp_path: Path) -> None:
    wanted = recipe(
        config={"attention_bias": bias}, peft_use_dora=True, lora_target_modules=targets
    )
    model = adapted(wanted)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.05)
    base = build_model(find_model(wanted), wanted)
    materialize(base, torch.device("cpu"))
    restore_buffers(base, meta_twin(base))
    reference = PeftModel(base, model.peft_config["default"])
    values = {f"base_model.model.{name}": one for name, one in model.named_parameters()}
    reference.load_state_dict(values, strict=False)
    assert {name for name, _ in reference.named_parameters()} == set(values)
    ids = torch.arange(12)[None]
    ours, theirs = model.eval()(input_ids=ids).logits, reference.eval()(input_ids=ids).logits
    assert torch.allclose(ours, theirs, atol=1e-5, rtol=1e-5)
    ours.square().sum().backward()
    theirs.square().sum().backward()
    for name, parameter in reference.named_parameters():
        if parameter.requires_grad:
            gradient = model.get_parameter(name.removeprefix("base_model.model.")).grad
            assert torch.allclose(gradient, parameter.grad, atol=1e-4, rtol=1e-4), name


def test_an_orthogonal_start_is_random_and_changes_nothing() -> None:
    model = adapted(recipe(peft_init_lora_weights="orthogonal"))
    for name, first in model.named_parameters():
        if ".lora_A." in name:
            second = model.get_parameter(name.replace(".lora_A.", ".lora_B."))
            assert first.any(), name
            assert second.any(), name
            assert (second @ first).abs().max() < 1e-6 * first.norm() * second.norm(), name


def test_lora_plus_gives_every_b_a_rate_of_its_own() -> None:
    wanted = recipe(loraplus_lr_ratio=16.0, lora_target_modules=("q_proj", "lm_head"))
    model = adapted(wanted)
    rates = {
        id(parameter): group["lr"]
        for group in build_optimizer(model.named_parameters(), wanted).param_groups
        for parameter in group["params"]
    }
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert rates[id(parameter)] == (16.0 if ".lora_B." in name else 1.0), name


def test_patterns_train_parameters_of_the_base_beside_the_adapter() -> None:
    patterns = ("layernorm", r"layers\.1\.mlp\.down_proj")
    wanted = recipe(lora_target_modules=("q_proj",), unfrozen_parameters=patterns)
    model = adapted(wanted, torch.bfloat16)
    trained = {
        name: one.dtype
        for name, one in model.named_parameters()
        if one.requires_grad and ".lora_" not in name
    }
    norms = ("input_layernorm", "post_attention_layernorm")
    expected = {f"model.layers.{layer}.{norm}.weight" for layer in (0, 1) for norm in norms}
    assert trained == dict.fromkeys(
        expected | {"model.layers.1.mlp.down_proj.weight"}, torch.float32
    )
    stored = model.peft_config["default"].modules_to_save
    assert stored == sorted(name.removesuffix(".weight") for name in trained)


@pytest.mark.parametrize("key", ["unfrozen_parameters", "lora_modules_to_save"])
def test_all_linears_are_all_but_those_trained_whole(key: str) -> None:
    model = adapted(recipe(**{key: ("up_proj",)}))
    assert adapted_leaves(model) == (ATTENTION | MLP) - {"up_proj"}
    assert model.model.layers[1].mlp.up_proj.weight.requires_grad


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"unfrozen_parameters": ("up_proj",), "lora_target_modules": ("up_proj",)},
            "would get an adapter and be trained whole",
        ),
        (
            {"lora_modules_to_save": ("up_proj",), "lora_target_modules": ("up_proj",)},
            "would get an adapter and be trained whole",
        ),
        ({"unfrozen_parameters": ("norms",)}, "'norms' matches no parameter"),
        ({"unfrozen_parameters": ("norm(",)}, "is not a regular expression"),
    ],
)
def test_what_cannot_be_trained_beside_an_adapter(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        adapted(recipe(lora_target_linear=True, **keys))


def test_tokens_added_beside_an_adapter_are_trained_through_a_pattern() -> None:
    wanted = recipe(lora_target_modules=("q_proj",), unfrozen_parameters=("embed_tokens|lm_head",))
    assert build_model(find_model(wanted), wanted, num_tokens=50).get_input_embeddings()
    alone = recipe(lora_target_modules=("q_proj",))
    with pytest.raises(RecipeError, match="adds 10 tokens"):
        build_model(find_model(alone), alone, num_tokens=50)


def test_modules_trained_whole_stay_in_place() -> None:
    model = adapted(recipe(lora_modules_to_save=("lm_head", "norm")), torch.bfloat16)
    whole = {
        name: parameter.dtype
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and ".lora_" not in name
    }
    assert whole == {"lm_head.weight": torch.float32, "model.norm.weight": torch.float32}
    assert set(model.peft_config["default"].modules_to_save) == {"lm_head", "model.norm"}


def test_a_tied_pair_is_trained_and_saved_as_a_pair() -> None:
    wanted = recipe(
        config={"tie_word_embeddings": True},
        lora_target_modules=("q_proj",),
        lora_modules_to_save=("embed_tokens",),
    )
    model = adapted(wanted)
    assert set(model.peft_config["default"].modules_to_save) == {"embed_tokens", "lm_head"}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert adapter_names(model)["model.embed_tokens.weight"] == [
        "base_model.model.model.embed_tokens.weight",
        "base_model.model.lm_head.weight",
    ]


@pytest.mark.parametrize("dora", [False, True])
def test_saved_keys_are_those_of_peft(dora: bool) -> None:
    model = adapted(recipe(peft_use_dora=dora))
    ours = {saved_key(name) for name, one in model.named_parameters() if one.requires_grad}
    wrapped = PeftModel(build_model(find_model(recipe()), recipe()), model.peft_config["default"])
    assert ours == set(get_peft_model_state_dict(wrapped))


def test_names_without_their_wrappers() -> None:
    name = "base_model.model.model.layers.3._checkpoint_wrapped_module.mlp.up_proj."
    assert parse_name(f"{name}base_layer.weight").base == "model.layers.3.mlp.up_proj.weight"
    part = parse_name(f"{name}lora_A.default.weight")
    assert (part.base, part.part) == ("model.layers.3.mlp.up_proj.weight", "lora_A")
    assert parse_name("_orig_mod.lm_head.weight").base == "lm_head.weight"
    assert parse_name("m.lora_magnitude_vector.default.weight").part == "magnitude"


GOOD = {
    "m.q.lora_A.default.weight": torch.ones(2, 4),
    "m.q.lora_B.default.weight": torch.ones(4, 2),
}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"m.q.lora_A.default.weight": torch.ones(8)}, r"is \[8\] instead of a matrix"),
        ({"m.q.lora_A.default.weight": torch.ones(0, 4)}, r"is \[0, 4\] instead of a matrix"),
        ({"m.q.lora_B.default.weight": torch.full((4, 2), torch.nan)}, "is not finite"),
        ({"m.q.lora_B.default.weight": torch.zeros(4, 2)}, "still zero after training"),
        ({"m.q.lora_B.default.weight": None}, "lacks its partner"),
    ],
)
def test_a_broken_adapter_is_not_written(changed: dict[str, Any], message: str) -> None:
    tensors = {name: one for name, one in {**GOOD, **changed}.items() if one is not None}
    with pytest.raises(CheckpointError, match=message):
        check_adapter(tensors, trained=True)


def test_a_whole_adapter_passes_and_zeros_are_fine_before_training() -> None:
    check_adapter(GOOD, trained=True)
    fresh = {**GOOD, "m.q.lora_B.default.weight": torch.zeros(4, 2)}
    check_adapter(fresh, trained=False)
    with pytest.raises(CheckpointError, match="no low-rank factor at all"):
        check_adapter({"lm_head.weight": torch.ones(2, 2)}, trained=True)


def test_an_adapter_of_another_shape_is_refused(tmp_path: Path) -> None:
    from ndtrain.parallel.runtime import Runtime
    from ndtrain.train.export import export_adapter

    wanted = recipe(lora_target_modules=("q_proj",))
    runtime = Runtime(0, 1, 0, torch.device("cpu"))
    source = find_model(wanted)
    export_adapter(adapted(wanted), None, source, tmp_path / "a", runtime=runtime, trained=False)
    larger = wanted.model_copy(update={"lora_r": 3})
    model = apply_adapter(build_model(source, larger), larger)
    with pytest.raises(MeshError, match=r"is \[2, 16\] in the adapter and \[3, 16\] here"):
        load_weights(model, source, seed=1, device=torch.device("cpu"), adapter=tmp_path / "a")
    more = recipe(lora_target_modules=("q_proj", "v_proj"))
    model = apply_adapter(build_model(source, more), more)
    with pytest.raises(MeshError, match=r"the adapter lacks '.*v_proj\.lora_A"):
        load_weights(model, source, seed=1, device=torch.device("cpu"), adapter=tmp_path / "a")


def test_added_tokens_must_be_trained() -> None:
    wanted = recipe(tokens=("new",))
    with pytest.raises(RecipeError, match="adds 3 tokens, but an adapter does not") as caught:
        build_model(find_model(wanted), wanted, num_tokens=43)
    assert caught.value.hint == "Set lora_modules_to_save: [embed_tokens, lm_head]."
    saved = recipe(tokens=("new",), lora_modules_to_save=("embed_tokens", "lm_head"))
    assert build_model(find_model(saved), saved, num_tokens=43).lm_head.out_features == 43
    assert build_model(find_model(wanted), wanted, num_tokens=40).lm_head.out_features == 40


@pytest.mark.parametrize(
    ("source", "address"),
    [
        (ModelSource("hub", "acme/tiny", Path("/cache/acme")), "acme/tiny"),
        (ModelSource("folder", "tiny", Path("/models/tiny")), "/models/tiny"),
        (ModelSource("folder", "/models/tiny.gguf", Path("/cache/1")), "/models/tiny.gguf"),
        (ModelSource("folder", "package://acme/x.gguf", Path("/cache/1")), "package://acme/x.gguf"),
        (ModelSource("folder", "package://acme/tiny", Path("/site/tiny")), "package://acme/tiny"),
        (ModelSource("random", "llama"), None),
    ],
)
def test_an_adapter_names_a_base_that_is_found_again(
    source: ModelSource, address: str | None
) -> None:
    assert base_address(source) == address


def test_a_gguf_base_is_found_from_any_folder() -> None:
    source = ModelSource("folder", "models/tiny.gguf", Path("/cache/1"))
    assert base_address(source) == str(Path.cwd() / "models/tiny.gguf")
