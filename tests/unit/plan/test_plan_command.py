"""`ndtrain plan` as a command: what it prints, writes and draws, and that it starts light."""

import json
import re
import xml.etree.ElementTree as ElementTree
from io import StringIO

import pytest
import yaml
from rich.console import Console

from ndtrain.errors import ExitCode, MeshError, RecipeError
from ndtrain.plan.book import facts_from_book
from ndtrain.plan.decide import decide
from ndtrain.plan.machines import Machines
from ndtrain.plan.plan_command import plan
from ndtrain.plan.planning import plan_recipe
from ndtrain.plan.tables import memory_table, mesh_table, time_table
from ndtrain.recipe.load import load_recipe


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "none"))
    monkeypatch.setenv("NO_COLOR", "1")
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "# mine\nbase_model: meta-llama/Llama-3.1-8B  # the model\n"
        "datasets:\n  - path: synthetic\nlearning_rate: 1e-5\nsequence_len: 131072\n"
        "dp_shard_size: 8\n"
    )
    return path


def test_the_tables_and_the_reason_are_printed(recipe, capsys):
    assert plan(recipe, world_size=16, gpu="h100-80", nodes=2, details=True) == ExitCode.OK
    out = capsys.readouterr().out

    assert "Llama-3.1-8B (from the book, 2026-" in out
    assert "16 × h100-80 (79 GiB, 989 bf16 TFLOP/s) in 2 nodes over ib-ndr, nvlink4" in out
    assert out.startswith(
        "30 meshes are possible, 25 fit; all hold 8 rows a step.\n"
        "5 more left out: 16 data ranks do not divide 8 rows.\n"
    )
    for title in ("Meshes, best first", "Memory of one GPU, GiB", "Time of a step, ms", "Sent by"):
        assert title in out
    assert "this is arithmetic, not measurement" in out
    assert "The first " in out or "Only the first fits." in out


def test_the_guides_own_number_and_what_removes_it(recipe, capsys):
    plan(recipe, world_size=8, gpu="h100-80")

    assert (
        "attention scores written out would take 1.00 TiB a layer and row (32 heads × 131,072² × "
        "2 bytes); fused attention never writes them, and cp "
    ) in capsys.readouterr().out


def test_the_recipe_as_it_stands_is_compared(recipe, capsys):
    plan(recipe, overrides=["sequence_len=8192"], world_size=8, gpu="h200")

    out = capsys.readouterr().out
    assert "The recipe as it stands (dp_replicate 1 × dp_shard 8 × cp 1 × tp 1 = 8 ranks): " in out
    assert "1*" in out  # its mesh is the first of the list
    assert "Meshes, best first; * the recipe's own" in out


def test_no_gpu_named_or_found_is_said(recipe, capsys):
    plan(recipe, world_size=8)

    assert "No GPU was named or found: assumed." in capsys.readouterr().out


def test_a_recipe_for_a_cpu_is_not_promised_the_speed_of_a_gpu_without_a_word(recipe, capsys):
    plan(recipe, overrides=["device=cpu"], world_size=8)

    assert (
        "trains on a CPU, and these figures are not its own: --measure" in capsys.readouterr().out
    )


def test_what_a_recipe_needs_on_this_machines_cpu_is_told_beside_the_assumed_gpu(recipe, capsys):
    small = ["base_model=HuggingFaceTB/SmolLM2-135M", "sequence_len=512", "dp_shard_size=1"]
    plan(recipe, overrides=small, world_size=1)

    line = next(one for one in capsys.readouterr().out.splitlines() if "machine's CPU" in one)
    needed = re.fullmatch(r"On this machine's CPU it needs (\d+\.\d) GiB\.", line)
    assert needed is not None
    assert 1 < float(needed[1]) < 8


def test_a_memory_size_borrows_rates_and_says_whose(recipe, capsys):
    plan(recipe, world_size=8, gpu="48GB")

    assert "8 × GPUs of 47 GiB with the rates of rtx-a6000" in capsys.readouterr().out


def test_parts_are_shown_where_they_are_asked_for(recipe, capsys):
    plan(recipe, world_size=8, gpu="h100-80")

    out = capsys.readouterr().out
    assert "Meshes, best first" in out
    for title in ("Memory of one", "Time of a step", "Sent by one", "exch. exchange buffers"):
        assert title not in out


@pytest.mark.parametrize("length", [512, 131072])
def test_the_tables_fit_eighty_columns_whole(recipe, length):
    loaded = load_recipe(
        recipe,
        [f"sequence_len={length}", "dp_shard_size=256", "gradient_accumulation_steps=16"],
        check=False,
    )
    planned = plan_recipe(loaded, Machines(256, "h100-80"), assumed_gpu="h100-80")
    shown = planned.candidates
    assert len(shown) > 50
    console = Console(width=80, no_color=True, record=True, file=StringIO())
    console.print(mesh_table(shown, planned.own))
    console.print(memory_table(shown))
    console.print(time_table(shown))
    lines = console.export_text().splitlines()

    assert [line for line in lines if "…" in line] == []
    assert max(len(line) for line in lines) <= 80
    head = next(place for place, line in enumerate(lines) if line.strip().startswith("#"))
    assert " ".join(lines[head].split()) == (
        "# repl. shard cp tp micro accum recompute GiB tokens/s fits"
    )
    for number, candidate in enumerate(shown, 1):
        row = lines[head + 1 + number].split()
        assert row[0].rstrip("*") == str(number)
        assert row[1:5] == [str(size) for size in candidate.parallel.sizes]
        assert row[9] == f"{candidate.tokens_per_second:,.0f}"


def test_what_does_not_fit_says_how_much_is_missing_and_what_would_do(recipe, capsys):
    keys = ["base_model=meta-llama/Llama-3.1-70B", "sequence_len=4096", "micro_batch_size=4"]
    assert plan(recipe, overrides=keys, world_size=8, gpu="h100-80", top=2) == ExitCode.OK
    out = capsys.readouterr().out

    assert out.startswith("20 meshes are possible, 0 fit; all hold 32 rows a step.\n")
    assert "best first" not in out
    assert "Meshes, the least memory first" in out
    said = re.search(
        r"None fits: mesh 1 needs least, (\S+) GiB of each GPU, and that is (\S+) more than the "
        r"(\S+) usable\.\n",
        out,
    )
    needed, missing, usable = (float(number) for number in said.groups())
    assert needed - missing == pytest.approx(usable, abs=0.11)
    ways = re.findall(r"^  (\d)\. (.*) \(.*: (\S+) GiB, \S+ tokens/s\)$", out, re.MULTILINE)
    assert [way[:2] for way in ways] == [
        ("1", "param_dtype: bf16, optimizer_state_dtype: 8bit"),
        ("2", "16 GPUs of this kind"),
        ("3", "adapter: lora"),
    ]
    assert all(float(way[2]) <= usable for way in ways)
    assert "docs/how-to/make-it-fit.md" in out


@pytest.mark.parametrize(
    ("change", "world"),
    [(["param_dtype=bf16", "optimizer_state_dtype=8bit"], 8), ([], 16), (["adapter=lora"], 8)],
    ids=["smaller states", "more GPUs", "adapter"],
)
def test_what_would_fit_does(recipe, capsys, change, world):
    keys = ["base_model=meta-llama/Llama-3.1-70B", "sequence_len=4096", "global_batch_size=32"]
    if "adapter=lora" in change:
        change = [*change, "lora_r=16", "lora_alpha=32", "lora_target_linear=true"]
    plan(recipe, overrides=[*keys, *change], world_size=world, gpu="h100-80", as_json=True)
    found = json.loads(capsys.readouterr().out)

    assert found["fitting"] > 0
    assert found["would_fit"] == []


def test_json_has_parts_and_totals(recipe, capsys):
    assert plan(recipe, world_size=8, gpu="h100-80", top=3, as_json=True) == ExitCode.OK
    result = json.loads(capsys.readouterr().out)

    assert len(result["meshes"]) == 3
    assert result["possible"] >= 15
    first = result["meshes"][0]
    parts = {k: v for k, v in first["memory_gib"].items() if k != "total"}
    assert sum(parts.values()) == pytest.approx(first["memory_gib"]["total"])
    seconds = {k: v for k, v in first["seconds"].items() if k != "total"}
    assert sum(seconds.values()) == pytest.approx(first["seconds"]["total"])
    assert 0.1 < first["mfu"] < 0.7


def test_a_choice_is_written_into_the_recipe_and_nothing_else_changes(recipe, capsys):
    before = recipe.read_text()
    assert plan(recipe, world_size=8, gpu="h100-80", apply=1, write=recipe) == ExitCode.OK
    text = recipe.read_text()

    assert text.startswith(before[: before.index("dp_shard_size")])
    loaded = load_recipe(recipe).recipe
    sizes = (
        loaded.dp_replicate_size
        * loaded.dp_shard_size
        * loaded.context_parallel_size
        * loaded.tensor_parallel_size
    )
    assert sizes == 8
    capsys.readouterr()
    plan(recipe, world_size=8, gpu="h100-80", as_json=True)
    result = json.loads(capsys.readouterr().out)
    assert result["recipe"]["tokens_per_second"] == result["meshes"][0]["tokens_per_second"]


def test_a_choice_without_a_file_is_printed(recipe, capsys):
    plan(recipe, world_size=8, gpu="h100-80", apply=2)

    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["base_model"] == "meta-llama/Llama-3.1-8B"
    assert printed["micro_batch_size"] >= 1
    assert "micro_batch_size" not in recipe.read_text()


MESH_AND_BATCH = [
    ("micro_batch_size: 2\ngradient_accumulation_steps: 2\ndp_replicate_size: 2\n", 32),
    ("micro_batch_size: 2\nglobal_batch_size: 48\n", 48),
    ("", 8),
]


@pytest.mark.parametrize(("keys", "rows"), MESH_AND_BATCH, ids=["accumulation", "global", "none"])
def test_applying_a_mesh_keeps_the_rows_of_a_step(recipe, tmp_path, capsys, keys, rows):
    text = recipe.read_text().replace("sequence_len: 131072\n", "sequence_len: 4096\n")
    if "dp_replicate" in keys:
        text = text.replace("dp_shard_size: 8", "dp_shard_size: 4")
    recipe.write_text(text + keys)
    facts = facts_from_book("meta-llama/Llama-3.1-8B")
    assert decide(load_recipe(recipe).recipe, facts).batch.global_batch == rows

    for number in (1, 2, 5):
        applied = tmp_path / f"applied-{number}.yaml"
        plan(recipe, world_size=16, gpu="h100-80", nodes=2, apply=number, write=applied)
        out = capsys.readouterr().out
        after = decide(load_recipe(applied).recipe, facts, world_size=16)
        assert after.batch.global_batch == rows
        assert f"all hold {rows} rows a step." in out.splitlines()[0]
    assert ("global_batch_size" in keys) == ("global_batch_size" in applied.read_text())


def test_a_batch_of_the_command_line_is_written_too(recipe, tmp_path, capsys):
    applied = tmp_path / "applied.yaml"
    given = ["global_batch_size=24", "sequence_len=4096"]
    plan(recipe, overrides=given, world_size=8, gpu="h200", apply=1, write=applied)

    assert load_recipe(applied).recipe.global_batch_size == 24


@pytest.mark.parametrize(
    ("written", "given", "rows"),
    [
        ("gradient_accumulation_steps: 2", ["global_batch_size=24"], 24),
        ("global_batch_size: 16", ["gradient_accumulation_steps=3"], 24),
    ],
)
def test_a_batch_in_the_other_form_takes_the_place_of_that_in_the_file(
    recipe, tmp_path, written, given, rows
):
    recipe.write_text(recipe.read_text() + written + "\n")
    emptied = f"{written.split(':')[0]}=null"
    applied = tmp_path / "applied.yaml"
    given = [*given, emptied, "sequence_len=4096"]
    plan(recipe, overrides=given, world_size=8, gpu="h200", apply=1, write=applied)

    facts = facts_from_book("meta-llama/Llama-3.1-8B")
    assert decide(load_recipe(applied).recipe, facts).batch.global_batch == rows


def test_an_open_shard_size_takes_the_ranks_given(recipe, capsys):
    recipe.write_text(recipe.read_text().replace("dp_shard_size: 8\n", "micro_batch_size: 3\n"))
    plan(recipe, world_size=16, gpu="h200", as_json=True)

    assert json.loads(capsys.readouterr().out)["rows_per_step"] == 48


def test_seven_ranks_say_why_there_is_one_mesh_or_none(recipe, capsys):
    thirty_two = ["global_batch_size=32", "sequence_len=4096"]
    plan(recipe, overrides=thirty_two, world_size=7, gpu="h200")

    assert capsys.readouterr().out.startswith(
        "1 mesh is possible, 1 fits; all hold 32 rows a step.\n"
        "2 more left out: 7 data ranks do not divide 32 rows.\n"
    )
    short = ["global_batch_size=32", "sequence_len=8"]
    with pytest.raises(MeshError) as caught:
        plan(recipe, overrides=short, world_size=7, gpu="h200")
    assert str(caught.value).endswith(
        "no mesh of 7 ranks works for meta-llama/Llama-3.1-8B with 32 rows a step: 7 data ranks "
        "do not divide 32 rows. Use a global_batch_size with more divisors, or another number of "
        "ranks."
    )


def test_the_recipes_own_micro_batch_is_tried(recipe, capsys):
    own = ["micro_batch_size=5", "global_batch_size=10", "sequence_len=512", "dp_shard_size=2"]
    plan(recipe, overrides=own, world_size=2, gpu="h200", as_json=True)
    result = json.loads(capsys.readouterr().out)

    assert result["meshes"][0]["micro_batch_size"] == 5
    assert result["meshes"][0] == result["recipe"]


def test_a_picture_is_drawn_of_meshes_that_cannot_hold_the_batch(recipe, tmp_path, capsys):
    keys = ["global_batch_size=10", "sequence_len=4096", "dp_shard_size=null"]
    plan(recipe, overrides=keys, world_size=8, gpu="h100-80", plot=tmp_path / "mesh.svg")

    ElementTree.parse(tmp_path / "mesh.svg")


def test_a_number_that_is_not_in_the_list_is_refused(recipe):
    with pytest.raises(RecipeError, match="--apply: there is no mesh 99: "):
        plan(recipe, world_size=8, gpu="h100-80", apply=99)


def test_a_picture_is_drawn(recipe, tmp_path, capsys):
    plan(recipe, world_size=8, gpu="h100-80", plot=tmp_path / "mesh.svg")
    text = (tmp_path / "mesh.svg").read_text()

    ElementTree.fromstring(text)
    for title in ("Which model size fits?", "Which sequence length fits?", "pcie4"):
        assert title in text
