import json
import resource
from pathlib import Path

import pytest

from ndtrain.errors import CheckpointError, ExitCode
from ndtrain.report.run_directory import RunDirectory


def test_files_stand_where_scripts_expect_them(tmp_path):
    run = RunDirectory(tmp_path)
    names = {
        "recipe": "recipe.yaml",
        "resolved": "resolved.yaml",
        "plan": "plan.json",
        "env": "env.json",
        "status": "status.json",
        "metrics": "metrics.jsonl",
        "loss_svg": "loss.svg",
        "profile": "profile.txt",
        "trace": "trace.json.gz",
        "logs": "logs",
        "checkpoints": "checkpoints",
        "export": "export",
        "report_html": "report.html",
    }
    assert {key: getattr(run, key).relative_to(tmp_path).as_posix() for key in names} == names
    assert run.log_of(3) == tmp_path / "logs" / "rank-3.log"


def test_create_makes_the_folders_and_leaves_nothing_else(tmp_path):
    run = RunDirectory(tmp_path / "a" / "b")
    run.create()
    run.create()
    assert sorted(path.name for path in run.path.iterdir()) == ["checkpoints", "logs"]


def test_create_refuses_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(CheckpointError) as caught:
        RunDirectory(tmp_path / "file" / "run").create()
    assert caught.value.exit_code == ExitCode.CHECKPOINT == 5
    assert caught.value.where == str(tmp_path / "file" / "run")
    assert caught.value.message == "cannot be written: Not a directory."
    assert caught.value.hint == (
        f"'{tmp_path / 'file'}' is a file, not a folder: set output_dir to another folder."
    )


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (
            "file",
            "cannot be written: File exists. It is a file, not a folder: set output_dir to "
            "another folder.",
        ),
        (
            "/proc/run",
            "cannot be written: No such file or directory. '/proc' takes no new files or "
            "folders: set output_dir to another folder.",
        ),
    ],
)
def test_create_advises_what_fits_the_place(tmp_path, place, message):
    (tmp_path / "file").write_text("not a folder")
    folder = tmp_path / place
    with pytest.raises(CheckpointError) as caught:
        RunDirectory(folder).create()
    assert str(caught.value) == f"{folder}: {message}"


def test_create_finds_out_that_the_disk_is_full(tmp_path):
    run = RunDirectory(tmp_path / "run")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(CheckpointError, match="cannot be written: File too large"):
            run.create()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("place", [".", "..", "/", "../../above"])
def test_the_folder_where_somebody_stands_is_not_moved(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "above" / "here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "above" / "here")
    with pytest.raises(CheckpointError, match="where you are, or one above it"):
        RunDirectory(Path(place)).set_aside()


def test_set_aside_takes_the_next_free_number(tmp_path):
    run = RunDirectory(tmp_path / "quick")
    assert run.set_aside() is None
    for number in (1, 2, 3):
        run.create()
        run.write_recipe(f"seed: {number}\n")
        assert run.set_aside() == tmp_path / f"quick.{number}"
    assert not run.path.exists()
    assert (tmp_path / "quick.2" / "recipe.yaml").read_text() == "seed: 2\n"


def test_recipe_is_kept_byte_for_byte(run_dir):
    text = "# Grüße\nlearning_rate: 1e-4\r\nseed: 1"
    run_dir.write_recipe(text)
    assert run_dir.recipe.read_bytes() == text.encode()


def test_plan_holds_a_row_for_each_rank(run_dir, plan):
    run_dir.write_plan(plan, hosts=("alpha", "beta"))
    content = json.loads(run_dir.plan.read_text())
    assert content["v"] == 1
    assert content["parallel"]["dp_shard"] == 2
    assert content["world_size"] == 2
    assert content["global_batch"] == 4
    assert content["notices"] == ["a notice"]
    assert content["ranks"] == [
        {"rank": 0, "host": "alpha", "dp_replicate": 0, "dp_shard": 0, "cp": 0, "tp": 0},
        {"rank": 1, "host": "beta", "dp_replicate": 0, "dp_shard": 1, "cp": 0, "tp": 0},
    ]


def test_env_names_versions_and_nothing_of_the_user(run_dir, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret_token")
    monkeypatch.setenv("USER", "somebody_special")
    run_dir.write_env()
    text = run_dir.env.read_text()
    content = json.loads(text)
    assert content["packages"]["torch"].startswith("2.")
    assert content["cpu_count"] >= 1
    assert content["host_memory_gib"] > 0
    assert "secret" not in text
    assert "somebody_special" not in text


def test_a_write_that_fails_leaves_the_old_file(run_dir):
    run_dir.write_recipe("seed: 1\n")
    lone = "seed: \ud800\n"  # no encoding has this
    with pytest.raises(UnicodeEncodeError):
        run_dir.write_recipe(lone)
    assert run_dir.recipe.read_text() == "seed: 1\n"


def test_writing_into_a_folder_that_is_gone_is_a_checkpoint_error(tmp_path):
    run = RunDirectory(tmp_path / "gone")
    with pytest.raises(CheckpointError) as caught:
        run.write_recipe("seed: 1\n")
    assert caught.value.where == str(run.recipe)
