"""The most probable words of a teacher for every position of token files, stored in a directory.

Communication: that of a forward pass, over tp one all-gather of 2 + 2k numbers per token and an all-reduce of
one, and all-reduces of the words of a batch over all ranks.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megalite.checkpoint.agreement import on_rank_0
from megalite.config.errors import ConfigError
from megalite.config.schema import Config
from megalite.config.sections.data import DataConfig
from megalite.data import dataset as datasets
from megalite.data.dataset import TokenFiles
from megalite.data.stored_record import WORDS, check_precision, is_new
from megalite.data.teacher_words import TeacherWords, rows_of
from megalite.evaluation.stored_passes import StoredPasses
from megalite.generation.sources import ModelSource
from megalite.huggingface.weights_identity import architecture_of, changes, other_weights, weights_identity
from megalite.mesh.mesh import Mesh
from megalite.model.forward_state import ForwardState
from megalite.model.objective.losses import HeadLosses
from megalite.model.stage import Head
from megalite.parallel.collectives import all_gather, all_reduce
from megalite.parallel.microbatch import Microbatch
from megalite.parallel.top_words import TopWords
from megalite.system.progress import Report

CHUNK = 256  # positions whose logits exist at a time
COMMON = {"number": "--top_k", "temperature": "--temperature"}
"""What all words of a directory have in common besides the teacher, and the option that says it."""


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


class WordScorer(StoredPasses):
    """Stores the words of a teacher for token files, on one rank."""

    def __init__(
        self,
        config: Config,
        source: ModelSource,
        mesh: Mesh,
        device: torch.device,
        number: int,
        temperature: float,
    ):
        super().__init__(config, source, mesh, device)
        self.number = number
        for stage in self.parts.stages.values():
            if stage.head is not None:
                stage.sequence_losses = TopWordsOf(stage.head, number, temperature)

    def run(self, config: Config, words: TeacherWords, progress: Report) -> None:
        """Score the rest of the rows of each token file, and of what is held out of all. Collective.

        Args:
            config: of the passes over them.
            words: on rank 0, where they are stored.
        """
        for data in filter(None, datasets.build(config.data, config.run.seed)):
            for part in data.parts:
                assert isinstance(part, TokenFiles), "the data is a blend of token files"
                self._run(config.data, part, words, progress)

    def _run(self, options: DataConfig, data: TokenFiles, words: TeacherWords, progress: Report) -> None:
        new = rows_of(data, options)
        done = on_rank_0(self.mesh, lambda: words.begin(data.rows, new))
        arrays = words.arrays(data.rows) if self.mesh.rank == 0 else None

        def write(first: int, last: int, top: TopWords) -> None:
            assert arrays is not None
            arrays.words[first:last] = top.words.cpu().numpy()
            arrays.log_p[first:last] = top.log_p.cpu().numpy()
            arrays.rest[first:last] = top.rest.cpu().numpy()

        def save(last: int) -> None:
            for stored in arrays or ():
                assert isinstance(stored, np.memmap)
                stored.flush()
            words.sets[data.rows] = replace(words.sets[data.rows], done=last)
            words.save()

        self.store_rows(data, done, data.names, write, save, progress)

    def _batch(self, data: TokenFiles, first: int, last: int, microbatches: list[Microbatch]) -> TopWords:
        """Return the words of the rows, [rows, seq, k]."""
        self.parts.runtime.run(self.schedule, microbatches, step=0, loss_scale=0.0, training=False)
        length, number = self.config.data.sequence_length, self.number
        whole = TopWords(
            torch.zeros(last - first, length, number, dtype=torch.int64, device=self.device),
            torch.zeros(last - first, length, number, dtype=torch.float64, device=self.device),
            torch.zeros(last - first, length, dtype=torch.float64, device=self.device),
        )
        for each in microbatches if self.mesh.tp.rank == 0 else ():
            for row, sample in enumerate(each.samples.tolist()):
                if each.top is not None and sample < last:
                    for all_rows, values in zip(whole, each.top, strict=True):
                        all_rows[sample - first] = values[:, row]
        return TopWords(*(all_reduce(each, self.mesh.world).wait() for each in whole))


def open_words(
    output: Path, model: str, number: int, temperature: float, vocabulary: int, precision: str | None
) -> TeacherWords:
    """Return the words in a directory, or new ones.

    Args:
        precision: in which the teacher computes; None: not known yet.

    Raises:
        ConfigError: the directory has those of another model, temperature, number or precision, or other
            files; or there are fewer words than `number`.
    """
    if number > vocabulary:
        raise ConfigError(
            f"--top_k {number} is more than the {vocabulary:,} words of {model}. Set it to at most that."
        )
    weights, own = weights_identity(model), architecture_of(model)
    facts = (weights, number, temperature, vocabulary, own)
    new = TeacherWords(output, model, *facts, precision=precision)
    if is_new(output, WORDS, "words"):
        return new
    known = TeacherWords.of(output, f"--output {output}")
    before, now = known.facts(), new.facts()
    if before["weights"] != now["weights"]:
        raise ConfigError(
            f"--output {output} has words of {other_weights(known.model, model, model)}. Choose another "
            "directory."
        )
    if changed := changes(known.architecture, own):
        raise ConfigError(
            f"--output {output} has words of {known.model} with the same weights, but {changed}. Choose "
            "another directory."
        )
    for name, option in COMMON.items():
        if before[name] != now[name]:
            raise ConfigError(
                f"--output {output} has words with {option} {before[name]}, not {now[name]}. Choose "
                f"another directory, or set it to {before[name]}."
            )
    check_precision(f"--output {output}", known.precision, precision)
    return known
