"""Reads a task from stdin as SkyPilot does, and prints what it has understood as JSON."""

from __future__ import annotations

import json
import sys

import sky


def main() -> None:
    task = sky.Task.from_yaml_str(sys.stdin.read())
    (resources,) = task.resources
    read = {
        "name": task.name,
        "nodes": task.num_nodes,
        "accelerators": resources.accelerators,
        "cpus": resources.cpus,
        "spot": resources.use_spot,
        "image": resources.image_id,
        "recovery": resources.job_recovery,
        "files": task.file_mounts,
        "buckets": {target: storage.source for target, storage in task.storage_mounts.items()},
        "volumes": task.volumes,
        "environment": task.envs,
        "setup": task.setup,
        "run": task.run,
    }
    print(json.dumps(read))


main()
