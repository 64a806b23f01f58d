"""Recomputation by budget compared with every other mode at the memory of that mode, on a CPU.

Planned and measured peaks are also compared at five budgets.

    python -m benchmarks.recomputation [--rounds 20] [--output benchmarks/results]

One process trains a small Llama in all variants, one step of each in turn, in an order that changes from
round to round. A budget is the planned peak of the mode that it is compared with. `ratio` is the median over
the rounds of budget time / the mode's time, and should be below 1.02. Peaks are those of torch's allocator
above the memory before the step, plus the states. Writes MACHINE-recomputation.json.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import report
from megalite.assembly import parts as build
from megalite.commands.parser import Parser, positive
from megalite.config.load import from_dict
from megalite.config.schema import Config
from megalite.optimizer.adamw import AdamW
from megalite.optimizer.registry import OPTIMIZERS
from megalite.optimizer.state import OptimizerState
from megalite.parallel.microbatch import Microbatch
from megalite.planner.api import decide_recomputation, estimate

MODES = ("none", "selective", "every-2", "full")
PARTS = (0.0, 0.25, 0.5, 0.75, 0.95)
"""Budgets between the peak of recomputing everything and that of recomputing nothing."""

TIMES = {
    "mode": "mode:s",
    "mode s": "mode_s:.3f",
    "budget s": "budget_s:.3f",
    "ratio": "ratio:.3f",
    "budget recomputes": "recomputed:s",
}
PEAKS = {"planned": "planned_bytes:,d", "measured": "measured_bytes:,d", "ratio": "measured_over_planned:.3f"}


class ModelVariant:
    """Model that takes steps on random tokens."""

    def __init__(self, config: Config):
        self.config = config
        mesh = build.make_mesh(config)
        self.parts = build.build_parts(config, mesh, "cpu")
        self.parts.store.initialize(0)
        length, batch = config.data.sequence_length, config.train.micro_batch_size
        count = build.layout(config).microbatches
        tokens = torch.randint(config.model.vocabulary, (length, batch))
        self.batches = [
            Microbatch.of(tokens.clone(), tokens.clone(), torch.arange(batch)) for _ in range(count)
        ]
        self.schedule = build.schedule(config, count)
        self.optimizer = AdamW(
            OptimizerState(self.parts.store, OPTIMIZERS["adamw"].tensors()), config.optimizer
        )
        self.steps = 0

    def step(self) -> float:
        """Return the seconds of one step."""
        started, store, self.steps = perf_counter(), self.parts.store, self.steps + 1
        store.reducer.begin_step(len(self.batches))
        self.parts.runtime.run(self.schedule, self.batches, step=self.steps, loss_scale=1.0)
        store.reducer.finish()
        self.optimizer.step(self.steps, 1e-3, None)
        store.gatherer.gather_updated()
        store.gatherer.finish()
        return perf_counter() - started

    def peak(self) -> int:
        """Return the maximum bytes that the allocator allocates during one step."""
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            self.step()
        events = (event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]")
        return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


def configuration(options: argparse.Namespace) -> Config:
    model = {
        "hidden_size": options.width,
        "intermediate_size": options.width * 11 // 4,
        "num_hidden_layers": options.layers,
    }
    model |= {
        "num_attention_heads": options.width // 64,
        "num_key_value_heads": options.width // 128,
        "vocab_size": 2048,
    }
    train = {"global_batch_size": 2 * options.batch, "micro_batch_size": options.batch}
    return from_dict(
        {
            "model": {**model, "max_position_embeddings": options.length},
            "parallel": {"dp": 1},
            "data": {"sequence_length": options.length},
            "train": train,
            "profiling": {"hardware": options.gpu},
        }
    )


def with_mode(config: Config, recompute: str) -> Config:
    return replace(config, train=replace(config.train, recompute=recompute))


def compare(config: Config, rounds: int) -> list[dict[str, Any]]:
    """Measure every mode, and the budget of its planned peak."""
    pairs = {}
    for mode in MODES:
        budget = estimate(with_mode(config, mode), 1, "cpu")[0].total
        chosen = decide_recomputation(config, budget, device="cpu").recompute
        pairs[mode] = (ModelVariant(with_mode(config, mode)), ModelVariant(with_mode(config, chosen)), budget)
    variants = [variant for one, other, _ in pairs.values() for variant in (one, other)]
    seconds: dict[int, list[float]] = {id(variant): [] for variant in variants}
    order = random.Random(0)
    for number in range(rounds + 1):
        for variant in order.sample(variants, len(variants)):
            took = variant.step()
            if number:  # the first round warms up
                seconds[id(variant)].append(took)
    rows = []
    for mode, (one, other, budget) in pairs.items():
        ratios = [b / a for a, b in zip(seconds[id(one)], seconds[id(other)], strict=True)]
        rows.append(
            {
                "mode": mode,
                "budget_bytes": budget,
                "mode_s": median(seconds[id(one)]),
                "budget_s": median(seconds[id(other)]),
                "ratio": median(ratios),
                "recomputed": other.config.train.recompute,
            }
        )
    return rows


def peaks(config: Config) -> list[dict[str, Any]]:
    """Return planned and measured peaks at five budgets."""
    rows = []
    (rank,) = decide_recomputation(config, 1 << 60, device="cpu").ranks
    for part in PARTS:
        budget = int(rank.everything + part * (rank.nothing - rank.everything))
        chosen = with_mode(config, decide_recomputation(config, budget, device="cpu").recompute)
        (planned,) = estimate(chosen, 1, "cpu")
        variant = ModelVariant(chosen)
        variant.step()
        measured = planned.states.device + variant.peak()
        rows.append(
            {
                "budget_bytes": budget,
                "planned_bytes": planned.total,
                "measured_bytes": measured,
                "measured_over_planned": measured / planned.total,
                "recomputed": chosen.train.recompute,
            }
        )
    return rows


def main() -> None:
    tool = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tool.add_argument("--rounds", type=positive, default=20, help="steps of every variant (default 20)")
    tool.add_argument("--layers", type=positive, default=6, help="layers (default 6)")
    tool.add_argument("--width", type=positive, default=512, help="width, a multiple of 128 (default 512)")
    tool.add_argument("--length", type=positive, default=256, help="sequence length (default 256)")
    tool.add_argument(
        "--batch",
        type=positive,
        default=2,
        help="samples of a microbatch, of which a step has two (default 2)",
    )
    tool.add_argument(
        "--gpu",
        metavar="FILE",
        help="the measured device whose costs count, as megalite plan --calibrate writes it",
    )
    tool.add_argument("--threads", type=positive, default=1, help="threads (default 1)")
    tool.add_argument(
        "--output",
        type=Path,
        default=None,
        metavar="DIR",
        help="directory of the results; default: only printed",
    )
    options = tool.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    config = configuration(options)
    protocol = {name: value for name, value in vars(options).items() if name != "output"}
    content: dict[str, Any] = {
        "protocol": protocol,
        "times": compare(config, options.rounds),
        "peaks": peaks(config),
    }
    print(report.table(content["times"], TIMES))
    print(report.table(content["peaks"], PEAKS))
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        print(f"written to {report.write('recomputation', content, options.output, None)}")


if __name__ == "__main__":
    main()
