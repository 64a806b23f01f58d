"""ModelConfig → Hugging Face config.json, by the families that `megalite.config.families` reads. Imports no torch."""

from dataclasses import asdict
from typing import Any

from megalite.config.families import FAMILIES, Family
from megalite.config.schema import ConfigError, ModelConfig


def to_hf_config(model: ModelConfig, family: str | None = None) -> dict[str, Any]:
    """The config.json of a model, in the form that every transformers version reads; the first family that can say it by default.

    Raises ConfigError naming the first field that the family can not express. Dropouts that a family lacks are left out:
    they do not change what the trained model computes.
    """
    if family is None:
        reasons = {name: _misfit(model, row) for name, row in FAMILIES.items()}
        family = next((name for name, reason in reasons.items() if reason is None), None)
        if family is None:
            raise ConfigError("No Hugging Face family can express this model:\n" + "\n".join(f"  {n}: {r}" for n, r in reasons.items()))
    row = FAMILIES[family]
    reason = _misfit(model, row)
    if reason:
        raise ConfigError(f"{reason}; the {family} family can not express it.")
    values = asdict(model) | {"num_key_value_heads": model.kv_heads, "head_dim": model.head_size, "vocab_size": model.vocabulary}
    config: dict[str, Any] = {"model_type": row.model_type, "architectures": [row.architecture]}
    config |= {theirs: values[ours[0]] for theirs, ours in row.fields.items()}
    if model.head_dim is None and "head_dim" not in row.defaults:
        config.pop("head_dim", None)  # transformers derives the same; its Qwen2 does not have the field
    if model.position == "rope":
        scaling = model.rope_scaling or {"rope_type": "default"}
        config |= {"rope_theta": model.rope_theta, "rope_scaling": model.rope_scaling}  # transformers 4 and most other readers
        config |= {"rope_parameters": {**scaling, "rope_theta": model.rope_theta}}  # transformers 5
    return config | _write_window(model, row)


def _write_window(model: ModelConfig, row: Family) -> dict[str, Any]:
    if row.window == "every_layer":
        return {"sliding_window": model.sliding_window}
    if row.window is None or model.sliding_window is None:
        return {}
    local = [model.window(layer) is not None for layer in range(model.num_hidden_layers)]
    types = ["sliding_attention" if here else "full_attention" for here in local]
    return {"use_sliding_window": True, "sliding_window": model.sliding_window, "max_window_layers": 0, "layer_types": types}


def _misfit(model: ModelConfig, row: Family) -> str | None:
    """Why a family can not express a model; None where it can."""
    mapped = {ours for names in row.fields.values() for ours in names}
    free = mapped | {"preset", "from_hf", "init_from", "vocab_size", "embedding_dropout", "attention_dropout", "residual_dropout"}
    free |= {"rope_theta", "rope_scaling"} if row.rope else set()
    free |= {"sliding_window"} if row.window else set()
    free |= {"sliding_window_layers"} if row.window == "upper_layers" else set()
    expected = asdict(ModelConfig()) | row.constants
    actual = asdict(model)
    if model.kv_heads == model.num_attention_heads:
        actual["num_key_value_heads"] = None
    if model.head_size * model.num_attention_heads == model.hidden_size:
        actual["head_dim"] = None
    for name, value in actual.items():
        if name not in free and value != expected[name]:
            return f"model.{name} = {value!r} where {row.model_type} has {expected[name]!r}"
    for ours in row.fields.values():
        if len({actual[name] for name in ours}) > 1:
            return f"model.{ours[0]} = {actual[ours[0]]!r} and model.{ours[1]} = {actual[ours[1]]!r} differ"
    return None
