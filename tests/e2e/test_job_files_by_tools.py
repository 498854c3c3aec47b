"""Job files as the schedulers' own tools see them; Ray really runs one, on two local nodes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ndtrain.launch.job_files import write_job
from ndtrain.recipe.load import LoadedRecipe, load_recipe

HERE = Path(__file__).parent
TOOLS = HERE.parents[1] / "build" / "launchers" / "bin"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not TOOLS.is_dir(), reason="needs the tools of `make launcher-tools`"),
]

RECIPE = """\
model_config: {model_type: llama, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2,
  num_key_value_heads: 2, intermediate_size: 32, vocab_size: 300}
tokenizer_config: bytes
datasets:
  - path: synthetic
    length: 8
    sequence_length: 32
    min_input_id: 1
    max_input_id: 255
device: cpu
dp_replicate_size: 2
sequence_len: 32
learning_rate: 1e-3
max_steps: 2
export: false
"""

# Two raylets on this machine, each with one GPU on paper, then the script of the job file.
TWO_NODES = """\
import os, subprocess, sys
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 1})
cluster.add_node(num_cpus=2, num_gpus=1)
environ = {**os.environ, "RAY_ADDRESS": cluster.address}
code = subprocess.run([sys.executable, sys.argv[1]], env=environ).returncode
cluster.shutdown()
sys.exit(code)
"""


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedRecipe:
    path = tmp_path / "my recipe.yaml"
    path.write_text(RECIPE)
    return load_recipe(path, [f"output_dir={tmp_path}/it's a run"])


def written(kind: str, loaded: LoadedRecipe) -> Path:
    file = loaded.path.parent / f"job.{kind}"
    write_job(kind, loaded, nodes=2, gpus_per_node=1, write=file)
    return file


def run_tool(*words: object, **variables: str) -> str:
    done = subprocess.run(
        [str(TOOLS / str(words[0])), *map(str, words[1:])],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_shellcheck_has_nothing_to_say_about_the_sbatch_file(loaded: LoadedRecipe) -> None:
    assert run_tool("shellcheck", "--severity=style", written("slurm", loaded)) == ""


@pytest.mark.parametrize(
    ("kind", "custom"), [("kubernetes", ["JobSet"]), ("kubeflow", ["TrainingRuntime", "TrainJob"])]
)
def test_kubernetes_knows_every_field(kind: str, custom: list[str], loaded: LoadedRecipe) -> None:
    out = run_tool("python", HERE / "kubernetes_kinds.py", written(kind, loaded))
    assert out.split() == ["ConfigMap", "PersistentVolumeClaim", *custom]


def test_skypilot_loads_its_task(loaded: LoadedRecipe, tmp_path: Path) -> None:
    file = written("skypilot", loaded).rename(tmp_path / "job.sky.yaml")
    code = (
        "import json, sky, sys\n"
        "task = sky.Task.from_yaml(sys.argv[1])\n"
        "(gpus,) = (one.accelerators for one in task.resources)\n"
        "print(json.dumps([task.num_nodes, gpus, task.run]))"
    )
    out = run_tool("python", "-c", code, file, HOME=str(tmp_path))
    nodes, gpus, run = json.loads(out.splitlines()[-1])
    assert (nodes, gpus) == (2, {"H100": 1})
    assert "ndtrain train" in run


def test_ray_trains_on_two_nodes(loaded: LoadedRecipe, tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "ndtrain").write_text(f'#!/bin/bash\nexec {sys.executable} -m ndtrain "$@"\n')
    (programs / "ndtrain").chmod(0o755)
    file = written("ray", loaded)
    run_tool(
        "python",
        "-c",
        TWO_NODES,
        file,
        PATH=f"{programs}:{os.environ['PATH']}",
        OMP_NUM_THREADS="1",
        XDG_CACHE_HOME=str(tmp_path / "cache"),
        RAY_USAGE_STATS_ENABLED="0",
    )
    lines = (tmp_path / "it's a run" / "metrics.jsonl").read_text().splitlines()
    steps = [event["step"] for event in map(json.loads, lines) if event["event"] == "step"]
    assert steps == [1, 2]
    plan = json.loads((tmp_path / "it's a run" / "plan.json").read_text())
    assert plan["parallel"]["dp_replicate"] == 2
