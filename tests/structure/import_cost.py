"""The cost of a training run's imports beyond torch's: processor time, modules, and time in the project's own modules.

    python -m tests.structure.import_cost --tree OLD --tree NEW [--times 5] [--modules NAME …]

Each tree is measured in fresh processes, in turns with the others, after one that compiles its bytecode; medians are
printed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import median

CODE = """
import importlib, json, sys, time
started = time.process_time()
import torch
before, known = time.process_time(), set(sys.modules)
for name in sys.argv[1:]:
    importlib.import_module(name)
after = time.process_time()
fresh = set(sys.modules) - known
own = [name for name in fresh if name.partition(".")[0] in ("pretrain", "megalite", "megalite_kernels", "tools")]
print(json.dumps({"seconds": after - before, "of torch": before - started, "modules": len(fresh), "own modules": len(own)}))
"""
LINE = re.compile(r"import time: +(\d+) \| +\d+ \| +(pretrain|megalite|megalite_kernels|tools)\b.*")


def measure(tree: Path, modules: list[str]) -> dict[str, float]:
    """Import the modules of a tree in a new process. `own seconds`: from -X importtime, without nested imports."""
    environment = {**os.environ, "PYTHONPATH": f"{tree}{os.pathsep}{tree / 'kernels'}", "OMP_NUM_THREADS": "1"}
    processes = []
    for options in ([], ["-X", "importtime"]):
        command = [sys.executable, *options, "-c", CODE, *modules]
        processes.append(subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=True))
    own = sum(int(line[1]) for line in map(LINE.fullmatch, processes[1].stderr.splitlines()) if line)
    return {**json.loads(processes[0].stdout.splitlines()[-1]), "own seconds": own / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, action="append", required=True, metavar="DIR")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--modules", nargs="+", default=["pretrain", "megalite.training.trainer"], metavar="NAME")
    options = parser.parse_args()
    trees = [tree.resolve() for tree in options.tree]
    for tree in trees:
        measure(tree, options.modules)
    rounds = [{tree: measure(tree, options.modules) for tree in trees} for _ in range(options.times)]
    for tree in trees:
        medians = {key: median(costs[tree][key] for costs in rounds) for key in rounds[0][tree]}
        values = (f"{key} {value:g}" if "modules" in key else f"{key} {value:.3f}" for key, value in medians.items())
        print(f"{tree}: {', '.join(values)}")


if __name__ == "__main__":
    main()
