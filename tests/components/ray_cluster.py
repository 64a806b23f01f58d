"""Runs a program on a local Ray cluster of two nodes, kills a node's raylet during the run, and may start another one.

python ray_cluster.py PROGRAM RUN_DIR {fewer|another}
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from ray.cluster_utils import Cluster


def main() -> int:
    program, run, then = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    nodes = [cluster.add_node(num_cpus=1), cluster.add_node(num_cpus=1)]
    driver = subprocess.Popen([sys.executable, program], env={**os.environ, "RAY_ADDRESS": cluster.address})
    try:
        while not (run / "checkpoints" / "latest").exists() or steps(run) % 5 < 2:
            assert driver.poll() is None, "it ended before the loss of a node"
            time.sleep(0.05)
        print(f"killing a raylet after step {steps(run)}", flush=True)
        cluster.remove_node(nodes[1], allow_graceful=False)
        if then == "another":
            cluster.add_node(num_cpus=1)
        return driver.wait()
    finally:
        driver.kill()
        cluster.shutdown()


def steps(run: Path) -> int:
    file = run / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


sys.exit(main())
