"""The tokens of sample i, as pure functions of the index: resuming at any sample costs nothing, and every
topology reads the same samples.

A `Concatenation` joins token files end to end; its sample i is tokens [i·S, i·S + S + 1): S inputs and,
shifted by one, S targets. The next epoch begins after the last sample. Shuffling replaces i by a keyed
permutation of it, computed for one index in constant time and memory: no permutation is stored, and the order
depends on (seed, epoch, dataset) only.

`Conversations` are whole documents: a sample is a row with one of them, or with as many as fit, chosen by
their lengths only.

A `Blend` interleaves datasets by weight. The weights are scaled to integers q_1 … q_n with sum D, and a table
of one period of D samples is built such that after k samples dataset j has contributed q_j·k/D of them,
within one sample. Sample k is row k mod D of the table, which gives the dataset and the number of its samples
earlier in the period; (k div D)·q_j of its samples are in earlier periods. Nothing else is stored or
replayed.
"""

import json
import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.config.samples import (
    DataError,
    Member,
    first_repeat,
    held_out_fraction,
    held_out_start,
    interleave,
    rows_of,
    whole_documents,
    whole_samples,
    whole_weights,
)
from megalite.config.sections.data import DataConfig
from megalite.config.token_files import named_sets, prefixes
from megalite.data.indexed import IndexedTokens
from megalite.data.tokenizer.comparison import of_data, one_tokenizer
from megalite.data.tokenizer.identity import TokenizerIdentity
from megalite.parallel.microbatch import IGNORE_INDEX
from megalite.system import rng


class Dataset(ABC):
    """An endless sequence of samples with O(1) random access.

    Attributes:
        vocab_size, eos: of the token files; None if a PREFIX.json lacks them.
        fingerprint: a hash of everything that determines content and order.
        samples_per_epoch: number of samples before one is repeated.
        members: the datasets of a blend, or itself.
        chat: whether it holds conversations, with a loss mask.
        tokenizer: the recorded tokenizer of the training data.
    """

    vocab_size: int | None
    eos: int | None
    fingerprint: str
    samples_per_epoch: int
    members: list[Member]
    chat: bool = False
    tokenizer: TokenizerIdentity = TokenizerIdentity()

    @property
    def sets(self) -> Mapping[str, "Dataset"]:
        """The validation sets by name; one without a name has the empty one."""
        return {"": self}

    @abstractmethod
    def __getitem__(self, index: int) -> NDArray[np.int64]:
        """Sample `index` ≥ 0: int64 [sequence_length + 1]; for conversations [3, sequence_length]: tokens,
        targets, document starts."""


@dataclass(frozen=True)
class TokenRange:
    """Tokens [start, stop) of a token file."""

    file: IndexedTokens
    start: int
    stop: int


class TokenFiles(Dataset):
    """Parts of token files; samples in order, or shuffled differently each epoch. Raises DataError if their
    vocabularies differ."""

    def __init__(
        self, parts: list[TokenRange], sequence_length: int, *options: bool, shuffle: bool, seed: int
    ):
        self._length, self._shuffle, self._seed = sequence_length, shuffle, seed
        self._tokens = [part.file.tokens[part.start : part.stop] for part in parts]
        self._ends = list(accumulate(map(len, self._tokens)))  # end of each part in the concatenation
        files = [part.file for part in parts]
        self._names = ", ".join(file.prefix for file in files)
        self.vocab_size, self.eos = _agreed(files, "vocab_size"), _agreed(files, "eos")
        self._content = _hash(
            *(piece for p in parts for piece in (*p.file.digest_parts(), f"{p.start}:{p.stop}".encode()))
        )
        self.fingerprint = _hash(
            json.dumps([self._content, sequence_length, seed if shuffle else None, *options]).encode()
        )

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        epoch, sample = divmod(index, self.samples_per_epoch)
        if self._shuffle:
            sample = permute(
                sample, self.samples_per_epoch, rng.key(self._seed, "shuffle", epoch, self._content)
            )
        return self._sample(sample)

    @abstractmethod
    def _sample(self, sample: int) -> NDArray[np.int64]:
        """Sample `sample` of an epoch that is not shuffled, 0 ≤ `sample` < `samples_per_epoch`, which a
        subclass sets."""

    def _read(self, parts: list[NDArray[np.integer]], first: int, count: int) -> NDArray[np.int64]:
        """Elements [first, first + count) of the concatenation of the parts."""
        pieces = []  # only the parts that overlap the range are read: they are memory-mapped
        for i in range(bisect_right(self._ends, first), len(parts)):
            pieces.append(parts[i][first - self._ends[i] :][:count].astype(np.int64))
            first, count = first + len(pieces[-1]), count - len(pieces[-1])
            if count == 0:
                break
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


class Concatenation(TokenFiles):
    """The parts end to end, cut into samples across document and file ends. Raises DataError also if there is
    no whole sample."""

    def __init__(self, parts: list[TokenRange], sequence_length: int, *, shuffle: bool, seed: int):
        super().__init__(parts, sequence_length, shuffle=shuffle, seed=seed)
        self.samples_per_epoch = whole_samples(self._ends[-1], sequence_length, self._names)
        self.members = [Member(self._names, self.samples_per_epoch)]

    def _sample(self, sample: int) -> NDArray[np.int64]:
        return self._read(self._tokens, sample * self._length, self._length + 1)


class Conversations(TokenFiles):
    """The whole documents of chat files: one per row or, with `packing`, as many as fit.

    A document's inputs are all its tokens except the last, its targets all except the first, so none predicts
    the next document's first token. Raises DataError also if there is no document, or one that is longer than
    a row.
    """

    chat = True

    def __init__(
        self, parts: list[TokenRange], sequence_length: int, *, packing: bool, shuffle: bool, seed: int
    ):
        super().__init__(parts, sequence_length, packing, shuffle=shuffle, seed=seed)
        self._loss = [
            part.file.loss.tokens[part.start : part.stop] for part in parts if part.file.loss is not None
        ]
        self._sizes = np.concatenate(
            [whole_documents(part.file.sizes, part.start, part.stop) for part in parts]
        )
        self._starts = self._sizes.cumsum() - self._sizes
        rows = rows_of(self._sizes, sequence_length, packing, self._names)
        # sorted by row
        self._documents, self._last = np.argsort(rows, kind="stable"), np.bincount(rows).cumsum()
        self.samples_per_epoch = len(self._last)
        self.members = [Member(self._names, self.samples_per_epoch)]

    def _sample(self, sample: int) -> NDArray[np.int64]:
        row = np.zeros((3, self._length), np.int64)  # what no document fills: token 0, not counted
        tokens, targets, starts = row
        targets[:] = IGNORE_INDEX
        at = 0
        for document in self._documents[self._last[sample - 1] if sample else 0 : self._last[sample]]:
            text, counts = (
                self._read(each, self._starts[document], self._sizes[document])
                for each in (self._tokens, self._loss)
            )
            own = slice(at, at + len(text) - 1)
            tokens[own], targets[own], starts[own] = (
                text[:-1],
                np.where(counts[1:], text[1:], IGNORE_INDEX),
                at,
            )
            at = own.stop
        starts[at:] = at  # the padding is a document of its own: no token attends from it to the others
        return row


class Blend(Dataset):
    """Datasets interleaved by weight; after any number of samples each has contributed its share to within
    one sample.

    Weights are exact if the smallest integers in their proportion sum to at most LONGEST_PERIOD, else rounded
    to 1/LONGEST_PERIOD.
    """

    def __init__(self, datasets: list[Dataset], weights: list[float]):
        self._datasets, self._counts = datasets, whole_weights(weights)
        # `period`: the dataset of each sample of a period
        self.period, self._earlier = interleave(self._counts)
        sizes = [dataset.samples_per_epoch for dataset in datasets]
        self.samples_per_epoch = min(
            first_repeat(self.period, self._counts, j, samples) for j, samples in enumerate(sizes)
        )
        shares = [count / len(self.period) for count in self._counts]
        self.members = [
            member._replace(share=share)
            for each, share in zip(datasets, shares, strict=True)
            for member in each.members
        ]
        self.vocab_size, self.eos = _agreed(datasets, "vocab_size"), _agreed(datasets, "eos")
        self.chat = any(dataset.chat for dataset in datasets)
        self.fingerprint = _hash(json.dumps([[d.fingerprint for d in datasets], self._counts]).encode())

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        source, sample = self.locate(index)
        return self._datasets[source][sample]

    def locate(self, index: int) -> tuple[int, int]:
        """The dataset of sample `index`, and the sample's index in that dataset."""
        period, row = divmod(index, len(self.period))
        source = int(self.period[row])
        return source, period * self._counts[source] + int(self._earlier[row])


class NamedSets(Dataset):
    """Several validation sets by name, concatenated; `sets` has each of them."""

    def __init__(self, sets: Mapping[str, Dataset]):
        self._sets = dict(sets)
        self._datasets = list(sets.values())
        self._ends = list(accumulate(dataset.samples_per_epoch for dataset in self._datasets))
        self.samples_per_epoch = self._ends[-1]
        self.members = [member for dataset in self._datasets for member in dataset.members]
        first = self._datasets[0]
        self.vocab_size, self.eos, self.chat = first.vocab_size, first.eos, first.chat
        self.fingerprint = "+".join(dataset.fingerprint for dataset in self._datasets)

    @property
    def sets(self) -> Mapping[str, Dataset]:
        return self._sets

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        sample = index % self.samples_per_epoch
        number = bisect_right(self._ends, sample)
        first_sample = self._ends[number - 1] if number else 0
        return self._datasets[number][sample - first_sample]


def permute(index: int, size: int, key: int) -> int:
    """A keyed pseudorandom permutation of [0, size), evaluated at one index.

    A Feistel network on (row, column) of a near-square grid of at least `size` cells: each round adds to one
    coordinate, modulo its range, a hash of the other. A result outside [0, size) is permuted again until it
    is inside (cycle walking, Black and Rogaway 2002), which is rare: the grid has fewer than sqrt(size) + 1
    extra cells.
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
    """A 64-bit hash of key and value (the finalizer of splitmix64, Steele et al. 2014)."""
    x = (key * 0x9E3779B97F4A7C15 + value * 0xD1B54A32D192ED03) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 31)


def build(config: DataConfig, seed: int) -> tuple[Dataset, Dataset | None]:
    """The training dataset and the validation dataset (None if there is none) of a configuration.

    A list is one concatenation, a mapping to weights is a blend, one to prefixes several sets. A validation
    fraction is taken from the end of every training file; its parts are one unshuffled concatenation, so that
    an epoch has each held-out sample once. Raises ConfigError if different tokenizers made the files.
    """
    assert config.train is not None, "a rule requires data.train"
    one_tokenizer(config)
    held_out = held_out_fraction(config)
    files = {prefix: IndexedTokens(prefix) for prefix in prefixes(config.train)}
    cuts = {prefix: held_out_start(file, held_out, file.loss is not None) for prefix, file in files.items()}
    train = _dataset(
        config.train, {p: TokenRange(f, 0, cuts[p]) for p, f in files.items()}, config, config.shuffle, seed
    )
    train.tokenizer = of_data(config)
    if held_out:
        return train, _samples(
            [TokenRange(file, cuts[prefix], len(file)) for prefix, file in files.items()], config, False, seed
        )
    if config.validation is None or isinstance(config.validation, float | int):
        return train, None
    others = {prefix: IndexedTokens(prefix) for prefix in prefixes(config.validation)}
    return train, _dataset(
        config.validation, {p: TokenRange(f, 0, len(f)) for p, f in others.items()}, config, False, seed
    )


def _dataset(
    source: Any, parts: dict[str, TokenRange], config: DataConfig, shuffle: bool, seed: int
) -> Dataset:
    if sets := named_sets(source):
        return NamedSets(
            {name: _samples([parts[prefix]], config, shuffle, seed) for name, prefix in sets.items()}
        )
    if isinstance(source, dict) and len(source) > 1:
        return Blend(
            [_samples([parts[prefix]], config, shuffle, seed) for prefix in source], list(source.values())
        )
    return _samples([parts[prefix] for prefix in prefixes(source)], config, shuffle, seed)


def _samples(parts: list[TokenRange], config: DataConfig, shuffle: bool, seed: int) -> Dataset:
    if parts[0].file.loss is not None:
        return Conversations(
            parts, config.sequence_length, packing=config.packing, shuffle=shuffle, seed=seed
        )
    return Concatenation(parts, config.sequence_length, shuffle=shuffle, seed=seed)


def _agreed(sources: list[Any], attribute: str) -> int | None:
    """The value that all sources have; None if a source has none. Raises DataError if they differ."""
    values = {getattr(source, attribute) for source in sources}
    if len(values - {None}) > 1:
        listed = ", ".join(str(value) for value in sorted(values - {None}))
        raise DataError(
            f"the token files of data.train or data.validation differ in {attribute}: {listed}. Prepare all "
            "with one tokenizer."
        )
    return None if None in values else values.pop()


def _hash(*parts: bytes) -> str:
    digest = blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
