"""Rows of whole conversations: what is packed with what, what counts, and that their order needs no memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.config import samples
from megalite.config.samples import best_fit
from megalite.config.sections.data import DataConfig
from megalite.data.dataset import Dataset, build
from megalite.data.indexed import DataError, IndexedTokens
from megalite.data.loader import Loader
from megalite.mesh.layout import AxisPlace
from megalite.parallel.microbatch import IGNORE_INDEX

S = 10
SIZES = [4, 11, 2, 6, 5, 3, 1, 8, 7]


def data(train, **options) -> Dataset:
    return build(DataConfig(**{"train": train, "sequence_length": S, "shuffle": False} | options), seed=1)[0]


def documents_of(row: np.ndarray) -> list[list[int]]:
    """A row taken apart where its document starts change: the inputs of each. What is all zero is padding."""
    tokens, _, starts = row.tolist()
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
        tokens, targets, starts = row = dataset[i]
        assert row.shape == (3, S) and row.dtype == np.int64
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
    rows = [dataset[i].tobytes() for i in range(3 * count)]
    assert len(set(rows[:count])) == count and all(
        sorted(rows[e * count : e * count + count]) == sorted(rows[:count]) for e in (1, 2)
    )
    assert len({tuple(rows[e * count : e * count + count]) for e in range(3)}) > 1, "each epoch has its own order"
    assert [again[i].tobytes() for i in (2 * count + 1, 1)] == [rows[2 * count + 1], rows[1]], (
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
    assert blend.chat and [int(blend[i][0, 0]) >= 50 for i in range(6)].count(True) == 2
    loader = Loader(blend, global_batch_size=3, micro_batch_size=3, dp=AxisPlace(0, 1), samples=2)
    (microbatch,) = loader.step(0)
    loader.close()
    assert microbatch.tokens.shape == microbatch.targets.shape == microbatch.document_start.shape == (S, 3)
    assert (microbatch.targets[:, 2] == IGNORE_INDEX).all(), "the row past the end stands in for none"


def test_bad_files(chats, write, tmp_path):
    with pytest.raises(
        DataError, match="sequence_length = 9 cuts a conversation of 11 tokens in .*Raise it to 10.*--max_length 10"
    ):
        data(chats("x", SIZES), sequence_length=9)
    with pytest.raises(DataError, match="leaves no conversation for training or validation"):
        data(chats("x", SIZES), validation=0.01)
    Path(tmp_path / "x.loss.idx").unlink()
    with pytest.raises(DataError, match=r"x\.loss\.idx is missing"):
        IndexedTokens(tmp_path / "x")
    write("x.loss", [[1] * sum(SIZES)], code=1, metadata=None)
    with pytest.raises(DataError, match=r"x\.loss is not of the same documents as .*x\. Prepare both again"):
        IndexedTokens(tmp_path / "x")
