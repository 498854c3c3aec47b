"""Job files are read back by the languages they are written in, and all run the same command."""

import ast
import json
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from ndtrain.cli import app
from ndtrain.commands.launching import SCHEDULERS
from ndtrain.errors import MeshError, RecipeError
from ndtrain.launch.job_files import KINDS, JobRequest, render_job, write_job
from ndtrain.recipe.load import LoadedRecipe, load_recipe

RECIPE = """\
# A title with 'quotes', "double" ones and $HOME

model_config: {model_type: llama}
tokenizer_config: bytes
learning_rate: 1e-4
datasets:
  - path: synthetic
dp_replicate_size: 2
dp_shard_size: 4
"""


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedRecipe:
    path = tmp_path / "my recipe.yaml"
    path.write_text(RECIPE)
    return load_recipe(path, ["seed=7", "output_dir=runs/it's mine"])


def render(kind: str, loaded: LoadedRecipe, **options: str) -> str:
    return render_job(kind, JobRequest(loaded, 2, 4, "job.file", **options))


def expected_words(recipe: str) -> list[str]:
    return ["ndtrain", "train", recipe, "--set", "seed=7", "--set", "output_dir=runs/it's mine"]


def shell_words(script: str, folder: Path, **variables: str) -> list[str]:
    """What a shell script hands to `ndtrain`, told by a stand-in that writes it down."""
    stand_in = folder / "bin" / "ndtrain"
    stand_in.parent.mkdir()
    stand_in.write_text(f"#!/bin/bash\nprintf '%s\\n' \"$@\" > '{folder}/words'\n")
    stand_in.chmod(0o755)
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "activate").write_text("")
    environment = {"PATH": f"{stand_in.parent}:/usr/bin:/bin", **variables}
    done = subprocess.run(["bash", "-c", script], cwd=folder, env=environment, timeout=30)
    assert done.returncode == 0
    return ["ndtrain", *(folder / "words").read_text().splitlines()]


@pytest.mark.parametrize("kind", list(KINDS))
def test_no_place_is_left_open(kind: str, loaded: LoadedRecipe) -> None:
    assert "@@" not in render(kind, loaded)


def test_sbatch_is_sound_shell_and_asks_for_a_task_a_gpu(loaded: LoadedRecipe) -> None:
    text = render("slurm", loaded)
    checked = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    assert (checked.returncode, checked.stderr) == (0, "")
    options = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2]
        for line in text.splitlines()
        if line.startswith("#SBATCH ")
    )
    assert options["nodes"] == "2"
    assert options["ntasks-per-node"] == options["gpus-per-node"] == "4"
    assert options["signal"].startswith("USR1@")
    assert "requeue" in options
    first_command = next(
        number for number, line in enumerate(text.splitlines()) if line and not line.startswith("#")
    )
    assert all(not line.startswith("#SBATCH") for line in text.splitlines()[first_command:]), (
        "sbatch reads no options behind the first command"
    )


def test_skypilot_gives_every_node_its_number(loaded: LoadedRecipe, tmp_path: Path) -> None:
    task = yaml.safe_load(render("skypilot", loaded, gpu="A100-80GB"))
    assert set(task) == {"name", "num_nodes", "resources", "workdir", "setup", "run"}
    assert task["num_nodes"] == 2
    assert task["resources"] == {"accelerators": "A100-80GB:4"}
    words = shell_words(
        task["run"],
        tmp_path,
        SKYPILOT_NODE_IPS="10.0.0.1\n10.0.0.2",
        SKYPILOT_NUM_NODES="2",
        SKYPILOT_NODE_RANK="1",
    )
    known = expected_words(str(loaded.path))
    assert words[: len(known)] == known
    place = dict(zip(words[len(known) :: 2], words[len(known) + 1 :: 2], strict=True))
    assert place == {
        "--max-restarts": "3",
        "--nnodes": "2",
        "--node-rank": "1",
        "--rdzv-endpoint": "10.0.0.1:29400",
    }


def test_a_value_of_two_lines_stays_in_skypilots_block(
    loaded: LoadedRecipe, tmp_path: Path
) -> None:
    prompt = "default_system_message=Be brief.\n\n  Be kind."
    told = load_recipe(loaded.path, [prompt])
    task = yaml.safe_load(render("skypilot", told))
    assert shlex.split(task["run"].partition("ndtrain train")[2])[1:3] == ["--set", prompt]


def test_ray_script_is_sound_and_has_the_command(loaded: LoadedRecipe) -> None:
    tree = ast.parse(render("ray", loaded))
    values = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    assert values["NODES"] == 2
    assert values["GPUS_PER_NODE"] == 4
    assert values["COMMAND"] == [*expected_words(str(loaded.path)), "--max-restarts", "3"]


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_line_that_starts_it_can_be_pasted(kind: str, loaded: LoadedRecipe) -> None:
    text = render_job(kind, JobRequest(loaded, 2, 4, "my jobs/it's.job"))
    line = next(line for line in text.splitlines() if "start it with: " in line)
    assert shlex.split(line.partition("start it with: ")[2])[-1] == "my jobs/it's.job"


@pytest.mark.parametrize("kind", list(KINDS))
def test_sizes_that_do_not_multiply_to_the_gpus_are_refused(
    kind: str, loaded: LoadedRecipe
) -> None:
    with pytest.raises(MeshError, match="= 8 ranks, but 12 were started"):
        render_job(kind, JobRequest(loaded, 3, 4, "job.file"))


def test_an_existing_file_is_kept(loaded: LoadedRecipe, tmp_path: Path) -> None:
    target = tmp_path / "job.sbatch"
    text = write_job("slurm", loaded, nodes=2, gpus_per_node=4, write=target)
    assert target.read_text() == text
    with pytest.raises(RecipeError, match="exists already"):
        write_job("slurm", loaded, nodes=2, gpus_per_node=4, write=target)
    assert target.read_text() == text


def test_the_command_line_offers_every_kind() -> None:
    assert tuple(KINDS) == SCHEDULERS


@pytest.mark.parametrize(
    ("kind", "option", "hint"),
    [
        ("slurm", "image", "It goes with kubernetes and kubeflow."),
        ("ray", "gpu", "It goes with skypilot."),
    ],
)
def test_an_option_of_another_scheduler_is_refused(
    loaded: LoadedRecipe, kind: str, option: str, hint: str
) -> None:
    with pytest.raises(RecipeError) as raised:
        write_job(kind, loaded, nodes=2, gpus_per_node=4, write=None, options={option: "x"})
    assert str(raised.value) == f"--{option}: {kind} has no use for it. {hint}"


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_command_prints_or_writes(kind: str, loaded: LoadedRecipe, tmp_path: Path) -> None:
    words = ["launch", kind, str(loaded.path), "--nodes", "2", "--gpus-per-node", "4"]
    printed = CliRunner().invoke(app, words)
    assert printed.exit_code == 0, printed.output
    assert f"ndtrain launch {kind}" in printed.output
    target = tmp_path / "job"
    written = CliRunner().invoke(app, [*words, "--write", str(target)])
    assert written.exit_code == 0, written.output
    assert json.dumps(str(target))[1:-1] in written.output
    assert "ndtrain" in target.read_text()
