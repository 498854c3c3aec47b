"""Files that do not fit a model: each gives one message that names what and where."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ndtrain.errors import MeshError, RecipeError
from ndtrain.model.build import build_model
from ndtrain.model.weights import load_weights
from ndtrain.plan.model_source import find_model
from ndtrain.recipe.schema import Recipe

SIZES = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 40,
}
CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


def random_model(**config: Any) -> Any:
    recipe = Recipe(model_config={**SIZES, **config}, learning_rate=1.0)
    source = find_model(recipe)
    model = build_model(source, recipe)
    load_weights(model, source, seed=1, device=CPU)
    return model


def changed_folder(folder: Path, change: Callable[[Tensors], None], **config: Any) -> Path:
    random_model(**config).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def load(folder: Path, num_tokens: int = 0) -> Any:
    recipe = Recipe(base_model=str(folder), learning_rate=1.0)
    source = find_model(recipe)
    model = build_model(source, recipe, num_tokens=num_tokens)
    load_weights(model, source, seed=1, device=CPU)
    return model


def drop(*names: str) -> Callable[[Tensors], None]:
    return lambda tensors: [tensors.pop(name) for name in names] and None


def test_missing_weights_are_named(tmp_path: Path) -> None:
    folder = changed_folder(tmp_path, drop("model.norm.weight", "model.embed_tokens.weight"))
    with pytest.raises(MeshError, match=r"lack 'model\.embed_tokens\.weight', 'model\.norm"):
        load(folder)


def test_a_missing_head_points_at_the_tie(tmp_path: Path) -> None:
    with pytest.raises(MeshError, match=r"lack 'lm_head\.weight'") as caught:
        load(changed_folder(tmp_path, drop("lm_head.weight")))
    assert "tie_word_embeddings: true" in caught.value.hint


def test_wrong_shapes_are_named_with_both_shapes(tmp_path: Path) -> None:
    def widen(tensors: Tensors) -> None:
        tensors["model.norm.weight"] = torch.ones(17)

    with pytest.raises(MeshError, match=r"'model\.norm\.weight' is \[17\] in the files and \[16\]"):
        load(changed_folder(tmp_path, widen))


def test_weights_that_the_model_would_leave_out_are_refused(tmp_path: Path) -> None:
    def add_bias(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(16)

    with pytest.raises(MeshError, match=r"q_proj\.bias' is in the files but not in the model"):
        load(changed_folder(tmp_path, add_bias))


def test_weights_of_modules_that_the_model_lacks_are_left_out(tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors["vision_tower.patch.weight"] = torch.ones(2)
        tensors["model.layers.1.mlp.up_proj.weight"] = torch.ones(2)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)

    model = load(changed_folder(tmp_path, add))
    assert torch.equal(model.model.norm.weight, random_model().model.norm.weight)


def test_a_tied_config_with_two_different_weights_is_explained(tmp_path: Path) -> None:
    def untie(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    folder = changed_folder(tmp_path, untie, tie_word_embeddings=True)
    with pytest.raises(MeshError, match="are tied, but the files hold different values"):
        load(folder)


@pytest.mark.parametrize("kept", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_tied_weight_may_be_stored_under_either_name_or_twice(kept: str, tmp_path: Path) -> None:
    expected = random_model(tie_word_embeddings=True).lm_head.weight

    def rename(tensors: Tensors) -> None:
        tensors[kept] = tensors.pop("model.embed_tokens.weight").clone()

    def double(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    for number, change in enumerate((rename, double)):
        model = load(changed_folder(tmp_path / str(number), change, tie_word_embeddings=True))
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert torch.equal(model.lm_head.weight, expected)


def test_a_checkpoint_of_the_bare_decoder_loads_below_the_head(tmp_path: Path) -> None:
    def strip(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    folder = changed_folder(tmp_path, strip, tie_word_embeddings=True)
    expected = random_model(tie_word_embeddings=True).model.norm.weight
    assert torch.equal(load(folder).model.norm.weight, expected)


@pytest.mark.parametrize("tied", [False, True])
def test_rows_of_added_tokens_are_the_mean_of_the_others(tied: bool, tmp_path: Path) -> None:
    folder = changed_folder(tmp_path, drop(), tie_word_embeddings=tied)
    before = load(folder)
    after = load(folder, num_tokens=43)
    assert after.config.vocab_size == 43
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        old, new = before.get_parameter(name), after.get_parameter(name)
        assert torch.equal(new[:40], old)
        mean = old.double().mean(0).float()
        assert torch.allclose(new[40:], mean.expand(3, -1), rtol=1e-6, atol=1e-8)


def test_buffers_that_no_file_holds_are_made_again() -> None:
    model = random_model(rope_theta=1234.0)
    made = model.model.rotary_emb.inv_freq
    expected = 1.0 / 1234.0 ** (torch.arange(0, 8, 2).float() / 8)
    assert torch.allclose(made, expected)


def test_truncated_and_pickled_files(tmp_path: Path) -> None:
    folder = changed_folder(tmp_path / "cut", drop())
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(MeshError, match="weights cannot be read") as caught:
        load(folder)
    assert caught.value.where == str(file)
    file.rename(folder / "pytorch_model.bin")
    with pytest.raises(MeshError, match="pickled"):
        load(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(MeshError, match=r"there is no model\.safetensors"):
        load(folder)


def test_a_shard_that_is_missing(tmp_path: Path) -> None:
    random_model().save_pretrained(tmp_path, max_shard_size="3KB")
    victim = sorted(tmp_path.glob("model-*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(
        MeshError, match=rf"1 of \d+ weight files are missing, e.g. '{victim.name}'"
    ):
        load(tmp_path)


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    folder = changed_folder(tmp_path, drop())
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(MeshError, match="quantised with awq"):
        load(folder)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "no_such_model"}, "cannot use the model type 'no_such_model'"),
        ({"hidden_size": "wide"}, "model"),
        ({"num_attention_heads": 0}, "model"),
    ],
)
def test_architectures_that_cannot_be_built(config: dict[str, Any], message: str) -> None:
    with pytest.raises(MeshError, match=message):
        random_model(**config)


def test_a_misspelt_config_key_is_refused() -> None:
    with pytest.raises(RecipeError, match="llama has no key 'num_hiden_layers'"):
        random_model(num_hiden_layers=3)


def test_remote_code_is_not_run(tmp_path: Path) -> None:
    config = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text("raise SystemExit('ran')")
    with pytest.raises(MeshError, match="brings its own Python code, which is not run"):
        load(tmp_path)
