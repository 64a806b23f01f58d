"""Datasets with random access: the tokens of sample i are a pure function of the index.

Resuming at any sample costs nothing, and every topology reads the same samples.

A `Concatenation` joins token files end to end; its sample i is tokens [i·S, i·S + S + 1): S inputs and,
shifted by one, S targets. The next epoch begins after the last sample. Shuffling replaces i by a keyed
permutation of it, computed for one index in constant time and memory: no permutation is stored, and the order
depends on (seed, epoch, dataset) only.

Documents may also stay whole (`megalite.data.conversations`): a sample is then a row with one conversation,
or with as many as fit, chosen by their lengths only.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megalite.config.extensions import is_source
from megalite.config.samples import (
    DataError,
    Member,
    held_out_fraction,
    held_out_start,
    whole_samples,
)
from megalite.config.sections.data import DataConfig
from megalite.config.streams import has_streams
from megalite.config.token_files import named_sets, prefixes
from megalite.data.indexed import IndexedTokens
from megalite.data.tokenizer.comparison import of_data, one_tokenizer
from megalite.data.tokenizer.identity import TokenizerIdentity
from megalite.system import rng

if TYPE_CHECKING:
    from megalite.data.conversations import RowSequences
    from megalite.data.teacher_words import TopRow


class Sample(NamedTuple):
    """A row of tokens.

    Attributes:
        tokens, targets: [seq] int64; a target is IGNORE_INDEX where its loss is not counted.
        starts: [seq] int64, the position in the row at which each token's document starts; None for text.
        weights: [seq] float32, the weights of the targets; None: all are 1.
        sequences: the documents of preferences.
        top: the most probable words of a teacher at each position, if they are stored.
    """

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    starts: NDArray[np.int64] | None = None
    weights: NDArray[np.float32] | None = None
    sequences: RowSequences | None = None
    top: TopRow | None = None


class Dataset(ABC):
    """An endless sequence of samples with O(1) random access.

    Attributes:
        vocab_size, eos: of the token files; None if a PREFIX.json lacks them.
        fingerprint: a hash of everything that determines content and order.
        samples_per_epoch: number of samples before one is repeated.
        members: the datasets of a blend, or itself.
        chat: whether it holds conversations, with a loss mask.
        weighted: whether messages of conversations have weights other than 0 and 1.
        preference: pairs or labelled for preferences; else None.
        documents: number of documents of preferences.
        top: a teacher's words for its rows, [rows, …] (`data.teacher_words`).
        tokenizer: the recorded tokenizer of the training data.
    """

    vocab_size: int | None
    eos: int | None
    fingerprint: str
    samples_per_epoch: int
    members: list[Member]
    chat: bool = False
    weighted: bool = False
    preference: str | None = None
    documents: int = 0
    top: TopRow | None = None
    tokenizer: TokenizerIdentity = TokenizerIdentity()

    @property
    def sets(self) -> Mapping[str, Dataset]:
        """Return the validation sets by name. A single set has an empty name."""
        return {"": self}

    @property
    def parts(self) -> Sequence[Dataset]:
        """Return the datasets of a mixture, or itself."""
        return [self]

    @property
    def has_top(self) -> bool:
        """Return whether its rows have a teacher's words."""
        return any(part.top is not None for part in self.parts)

    @abstractmethod
    def __getitem__(self, index: int) -> Sample:
        """Return sample `index` ≥ 0."""


class ShuffledRows(Dataset):
    """Base class of datasets with rows that are read in order, or shuffled in each epoch."""

    _shuffle: bool
    _seed: int
    _content: str

    def _unshuffled(self, index: int) -> int:
        """Return the number of a sample's row in an unshuffled epoch."""
        epoch, row = divmod(index, self.samples_per_epoch)
        if not self._shuffle:
            return row
        return permute(row, self.samples_per_epoch, rng.key(self._seed, "shuffle", epoch, self._content))


@dataclass(frozen=True)
class TokenRange:
    """Tokens [start, stop) of a token file."""

    file: IndexedTokens
    start: int
    stop: int


class TokenFiles(ShuffledRows):
    """Base class of datasets that read parts of token files, in order or shuffled in each epoch.

    Raises DataError if their vocabularies differ.

    Attributes:
        names: of the token files, for messages.
        rows: a hash of everything that determines the rows, but not their order.
    """

    def __init__(
        self, parts: list[TokenRange], sequence_length: int, *options: object, shuffle: bool, seed: int
    ):
        self._length, self._shuffle, self._seed = sequence_length, shuffle, seed
        self._tokens = [part.file.tokens[part.start : part.stop] for part in parts]
        self._ends = list(accumulate(map(len, self._tokens)))  # end of each part in the concatenation
        files = [part.file for part in parts]
        self.names = ", ".join(file.prefix for file in files)
        self.vocab_size, self.eos = agreed(files, "vocab_size"), agreed(files, "eos")
        self._content = digest(
            *(piece for p in parts for piece in (*p.file.digest_parts(), f"{p.start}:{p.stop}".encode()))
        )
        self.fingerprint, self.rows = (
            digest(json.dumps([self._content, sequence_length, order, *options]).encode())
            for order in (seed if shuffle else None, None)
        )

    def __getitem__(self, index: int) -> Sample:
        sample = self._unshuffled(index)
        row, top = self._sample(sample), self.top
        return row if top is None else row._replace(top=top.row(sample))

    @abstractmethod
    def _sample(self, sample: int) -> Sample:
        """Return a sample of an unshuffled epoch, 0 ≤ `sample` < `samples_per_epoch`."""

    def _read(self, parts: list[NDArray[Any]], first: int, count: int, dtype: Any = np.int64) -> NDArray[Any]:
        """Return elements [first, first + count) of the concatenation of the parts."""
        pieces = []  # only the parts that overlap the range are read: they are memory-mapped
        for i in range(bisect_right(self._ends, first), len(parts)):
            pieces.append(parts[i][first - self._ends[i] :][:count].astype(dtype))
            first, count = first + len(pieces[-1]), count - len(pieces[-1])
            if count == 0:
                break
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


class Concatenation(TokenFiles):
    """Token files joined end to end and cut into samples across document and file boundaries.

    Raises DataError also if there is no whole sample.
    """

    def __init__(self, parts: list[TokenRange], sequence_length: int, *, shuffle: bool, seed: int):
        super().__init__(parts, sequence_length, shuffle=shuffle, seed=seed)
        self.samples_per_epoch = whole_samples(self._ends[-1], sequence_length, self.names)
        self.members = [Member(self.names, self.samples_per_epoch)]

    def _sample(self, sample: int) -> Sample:
        tokens = self._read(self._tokens, sample * self._length, self._length + 1)
        return Sample(tokens[:-1], tokens[1:])


def permute(index: int, size: int, key: int) -> int:
    """Return a keyed pseudorandom permutation of [0, size), evaluated at one index.

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
    """Return a 64-bit hash of key and value (the finalizer of splitmix64, Steele et al. 2014)."""
    x = (key * 0x9E3779B97F4A7C15 + value * 0xD1B54A32D192ED03) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 31)


def build(config: DataConfig, seed: int) -> tuple[Dataset, Dataset | None]:
    """Build the training dataset and the validation dataset, or None, of a configuration.

    A list is one concatenation, a mapping to weights is a blend, one to prefixes several sets. A validation
    fraction is taken from the end of every training file; its parts are one unshuffled concatenation, so that
    an epoch has each held-out sample once. Raises ConfigError if different tokenizers made the files.
    """
    assert config.train is not None, "a rule requires data.train"
    one_tokenizer(config)
    if has_streams(config):
        from megalite.data.streams.build import streamed  # not needed by token files as they are

        return streamed(config, seed)
    if is_source(config.train) or is_source(config.validation):
        from megalite.data.own_rows import with_own_rows  # not needed by token files

        return with_own_rows(config, seed)
    held_out = held_out_fraction(config)
    files = {prefix: IndexedTokens(prefix) for prefix in prefixes(config.train)}
    cuts = {prefix: held_out_start(file, held_out) for prefix, file in files.items()}
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
    return train, whole(config.validation, config, False, seed)


def whole(source: Any, config: DataConfig, shuffle: bool, seed: int) -> Dataset:
    """Build the dataset of token files of which nothing is held out."""
    files = {prefix: IndexedTokens(prefix) for prefix in prefixes(source)}
    parts = {prefix: TokenRange(file, 0, len(file)) for prefix, file in files.items()}
    return _dataset(source, parts, config, shuffle, seed)


def _dataset(
    source: Any, parts: dict[str, TokenRange], config: DataConfig, shuffle: bool, seed: int
) -> Dataset:
    if isinstance(source, dict):
        from megalite.data.mixtures import Blend, NamedSets  # not needed by files joined end to end

        if sets := named_sets(source):
            return NamedSets(
                {name: _samples([parts[prefix]], config, shuffle, seed) for name, prefix in sets.items()}
            )
        if len(source) > 1:
            return Blend(
                [_samples([parts[prefix]], config, shuffle, seed) for prefix in source], list(source.values())
            )
    return _samples([parts[prefix] for prefix in prefixes(source)], config, shuffle, seed)


def _samples(parts: list[TokenRange], config: DataConfig, shuffle: bool, seed: int) -> Dataset:
    if parts[0].file.loss is None:
        return Concatenation(parts, config.sequence_length, shuffle=shuffle, seed=seed)
    from megalite.data.conversations import rows_of_documents  # not needed by text

    return rows_of_documents(parts, config.sequence_length, config.packing, shuffle, seed)


def agreed(sources: list[Any], attribute: str) -> int | None:
    """Return the common value of all sources, or None if a source has none.

    Raises DataError if they differ.
    """
    values = {getattr(source, attribute) for source in sources}
    if len(values - {None}) > 1:
        listed = ", ".join(str(value) for value in sorted(values - {None}))
        raise DataError(
            f"the token files of data.train and data.validation have different values of {attribute}: "
            f"{listed}. Prepare all of them with the same tokenizer."
        )
    return None if None in values else values.pop()


def digest(*parts: bytes) -> str:
    hasher = blake2b(digest_size=16)
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little") + part)
    return hasher.hexdigest()
