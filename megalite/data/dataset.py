"""Which tokens sample i is: pure functions of the index, so that resuming at any sample costs nothing and every topology reads the same.

A `Concatenation` lays token files end to end; its sample i is tokens [i·S, i·S + S + 1): S inputs and, shifted by one, S targets.
Past the last sample the next epoch begins. Shuffling replaces i by a keyed permutation of it, computed for one index in constant time and
memory: nothing is stored, and the order depends on (seed, epoch, dataset) alone.

A `Blend` interleaves datasets by weight. The weights are brought to whole numbers q_1 … q_n with sum D, and one period of D samples is laid
out so that after k samples dataset j has given q_j·k/D of them, give or take less than one. Sample k is then row k mod D of that table:
which dataset, and how many of its samples came before in the period; (k div D)·q_j came in the periods before. No state, nothing to replay.
"""

import heapq
import json
import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction
from hashlib import blake2b
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite import rng
from megalite.config.schema import DataConfig
from megalite.config.token_files import prefixes
from megalite.data.indexed import DataError, IndexedTokens

LONGEST_PERIOD = 1 << 17


class Dataset(ABC):
    """An endless, O(1)-addressable sequence of samples.

    Attributes: `vocab_size` and `eos` (None where no PREFIX.json says them); `fingerprint`, a hash of everything that determines content
    and order; `samples_per_epoch`, the samples before any is repeated.
    """

    vocab_size: int | None
    eos: int | None
    fingerprint: str
    samples_per_epoch: int

    @abstractmethod
    def __getitem__(self, index: int) -> NDArray[np.int64]:
        """Sample `index` ≥ 0: int64 [sequence_length + 1]."""


@dataclass(frozen=True)
class Part:
    """Tokens [start, stop) of a token file."""

    file: IndexedTokens
    start: int
    stop: int


class Concatenation(Dataset):
    """Parts of token files end to end, cut into samples, in order or shuffled anew each epoch.

    Raises DataError where the parts hold no whole sample or disagree about their vocabulary.
    """

    def __init__(self, parts: list[Part], sequence_length: int, *, shuffle: bool, seed: int):
        self._parts, self._length, self._shuffle, self._seed = parts, sequence_length, shuffle, seed
        self._ends = list(accumulate(part.stop - part.start for part in parts))
        self.samples_per_epoch = (self._ends[-1] - 1) // sequence_length
        if self.samples_per_epoch < 1:
            names = ", ".join(part.file.prefix for part in parts)
            raise DataError(
                f"data.sequence_length = {sequence_length} needs {sequence_length + 1} tokens for one sample, and {names} gives "
                f"{self._ends[-1]}. Choose a shorter sequence_length, a larger held-out fraction, or more data."
            )
        files = [part.file for part in parts]
        self.vocab_size, self.eos = _agreed(files, "vocab_size"), _agreed(files, "eos")
        self._content = _hash(*(piece for p in parts for piece in (*p.file.digest_parts(), f"{p.start}:{p.stop}".encode())))
        self.fingerprint = _hash(json.dumps([self._content, sequence_length, seed if shuffle else None]).encode())

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        epoch, sample = divmod(index, self.samples_per_epoch)
        if self._shuffle:
            sample = permute(sample, self.samples_per_epoch, rng.key(self._seed, "shuffle", epoch, self._content))
        return self._read(sample * self._length, self._length + 1)

    def _read(self, first: int, count: int) -> NDArray[np.int64]:
        """Tokens [first, first + count) of the concatenation."""
        pieces = []
        for i in range(bisect_right(self._ends, first), len(self._parts)):
            part = self._parts[i]
            start = part.stop - (self._ends[i] - first)
            pieces.append(part.file.tokens[start : min(part.stop, start + count)].astype(np.int64))
            first, count = first + len(pieces[-1]), count - len(pieces[-1])
            if count == 0:
                break
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


class Blend(Dataset):
    """Datasets interleaved by weight; after any number of samples each has given its share to within one sample.

    Weights are exact where whole numbers in their proportion add up to at most LONGEST_PERIOD; finer ones are rounded to 1/LONGEST_PERIOD.
    """

    def __init__(self, datasets: list[Dataset], weights: list[float]):
        self._datasets, self._counts = datasets, whole_weights(weights)
        self._source, self._earlier = interleave(self._counts)
        self.samples_per_epoch = min(self._first_repeat(j) for j in range(len(datasets)))
        self.vocab_size, self.eos = _agreed(datasets, "vocab_size"), _agreed(datasets, "eos")
        self.fingerprint = _hash(json.dumps([[d.fingerprint for d in datasets], self._counts]).encode())

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        source, sample = self.locate(index)
        return self._datasets[source][sample]

    def locate(self, index: int) -> tuple[int, int]:
        """The dataset that sample `index` comes from, and its own index there."""
        period, row = divmod(index, len(self._source))
        source = int(self._source[row])
        return source, period * self._counts[source] + int(self._earlier[row])

    def _first_repeat(self, source: int) -> int:
        """The first index at which dataset `source` begins its second epoch."""
        periods, rest = divmod(self._datasets[source].samples_per_epoch, self._counts[source])
        return periods * len(self._source) + int(np.flatnonzero(self._source == source)[rest])


def permute(index: int, size: int, key: int) -> int:
    """A keyed pseudorandom permutation of [0, size), at one index.

    A Feistel network on (row, column) of a near-square grid of at least `size` cells: each round adds to one coordinate, modulo its range,
    a hash of the other. What lands outside [0, size) is permuted again until it is inside (cycle walking, Black and Rogaway 2002), which is
    rare: the grid has fewer than sqrt(size) + 1 cells too many.
    """
    columns = math.isqrt(size - 1) + 1
    rows = -(-size // columns)
    while True:
        row, column = divmod(index, columns)
        for turn in range(0, 8, 2):
            row = (row + _mix(key + turn, column)) % rows
            column = (column + _mix(key + turn + 1, row)) % columns
        index = row * columns + column
        if index < size:
            return index


def _mix(key: int, value: int) -> int:
    """A 64-bit hash of key and value (the finaliser of splitmix64, Steele et al. 2014)."""
    x = (key * 0x9E3779B97F4A7C15 + value * 0xD1B54A32D192ED03) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 31)


def whole_weights(weights: list[float]) -> list[int]:
    """The smallest whole numbers in the proportion of the weights, as written in decimal.

    Where they add up to more than LONGEST_PERIOD, the shares are rounded to multiples of 1 / LONGEST_PERIOD (none to nothing).
    """
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(f.denominator for f in exact))
    whole = [int(f * scale) for f in exact]
    if sum(whole) // math.gcd(*whole) > LONGEST_PERIOD:
        whole = _rounded([f / sum(exact) for f in exact])
    return [count // math.gcd(*whole) for count in whole]


def _rounded(shares: list[Fraction]) -> list[int]:
    """Shares of LONGEST_PERIOD, each at least 1, the largest remainders rounded up."""
    whole = [max(1, math.floor(share * LONGEST_PERIOD)) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda j: whole[j] - shares[j] * LONGEST_PERIOD)
    for j in by_remainder[: max(0, LONGEST_PERIOD - sum(whole))]:
        whole[j] += 1
    return whole


def interleave(counts: list[int]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """One period: for each of its sum(counts) samples, the dataset that gives it and how many that dataset gave before.

    The m-th sample of dataset j may stand in the window [floor(m·D/q), ceil((m + 1)·D/q)), and the earliest deadline goes first. That meets
    every window (Baruah et al. 1996, proportionate progress), and a sequence inside the windows is within one sample of every share.
    """
    total = sum(counts)
    source, earlier = np.empty(total, np.int32), np.empty(total, np.int32)
    waiting = [(0, j, 0) for j in range(len(counts))]  # (release, dataset, m)
    ready: list[tuple[int, int, int]] = []  # (deadline, dataset, m)
    for row in range(total):
        while waiting and waiting[0][0] <= row:
            _, j, m = heapq.heappop(waiting)
            heapq.heappush(ready, (-(-(m + 1) * total // counts[j]), j, m))
        _, j, m = heapq.heappop(ready)
        source[row], earlier[row] = j, m
        heapq.heappush(waiting, ((m + 1) * total // counts[j], j, m + 1))
    return source, earlier


def build(config: DataConfig, seed: int) -> tuple[Dataset, Dataset | None]:
    """The training dataset and the validation dataset (None where there is none), as a configuration names them.

    A list is one concatenation, a mapping a blend. A validation fraction is taken from the end of every training file; all of it is one
    unshuffled concatenation, so that an epoch of it meets each held-out sample once.
    """
    assert config.train is not None, "a rule asks for data.train"
    length = config.sequence_length
    held_out = config.validation if isinstance(config.validation, float | int) else 0.0
    files = {prefix: IndexedTokens(prefix) for prefix in prefixes(config.train)}
    cuts = {prefix: _cut(file, held_out) for prefix, file in files.items()}
    train = _dataset(config.train, {p: Part(f, 0, cuts[p]) for p, f in files.items()}, length, config.shuffle, seed)
    if held_out:
        parts = [Part(file, cuts[prefix], len(file)) for prefix, file in files.items()]
        return train, Concatenation(parts, length, shuffle=False, seed=seed)
    if config.validation is None or isinstance(config.validation, float | int):
        return train, None
    others = {prefix: IndexedTokens(prefix) for prefix in prefixes(config.validation)}
    return train, _dataset(config.validation, {p: Part(f, 0, len(f)) for p, f in others.items()}, length, False, seed)


def _dataset(source: str | list[str] | dict[str, float], parts: dict[str, Part], length: int, shuffle: bool, seed: int) -> Dataset:
    if isinstance(source, dict) and len(source) > 1:
        each: list[Dataset] = [Concatenation([parts[prefix]], length, shuffle=shuffle, seed=seed) for prefix in source]
        return Blend(each, list(source.values()))
    return Concatenation([parts[prefix] for prefix in prefixes(source)], length, shuffle=shuffle, seed=seed)


def _cut(file: IndexedTokens, held_out: float) -> int:
    """The token at which a file's held-out end begins: at a document's start, unless that would lose half of what was asked for."""
    wanted = round(len(file) * held_out)
    cut = file.document_at(len(file) - wanted) if wanted else len(file)
    return cut if 2 * (len(file) - cut) >= wanted else len(file) - wanted


def _agreed(sources: list[Any], attribute: str) -> int | None:
    """The value that every source names; None where one of them names none."""
    values = {getattr(source, attribute) for source in sources}
    if len(values - {None}) > 1:
        found = ", ".join(str(value) for value in sorted(values - {None}))
        raise DataError(f"the token files of data.train or data.validation differ in {attribute}: {found}. Prepare all with one tokenizer.")
    return None if None in values else values.pop()


def _hash(*parts: bytes) -> str:
    digest = blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
