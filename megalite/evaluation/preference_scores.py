"""Scores of preferences: the log-probability of every completion of token files, stored in a directory.

The rows of a token file are read in order, packed, by a forward pass for each batch. Rank 0 stores the sums,
and how many rows are done: an interrupted command continues there, on the same or on another layout.
Communication: that of the forward pass, and one all-reduce of [documents of the batch] numbers over all
ranks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from megalite.assembly import parts as build
from megalite.assembly.scoring import score
from megalite.checkpoint import CheckpointError
from megalite.checkpoint.agreement import on_rank_0, raise_on_all_ranks
from megalite.checkpoint.finite import nonfinite, reject
from megalite.config.errors import ConfigError
from megalite.config.samples import inputs_of
from megalite.config.schema import Config
from megalite.config.sections.data import DataConfig
from megalite.config.sections.preference import PreferenceConfig
from megalite.data import dataset as datasets
from megalite.data.conversations import Preferences
from megalite.data.indexed import IndexedTokens
from megalite.data.loader import Loader
from megalite.data.sequence_scores import (
    RECORD,
    ScoredFile,
    SequenceScores,
    content_of,
    no_log_probabilities,
)
from megalite.data.tokenizer.comparison import Tokenized, compare
from megalite.data.tokenizer.identity import of_token_file
from megalite.evaluation.weights_identity import weights_identity
from megalite.generation.sources import ALLOW, ModelSource
from megalite.mesh.mesh import Mesh
from megalite.objectives.simpo import SimPO
from megalite.parallel.collectives import all_reduce
from megalite.parallel.microbatch import Microbatch
from megalite.system.progress import Report

SAVE_S = 30.0  # between two records of what is done


@dataclass(frozen=True)
class ScoringLayout:
    """Sizes of the mesh, and of batches.

    Attributes:
        micro_batch_size: rows in a forward pass.
        sequence_length: of the rows.
    """

    dp: int
    micro_batch_size: int
    sequence_length: int


def scoring_config(config: Config, prefix: str, layout: ScoringLayout) -> Config:
    """Return the configuration of forward passes over a token file.

    Args:
        config: of forward passes of the model (`generation.sources.for_inference`).
    """
    microbatches = 2 * config.parallel.pp  # to fill the pipeline
    train = replace(
        config.train,
        objective="cross_entropy",
        micro_batch_size=layout.micro_batch_size,
        global_batch_size=layout.micro_batch_size * layout.dp * microbatches,
        rampup_batch_size=None,
    )
    data = DataConfig(
        train=prefix, sequence_length=layout.sequence_length, shuffle=False, packing=True, validation=None
    )
    return replace(config, parallel=replace(config.parallel, dp=layout.dp), train=train, data=data)


def length_of(prefixes: Sequence[str], longest: int, given: int | None) -> int:
    """Return the length of rows.

    Args:
        longest: number of positions of the model.
        given: what the user asks for; None: 2,048, or the longest pair.

    Raises:
        ConfigError: it is too short, or a document is longer than the model's positions.
    """
    for prefix in prefixes:
        file = IndexedTokens(prefix)
        if file.preference is None:
            raise ConfigError(
                f"--data {prefix} has no preferences. Prepare it with `megalite prepare --preference`."
            )
        size, together = int(file.sizes.max()), 2 if file.preference == "pairs" else 1
        if inputs_of(file.sizes, together).max() > longest:
            raise ConfigError(
                f"--data {prefix} has a document of {size:,} tokens, and the model reads {longest:,} "
                f"positions. Prepare the data again with --max_length {longest}."
            )
    least = max(_longest_row(IndexedTokens(prefix)) for prefix in prefixes)
    if given is not None and given < least:
        raise ConfigError(
            f"--sequence_length {given} cuts a pair. Set it to {least} or more, or leave it out."
        )
    return given or max(min(2048, longest), least)


def check_tokenizer(prefix: str, source: ModelSource, allow_change: bool) -> list[str]:
    """Raise ConfigError if data has another tokenizer than the model.

    Returns:
        lines for the user about an accepted change or an unknown tokenizer.
    """
    data = Tokenized(f"--data {prefix}", of_token_file(prefix))
    model = Tokenized(source.name, source.tokenizer)
    way_out = f"Use data prepared with {source.tokenizer.name}"
    return compare(data, model, allow=allow_change, way_out=way_out, option=ALLOW)


def _longest_row(file: IndexedTokens) -> int:
    return int(file.sizes.reshape(-1, 2).sum(1).max() if file.preference == "pairs" else file.sizes.max())


class Scorer:
    """Scores token files with a model, on one rank. Its creation is collective and loads the weights."""

    def __init__(self, config: Config, source: ModelSource, mesh: Mesh, device: torch.device):
        self.config, self.mesh, self.device = config, mesh, device
        objective = SimPO(PreferenceConfig())  # any that reads log-probabilities
        self.parts = build.build_parts(config, mesh, device, training=False, objective=objective)
        with raise_on_all_ranks(mesh, CheckpointError):
            rectangles = self.parts.to_load()
            source.read(rectangles)
            reject(source.name, {part.name: nonfinite(part.tensor) for part in rectangles})
        self.parts.store.publish()
        counts = build.layout(config).microbatches
        self.schedule = build.schedule(config, counts, forward_only=True)

    def run(self, scores: SequenceScores, progress: Report) -> None:
        """Score the rest of a token file. Collective.

        Args:
            scores: on rank 0, where they are stored.

        Raises:
            ConfigError: on every rank, if a score is not finite.
        """
        config, mesh = self.config, self.mesh
        data, _ = datasets.build(config.data, config.run.seed)
        assert isinstance(data, Preferences), "`length_of` has checked it"
        prefix = str(config.data.train)
        content, rows = content_of(IndexedTokens(prefix)), data.samples_per_epoch
        new = ScoredFile(prefix, data.documents, rows, config.data.sequence_length)
        done = on_rank_0(mesh, lambda: scores.begin(content, new))
        loader = self._loader(data)
        values, saved = scores.writable(content) if mesh.rank == 0 else None, time.monotonic()
        try:
            for first in range(done, rows, config.train.global_batch_size):
                documents, sums = self._batch(data, first, loader.step(first))
                if (wrong := no_log_probabilities(sums)).size:
                    raise ConfigError(
                        f"Document {documents[wrong[0]]} of {prefix} has the log-probability "
                        f"{sums[wrong[0]]} with --precision {config.train.precision}. Use another "
                        "--precision, or check the weights."
                    )
                if values is not None:
                    values[documents] = sums
                    last = min(first + config.train.global_batch_size, rows)
                    progress(f"scoring {prefix}", last, rows, "rows")
                    if last == rows or time.monotonic() - saved >= SAVE_S:
                        values.flush()
                        scores.files[content] = replace(scores.files[content], done=last)
                        scores.save()
                        saved = time.monotonic()
        finally:
            loader.close()

    def _loader(self, data: Preferences) -> Loader:
        train = self.config.train
        return Loader(
            data,
            global_batch_size=train.global_batch_size,
            micro_batch_size=train.micro_batch_size,
            dp=self.mesh.coordinates["dp"],
            vocab_size=self.config.model.vocab_size,
            make=build.microbatch_maker(self.config, self.mesh.cp),
            samples=data.samples_per_epoch,
        )

    def _batch(
        self, data: Preferences, first: int, microbatches: list[Microbatch]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the documents of a global batch, and their scores, on every rank."""
        last = min(first + self.config.train.global_batch_size, data.samples_per_epoch)
        documents = np.concatenate([data.documents_of(row) for row in range(first, last)])
        order = np.argsort(documents)
        on_device = [microbatch.to(self.device) for microbatch in microbatches]
        score(self.parts, self.schedule, on_device, adapters=True)
        own = torch.zeros(len(documents), dtype=torch.float64, device=self.device)
        if self.mesh.tp.rank == self.mesh.cp.rank == 0:  # these ranks have the same sequences
            for each in on_device:
                sequences = each.sequences
                if sequences is not None and sequences.reference is not None:
                    places = order[
                        np.searchsorted(documents, sequences.documents.cpu().numpy(), sorter=order)
                    ]
                    own[torch.from_numpy(places).to(self.device)] = sequences.reference
        return documents, all_reduce(own, self.mesh.world).wait().cpu().numpy()


def open_scores(output: Path, model: str) -> SequenceScores:
    """Return the scores in a directory, or new ones.

    Raises:
        ConfigError: the directory has those of another model, or other files.
    """
    weights = weights_identity(model)
    if not output.exists() or not any(output.iterdir()):
        output.mkdir(parents=True, exist_ok=True)
        return SequenceScores(output, model, weights)
    if not (output / RECORD).exists():
        raise ConfigError(f"--output {output} is not empty and has no scores. Choose another directory.")
    scores = SequenceScores.of(output)
    if scores.weights != weights:
        raise ConfigError(
            f"--output {output} has scores of {scores.model}, whose weights differ from those of {model}. "
            "Choose another directory."
        )
    return scores
