"""Reads manifests from stdin into the models of Kubeflow Trainer's and JobSet's schemas, and checks the pods against
Kubernetes' own.

The models ignore keys that they do not know: what they write again must therefore be what they have read.
"""

from __future__ import annotations

import sys
from typing import Any

import kubernetes_validate
import yaml
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet, TrainerV1alpha1TrainJob

MODELS = {"TrainJob": TrainerV1alpha1TrainJob, "JobSet": JobsetV1alpha2JobSet}
VERSION = kubernetes_validate.latest_version()


def main() -> None:
    for manifest in yaml.safe_load_all(sys.stdin):
        if manifest["kind"] in MODELS:
            again = MODELS[manifest["kind"]].from_dict(manifest).to_dict()
            assert plain(again) == manifest, f"read as {again}, not as {manifest}"
        if manifest["kind"] == "TrainJob":
            jobs = [job_of_pod(pod, manifest["spec"]["trainer"]) for pod in pods(manifest)]
        elif manifest["kind"] == "JobSet":
            jobs = [job(replicated["template"]["spec"]) for replicated in manifest["spec"]["replicatedJobs"]]
        else:
            jobs = [manifest]
        for each in jobs:
            kubernetes_validate.validate(each, VERSION, strict=True)
        print(manifest["kind"], manifest["metadata"]["name"])


def plain(value: Any) -> Any:
    """Without the nulls of fields that were not given."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items() if each is not None}
    return [plain(each) for each in value] if isinstance(value, list) else value


def pods(train_job: dict[str, Any]) -> list[dict[str, Any]]:
    patches = train_job["spec"]["runtimePatches"]
    replicated = [
        each for patch in patches for each in patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    ]
    return [each["template"]["spec"]["template"]["spec"] for each in replicated]


def job_of_pod(pod: dict[str, Any], trainer: dict[str, Any]) -> dict[str, Any]:
    """A job with the pod that Trainer makes: that of its runtime, the patch, and the trainer's container."""
    container = {key: trainer[key] for key in ("image", "command", "args", "env")} | pod["containers"][0]
    container["resources"] = trainer["resourcesPerNode"]
    return job({"template": {"spec": {"restartPolicy": "Never", **pod, "containers": [container]}}})


def job(spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, "spec": spec}


main()
