"""What a delta block exchanges under context parallelism."""

from __future__ import annotations

from megalite.config.sections.model import ModelConfig
from megalite.model.blocks.delta.parameters import key_replicas
from megalite.model.cost.mixers import StateSizes
from megalite.model.cost.records import Share


def state_sizes(model: ModelConfig, share: Share) -> StateSizes:
    """Return the sizes of states and tokens, of the heads of one tp rank."""
    heads, dk, dv = (
        model.linear_num_value_heads // share.tp,
        model.linear_key_head_dim,
        model.linear_value_head_dim,
    )
    key_heads = model.linear_num_key_heads * key_replicas(model, share.tp) // share.tp
    return StateSizes(
        channels=2 * key_heads * dk + heads * dv,
        taps=model.linear_conv_kernel_dim,
        states=(heads, dk, dv),
        shared=key_heads,
        exchanged=2 * max(key_heads, share.cp) * dk + heads * dv,
        wide=heads * (dk if model.delta_decay == "channel" else 1) + heads,
    )
