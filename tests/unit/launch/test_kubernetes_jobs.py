"""Kubernetes job files: every field is one that its kind knows, and pods find each other.

The models below hold the fields that we write, by the published API of JobSet v1alpha2 and Kubeflow
Trainer v1alpha1; `make launcher-tools` brings the APIs themselves, for the slow tier.
"""

import json
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from pydantic import BaseModel, ConfigDict, Field

from ndtrain.errors import ExitCode
from ndtrain.launch.job_files import JobRequest, render_job
from ndtrain.recipe.load import LoadedRecipe, load_recipe

RECIPE = """\
# A title with 'quotes', "double" ones, $HOME and ü

model_config: {model_type: llama}
tokenizer_config: bytes
learning_rate: 1e-4
datasets:
  - path: synthetic
dp_replicate_size: 2
dp_shard_size: 4
"""
KINDS = ("kubernetes", "kubeflow")
NAME = "ndtrain-my-recipe"
Name = Field(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=50)


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Metadata(Part):
    name: str = Name
    labels: dict[str, str] = {}


class Labels(Part):
    labels: dict[str, str]


class OnExitCodes(Part):
    operator: Literal["In", "NotIn"]
    values: list[int]


class PodFailureRule(Part):
    action: Literal["FailJob", "Ignore", "Count"]
    onExitCodes: OnExitCodes


class PodFailurePolicy(Part):
    rules: list[PodFailureRule]


class Container(Part):
    name: str
    image: str
    workingDir: str
    command: list[str]
    env: list[dict[str, Any]]
    resources: dict[str, dict[str, int]]
    volumeMounts: list[dict[str, str]]


class Pod(Part):
    restartPolicy: Literal["Never"]
    terminationGracePeriodSeconds: int
    containers: list[Container]
    volumes: list[dict[str, Any]]


class PodTemplate(Part):
    spec: Pod


class Job(Part):
    parallelism: int
    completions: int
    completionMode: Literal["Indexed"]
    backoffLimit: int
    podFailurePolicy: PodFailurePolicy
    template: PodTemplate


class JobTemplate(Part):
    metadata: Labels
    spec: Job


class ReplicatedJob(Part):
    name: str = Name
    replicas: int
    template: JobTemplate


class FailureRule(Part):
    name: str
    action: Literal["FailJobSet"]
    onJobFailureReasons: list[str]


class FailurePolicy(Part):
    maxRestarts: int
    rules: list[FailureRule]


class JobSetSpec(Part):
    failurePolicy: FailurePolicy
    replicatedJobs: list[ReplicatedJob]


class JobSet(Part):
    apiVersion: Literal["jobset.x-k8s.io/v1alpha2"]
    kind: Literal["JobSet"]
    metadata: Metadata
    spec: JobSetSpec


class MlPolicy(Part):
    numNodes: int


class JobSetTemplate(Part):
    spec: JobSetSpec


class TrainingRuntimeSpec(Part):
    mlPolicy: MlPolicy
    template: JobSetTemplate


class TrainingRuntime(Part):
    apiVersion: Literal["trainer.kubeflow.org/v1alpha1"]
    kind: Literal["TrainingRuntime"]
    metadata: Metadata
    spec: TrainingRuntimeSpec


class RuntimeRef(Part):
    apiGroup: Literal["trainer.kubeflow.org"]
    kind: Literal["TrainingRuntime"]
    name: str


class TrainJobSpec(Part):
    runtimeRef: RuntimeRef


class TrainJob(Part):
    apiVersion: Literal["trainer.kubeflow.org/v1alpha1"]
    kind: Literal["TrainJob"]
    metadata: Metadata
    spec: TrainJobSpec


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedRecipe:
    path = tmp_path / "my recipe.yaml"
    path.write_text(RECIPE, encoding="utf-8")
    return load_recipe(path, ["seed=7", "output_dir=runs/\N{GRINNING FACE} $(HOME)"])


def documents(kind: str, loaded: LoadedRecipe, **options: str) -> dict[str, dict[str, Any]]:
    text = render_job(kind, JobRequest(loaded, 2, 4, "job.yaml", **options))
    return {one["kind"]: one for one in yaml.safe_load_all(text)}


def job_set(kind: str, loaded: LoadedRecipe, **options: str) -> JobSetSpec:
    parts = documents(kind, loaded, **options)
    if kind == "kubernetes":
        return JobSet.model_validate(parts["JobSet"]).spec
    return TrainingRuntime.model_validate(parts["TrainingRuntime"]).spec.template.spec


@pytest.mark.parametrize("kind", KINDS)
def test_the_recipe_travels_in_a_config_map_to_a_shared_disk(
    kind: str, loaded: LoadedRecipe
) -> None:
    parts = documents(kind, loaded)
    assert list(parts)[:2] == ["ConfigMap", "PersistentVolumeClaim"]
    # its keys hold no spaces; the run is named after the file
    assert parts["ConfigMap"]["data"] == {"my-recipe.yaml": RECIPE}
    names = [one["metadata"]["name"] for one in parts.values()]
    assert names[:2] == [f"{NAME}-recipe", f"{NAME}-shared"]
    assert set(names[2:]) == {NAME}
    pod = job_set(kind, loaded).replicatedJobs[0].template.spec.template.spec
    recipe, shared, memory = pod.volumes
    assert recipe == {"name": "recipe", "configMap": {"name": names[0]}}
    assert shared == {"name": "shared", "persistentVolumeClaim": {"claimName": names[1]}}
    assert memory == {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}
    mounted = {one["name"]: one["mountPath"] for one in pod.containers[0].volumeMounts}
    assert mounted == {"recipe": "/recipe", "shared": "/shared", "shared-memory": "/dev/shm"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_pod_a_node_meets_the_others_at_the_first(kind: str, loaded: LoadedRecipe) -> None:
    (job,) = job_set(kind, loaded, image="me/ndtrain:1").replicatedJobs
    assert (job.replicas, job.template.spec.parallelism, job.template.spec.completions) == (1, 2, 2)
    (container,) = job.template.spec.template.spec.containers
    assert container.image == "me/ndtrain:1"
    assert container.resources == {"limits": {"nvidia.com/gpu": 4}}
    assert container.command == [
        *("ndtrain", "train", "/recipe/my-recipe.yaml"),
        # a dollar that is doubled is no variable of Kubernetes
        *("--set", "seed=7", "--set", "output_dir=runs/\N{GRINNING FACE} $$(HOME)"),
        *("--nnodes", "2", "--node-rank", "$(NODE_RANK)"),
        *("--rdzv-endpoint", f"{NAME}-{job.name}-0-0.{NAME}:29400"),
    ]
    assert "NODE_RANK" in {one["name"] for one in container.env}


def test_kubeflow_finds_the_nodes_in_the_runtime(loaded: LoadedRecipe) -> None:
    parts = documents("kubeflow", loaded)
    runtime = TrainingRuntime.model_validate(parts["TrainingRuntime"])
    job = TrainJob.model_validate(parts["TrainJob"])
    assert job.spec.runtimeRef.name == runtime.metadata.name == NAME
    assert runtime.spec.mlPolicy.numNodes == 2
    (nodes,) = runtime.spec.template.spec.replicatedJobs
    step = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert nodes.template.metadata.labels == step
    assert [one.name for one in nodes.template.spec.template.spec.containers] == ["node"]


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_another_start_can_change_starts_again(kind: str, loaded: LoadedRecipe) -> None:
    jobs = job_set(kind, loaded)
    (rule,) = jobs.failurePolicy.rules
    assert (rule.action, rule.onJobFailureReasons) == ("FailJobSet", ["PodFailurePolicy"])
    (codes,) = (
        one.onExitCodes.values
        for one in jobs.replicatedJobs[0].template.spec.podFailurePolicy.rules
    )
    lasting = {ExitCode.RECIPE, ExitCode.DATA, ExitCode.CHECKPOINT, ExitCode.MEMORY}
    assert set(codes) == lasting | {ExitCode.DIVERGED}


def test_both_kinds_run_the_same_pods(loaded: LoadedRecipe) -> None:
    one, other = (job_set(kind, loaded).replicatedJobs[0].template.spec for kind in KINDS)
    assert json.loads(one.model_dump_json()) == json.loads(other.model_dump_json())
