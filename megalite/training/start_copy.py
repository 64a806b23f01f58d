"""A copy of the weights that a run trains, as they are at its start: the reference of an objective.

Each rank copies what it keeps of them, in compute precision: whole buckets, or with ZeRO-3 its shards. To
compute with the copy, a rank exchanges it with the weights, which takes no memory besides. Adapters that
start from an adapter, modules that are trained next to adapters, and whole models are copied alike.

A run that resumes reads its start again, from where it has come (`model.init_from`, `lora.init_from` or the
seed). A number that its checkpoints keep, the same on every layout, shows whether it is still the same.
Communication: a sum of one number over all ranks when the copy is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from megalite.assembly.parts import Parts
from megalite.config.errors import ConfigError
from megalite.config.load import from_dict
from megalite.config.schema import Config
from megalite.mesh.mesh import Mesh
from megalite.parallel.collectives import all_reduce
from megalite.parallel.spec import WEIGHT

STATE = "reference"
"""Key of a start's number in the state of a checkpoint."""
PIECE = 1 << 24  # elements that are exchanged at a time
MODULUS = 1 << 40  # sums over any number of ranks are exact in int64


class StartCopy:
    """A copy of the weights that a run trains, on one rank.

    Attributes:
        number: identifies the copied weights; None until `keep`.
    """

    def __init__(self, parts: Parts, mesh: Mesh):
        self.parts, self.mesh = parts, mesh
        self.number: int | None = None
        self._copies: list[Tensor] = []

    def keep(self) -> None:
        """Copy the present weights, unless that has been done. Collective."""
        if self.number is not None:
            return
        self.parts.store.gatherer.finish()
        self.number = self._number()
        self._copies = [tensor.clone() for tensor in self._trained()]

    @property
    def kept_bytes(self) -> int:
        return sum(copy.nbytes for copy in self._copies)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Compute with the copy inside the block, and with the weights of before after it.

        A step may be pending: what it has updated is gathered first.
        """
        gatherer = self.parts.store.gatherer
        gatherer.finish()
        self._exchange()
        try:
            yield
        finally:
            gatherer.begin_run(planned=False)  # frees weights that ZeRO-3 has gathered
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for weights, copy in zip(self._trained(), self._copies, strict=True):
            for one, other in zip(weights.split(PIECE), copy.split(PIECE), strict=True):
                kept = one.clone()
                one.copy_(other)
                other.copy_(kept)

    def _trained(self) -> list[Tensor]:
        """Return the weights that are trained, as this rank keeps them, and what blocks learn besides."""
        buckets = [bucket for bucket in self.parts.store.buckets if bucket.layout.trainable]
        statistics = self.parts.statistics
        return [
            *(bucket.weights if bucket.shard is None else bucket.shard for bucket in buckets),
            *(() if statistics is None else (state.tensor for state in statistics.learned())),
        ]

    def _number(self) -> int:
        """Return a number of the trained weights: their bits in fp32, with a factor for each tensor."""
        store, total = self.parts.store, 0
        for bucket, flat, offset in store.owned_rectangles():
            if bucket.layout.trainable:
                values = bucket.rectangle(WEIGHT, bucket.master, flat, offset).tensor.detach().flatten()
                factor = 2 * crc32(flat.segment.name.encode()) + 1
                for piece in values.split(PIECE):
                    bits = piece.float().view(torch.int32).sum(dtype=torch.int64)
                    total = (total + factor * int(bits)) % MODULUS
                store.state.release(bucket.master)
        own = torch.tensor([total], dtype=torch.int64, device=store.device)
        return int(all_reduce(own, self.mesh.world).wait()) % MODULUS


def check_start(config: Config, own: int | None, state: Mapping[str, Any], directory: object) -> None:
    """Raise ConfigError if a run that resumes has another start as its reference than the one it continues.

    Args:
        own: the number of its start; None: the reference is not a copy.
        state: of the checkpoint.
    """
    before = state.get(STATE)
    named = from_dict(state["config"]).preference.reference is not None
    if own == before or (before is None and named and "objective" in config.checkpoint.allow):
        return  # a run that has named another reference goes back to its start
    raise ConfigError(
        "preference.reference = null: the reference is the model from which training starts, but "
        f"checkpoint.load={directory} is of a run that had another reference, or whose start was another one "
        f"than model.init_from = {config.model.init_from} and lora.init_from = {config.lora.init_from} give "
        "now. Restore these options and their files, or name the reference with preference.reference."
    )
