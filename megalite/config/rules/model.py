"""The model: axes that fit each other."""

import math

from megalite.config.rule import Facts, Rule, around, divisors, is_checkpoint
from megalite.config.schema import ROPE_SCALING_KEYS


def _bad_indices(layers: list[int] | None, count: int) -> bool:
    return layers is not None and (len(set(layers)) < len(layers) or not all(0 <= layer < count for layer in layers))


def _scaling_problem(c: Facts) -> str | None:
    """Why the values of rope_scaling can not be used; its type is known."""
    scaling = dict(c.model.rope_scaling or {})
    kind = scaling.pop("rope_type", "default")
    required = ROPE_SCALING_KEYS[kind]
    if set(scaling) != set(required):
        return f"does not have the keys of rope_type {kind}"
    if not all(isinstance(v, (int, float)) and math.isfinite(v) and v > 0 for v in scaling.values()):
        return "holds a value that is not a positive number"
    if kind == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        return "has high_freq_factor <= low_freq_factor, between which it interpolates"
    return None


def _scaling_example(c: Facts) -> str:
    kind = (c.model.rope_scaling or {}).get("rope_type", "default")
    return f"Write {{{', '.join([f'rope_type: {kind}', *(f'{key}: N' for key in ROPE_SCALING_KEYS[kind])])}}}, every N a positive number."


RULES: tuple[Rule, ...] = (
    Rule(
        "preset or from_hf",
        "model.from_hf",
        broken=lambda c: c.model.from_hf and c.model.preset,
        why=lambda c: f"and model.preset = {c.model.preset} both give the shape",
        legal="Remove one of the two.",
    ),
    Rule(
        "init_from exists",
        "model.init_from",
        broken=lambda c: c.model.init_from is not None and not is_checkpoint(c.model.init_from),
        why="is not a checkpoint: it has no state.json",
        legal="Give a checkpoint directory, for example runs/NAME/checkpoints/step_00000100.",
    ),
    Rule(
        "hidden size over heads",
        "model.num_attention_heads",
        broken=lambda c: c.model.head_dim is None and c.model.hidden_size % c.model.num_attention_heads,
        why=lambda c: f"does not divide model.hidden_size = {c.model.hidden_size}, and model.head_dim is not given",
        legal=lambda c: divisors(c.model.hidden_size),
    ),
    Rule(
        "heads over key-value heads",
        "model.num_key_value_heads",
        broken=lambda c: c.model.num_attention_heads % c.model.kv_heads,
        why=lambda c: (
            f"does not divide model.num_attention_heads = {c.model.num_attention_heads}: each is shared by equally many query heads"
        ),
        legal=lambda c: divisors(c.model.num_attention_heads),
    ),
    Rule(
        "even head width for rope",
        "model.head_dim",
        broken=lambda c: c.model.position == "rope" and c.model.head_size % 2,
        value=lambda c: c.model.head_size,
        why="is odd: rotary embeddings (model.position = rope) turn pairs of channels",
        legal=lambda c: around(c.model.head_size, 2),
    ),
    Rule(
        "rope_scaling needs rope",
        "model.rope_scaling",
        broken=lambda c: c.model.rope_scaling and c.model.position != "rope",
        why=lambda c: f"has nothing to scale: model.position = {c.model.position}",
        legal="Remove it, or set model.position to rope.",
    ),
    Rule(
        "rope_scaling type",
        "model.rope_scaling.rope_type",
        broken=lambda c: c.model.rope_scaling is not None and c.model.rope_scaling.get("rope_type") not in ROPE_SCALING_KEYS,
        value=lambda c: (c.model.rope_scaling or {}).get("rope_type"),
        why="is not a known kind of rotary scaling",
        legal=lambda c: list(ROPE_SCALING_KEYS),
    ),
    Rule("rope_scaling values", "model.rope_scaling", _scaling_problem, lambda c: _scaling_problem(c) or "", _scaling_example),
    Rule(
        "no_rope_layers exist",
        "model.no_rope_layers",
        broken=lambda c: _bad_indices(c.model.no_rope_layers, c.model.num_hidden_layers),
        why="does not name different layers of this model",
        legal=lambda c: f"Legal entries: 0 to {c.model.num_hidden_layers - 1}, each once.",
    ),
    Rule(
        "no_rope_layers needs rope",
        "model.no_rope_layers",
        broken=lambda c: c.model.no_rope_layers and c.model.position != "rope",
        why=lambda c: f"has no effect: model.position = {c.model.position}",
        legal="Remove it, or set model.position to rope.",
    ),
    Rule(
        "sliding_window_layers exist",
        "model.sliding_window_layers",
        broken=lambda c: _bad_indices(c.model.sliding_window_layers, c.model.num_hidden_layers),
        why="does not name different layers of this model",
        legal=lambda c: f"Legal entries: 0 to {c.model.num_hidden_layers - 1}, each once.",
    ),
    Rule(
        "sliding_window_layers needs a window",
        "model.sliding_window_layers",
        broken=lambda c: c.model.sliding_window_layers is not None and c.model.sliding_window is None,
        why="has no effect: model.sliding_window is not given",
        legal="Remove it, or give model.sliding_window.",
    ),
)
