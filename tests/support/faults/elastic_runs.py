"""Runs that lose ranks and take them back: in fp64 they end as the run on one process that never changed.

The batch grows, two datasets are blended and begin a second epoch, dropout draws and the weights are averaged, so a
position that is not restored shows.
"""

from __future__ import annotations

import json
import math
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megalite import checkpoint
from megalite.checkpoint.inspect import differences
from megalite.config.elastic import layouts, ranks_of
from megalite.config.load import from_dict
from tests.support.configs import SEQUENCE, SINGLE, config_of, write_tokens
from tests.support.jobs_saving import fit_to_the_end
from tests.support.pool import RankPool

ROOT = Path(__file__).parents[3]
TIMEOUT = 900.0  # seconds: far more than a loaded machine needs
LIMIT = 1e-9
MODEL = {
    **SINGLE,
    "tied": True,
    "kv_heads": 2,
    "vocab_size": 96,
    "layers": 2,
    "masked": True,
    "dropout": 0.1,
    "ema": True,
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {  # the smallest number of ranks, and the largest layout
    "data": (1, {"dp": 4, "zero": 1}),
    "shards": (2, {"dp": 4, "zero": 3}),
    "pipeline": (1, {"pp": 2, "dp": 2, "zero": 2}),
    "model": (1, {"tp": 2, "pp": 2, "dp": 1, "zero": 1, "sequence_parallel": True}),
    "pair": (1, {"dp": 2, "zero": 1}),
}


@dataclass(frozen=True)
class Changes:
    """Losses and returns in the order in which they happen.

    Attributes:
        faults: values of faults.inject.
        sizes: the number of ranks of every start.
        last: the step of the last change.
    """

    faults: list[str]
    sizes: list[int]
    last: int

    @classmethod
    def draw(cls, seed: int, count: int, fewest: int, most: int, used: Callable[[int], int]) -> Changes:
        """Draw changes: a loss of a random rank, or the return of all that are lost, every one to three steps."""
        chosen, step, usable = random.Random(seed), 1, most
        faults, sizes = list[str](), [used(most)]
        for start in range(count):
            step += chosen.randint(1, 3)
            may_lose, may_return = usable > fewest and sizes[-1] > 1, usable < most
            if may_lose and (not may_return or chosen.random() < 0.5):
                faults.append(f"kill:rank={chosen.randrange(sizes[-1])},step={step},restart={start}")
                usable -= 1
            else:
                faults.append(f"return:rank=0,step={step},restart={start}")
                usable = most
            sizes.append(used(usable))
        return cls(faults, sizes, step)


def configuration(layout: str, directory: Path, name: str, steps: int) -> dict[str, Any]:
    """The whole configuration of a run with the largest layout of LAYOUTS."""
    sizes = LAYOUTS[layout][1]
    blend = {}
    for number, (count, weight) in enumerate([(1_600, 0.7), (2_400, 0.3)]):
        (directory / str(number)).mkdir(exist_ok=True)
        prefix = directory / str(number) / "tokens_96"
        if not prefix.with_suffix(".bin").exists():
            write_tokens(directory / str(number), MODEL["vocab_size"], count, seed=number)
        blend[str(prefix)] = weight
    config = config_of({**MODEL, **sizes}, str(directory / "none"), "fp64")
    config["run"] = {"dir": str(directory / "runs"), "name": name, "timeout": "120s"}
    config["data"] |= {"train": blend, "sequence_length": SEQUENCE}
    config["train"] |= {
        "steps": steps,
        "global_batch_size": 24,
        "micro_batch_size": 1,
        "rampup_batch_size": [12, 12, 60],
    }
    config["checkpoint"] = {"load": "auto", "interval": 6, "copy_interval": 2, "keep": 2}
    return config


def used_ranks(config: dict[str, Any], fewest: int, most: int) -> dict[int, int]:
    """Number of ranks → ranks of its layout."""
    resolved = from_dict(config)
    resolved.parallel.min_ranks = fewest
    return {size: ranks_of(layout) for size, layout in layouts(resolved, range(fewest, most + 1)).items()}


class TrainCommand:
    """`megalite train` in a process. Its output is in a file, since nobody reads a pipe while it trains."""

    def __init__(self, config: dict[str, Any], directory: Path, name: str, *options: str):
        file, self.log = directory / f"{name}.yaml", directory / f"{name}.log"
        file.write_text(yaml.safe_dump(config))
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "megalite", "train", "--config", str(file), *options],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def finish(self) -> str:
        """Wait until the run is done. Returns what it has printed."""
        try:
            status = self.process.wait(timeout=TIMEOUT)
        finally:
            self.kill()
        assert status == 0, self.log.read_text()
        return self.log.read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def steps_of(run: Path) -> dict[int, float]:
    """Step → loss; every step is there once."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    assert [step for step, _ in losses] == list(range(1, len(losses) + 1)), losses
    return dict(losses)


def largest_difference(run: Path, other: Path, steps: int) -> float:
    """The largest relative difference between losses, or between tensors of the last checkpoints, of two runs."""
    one, two = steps_of(run), steps_of(other)
    assert one.keys() == two.keys() == set(range(1, steps + 1))
    worst = max(abs(one[step] - two[step]) / abs(two[step]) for step in one)
    ends = [checkpoint.manifest_of(each / "checkpoints" / checkpoint.step_name(steps)) for each in (other, run)]
    for name in ("samples", "skipped"):
        assert ends[0].state[name] == ends[1].state[name], name
    assert any(name.startswith("ema/") for name in ends[0].tensors)
    for difference in differences(*ends):
        assert difference.relative is not None, difference
        worst = max(worst, difference.relative)
    assert math.isfinite(worst)
    return worst


def prove(layout: str, seed: int, count: int, directory: Path, ranks: RankPool) -> float:
    """Compare a run with `count` random losses and returns with the run on one process that has none.

    Returns the largest relative difference of losses, weights, moments and averages.
    """
    fewest, sizes = LAYOUTS[layout]
    most = math.prod(sizes[axis] for axis in ("tp", "pp", "dp") if axis in sizes)
    changes = Changes.draw(
        seed, count, fewest, most, used_ranks(configuration(layout, directory, "-", 10), fewest, most).get
    )
    steps = changes.last + 2
    config = configuration(layout, directory, f"elastic-{layout}-{seed}", steps)
    config["faults"] = {"inject": changes.faults}
    output = TrainCommand(config, directory, "elastic", "--nproc", f"{fewest}:{most}", "--return_after", "1h").finish()
    assert output.count("injected kill") == sum(fault.startswith("kill") for fault in changes.faults), output
    after = [line for line in output.splitlines() if line.startswith("going on after step ")]
    assert [int(line.split(" with ")[1].split()[0]) for line in after] == changes.sizes[1:], (changes, output)
    assert all("state from memory" in line or "after step 0" in line for line in after), output
    alone = configuration(layout, directory, f"alone-{layout}-{seed}", steps)
    alone["parallel"] |= {"tp": 1, "pp": 1, "dp": 1, "zero": 0, "sequence_parallel": False}
    ranks.run(1, fit_to_the_end, alone)
    run = directory / "runs"
    worst = largest_difference(run / config["run"]["name"], run / alone["run"]["name"], steps)
    assert worst <= LIMIT, (worst, changes)
    return worst


def prove_nodes(directory: Path, ranks: RankPool) -> float:
    """Kill one of two launchers, which are nodes to each other, and start it again. Returns as `prove`."""
    steps = 60
    config = configuration("pair", directory, "nodes", steps)
    # the run waits for the loss and for the return
    config["faults"] = {"inject": [f"slow:rank=0,step=8-{steps},seconds=1,restart={start}" for start in range(3)]}
    port = free_port()
    options = ["--nproc", "1", "--nnodes", "1:2", "--rdzv_endpoint", f"localhost:{port}"]
    run = directory / "runs" / "nodes"
    first, sizes = TrainCommand(config, directory, "first", *options), list[int]()
    while socket.socket().connect_ex(("localhost", port)) and first.process.poll() is None:
        time.sleep(0.1)  # the first one hosts the rendezvous, and stays
    second = TrainCommand(config, directory, "second", *options)
    try:
        wait_for(run, first, lambda step: step >= 7)
        sizes.append(ranks_now(run))
        second.kill()
        wait_for(run, first, lambda step: ranks_now(run) == 1 and step >= 12)
        second = TrainCommand(config, directory, "third", *options)
        output = first.finish()
        second.finish()
    finally:
        first.kill()
        second.kill()
    changes = [line.partition(" with ")[2].split()[0] for line in output.splitlines() if line.startswith("going on")]
    # the second node may come when the first one has already started
    assert sizes == [2] and [int(ranks) for ranks in changes][-2:] == [1, 2], output
    alone = configuration("pair", directory, "alone", steps)
    alone["parallel"] |= {"dp": 1, "zero": 0}
    ranks.run(1, fit_to_the_end, alone)
    worst = largest_difference(run, run.with_name("alone"), steps)
    assert worst <= LIMIT, worst
    return worst


def prove_places_of_nodes(directory: Path, ranks: RankPool) -> float:
    """One of four ranks of two launchers is killed, and its place returns. Returns as `prove`."""
    steps = 14
    config = configuration("data", directory, "places", steps)
    config["faults"] = {"inject": ["kill:rank=1,step=4", "return:rank=0,step=8,restart=1"]}
    port = free_port()
    options = ["--nproc", "1:2", "--nnodes", "2", "--rdzv_endpoint", f"localhost:{port}", "--return_after", "1h"]
    nodes = [TrainCommand(config, directory, name, *options) for name in ("first", "second")]
    try:
        outputs = [node.finish() for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    changes = [line for line in "".join(outputs).splitlines() if line.startswith("going on after")]
    assert [line.partition(" with ")[2].split()[0] for line in changes] == ["3", "4"], outputs
    alone = configuration("data", directory, "alone", steps)
    alone["parallel"] |= {"dp": 1, "zero": 0}
    ranks.run(1, fit_to_the_end, alone)
    run = directory / "runs" / "places"
    worst = largest_difference(run, run.with_name("alone"), steps)
    assert worst <= LIMIT, worst
    return worst


def ranks_now(run: Path) -> int:
    """The number of ranks of the newest start."""
    return int(json.loads((run / "starts.jsonl").read_text().splitlines()[-1])["change"]["ranks"])


def wait_for(run: Path, command: TrainCommand, reached: Callable[[int], bool]) -> None:
    """Wait until the last recorded step of a run meets a condition."""
    deadline, metrics = time.monotonic() + TIMEOUT, run / "metrics.jsonl"
    while True:
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        steps = [json.loads(line)["step"] for line in lines if line.endswith("}")]
        if steps and (run / "starts.jsonl").exists() and reached(steps[-1]):
            return
        assert command.process.poll() is None and time.monotonic() < deadline, command.log.read_text()
        time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])
