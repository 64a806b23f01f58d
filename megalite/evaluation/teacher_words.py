"""The most probable words of a teacher for every position of token files, stored in a directory.

Rows are read in order by a forward pass for each batch; rank 0 stores them, and how many are done: an
interrupted command continues there, on the same or on another layout. Communication: that of the forward
pass, over tp one all-gather of 2 + 2k numbers per token and an all-reduce of one, and all-reduces of the
words of a batch over all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megalite.assembly import parts as build
from megalite.checkpoint import CheckpointError
from megalite.checkpoint.agreement import on_rank_0, raise_on_all_ranks
from megalite.checkpoint.finite import nonfinite, reject
from megalite.config.errors import ConfigError
from megalite.config.samples import held_out_fraction
from megalite.config.schema import Config
from megalite.config.sections.data import DataConfig
from megalite.data import dataset as datasets
from megalite.data.dataset import TokenFiles
from megalite.data.loader import Loader
from megalite.data.teacher_words import RECORD, RowSet, TeacherWords
from megalite.evaluation.weights_identity import weights_identity
from megalite.generation.sources import ModelSource
from megalite.mesh.mesh import Mesh
from megalite.model.forward_state import ForwardState
from megalite.model.objective.losses import HeadLosses
from megalite.model.stage import Head
from megalite.parallel.collectives import all_gather, all_reduce
from megalite.parallel.microbatch import Microbatch
from megalite.parallel.top_words import TopWords
from megalite.system.progress import Report

SAVE_S = 30.0  # between two records of what is done
CHUNK = 256  # positions whose logits exist at a time


class TopWordsOf(HeadLosses):
    """What the last stage of a teacher does in place of a loss: it keeps its most probable words.

    Args:
        number: k.
    """

    def __init__(self, head: Head, number: int, temperature: float):
        self.head, self.number, self.temperature = head, number, temperature

    @torch.no_grad()
    def losses(self, x: Tensor, microbatch: Microbatch, state: ForwardState) -> tuple[Tensor, Tensor]:
        """Set `microbatch.top`. Return zeros, [] each.

        Args:
            x: the output of the last layer, [seq, batch, hidden].
        """
        normed = self.head.norm(x)
        parts = [self._of_logits(self.head.logits_of(part)) for part in normed.split(CHUNK)]
        microbatch.top = TopWords(*(torch.cat(each) for each in zip(*parts, strict=True)))
        return x.new_zeros(()), x.new_zeros(())

    def _of_logits(self, logits: Tensor) -> TopWords:
        """Return the words of logits [seq, batch, vocabulary/tp]."""
        entropy = self.head.loss
        first, valid = entropy.part(logits.flatten(0, 1))
        z = logits[..., :valid].to(torch.promote_types(logits.dtype, torch.float32)) / self.temperature
        lowest = torch.finfo(z.dtype).min
        own = min(self.number, valid)
        values = z.new_full((*z.shape[:2], self.number), lowest)
        words = torch.zeros_like(values, dtype=torch.int64)
        largest, total = z.new_full(z.shape[:2], lowest), z.new_zeros(z.shape[:2])
        if valid:
            values[..., :own], places = z.topk(own)
            words[..., :own] = places + first
            largest = values[..., 0]
            total = (z - largest.unsqueeze(-1)).exp().sum(-1)
        tp = entropy.tp
        stats = all_gather(torch.stack([largest, total]), tp).wait().view(tp.size, 2, *total.shape)
        most = stats[:, 0].amax(0)
        lse = most + (stats[:, 1] * (stats[:, 0] - most).exp()).sum(0).log()
        # [seq, batch, tp · k]: those of the ranks beside each other
        every, names = (
            all_gather(each, tp).wait().view(tp.size, *each.shape).permute(1, 2, 0, 3).flatten(2)
            for each in (values, words)
        )
        top, places = every.topk(self.number)
        chosen = names.gather(-1, places)
        inside = torch.where((chosen >= first) & (chosen < first + valid), chosen - first, valid)
        kept = torch.ones(*z.shape[:2], valid + 1, dtype=z.dtype, device=z.device).scatter_(-1, inside, 0.0)
        rest = ((z - lse.unsqueeze(-1)).exp() * kept[..., :valid]).double().sum(-1)
        return TopWords(chosen, top - lse.unsqueeze(-1), all_reduce(rest, tp).wait())


class WordScorer:
    """Stores the words of a teacher for token files, on one rank. Its creation is collective and loads the
    weights.

    Args:
        config: of forward passes over the first of the token files.
    """

    def __init__(
        self,
        config: Config,
        source: ModelSource,
        mesh: Mesh,
        device: torch.device,
        number: int,
        temperature: float,
    ):
        self.config, self.mesh, self.device, self.number = config, mesh, device, number
        self.parts = build.build_parts(config, mesh, device, training=False)
        for stage in self.parts.stages.values():
            if stage.head is not None:
                stage.sequence_losses = TopWordsOf(stage.head, number, temperature)
        with raise_on_all_ranks(mesh, CheckpointError):
            rectangles = self.parts.to_load()
            source.read(rectangles)
            reject(source.name, {part.name: nonfinite(part.tensor) for part in rectangles})
        self.parts.store.publish()
        self.schedule = build.schedule(config, build.layout(config).microbatches, forward_only=True)

    def run(self, store: TeacherWords, progress: Report) -> None:
        """Score the rest of the rows of a token file, and of what is held out of it. Collective.

        Args:
            store: used on rank 0.
        """
        for data in datasets.build(self.config.data, self.config.run.seed):
            if data is not None:
                assert isinstance(data, TokenFiles), "the data is one token file"
                self._run(store, data, progress)

    def _run(self, store: TeacherWords, data: TokenFiles, progress: Report) -> None:
        mesh, train, rows = self.mesh, self.config.train, data.samples_per_epoch
        options = self.config.data
        new = RowSet(
            data.names,
            rows,
            options.sequence_length,
            options.reset_positions,
            options.packing,
            held_out_fraction(options),
        )
        done = on_rank_0(mesh, lambda: store.begin(data.rows, new))
        arrays, saved = store.arrays(data.rows) if mesh.rank == 0 else None, time.monotonic()
        loader = Loader(
            data,
            global_batch_size=train.global_batch_size,
            micro_batch_size=train.micro_batch_size,
            dp=mesh.coordinates["dp"],
            reset_positions=options.reset_positions,
            vocab_size=self.config.model.vocab_size,
            make=build.microbatch_maker(self.config, mesh.cp),
            samples=rows,
        )
        try:
            for first in range(done, rows, train.global_batch_size):
                last = min(first + train.global_batch_size, rows)
                top = self._batch(first, last, loader.step(first))
                if arrays is not None:
                    words, log_p, rest = (values.cpu().numpy() for values in top)
                    arrays.words[first:last], arrays.log_p[first:last] = words, log_p
                    arrays.rest[first:last] = rest
                    progress(f"scoring {data.names}", last, rows, "rows")
                    if last == rows or time.monotonic() - saved >= SAVE_S:
                        for stored in arrays:
                            assert isinstance(stored, np.memmap)
                            stored.flush()
                        store.sets[data.rows] = replace(store.sets[data.rows], done=last)
                        store.save()
                        saved = time.monotonic()
        finally:
            loader.close()

    def _batch(self, first: int, last: int, microbatches: Sequence[Microbatch]) -> TopWords:
        """Return the words of rows first … last − 1, [rows, seq, k], on every rank."""
        on_device = [microbatch.to(self.device) for microbatch in microbatches]
        self.parts.runtime.run(self.schedule, on_device, step=0, loss_scale=0.0, training=False)
        length, number = self.config.data.sequence_length, self.number
        whole = TopWords(
            torch.zeros(last - first, length, number, dtype=torch.int64, device=self.device),
            torch.zeros(last - first, length, number, dtype=torch.float64, device=self.device),
            torch.zeros(last - first, length, dtype=torch.float64, device=self.device),
        )
        for each in on_device if self.mesh.tp.rank == 0 else ():
            for row, sample in enumerate(each.samples.tolist()):
                if each.top is not None and sample < last:
                    for all_rows, values in zip(whole, each.top, strict=True):
                        all_rows[sample - first] = values[:, row]
        return TopWords(*(all_reduce(each, self.mesh.world).wait() for each in whole))


@dataclass(frozen=True)
class RowOptions:
    """Batches, and what determines rows: the options of the section data with these names."""

    dp: int
    micro_batch_size: int
    sequence_length: int
    packing: bool = False
    reset_positions: bool = False
    held_out: float = 0.0


def words_config(config: Config, prefix: str, rows: RowOptions) -> Config:
    """Return the configuration of forward passes over the rows of a token file.

    Args:
        config: of forward passes of the teacher (`generation.sources.for_inference`).
    """
    train = replace(
        config.train,
        micro_batch_size=rows.micro_batch_size,
        global_batch_size=rows.micro_batch_size * rows.dp * 2 * config.parallel.pp,  # to fill the pipeline
        rampup_batch_size=None,
    )
    data = DataConfig(
        train=prefix,
        validation=rows.held_out or None,
        sequence_length=rows.sequence_length,
        shuffle=False,
        packing=rows.packing,
        reset_positions=rows.reset_positions,
    )
    return replace(config, parallel=replace(config.parallel, dp=rows.dp), train=train, data=data)


def open_words(output: Path, model: str, number: int, temperature: float, vocabulary: int) -> TeacherWords:
    """Return the words in a directory, or new ones.

    Raises:
        ConfigError: the directory has those of another model, temperature or number, or other files; or there
        are
            fewer words than `number`.
    """
    if number > vocabulary:
        raise ConfigError(
            f"--top_k {number} is more than the {vocabulary:,} words of {model}. Set it to at most that."
        )
    new = TeacherWords(output, model, weights_identity(model), number, temperature, vocabulary)
    if not output.exists() or not any(output.iterdir()):
        output.mkdir(parents=True, exist_ok=True)
        return new
    if not (output / RECORD).exists():
        raise ConfigError(f"--output {output} is not empty and has no words. Choose another directory.")
    known = TeacherWords.of(output)
    if different := [name for name, value in known.facts().items() if value != new.facts()[name]]:
        raise ConfigError(
            f"--output {output} has words of {known.model} with another {different[0]}. Choose another "
            "directory."
        )
    return known
