"""Megatron-LM's arguments for multi-head latent attention."""

from __future__ import annotations

from typing import Any

from megalite.importers.verdict import (
    ImportedFile,
    KeyRule,
    Table,
    Verdict,
    each,
    harmless,
    honoured,
    never,
    only,
    sets,
)

SWITCH = "multi-latent-attention"


def is_on(source: ImportedFile) -> bool:
    return source.on(SWITCH)


YARN = (
    "set model.rope_scaling to {rope_type: yarn, ...} and model.attention_scale, as model.preset "
    "deepseek-v3 does"
)
DEFAULTS = {"kv-lora-rank": 32, "qk-head-dim": 128, "qk-pos-emb-head-dim": 64, "v-head-dim": 128}


def _switch(value: Any, source: ImportedFile) -> Verdict:
    """Map the switch of latent attention, whose sizes are separate keys.

    Megatron-LM applies norms to the latents only with --qk-layernorm.
    """
    if value is not True:
        return harmless("disabled")
    rank = source.size("kv-lora-rank") if "kv-lora-rank" in source.leaves else None
    options = {"model.kv_lora_rank": rank} if rank else {}
    if not source.on("qk-layernorm"):
        return honoured(options, "norms of the latents are always used")
    return honoured(options) if options else harmless("determined by the sizes of the latents")


def _scaling(value: Any, source: ImportedFile) -> Verdict:
    """Check the scaling of positions, which is YaRN by default (--rope-type).

    With rope, only attention is scaled, by --mscale-all-dim.
    """
    if source.word("rope-type", "yarn") == "ROPE" and not source.get("mscale-all-dim"):
        return harmless("rope-type is rope, which does not scale positions")
    return only("1", YARN, "no scaling, which is the default").judge(value, source)


def _with_latents(row: KeyRule) -> KeyRule:
    return KeyRule(
        lambda value, source: row.judge(value, source) if is_on(source) else harmless(f"{SWITCH} is off"),
        row.option,
    )


TABLE: Table = {
    SWITCH: KeyRule(_switch, "model.kv_lora_rank"),
    "kv-lora-rank": _with_latents(sets("model.kv_lora_rank")),
    "q-lora-rank": _with_latents(sets("model.q_lora_rank")),
    "qk-head-dim": _with_latents(sets("model.qk_nope_head_dim")),
    "qk-pos-emb-head-dim": _with_latents(sets("model.qk_rope_head_dim")),
    "v-head-dim": _with_latents(sets("model.v_head_dim")),
    "rotary-scaling-factor": _with_latents(KeyRule(_scaling)),
    **each(
        "",
        "rope-type mscale mscale-all-dim beta-fast beta-slow",
        never("only used with rotary-scaling-factor"),
    ),
    **each("", "original-max-position-embeddings cache-mla-latents", never("not used in training")),
}
