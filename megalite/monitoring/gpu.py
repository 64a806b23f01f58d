"""Metrics of the GPU of rank 0: memory from torch's allocator, and sensors from the driver.

The sensors require nvidia-ml-py. The throughput per rank is reported together with them, also on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from megalite.monitoring.metrics import StepMetrics
from megalite.monitoring.observers import Observer

if TYPE_CHECKING:
    from megalite.training.trainer import Trainer

SENSORS: dict[str, Callable[[torch.device], float]] = {
    "gpu_utilization": lambda device: torch.cuda.utilization(device) / 100,
    "gpu_power_w": lambda device: torch.cuda.power_draw(device) / 1000,
    "gpu_temperature_c": torch.cuda.temperature,
    "gpu_clock_mhz": torch.cuda.clock_rate,
}
"""Name in metrics.jsonl → function of torch that reads NVIDIA's management library."""
MEMORY = {
    "memory_allocated_bytes": "allocated_bytes.all.current",
    "memory_reserved_bytes": "reserved_bytes.all.current",
    "allocation_retries": "num_alloc_retries",
}
"""Name in metrics.jsonl → name in torch's statistics.

An allocation retry frees cached memory and allocates again, which synchronizes the device.
"""


class GpuSensors(Observer):
    """Observer that reports memory and sensors at `logging.interval`.

    On a CPU it only reports the throughput per rank.
    """

    def __init__(self, trainer: Trainer):
        self.device, self.interval, self.world = (
            trainer.device,
            trainer.config.logging.interval,
            trainer.mesh.world.size,
        )
        self.sensors = dict(SENSORS) if find_spec("pynvml") else {}

    def numbers(self, metrics: StepMetrics) -> dict[str, Any]:
        numbers: dict[str, Any] = {"tokens_per_second_per_gpu": metrics.tokens_per_second / self.world}
        if self.device.type != "cuda" or metrics.step % self.interval:
            return numbers
        statistics = torch.cuda.memory_stats(self.device)
        return numbers | {name: statistics.get(key, 0) for name, key in MEMORY.items()} | self._sense()

    def _sense(self) -> dict[str, float]:
        """Read all sensors. Sensors that this GPU does not have, or that must not be read, are removed."""
        readings = {}
        for name, read in list(self.sensors.items()):
            try:
                readings[name] = float(read(self.device))
            except (
                Exception
            ):  # pynvml has an error class for each code of the library, and need not be importable
                del self.sensors[name]
        return readings
