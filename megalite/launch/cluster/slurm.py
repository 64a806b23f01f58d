"""A job of SLURM: a script for sbatch.

SLURM sends SIGUSR1 to the script before the time limit, and SIGTERM at a preemption. The script passes both
as SIGUSR1 to the launchers, which forward it to the ranks. The ranks save, all launchers end with status 75,
and the script requeues the job. A launcher restarts ranks that fail; if a node fails, SLURM requeues the job.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Literal

from megalite.launch.cluster.job import ClusterJob
from megalite.launch.exit_status import ExitStatus

Container = Literal["pyxis", "apptainer"]
LAST_S = 120
"""Seconds that the other nodes have to end after the first one has."""


@dataclass(frozen=True)
class Slurm:
    """Options of SLURM alone.

    Attributes:
        account, partition: null: the cluster's default.
        directives: further options of sbatch, NAME=VALUE.
        container: what runs the image.
    """

    account: str | None = None
    partition: str | None = None
    directives: tuple[str, ...] = ()
    container: Container = "pyxis"


def script(job: ClusterJob, options: Slurm) -> str:
    """The script."""
    endpoint = f'"$first:{job.port}"'
    meeting = (
        'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n' if job.nodes.count > 1 else ""
    )
    # srun must not end the other nodes, which save, when the first one has: they end by themselves
    srun = f"srun --kill-on-bad-exit=0 --wait={LAST_S}"
    command = job.shell_command(endpoint, [f"{srun}{_container(job, options)}"])
    return f"""#!/bin/bash
{job.comment}{_directives(job, options)}set -u
{_exports(job)}{meeting}
{command} &
step=$!
trap 'kill -USR1 "$step"' USR1 TERM
while kill -0 "$step" 2>/dev/null; do wait "$step"; done # a signal interrupts the wait
wait "$step"
status=$?

# the ranks have saved: the job goes on when it is started again
if [ "$status" -eq {int(ExitStatus.STOPPED)} ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""


def _directives(job: ClusterJob, options: Slurm) -> str:
    values: dict[str, object] = {
        "job-name": job.name,
        "account": options.account,
        "partition": options.partition,
        "nodes": job.nodes.count,
        "ntasks-per-node": 1,
        "gpus-per-node": job.nodes.ranks if job.gpus else None,
        "cpus-per-task": job.cpus,
        "mem": job.memory,
        "time": None if job.time_s is None else clock(job.time_s),
        "signal": f"B:USR1@{job.grace_s}",
        "requeue": "",
        "open-mode": "append",
        "output": f"{job.name}-%j.log",
    }
    lines = [
        f"--{name}={value}" if value != "" else f"--{name}"
        for name, value in values.items()
        if value is not None
    ]
    lines += [f"--{directive.removeprefix('--')}" for directive in options.directives]
    return "".join(f"#SBATCH {line}\n" for line in lines)


def _exports(job: ClusterJob) -> str:
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in job.environment.items())


def _container(job: ClusterJob, options: Slurm) -> str:
    """What runs the command in the image, with the directory from which the job was submitted at the same
    path."""
    if job.image is None:
        return ""
    mounts = "".join(
        f",{shlex.quote(f'{mount.source}:{mount.target}')}{':ro' if mount.read_only else ''}"
        for mount in job.mounts
    )
    here = '"$SLURM_SUBMIT_DIR:$SLURM_SUBMIT_DIR"'
    image = shlex.quote(job.image)
    if options.container == "pyxis":
        return (
            f" \\\n    --container-image={image} --container-mounts={here}{mounts} "
            '--container-workdir="$SLURM_SUBMIT_DIR"'
        )
    gpus = " --nv" if job.gpus else ""
    return f' \\\n    apptainer exec{gpus} --bind {here}{mounts} --pwd "$SLURM_SUBMIT_DIR" {image}'


def clock(seconds: int) -> str:
    """Seconds as HH:MM:SS."""
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
