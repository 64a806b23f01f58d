"""Fill-in-the-middle: documents as prefix, suffix and middle (Bavarian et al. 2022).

A document is cut at two characters, drawn uniformly, and its parts are encoded apart, as in Megatron-LM and
SantaCoder (Ben Allal et al. 2023):

    PSM   <prefix> prefix <suffix> suffix <middle> middle EOS
    SPM   <prefix> <suffix> suffix <middle> prefix middle EOS

Whether and where a document is cut is a function of its key alone, of which no rank, batch or earlier
document is a part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megalite.config.errors import ConfigError
from megalite.data.preparation.cuts import continued

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megalite.data.tokenizer.tokenizers import Tokenizer

FAMILIES = {
    "StarCoder": ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    "SantaCoder": ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    "Qwen2.5-Coder": ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    "DeepSeek-Coder": ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    "CodeLlama": ("▁<PRE>", "▁<SUF>", "▁<MID>"),
}
"""Tokens before prefix, suffix and middle."""


@dataclass(frozen=True)
class FillInTheMiddle:
    """Rewrites a fraction `rate` of documents, of which a fraction `spm_rate` in the form SPM.

    Attributes:
        prefix, suffix, middle: ids of the tokens before the parts.
    """

    tokenizer: Tokenizer
    rate: float
    spm_rate: float
    prefix: int
    suffix: int
    middle: int

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, rate: float, spm_rate: float, tokens: Sequence[str] | None
    ) -> FillInTheMiddle:
        """Find the ids of the tokens, named or detected. Raises ConfigError if the tokenizer has none."""
        ids = {piece: i for i, piece in enumerate(tokenizer.structure().pieces) if piece}
        if tokens is not None:
            if missing := [token for token in tokens if token not in ids]:
                raise ConfigError(
                    f"data.fim_tokens: {tokenizer.name} has no token {', '.join(missing)}. Name tokens "
                    "of its vocabulary before prefix, suffix and middle."
                )
            return cls(tokenizer, rate, spm_rate, *(ids[token] for token in tokens))
        for names in FAMILIES.values():
            if all(name in ids for name in names):
                return cls(tokenizer, rate, spm_rate, *(ids[name] for name in names))
        raise ConfigError(
            f"data.fim_rate = {rate:g} needs tokens before prefix, suffix and middle, and "
            f"{tokenizer.name} has none of {', '.join(FAMILIES)}. Name them with "
            "data.fim_tokens, or set data.fim_rate to 0."
        )

    @property
    def identity(self) -> list[float]:
        """Return what determines the result, besides the document and its key."""
        return [self.rate, self.spm_rate, self.prefix, self.suffix, self.middle]

    def chosen(self, key: int) -> bool:
        """Return whether the document with this key is rewritten."""
        return bool(_draws(key).random() < self.rate)

    def rewritten(self, text: str, key: int) -> list[int]:
        """Return the tokens of a document that is rewritten, without EOS."""
        draws = _draws(key)
        draws.random()  # that of `chosen`
        low, high = np.sort(draws.integers(0, len(text) + 1, size=2)).tolist()
        before = list(self.tokenizer.encode(text[:low]))
        middle, after = self._continued(text[low:high]), self._continued(text[high:])
        if draws.random() < self.spm_rate:
            return [self.prefix, self.suffix, *after, self.middle, *before, *middle]
        return [self.prefix, *before, self.suffix, *after, self.middle, *middle]

    def _continued(self, text: str) -> list[int]:
        """Encode a part that does not begin the document, without what a tokenizer adds to a beginning, as
        sentencepiece adds a space."""
        probe = continued("a", self.tokenizer)
        if probe is None or list(probe) == list(self.tokenizer.encode("a")):
            return list(self.tokenizer.encode(text))
        tokens = continued(text, self.tokenizer)
        return list(self.tokenizer.encode(text) if tokens is None else tokens)


def _draws(key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=key))
