"""The stored parameters of attention with grouped key-value heads."""

from __future__ import annotations

from megalite.config.attention_shapes import AttentionShape
from megalite.config.sections.model import ModelConfig
from megalite.model.block_kind import BlockSpec
from megalite.model.spec_builder import SpecBuilder, one_each
from megalite.parallel.spec import ParamSpec, Segment


def kv_replicas(kv_heads: int, tp: int) -> int:
    """Return the number of tp ranks that hold the same key-value head."""
    return max(1, tp // kv_heads)


def on_one_rank(shape: AttentionShape, tp: int) -> AttentionShape:
    """Return the shape of what one tp rank computes, with at least one key-value head."""
    kv_heads = shape.kv_heads * kv_replicas(shape.kv_heads, tp) // tp
    return shape._replace(heads=shape.heads // tp, kv_heads=kv_heads)


def gate_width(model: ModelConfig, shape: AttentionShape) -> int:
    """Return the number of a token's gates of the output; 0: there are none."""
    if not model.attention_gate:
        return 0
    return shape.heads * (shape.value_size if model.attention_gate_width == "channel" else 1)


def specs(build: SpecBuilder, block: BlockSpec) -> list[ParamSpec]:
    """Return queries, keys, values and the output's gate, their norms, sinks, and the output projection."""
    model, name, shape = build.model, block.name, build.model.attention_shape(block.layer)
    copies = kv_replicas(shape.kv_heads, build.tp)
    q, k, v = (
        shape.heads * shape.head_size,
        shape.kv_heads * shape.head_size,
        shape.kv_heads * shape.value_size,
    )
    parts = [("q", q, 1), ("k", k, copies), ("v", v, copies)]
    if gates := gate_width(model, shape):
        parts.append(("gate", gates, 1))
    roles = {"gate": "attention_gate"}  # another matrix than the feed-forward's gate
    stored = build.column(f"{name}.qkv", parts, model.attention_bias, roles)
    stored += _qk_norm(build, name, shape)
    if model.has_sinks(block.layer):  # one number for each head
        sinks = Segment(f"{name}.sinks.weight", (shape.heads,), 0, decay=False, init_std=build.std)
        stored += one_each(build.unit, sinks)
    return stored + build.row(f"{name}.out", "o", shape.heads * shape.value_size, model.attention_out_bias)


def _qk_norm(build: SpecBuilder, name: str, shape: AttentionShape) -> list[ParamSpec]:
    """Return the norms of queries and keys.

    With `head`, all heads share one weight [head_dim]. With `full` and `each_head`, weights [width] are split
    like the heads.
    """
    model = build.model
    if model.qk_norm == "none" or not model.qk_norm_weight:
        return []
    if model.qk_norm == "head":
        # each rank's gradient is of its own heads only
        axis, width = "tp" if build.tp > 1 else None, shape.head_size
        q_norm = build.norm(f"{name}.q_norm", width, axis=axis, rms=True)
        return q_norm + build.norm(f"{name}.k_norm", width, axis=axis, rms=True)
    q, k = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    copies = kv_replicas(shape.kv_heads, build.tp)
    q_norm_weight = build.norm_weight(f"{name}.q_norm.weight", q, 0)
    return one_each(
        build.unit, q_norm_weight, build.norm_weight(f"{name}.k_norm.weight", k, 0, replicas=copies)
    )
