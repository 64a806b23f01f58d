"""Mixtures of datasets: blended by weight, and several validation sets one after the other.

A `Blend` interleaves datasets by weight. The weights are scaled to integers q_1 … q_n with sum D, and a table
of one period of D samples is built such that after k samples dataset j has contributed q_j·k/D of them,
within one sample. Sample k is row k mod D of the table, which gives the dataset and the number of its samples
earlier in the period; (k div D)·q_j of its samples are in earlier periods. Nothing else is stored or
replayed.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate

from megalite.config.samples import first_repeat, interleave, whole_weights
from megalite.data.dataset import Dataset, Sample, agreed, digest


class Blend(Dataset):
    """A mixture of datasets, interleaved by weight.

    After any number of samples, each dataset has contributed its share to within one sample.

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
        self.vocab_size, self.eos = agreed(datasets, "vocab_size"), agreed(datasets, "eos")
        self.chat = any(dataset.chat for dataset in datasets)
        self.weighted = any(dataset.weighted for dataset in datasets)
        self.preference = datasets[0].preference
        # the ordinal of each dataset's first document
        *self._first_documents, self.documents = accumulate((d.documents for d in datasets), initial=0)
        self.fingerprint = digest(json.dumps([[d.fingerprint for d in datasets], self._counts]).encode())

    @property
    def parts(self) -> list[Dataset]:
        return self._datasets

    def __getitem__(self, index: int) -> Sample:
        source, sample = self.locate(index)
        return _renumbered(self._datasets[source][sample], self._first_documents[source])

    def locate(self, index: int) -> tuple[int, int]:
        """Return the dataset of sample `index` and the index of the sample in that dataset."""
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
        self.weighted, self.preference = any(d.weighted for d in self._datasets), first.preference
        *self._first_documents, self.documents = accumulate((d.documents for d in self._datasets), initial=0)
        self.fingerprint = "+".join(dataset.fingerprint for dataset in self._datasets)

    @property
    def parts(self) -> list[Dataset]:
        return self._datasets

    @property
    def sets(self) -> Mapping[str, Dataset]:
        return self._sets

    def __getitem__(self, index: int) -> Sample:
        sample = index % self.samples_per_epoch
        number = bisect_right(self._ends, sample)
        first_sample = self._ends[number - 1] if number else 0
        return _renumbered(self._datasets[number][sample - first_sample], self._first_documents[number])


def _renumbered(sample: Sample, first: int) -> Sample:
    """Return a sample whose documents of preferences are counted from `first`."""
    if sample.sequences is None:
        return sample
    documents = sample.sequences.documents + first
    return sample._replace(sequences=replace(sample.sequences, documents=documents))
