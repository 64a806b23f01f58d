"""A job on a Ray cluster: a program for `ray job submit`, and what it does there.

Ray Train starts one worker for each node of the job, with the node's GPUs, and each worker runs `megalite
train --nproc`; the ranks are its processes, outside of Ray. If a worker or its node is lost, or the ranks
fail, Ray Train ends all workers and starts them again on the nodes that are there, or once one returns. The
run goes on from its newest checkpoint. Imports ray only where it is used: it is needed on the cluster alone.
"""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megalite.config.errors import ConfigError
from megalite.launch.cluster.job import ClusterJob, Nodes
from megalite.launch.exit_status import ExitStatus
from megalite.launch.scheduler import JOB, RESTARTS
from megalite.stores.url import is_url
from megalite.system.messages import say
from megalite.system.processes import marked


@dataclass(frozen=True)
class Ray:
    """Options of Ray alone.

    Attributes:
        address: of the cluster's dashboard; null: RAY_ADDRESS.
        min_nodes: the job goes on with fewer nodes, down to this number; null: with all of them.
        storage: a directory that all nodes share, or a URL, for the files of Ray Train; null: in run.dir.
    """

    address: str | None = None
    min_nodes: int | None = None
    storage: str | None = None


@dataclass(frozen=True)
class RayRun:
    """A run on a Ray cluster, as the program describes it.

    Attributes:
        name: of the job.
        nodes, ranks: number of nodes, and of ranks on each.
        min_nodes: fewest nodes to go on with.
        resources: of a node: GPU, CPU.
        arguments: those of `megalite train`.
        python: the interpreter on the nodes; empty: that of the workers.
        environment: variables of the ranks.
        restarts: how often the workers are started again.
        storage: a directory that all nodes share, or a URL, for the files of Ray Train.
    """

    name: str
    nodes: int
    min_nodes: int
    ranks: int
    resources: dict[str, float]
    arguments: list[str]
    python: str
    environment: dict[str, str]
    restarts: int
    storage: str


def program(job: ClusterJob, options: Ray, run_dir: str) -> str:
    """The program.

    Args:
        run_dir: run.dir, which all nodes share: a directory, or a place in an object store.

    Raises:
        ConfigError: a directory is relative: each node would have its own; or run.dir is in an object store,
            and Ray Train has no storage.
    """
    storage = options.storage
    if is_url(run_dir):
        if storage is None:
            raise ConfigError(
                f"--storage is required with run.dir = {run_dir} in an object store: a directory that all "
                "nodes share, or a URL that Ray can write, for the files of Ray Train."
            )
    elif not Path(run_dir).is_absolute():
        raise ConfigError(
            f"run.dir = {run_dir} is relative, but the nodes of a Ray cluster have different working "
            "directories. Set --run.dir to an absolute path on a file system that all nodes share, or to "
            "the URL of an object store."
        )
    if storage is None:
        storage = str(Path(run_dir, ".ray"))
    elif "://" not in storage and not Path(storage).is_absolute():
        raise ConfigError(
            f"--storage {storage} is neither an absolute path nor a URL. The nodes of a Ray cluster have "
            "different working directories: name a directory that all nodes share."
        )
    gpus: dict[str, float] = {"GPU": float(job.nodes.ranks)} if job.gpus else {}
    run = RayRun(
        name=job.name,
        nodes=job.nodes.count,
        min_nodes=options.min_nodes or job.nodes.count,
        ranks=job.nodes.ranks,
        resources={"CPU": float(job.cpus or job.nodes.ranks), **gpus},
        arguments=list(job.arguments),
        python=job.python,
        environment=job.environment,
        restarts=job.restarts,
        storage=storage,
    )
    values = "".join(f"        {name}={value!r},\n" for name, value in asdict(run).items())
    return f"""{job.comment}from megalite.launch.cluster.ray_job import RayRun, train

train(
    RayRun(
{values}    )
)
"""


class Starts:
    """Counts how often the workers were started. An actor beside the program, which outlives workers."""

    def __init__(self) -> None:
        self.count = 0

    def next(self) -> int:
        """Return the number of earlier starts."""
        self.count += 1
        return self.count - 1


def train(run: RayRun) -> None:
    """Run on the cluster that this program is submitted to. Raises ray.train.TrainingFailedError if the run
    fails for good."""
    # paths are relative to the directory that Ray has copied to the nodes; read when the trainer starts
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"
    try:
        import ray
        from ray.train import FailureConfig, RunConfig, ScalingConfig
    except ImportError as error:
        raise SystemExit(
            f"jobs on Ray require ray ({error}). Install it with `pip install 'megalite[ray]'`."
        ) from None
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if not ray.is_initialized():
        ray.init(address="auto")
    context = ray.get_runtime_context()
    here = NodeAffinitySchedulingStrategy(context.get_node_id(), soft=False)
    starts = ray.remote(Starts).options(num_cpus=0, scheduling_strategy=here).remote()
    gpus = "GPU" in run.resources
    trainer = DataParallelTrainer(
        work,
        # not TorchTrainer: the ranks are processes of their own, and make their own process group
        train_loop_config={"run": run, "starts": starts, "job": f"Ray {context.get_job_id()}"},
        scaling_config=ScalingConfig(
            num_workers=(run.min_nodes, run.nodes) if run.min_nodes < run.nodes else run.nodes,
            use_gpu=gpus,
            resources_per_worker=run.resources,
            placement_strategy="SPREAD",
        ),
        run_config=RunConfig(
            name=run.name, storage_path=run.storage, failure_config=FailureConfig(max_failures=run.restarts)
        ),
    )
    trainer.fit()


def work(config: dict[str, Any]) -> None:
    """Run the ranks of one node, on each worker of Ray Train. Raises RuntimeError if they fail."""
    import ray
    from ray.train import get_context
    from ray.train.collective import broadcast_from_rank_zero

    run: RayRun = config["run"]
    context = get_context()
    meeting = None
    if context.get_world_rank() == 0:
        host = ray.util.get_node_ip_address()
        meeting = {"endpoint": f"{host}:{_free_port()}", "start": ray.get(config["starts"].next.remote())}
    meeting = broadcast_from_rank_zero(meeting)
    job = ClusterJob(
        name=run.name,
        about=(),
        nodes=Nodes(context.get_world_size(), run.ranks),
        gpus="GPU" in run.resources,
        arguments=tuple(run.arguments),
        python=run.python or sys.executable,
        restarts=0,  # Ray starts the ranks again
    )
    known = {JOB: config["job"], RESTARTS: str(meeting["start"])}
    # ended with this worker, by the mark of its launcher
    environment = {**os.environ, **run.environment, **known, **marked()}
    command = job.command(meeting["endpoint"])
    say(f"{job.nodes}, start {meeting['start'] + 1}: {shlex.join(command)}")
    status = subprocess.run(command, env=environment).returncode
    if status == ExitStatus.STOPPED:
        say("the run has saved and stopped; submit it again to continue")
    elif status:
        raise RuntimeError(f"megalite train ended with status {status}; its ranks have printed the reason.")


def _free_port() -> int:
    with socket.create_server(("", 0)) as probe:
        return int(probe.getsockname()[1])
