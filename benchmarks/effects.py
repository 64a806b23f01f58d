"""Removes effects from the planner's time one at a time, to see which decide a prediction (for held_out.py).

Each effect is removed alone, with all constants as they are; a published row is then predicted too fast by
that effect.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks import published
from megalite.config.sections.model import ModelConfig
from megalite.planner.cost.operations import Software
from megalite.planner.hardware.devices import Link, find
from megalite.planner.time.step import LayoutChoice, PlannedJob, Stepper

SMALL = PlannedJob(
    ModelConfig(
        vocab_size=131072,
        hidden_size=2048,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=8192,
        gated_mlp=False,
    ),
    find("h100"),
    sequence_length=4096,
    global_batch_size=192,
    software=Software(loss_bytes=(38.0, 14.0)),
)
SMALL_LAYOUT = LayoutChoice(dp=48, zero=1)
"""1.7B parameters with a vocabulary of 131,072 on 48 GPUs, one sequence at a time: what does not shrink with
the layer weighs most."""
SIZES = {"up to 3B": (0, 3000), "7B to 15B": (3001, 6500), "30B and more": (6501, 10**9)}
"""Column → range of hidden sizes."""


def _device(**changed: Any) -> Callable[[PlannedJob], PlannedJob]:
    return lambda job: replace(job, device=replace(job.device, **changed))


def _constants(**changed: float) -> Callable[[PlannedJob], PlannedJob]:
    return lambda job: replace(
        job, device=replace(job.device, constants=replace(job.device.constants, **changed))
    )


def _software(**changed: Any) -> Callable[[PlannedJob], PlannedJob]:
    return lambda job: replace(job, software=replace(job.software, **changed))


def _full_rate(job: PlannedJob) -> PlannedJob:
    """Matmuls of every shape at the rate of large ones: no tiles, waves or short inner dimensions."""
    return replace(
        job, device=replace(job.device, rates=((1.0, job.device.peak(job.precision) * job.device.sustained),))
    )


def _alone(job: PlannedJob) -> PlannedJob:
    """Large matmuls at the rate that they reach alone, not in a run."""
    return replace(
        job, device=replace(job.device, sustained=job.device.sustained * 0.73 / find("h100").sustained)
    )


def _links(change: Callable[[Link], Link], *names: str) -> Callable[[PlannedJob], PlannedJob]:
    def remove(job: PlannedJob) -> PlannedJob:
        changed: dict[str, Any] = {name: change(getattr(job.device, name)) for name in names}
        return replace(job, device=replace(job.device, **changed))

    return remove


EFFECTS: dict[str, Callable[[PlannedJob], PlannedJob]] = {
    "power: products at the rate they reach alone": _alone,
    "product efficiency by shape: tiles, waves, narrow layers": _full_rate,
    "norms, activations and residual sums": _software(elementwise=0.0),
    "slower attention than products": _constants(attention=1e6),
    "loss over the vocabulary, without its product": _software(loss_bytes=(0.0, 0.0)),
    "optimizer's memory traffic": _software(adam_bytes=0.0),
    "host time of a layer": _device(host_time=0.0),
    "launch time of a kernel": _device(kernel=0.0),
    "slowdown under communication": _constants(overlap=0.0),
    "bandwidth inside a node": _links(lambda link: replace(link, bandwidth=math.inf), "within"),
    "bandwidth between nodes and inside": _links(
        lambda link: replace(link, bandwidth=math.inf), "within", "between"
    ),
    "latency of links": _links(lambda link: replace(link, latency=0.0), "within", "between"),
    "the slowest device": _constants(slowest=1.0),
    "waiting for the latest node": _constants(delay=0.0),
}


def measured(constants: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """For each effect: the change of predicted speed without it, median over H100 rows by size and for SMALL,
    and the median deviation."""
    tree = published.read_published()
    rows = [
        row for table in tree["tables"].values() if table["gpu"] == "h100" for row in published.rows_of(table)
    ]
    jobs = [(row, published.job_of(row, tree, constants), published.choice_of(row)) for row in rows]
    before = [Stepper(job).step(choice).total for _, job, choice in jobs]
    small = Stepper(SMALL).step(SMALL_LAYOUT).total
    deviations = {}
    for name, remove in EFFECTS.items():
        after = [Stepper(remove(job)).step(choice).total for _, job, choice in jobs]
        deviations[name] = _medians(
            [row["shape"][0] for row in rows], [a / b - 1 for a, b in zip(before, after, strict=True)]
        )
        deviations[name]["1.7B, 48 GPUs"] = small / Stepper(remove(SMALL)).step(SMALL_LAYOUT).total - 1
    return deviations


def _medians(widths: Sequence[int], changes: Sequence[float]) -> dict[str, float]:
    return {
        name: median(change for width, change in zip(widths, changes, strict=True) if low <= width <= high)
        for name, (low, high) in SIZES.items()
    }


def table(deviations: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Markdown lines."""
    columns = list(next(iter(deviations.values())))
    lines = [f"| without | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    return lines + [
        f"| {name} | {' | '.join(f'{row[column]:+.1%}' for column in columns)} |"
        for name, row in deviations.items()
    ]
