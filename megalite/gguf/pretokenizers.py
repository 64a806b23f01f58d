"""The pre-tokenizers of byte-level tokenizers that llama.cpp has, by name.

It has them in its code, so that a file only names one. A tokenizer.json spells them out, as patterns that cut
a text
before the merges of each part: the name is found by these patterns, whatever the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

THREE_DIGITS = "|".join((_CONTRACTIONS, _WORDS, r"\p{N}{1,3}", _REST))
ONE_DIGIT = "|".join((_CONTRACTIONS, _WORDS, r"\p{N}", _REST))
WITH_MARKS = "|".join(
    (
        _CONTRACTIONS,
        r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
        r"\p{N}",
        r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
CASES = "|".join((*_CASED, r"\p{N}", _CASED_REST))
CASES_CONTRACTIONS = "|".join((*(f"{each}{_CONTRACTIONS}?" for each in _CASED), r"\p{N}{1,3}", _CASED_REST))
CHINESE = "[一-龥\u3040-ゟ゠-ヿ]+"
PUNCTUATION = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Pretokenizer(NamedTuple):
    """A pre-tokenizer.

    Attributes:
        patterns: what cuts a text, one after the other; `digits` cuts single digits, `bytes` cuts as GPT-2
            does.
        ignores_merges: whether a part that is a token needs no merges.
    """

    patterns: tuple[str, ...]
    ignores_merges: bool = False


PRETOKENIZERS = {
    "gpt-2": Pretokenizer(("bytes",)),
    "starcoder": Pretokenizer(("digits", "bytes")),
    "llama-bpe": Pretokenizer((THREE_DIGITS,), True),
    "dbrx": Pretokenizer((THREE_DIGITS,)),
    "qwen2": Pretokenizer((ONE_DIGIT,)),
    "qwen35": Pretokenizer((WITH_MARKS,)),
    "tekken": Pretokenizer((CASES,), True),
    "gpt-4o": Pretokenizer((CASES_CONTRACTIONS,)),
    "deepseek-v3": Pretokenizer((r"\p{N}{1,3}", CHINESE, PUNCTUATION)),
}
"""llama.cpp's name → what it does."""


def name_of(steps: Sequence[dict[str, Any]], ignores_merges: bool, merges: bool) -> str | None:
    """Return llama.cpp's name of a pre-tokenizer, or None.

    Args:
        steps: its steps in tokenizer.json.
        ignores_merges: the model's `ignore_merges`.
        merges: whether there are any; without, a text is cut into bytes anyway.
    """
    if not merges:
        return "gpt-2"
    patterns = [_pattern(step) for step in steps]
    wanted = tuple(pattern for pattern in patterns if pattern != "")
    if None in wanted:
        return None
    for name, each in PRETOKENIZERS.items():
        if wanted == each.patterns and ignores_merges == each.ignores_merges:
            return name
    return None


def _pattern(step: dict[str, Any]) -> str | None:
    """Return the pattern of a step, empty if it does not cut; None: llama.cpp has no such step."""
    if step["type"] == "ByteLevel":
        if step.get("add_prefix_space"):
            return None
        return "bytes" if step.get("use_regex", True) else ""
    if step["type"] == "Digits":
        return "digits" if step.get("individual_digits") else None
    if step["type"] == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
        pattern = step["pattern"].get("Regex")
        return None if pattern is None else str(pattern)
    return None
