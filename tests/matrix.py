"""The long form of the tests, in slices that can be resumed.

Every plan; kernels compiled at the sizes of real models; 500 random configurations; 200 rounds under random delays;
checkpoints of eight layouts loaded on every other; a hundred kills; two hundred losses and returns of ranks; thousands
of layouts with context parallelism, with experts, with latent attention or sinks, and of the equivalence table, in an
order in which any beginning is a random sample.

    python -m tests.matrix --minutes 9 [--part PART]       goes on where the last stopped
    python -m tests.matrix --reproduce random/17           one case, with its whole error

Each case appends a line to runs/matrix/PART.jsonl when it has run, so a killed slice loses one case. Failed cases run
again first. Exit status: 0, or 1 if a case failed.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported anywhere, as in conftest.py

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any, Protocol

from megalite.system.progress import Progress, Report
from tests.support.pool import RankPool, start_fork_server
from tests.support.references import References
from tests.support.spaces.space import Case, world

ROOT = Path(__file__).resolve().parents[1]
STATE = ROOT / "runs" / "matrix"
ERROR_TAIL = 2500  # characters of an error in a slice's output
CHUNK = 48  # neighbouring cases that are sorted by layout, so that groups and meshes are reused
# what a layout of the large space changes shows in the first steps; the table of the suite runs more
STEPS, LAYOUT_STEPS = 20, 5
RANDOM_CASES = 500
STRESS_ROUNDS = 200
STRESS_STEPS = 10
LONGEST_DELAY_S = 0.003
RESHARDING_STEPS = 10
KILLED_RUNS, KILLS_A_RUN = 10, 10
ELASTIC_RUNS, CHANGES = 20, 10
NODES = ("nodes", "places")  # runs on two launchers: one is killed, or loses a rank
PLANS = {"ranks": range(1, 9), "microbatches": range(1, 33), "virtual stages": range(1, 5)}


class Part(Protocol):
    """One kind of proof."""

    longest_s: float
    """Expected time of a long case: a slice starts no case that would end after the slice."""

    def cases(self) -> list[str]:
        """Every case by name, in the order in which they run."""

    def prove(self, case: str) -> None:
        """Raise where the case fails."""


class Sample:
    """Layouts of a space of options, each compared with one process."""

    longest_s = 30.0

    def __init__(self, name: str, number: int, steps: int, directory: Path, ranks: RankPool):
        from tests.support.configs import write_tokens
        from tests.support.spaces.covering import SPACES
        from tests.support.spaces.layouts import OPTIONS

        self._space, self._number, self._steps, self._ranks = SPACES[name], number, steps, ranks
        self._prefixes = {size: write_tokens(directory, size) for size in OPTIONS["vocab_size"]}
        self._references = References(ranks)
        self._cases: dict[str, Case] = {}

    def cases(self) -> list[str]:
        """In random order, so that any beginning is a sample; neighbours are sorted by layout."""
        self._cases = {self._space.label(case): case for case in self._space.sample(self._number)}
        order = list(self._cases)
        chunks = (sorted(order[first : first + CHUNK], key=self._layout) for first in range(0, len(order), CHUNK))
        return list(chain.from_iterable(chunks))

    def _layout(self, name: str) -> tuple[int, ...]:
        case = self._space.complete(self._cases[name])
        return world(case), case["tp"], case["pp"], case["dp"]

    def prove(self, case: str) -> None:
        from tests.distributed.test_equivalence import TOLERANCE, assert_same_run
        from tests.support import jobs

        complete = self._space.complete(self._cases[case])
        kinds = ("weight", "ema") if complete.get("ema") else ("weight",)
        config, alone = self._space.configs(self._cases[case], self._prefixes[complete["vocab_size"]])
        for each in (config, alone):
            each["train"]["steps"] = self._steps
        got = self._ranks.run(world(complete), jobs.train, config, self._steps, kinds)
        expected = self._references.run(jobs.train, alone, self._steps, kinds)
        assert_same_run(got, expected, *TOLERANCE[complete["precision"]])


class Random:
    """Random configurations: each trains alike on every layout, or is rejected with one message."""

    longest_s = 20.0

    def __init__(self, directory: Path, ranks: RankPool):
        from tests.support.random_configurations import Files

        self._ranks = ranks
        self._files = Files.write(directory)

    def cases(self) -> list[str]:
        return [str(seed) for seed in range(RANDOM_CASES)]

    def prove(self, case: str) -> None:
        from tests.support.random_configurations import draw, prove

        prove(draw(int(case), self._files), self._files, self._ranks)


class Stress:
    """Rounds under random delays, each bitwise equal to the undelayed run, of every layout in turn."""

    longest_s = 60.0

    def __init__(self, directory: Path, ranks: RankPool):
        from tests.support.configs import write_tokens
        from tests.support.faults import delays

        self._ranks, self._prefix = ranks, write_tokens(directory, delays.MODEL["vocab_size"])

    def cases(self) -> list[str]:
        from tests.support.faults.delays import LAYOUTS

        return [f"{seed}-{layout}" for seed, layout in enumerate(islice(cycle(LAYOUTS), STRESS_ROUNDS), start=1)]

    def prove(self, case: str) -> None:
        from tests.support.faults.delays import prove_undisturbed

        seed, _, layout = case.partition("-")
        prove_undisturbed(
            layout, STRESS_STEPS, range(int(seed), int(seed) + 1), LONGEST_DELAY_S, self._prefix, self._ranks
        )


class Resharding:
    """Checkpoints of every layout loaded on every other: the same tensors, samples and losses."""

    longest_s = 60.0

    def __init__(self, directory: Path, ranks: RankPool):
        from tests.support import resharding
        from tests.support.configs import write_tokens

        prefix = write_tokens(directory, resharding.MODEL["vocab_size"])
        self._pairs = {f"{saved}/{loaded}": (saved, loaded) for saved, loaded in resharding.PAIRS}
        self._proof = resharding.Resharding(prefix, directory, ranks, RESHARDING_STEPS)

    def cases(self) -> list[str]:
        return list(self._pairs)

    def prove(self, case: str) -> None:
        self._proof.prove(*self._pairs[case])


class Kills:
    """Runs that are killed at random moments, ten times each."""

    longest_s = 120.0

    def __init__(self, directory: Path, ranks: RankPool):
        from tests.support.configs import write_tokens
        from tests.support.faults.killed_ranks import LAYOUTS, MODEL

        self._directory, self._ranks = directory, ranks
        self._prefix = write_tokens(directory, MODEL["vocab_size"])
        kinds = islice(
            cycle([(layout, how) for layout in LAYOUTS for how in ("at once", "in the background")]), KILLED_RUNS
        )
        self._cases = {f"{seed}/{layout}/{how}": (seed, layout, how) for seed, (layout, how) in enumerate(kinds)}

    def cases(self) -> list[str]:
        return list(self._cases)

    def prove(self, case: str) -> None:
        from tests.support.faults.killed_ranks import Kills as Proof

        seed, layout, how = self._cases[case]
        with tempfile.TemporaryDirectory(dir=self._directory) as directory:
            Proof(layout, self._prefix, Path(directory), self._ranks, background=how != "at once").prove(
                KILLS_A_RUN, seed
            )


class Elastic:
    """Runs with ten random losses and returns of ranks each, and of a node: the run on one process that has none."""

    longest_s = 240.0

    def __init__(self, directory: Path, ranks: RankPool):
        self._directory, self._ranks = directory, ranks

    def cases(self) -> list[str]:
        from tests.support.faults.elastic_runs import LAYOUTS

        return [*NODES, *(f"{seed}-{layout}" for seed, layout in enumerate(islice(cycle(LAYOUTS), ELASTIC_RUNS)))]

    def prove(self, case: str) -> None:
        from tests.support.faults.elastic_runs import prove, prove_nodes, prove_places_of_nodes

        seed, _, layout = case.partition("-")
        with tempfile.TemporaryDirectory(dir=self._directory) as directory:
            if case in NODES:
                (prove_nodes if case == "nodes" else prove_places_of_nodes)(Path(directory), self._ranks)
                return
            prove(layout, int(seed), CHANGES, Path(directory), self._ranks)


class Plans:
    """Schedules of every size, training and evaluation: valid, and free of deadlocks with rendezvous messages."""

    longest_s = 60.0

    def __init__(self, directory: Path, ranks: RankPool):
        pass

    def cases(self) -> list[str]:
        from megalite.parallel.pipeline.generator import SCHEDULES

        virtual = {"interleaved": PLANS["virtual stages"]}
        return [
            f"{name}/{ranks}/{chunks}"
            for name in SCHEDULES
            for ranks in PLANS["ranks"]
            for chunks in virtual.get(name, (0,))
        ]

    def prove(self, case: str) -> None:
        from tests.parallel.pipeline.test_properties import prove_plan

        name, ranks, chunks = case.split("/")
        for microbatches in PLANS["microbatches"]:
            for forward_only in (False, True):
                prove_plan(name, int(ranks), microbatches, int(chunks) or None, None, forward_only)


class Kernels:
    """Kernels compiled for every architecture: every launch of the suite's lists, which itself compiles each for one;
    and at the sizes of real models, with every set of options.

    They must not spill, exceed shared memory or use another architecture's tensor cores, and those of the suite's lists
    move memory 128 bits at a time.
    """

    longest_s = 240.0

    def __init__(self, directory: Path, ranks: RankPool):
        from megalite_kernels.launch import ARCHITECTURES

        from tests.kernels.compiling import MODULES, architectures
        from tests.kernels.variants import long_list

        self._lists = {f"{chip}/{module}": (chip, module) for module in MODULES for chip in architectures(module)}
        every = ((architecture, name, *call) for name, call in long_list().items() for architecture in ARCHITECTURES)
        self._long = {
            f"{architecture}/{name}": (architecture, module, calls) for architecture, name, module, calls in every
        }

    def cases(self) -> list[str]:
        return [*self._lists, *self._long]

    def prove(self, case: str) -> None:
        from tests.kernels.compiling import broken, compiled, multiplies
        from tests.kernels.variants import launches

        architecture, module, *calls = self._lists.get(case) or self._long[case]
        binaries = {
            each.name: compiled(each, architecture, multiplies(module, each.name))
            for each in launches(module, architecture, *calls)
        }
        if case in self._lists:
            failed: dict[str, Any] = broken(module, architecture, binaries)
        else:
            rules = {name: binary.broken_rules(architecture, name) for name, binary in binaries.items()}
            failed = {name: (names, binaries[name]) for name, names in rules.items() if names}
        assert not failed, failed


PARTS: dict[str, Callable[[Path, RankPool], Part]] = {
    "plans": Plans,
    "kernels": Kernels,
    "random": Random,
    "stress": Stress,
    "resharding": Resharding,
    "kills": Kills,
    "elastic": Elastic,
    "context": partial(Sample, "context", 2_000, STEPS),
    "experts": partial(Sample, "experts", 2_000, STEPS),
    "attention": partial(Sample, "attention", 2_000, STEPS),
    "layouts": partial(Sample, "layouts", 5_000, LAYOUT_STEPS),
}


# ---- what has run


@dataclass
class Record:
    """Which cases of a part have passed and failed so far, kept in a file; `source` tells which code they ran on."""

    path: Path
    source: str
    last: dict[str, dict[str, Any]] = field(default_factory=dict)

    @staticmethod
    def read(part: str, source: str) -> Record:
        record = Record(STATE / f"{part}.jsonl", source)
        lines = record.path.read_text().splitlines() if record.path.is_file() else []
        record.last = {entry["case"]: entry for entry in map(json.loads, lines)}
        return record

    def add(self, case: str, passed: bool, seconds: float) -> None:
        self.last[case] = {"case": case, "passed": passed, "seconds": round(seconds, 2), "source": self.source}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a") as file:
            file.write(json.dumps(self.last[case]) + "\n")

    def pending(self, cases: Iterable[str]) -> list[str]:
        """Failed cases first, then those that have not run."""
        rest = [case for case in cases if not self.last.get(case, {}).get("passed")]
        return sorted(rest, key=lambda case: case not in self.last)

    def summary(self, cases: Sequence[str]) -> str:
        entries = [self.last[case] for case in cases if case in self.last]
        passed = [entry for entry in entries if entry["passed"]]
        older = sum(entry["source"] != self.source for entry in passed)
        failed, where = len(entries) - len(passed), f", {older:,} of them on other source" if older else ""
        left = len(cases) - len(entries)
        return f"{len(passed):,} of {len(cases):,} passed{where}, {failed:,} failed, {left:,} to run"


def source_digest() -> str:
    """Which code is proved: a hash of everything that can change a number."""
    digest = blake2b(digest_size=6)
    for path in sorted([*(ROOT / "megalite").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


# ---- slices


def run_slice(name: str, part: Part, record: Record, deadline: float, progress: Report) -> int:
    """Run cases until time is up; returns how many failed."""
    cases, started, ran, failed = part.cases(), time.monotonic(), 0, 0
    pending = record.pending(cases)
    for case in pending:
        progress(name, ran, len(pending), "cases")
        if time.monotonic() + part.longest_s > deadline:
            break
        began = time.monotonic()
        try:
            part.prove(case)
            passed = True
        except Exception as error:  # a slice goes on: the case is named and runs again in the next one
            what = f"{type(error).__name__}: {str(error)[-ERROR_TAIL:]}"
            print(
                f"FAILED {name}/{case}\n{what}\nreproduce: python -m tests.matrix --reproduce {name}/{case}", flush=True
            )
            passed = False
        record.add(case, passed, time.monotonic() - began)
        ran, failed = ran + 1, failed + (not passed)
    print(f"{name}: {ran:,} run in {time.monotonic() - started:.0f} s; {record.summary(cases)}", flush=True)
    return failed


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.matrix", description="Run a slice of the long form of the tests."
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="end the slice after this long")
    parser.add_argument("--part", choices=PARTS, help="only this part")
    parser.add_argument("--fresh", action="store_true", help="forget what has passed")
    parser.add_argument("--reproduce", metavar="PART/CASE", help="run one case and show its whole error")
    options = parser.parse_args(argv)
    start_fork_server()
    deadline, source, ranks = time.monotonic() + 60 * options.minutes, source_digest(), RankPool()
    chosen = [options.reproduce.split("/")[0]] if options.reproduce else [options.part] if options.part else list(PARTS)
    if not set(chosen) <= set(PARTS):
        parser.error(f"--reproduce = {options.reproduce}: the part is one of {', '.join(PARTS)}")
    failed = 0
    try:
        for name in chosen:
            with tempfile.TemporaryDirectory(prefix="matrix_") as directory:
                part = PARTS[name](Path(directory), ranks)
                if options.reproduce:
                    case = options.reproduce.removeprefix(f"{name}/")
                    if case not in part.cases():
                        parser.error(f"--reproduce = {options.reproduce} is no case")
                    part.prove(case)
                    print(f"{options.reproduce} passed")
                else:
                    if options.fresh:
                        (STATE / f"{name}.jsonl").unlink(missing_ok=True)
                    with Progress() as progress:
                        failed += run_slice(name, part, Record.read(name, source), deadline, progress)
    finally:
        ranks.close()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
