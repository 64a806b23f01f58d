"""Named model shapes: `tiny` for laptops and tests, and the published config.json of well-known models, read like any other."""

from typing import Any

from megalite.config.families import from_hf_config
from megalite.config.rule import nearest_name
from megalite.config.schema import ConfigError

_WIDTHS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_LLAMA_3 = {"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 5e5, "rms_norm_eps": 1e-5}
_LLAMA_3_2_ROPE = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def _shape(base: dict[str, Any], *widths: int, **fields: Any) -> dict[str, Any]:
    """A config.json of the Llama form, from its widths in the order of _WIDTHS."""
    return base | dict(zip(_WIDTHS, widths, strict=True)) | fields


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": _shape({"model_type": "llama"}, 128, 352, 4, 4, 2, max_position_embeddings=512, rms_norm_eps=1e-5),
    # https://huggingface.co/openai-community/gpt2 (dropout included)
    "gpt2-124m": {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024},
    # https://huggingface.co/meta-llama/Llama-3.2-1B
    "llama-3.2-1b": _shape(_LLAMA_3, 2048, 8192, 16, 32, 8, head_dim=64, max_position_embeddings=131072, tie_word_embeddings=True)
    | {"rope_scaling": _LLAMA_3_2_ROPE | {"original_max_position_embeddings": 8192}},
    # https://huggingface.co/meta-llama/Meta-Llama-3-8B
    "llama-3-8b": _shape(_LLAMA_3, 4096, 14336, 32, 32, 8),
    # https://huggingface.co/meta-llama/Meta-Llama-3-70B
    "llama-3-70b": _shape(_LLAMA_3, 8192, 28672, 80, 64, 8),
}
"""Each shape in the form of its Hugging Face config.json; `tiny` leaves the vocabulary to the data."""


def preset(name: str) -> dict[str, Any]:
    """The ModelConfig fields of a named shape. Raises ConfigError naming the nearest preset."""
    if name not in PRESETS:
        legal = f"Legal values: {', '.join(PRESETS)}. Nearest: {nearest_name(name, list(PRESETS))}."
        raise ConfigError(f"model.preset = {name} is not a known shape. {legal}")
    return from_hf_config(PRESETS[name])
