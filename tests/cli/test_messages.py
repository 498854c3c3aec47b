"""What a user reads when something is wrong: one message, its place, the exit code."""

from pathlib import Path

import pytest

from ndtrain.recipe.catalog import examples_folder

FIVE_MISTAKES = """\
base_model: package://ndtrain/examples/data/no-such-model
learning_rate: 1e-4
dp_shard_sise: 1
datasets:
  - path: missing.jsonl
    feild_messages: turns
num_epochs: two
seed: 1
seed: 2
"""


@pytest.mark.parametrize("command", ["validate", "train", "preprocess", "plan"])
def test_five_mistakes_give_five_lines_with_places_and_fixes(
    ndtrain, tmp_path: Path, command: str
) -> None:
    (tmp_path / "bad.yaml").write_text(FIVE_MISTAKES)
    (tmp_path / "missing.json").write_text("[]")
    done = ndtrain(command, "bad.yaml")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "bad.yaml:3:1: dp_shard_sise: unknown key; did you mean 'dp_shard_size'?",
        "bad.yaml:5:5: datasets[0].path: the file 'missing.jsonl' does not exist. "
        "Did you mean 'missing.json'?",
        "bad.yaml:6:5: datasets[0].feild_messages: unknown key; did you mean 'field_messages'?",
        "bad.yaml:7:1: num_epochs: expected a number above 0, not 'two'.",
        "bad.yaml:9:1: seed: duplicate key, given in lines 8 and 9. Keep one of them.",
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], "Did you mean 'train'"),
        (["validate"], "Missing argument 'RECIPE'"),
        (["validate", "recipe.yaml", "--wrold-size", "2"], "No such option"),
        (["validate", "recipe.yaml", "--world-size", "two"], "Invalid value for '--world-size'"),
        (["train", "recipe.yaml", "--max-steps", "0"], "Invalid value for '--max-steps'"),
        (["train", "recipe.yaml", "--max-time", "soon"], "'soon' is not a duration"),
        (["validate", "gone.yaml"], "gone.yaml: there is no such recipe file."),
        (["validate", "recipe.yaml", "--from", "trl"], "Use --from axolotl."),
        (["validate", "recipe.yaml", "--set", "seed"], "'seed' is not of the form KEY=VALUE"),
        (["validate", "recipe.yaml", "--set", "sed=1"], "did you mean 'seed'?"),
        (["validate", "."], ".: is a folder. Name the recipe file in it: recipe.yaml."),
        (["evaluate", "."], ".: is a folder. Name the recipe file in it: recipe.yaml."),
        (["train", "recpe.yaml"], "there is no such recipe file. Did you mean recipe.yaml?"),
        (["train", "recipe"], "there is no such recipe file. Did you mean recipe.yaml?"),
        (
            ["train", "quickstart"],
            "quickstart: there is no such recipe file. It is a bundled recipe: "
            "`ndtrain recipes copy quickstart` writes it to edit.",
        ),
        (
            ["plan", "examples/llama-3.1-8b-lora.yaml"],
            "It is a bundled recipe: `ndtrain recipes copy llama-3.1-8b-lora` writes it to edit.",
        ),
        (
            ["validate", "quickstrt.yaml"],
            "Did you mean the bundled recipe 'quickstart'? "
            "`ndtrain recipes copy quickstart` writes it.",
        ),
        (["plan", "recipe.yaml", "--plot", "rows.jsonl/x.svg"], "Name another file with --plot."),
        (["launch", "pbs", "recipe.yaml"], "'SCHEDULER': 'pbs' is none of slurm, kubernetes"),
        (["train", "recipe.yaml", "--sweep", "gone.yaml"], "there is no such sweep file."),
        (
            ["train", "recipe.yaml", "--sweep", "recpe.yaml"],
            "there is no such sweep file. Did you mean recipe.yaml?",
        ),
        (["recipes", "show", "quikstart"], "Did you mean 'quickstart'?"),
        (["recipes", "copy", "quickstart", "recipe.yaml"], "Overwrite it with --force."),
        (["schema", "--field", "datasets.pth"], "did you mean 'path'?"),
    ],
)
def test_usage_errors_exit_with_2(ndtrain, recipe: Path, arguments: list[str], words: str) -> None:
    done = ndtrain(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("where", [0, 1, 2])
def test_debug_goes_anywhere_and_shows_the_traceback(ndtrain, where: int) -> None:
    arguments = ["validate", "gone.yaml"]
    arguments.insert(where, "--debug")
    done = ndtrain(*arguments)
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("gone.yaml: there is no such recipe file.")


@pytest.mark.parametrize("name", ["gone/model", "./gone"])
def test_a_missing_model_exits_with_3(ndtrain, recipe: Path, name: str) -> None:
    recipe.write_text(
        recipe.read_text().replace(
            recipe.read_text().partition("tokenizer_config")[0], f"base_model: {name}\n"
        )
    )
    done = ndtrain("validate", "recipe.yaml", HF_HUB_OFFLINE="1", HF_HOME=str(recipe.parent))
    assert done.returncode == 3
    assert name in done.stderr
    assert "Traceback" not in done.stderr


def test_sizes_that_do_not_fit_the_model_exit_with_3(ndtrain, recipe: Path) -> None:
    done = ndtrain("validate", "recipe.yaml", "--set", "tensor_parallel_size=3")
    assert done.returncode == 3
    assert "4" in done.stderr
    assert "tensor_parallel_size" in done.stderr


def test_a_recipe_saved_on_windows_is_read(ndtrain, recipe: Path) -> None:
    text = recipe.read_text().replace("\n", "\r\n") + 'wandb_project: "Größe"\r\n'
    recipe.write_bytes(text.encode("utf-8-sig"))
    done = ndtrain("validate", "recipe.yaml", LC_ALL="C", PYTHONUTF8="0")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_recipe_in_another_encoding_names_the_byte(ndtrain, recipe: Path) -> None:
    recipe.write_bytes(recipe.read_bytes() + b"wandb_project: Gr\xf6\xdfe\n")
    done = ndtrain("validate", "recipe.yaml")
    assert done.returncode == 2
    assert done.stderr == (
        "recipe.yaml:8:18: byte '0xf6' is not UTF-8 text. Save the file as UTF-8.\n"
    )


def test_settings_of_other_tools_on_this_machine_change_nothing(ndtrain, recipe: Path) -> None:
    folder = recipe.parent / "accelerate"
    folder.mkdir()
    (folder / "default_config.yaml").write_text(
        "distributed_type: FSDP\nnum_processes: 8\nmixed_precision: fp16\n"
    )
    plain = ndtrain("validate", "recipe.yaml", "--json")
    beside = ndtrain("validate", "recipe.yaml", "--json", HF_HOME=str(recipe.parent))
    assert plain.returncode == 0
    assert plain.stdout == beside.stdout


def test_a_foreign_recipe_is_reported_key_by_key(ndtrain, recipe: Path) -> None:
    recipe.write_text(recipe.read_text() + "flash_attention: true\ndeepspeed: zero3.json\n")
    done = ndtrain("validate", "recipe.yaml", "--from", "axolotl")
    assert done.returncode == 2
    assert "recipe.yaml:8:1: adapted flash_attention: not needed here" in done.stdout
    assert "recipe.yaml:9:1: stops   deepspeed: known from Axolotl" in done.stdout


def test_examples_validate(ndtrain) -> None:
    done = ndtrain("validate", str(examples_folder() / "quickstart.yaml"))
    assert (done.returncode, done.stderr) == (0, "")
