"""Quantized weights that are read in bf16 or fp32, by the quantization_config of a config.json.

The field says nothing about the model: a run computes in its own precision. See `megalite.huggingface.fp8`,
`mxfp4` and `bits_and_bytes`.
"""

from __future__ import annotations

from typing import Any

from megalite.config.errors import ConfigError

_FP8: dict[str, tuple[Any, ...]] = {
    "quant_method": ("fp8",),
    "activation_scheme": ("dynamic",),
    "fmt": ("e4m3",),
    "weight_block_size": ([128, 128],),
    "scale_fmt": ("float", "ue8m0"),
    "expert_dtype": ("fp8",),
}
"""Fields of weights in fp8 with a scale for each block (DeepSeek-V3) → the values that are read; the first
one if a field is missing."""
_BITS_AND_BYTES: dict[str, tuple[Any, ...]] = {
    "quant_method": ("bitsandbytes",),
    "bnb_4bit_quant_type": ("nf4", "fp4"),
    "bnb_4bit_quant_storage": ("uint8",),
    "llm_int8_has_fp16_weight": (False,),
}
"""Fields of weights in 4 or 8 bits by bitsandbytes → the values that are read. Others say how it computes."""
_MODULES = ("modules_to_not_convert", "ignored_layers", "modules_to_convert", "dequantize")
"""Fields that say which modules are quantized, as the tensors of the files do."""
_MXFP4 = ("gpt_oss",)
"""Families whose experts are in MXFP4."""


def check_quantization(given: Any, family: str) -> None:
    """Raise ConfigError naming the field if a quantization_config describes weights that are not read."""
    if not isinstance(given, dict) or "quant_method" not in given:
        raise ConfigError(
            f"config.json: quantization_config = {given!r} is not supported. Use the weights of the model in "
            "bf16."
        )
    legal = {"quant_method": ("mxfp4",)} if family in _MXFP4 else _FP8
    if given["quant_method"] == "bitsandbytes":
        legal = _BITS_AND_BYTES
    for name, value in given.items():
        if name in legal and value not in legal[name]:
            raise _refuse(name, value, f"Legal values: {', '.join(map(repr, legal[name]))}.")
        if legal is _FP8 and name not in (*_FP8, *_MODULES) and value is not None:
            raise _refuse(name, value, "Remove it if the weights are the same without it.")


def _refuse(name: str, value: Any, way_out: str) -> ConfigError:
    return ConfigError(f"config.json: quantization_config.{name} = {value!r} is not supported. {way_out}")
