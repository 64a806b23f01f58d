"""megalite and other programs at equal settings: ratios of alternating runs, and of megalite to itself.

The pairs are a 25M Llama and transformers; nanoGPT's small character model and a GPT in plain torch; data
parallelism on four ranks and DDP with ZeroRedundancyOptimizer, FSDP2, and torchtitan's Llama under FSDP2; a
Llama of width 256 on one to eight ranks and picotron's layers, messages and buckets. Both sides of a pair
compute their matmuls with the same library. A peer that cannot be imported on a CPU is reimplemented; its
module documents what it does and what it omits. Use `--rounds 10` for ten pairs, and select peers by name if
all of them take too long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import comm, overhead, report, step

PEERS = {
    "transformers": "benchmarks.transformers_peer",
    "nanogpt": "benchmarks.nanogpt_peer",
    "ddp": "benchmarks.sharded_peer",
    "fsdp2": "benchmarks.sharded_peer",
    "torchtitan": "benchmarks.torchtitan_peer",
    "picotron": "benchmarks.picotron_peer",
}
"""Peer → the module of its measured process."""
AGAIN = "again"
"""Suffix of the name of a second run of megalite, whose ratio to the first shows the noise of the machine."""
SETTINGS = {"MKL": "highest", "oneDNN": "medium"}
COLUMNS = {
    "peer": "peer",
    "run": "run",
    "products by": "products",
    "precision": "precision",
    "layout": "layout",
    "ranks": "ranks",
    "ms/step": "ms_per_step:,.1f",
    "time/megalite's": "ratio:.3f",
    "quartiles": "ratio_quartiles",
    "pairs": "pairs",
}


@dataclass
class PeerRun:
    """One side of a pair, with one result per round."""

    name: str
    module: str
    results: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class PeerComparison:
    """Runs of megalite, of megalite again, and of a peer with one configuration."""

    peer: str
    library: str  # of fp32 matmuls, a key of SETTINGS
    config: dict[str, Any]
    steps: tuple[int, int]  # warm-up, timed
    ranks: int = 1
    layout: str = "one process"
    precision: str = "fp32"
    runs: list[PeerRun] = field(default_factory=list)

    def __post_init__(self) -> None:
        own = "benchmarks.trainer_run"
        self.config["train"] |= {"precision": self.precision}
        self.runs = [
            PeerRun("megalite", own),
            PeerRun(self.peer, PEERS[self.peer]),
            PeerRun(f"megalite {AGAIN}", own),
        ]

    def measure(self, number: int, threads: int) -> None:
        """Run one round. Every second one is in the opposite order."""
        for run in self.runs[:: 1 if number % 2 else -1]:
            run.results.append(self.launch(run, threads))

    def launch(self, run: PeerRun, threads: int) -> dict[str, Any]:
        """Start one measured process, or one for each rank with a single thread."""
        warmup, steps = self.steps
        spec = {
            "warmup_steps": warmup,
            "steps": steps,
            "product_steps": 0,
            "peak_size": 64,
            "config": self.config,
            "peer": self.peer,
        }
        spec |= {"matmul": SETTINGS[self.library]}
        return report.launch(run.module, spec, ranks=self.ranks, threads=threads if self.ranks == 1 else 1)

    def rows(self) -> list[dict[str, Any]]:
        own = self.runs[0].results
        return [
            {
                "peer": self.peer,
                "run": run.name,
                "products": self.library,
                "precision": self.precision,
                "layout": self.layout,
                "ranks": self.ranks,
                "ms_per_step": 1e3 * median(value for result in run.results for value in result["seconds"]),
                **compared(own, run.results),
                "step_ms": [[1e3 * value for value in result["seconds"]] for result in run.results],
            }
            for run in self.runs
        ]


def compare(
    *,
    rounds: int,
    threads: int,
    smoke: bool,
    progress: Callable[[str], None],
    peers: Sequence[str] = tuple(PEERS),
) -> dict[str, Any]:
    """Run all measurements, and return the figures with their conditions."""
    with TemporaryDirectory(prefix="megalite_benchmark_") as scratch:
        compared = [each for peer in peers for each in comparisons(peer, smoke, Path(scratch))]
        for number in range(1, rounds + 1):
            for each in compared:
                settings = f"{each.layout}, {each.precision}, matmuls by {each.library}"
                progress(f"round {number} of {rounds}: {each.peer}, {settings}")
                each.measure(number, threads)
    rows = [row for each in compared for row in each.rows()]
    configs = {
        each.peer: {name: each.config[name] for name in ("model", "train", "parallel")} for each in compared
    }
    return {
        "threads": threads,
        "protocol": {"rounds": rounds},
        "config": configs,
        "results": rows,
        "targets": [],
    }


def comparisons(peer: str, smoke: bool, scratch: Path) -> list[PeerComparison]:
    """Return the comparisons of a peer.

    On one process there is one for each library; on several ranks, where matmuls matter less, only oneDNN is
    used.
    """
    if peer == "transformers":
        config = step.config_of(*((step.SMOKE_MODEL, 2) if smoke else (step.MODEL, 4)), scratch)
        steps = (1, 2) if smoke else (1, 3)
        mixed = PeerComparison(peer, "oneDNN", deepcopy(config), steps, precision="bf16")
        return [*(PeerComparison(peer, library, config, steps) for library in SETTINGS), mixed]
    if peer == "nanogpt":
        config = overhead.config_of(overhead.runs(smoke)[0], scratch)
        return [PeerComparison(peer, library, config, (1, 2) if smoke else (20, 60)) for library in SETTINGS]
    if peer == "picotron":
        return [of_picotron(run, scratch) for run in overhead.runs(smoke) if run.name == "llama"]
    model, length, ranks = (step.SMOKE_MODEL, 16, 2) if smoke else (step.MODEL, 64, comm.RANKS)
    config = comm.config_of(model, length, ranks, scratch)
    config["parallel"] |= {"zero": 1 if peer == "ddp" else 3}
    return [PeerComparison(peer, "oneDNN", config, (1, 2) if smoke else (2, 6), ranks, f"DP{ranks}")]


def of_picotron(run: overhead.OverheadRun, scratch: Path) -> PeerComparison:
    """Return the comparison on one layout.

    Neither side clips; megalite shards the optimizer state, picotron does not.
    """
    config = overhead.config_of(run, scratch)
    config["train"] |= {"grad_clip": 0.0}
    return PeerComparison("picotron", "oneDNN", config, run.steps, run.ranks, run.layout_name)


def compared(own: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return median and quartiles of the ratio of the step times, round by round.

    The ratio is the time of the other run over that of our own. A round that is slow on both sides changes
    its ratio little.

    Args:
        own, other: one result per round, with the `seconds` of its steps.
    """
    ratios = [
        median(theirs["seconds"]) / median(ours["seconds"]) for ours, theirs in zip(own, other, strict=True)
    ]
    low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
    return {"ratio": median(ratios), "ratio_quartiles": f"{low:.3f}–{high:.3f}", "pairs": len(ratios)}
