"""Microbatches: which sample lies where, document starts, masks, prefetching, the validation epoch."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.data.dataset import Dataset, Sample
from megalite.data.indexed import DataError
from megalite.data.loader import IGNORE_INDEX, Loader
from megalite.mesh.layout import AxisPlace

EOS = 9


class Fixed(Dataset):
    """Sample i is `rows[i % len(rows)]`, or without rows i·100, i·100 + 1, …"""

    def __init__(self, rows: list[list[int]] | None = None, eos: int | None = EOS, fails_at: int | None = None):
        self.vocab_size, self.eos, self.fingerprint, self.rows, self.fails_at = 10, eos, "", rows, fails_at
        self.samples_per_epoch = len(rows or [0])
        self.read: list[int] = []

    def __getitem__(self, index: int) -> Sample:
        self.read.append(index)
        if index == self.fails_at:
            raise OSError("the disk is gone")
        row = self.rows[index % len(self.rows)] if self.rows else range(index * 100, index * 100 + 5)
        tokens = np.array(row, dtype=np.int64)
        return Sample(tokens[:-1], tokens[1:])


@pytest.fixture
def load():
    """load(dataset, …) → Loader of one row and one rank unless told otherwise; closed at the end."""
    created = []

    def make(dataset: Dataset, **options) -> Loader:
        sizes = {"global_batch_size": 1, "micro_batch_size": 1, "dp": AxisPlace(0, 1)}
        created.append(Loader(dataset, **sizes | options))
        return created[-1]

    yield make
    for loader in created:
        loader.close()


@settings(max_examples=20, deadline=None)
@given(dp=st.integers(1, 4), micro=st.integers(1, 4), accumulation=st.integers(1, 4), first=st.integers(0, 10**12))
def test_layout_never_changes_the_sequence(dp, micro, accumulation, first):
    """Sample k·G + (j·dp + r)·b + i is row i of microbatch j on rank r; over all ranks the batch is samples first …
    first + G − 1."""
    size = dp * micro * accumulation
    seen = []
    for rank in range(dp):
        loader = Loader(Fixed(), global_batch_size=size, micro_batch_size=micro, dp=AxisPlace(rank, dp))
        microbatches = loader.step(first)
        loader.close()
        assert len(microbatches) == accumulation
        for j, microbatch in enumerate(microbatches):
            expected = [first + (j * dp + rank) * micro + i for i in range(micro)]
            assert microbatch.samples.tolist() == expected
            assert microbatch.tokens.tolist() == [[100 * s + t for s in expected] for t in range(4)]
            assert microbatch.targets.tolist() == [[100 * s + t + 1 for s in expected] for t in range(4)]
            assert microbatch.positions.tolist() == [[t] for t in range(4)] and microbatch.segments == ((0, 4),)
            seen += expected
    assert sorted(seen) == list(range(first, first + size))


def test_shapes_and_types(load):
    (microbatch,) = load(
        Fixed([[1, 2, 9, 3, 4, 5]] * 3), global_batch_size=3, micro_batch_size=3, reset_positions=True
    ).step(0)
    for tensor in (microbatch.tokens, microbatch.targets, microbatch.document_start):
        assert tensor.shape == (5, 3)
        assert tensor.dtype == torch.int64
        assert tensor.is_contiguous()
    assert (microbatch.samples.shape, microbatch.samples.dtype) == ((3,), torch.int64)


ROWS = [
    [1, 2, 3, 4, 5, 6],  # one document
    [1, 9, 3, 9, 5, 6],
    [9, 2, 9, 9, 5, 6],  # begins with EOS; an empty document between two
    [1, 2, 3, 4, 9, 9],  # ends with EOS
]
STARTS = [[0, 0, 0, 0, 0], [0, 0, 2, 2, 4], [0, 1, 1, 3, 4], [0, 0, 0, 0, 0]]
MASKED = [[2, 3, 4, 5, 6], [9, -100, 9, -100, 6], [-100, 9, -100, -100, 6], [2, 3, 4, 9, -100]]


@pytest.mark.parametrize(("row", "starts"), list(zip(ROWS, STARTS, strict=True)))
def test_document_start(load, row, starts):
    (microbatch,) = load(Fixed([row]), reset_positions=True).step(0)
    assert microbatch.document_start.T.tolist() == [starts]
    assert microbatch.positions.T.tolist() == [list(range(len(row) - 1))], (
        "documents do not move what a position is: the index in the row"
    )
    assert microbatch.targets.T.tolist() == [row[1:]], "positions reset, every target still counts"


@pytest.mark.parametrize("rows", [[0], [1, 2], [3, 0, 1, 2]], ids=str)
def test_boundaries_equal_document_starts(load, rows):
    """Offsets in the tokens of all rows, one row after the other, as kernels for documents of any length take them."""
    chosen = [ROWS[row] for row in rows]
    (microbatch,) = load(
        Fixed(chosen), reset_positions=True, global_batch_size=len(rows), micro_batch_size=len(rows)
    ).step(0)
    offsets, longest = microbatch.boundaries
    firsts = [(row, start) for row, given in enumerate(STARTS[row] for row in rows) for start in sorted(set(given))]
    assert offsets.tolist() == [5 * row + start for row, start in firsts] + [5 * len(rows)]
    assert offsets.dtype == torch.int32 and longest == max(offsets.diff()).item()
    starts = torch.repeat_interleave(offsets[:-1], offsets.diff()).view(len(rows), 5) - 5 * torch.arange(
        len(rows)
    ).unsqueeze(1)
    assert torch.equal(starts.T, microbatch.document_start), "each token is in the document that its start says"


@pytest.mark.parametrize(("row", "targets"), list(zip(ROWS, MASKED, strict=True)))
def test_eod_mask(load, row, targets):
    (microbatch,) = load(Fixed([row]), eod_mask_loss=True).step(0)
    assert microbatch.targets.T.tolist() == [targets]
    assert microbatch.tokens.T.tolist() == [row[:-1]]
    assert microbatch.document_start is None and microbatch.boundaries is None


@pytest.mark.parametrize("samples", range(1, 10))
@pytest.mark.parametrize("dp", [1, 2])
def test_validation_epoch(load, samples, dp):
    """Each sample counts once; rows past the end keep the shape and count nothing."""
    dataset = Fixed()
    counted = []
    for rank in range(dp):
        loader = load(dataset, global_batch_size=4, micro_batch_size=2, dp=AxisPlace(rank, dp), samples=samples)
        for batch in loader.epoch():
            assert len(batch) == 2 // dp
            for microbatch in batch:
                assert microbatch.tokens.shape == (4, 2)
                counted += microbatch.targets[microbatch.targets != IGNORE_INDEX].tolist()
        loader.close()
    assert sorted(counted) == [100 * s + t for s in range(samples) for t in range(1, 5)]
    assert max(dataset.read) < samples
    assert len(dataset.read) == -(-samples // 4) * 4, "nothing is read ahead past the end"


def test_limited_validation(load):
    loader = load(Fixed(), global_batch_size=2, micro_batch_size=2, samples=9)
    assert [batch[0].samples.tolist() for batch in loader.epoch(2)] == [[0, 1], [2, 3]]
    assert [batch[0].samples.tolist() for batch in loader.epoch(1)] == [[0, 1]], "and again from the start"


def test_an_endless_loader_has_no_epoch(load):
    with pytest.raises(ValueError, match="finite loader"):
        list(load(Fixed()).epoch())


def test_next_batch_is_read_ahead_once(load):
    dataset = Fixed()
    loader = load(dataset, global_batch_size=2, micro_batch_size=2)
    for first in (0, 2, 4):
        loader.step(first)
    loader.close()
    assert dataset.read == list(range(8)), "three batches and the one ahead, none twice"


def test_jump_to_another_sample(load):
    loader = load(Fixed())
    assert [loader.step(k)[0].samples.tolist() for k in (0, 1, 70, 71, 3)] == [[0], [1], [70], [71], [3]]


def test_error_surfaces_in_the_step_that_needs_it(load):
    loader = load(Fixed(fails_at=1))
    loader.step(0)
    with pytest.raises(OSError, match="the disk is gone"):
        loader.step(1)
    assert loader.step(2)[0].samples.tolist() == [2]


def test_a_token_beyond_the_vocabulary_is_named(load):
    rows = [[1, 2, 3, 4, 9], [1, 2, 3, 4, 10]]  # the second one's is a target alone
    loader = load(Fixed(rows), vocab_size=10)
    loader.step(0)
    with pytest.raises(DataError, match=r"token id 10, which is out of range for model.vocab_size=10\. Set"):
        loader.step(1)


def test_where_conversations_begin_is_no_token(load):
    starts = np.array([0] * 12 + [12])  # the last position begins a conversation

    class Conversation(Fixed):
        def __getitem__(self, index: int) -> Sample:
            return super().__getitem__(index)._replace(starts=starts)

    (batch,) = load(Conversation([[1] * 14], eos=None), vocab_size=10).step(0)
    assert batch.document_start[:, 0].tolist() == starts.tolist()


def test_close_joins_the_thread(load):
    loader = load(Fixed())
    loader.step(0)
    (thread,) = [t for t in threading.enumerate() if t.name == "megalite-loader"]
    assert thread.daemon
    loader.close()
    loader.close()
    assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="closed"):
        loader.step(1)
