"""The form of a frozen base under adapters, as other projects name it (QLoRA, LLM.int8)."""

from __future__ import annotations

from typing import Any

from megalite.importers.verdict import ImportedFile, KeyRule, Verdict, harmless, honoured, lost, word

UNSUPPORTED = (
    "this quantization is not supported: lora.base is nf4, fp4, int8 or mxfp4, quantized when the weights of "
    "model.init_from are read"
)
WITHOUT_ADAPTER = "only frozen weights under adapters are quantized: set lora.rank, then lora.base"
IN_BASE = "included in lora.base"


def in_4_bits(kind: Any, double: bool, roughly: str = "") -> Verdict:
    """Return the verdict on a base in 4 bits.

    Args:
        kind: bitsandbytes' name of the codes.
        double: whether scales are quantized, too.
        roughly: what differs here.
    """
    if word(kind) not in ("NF4", "FP4"):
        return lost(f"codes of {str(kind).lower()} are not supported: lora.base: nf4 is the closest form")
    return honoured({"lora.base": word(kind).lower(), "lora.double_quant": double}, roughly)


def in_8_bits() -> Verdict:
    return honoured({"lora.base": "int8"}, "activations are not quantized")


def part_of(key: str) -> KeyRule:
    """Return the row of a detail of the base that the switch `key` turns on."""
    return KeyRule(lambda _, source: harmless(IN_BASE if source.on(key) else f"only used with {key}"))


def trl_in_4_bits(value: Any, source: ImportedFile) -> Verdict:
    """Map load_in_4bit of TRL's ModelConfig."""
    if word(value) != "TRUE":
        return harmless("disabled")
    if not source.on("use_peft"):
        return lost(WITHOUT_ADAPTER)
    return in_4_bits(source.get("bnb_4bit_quant_type", "nf4"), source.on("use_bnb_nested_quant"))


def trl_in_8_bits(value: Any, source: ImportedFile) -> Verdict:
    """Map load_in_8bit of TRL's ModelConfig."""
    if word(value) != "TRUE":
        return harmless("disabled")
    return in_8_bits() if source.on("use_peft") else lost(WITHOUT_ADAPTER)


_BITS_AND_BYTES = "bnb_config_kwargs.bnb_4bit_"


def axolotl_in_4_bits(value: Any, source: ImportedFile) -> Verdict:
    """Map load_in_4bit of axolotl, whose loader gives codes and scales to adapter: qlora alone."""
    if word(value) != "TRUE":
        return harmless("disabled")
    if source.word("adapter") == "LORA":
        return in_4_bits("fp4", False)
    if source.word("adapter") != "QLORA":
        return lost(WITHOUT_ADAPTER)
    double = source.get(f"{_BITS_AND_BYTES}use_double_quant") is not False
    return in_4_bits(source.get(f"{_BITS_AND_BYTES}quant_type", "nf4"), double)


def axolotl_in_8_bits(value: Any, source: ImportedFile) -> Verdict:
    """Map load_in_8bit of axolotl, which it does not read with adapter: qlora."""
    if word(value) != "TRUE":
        return harmless("disabled")
    return in_8_bits() if source.word("adapter") == "LORA" else lost(WITHOUT_ADAPTER)


AXOLOTL_KWARGS = {
    **{f"{_BITS_AND_BYTES}{name}": part_of("load_in_4bit") for name in ("quant_type", "use_double_quant")},
    f"{_BITS_AND_BYTES}quant_storage": KeyRule(lambda *_: harmless("only affects how codes are stored")),
    f"{_BITS_AND_BYTES}compute_dtype": KeyRule(
        lambda *_: harmless("products are computed in train.precision")
    ),
    "bnb_config_kwargs.llm_int8_*": KeyRule(lambda *_: lost("lora.base: int8 has no further options")),
}
"""bnb_config_kwargs of axolotl."""


def factory(value: Any, source: ImportedFile) -> Verdict:
    """Map quantization_bit of LLaMA-Factory."""
    method, bits = source.word("quantization_method", "bnb"), word(value)
    if source.word("finetuning_type") != "LORA":
        return lost(WITHOUT_ADAPTER)
    if method not in ("BNB", "BITSANDBYTES") or bits not in ("4", "8"):
        return lost(UNSUPPORTED)
    if bits == "8":
        return in_8_bits()
    double = source.get("double_quantization") is not False
    return in_4_bits(source.get("quantization_type", "nf4"), double)


def torchtune() -> Verdict:
    """Return the verdict on a base of torchtune, whose 4 bits are those of torchao."""
    return in_4_bits("nf4", True, "torchao rounds codes and the scales of scales otherwise than bitsandbytes")
