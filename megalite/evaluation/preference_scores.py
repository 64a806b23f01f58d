"""Scores of preferences: the log-probability of every completion of token files, stored in a directory.

Communication: that of a forward pass over packed rows, and one all-reduce of [documents of the batch] numbers
over all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from megalite.assembly.scoring import score
from megalite.checkpoint.agreement import on_rank_0
from megalite.config.errors import ConfigError
from megalite.config.samples import inputs_of
from megalite.config.schema import Config
from megalite.config.sections.preference import PreferenceConfig
from megalite.data import dataset as datasets
from megalite.data.conversations import Preferences
from megalite.data.indexed import IndexedTokens
from megalite.data.sequence_scores import (
    RECORD,
    ScoredFile,
    SequenceScores,
    content_of,
    no_log_probabilities,
)
from megalite.data.stored_record import check_precision, is_new
from megalite.data.tokenizer.comparison import Tokenized, compare
from megalite.data.tokenizer.identity import of_token_file
from megalite.evaluation.stored_passes import StoredPasses
from megalite.generation.sources import ALLOW, ModelSource
from megalite.huggingface.weights_identity import architecture_of, changes, other_weights, weights_identity
from megalite.mesh.mesh import Mesh
from megalite.objectives.simpo import SimPO
from megalite.parallel.collectives import all_reduce
from megalite.parallel.microbatch import Microbatch
from megalite.system.progress import Report


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


class Scorer(StoredPasses):
    """Scores token files with a model, on one rank."""

    def __init__(self, config: Config, source: ModelSource, mesh: Mesh, device: torch.device):
        objective = SimPO(PreferenceConfig())  # any that reads log-probabilities
        super().__init__(config, source, mesh, device, objective)

    def run(self, config: Config, scores: SequenceScores, progress: Report) -> None:
        """Score the rest of a token file. Collective.

        Args:
            config: of the passes over it.
            scores: on rank 0, where they are stored.

        Raises:
            ConfigError: on every rank, if a score is not finite.
        """
        data, _ = datasets.build(config.data, config.run.seed)
        assert isinstance(data, Preferences), "`length_of` has checked it"
        prefix = str(config.data.train)
        content = content_of(IndexedTokens(prefix))
        new = ScoredFile(prefix, data.documents, data.samples_per_epoch, config.data.sequence_length)
        done = on_rank_0(self.mesh, lambda: scores.begin(content, new))
        values = scores.writable(content) if self.mesh.rank == 0 else None

        def write(first: int, last: int, batch: tuple[np.ndarray, np.ndarray]) -> None:
            documents, sums = batch
            assert values is not None
            values[documents] = sums

        def save(last: int) -> None:
            assert values is not None
            values.flush()
            scores.files[content] = replace(scores.files[content], done=last)
            scores.save()

        self.store_rows(data, done, prefix, write, save, progress)

    def _batch(
        self, data: Preferences, first: int, last: int, microbatches: list[Microbatch]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the documents of the rows, and their scores."""
        documents = np.concatenate([data.documents_of(row) for row in range(first, last)])
        order = np.argsort(documents)
        score(self.parts, self.schedule, microbatches, adapters=True)
        own = torch.zeros(len(documents), dtype=torch.float64, device=self.device)
        if self.mesh.tp.rank == self.mesh.cp.rank == 0:  # these ranks have the same sequences
            for each in microbatches:
                sequences = each.sequences
                if sequences is not None and sequences.reference is not None:
                    places = order[
                        np.searchsorted(documents, sequences.documents.cpu().numpy(), sorter=order)
                    ]
                    own[torch.from_numpy(places).to(self.device)] = sequences.reference
        sums = all_reduce(own, self.mesh.world).wait().cpu().numpy()
        if (wrong := no_log_probabilities(sums)).size:
            raise ConfigError(
                f"Document {documents[wrong[0]]} of {data.names} has the log-probability "
                f"{sums[wrong[0]]} with --precision {self.config.train.precision}. Use another "
                "--precision, or check the weights."
            )
        return documents, sums


def open_scores(output: Path, model: str, precision: str | None) -> SequenceScores:
    """Return the scores in a directory, or new ones.

    Args:
        precision: in which the model computes; None: not known yet.

    Raises:
        ConfigError: the directory has those of another model or precision, or other files.
    """
    weights, own = weights_identity(model), architecture_of(model)
    if is_new(output, RECORD, "scores"):
        return SequenceScores(output, model, weights, own, precision=precision)
    scores = SequenceScores.of(output, f"--output {output}")
    if scores.weights != weights:
        raise ConfigError(
            f"--output {output} has scores of {other_weights(scores.model, model, model)}. Choose another "
            "directory."
        )
    if changed := changes(scores.architecture, own):
        raise ConfigError(
            f"--output {output} has scores of {scores.model} with the same weights, but {changed}. Choose "
            "another directory."
        )
    check_precision(f"--output {output}", scores.precision, precision)
    return scores
