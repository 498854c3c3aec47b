"""How the program starts: light, from every door, and quiet when its reader goes away."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ndtrain import __version__, cli
from ndtrain.errors import CheckpointError
from ndtrain.recipe.catalog import examples_folder, list_examples

HEAVY = ("torch", "transformers", "datasets", "peft", "accelerate", "numpy", "pandas")
QUICKSTART = str(examples_folder() / "quickstart.yaml")
ROOT = Path(__file__).resolve().parents[2]


def naming_loaded(
    arguments: list[str], names: tuple[str, ...]
) -> "subprocess.CompletedProcess[str]":
    """Run a command in a process that then says on stderr which of the modules it loaded."""
    code = (
        "import sys; from ndtrain.cli import run\n"
        f"code = run({arguments!r})\n"
        f"print([name for name in {names!r} if name in sys.modules], file=sys.stderr)\n"
        "sys.exit(code)"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["train", "--help"],
        ["recipes"],
        ["recipes", "show", "quickstart"],
        ["schema"],
        ["schema", "--field", "datasets"],
        ["validate", QUICKSTART],
        ["validate", QUICKSTART, "--json"],
        ["plan", QUICKSTART, "--world-size", "2", "--gpu", "h100-80"],
        ["plan", QUICKSTART, "--world-size", "256", "--gpu", "h100-80"],
        ["train", QUICKSTART, "--dry-run"],
    ],
    ids=" ".join,
)
def test_light_commands_import_nothing_heavy(arguments: list[str]) -> None:
    done = naming_loaded(arguments, HEAVY)
    assert (done.returncode, done.stderr) == (0, "[]\n")


@pytest.mark.parametrize(
    ("arguments", "unneeded"),
    [(["recipes"], ("rich", "pydantic", "yaml")), (["validate", QUICKSTART], ("rich",))],
    ids=["recipes", "validate"],
)
def test_what_a_quick_command_does_not_need_is_not_loaded(
    arguments: list[str], unneeded: tuple[str, ...]
) -> None:
    done = naming_loaded(arguments, unneeded)
    assert (done.returncode, done.stderr) == (0, "[]\n")


def test_without_a_command_the_help_is_shown(ndtrain) -> None:
    done = ndtrain()
    assert done.returncode == 2
    assert "Usage: ndtrain" in done.stderr


def test_help_lists_every_command_in_its_section_without_loading_rich() -> None:
    done = naming_loaded(["--help"], ("rich", "pydantic"))
    assert done.stderr == "[]\n"
    sections = {
        lines[0]: [line.split()[0] for line in lines[1:] if line[2] != " "]
        for lines in (block.splitlines() for block in done.stdout.strip().split("\n\n"))
        if lines[0].endswith(":") and lines[0] != "Options:"
    }
    assert sections == {
        "Before the run:": ["validate", "plan", "preprocess", "recipes"],
        "The run:": ["train", "evaluate", "parity", "launch"],
        "After the run:": ["generate", "export", "merge", "compare"],
        "About ndtrain:": ["schema", "env"],
    }


@pytest.mark.parametrize(
    ("given", "ordered", "debug"),
    [
        (["train", "r.yaml"], ["train", "r.yaml"], False),
        (["train", "--debug", "r.yaml"], ["--debug", "train", "r.yaml"], True),
        (["--debug", "recipes", "show", "--debug"], ["--debug", "recipes", "show"], True),
        (["show", "--", "--debug"], ["show", "--", "--debug"], False),
    ],
)
def test_debug_is_heard_wherever_it_stands(given, ordered, debug) -> None:
    assert cli.hoist_debug(given) == (ordered, debug)


@pytest.mark.parametrize("door", [["-m", "ndtrain"], [str(ROOT / "cli.py")]], ids=["-m", "cli.py"])
def test_every_door_leads_to_the_same_program(door: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, *door, "--version"], capture_output=True, text=True, cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (0, f"ndtrain {__version__}\n")


def test_the_checkout_runs_without_being_installed(tmp_path: Path) -> None:
    """-S hides site-packages, so only what cli.py itself puts on the path can find ndtrain."""
    code = (
        "import sys, runpy; sys.path.extend(sys.argv[1:]); sys.argv = ['cli.py', '--version'];"
        f"runpy.run_path({str(ROOT / 'cli.py')!r}, run_name='__main__')"
    )
    site = [path for path in sys.path if path.endswith("site-packages")]
    done = subprocess.run(
        [sys.executable, "-S", "-c", code, *site], capture_output=True, text=True, cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (0, f"ndtrain {__version__}\n")


def test_recipes_lists_every_example_and_says_what_is_next(ndtrain) -> None:
    lines = ndtrain("recipes").stdout.splitlines()
    assert lines[0].split() == ["NAME", "MODEL", "METHOD", "MESH", "GPUS", "TITLE"]
    assert [line.split()[0] for line in lines[1:-2]] == [one.name for one in list_examples()]
    assert lines[-1] == "Next: ndtrain recipes copy quickstart"
    assert ndtrain("recipes", "list").stdout.splitlines() == lines


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("ndtrain recipes show qwen3-8", ["qwen3-8b-full"]),
        ("ndtrain recipes copy quick", ["quickstart"]),
        ("ndtrain launch ku", ["kubernetes", "kubeflow"]),
        ("ndtrain prep", ["preprocess"]),
    ],
)
def test_a_shell_completes_commands_and_the_names_of_recipes(
    ndtrain, typed: str, offered: list[str]
) -> None:
    place = str(len(typed.split()) - 1)
    done = ndtrain(_NDTRAIN_COMPLETE="complete_bash", COMP_WORDS=typed, COMP_CWORD=place)
    assert done.stdout.split() == offered


def test_a_copied_recipe_validates(ndtrain, tmp_path: Path) -> None:
    copied = ndtrain("recipes", "copy", "quickstart")
    assert copied.returncode == 0
    assert copied.stdout.splitlines()[-1] == (
        "Next: ndtrain validate quickstart.yaml && ndtrain train quickstart.yaml"
    )
    assert ndtrain("validate", "quickstart.yaml").returncode == 0


def test_show_prints_the_file(ndtrain) -> None:
    assert ndtrain("recipes", "show", "quickstart").stdout == Path(QUICKSTART).read_text()


def test_schema_is_json(ndtrain) -> None:
    assert json.loads(ndtrain("schema").stdout)["title"] == "ndtrain recipe"


def test_a_reader_that_goes_away_is_no_failure() -> None:
    shell = f"'{sys.executable}' -m ndtrain schema | head -n 1"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60)
    assert done.stdout == "{\n"
    assert "Traceback" not in done.stderr
    assert "Error" not in done.stderr


def test_ctrl_c_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ndtrain.commands.recipes.list_examples", interrupted)
    assert cli.run(["recipes"]) == 130


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (CheckpointError("no room.", where="/x"), 5, "/x: no room."),
        (OSError(28, "No space left on device", "/x"), 5, "/x: No space left on device. Free"),
        (MemoryError(), 6, "ran out of memory"),
        (KeyError("x"), 1, "KeyError: 'x'\nThis is a fault of ndtrain"),
    ],
)
def test_what_reaches_the_top_becomes_a_message_and_a_code(
    error: Exception, code: int, words: str
) -> None:
    message, found = cli.explain_failure(error)
    assert found == code
    assert message.startswith(words) or words in message


def test_an_unknown_failure_is_one_message_without_debug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr("ndtrain.commands.recipes.list_examples", broken)
    assert cli.run(["recipes"]) == 1
    assert capsys.readouterr().err.splitlines()[0] == "ZeroDivisionError: by zero"
    assert cli.run(["recipes", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err
