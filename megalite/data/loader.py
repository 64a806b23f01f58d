"""The data loader, which groups samples into microbatches.

Sample k·G + (j·dp + r)·b + i is row i of microbatch j of step k on data-parallel rank r.

G is the global batch size, b the micro-batch size. One thread reads the next global batch while the current
one trains. The loader stores no position: each step names the sample at which its batch starts, so resuming
needs no state.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megalite.data.dataset import Dataset, Sample
from megalite.data.document_boundaries import boundaries, document_starts
from megalite.mesh.layout import AxisPlace
from megalite.parallel.microbatch import IGNORE_INDEX, Microbatch


class Loader:
    """Loads the microbatches of one data-parallel rank.

    Args:
        dp: this rank's place among the data-parallel ranks, not the data ranks (dp · cp): the cp ranks of a
            replica read the same rows.
        reset_positions: EOS ends a document; positions and attention restart after it
            (`Microbatch.document_start`).
        eod_mask_loss: do not count the prediction from an EOS, which is the next document's first token.
        vocab_size: a token at or above it is an error: tp ranks, which split the vocabulary, would each take
            it for another rank's.
        make: makes a microbatch from whole rows; under context parallelism, from this rank's part of them.
        samples: number of samples of the dataset; rows past it are padded and not counted. None: the dataset
            is endless.

    Attributes:
        current: the microbatches that `step` returned last.
        size: first sample → size of its global batch. By default `global_batch_size`; a batch size ramp-up
            replaces it.
        mismatches: whether microbatches have `Microbatch.mismatched`; rows then have one document each.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        dp: AxisPlace,
        reset_positions: bool = False,
        eod_mask_loss: bool = False,
        vocab_size: int | None = None,
        make: Callable[..., Microbatch] = Microbatch.of,
        samples: int | None = None,
    ):
        self.size: Callable[[int], int] = lambda first_sample: global_batch_size
        self._dataset, self._global_batch, self._end = dataset, global_batch_size, samples
        self._reset_positions, self._eod_mask_loss, self._vocab_size = (
            reset_positions,
            eod_mask_loss,
            vocab_size,
        )
        self._make = make
        self.mismatches = False
        # [microbatches, dp, batch]
        offsets = np.arange(global_batch_size).reshape(-1, dp.size, micro_batch_size)
        # [microbatches, batch]: this rank's rows, relative to the batch's first sample
        self._offsets = offsets[:, dp.rank]
        self._requests: SimpleQueue[tuple[int, Future[list[Microbatch]]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._next: tuple[int, Future[list[Microbatch]]] | None = None
        self._closed = False
        self.current: list[Microbatch] = []

    def step(self, first_sample: int) -> list[Microbatch]:
        """Return this rank's microbatches of the global batch that starts at `first_sample`.

        Starts reading the batch after it.

        Raises the exceptions of the reading thread.
        """
        if self._closed:
            raise RuntimeError("the loader is closed")
        # the first step, or the run went back or skipped samples
        if self._next is None or self._next[0] != first_sample:
            self._next = self._request(first_sample)
        (_, future), self._next = self._next, None
        batch = self.current = future.result()
        following = first_sample + self.size(first_sample)
        if self._end is None or following < self._end:
            self._next = self._request(following)  # read while this step computes
        return batch

    def epoch(self, batches: int | None = None) -> Iterator[list[Microbatch]]:
        """Yield the global batches of one pass over the `samples`, at most `batches` of them."""
        if self._end is None:
            raise ValueError("epoch() requires a finite loader: set samples")
        for first in range(0, self._end, self._global_batch)[:batches]:
            yield self.step(first)

    def close(self) -> None:
        """Stop the thread after its current request. A second call does nothing."""
        self._closed = True
        if self._thread is not None:
            self._requests.put(None)
            self._thread.join()
            self._thread = None

    def _request(self, first_sample: int) -> tuple[int, Future[list[Microbatch]]]:
        if self._thread is None:
            self._thread = threading.Thread(target=self._read, name="megalite-loader", daemon=True)
            self._thread.start()
        future: Future[list[Microbatch]] = Future()
        self._requests.put((first_sample, future))
        return first_sample, future

    def _read(self) -> None:
        while (request := self._requests.get()) is not None:
            first_sample, future = request
            try:
                future.set_result(self._batch(first_sample))
            except BaseException as error:  # raised by the step that waits for this batch
                future.set_exception(error)

    def _batch(self, first_sample: int) -> list[Microbatch]:
        """Build this rank's microbatches of a global batch."""
        size, read = self.size(first_sample), self._dataset.__getitem__
        samples = first_sample + self._offsets[: size * len(self._offsets) // self._global_batch]
        batch = [self._microbatch(rows, read) for rows in samples]
        if self.mismatches:
            from megalite.data.mismatched import mismatched  # not needed by other objectives

            count = size if self._end is None else min(size, self._end - first_sample)
            other = partial(mismatched, read, first_sample, count)
            for microbatch, rows in zip(batch, samples, strict=True):
                microbatch.mismatched = self._microbatch(rows, other)
        return batch

    def _microbatch(self, samples: NDArray[np.int64], read: Callable[[int], Sample]) -> Microbatch:
        """Build one microbatch.

        Args:
            samples: [batch], the global sample index of each row.
            read: returns the row of a sample.
        """
        last = samples.max() if self._end is None else self._end - 1  # read in place of rows past the end
        rows = [read(int(sample)) for sample in np.minimum(samples, last)]
        # [batch, seq] each: copies, because targets are masked in place
        tokens, targets = np.stack([row.tokens for row in rows]), np.stack([row.targets for row in rows])
        of_rows = [row.starts for row in rows if row.starts is not None]
        starts = np.stack(of_rows) if of_rows else None
        if self._vocab_size is not None and max(tokens.max(), targets.max()) >= self._vocab_size:
            from megalite.data.outside_vocabulary import outside

            raise outside(self._dataset, np.minimum(samples, last), rows, self._vocab_size)
        if self._reset_positions and self._dataset.eos is not None:
            starts = document_starts(tokens, self._dataset.eos)
        past_end = samples > last
        targets[past_end] = IGNORE_INDEX
        if self._eod_mask_loss:
            targets[tokens == self._dataset.eos] = IGNORE_INDEX
        fields: dict[str, Any] = {}
        if self._dataset.weighted or self._dataset.preference is not None or self._dataset.has_top:
            from megalite.data.target_fields import target_fields  # not needed by other data

            fields = target_fields(self._dataset, rows, targets, past_end)
        return self._make(
            tokens=sequence_first(tokens),
            targets=sequence_first(targets),
            samples=torch.from_numpy(np.ascontiguousarray(samples)),
            document_start=None if starts is None else sequence_first(starts),
            boundaries=None if starts is None else boundaries(starts),
            **fields,
        )


def sequence_first(rows: NDArray[Any]) -> torch.Tensor:
    """Transpose [batch, seq] to a contiguous tensor [seq, batch]."""
    return torch.from_numpy(np.ascontiguousarray(rows.T))
