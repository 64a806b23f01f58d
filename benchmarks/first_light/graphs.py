"""Part 5: training with CUDA graphs (`train.graphs`) beside the eager step.

Losses, gradient norms and weights are compared under deterministic algorithms, where they should be equal
bitwise: on one GPU and, with two or more, in a pipeline and over data parallelism, each with several
microbatches. Then the steps of a model are timed whose kernels take less time than their launches. A
rehearsal compares and times the eager step with itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.first_light.layouts import BF16, EXACT, LayoutCase, RankMachine, compared, last_line
from benchmarks.first_light.rows import Row, Scene, Verdict, guarded, row

STEPS, TIMED_STEPS = 5, 12
WARMUP = 3  # steps that are not timed: the first runs eagerly, the second records
MICROBATCHES = 4
LIMIT_S = 60.0
EAGER, REPLAYED = "0", "1"  # names of the two runs' results


@dataclass(frozen=True)
class GraphCase:
    """A run that is trained without graphs, then with them.

    Attributes:
        shape: width, layers and sequence length.
        train: options of the section train.
    """

    name: str
    precision: str
    shape: tuple[int, int, int]
    parallel: dict[str, int] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return self.parallel.get("pp", 1) * self.parallel.get("dp", 1)

    def config(self, scratch: Path, graphs: bool) -> dict[str, Any]:
        width, layers, length = self.shape
        vocabulary, batch = 512, MICROBATCHES * self.parallel.get("dp", 1)
        return {
            "run": {"dir": str(scratch), "name": "graphs"},
            "model": {
                "vocab_size": vocabulary,
                "hidden_size": width,
                "intermediate_size": 2 * width,
                "num_hidden_layers": layers,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "max_position_embeddings": length,
            },
            "parallel": {"tp": 1, "pp": 1, "dp": 1, "bucket_mb": 0.5, **self.parallel},
            "data": {
                "train": report.write_random_tokens(scratch, vocabulary, 64 * batch * length, length // 3),
                "sequence_length": length,
                "eod_mask_loss": True,  # the scale of the loss then differs between steps
            },
            "train": {
                "steps": 1000,
                "global_batch_size": batch,
                "micro_batch_size": 1,
                "precision": self.precision,
                "graphs": graphs,
                **self.train,
            },
            "optimizer": {"lr": 3e-4, "eps": 1e-6, "warmup_steps": 2},  # see layouts.EXACT
            "checkpoint": {"load": "none"},
        }


def cases(scene: Scene) -> list[GraphCase]:
    """Return the cases that are compared."""
    shape = scene.sized(512, 64), 4, scene.sized(128, 32)
    compared_cases = [
        GraphCase("graphs, fp32", "fp32", shape),
        GraphCase("graphs, bf16, layers recomputed", "bf16", shape, train={"recompute": "full"}),
    ]
    if len(scene.gpus) > 1:
        compared_cases += [
            GraphCase("graphs, bf16, pp 2", "bf16", shape, {"pp": 2}),
            GraphCase("graphs, bf16, dp 2, ZeRO-1", "bf16", shape, {"dp": 2, "zero": 1}),
        ]
    return compared_cases


def rows(scene: Scene) -> Iterator[Row]:
    shape = scene.sized(1024, 64), scene.sized(16, 2), scene.sized(512, 32)
    timed = GraphCase("time of a step with graphs", "fp32" if scene.rehearse else "bf16", shape)
    with TemporaryDirectory(prefix="megalite_first_light_") as scratch:
        for case in cases(scene):
            yield guarded(case.name, "proof", partial(proof, case, scene, Path(scratch)))
        yield guarded(timed.name, "measurement", partial(times, timed, scene, Path(scratch)))


def _train(case: GraphCase, scene: Scene, scratch: Path, steps: int, deterministic: bool) -> tuple[Path, str]:
    """Train without and with graphs. Return the directory of the results, and the error."""
    configs = [case.config(scratch, graphs) for graphs in (False, bool(scene.gpus))]
    spec = {
        "act": "layouts",
        "steps": steps,
        "configs": list(enumerate(configs)),
        "deterministic": deterministic,
    }
    name = case.name.replace(" ", "_")
    return RankMachine(scene, case.ranks, scratch).start(name, case.ranks, spec, LIMIT_S)


def proof(case: GraphCase, scene: Scene, scratch: Path) -> Row:
    """Compare the two runs."""
    directory, problem = _train(case, scene, scratch, STEPS, deterministic=True)
    if problem:
        verdict: Verdict = "missing" if "out of time" in problem else "failed"
        return row(case.name, verdict, last_line(problem), output=problem)
    tolerance = EXACT if case.precision == "fp32" else BF16
    layout = LayoutCase(case.name, {}, tolerance=tolerance)
    result = compared(layout, directory / REPLAYED, directory / EAGER, "without graphs")
    bitwise = _same_bits(directory)
    return {
        **result,
        "detail": f"{result['detail']}; {'' if bitwise else 'not '}equal bitwise",
        "bitwise": bitwise,
    }


def _same_bits(directory: Path) -> bool:
    replayed, eager = (np.load(directory / f"{name}.npz") for name in (REPLAYED, EAGER))
    same = _results(directory, REPLAYED)["scalars"] == _results(directory, EAGER)["scalars"]
    return same and all(np.array_equal(replayed[name], eager[name]) for name in eager)


def _results(directory: Path, name: str) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((directory / f"{name}.json").read_text(encoding="utf-8"))
    return results


def times(case: GraphCase, scene: Scene, scratch: Path) -> Row:
    """Time the steps of both runs, and compare the memory that torch has reserved."""
    directory, problem = _train(
        case, scene, scratch, scene.sized(TIMED_STEPS, WARMUP + 1), deterministic=False
    )
    if problem:
        return row(case.name, "missing", last_line(problem), output=problem)
    both = [_results(directory, name) for name in (EAGER, REPLAYED)]
    eager, replayed = (1e3 * median(each["seconds"][WARMUP:]) for each in both)
    detail = f"{replayed:,.1f} ms, {eager:,.1f} ms without"
    if all(reserved := [each["reserved_gib"] for each in both]):
        detail += f"; reserved {reserved[1]:,.2f} GiB, {reserved[0]:,.2f} without"
    figures = {"shape": case.shape, "microbatches": MICROBATCHES, "reserved_gib": reserved}
    return row(case.name, "measured", detail, eager_ms=eager, graphs_ms=replayed, **figures)
