"""`ndtrain launch`: job files for schedulers, each running the same `ndtrain train`.

To add a scheduler, write a template with `@@{...}` places and name it in `KINDS`.
"""

import json
import re
import shlex
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType

from ndtrain.errors import RecipeError
from ndtrain.plan.plan import plan_mesh
from ndtrain.recipe.load import LoadedRecipe
from ndtrain.recipe.output import write_named

RESTARTS = 3
"""How often a lost rank may restart all, where the scheduler does not start jobs again itself."""
PORT = 29400


@dataclass(frozen=True)
class JobRequest:
    """What a job file is written for.

    Attributes:
        file: name of the job file, for the line that says how to start it.
        gpu: kind of GPU, for schedulers that rent machines.
        image: container with ndtrain, for schedulers that run containers.
    """

    loaded: LoadedRecipe
    nodes: int
    gpus_per_node: int
    file: str
    gpu: str = "H100"
    image: str = "ndtrain:latest"

    @property
    def name(self) -> str:
        """The job's name, in letters that every scheduler takes."""
        plain = re.sub(r"[^a-z0-9]+", "-", self.loaded.path.stem.lower()).strip("-")
        return f"ndtrain-{plain[:36].rstrip('-') or 'job'}"

    @property
    def title(self) -> str:
        """What the job does, in one line."""
        ranks = self.nodes * self.gpus_per_node
        nodes = "1 node" if self.nodes == 1 else f"{self.nodes} nodes"
        gpus = "1 GPU" if self.gpus_per_node == 1 else f"{self.gpus_per_node} GPUs"
        return f"{self.loaded.path.name} on {nodes} x {gpus} = {ranks} ranks"

    @property
    def recipe_key(self) -> str:
        """The recipe's file name in the letters that a ConfigMap takes; the run is named by it."""
        return re.sub(r"[^-._a-zA-Z0-9]+", "-", self.loaded.path.name)

    def words(self, recipe: str) -> list[str]:
        """The command that every scheduler runs."""
        sets = [word for one in self.loaded.overrides for word in ("--set", one)]
        return ["ndtrain", "train", recipe, *sets]


def _slurm_command(request: JobRequest) -> str:
    return shlex.join(request.words(str(request.loaded.path)))


def _skypilot_command(request: JobRequest) -> str:
    # a newline in a value stays inside the block that the command stands in
    words = _indented(shlex.join(request.words(str(request.loaded.path))), 2).lstrip()
    return (
        f'{words} --max-restarts {RESTARTS} \\\n    --nnodes "$SKYPILOT_NUM_NODES" '
        f'--node-rank "$SKYPILOT_NODE_RANK" --rdzv-endpoint "$first:{PORT}"'
    )


def _kubernetes_command(request: JobRequest) -> str:
    # pods of a JobSet are known as <set>-<job>-<job number>-<pod number>.<set>
    first = f"{request.name}-node-0-0.{request.name}:{PORT}"
    place = ["--nnodes", str(request.nodes), "--node-rank", "$(NODE_RANK)"]
    # only what this file means as a variable may look like one
    words = [word.replace("$(", "$$(") for word in request.words(f"/recipe/{request.recipe_key}")]
    return json.dumps([*words, *place, "--rdzv-endpoint", first], ensure_ascii=False)


def _ray_command(request: JobRequest) -> str:
    words = [*request.words(str(request.loaded.path)), "--max-restarts", str(RESTARTS)]
    return json.dumps(words, ensure_ascii=False)


@dataclass(frozen=True)
class JobKind:
    """A scheduler.

    Attributes:
        suffix: how its file is named.
        command: how it words the command.
        options: further fields of the request that its template has a place for.
        parts: templates that fill a place of a later one or of `template`, innermost first, as
            (place, template, columns by which it is indented).
        words: texts of its own for places of a template that it shares.
    """

    template: str
    suffix: str
    command: Callable[[JobRequest], str]
    options: tuple[str, ...] = ()
    parts: tuple[tuple[str, str, int], ...] = ()
    words: Mapping[str, str] = field(default_factory=dict)


KINDS: Mapping[str, JobKind] = {
    "slurm": JobKind("slurm.sbatch", ".sbatch", _slurm_command),
    "kubernetes": JobKind(
        "kubernetes.yaml",
        ".k8s.yaml",
        _kubernetes_command,
        options=("image",),
        parts=(("nodes_spec", "kubernetes_nodes.yaml", 2), ("job", "jobset.yaml", 0)),
        words={
            "controller": "the JobSet controller (https://jobset.sigs.k8s.io)",
            "step": "app.kubernetes.io/name: ndtrain",
        },
    ),
    "kubeflow": JobKind(
        "kubernetes.yaml",
        ".kubeflow.yaml",
        _kubernetes_command,
        options=("image",),
        parts=(("nodes_spec", "kubernetes_nodes.yaml", 6), ("job", "trainjob.yaml", 0)),
        words={
            "controller": "Kubeflow Trainer 2 (https://www.kubeflow.org/docs/components/trainer)",
            "step": "trainer.kubeflow.org/trainjob-ancestor-step: trainer",
        },
    ),
    "skypilot": JobKind("skypilot.yaml", ".sky.yaml", _skypilot_command, options=("gpu",)),
    "ray": JobKind("ray_job.py.txt", ".ray.py", _ray_command),
}


class _Places(string.Template):
    """A template whose places do not look like shell variables."""

    delimiter = "@@"


def render_job(kind: str, request: JobRequest) -> str:
    """The job file of a scheduler.

    Args:
        kind: one of `KINDS`.
        request: what it is for.

    Raises:
        MeshError: the recipe's sizes do not multiply to these GPUs.
    """
    recipe = request.loaded.recipe
    world_size = request.nodes * request.gpus_per_node
    plan_mesh(recipe, world_size, where=request.loaded.position("dp_shard_size"))
    known = KINDS[kind]
    values = {
        "kind": kind,
        "title": request.title,
        "name": request.name,
        "file": shlex.quote(request.file),
        "nodes": str(request.nodes),
        "gpus": str(request.gpus_per_node),
        "gpu": request.gpu,
        "image": request.image,
        "command": known.command(request),
        "recipe_key": request.recipe_key,
        "recipe_text": _indented(request.loaded.text, 4),
        **known.words,
    }
    for place, part, columns in known.parts:
        values[place] = _indented(_filled(part, values), columns)
    return _filled(known.template, values)


def _filled(template: str, values: Mapping[str, str]) -> str:
    """A template with all its places filled."""
    text = files("ndtrain.launch").joinpath("templates", template).read_text(encoding="utf-8")
    return _Places(text).substitute(values)


def _indented(text: str, columns: int) -> str:
    """Lines as part of a YAML block; empty ones stay empty."""
    margin = " " * columns
    return "\n".join(
        f"{margin}{line}" if line.strip() else "" for line in text.removesuffix("\n").split("\n")
    )


def write_job(
    kind: str,
    loaded: LoadedRecipe,
    *,
    nodes: int,
    gpus_per_node: int,
    write: Path | None,
    options: Mapping[str, str | None] = MappingProxyType({}),
) -> str:
    """The job file's text; also written to `write` when it is given.

    Args:
        kind: one of `KINDS`.
        loaded: the recipe; its `--set` values become part of the command.
        nodes: machines.
        gpus_per_node: GPUs of each.
        write: file to write; an existing one is not replaced.
        options: further fields of the request, such as `image`; None is not given.

    Raises:
        MeshError: the recipe's sizes do not multiply to these GPUs.
        RecipeError: the file exists already or cannot be written, or an option is not for this
            scheduler.
    """
    given = {name: value for name, value in options.items() if value is not None}
    for name in given:
        if name not in KINDS[kind].options:
            takers = [other for other, known in KINDS.items() if name in known.options]
            raise RecipeError(
                f"{kind} has no use for it.",
                where=f"--{name}",
                hint=f"It goes with {' and '.join(takers)}.",
            )
    file = str(write) if write is not None else loaded.path.stem + KINDS[kind].suffix
    request = JobRequest(loaded, nodes, gpus_per_node, file, **given)
    text = render_job(kind, request)
    if write is not None:
        write_named(write, text, option="with --write", hint_to_replace="Name another one.")
    return text
