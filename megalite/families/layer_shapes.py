"""The fields of a config.json that give single layers, or those with a window, another attention, and the way
back (MiMo-V2-Flash, Laguna). Imports no torch.

Those that read are given a config.json with its defaults, and raise ConfigError naming a field that would
change what the model computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megalite.families.refusal import refuse

FULL, LOCAL = "full_attention", "sliding_attention"
"""Entries of rope_parameters."""
SHARE = "partial_rotary_factor"
GATES = {"per-head": "head", "per-element": "channel"}
"""Laguna's gating → model.attention_gate_width."""


def local_layers(given: Mapping[str, Any]) -> list[int]:
    """The layers with a sliding window, by layer_types or, if that is missing, by the pattern."""
    layers, pattern = range(given["num_hidden_layers"]), given["sliding_window_pattern"]
    if given["layer_types"]:
        return [layer for layer in layers if given["layer_types"][layer] == LOCAL]
    first = 1 if given.get("first_layer_full") else 0
    return [layer for layer in layers[first:] if pattern is None or (layer + 1) % pattern]


# ---- rotary embeddings by type of layer, of which each may rotate a share of the channels


def read_rope(
    config: Mapping[str, Any],
    defaults: Mapping[str, Any],
    given: Mapping[str, Any],
    frequencies: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]],
) -> dict[str, Any]:
    """The rotary fields, and the share of channels that rotate in local_attention.

    Args:
        defaults: those of the family.
        frequencies: reads an entry, with the share that it has by default.
    """
    if config.get("rope_scaling"):
        raise refuse(
            "rope_scaling", config["rope_scaling"], "is not supported by the family. Write rope_parameters."
        )
    written, local = config.get("rope_parameters") or defaults["rope_parameters"], local_layers(given)
    types = {LOCAL: bool(local), FULL: len(local) < given["num_hidden_layers"]}
    read: dict[str, dict[str, Any]] = {}
    for kind in types:
        entry = dict(written.get(kind) or ({} if types[kind] else defaults["rope_parameters"][kind]))
        if "rope_theta" not in entry:
            raise refuse("rope_parameters", written, f"has no rope_theta in an entry {kind}.")
        plain = entry.get("rope_type", entry.get("type", "default")) == "default"
        read[kind] = frequencies(entry, {SHARE: defaults[SHARE] if plain else 1.0})
    if read[LOCAL]["rope_scaling"] is not None:
        raise refuse(
            f"rope_parameters.{LOCAL}",
            written[LOCAL],
            "is not supported: layers with a window have no rotary scaling.",
        )
    if not local or read[LOCAL] == read[FULL]:
        return read[FULL]
    share = read[LOCAL][SHARE]
    other = {} if share == read[FULL][SHARE] else {"local_attention": {SHARE: share}}
    return read[FULL] | {"rope_local_theta": read[LOCAL]["rope_theta"]} | other


def with_rope(shape: dict[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """The ModelConfig fields with those of rotary embeddings; local_attention has the entries of both."""
    local = {**(shape.get("local_attention") or {}), **rope.get("local_attention", {})}
    there = local and shape.get("sliding_window_layers")
    return {**shape, **rope} | ({"local_attention": local if there else None} if local else {})


def rope_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return rope_parameters, from a model's `meaning`."""
    share = values[SHARE]
    full = {**(values["rope_scaling"] or {"rope_type": "default"}), "rope_theta": values["rope_theta"]}
    theta = values["rope_local_theta"] or values["rope_theta"]
    local_share = (values["local_attention"] or {}).get(SHARE, share)
    return {
        "rope_parameters": {
            FULL: full | {SHARE: share},
            LOCAL: {"rope_type": "default", "rope_theta": theta, SHARE: local_share},
        }
    }


# ---- mimo_v2_flash


def mimo_local(given: Mapping[str, Any]) -> dict[str, Any]:
    """Layers with a window have twice as many key-value heads."""
    return {"num_key_value_heads": 2 * given["num_key_value_heads"]}


def or_one(name: str, given: Mapping[str, Any]) -> float:
    return 1.0 if given[name] is None else float(given[name])


# ---- laguna


def layer_heads(given: Mapping[str, Any]) -> list[int] | None:
    heads, number = given["num_attention_heads_per_layer"], given["num_hidden_layers"]
    if heads is not None and len(heads) != number:
        raise refuse("num_attention_heads_per_layer", heads, f"must have {number} entries.")
    return heads if heads is None else list(heads)


def layer_heads_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    heads = values["layer_heads"] or [values["num_attention_heads"]] * values["num_hidden_layers"]
    return {"num_attention_heads_per_layer": heads}


def gate_width(given: Mapping[str, Any]) -> str:
    gating = "per-head" if given["gating"] is True else given["gating"]
    if gating not in GATES:
        raise refuse("gating", gating, f"is not supported. Legal values: True, {', '.join(GATES)}.")
    return GATES[gating]


def gate_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    names = {ours: theirs for theirs, ours in GATES.items()}
    return {"gating": names[values["attention_gate_width"]]}
