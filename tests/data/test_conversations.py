"""Rows of whole conversations: what is packed with what, what counts, and that their order needs no memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.config import samples
from megalite.config.samples import best_fit
from megalite.config.sections.data import DataConfig
from megalite.data.dataset import Dataset, Sample, build
from megalite.data.indexed import DataError, IndexedTokens
from megalite.data.loader import Loader
from megalite.mesh.layout import AxisPlace
from megalite.parallel.microbatch import IGNORE_INDEX, Microbatch

S = 10
SIZES = [4, 11, 2, 6, 5, 3, 1, 8, 7]


def data(train, **options) -> Dataset:
    return build(DataConfig(**{"train": train, "sequence_length": S, "shuffle": False} | options), seed=1)[0]


def documents_of(row: Sample) -> list[list[int]]:
    """A row taken apart where its document starts change: the inputs of each. What is all zero is padding."""
    assert row.starts is not None
    tokens, starts = row.tokens.tolist(), row.starts.tolist()
    pieces = [tokens[start : start + starts.count(start)] for start in sorted(set(starts))]
    return [piece for piece in pieces if any(piece)]


@pytest.mark.parametrize("packing", [False, True])
def test_every_conversation_stands_whole_in_one_row(chats, packing):
    """Inputs are all its tokens but the last; a target counts where it is the assistant's, and never is another
    conversation's token."""
    dataset = data(chats("x", SIZES, first=1), packing=packing)
    ends = np.cumsum(SIZES) + 1
    expected = {
        int(end - size): list(range(end - size, end)) for end, size in zip(ends, SIZES, strict=True) if size > 1
    }
    results = []
    for i in range(dataset.samples_per_epoch):
        tokens, targets, starts, *_ = row = dataset[i]
        assert all(each.shape == (S,) and each.dtype == np.int64 for each in (tokens, targets, starts))
        assert (np.diff(starts) >= 0).all() and (starts <= np.arange(S)).all()
        pieces = documents_of(row)
        results += [piece[0] for piece in pieces]
        for piece in pieces:
            whole = expected[piece[0]]
            assert piece == whole[:-1]
            at = tokens.tolist().index(piece[0])
            assert starts[at : at + len(piece)].tolist() == [at] * len(piece), (
                "positions and attention begin with the conversation"
            )
            counted = [token if token % 2 else IGNORE_INDEX for token in whole[1:]]
            assert targets[at : at + len(piece)].tolist() == counted
        assert (targets[tokens == 0] == IGNORE_INDEX).all(), "padding does not count"
    assert sorted(results) == sorted(expected)
    assert dataset.samples_per_epoch == (4 if packing else len(SIZES)), "38 inputs in rows of 10"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=80), st.integers(50, 70), st.integers(1, 80))
def test_packing(sizes, capacity, together):
    """Nothing overflows, and of rows packed together at most one is half empty: two could have been one."""
    original, samples.PACKED_TOGETHER = samples.PACKED_TOGETHER, together
    try:
        rows = best_fit(np.array(sizes), capacity)
    finally:
        samples.PACKED_TOGETHER = original
    assert set(rows) == set(range(max(rows) + 1))
    assert list(dict.fromkeys(rows)) == sorted(set(rows)), "numbered by their first document"
    for start in range(0, len(sizes), together):
        own = rows[start : start + together]
        filled = np.bincount(own, weights=sizes[start : start + together])[np.unique(own)]
        assert filled.max() <= capacity and (filled * 2 <= capacity).sum() <= 1


def test_packing_fills_rows_of_real_lengths():
    """20,000 log-normal lengths in rows of 2,048: a greedy cut in file order leaves a tenth of them empty, this less
    than a hundredth."""
    lengths = np.minimum(np.random.default_rng(0).lognormal(5.8, 0.9, 20_000).astype(int) + 2, 2048)
    assert lengths.sum() / (2048 * (best_fit(lengths, 2048).max() + 1)) > 0.99


@pytest.mark.parametrize("packing", [False, True])
def test_order_is_a_function_of_the_index(chats, packing):
    prefix = chats("x", [3, 5, 4, 6, 2, 9, 3, 3, 7, 5, 4, 4], first=1)
    dataset, again = (data(prefix, packing=packing, shuffle=True) for _ in range(2))
    count = dataset.samples_per_epoch
    rows = [dataset[i].tokens.tobytes() for i in range(3 * count)]
    assert len(set(rows[:count])) == count and all(
        sorted(rows[e * count : e * count + count]) == sorted(rows[:count]) for e in (1, 2)
    )
    assert len({tuple(rows[e * count : e * count + count]) for e in range(3)}) > 1, "each epoch has its own order"
    assert [again[i].tokens.tobytes() for i in (2 * count + 1, 1)] == [rows[2 * count + 1], rows[1]], (
        "from anywhere, with nothing read before"
    )


def test_fingerprint_knows_packing_and_mask(chats, tmp_path):
    prefix = chats("x", SIZES)
    results = {
        data(prefix, packing=packing, shuffle=shuffle).fingerprint
        for packing in (False, True)
        for shuffle in (False, True)
    }
    assert len(results) == 4
    mask = tmp_path / "x.loss.bin"
    mask.write_bytes(bytes([1]) + mask.read_bytes()[1:])
    assert data(prefix).fingerprint not in results


def test_validation_blends_and_lists_keep_conversations_whole(chats):
    a, b = chats("a", [4] * 10, first=1), chats("b", [6] * 5, first=50)
    train, validation = build(
        DataConfig(train=[a, b], validation=0.3, sequence_length=S, packing=True, shuffle=False), seed=1
    )
    firsts = [
        [piece[0] for i in range(d.samples_per_epoch) for piece in documents_of(d[i])] for d in (train, validation)
    ]
    assert [sorted(each) for each in firsts] == [[1, 5, 9, 13, 17, 21, 25, 50, 56, 62, 68], [29, 33, 37, 74]]
    uneven = build(DataConfig(train=chats("c", [3, 3, 9, 3], first=1), validation=0.5, sequence_length=S), seed=1)
    assert [d.samples_per_epoch for d in uneven] == [3, 1], "half of 18 tokens would cut the third"
    blend = data({a: 2.0, b: 1.0})
    assert blend.chat and [int(blend[i].tokens[0]) >= 50 for i in range(6)].count(True) == 2
    loader = Loader(blend, global_batch_size=3, micro_batch_size=3, dp=AxisPlace(0, 1), samples=2)
    (microbatch,) = loader.step(0)
    loader.close()
    assert microbatch.tokens.shape == microbatch.targets.shape == microbatch.document_start.shape == (S, 3)
    assert (microbatch.targets[:, 2] == IGNORE_INDEX).all(), "the row past the end stands in for none"


def microbatch(dataset: Dataset, samples: int | None = None, size: int | None = None) -> Microbatch:
    size = size or dataset.samples_per_epoch
    loader = Loader(dataset, global_batch_size=size, micro_batch_size=size, dp=AxisPlace(0, 1), samples=samples)
    (read,) = loader.step(0)
    loader.close()
    return read


@pytest.mark.parametrize("kind", ["pairs", "labelled"])
@pytest.mark.parametrize("packing", [False, True])
def test_documents_of_preferences(preferences, packing, kind):
    """Every target of prompt and completion is there, the numbers say which document it is of, and no pair is
    separated, although the shortest documents alone would fill rows better."""
    sizes = [4, 8, 3, 3, 6, 4, 2, 3]
    # the last token of a document is only predicted, except that of pairs, which reward models read
    last = kind == "pairs"
    dataset = data(preferences("x", sizes, kind, first=1), packing=packing, sequence_length=12 if last else S)
    rows = {("pairs", False): 4, ("pairs", True): 3, ("labelled", False): 8, ("labelled", True): 3}[kind, packing]
    assert (dataset.samples_per_epoch, dataset.documents, dataset.preference) == (rows, 8, kind)
    read = microbatch(dataset)
    of, numbers = read.sequences, []
    assert of is not None and of.count == 8 and of.labels.tolist() == [1 - i % 2 for i in of.documents.tolist()]
    ends = np.cumsum(sizes) + 1
    for number, document in enumerate(of.documents.tolist()):
        own = of.index == number
        expected = list(range(ends[document] - sizes[document], ends[document]))
        (row,) = own.any(0).nonzero().flatten().tolist()
        completion = [i >= len(expected) - 3 for i in range(len(expected) - 1)]
        inputs, targets = (expected, [*expected[1:], IGNORE_INDEX]) if last else (expected[:-1], expected[1:])
        assert read.tokens[own].tolist() == inputs and read.targets[own].tolist() == targets
        assert of.completion[own].tolist() == completion + [False] * last
        numbers.append((document, row))
        at = own[:, row].nonzero().flatten().tolist()
        assert at == list(range(at[0], at[-1] + 1)) and (read.document_start[own] == at[0]).all()
    padding = of.index < 0
    assert (read.targets[padding] == IGNORE_INDEX).all() and not of.completion[padding].any() and padding.any()
    assert numbers == sorted(numbers, key=lambda each: each[1]), "numbered row after row"
    if kind == "pairs":
        assert all(
            a == b - 1 and a % 2 == 0 and of_a == of_b
            for (a, of_a), (b, of_b) in zip(numbers[::2], numbers[1::2], strict=True)
        )


def test_preferences_of_blends_and_validation(preferences):
    a, b = preferences("a", [3] * 20), preferences("b", [4] * 8, first=60)
    blend = data({a: 1.0, b: 1.0}, packing=True, sequence_length=12)
    assert (blend.preference, blend.documents) == ("pairs", 28)
    # in turn: two pairs of a, one of b
    of = microbatch(blend, size=4).sequences
    assert of is not None and of.documents.tolist() == [0, 1, 2, 3, 20, 21, 4, 5, 6, 7, 22, 23]
    train, validation = build(DataConfig(train=a, validation=0.25, sequence_length=12, packing=True), seed=1)
    assert validation is not None
    # 15 tokens would separate a pair
    assert (train.documents, validation.documents) == (16, 4)
    held = microbatch(validation, samples=1, size=3)
    assert held.sequences is not None and held.sequences.documents.tolist() == [0, 1, 2, 3]
    assert (held.sequences.index[:, 1:] == -1).all() and not held.sequences.completion[:, 1:].any(), "past the end"
    named = build(DataConfig(train=a, validation={"a": a, "b": b}, sequence_length=S), seed=1)[1]
    assert named is not None and named.documents == 28
    assert named.sets["b"][0].sequences.documents.tolist() == [0, 1]  # type: ignore[union-attr]
    assert named[10].sequences.documents.tolist() == [20, 21]  # type: ignore[union-attr]
    same = {data(preferences("c", [3] * 4, kind), packing=True).fingerprint for kind in ("pairs", "labelled")}
    assert len(same) == 2, "other numbers of documents in a row"


def test_weights_of_targets(chats, write):
    """They are those of the targets; where a set of a blend has none, its targets weigh 1."""
    a, b = chats("a", [4, 4], first=1), chats("b", [4], first=31)
    write("a.loss", [[0, 0.5, -2, 1], [1, 0, 0, 0]], code=7, metadata=None)
    read = microbatch(data({a: 2.0, b: 1.0}), size=3, samples=3)
    assert read.weights is not None and read.weights.dtype == torch.float32
    assert read.weights[:3].T.tolist() == [[0.5, -2, 1], [0, 0, 0], [0, 1, 0]] and not read.weights[3:].any()
    assert torch.equal(read.weights == 0, read.targets == IGNORE_INDEX)
    assert microbatch(data(b)).weights is None


def test_bad_files(chats, preferences, write, tmp_path):
    with pytest.raises(
        DataError, match="sequence_length = 9 cuts a conversation of 11 tokens in .*Raise it to 10.*--max_length 10"
    ):
        data(chats("x", SIZES), sequence_length=9)
    long = preferences("long", [4, 4, 7, 6])
    with pytest.raises(
        DataError,
        match=r"= 10 cuts pair 1 of .*long \(documents 2 and 3 with 7 and 6 tokens\), .*Raise it to 13.*--max_length 5",
    ):
        data([preferences("p", [3, 3]), long])
    with pytest.raises(DataError, match="odd has 3 documents, and preference pairs have two each"):
        data(preferences("odd", [3, 3, 3]))
    with pytest.raises(DataError, match="leaves no conversation for training or validation"):
        data(chats("x", SIZES), validation=0.01)
    Path(tmp_path / "x.loss.idx").unlink()
    with pytest.raises(DataError, match=r"x\.loss\.idx is missing"):
        IndexedTokens(tmp_path / "x")
    write("x.loss", [[1] * sum(SIZES)], code=1, metadata=None)
    with pytest.raises(DataError, match=r"x\.loss does not match the documents of .*x\. Prepare the data again"):
        IndexedTokens(tmp_path / "x")
