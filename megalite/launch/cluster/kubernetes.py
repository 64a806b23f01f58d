"""A job on Kubernetes: manifests of a TrainJob (Kubeflow Trainer v2) or of a JobSet.

Both give each node a pod with a name of its own, by which the pods meet at the first one. A pod that is to
end receives SIGTERM: all ranks save, and all pods end with status 75. The job's controller then starts them
again. In a JobSet such ends, and disruptions, count as no failure; a wrong configuration ends the JobSet at
once; after any other failure of a pod it is restarted as a whole. A TrainJob leaves this to its runtime.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megalite.config.errors import ConfigError
from megalite.launch.cluster.job import MODULE, ClusterJob, Mount, as_yaml
from megalite.launch.exit_status import ExitStatus
from megalite.launch.scheduler import JOB, RESTARTS

Kind = Literal["trainjob", "jobset"]
CONFIGS = "/etc/megalite"
"""Directory of the configuration files in a container."""
NODE = "node"
"""Name of the pods' job, and of their container, in Trainer's runtimes."""
RESERVED = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")
"""Environment variables that Trainer sets itself."""
Object = dict[str, Any]


@dataclass(frozen=True)
class Kubernetes:
    """Options of Kubernetes alone.

    Attributes:
        kind: of the job.
        namespace: null: that of kubectl.
        runtime: the ClusterTrainingRuntime of a TrainJob.
        gpu_resource: the device plugin's name for a GPU.
        resources: further resources per node, name → amount.
        tolerations: KEY[=VALUE]:EFFECT, besides that of GPUs.
        node_selectors: labels of the nodes.
        shared_memory: size of /dev/shm; null: 1 GiB for each rank.
        host_network: whether pods use the network of their host.
    """

    kind: Kind = "trainjob"
    namespace: str | None = None
    runtime: str = "torch-distributed"
    gpu_resource: str = "nvidia.com/gpu"
    resources: dict[str, str] = field(default_factory=dict)
    tolerations: tuple[str, ...] = ()
    node_selectors: dict[str, str] = field(default_factory=dict)
    shared_memory: str | None = None
    host_network: bool = False


def manifests(job: ClusterJob, options: Kubernetes, configs: dict[str, Path]) -> str:
    """The manifests, as YAML.

    Args:
        configs: file in `CONFIGS` → the configuration file that it is made from.

    Raises:
        ConfigError: options that the kind of job does not have.
    """
    _check(job, options)
    objects = [_config_map(job, options, configs)] if configs else []
    objects.append((_train_job if options.kind == "trainjob" else _job_set)(job, options, bool(configs)))
    return job.comment + "---\n".join(map(as_yaml, objects))


def _check(job: ClusterJob, options: Kubernetes) -> None:
    if job.image is None:
        raise ConfigError(
            "--image is required on Kubernetes: a container image with megalite, for example one that is "
            "built from megalite's Dockerfile."
        )
    if options.kind == "trainjob" and options.host_network:
        raise ConfigError(
            "--host_network is not supported with --kind trainjob, because a TrainJob cannot change this "
            "part of its runtime. Use --kind jobset, or a runtime with hostNetwork."
        )
    for mount in job.mounts:
        if not mount.source.startswith("/") and re.search("[:/]", mount.source):
            raise ConfigError(
                f"--mount {mount.source}:{mount.target}: {mount.source} is neither an absolute path of the "
                "hosts nor the name of a persistent volume claim. Write it as in --mount shared:/shared, or "
                "--mount /data:/data."
            )
    if reserved := sorted(set(job.environment) & set(RESERVED)):
        raise ConfigError(f"--env {reserved[0]} is set by Kubeflow Trainer. Remove it.")


def _train_job(job: ClusterJob, options: Kubernetes, configs: bool) -> Object:
    # Trainer sets the address of the first pod. It is replaced when the container starts.
    command = _command(job, "$(PET_MASTER_ADDR):$(PET_MASTER_PORT)")
    pod = _pod(job, options, configs)
    container = {"name": NODE, "volumeMounts": _volume_mounts(job, configs), **_security(options)}
    patch = {**pod, "containers": [container]}
    jobs = [{"name": NODE, "template": {"spec": {"template": {"spec": patch}}}}]
    trainer = {
        "image": job.image,
        **command,
        "env": _environment(job),
        "numNodes": job.nodes.count,
        "numProcPerNode": job.nodes.ranks,
        "resourcesPerNode": _resources(job, options),
    }
    spec = {
        "runtimeRef": {
            "apiGroup": "trainer.kubeflow.org",
            "kind": "ClusterTrainingRuntime",
            "name": options.runtime,
        },
        **({} if job.time_s is None else {"activeDeadlineSeconds": job.time_s}),
        "trainer": trainer,
        "runtimePatches": [
            {
                "manager": "megalite/launch",
                "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}},
            }
        ],
    }
    return _object("trainer.kubeflow.org/v1alpha1", "TrainJob", job.name, options, spec=spec)


def _job_set(job: ClusterJob, options: Kubernetes, configs: bool) -> Object:
    container = {
        "name": NODE,
        "image": job.image,
        **_command(job, f"{job.name}-{NODE}-0-0.{job.name}:{job.port}"),
        "env": _environment(job),
        "ports": [{"containerPort": job.port, "protocol": "TCP"}],
        "resources": _resources(job, options),
        "volumeMounts": _volume_mounts(job, configs),
        **_security(options),
    }
    pod = {"restartPolicy": "Never", **_pod(job, options, configs), "containers": [container]}
    if options.host_network:
        pod |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    template = {
        "completionMode": "Indexed",
        "parallelism": job.nodes.count,
        "completions": job.nodes.count,
        "backoffLimit": 0,
        **({} if job.time_s is None else {"activeDeadlineSeconds": job.time_s}),
        "podFailurePolicy": {
            "rules": [
                # not IN_USE: a lock that an evicted pod left is fresh for a while
                _exits("FailJob", ExitStatus.CONFIGURATION),
                _exits("Ignore", ExitStatus.STOPPED),
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": {"spec": pod},
    }
    lasting = {
        "name": "willFailAgain",
        "action": "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy", "DeadlineExceeded"],
    }
    spec = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {
            "maxRestarts": job.restarts,
            "restartStrategy": "BlockingRecreate",
            "rules": [lasting],
        },
        "replicatedJobs": [{"name": NODE, "replicas": 1, "template": {"spec": template}}],
    }
    return _object("jobset.x-k8s.io/v1alpha2", "JobSet", job.name, options, spec=spec)


def _exits(action: str, *statuses: int) -> Object:
    values = [int(status) for status in statuses]
    return {"action": action, "onExitCodes": {"containerName": NODE, "operator": "In", "values": values}}


def _config_map(job: ClusterJob, options: Kubernetes, configs: dict[str, Path]) -> Object:
    texts = {name: path.read_text(encoding="utf-8") for name, path in configs.items()}
    return _object("v1", "ConfigMap", f"{job.name}-config", options, data=texts)


def _object(version: str, kind: str, name: str, options: Kubernetes, **content: Any) -> Object:
    namespace = {} if options.namespace is None else {"namespace": options.namespace}
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, **namespace}, **content}


def _command(job: ClusterJob, endpoint: str) -> Object:
    start = [job.python, *MODULE]
    return {"command": start, "args": job.command(endpoint)[len(start) :]}


def _environment(job: ClusterJob) -> list[Object]:
    """The variables, and those by which a restarted job knows its own run."""
    labels = {JOB: "jobset.sigs.k8s.io/jobset-uid", RESTARTS: "jobset.sigs.k8s.io/restart-attempt"}
    return [{"name": name, "value": value} for name, value in job.environment.items()] + [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{label}']"}}}
        for name, label in labels.items()
    ]


def _resources(job: ClusterJob, options: Kubernetes) -> Object:
    limits = {options.gpu_resource: str(job.nodes.ranks)} if job.gpus else {}
    limits |= options.resources
    requests = {"cpu": None if job.cpus is None else str(job.cpus), "memory": job.memory}
    requested = {name: amount for name, amount in requests.items() if amount is not None}
    resources = {"limits": limits, "requests": requested}
    return {name: amounts for name, amounts in resources.items() if amounts}


def _pod(job: ClusterJob, options: Kubernetes, configs: bool) -> Object:
    """What a pod has besides its container."""
    tolerations = [_toleration(text) for text in options.tolerations]
    if job.gpus:
        tolerations.insert(0, {"key": options.gpu_resource, "operator": "Exists", "effect": "NoSchedule"})
    return {
        "terminationGracePeriodSeconds": job.grace_s,
        **({"tolerations": tolerations} if tolerations else {}),
        **({"nodeSelector": options.node_selectors} if options.node_selectors else {}),
        "volumes": _volumes(job, options, configs),
    }


def _toleration(text: str) -> Object:
    taint, _, effect = text.rpartition(":")
    key, equals, value = taint.partition("=")
    if not key or effect not in ("NoSchedule", "PreferNoSchedule", "NoExecute"):
        raise ConfigError(
            f"--toleration {text} is not KEY:EFFECT or KEY=VALUE:EFFECT. Legal effects: NoSchedule, "
            "PreferNoSchedule, NoExecute."
        )
    matched = {"operator": "Equal", "value": value} if equals else {"operator": "Exists"}
    return {"key": key, **matched, "effect": effect}


def _volumes(job: ClusterJob, options: Kubernetes, configs: bool) -> list[Object]:
    size = options.shared_memory or f"{job.nodes.ranks}Gi"
    volumes: list[Object] = [
        # the runtime's own /dev/shm, of 64 MB, is too small for NCCL
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": size}}
    ]
    volumes += [{"name": f"mount-{number}", **_source(mount)} for number, mount in enumerate(job.mounts)]
    if configs:
        volumes.append({"name": "config", "configMap": {"name": f"{job.name}-config"}})
    return volumes


def _source(mount: Mount) -> Object:
    """A claim by its name, or a directory of the host by its path."""
    if mount.source.startswith("/"):
        return {"hostPath": {"path": mount.source}}
    claim = {"claimName": mount.source, **({"readOnly": True} if mount.read_only else {})}
    return {"persistentVolumeClaim": claim}


def _volume_mounts(job: ClusterJob, configs: bool) -> list[Object]:
    mounts: list[Object] = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    mounts += [
        {
            "name": f"mount-{number}",
            "mountPath": mount.target,
            **({"readOnly": True} if mount.read_only else {}),
        }
        for number, mount in enumerate(job.mounts)
    ]
    if configs:
        mounts.append({"name": "config", "mountPath": CONFIGS, "readOnly": True})
    return mounts


def _security(options: Kubernetes) -> Object:
    """RDMA pins memory, which a container may do only with this capability."""
    if not any(resource.startswith("rdma/") for resource in options.resources):
        return {}
    return {"securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}}
