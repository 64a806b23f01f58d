"""Megatron-LM's arguments for multi-head latent attention."""

from __future__ import annotations

from typing import Any

from megalite.config.importers.verdict import Row, Source, Table, Verdict, each, harmless, honoured, never, only, sets

SWITCH = "multi-latent-attention"


def is_on(source: Source) -> bool:
    return source.on(SWITCH)


def _latent(value: Any, source: Source) -> Verdict:
    """kv-lora-rank is 32 by default. The latents have norms there only with --qk-layernorm."""
    options = {"model.kv_lora_rank": source.get("kv-lora-rank", 32)}
    return honoured(options, "" if source.on("qk-layernorm") else "the latents have norms") if is_on(source) else harmless("it is off")


def _with_latents(row: Row) -> Row:
    return Row(lambda value, source: row.judge(value, source) if is_on(source) else harmless(f"{SWITCH} is off"), row.option)


YARN = "set model.rope_scaling to {rope_type: yarn, ...} and model.attention_scale, as in model.preset deepseek-v3"
TABLE: Table = {
    **each("", f"{SWITCH} kv-lora-rank", Row(_latent, "model.kv_lora_rank")),
    "q-lora-rank": _with_latents(sets("model.q_lora_rank")),
    "qk-head-dim": _with_latents(sets("model.qk_nope_head_dim")),
    "qk-pos-emb-head-dim": _with_latents(sets("model.qk_rope_head_dim")),
    "v-head-dim": _with_latents(sets("model.v_head_dim")),
    "rotary-scaling-factor": _with_latents(only("1", YARN, "nothing is scaled, as here")),
    **each("", "rope-type mscale mscale-all-dim beta-fast beta-slow", never("it has an effect only with rotary-scaling-factor")),
    **each("", "original-max-position-embeddings cache-mla-latents", never("it has an effect only elsewhere")),
}
