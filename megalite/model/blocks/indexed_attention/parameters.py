"""The stored parameters of an indexer, besides those of latent attention.

All tp ranks hold the whole indexer: a score sums all of its heads. Shared layers have none.
"""

from __future__ import annotations

from megalite.model.block_kind import BlockSpec
from megalite.model.spec_builder import INDEXER, SpecBuilder, one_each
from megalite.parallel.spec import ParamSpec, Segment


def specs(build: SpecBuilder, block: BlockSpec) -> list[ParamSpec]:
    """Return queries (by head), keys with their norm, and the weights of heads.

    The first qk_rope_head_dim channels of a query's head and of a key rotate. The weights of heads are
    computed in at least fp32. Without a loss nothing is trained.
    """
    model, name = build.model, f"{block.name}.indexer"
    if model.selecting_layer(block.layer) != block.layer:
        return []
    heads, dim, trained = model.index_n_heads, model.index_head_dim, model.index_loss_coef > 0

    def segment(part: str, *shape: int, decay: bool = True, std: float = 0.0, value: float = 0.0) -> Segment:
        return Segment(
            f"{name}.{part}",
            shape,
            grad_partial_axis=build.partial_axis,
            decay=decay,
            trainable=trained,
            init_std=std,
            init_value=value,
            role=INDEXER,
        )

    queries = segment("q.weight", heads * dim, model.q_lora_rank or 0, std=build.std)
    keys = segment("k.weight", dim, model.hidden_size, std=build.std)
    scale = segment("k_norm.weight", dim, decay=False, value=1.0)
    shift = segment("k_norm.bias", dim, decay=False)
    weights = segment("weights.weight", heads, model.hidden_size, std=build.std)
    return one_each(build.unit, queries, keys, scale, shift) + one_each(
        build.unit, weights, at_least_fp32=True
    )
