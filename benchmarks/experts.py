"""Mixture of experts compared with a dense model that has the same number of active parameters.

It runs on one process, and with its experts split over four.

    python -m benchmarks.experts [--steps 8] [--output benchmarks/results]

The results are tokens per second, and the fraction of a step that rank 0 spends in the dispatch (rows, their
counts, and waiting for other ranks). Runs alternate in rounds, and figures are medians over rounds. Writes
MACHINE-experts.json.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import report
from megalite.commands.parser import Parser, positive

SEQUENCE, BATCH, VOCABULARY = 256, 16, 4096
WIDTH = 384  # of an expert; a token meets two
SHAPE = {
    **{
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "max_position_embeddings": SEQUENCE,
}
MIXTURE = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": WIDTH,
    "router_aux_loss_coef": 0.01,
}
RUNS: dict[str, tuple[bool, int, int, str]] = {  # mixture, ranks, ep, dispatcher
    "dense": (False, 1, 1, "all_to_all"),
    "mixture": (True, 1, 1, "all_to_all"),
    "dense, dp 4": (False, 4, 1, "all_to_all"),
    "mixture, dp 4": (True, 4, 1, "all_to_all"),
    "mixture, ep 4, all-to-all": (True, 4, 4, "all_to_all"),
    "mixture, ep 4, all-gather": (True, 4, 4, "all_gather"),
}
COLUMNS = {
    "run": "run",
    "ranks": "ranks",
    "active parameters": "active_parameters:,",
    "tokens/s": "tokens_per_second:,.0f",
    "dispatch": "dispatch:.1%",
}


def config_of(name: str, data: str) -> dict[str, Any]:
    """Return the configuration of a run."""
    mixture, ranks, ep, dispatcher = RUNS[name]
    return {
        "model": {**SHAPE, "intermediate_size": 2 * WIDTH, **(MIXTURE if mixture else {})},
        "parallel": {"dp": ranks, "ep": ep, "expert_dispatch": dispatcher, "zero": 1},
        "data": {"train": data, "sequence_length": SEQUENCE},
        "train": {"steps": 1000, "global_batch_size": BATCH, "micro_batch_size": 4},
        "checkpoint": {"load": "none"},
    }


def compare(steps: int, rounds: int, threads: int) -> dict[str, Any]:
    """Measure all runs in every round."""
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in RUNS}
    with tempfile.TemporaryDirectory() as directory:
        data = report.write_random_tokens(Path(directory), VOCABULARY, 2_000_000)
        for _ in range(rounds):
            for name, (_, ranks, _, _) in RUNS.items():
                spec = {"config": config_of(name, data), "warmup_steps": 2, "steps": steps}
                measured[name].append(
                    report.launch("benchmarks.experts_run", spec, ranks=ranks, threads=threads)
                )
    protocol = {
        "steps": steps,
        "rounds": rounds,
        "threads": threads,
        "batch": BATCH,
        "sequence_length": SEQUENCE,
    }
    return {"protocol": protocol, "results": [_row(name, each) for name, each in measured.items()]}


def _row(name: str, results: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = median(median(each["seconds"]) for each in results)
    return {
        "run": name,
        "ranks": RUNS[name][1],
        "active_parameters": results[0]["active_parameters"],
        "seconds": seconds,
        "tokens_per_second": BATCH * SEQUENCE / seconds,
        "dispatch": median(each["dispatch"] / sum(each["seconds"]) for each in results),
    }


def main() -> None:
    tool = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tool.add_argument("--steps", type=positive, default=8, help="timed steps of a run (default 8)")
    tool.add_argument("--rounds", type=positive, default=3, help="times that each run is started (default 3)")
    tool.add_argument("--threads", type=positive, default=1, help="threads of a rank (default 1)")
    tool.add_argument(
        "--output", type=Path, default=report.RESULTS, metavar="DIR", help="directory of the results"
    )
    options = tool.parse_args()
    content = compare(options.steps, options.rounds, options.threads)
    print(report.table(content["results"], COLUMNS))
    print(report.write("experts", content, options.output, None))


if __name__ == "__main__":
    main()
