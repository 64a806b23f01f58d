"""Which implementations a run computes with, where there is a choice: printed and recorded at its start. See
`megalite_kernels`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megalite.config.dims import part_length
from megalite.config.schema import Config
from megalite.launch import matmul_library
from megalite.model.parameters import kv_replicas

if TYPE_CHECKING:
    from megalite.training.trainer import Trainer

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


def kernels(trainer: Trainer) -> list[str]:
    """The implementations of attention on a GPU, and of fp32 matmuls on a CPU, a line each."""
    on_cpu = trainer.device.type == "cpu" and trainer.config.train.precision == "fp32"
    return [*attention(trainer), *([f"fp32 matmuls by {matmul_library.in_use()}"] if on_cpu else [])]


def attention(trainer: Trainer) -> list[str]:
    """The route that the run's attention takes, as a line; none where there is no choice."""
    data = trainer.train_data
    return attention_route(
        trainer.config,
        trainer.device,
        data.chat or (trainer.config.data.reset_positions and data.eos is not None),
    )


def attention_route(config: Config, device: torch.device, documents: bool) -> list[str]:
    """The line; none where there is no choice: on a CPU, and for parts of rows. documents: whether rows have
    several."""
    parallel = config.parallel
    if device.type == "cpu" or (parallel.cp > 1 and parallel.context != "ulysses"):
        return []
    from megalite_kernels.attention_routes import AttentionCall, describe

    model, tp, cp = config.model, parallel.tp, parallel.cp  # ulysses: whole rows of some of the heads
    heads, kv_heads = (
        model.num_attention_heads // tp // cp,
        max(model.kv_heads * kv_replicas(model, tp) // tp // cp, 1),
    )
    dtype = DTYPES[config.train.precision]
    q, k, v = (
        torch.empty(part_length(config) * cp, 1, count, model.head_size, dtype=dtype, device=device)
        for count in (heads, kv_heads, kv_heads)
    )
    call = AttentionCall(
        *(q, k, v),
        window=any(model.window(layer) is not None for layer in range(model.num_hidden_layers)),
        documents=documents,
        boundaries=documents,
        softcap=model.attention_softcap is not None,
        dropout=model.attention_dropout > 0,
    )
    return [describe(call)]
