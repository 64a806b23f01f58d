"""Samples counted from the indices of token files alone, without their tokens: held-out parts, packing,
blends.

`train.epochs` is resolved with them before anything heavy is imported, and the datasets of `megalite.data`
are made of the same functions. The layout of PREFIX.idx is described in megalite/data/indexed.py.
"""

import heapq
import math
import struct
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megalite.config.errors import ConfigError
from megalite.config.extensions import is_source, source_of
from megalite.config.sections.data import DataConfig
from megalite.config.token_files import is_chat, located, preference, prefixes

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, token type code, sequences, document marks
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Token type code → numpy type (the format's codes 6 and 7 are floats, which cannot be tokens)."""
LONGEST_PERIOD = 1 << 17
PACKED_TOGETHER = 1 << 13  # documents; more would not fill rows better, and would cost more time


class DataError(ConfigError):
    """Data that cannot be read or prepared; the message names the file, the reason and a way out."""


class TokenIndex:
    """PREFIX.idx.

    Args:
        dtypes: token type code → numpy type, of the types that are expected.

    Attributes:
        dtype: of a token.
        sizes, pointers: of the sequences, in tokens and in bytes.
        documents: marks.

    Raises:
        DataError: the file is missing, damaged or empty.
    """

    def __init__(self, prefix: str | Path, dtypes: Mapping[int, str] = DTYPES):
        self.prefix = str(prefix)
        path = Path(f"{located(prefix)}.idx")  # a dot inside PREFIX is part of its name
        self.dtype, self.sizes, self.pointers, self.documents = _read_index(path, dtypes)
        if len(self.sizes) == 0 or self.sizes[-1] + self.pointers[-1] == 0:
            raise DataError(f"{path} holds no tokens. Prepare it again from a non-empty input.")

    def __len__(self) -> int:
        """Number of tokens."""
        return int(self.pointers[-1]) // self.dtype.itemsize + int(self.sizes[-1])

    def document_at(self, token: int, together: int = 1) -> int:
        """The first token of the first document that starts at `token` or later, of every `together`-th one;
        the number of tokens if none does."""
        # one sequence per document: the pointers need no copy
        one_each = len(self.documents) == len(self.sizes) + 1
        starts = (
            self.pointers if one_each else self.pointers[self.documents[self.documents < len(self.sizes)]]
        )
        starts = starts[::together]
        document = int(np.searchsorted(starts, token * self.dtype.itemsize))
        return int(starts[document]) // self.dtype.itemsize if document < len(starts) else len(self)


def _read_index(path: Path, dtypes: Mapping[int, str]) -> tuple[np.dtype, np.ndarray, np.ndarray, np.ndarray]:
    """Token type, sizes [n], pointers [n] and document marks [d] of an .idx file."""
    if not path.is_file():
        raise DataError(
            f"{path} is missing: a token file is a .bin and an .idx. Make it with megalite prepare --output "
            "PREFIX."
        )
    length = path.stat().st_size
    if length < HEADER.size:
        raise DataError(
            f"{path} has {length} bytes, fewer than its header: it is truncated. Prepare it again."
        )
    raw = np.memmap(path, dtype=np.uint8, mode="r")
    magic, version, code, sequences, marks = HEADER.unpack(raw[: HEADER.size].tobytes())
    if magic != MAGIC:
        raise DataError(
            f"{path} does not start with MMIDIDX: it is not a token file index. Give a PREFIX that megalite "
            "prepare wrote."
        )
    if version != 1 or code not in dtypes:
        raise DataError(
            f"{path} has version {version} and token type {code}; version 1 with types {sorted(dtypes)} can "
            "be read. Prepare it again."
        )
    if length != (expected := HEADER.size + 12 * sequences + 8 * marks):
        raise DataError(
            f"{path} has {length} bytes where its header counts {expected}: it is truncated or damaged. "
            "Prepare it again."
        )
    sizes = np.frombuffer(raw, "<i4", sequences, HEADER.size)
    pointers = np.frombuffer(raw, "<i8", sequences, HEADER.size + 4 * sequences)
    documents = np.frombuffer(raw, "<i8", marks, HEADER.size + 12 * sequences)
    return np.dtype(dtypes[code]), sizes, pointers, documents


# ---- samples


class Member(NamedTuple):
    """Token files that are read from beginning to end, and again.

    Attributes:
        samples: their number of samples.
        share: the share of all samples of the dataset that are theirs.
    """

    name: str
    samples: int
    share: float = 1.0


def members(data: DataConfig) -> list[Member]:
    """The members of the training data: those of a blend, or all files together. Raises DataError where the
    dataset would."""
    if isinstance(data.train, str) and is_source(data.train):
        rows = len(source_of(data.train, data.sequence_length))
        return [Member(data.train, rows - held_out_rows(data, rows))]
    sources = prefixes(data.train)
    held_out = held_out_fraction(data)
    indices = {prefix: TokenIndex(prefix) for prefix in sources}
    stops = {prefix: held_out_start(index, held_out) for prefix, index in indices.items()}

    def member(share: float, *of: str) -> Member:
        names = ", ".join(of)
        if not is_chat(of[0]):
            return Member(
                names, whole_samples(sum(stops[prefix] for prefix in of), data.sequence_length, names), share
            )
        documents = [whole_documents(indices[prefix], 0, stops[prefix]) for prefix in of]
        rows = rows_of(documents, data.sequence_length, data.packing, names, together(of[0]))
        return Member(names, int(rows.max()) + 1, share)

    if not isinstance(data.train, dict) or len(sources) == 1:
        return [member(1.0, *sources)]
    counts = whole_weights(list(data.train.values()))
    return [member(count / sum(counts), prefix) for count, prefix in zip(counts, sources, strict=True)]


def samples_per_epoch(data: DataConfig) -> int:
    """Samples of the training data before one is repeated. Raises DataError where the dataset would."""
    sources = members(data)
    if not isinstance(data.train, dict) or len(sources) == 1:
        return sources[0].samples
    counts = whole_weights(list(data.train.values()))
    source, _ = interleave(counts)
    return min(first_repeat(source, counts, j, each.samples) for j, each in enumerate(sources))


def repeats(of: Sequence[Member], total: int, batch: int, times: int = 1) -> list[str]:
    """A line for each member that a run of so many samples reads more than so many times, by more than what
    rounds up the last step."""
    return [
        f"{name} is read {in_words(total * share / samples)} times (it has {samples:,} samples, and the run "
        f"takes {total * share:,.0f})"
        for name, samples, share in of
        if total * share - times * samples >= batch * share
    ]


def in_words(times: float) -> str:
    """2.32, or 1,234."""
    return f"{times:.2f}".rstrip("0").rstrip(".") if times < 10 else f"{times:,.0f}"


def held_out_fraction(data: DataConfig) -> float:
    """The fraction of the training data that is held out for validation; 0 if the validation data is files of
    its own, or none."""
    return data.validation if isinstance(data.validation, float | int) else 0.0


def held_out_rows(data: DataConfig, rows: int) -> int:
    """Number of rows at the end of a data source of the user that are held out for validation. Raises
    DataError if none is left."""
    fraction = held_out_fraction(data)
    count = math.ceil(rows * fraction)
    if count >= rows:
        raise DataError(f"data.validation = {fraction} leaves no row of {data.train}, which has {rows}.")
    return count


def held_out_start(file: TokenIndex, held_out: float) -> int:
    """The token at which a file's held-out part begins: a document's start, unless text would then have less
    than half of the fraction. A pair is not separated."""
    wanted = round(len(file) * held_out)
    cut = file.document_at(len(file) - wanted, together(file.prefix)) if wanted else len(file)
    return cut if is_chat(file.prefix) or 2 * (len(file) - cut) >= wanted else len(file) - wanted


def together(prefix: str) -> int:
    """Number of consecutive documents of a token file that stay in one row: 2 of preference pairs, else 1."""
    return 2 if preference(prefix) == "pairs" else 1


def whole_samples(tokens: int, sequence_length: int, names: str) -> int:
    """Number of samples of a text. Raises DataError, naming the files, if there is none."""
    samples = (tokens - 1) // sequence_length  # the last target is one token past the last input
    if samples < 1:
        raise DataError(
            f"data.sequence_length = {sequence_length} needs {sequence_length + 1} tokens for one sample, "
            f"and {names} gives "
            f"{tokens}. Choose a shorter sequence_length, a larger held-out fraction, or more data."
        )
    return samples


class Documents(NamedTuple):
    """Consecutive whole documents of a token file.

    Attributes:
        first: the number in the file of the first one.
        sizes: their numbers of tokens.
    """

    prefix: str
    first: int
    sizes: NDArray[np.integer]


def whole_documents(file: TokenIndex, start: int, stop: int) -> Documents:
    """Those documents of a file that end inside tokens [start, stop)."""
    ends = file.sizes.cumsum()
    inside = (start < ends) & (ends <= stop)
    return Documents(file.prefix, int(inside.argmax()), file.sizes[inside])


def inputs_of(sizes: NDArray[np.integer], together: int) -> NDArray[np.integer]:
    """The numbers of positions that documents take in a row: the last token is only predicted, except that of
    pairs, which reward models read."""
    return sizes if together > 1 else sizes - 1


def longest_inputs(data: DataConfig) -> int:
    """The largest number of positions in a row of the data: those of its longest document where all of it has
    documents, whose positions restart, and else those of a row. Raises DataError if a file cannot be read."""
    files = [*prefixes(data.train), *prefixes(data.validation)]
    if not files or not all(map(is_chat, files)):
        return data.sequence_length
    longest = max(int(inputs_of(TokenIndex(file).sizes, together(file)).max()) for file in files)
    return min(longest, data.sequence_length)


def rows_of(
    parts: Sequence[Documents], sequence_length: int, packing: bool, names: str, together: int = 1
) -> NDArray[np.int64]:
    """The row of each conversation, or of each pair of them with `together` = 2. Raises DataError, naming the
    files, if there is none, or one that is longer than a row."""
    for part in parts:
        if len(part.sizes) % together:
            raise DataError(
                f"{part.prefix} has {len(part.sizes)} documents, and preference pairs have two each. Prepare "
                "the data again with megalite prepare --preference."
            )
    sizes = np.concatenate([part.sizes for part in parts])
    if not len(sizes):
        raise DataError(
            f"{names} leaves no conversation for training or validation: hold out another fraction, or add "
            "data."
        )
    lengths = inputs_of(sizes, together).reshape(-1, together).sum(1)
    if (longest := lengths.max()) > sequence_length:
        raise DataError(
            f"data.sequence_length = {sequence_length} cuts "
            + (
                f"a conversation of {longest + 1} tokens in {names}. Raise it to {longest}, or prepare the "
                f"data again with --max_length {sequence_length + 1}."
                if together == 1
                else _long_pair(parts, sequence_length, int(longest))
            )
        )
    return best_fit(lengths, sequence_length) if packing else np.arange(len(lengths))


def _long_pair(parts: Sequence[Documents], sequence_length: int, longest: int) -> str:
    for part in parts:
        pairs = part.sizes.reshape(-1, 2)
        if len(long := np.flatnonzero(pairs.sum(1) > sequence_length)):
            break
    number = part.first // 2 + int(long[0])
    chosen, rejected = pairs[long[0]]
    return (
        f"pair {number} of {part.prefix} (documents {2 * number} and {2 * number + 1} with {chosen} and "
        f"{rejected} tokens), and both must be in one row. Raise it to {longest}, which fits every pair, or "
        f"prepare the data again with --max_length {sequence_length // 2}."
    )


def best_fit(sizes: NDArray[np.integer], capacity: int) -> NDArray[np.int64]:
    """The row of each document when rows of `capacity` are packed best-fit decreasing (Johnson 1974),
    PACKED_TOGETHER documents at a time.

    The longest documents are placed first, each into the fullest row with enough room. Rows are numbered in
    the order of their first documents.
    """
    rows, count = np.empty(len(sizes), np.int64), 0
    for start in range(0, len(sizes), PACKED_TOGETHER):
        rooms: list[tuple[int, int]] = []  # (room, row), ascending
        for document in start + np.argsort(-sizes[start : start + PACKED_TOGETHER], kind="stable"):
            at = bisect_left(rooms, (sizes[document], 0))
            room, rows[document] = rooms.pop(at) if at < len(rooms) else (capacity, count)
            insort(rooms, (room - sizes[document], rows[document]))
            count += room == capacity
    _, first, rows = np.unique(rows, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[rows]


def whole_weights(weights: list[float]) -> list[int]:
    """The smallest integers in the proportion of the weights, read as decimals.

    If they sum to more than LONGEST_PERIOD, the shares are rounded to multiples of 1 / LONGEST_PERIOD (none
    to 0).
    """
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(f.denominator for f in exact))
    whole = [int(f * scale) for f in exact]
    if sum(whole) // math.gcd(*whole) > LONGEST_PERIOD:
        whole = _rounded([f / sum(exact) for f in exact])
    return [count // math.gcd(*whole) for count in whole]


def _rounded(shares: list[Fraction]) -> list[int]:
    """The shares in units of 1 / LONGEST_PERIOD, each at least 1; the largest remainders are rounded up."""
    whole = [max(1, math.floor(share * LONGEST_PERIOD)) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda j: whole[j] - shares[j] * LONGEST_PERIOD)
    for j in by_remainder[: max(0, LONGEST_PERIOD - sum(whole))]:
        whole[j] += 1
    return whole


def interleave(counts: list[int]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """One period: for each of its sum(counts) samples, its dataset and the number of earlier samples of that
    dataset.

    The m-th sample of dataset j may be placed in the window [floor(m·D/q), ceil((m + 1)·D/q)), earliest
    deadline first. That meets every window (Baruah et al. 1996, proportionate progress), and a sequence
    inside the windows is within one sample of every share.
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


def first_repeat(source: NDArray[np.int32], counts: list[int], j: int, samples: int) -> int:
    """The first index of a blend, of which `source` is one period, at which dataset j, of `samples` samples,
    begins its second epoch."""
    periods, rest = divmod(samples, counts[j])
    return periods * len(source) + int(np.flatnonzero(source == j)[rest])
