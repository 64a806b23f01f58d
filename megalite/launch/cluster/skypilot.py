"""A job of SkyPilot: a task, for `sky jobs launch`.

SkyPilot sets the addresses of the nodes and the number of their GPUs on each node. A managed job whose
machines are lost is started again on other ones, with the same buckets and volumes. So is one that
ends with a status other than 0, as often as it may.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.config.errors import ConfigError
from megalite.launch.cluster.job import ClusterJob, as_yaml
from megalite.launch.exit_status import ExitStatus

CONFIGS = "~/megalite_configs"
"""Directory of the configuration files on the nodes."""


@dataclass(frozen=True)
class SkyPilot:
    """Options of SkyPilot alone.

    Attributes:
        gpu: SkyPilot's name of the GPUs, such as H100.
        infra: cloud, region and zone, such as aws/us-east-1; null: the cheapest.
        spot: whether machines may be preempted.
        workdir: a directory that is copied to the nodes, where the run starts; null: none.
        setup: a command that installs megalite, which runs on each new machine; null: the image has it.
    """

    gpu: str | None = None
    infra: str | None = None
    spot: bool = False
    workdir: str | None = None
    setup: str | None = None


def task(job: ClusterJob, options: SkyPilot, configs: dict[str, Path]) -> str:
    """The task, as YAML.

    Args:
        configs: file in `CONFIGS` → the configuration file that it is copied from.

    Raises:
        ConfigError: options that a task needs are missing.
    """
    _check(job, options)
    mounts: dict[str, Any] = {f"{CONFIGS}/{name}": str(path) for name, path in configs.items()}
    volumes: dict[str, str] = {}
    for mount in job.mounts:
        if "://" in mount.source:
            mounts[mount.target] = {"source": mount.source, "mode": "MOUNT"}
        elif "/" in mount.source or mount.source.startswith((".", "~")):
            mounts[mount.target] = mount.source
        else:
            volumes[mount.target] = mount.source
    resources = {
        "infra": options.infra,
        "accelerators": f"{options.gpu}:{job.nodes.ranks}" if job.gpus else None,
        "cpus": None if job.cpus is None else f"{job.cpus}+",
        "memory": None if job.memory is None else f"{job.memory}+",
        "image_id": None if job.image is None else f"docker:{job.image}",
        "use_spot": options.spot or None,
        "job_recovery": {"max_restarts_on_errors": job.restarts},
    }
    content = {
        "name": job.name,
        "num_nodes": job.nodes.count,
        "resources": {name: value for name, value in resources.items() if value is not None},
        "workdir": options.workdir,
        "envs": job.environment,
        "file_mounts": mounts,
        "volumes": volumes,
        "setup": options.setup,
        "run": _run(job),
    }
    return job.comment + as_yaml({name: value for name, value in content.items() if value})


def _check(job: ClusterJob, options: SkyPilot) -> None:
    if job.gpus and options.gpu is None:
        raise ConfigError(
            "--gpu is required with SkyPilot: its name of the GPUs, for example --gpu H100. `sky gpus list` "
            "prints the names."
        )
    if options.setup is None and job.image is None:
        raise ConfigError(
            "--setup or --image is required with SkyPilot: a command that installs megalite on a new "
            "machine, for example --setup 'pip install megalite', or a container image that contains it."
        )


def _run(job: ClusterJob) -> str:
    first = 'first=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)\n' if job.nodes.count > 1 else ""
    command = job.shell_command(f'"$first:{job.port}"')
    return f"""{first}status=0 taken=
trap 'taken=1' TERM
{command} || status=$?
# a run that has stopped by itself is done; one on a machine that is taken away starts again on another one
if [ "$status" -eq {int(ExitStatus.STOPPED)} ] && [ -z "$taken" ]; then exit 0; fi
exit "$status"
"""
