"""A written sbatch file, run by bash with a stand-in for srun that starts two local ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

from ndtrain.launch.job_files import write_job
from ndtrain.recipe.load import load_recipe

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
dp_shard_size: 2
sequence_len: 32
learning_rate: 1e-3
max_steps: 2
export: false
"""

# As srun does: one process a task, with its place in the variables; the highest code is returned.
SRUN = """#!{python}
import os, subprocess, sys
words = [word for word in sys.argv[1:] if not word.startswith("--")]
words = sys.argv[sys.argv.index(words[0]):]
nodes, tasks = 2, 2
ranks = []
for rank in range(tasks):
    place = dict(
        SLURM_PROCID=rank, SLURM_LOCALID=0, SLURM_NODEID=rank, SLURM_NTASKS=tasks,
        SLURM_STEP_NODELIST="localhost,localhost", SLURM_STEP_TASKS_PER_NODE="1(x2)",
    )
    environ = dict(os.environ) | {{key: str(value) for key, value in place.items()}}
    ranks.append(subprocess.Popen(words, env=environ))
sys.exit(max(rank.wait() for rank in ranks))
"""


def test_two_nodes_of_one_rank_train_together(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(RECIPE)
    for name, text in {
        "srun": SRUN.format(python=sys.executable),
        "ndtrain": f'#!/bin/bash\nexec {sys.executable} -m ndtrain "$@"\n',
    }.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    job = tmp_path / "tiny.sbatch"
    loaded = load_recipe(recipe, [f"output_dir={tmp_path / 'run'}"])
    write_job("slurm", loaded, nodes=2, gpus_per_node=1, write=job)
    done = subprocess.run(
        ["bash", str(job)],
        env={
            **os.environ,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "SLURM_JOB_ID": str(os.getpid()),
            "SLURM_SUBMIT_DIR": str(tmp_path),
            "SLURM_CPUS_PER_TASK": "1",
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [event["step"] for event in map(json.loads, lines) if event["event"] == "step"]
    assert steps == [1, 2], "one rank reports, not both"
    assert "dp_shard 2" in done.stdout
