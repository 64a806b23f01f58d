"""The stored parameters of attention with grouped key-value heads."""

from __future__ import annotations

from megalite.config.sections.model import ModelConfig
from megalite.model.spec_builder import SpecBuilder, one_each
from megalite.parallel.spec import ParamSpec, Segment


def kv_replicas(model: ModelConfig, tp: int) -> int:
    """Return the number of tp ranks that hold the same key-value head."""
    return max(1, tp // model.kv_heads)


def specs(build: SpecBuilder, name: str) -> list[ParamSpec]:
    """Return queries, keys, values and the output's gate, their norms, sinks, and the output projection."""
    model, copies = build.model, kv_replicas(build.model, build.tp)
    q, kv = model.num_attention_heads * model.head_size, model.kv_heads * model.head_size
    parts = [("q", q, 1), ("k", kv, copies), ("v", kv, copies)]
    if model.attention_gate:
        parts.append(("gate", q, 1))
    roles = {"gate": "attention_gate"}  # another matrix than the feed-forward's gate
    stored = build.column(f"{name}.qkv", parts, model.attention_bias, roles)
    stored += _qk_norm(build, name, q, kv)
    if model.attention_sinks:  # one number for each head
        heads = (model.num_attention_heads,)
        sinks = Segment(f"{name}.sinks.weight", heads, 0, decay=False, init_std=build.std)
        stored += one_each(build.unit, sinks)
    return stored + build.row(f"{name}.out", "o", q, model.attention_out_bias)


def _qk_norm(build: SpecBuilder, name: str, q: int, kv: int) -> list[ParamSpec]:
    """Return the norms of queries and keys.

    With `head`, all heads share one weight [head_dim]. With `full` and `each_head`, weights [width] are split
    like the heads.
    """
    model = build.model
    if model.qk_norm == "none" or not model.qk_norm_weight:
        return []
    if model.qk_norm == "head":
        # each rank's gradient is of its own heads only
        axis, width = "tp" if build.tp > 1 else None, model.head_size
        q_norm = build.norm(f"{name}.q_norm", width, axis=axis, rms=True)
        return q_norm + build.norm(f"{name}.k_norm", width, axis=axis, rms=True)
    copies = kv_replicas(model, build.tp)
    q_norm_weight = build.norm_weight(f"{name}.q_norm.weight", q, 0)
    return one_each(
        build.unit, q_norm_weight, build.norm_weight(f"{name}.k_norm.weight", kv, 0, replicas=copies)
    )
