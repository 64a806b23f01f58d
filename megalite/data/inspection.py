"""Inspection of token files: counts, lengths, duplicates, and decoded documents with their loss weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.data.indexed import CHOSEN, DataError, IndexedTokens
from megalite.data.tokenizer import tokenizers as tokenizing


@dataclass(frozen=True)
class TextPart:
    """Text of consecutive tokens of a document with the same weight in the loss.

    The tokens of a completion of preferences count, with weight 1.
    """

    text: str
    counts: bool
    weight: float


@dataclass(frozen=True)
class ShownDocument:
    """A document or its beginning: the first `shown` of its `tokens`.

    Of preferences, these are the last tokens of the prompt and the first ones of the completion; `chosen` is
    whether the completion is the chosen or a good one, or None for other data.
    """

    document: int
    tokens: int
    loss_tokens: int
    shown: int
    parts: list[TextPart]
    chosen: bool | None = None


class Inspection:
    """A token file and its tokenizer.

    Attributes:
        sizes: number of tokens of each document.
        preference: pairs or labelled for preferences; else None.
        problem: why the tokens cannot be decoded; None if they can.

    Raises:
        DataError: the files are missing or damaged.
    """

    def __init__(self, prefix: str | Path, tokenizer: str | None = None):
        self._file = IndexedTokens(prefix)
        self.preference = self._file.preference
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
            "kind": "text" if file.loss is None else self.preference or "chat",
            "lengths": dict(zip(names, np.percentile(sizes, (0, 50, 95, 100)).tolist(), strict=True))
            | {"mean": float(sizes.mean())},
            "histogram": histogram(sizes),
            "duplicates": duplicates,
            "duplicate_share": duplicates / len(sizes),
        }
        if file.loss is None:
            last = file.tokens[self._starts[1:][sizes > 0] - 1]
            return counts | {"without_eos": None if file.eos is None else int((last != file.eos).sum())}
        loss, starts = file.loss.tokens, self._starts[:-1]
        counted = np.add.reduceat(loss != 0, starts, dtype=np.int64) * (sizes > 0)
        chat = file.metadata["chat"]
        counts |= {key: chat.get(key) for key in ("forms", "loss_on", "template_hash")}
        counts |= {"loss_tokens": int(counted.sum()), "without_loss": int((counted == 0).sum())}
        if loss.dtype.kind == "f":
            counts["weights"] = [float(loss.min()), float(loss.max())]
        if self.preference is not None:
            chosen = int((np.maximum.reduceat(loss, starts) == CHOSEN).sum())
            counts |= {"chosen": chosen, "rejected": len(sizes) - chosen}
        return counts

    def samples(self, count: int, length: int) -> list[ShownDocument]:
        """Return evenly spaced documents, or pairs, each with up to `length` tokens."""
        units = len(self.sizes) // self._together
        numbers = np.unique(np.linspace(0, units - 1, min(count, units)).astype(int)) * self._together
        return self.decoded(numbers.tolist(), length)

    def longest(self, count: int, length: int) -> list[ShownDocument]:
        """Return the longest documents, in descending order of length."""
        longest = np.argsort(-self.sizes, kind="stable")[:count].tolist()
        return [self._shown(number, self._beginning(number, length)) for number in longest]

    def decoded(self, documents: Sequence[int], length: int) -> list[ShownDocument]:
        """Return the given documents, of a pair both. Raises DataError for a number that is out of range."""
        if wrong := [number for number in documents if not 0 <= number < len(self.sizes)]:
            raise DataError(f"--document must be between 0 and {len(self.sizes) - 1}, got {wrong[0]}.")
        firsts = dict.fromkeys(number - number % self._together for number in documents)
        return [
            self._shown(
                number,
                self._beginning(number, length)
                if self.preference is None
                else self._around_completion(number, length),
            )
            for first in firsts
            for number in range(first, first + self._together)
        ]

    @property
    def _together(self) -> int:
        return 2 if self.preference == "pairs" else 1

    def _beginning(self, number: int, length: int) -> slice:
        start = int(self._starts[number])
        return slice(start, start + min(int(self.sizes[number]), length))

    def _around_completion(self, number: int, length: int) -> slice:
        """Return up to `length` tokens of the prompt, and as many of the completion."""
        start, size, loss = int(self._starts[number]), int(self.sizes[number]), self._file.loss
        assert loss is not None, "preferences have what counts"
        prompt = int((loss.tokens[start : start + size] != 0).argmax())
        return slice(start + max(0, prompt - length), start + min(size, prompt + length))

    def _shown(self, number: int, own: slice) -> ShownDocument:
        """Return a document of which `own` tokens are shown."""
        start, size, loss = int(self._starts[number]), int(self.sizes[number]), self._file.loss
        ids = self._file.tokens[own].tolist()
        weights = np.ones(size) if loss is None else loss.tokens[start : start + size]
        chosen = None
        if self.preference is not None:
            chosen, weights = bool((weights == CHOSEN).any()), weights != 0
        shown = weights[own.start - start : own.stop - start].tolist()
        parts = []
        for weight, group in groupby(zip(ids, shown, strict=True), lambda pair: float(pair[1])):
            text = self._text([token for token, _ in group])
            parts.append(TextPart(text, weight != 0, weight))
        return ShownDocument(number, size, int(np.count_nonzero(weights)), len(ids), parts, chosen)

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


def as_json(samples: Sequence[ShownDocument]) -> list[dict[str, Any]]:
    """Convert samples to JSON data."""
    return [asdict(sample) for sample in samples]
