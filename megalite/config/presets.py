"""Named model shapes: `tiny` for laptops and tests, and the published config.json of well-known models, read like any other."""

from typing import Any

from megalite.config.families import from_hf_config
from megalite.config.rule import nearest_name
from megalite.config.schema import ConfigError

_LLAMA_3 = {
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "attention_bias": False,
}

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
    },
    # https://huggingface.co/openai-community/gpt2 (dropout included)
    "gpt2-124m": {
        "model_type": "gpt2",
        "vocab_size": 50257,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "resid_pdrop": 0.1,
    },
    # https://huggingface.co/meta-llama/Llama-3.2-1B
    "llama-3.2-1b": _LLAMA_3
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    # https://huggingface.co/meta-llama/Meta-Llama-3-8B
    "llama-3-8b": _LLAMA_3 | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    # https://huggingface.co/meta-llama/Meta-Llama-3-70B
    "llama-3-70b": _LLAMA_3 | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}
"""Each shape in the form of its Hugging Face config.json; `tiny` leaves the vocabulary to the data."""


def preset(name: str) -> dict[str, Any]:
    """The ModelConfig fields of a named shape. Raises ConfigError naming the nearest preset."""
    if name not in PRESETS:
        raise ConfigError(
            f"model.preset = {name} is not a known shape. Legal values: {', '.join(PRESETS)}. Nearest: {nearest_name(name, list(PRESETS))}."
        )
    return from_hf_config(PRESETS[name])
