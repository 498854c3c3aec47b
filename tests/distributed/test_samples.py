"""Sample answers are the model's own greedy answers, the same on every mesh and every rank."""

from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_forked

from ndtrain.errors import RecipeError
from ndtrain.model.build import build_model
from ndtrain.model.tokenizer import load_tokenizer
from ndtrain.model.weights import load_weights
from ndtrain.parallel.mesh import build_mesh
from ndtrain.plan.model_source import find_model
from ndtrain.plan.plan import ParallelPlan
from ndtrain.recipe.schema import Recipe
from ndtrain.train.assemble import assemble
from ndtrain.train.samples import MAX_NEW_TOKENS, Sampler, as_batch, encode_prompts

PROMPTS = ("Say hello.", "Count to three, slowly, please.")


def recipe(tied: bool = True, **keys: Any) -> Recipe:
    # large weights, so that the likeliest token is far ahead of the next
    config = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 320,
        "initializer_range": 0.3,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 512,
    }
    values = {"learning_rate": 1e-3, "sequence_len": 256, "sample_prompts": PROMPTS, **keys}
    return Recipe(model_config=config, tokenizer_config="bytes", device="cpu", **values)


def plain_answers(tied: bool) -> dict[str, str]:
    """The same by plain transformers, one prompt after the other."""
    asked = recipe(tied)
    source = find_model(asked)
    model = build_model(source, asked).eval()
    load_weights(model, source, seed=asked.seed, device=torch.device("cpu"))
    tokenizer = load_tokenizer(source, asked)
    answers = {}
    for prompt in encode_prompts(asked, tokenizer):
        ids = list(prompt.ids)
        for _ in range(MAX_NEW_TOKENS):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
            ids.append(int(logits[: len(tokenizer)].argmax()))
            if ids[-1] == tokenizer.eos_token_id:
                break
        answers[prompt.text] = tokenizer.decode(ids[len(prompt.ids) :], skip_special_tokens=True)
    return answers


def sampled(rank: int, tied: bool, plans: list[ParallelPlan]) -> list[tuple[dict[str, str], bool]]:
    found = []
    for plan in plans:
        source = find_model(recipe(tied))
        engine = assemble(recipe(tied), source, build_mesh(plan, torch.device("cpu")))
        sampler = Sampler(engine, source)
        first, again = (sampler.answer(stopped=lambda: None) for _ in range(2))
        assert first == again
        found.append((first, engine.trainable.training))
    return found


MESHES = {
    1: [ParallelPlan()],
    2: [
        ParallelPlan(dp_shard=2),
        ParallelPlan(tp=2),
        ParallelPlan(cp=2, cp_method="ulysses"),
        ParallelPlan(cp=2, cp_method="allgather"),
    ],
    4: [
        ParallelPlan(cp=2, tp=2, cp_method="allgather"),
        ParallelPlan(dp_replicate=2, dp_shard=2),
    ],
}


@pytest.mark.parametrize(
    ("ranks", "tied"),
    [
        pytest.param(1, True, id="1-tied"),
        pytest.param(1, False, id="1-untied"),
        pytest.param(2, True, id="2-tied"),
        pytest.param(2, False, id="2-untied", marks=pytest.mark.slow),
        pytest.param(4, True, id="4-tied", marks=pytest.mark.slow),
        pytest.param(4, False, id="4-untied", marks=pytest.mark.slow),
    ],
)
def test_every_mesh_answers_as_plain_transformers_does(
    ranks: int, tied: bool, tmp_path: Path
) -> None:
    expected = plain_answers(tied)
    assert list(expected) == list(PROMPTS)
    assert len(set(expected.values())) == len(PROMPTS)
    for by_mesh in run_forked(ranks, tmp_path, sampled, tied, MESHES[ranks]):
        for answers, still_training in by_mesh:
            assert answers == expected
            assert still_training


def test_rows_of_a_batch_are_padded_by_a_document_of_their_own() -> None:
    batch = as_batch([[5, 6, 7], [8]], 4)
    assert batch.input_ids.tolist() == [[5, 6, 7, 0], [8, 0, 0, 0]]
    assert batch.documents.tolist() == [[0, 0, 0, 1], [0, 1, 1, 1]]
    assert batch.targets.unique().tolist() == [-100]


def test_the_end_of_a_long_prompt_is_kept() -> None:
    short = recipe(sequence_len=MAX_NEW_TOKENS + 10)
    tokenizer = load_tokenizer(find_model(short), short)
    whole = encode_prompts(recipe(), tokenizer)
    for cut, full in zip(encode_prompts(short, tokenizer), whole, strict=True):
        assert cut.ids == full.ids[-10:]


def test_a_prompt_that_the_template_refuses_is_named() -> None:
    refusing = recipe(sample_prompts=("fine", "no"))
    tokenizer = load_tokenizer(find_model(refusing), refusing)
    tokenizer.chat_template = (
        "{% if messages[0].content == 'no' %}{{ raise_exception('not this') }}{% endif %}x"
    )
    with pytest.raises(RecipeError, match=r"sample_prompts\[1\].*not this"):
        encode_prompts(refusing, tokenizer)
