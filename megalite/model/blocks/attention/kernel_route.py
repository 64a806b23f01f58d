"""The kernel that attention takes, which a run reports at its start."""

from __future__ import annotations

import torch

from megalite.config.dims import part_length
from megalite.config.schema import Config
from megalite.model.blocks.attention.parameters import on_one_rank


def routes(config: Config, device: torch.device, dtype: torch.dtype, documents: bool) -> list[str]:
    """Describe the route of attention; no line on a CPU and for parts of rows. See `BlockKind.routes`."""
    parallel = config.parallel
    if device.type == "cpu" or (parallel.cp > 1 and parallel.context != "ulysses"):
        return []
    from megalite_kernels.attention_routes import AttentionCall, describe

    model, cp = config.model, parallel.cp  # ulysses: whole rows of some of the heads
    lines: list[str] = []
    for shape in model.attention_shapes:
        heads, kv_heads, size, value_size, _ = on_one_rank(shape, parallel.tp)
        kv_heads = max(kv_heads // cp, 1)
        width = max(size, value_size)  # narrower tensors are padded
        q, k, v = (
            torch.empty(part_length(config) * cp, 1, count, width, dtype=dtype, device=device)
            for count in (heads // cp, kv_heads, kv_heads)
        )
        layers = (layer for layer in range(model.num_hidden_layers) if model.attention_shape(layer) == shape)
        call = AttentionCall(
            *(q, k, v),
            window=any(model.window(layer) is not None for layer in layers),
            documents=documents,
            boundaries=documents,
            softcap=model.attention_softcap is not None,
            dropout=model.attention_dropout > 0,
        )
        lines.append(describe(call))
    return list(dict.fromkeys(lines))
