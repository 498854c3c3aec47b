"""Checks a Kubernetes job file; run by the Python of `make launcher-tools`, see the test.

Core kinds, and the batch job inside the custom ones, go through kubernetes-validate. Custom kinds
go through the models that Kubeflow Trainer publishes: what they do not know is lost on the way.
"""

import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from kubeflow_trainer_api import models

VERSION = "1.37"
CUSTOM = {
    "JobSet": models.JobsetV1alpha2JobSet,
    "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
    "TrainJob": models.TrainerV1alpha1TrainJob,
}


def job_sets(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The JobSet specs in a custom kind."""
    spec = document["spec"]
    return {"JobSet": [spec], "TrainingRuntime": [spec.get("template", {}).get("spec")]}.get(
        document["kind"], []
    )


def check(document: dict[str, Any]) -> None:
    """Raise when a document has a field that its kind does not know, or lacks one."""
    kind = CUSTOM.get(document["kind"])
    if kind is None:
        kubernetes_validate.validate(document, VERSION, strict=True)
        return
    known = kind.from_dict(document).to_dict()
    assert known == document, f"{document['kind']} knows only {known}"
    for job_set in job_sets(document):
        for replicated in job_set["replicatedJobs"]:
            job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "node"}}
            kubernetes_validate.validate(
                {**job, "spec": replicated["template"]["spec"]}, VERSION, strict=True
            )


if __name__ == "__main__":
    for one in yaml.safe_load_all(Path(sys.argv[1]).read_text("utf-8")):
        check(one)
        print(one["kind"])
