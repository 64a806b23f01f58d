"""Prepare a token file in shards with Ray, on a cluster with a shared file system:

    python tools/preparation/ray_shards.py --shards 64 -- megalite prepare --input … --output data/corpus

It runs in an environment with `ray`, which need not have megalite. Each shard is a task of Ray, which starts
it again if its node is lost. A finished shard is skipped when the command is started again, and an
interrupted one continues.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess

import ray


def run(words: list[str], directory: str) -> str:
    """Run a command on the node that Ray has chosen, and return the node's id."""
    done = subprocess.run(words, cwd=directory, capture_output=True, text=True, encoding="utf-8")
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with status {done.returncode}: {done.stderr.strip()}")
    return str(ray.get_runtime_context().get_node_id())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shards", type=int, required=True, metavar="N", help="number of shards")
    parser.add_argument("--cpus", type=int, default=4, metavar="N", help="cores of a shard (default 4)")
    parser.add_argument("--address", default="auto", help="address of the cluster (default auto)")
    parser.add_argument("command", nargs="+", help="-- megalite prepare …, without --shard")
    options = parser.parse_args()
    program = shutil.which(options.command[0]) or options.command[0]
    words = [program, *options.command[1:], "--workers", str(options.cpus)]
    ray.init(address=options.address)
    shard = ray.remote(num_cpus=options.cpus, max_retries=3)(run)
    waiting = [
        shard.remote([*words, "--shard", f"{number}/{options.shards}"], os.getcwd())
        for number in range(1, options.shards + 1)
    ]
    nodes = ray.get(waiting)
    print(f"{options.shards} shards prepared on {len(set(nodes))} nodes", flush=True)
    subprocess.run([*words, "--merge"], check=True)


if __name__ == "__main__":
    main()
