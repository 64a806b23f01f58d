"""The kernel that attention takes, which a run reports at its start."""

from __future__ import annotations

import torch

from megalite.config.dims import part_length
from megalite.config.schema import Config
from megalite.model.blocks.attention.parameters import kv_replicas


def routes(config: Config, device: torch.device, dtype: torch.dtype, documents: bool) -> list[str]:
    """Describe the route of attention; no line on a CPU and for parts of rows. See `BlockKind.routes`."""
    parallel = config.parallel
    if device.type == "cpu" or (parallel.cp > 1 and parallel.context != "ulysses"):
        return []
    from megalite_kernels.attention_routes import AttentionCall, describe

    model, tp, cp = config.model, parallel.tp, parallel.cp  # ulysses: whole rows of some of the heads
    heads, kv_heads = (
        model.num_attention_heads // tp // cp,
        max(model.kv_heads * kv_replicas(model, tp) // tp // cp, 1),
    )
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
