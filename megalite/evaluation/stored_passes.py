"""Forward passes over token files whose results are stored in a directory.

Rows are read in order, in batches. Rank 0 stores what each gives, and how many rows are done: an interrupted
command continues there, on the same or on another layout.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from megalite.assembly import parts as build
from megalite.config.schema import Config
from megalite.config.sections.data import DataConfig
from megalite.data.dataset import Dataset
from megalite.data.loader import Loader
from megalite.generation.sources import ModelSource, load_into
from megalite.mesh.mesh import Mesh
from megalite.objectives.objective import Objective
from megalite.parallel.microbatch import Microbatch
from megalite.system.progress import Report

SAVE_S = 30.0  # between two records of what is done


@dataclass(frozen=True)
class RowOptions:
    """Sizes of batches, and what determines rows: the options of the section data with these names."""

    dp: int
    micro_batch_size: int
    sequence_length: int
    packing: bool = False
    reset_positions: bool = False
    held_out: float = 0.0
    allow_tokenizer_change: bool = False


def pass_config(config: Config, files: str | dict[str, float], rows: RowOptions) -> Config:
    """Return the configuration of forward passes over the rows of token files.

    Args:
        config: of forward passes of the model (`generation.sources.for_inference`).
        files: a token file, or those of a blend.
    """
    train = replace(
        config.train,
        micro_batch_size=rows.micro_batch_size,
        global_batch_size=rows.micro_batch_size * rows.dp * 2 * config.parallel.pp,  # to fill the pipeline
        rampup_batch_size=None,
    )
    data = DataConfig(
        train=files,
        validation=rows.held_out or None,
        sequence_length=rows.sequence_length,
        shuffle=False,
        packing=rows.packing,
        reset_positions=rows.reset_positions,
        allow_tokenizer_change=rows.allow_tokenizer_change,
    )
    return replace(config, parallel=replace(config.parallel, dp=rows.dp), train=train, data=data)


class StoredPasses(ABC):
    """Forward passes of a model on one rank. The creation is collective and loads the weights.

    Args:
        config: of the passes over the first of the token files (`pass_config`); it differs in prefixes only.
        objective: over sequences, whose scores the last stage computes.
    """

    def __init__(
        self,
        config: Config,
        source: ModelSource,
        mesh: Mesh,
        device: torch.device,
        objective: Objective | None = None,
    ):
        self.config, self.mesh, self.device = config, mesh, device
        self.parts = build.build_parts(config, mesh, device, training=False, objective=objective)
        load_into(self.parts, source, mesh)
        self.schedule = build.schedule(config, build.layout(config).microbatches, forward_only=True)

    @abstractmethod
    def _batch(self, data: Any, first: int, last: int, microbatches: list[Microbatch]) -> Any:
        """Return what rows first … last − 1 give, on every rank. Collective.

        Args:
            microbatches: of these rows, on the device.
        """

    def store_rows(
        self,
        data: Dataset,
        done: int,
        name: str,
        write: Callable[[int, int, Any], object],
        save: Callable[[int], object],
        progress: Report,
    ) -> None:
        """Pass over the rows of a dataset from number `done` on. Collective.

        Args:
            name: of the data, for the user.
            write: stores what rows first … last − 1 give. Called on rank 0, as `save`.
            save: makes what is stored permanent, and records the number of rows that are done.
        """
        mesh, train, rows = self.mesh, self.config.train, data.samples_per_epoch
        loader, saved = self._loader(data), time.monotonic()
        try:
            for first in range(done, rows, train.global_batch_size):
                last = min(first + train.global_batch_size, rows)
                on_device = [microbatch.to(self.device) for microbatch in loader.step(first)]
                values = self._batch(data, first, last, on_device)
                if mesh.rank > 0:
                    continue
                write(first, last, values)
                progress(f"scoring {name}", last, rows, "rows")
                if last == rows or time.monotonic() - saved >= SAVE_S:
                    save(last)
                    saved = time.monotonic()
        finally:
            loader.close()

    def _loader(self, data: Dataset) -> Loader:
        train = self.config.train
        return Loader(
            data,
            global_batch_size=train.global_batch_size,
            micro_batch_size=train.micro_batch_size,
            dp=self.mesh.coordinates["dp"],
            reset_positions=self.config.data.reset_positions,
            vocab_size=self.config.model.vocab_size,
            make=build.microbatch_maker(self.config, self.mesh.cp),
            samples=data.samples_per_epoch,
        )
