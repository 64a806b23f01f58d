"""Runs a program on a local Ray cluster of two nodes, kills a node's raylet during the run, and may start another one.

python ray_cluster.py PROGRAM RUN_DIR {fewer|another}
"""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path
from threading import Thread
from typing import Any

import ray
from ray.cluster_utils import Cluster


def main() -> None:
    program, run, then = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    nodes = [cluster.add_node(num_cpus=1), cluster.add_node(num_cpus=1)]
    ray.init(address=cluster.address, log_to_driver=True)
    Thread(target=disturb, args=(cluster, nodes, run, then), daemon=True).start()
    runpy.run_path(program, run_name="__main__")
    ray.shutdown()
    cluster.shutdown()


def disturb(cluster: Cluster, nodes: list[Any], run: Path, then: str) -> None:
    """Kill the second raylet after a checkpoint and further steps."""
    while not (run / "checkpoints" / "latest").exists() or steps(run) % 5 < 2:
        time.sleep(0.05)
    print(f"killing a raylet after step {steps(run)}", flush=True)
    cluster.remove_node(nodes[1], allow_graceful=False)
    if then == "another":
        cluster.add_node(num_cpus=1)


def steps(run: Path) -> int:
    file = run / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


main()
