"""Positions of streams in checkpoints: one tensor [lanes, width], of which each rank saves what it reads.

Every rank restores all of them, because with another dp it reads other lanes. Without them a run would read
its streams again from the beginning, to the same samples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megalite import checkpoint
from megalite.checkpoint import Manifest
from megalite.config.streams import has_streams
from megalite.parallel.spec import Rectangle

if TYPE_CHECKING:
    from megalite.training.trainer import Trainer

NAME = "data.positions"


def to_save(trainer: Trainer) -> list[Rectangle]:
    """Return the positions of this rank's lanes, or nothing if other ranks save them."""
    if not has_streams(trainer.config.data):
        return []
    from megalite.data.streams.stream import Streamed  # not needed by token files as they are

    data, at = trainer.train_data, trainer.mesh.coordinates
    if not isinstance(data, Streamed) or any(at[axis].rank for axis in ("tp", "cp", "pp")):
        return []
    rows, dp = trainer.config.train.micro_batch_size, at["dp"]
    lanes = [lane for lane in range(data.lanes) if lane // rows % dp.size == dp.rank]
    positions = torch.from_numpy(data.positions(lanes, trainer.samples))
    shape = (data.lanes, data.width)
    return [
        Rectangle(NAME, shape, (lane, 0), row[None].clone())
        for lane, row in zip(lanes, positions, strict=True)
    ]


def restore(trainer: Trainer, manifest: Manifest) -> None:
    """Continue the streams at the positions of a checkpoint of the same data."""
    if NAME not in manifest.tensors or not has_streams(trainer.config.data):
        return
    from megalite.data.streams.stream import Streamed

    data = trainer.train_data
    # with `checkpoint.allow` the positions may be of other data
    if not isinstance(data, Streamed) or manifest.state["fingerprint"] != data.fingerprint:
        return
    positions = torch.zeros(data.lanes, data.width, dtype=torch.int64)
    checkpoint.load(manifest, [Rectangle(NAME, (data.lanes, data.width), (0, 0), positions)])
    for lane, position in enumerate(positions.tolist()):
        data.restore(lane, position)
