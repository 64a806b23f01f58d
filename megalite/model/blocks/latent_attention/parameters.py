"""The stored parameters of multi-head latent attention.

All tp ranks hold the matrices that compute latents, and each the rows of its heads of the matrices that read
them.
"""

from __future__ import annotations

from megalite.model.spec_builder import SpecBuilder, one_each
from megalite.parallel.spec import ParamSpec, Segment


def specs(build: SpecBuilder, name: str) -> list[ParamSpec]:
    """Return the projections and the norms of latents.

    Rows of `q_b` (`q` without a latent of queries), by head: the channels that do not rotate, then those that
    do. Rows of `kv_a`: the latent, then the shared key that rotates. Rows of `kv_b`, by head: the key, then
    the value.
    """
    model, heads = build.model, build.model.num_attention_heads
    queries, q_rank, rank = heads * model.head_size, model.q_lora_rank, model.kv_lora_rank or 0
    if q_rank is None:
        stored = _up(build, name, "q", queries, model.hidden_size)
    else:
        stored = _latent(build, name, "q_a", q_rank, q_rank) + _up(build, name, "q_b", queries, q_rank)
    stored += _latent(build, name, "kv_a", rank + model.qk_rope_head_dim, rank)
    stored += _up(build, name, "kv_b", heads * (model.qk_nope_head_dim + model.v_head_dim), rank)
    return stored + build.row(f"{name}.out", "o", heads * model.v_head_dim, bias=False)


def _up(build: SpecBuilder, name: str, part: str, outputs: int, inputs: int) -> list[ParamSpec]:
    """Return a matrix [outputs, inputs] whose rows are split by heads."""
    weight = Segment(f"{name}.{part}.weight", (outputs, inputs), 0, init_std=build.std, role=part)
    return one_each(build.unit, weight)


def _latent(build: SpecBuilder, name: str, part: str, outputs: int, width: int) -> list[ParamSpec]:
    """Return a matrix [outputs, hidden], and the norm of the first `width` of its outputs."""
    weight = build.whole(f"{name}.{part}.weight", outputs, part)
    return weight + build.norm(f"{name}.{part}_norm", width, rms=True)
