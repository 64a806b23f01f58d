"""The throughput of a step: tokens/s, model FLOP/s and their fraction of the device's peak."""

from __future__ import annotations

from typing import Any

from megalite.config.schema import Config
from megalite.model.cost import model_flops_per_token
from megalite.planning.peaks import peak_flops


def throughput(config: Config, seconds: float, ranks: int, device_name: str, batch: int | None = None) -> dict[str, Any]:
    """The throughput of a step of `seconds`, under its keys in metrics.jsonl. Masked tokens count too, because they are computed.
    batch: its samples; default: train.global_batch_size."""
    tokens_per_second = (batch or config.train.global_batch_size) * config.data.sequence_length / seconds
    per_rank = tokens_per_second * model_flops_per_token(config.model, config.data.sequence_length, config.lora) / ranks
    peak = peak_flops(device_name, config.train.precision)
    return {"tokens_per_second": tokens_per_second, "tflops_per_gpu": per_rank / 1e12, "mfu": None if peak is None else per_rank / peak}
