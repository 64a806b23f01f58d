"""Prepare a token file in shards with an executor of datatrove, on a shared file system:

    python tools/preparation/datatrove_shards.py --shards 64 -- megalite prepare --input … --output data/x

It runs in an environment with `datatrove`, which need not have megalite. The merge is a second pipeline,
which depends on the first. A finished shard is skipped when the command is started again, and an interrupted
one continues.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
from typing import Any

from datatrove.pipeline.base import PipelineStep


class RunCommand(PipelineStep):  # type: ignore[misc]  # datatrove has no types
    """Runs a command, with the number of the task as its shard unless it merges."""

    name = "megalite prepare"
    type = "TOKENS"

    def __init__(self, words: list[str], directory: str, merge: bool):
        super().__init__()
        self.words, self.directory, self.merge = words, directory, merge

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Any:
        part = ["--merge"] if self.merge else ["--shard", f"{rank + 1}/{world_size}"]
        subprocess.run([*self.words, *part], cwd=self.directory, check=True)
        return data


def executor_of(name: str, step: RunCommand, tasks: int, options: argparse.Namespace, depends: Any) -> Any:
    """Return an executor that runs a step in some tasks, after another executor."""
    logs = os.path.join(options.logs, "merge" if step.merge else "shards")
    common = {
        "pipeline": [step],
        "tasks": tasks,
        "logging_dir": logs,
        "skip_completed": False,
        "depends": depends,
    }
    if name == "slurm":
        from datatrove.executor import SlurmPipelineExecutor

        slurm = {"time": options.time, "partition": options.partition, "cpus_per_task": options.cpus}
        return SlurmPipelineExecutor(job_name="megalite-prepare", **slurm, **common)
    if name == "ray":
        from datatrove.executor import RayPipelineExecutor

        return RayPipelineExecutor(cpus_per_task=options.cpus, **common)
    from datatrove.executor import LocalPipelineExecutor

    return LocalPipelineExecutor(workers=min(options.parallel, tasks), **common)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--executor", choices=["local", "slurm", "ray"], default="local")
    parser.add_argument("--shards", type=int, required=True, metavar="N", help="number of shards")
    parser.add_argument(
        "--parallel", type=int, default=1, metavar="N", help="local: shards at a time (default 1)"
    )
    parser.add_argument("--cpus", type=int, default=4, metavar="N", help="cores of a shard (default 4)")
    parser.add_argument("--partition", default="cpu", help="slurm: the partition (default cpu)")
    parser.add_argument("--time", default="12:00:00", help="slurm: the time limit of a shard")
    parser.add_argument("--logs", default="prepare-logs", metavar="DIR", help="datatrove's logs")
    parser.add_argument("command", nargs="+", help="-- megalite prepare …, without --shard")
    options = parser.parse_args()
    program = shutil.which(options.command[0]) or options.command[0]
    words = [program, *options.command[1:], "--workers", str(options.cpus)]
    steps = [RunCommand(words, os.getcwd(), merge) for merge in (False, True)]
    shards = executor_of(options.executor, steps[0], options.shards, options, None)
    executor_of(options.executor, steps[1], 1, options, shards).run()


if __name__ == "__main__":
    main()
