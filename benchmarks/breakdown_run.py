"""Breakdown of the time of a training step on a CPU, measured by the ranks of the step.

    products    the matmuls of the step alone, at their shapes, on all ranks at the same time
                (`trainer_run.step_matmuls`)
    bytes       the tensors of all other operations, read and written once, divided by the bandwidth that all
                ranks together reach for their size
    waiting     time in which a rank waits for messages of others, including the bubble of the pipeline
    sockets     processor time of gloo's threads; on shared cores it competes with computation
    calls       operations of a step, multiplied by the time of a call of torch on one number
    rest        the remaining time: Python, and the time of operations beyond that for their bytes

The floor is matmuls + bytes: a step that only computed matmuls, and read and wrote each tensor once, at the
rates of this machine. If ranks share cores, matmuls and bandwidth are measured in the same way. All figures
are means over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.measure import timed
from megalite.mesh.mesh import Mesh
from megalite.training.trainer import Trainer

MATMULS = frozenset({"mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "mv"})
WITHOUT_WORK = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "detach"})
SIZES = tuple(1 << power for power in range(14, 27, 2))  # bytes of a measured pass: 16 KB to 64 MB


class OperationCounter(TorchDispatchMode):
    """Counts the operations, and records the bytes of those that are not matmuls, views or allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.sizes: list[int] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.calls += 1
        name = function.overloadpacket.__name__
        if name not in MATMULS and name not in WITHOUT_WORK and not function.is_view:
            tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
            self.sizes.append(sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values()))
        return result


def measure(trainer: Trainer, seconds: float, matmul_seconds: float) -> dict[str, float]:
    """Return the milliseconds of each part of a step. Collective; runs two steps.

    Args:
        seconds: duration of the step.
        matmul_seconds: duration of its matmuls alone.
    """
    waits = _Waits(trainer)
    sockets = _socket_seconds()
    trainer.step()
    waiting, sockets = waits.finish(), _socket_seconds() - sockets
    with OperationCounter() as passes:
        trainer.step()
    bandwidth = _bandwidth(trainer.mesh)
    bytes_s = sum(size / next(rate for limit, rate in bandwidth if size <= limit) for size in passes.sizes)
    number = torch.zeros(1)
    call = min(timed(lambda: number.add_(1.0), 10, 200))
    own = [matmul_seconds, bytes_s, waiting, sockets, passes.calls * call]
    matmuls, passing, waiting, sockets, calls = _mean(own, trainer.mesh)
    parts = {
        "products_ms": matmuls,
        "bytes_ms": passing,
        "waiting_ms": waiting,
        "sockets_ms": sockets,
        "calls_ms": calls,
    }
    above = seconds - matmuls - passing - waiting - calls
    return {name: 1e3 * value for name, value in (parts | {"rest_ms": above}).items()} | {
        "floor_share": (matmuls + passing) / seconds
    }


class _Waits:
    """Adds up the times between the start and the end of this rank's waits."""

    def __init__(self, trainer: Trainer):
        self._activity, self._since, self._total = trainer.mesh.activity, 0.0, 0.0
        self._before = self._activity.listeners
        self._activity.listeners = (*self._before, self._changed)

    def _changed(self, _: Any) -> None:
        if self._activity.waiting:
            self._since = perf_counter()
        elif self._since:
            self._total += perf_counter() - self._since
            self._since = 0.0

    def finish(self) -> float:
        self._activity.listeners = self._before
        return self._total


def _socket_seconds() -> float:
    """Return the processor time of gloo's threads so far, or 0 if the system does not report it."""
    total = 0.0
    for task in Path("/proc/self/task").glob("*"):
        with suppress(OSError, ValueError):
            if "gloo" in (task / "comm").read_text(encoding="utf-8"):
                total += int((task / "schedstat").read_text(encoding="utf-8").split()[0]) / 1e9
    return total


def _bandwidth(mesh: Mesh) -> list[tuple[float, float]]:
    """Measure (largest bytes of a pass, bytes per second), in ascending order.

    All ranks add in place at the same time.
    """
    rates = []
    for size in SIZES:
        repeats = max((1 << 27) // size // 8, 2)
        if mesh.world.size > 1:
            torch.distributed.barrier()
        rates.append(size * repeats / sum(timed(_addition(size), 1, repeats)))
    limits = [(low * high) ** 0.5 for low, high in pairwise(SIZES)]  # a pass has the rate of the nearest size
    return list(zip([*limits, inf], rates, strict=True))


def _addition(size: int) -> Callable[[], object]:
    """Return x += y for two tensors of `size` bytes in total."""
    x, y = torch.zeros(size // 8), torch.ones(size // 8)
    return lambda: x.add_(y)


def _mean(values: list[float], mesh: Mesh) -> list[float]:
    """Return the means over the ranks. Collective."""
    summed = torch.tensor(values, dtype=torch.float64)
    if mesh.world.size > 1:
        torch.distributed.all_reduce(summed)
    return [value / mesh.world.size for value in summed.tolist()]
