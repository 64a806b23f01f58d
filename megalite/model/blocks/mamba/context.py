"""What a mamba block exchanges under context parallelism."""

from __future__ import annotations

from megalite.config.sections.model import ModelConfig
from megalite.model.blocks.mamba.parameters import group_replicas
from megalite.model.cost.mixers import StateSizes
from megalite.model.cost.records import Share


def state_sizes(model: ModelConfig, share: Share) -> StateSizes:
    """Return the sizes of states and tokens, of the heads of one tp rank."""
    heads, width, size = model.mamba_num_heads // share.tp, model.mamba_head_dim, model.mamba_state_size
    groups = model.mamba_n_groups * group_replicas(model, share.tp) // share.tp
    return StateSizes(
        channels=heads * width + 2 * groups * size,
        taps=model.mamba_conv_kernel,
        states=(heads, size, width),
        shared=groups,
        diagonal=1,
        exchanged=2 * max(groups, share.cp) * size + heads * width,
        wide=heads,
    )
