"""Constants of the time model that published runs determine, within what their own sources leave open.

`benchmarks/held_out.py` fits them together with `sustained` of A100 and H100 in hardware.yaml;
docs/planner.md states sources and errors.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Constants:
    """Constants of the time model, independent of models and layouts.

    Attributes:
        stream: fraction of the data sheet's bandwidth that memory-bound kernels reach; a plain copy of
            gigabytes reaches 0.9.
        overlap: slowdown of computation while communication runs beside it: NCCL's kernels take
            multiprocessors, bandwidth and power (Lee et al. 2025, arXiv 2507.03114: 0.19 on average, 0.4 at
            most).
        attention: speed of attention kernels relative to matmuls at the sustained rate with half of the
            softmax hidden.
        links: bandwidth of collectives in a run relative to nccl-tests with large messages on an idle
            network.
        slowest: speed of the slowest of many devices, for which all others wait, relative to a typical one:
            devices of one kind differ by 8 % on average (Sinha et al. 2022, "Not All GPUs Are Created
            Equal").
        delay: seconds that a node is late in a step, on average: at the step's collectives all wait for the
            latest node.
    """

    stream: float = 0.78
    overlap: float = 0.235
    attention: float = 0.793
    links: float = 0.869
    slowest: float = 0.95
    delay: float = 0.0146


CONSTANTS = Constants()
INTERVAL = 0.1
"""A measured speed lies within this relative distance of a prediction in 80 % of published runs, each
predicted by constants fitted without its table."""
ALIKE = 0.07
"""The ratio of two layouts' times is predicted within this relative distance in 80 % of the pairs of one
table's rows."""


def prediction_interval(seconds: float) -> tuple[float, float]:
    """Return the interval that contains 80 % of measured step times.

    It applies to devices with published runs that have been compared with predictions.
    """
    return seconds / (1 + INTERVAL), seconds * (1 + INTERVAL)
