"""Which implementation of attention a run takes on its GPUs, and why: a line of the report at its start. See `megalite_kernels`."""

from __future__ import annotations

import torch

from megalite.config.dims import part_length
from megalite.config.schema import Config
from megalite.model.parameters import kv_replicas

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


def attention_route(config: Config, device: torch.device, documents: bool) -> list[str]:
    """The line; none where there is no choice: on a CPU, and for parts of rows. documents: whether rows have several."""
    parallel = config.parallel
    if device.type == "cpu" or (parallel.cp > 1 and parallel.context != "ulysses"):
        return []
    from megalite_kernels.attention_routes import Call, describe

    model, tp, cp = config.model, parallel.tp, parallel.cp  # ulysses: whole rows of some of the heads
    heads, kv_heads = model.num_attention_heads // tp // cp, max(model.kv_heads * kv_replicas(model, tp) // tp // cp, 1)
    dtype = DTYPES[config.train.precision]
    q, k, v = (
        torch.empty(part_length(config) * cp, 1, count, model.head_size, dtype=dtype, device=device)
        for count in (heads, kv_heads, kv_heads)
    )
    call = Call(
        *(q, k, v),
        window=any(model.window(layer) is not None for layer in range(model.num_hidden_layers)),
        documents=documents,
        boundaries=documents,
        softcap=model.attention_softcap is not None,
        dropout=model.attention_dropout > 0,
    )
    return [describe(call)]
