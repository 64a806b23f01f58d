"""Megatron-LM's arguments for layers with a state.

A hybrid model has one block in each layer, by a pattern of letters. A GPT may have gated delta rules in place
of attention in some layers.
"""

from __future__ import annotations

from typing import Any

from megalite.importers import megatron_latent_attention as latent_attention
from megalite.importers.megatron_patterns import HYBRID_KEYS, hybrid_layers, hybrid_pattern, marked_layers
from megalite.importers.verdict import (
    ImportedFile,
    KeyRule,
    Table,
    Verdict,
    each,
    harmless,
    honoured,
    lost,
    missing,
    never,
    sets,
    word,
)

SWITCHES = frozenset({"attention-output-gate", "disable-mamba-mem-eff-path", "is-hybrid-model"})
VARIANT, FREQUENCY, HEADS = "experimental-attention-variant", "linear-attention-freq", "mamba-num-heads"
BLOCKS = {
    **{"M": "mamba", "G": "delta", "*": "attention", "+": "latent_attention"},
    **{"-": "feed_forward", "E": "mixture"},
}
"""Letter of a pattern → the block of the layer."""
DELTA_VARIANTS = ("GATED_DELTA_NET", "GDN")
SPECS = ("hybrid_stack_spec", "mamba_stack_spec")
"""Functions that return the layers of a pattern; a spec is a module and the name of one."""
MAMBA_EPSILON = 1e-5
SILU = "the activation after the convolutions of delta blocks is always SiLU, but swiglu is off"


def _variant(source: ImportedFile) -> str:
    return source.word(VARIANT) if source.get(VARIANT) else source.word("linear-attention-type", "none")


def _pattern(value: Any, source: ImportedFile) -> Verdict:
    """Map the letters to blocks. Bounds of stages (|) and MTP modules (/) remain."""
    layers = hybrid_layers(source)
    if unknown := [letter for letter in layers if letter not in BLOCKS]:
        return lost(f"layers of kind {unknown[0]} are not supported: set model.layer_blocks")
    if "G" in layers and _variant(source) not in (*DELTA_VARIANTS, "NONE"):
        return lost(f"{VARIANT} must be gated_delta_net: set model.layer_blocks")
    if "G" in layers and not source.on("swiglu"):
        return lost(SILU)
    stages, _, modules = str(value).partition("/")
    remarks = ["stages are balanced by cost: set parallel.partition to keep these"] if "|" in stages else []
    remarks += ["its MTP modules are left out"] if modules.strip("/") else []
    if "M" in layers and source.number("norm-epsilon") not in (None, MAMBA_EPSILON):
        remarks.append(f"norms of mamba blocks have norm-epsilon here and {MAMBA_EPSILON:g} in Megatron-LM")
    blocks = [BLOCKS[letter] for letter in layers]
    options = {"model.num_hidden_layers": len(layers), "model.layer_blocks": blocks}
    return honoured(options, "; ".join(remarks))


def _attention_variant(value: Any, source: ImportedFile) -> Verdict:
    """Map gated delta rules in a GPT: in all but the last of every N layers, or in those with a 1."""
    if word(value) not in DELTA_VARIANTS:
        return lost("only gated_delta_net is supported: set model.layer_blocks")
    if hybrid_pattern(source) is not None:
        return harmless("determined by the pattern of layers")
    if not source.on("swiglu"):
        return lost(SILU)
    layers, every = source.size("num-layers"), source.get(FREQUENCY)
    if type(every) is int and every > 0:
        linear: list[bool] | None = [(layer + 1) % every != 0 for layer in range(layers or 0)]
    else:
        linear = marked_layers(every, layers or 0)
    experts: list[bool] | None = [False] * (layers or 0)
    if source.get("num-experts", 0):
        experts = marked_layers(source.get("moe-layer-freq", 1), layers or 0)
    if not layers or linear is None or experts is None:
        return lost("set model.layer_blocks")
    full = "latent_attention" if latent_attention.is_on(source) else "attention"
    return honoured(
        {
            "model.layer_blocks": [
                f"{'delta' if is_linear else full}+{'mixture' if has_experts else 'feed_forward'}"
                for is_linear, has_experts in zip(linear, experts, strict=True)
            ]
        }
    )


def _spec(value: Any, source: ImportedFile) -> Verdict:
    names = value if isinstance(value, list) else [value]
    if hybrid_pattern(source) is not None and names[-1] in SPECS:
        return harmless("determined by the pattern of layers")
    return lost("the layers of another specification are not known: set model.layer_blocks")


def _of_pattern(row: KeyRule, verdict: Verdict) -> KeyRule:
    """Return a row of a GPT, with this verdict for hybrid models."""
    return KeyRule(
        lambda value, source: row.judge(value, source) if hybrid_pattern(source) is None else verdict,
        row.option,
    )


def _has(kind: str, source: ImportedFile) -> bool:
    """Return whether the layers that are mapped have blocks of a kind."""
    if (pattern := hybrid_pattern(source)) is not None:
        layers = _pattern(pattern, source)
    else:
        layers = _attention_variant(_variant(source), source)
    return any(kind in entry for entry in layers.options.get("model.layer_blocks", ()))


def _of_kind(kind: str, option: str) -> KeyRule:
    """Return the row of an option of delta or mamba blocks."""

    def judge(value: Any, source: ImportedFile) -> Verdict:
        return honoured({option: value}) if _has(kind, source) else harmless(f"there are no {kind} blocks")

    return KeyRule(judge, option)


RATIOS = "set model.layer_blocks: a ratio of layers is not supported"
TABLE: Table = {
    **each("", " ".join(HYBRID_KEYS), KeyRule(_pattern, "model.layer_blocks")),
    **each("hybrid-", "attention-ratio mlp-ratio", missing(RATIOS)),
    "hybrid-*": missing("no corresponding option"),
    "is-hybrid-model": never("determined by the pattern of layers"),
    "spec": KeyRule(_spec),
    "num-layers": _of_pattern(
        sets("model.num_hidden_layers"), harmless("determined by the pattern of layers")
    ),
    "mtp-num-layers": _of_pattern(
        sets("model.mtp_layers"), lost("MTP modules of hybrid models are not supported")
    ),
    "mamba-state-dim": _of_kind("mamba", "model.mamba_state_size"),
    "mamba-head-dim": _of_kind("mamba", "model.mamba_head_dim"),
    "mamba-num-groups": _of_kind("mamba", "model.mamba_n_groups"),
    HEADS: _of_kind("mamba", "model.mamba_num_heads"),
    **each("", "mamba-training-ssm-states-dtype mamba-ssm-dtype", never("states are always in fp32")),
    "disable-mamba-mem-eff-path": never("there is a single implementation"),
    "mamba-*": missing("no corresponding option"),
    **each("", f"{VARIANT} linear-attention-type", KeyRule(_attention_variant, "model.layer_blocks")),
    FREQUENCY: never("determined by the kind of attention"),
    "linear-key-head-dim": _of_kind("delta", "model.linear_key_head_dim"),
    "linear-value-head-dim": _of_kind("delta", "model.linear_value_head_dim"),
    "linear-num-key-heads": _of_kind("delta", "model.linear_num_key_heads"),
    "linear-num-value-heads": _of_kind("delta", "model.linear_num_value_heads"),
    "linear-conv-kernel-dim": _of_kind("delta", "model.linear_conv_kernel_dim"),
    "attention-output-gate": sets("model.attention_gate", {"TRUE": True}),
}


def defaults(source: ImportedFile) -> dict[str, Any]:
    """Return the number of Mamba heads, by default those of twice the model's width."""
    hidden, width = source.size("hidden-size"), source.count("mamba-head-dim", 64)
    if not _has("mamba", source) or not hidden or not width:
        return {}
    return {HEADS: 2 * hidden // width}
