"""Inspection of token files: counts, lengths, duplicates, and decoded documents with their loss mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.data.indexed import DataError, IndexedTokens
from megalite.data.tokenizer import tokenizers as tokenizing


@dataclass(frozen=True)
class TextPart:
    """Text of consecutive tokens of a document that all count in the loss, or none of them."""

    text: str
    counts: bool


@dataclass(frozen=True)
class Sample:
    """A document or its beginning: the first `shown` of its `tokens`."""

    document: int
    tokens: int
    loss_tokens: int
    shown: int
    parts: list[TextPart]


class Inspection:
    """A token file and its tokenizer.

    Attributes:
        sizes: number of tokens of each document.
        problem: why the tokens cannot be decoded; None if they can.

    Raises:
        DataError: the files are missing or damaged.
    """

    def __init__(self, prefix: str | Path, tokenizer: str | None = None):
        self._file = IndexedTokens(prefix)
        ends = np.concatenate([[0], np.cumsum(self._file.sizes, dtype=np.int64)])
        self._starts: NDArray[np.int64] = ends[self._file.documents]
        self.sizes = np.diff(self._starts)
        self._tokenizer: tokenizing.Tokenizer | None = None
        self.problem: str | None = None
        try:
            self._tokenizer = tokenizing.load_for(prefix) if tokenizer is None else tokenizing.load(tokenizer)
        except DataError as error:
            self.problem = str(error)

    def facts(self) -> dict[str, Any]:
        """Return the counts of the whole file, which is read once."""
        file, sizes = self._file, self.sizes
        names = ("min", "median", "p95", "max")
        duplicates = self._duplicates()
        counts: dict[str, Any] = {
            "prefix": file.prefix,
            "documents": len(sizes),
            "tokens": len(file),
            "bytes": int(file.tokens.nbytes),
            "dtype": file.tokens.dtype.name,
            "vocab_size": file.vocab_size,
            "largest_id": self._largest_id(),
            "eos": file.eos,
            "tokenizer": file.metadata.get("tokenizer"),
            "kind": "text" if file.loss is None else "chat",
            "lengths": dict(zip(names, np.percentile(sizes, (0, 50, 95, 100)).tolist(), strict=True))
            | {"mean": float(sizes.mean())},
            "histogram": histogram(sizes),
            "duplicates": duplicates,
            "duplicate_share": duplicates / len(sizes),
        }
        if file.loss is None:
            last = file.tokens[self._starts[1:][sizes > 0] - 1]
            return counts | {"without_eos": None if file.eos is None else int((last != file.eos).sum())}
        counted = np.add.reduceat(file.loss.tokens, self._starts[:-1], dtype=np.int64) * (sizes > 0)
        chat = file.metadata["chat"]
        counts |= {key: chat.get(key) for key in ("forms", "loss_on", "template_hash")}
        return counts | {"loss_tokens": int(counted.sum()), "without_loss": int((counted == 0).sum())}

    def samples(self, count: int, length: int) -> list[Sample]:
        """Return evenly spaced documents, each with up to `length` tokens."""
        return self.decoded(
            np.unique(np.linspace(0, len(self.sizes) - 1, min(count, len(self.sizes))).astype(int)).tolist(),
            length,
        )

    def longest(self, count: int, length: int) -> list[Sample]:
        """Return the longest documents, in descending order of length."""
        return self.decoded(np.argsort(-self.sizes, kind="stable")[:count].tolist(), length)

    def decoded(self, documents: Sequence[int], length: int) -> list[Sample]:
        """Return the given documents. Raises DataError for a number that is out of range."""
        if wrong := [number for number in documents if not 0 <= number < len(self.sizes)]:
            raise DataError(f"--document must be between 0 and {len(self.sizes) - 1}, got {wrong[0]}.")
        return [self._sample(number, length) for number in documents]

    def _sample(self, number: int, length: int) -> Sample:
        start, size, loss = int(self._starts[number]), int(self.sizes[number]), self._file.loss
        ids = self._file.tokens[start : start + min(size, length)].tolist()
        mask = [1] * size if loss is None else loss.tokens[start : start + size].tolist()
        parts = []
        for counts, group in groupby(zip(ids, mask, strict=False), lambda pair: pair[1]):
            parts.append(TextPart(self._text([token for token, _ in group]), bool(counts)))
        return Sample(number, size, sum(mask), len(ids), parts)

    def _text(self, ids: list[int]) -> str:
        return " ".join(map(str, ids)) if self._tokenizer is None else self._tokenizer.spell(ids)

    def _duplicates(self) -> int:
        """Return the number of documents with the same tokens as an earlier one."""
        tokens, starts = self._file.tokens, self._starts.tolist()
        hashes = np.empty(len(self.sizes), np.uint64)
        for number, (start, size) in enumerate(zip(starts, self.sizes.tolist(), strict=False)):
            hashes[number] = int.from_bytes(
                blake2b(tokens[start : start + size].tobytes(), digest_size=8).digest(), "little"
            )
        return len(hashes) - len(np.unique(hashes))

    def _largest_id(self) -> int:
        step = 1 << 24
        return max(
            int(self._file.tokens[start : start + step].max()) for start in range(0, len(self._file), step)
        )


def histogram(sizes: NDArray[np.integer]) -> list[dict[str, int]]:
    """Return a histogram of document lengths with bins between powers of two."""
    exponents = np.frexp(np.maximum(sizes, 1))[1] - 1
    bins = []
    for exponent in range(int(exponents.min()), int(exponents.max()) + 1):
        inside = sizes[exponents == exponent]
        bins.append(
            {
                "from": 2**exponent,
                "to": 2 ** (exponent + 1) - 1,
                "documents": len(inside),
                "tokens": int(inside.sum()),
            }
        )
    return bins


def as_json(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Convert samples to JSON data."""
    return [asdict(sample) for sample in samples]
