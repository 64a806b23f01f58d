"""What Muon's matrices take on the busiest rank of a stage: bytes sent, buffers and time.

Bytes are those of the plan that runs (`megalite.optimizer.muon.ownership`); time is that of a search, which
knows only how many ranks share the matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from megalite.config.schema import Config
from megalite.config.sections.model import ModelConfig
from megalite.config.sections.muon import MuonConfig
from megalite.mesh.layout import Layout
from megalite.model.parameters import model_specs
from megalite.optimizer.muon.ownership import OwnedMatrix, matrix_rounds
from megalite.optimizer.registry import is_matrix
from megalite.parallel.sharding.buckets import BucketLayout
from megalite.planner.hardware.devices import Device
from megalite.planner.hardware.kernels import matmul
from megalite.planner.memory.states import Widths


@dataclass(frozen=True)
class MuonExchange:
    """Bytes of Muon's exchange in a step.

    Attributes:
        sent: that the rank sends which sends most.
        buffers: of the largest round, with the pieces of the next one, which travel meanwhile.
    """

    sent: int = 0
    buffers: int = 0


def exchange(config: Config, buckets: Sequence[BucketLayout]) -> MuonExchange:
    """Return the exchange of a pipeline rank with these buckets; empty without Muon."""
    if config.optimizer.name != "muon":
        return MuonExchange()
    accumulate, layout = Widths.of(config).accumulate, Layout.of(config)
    width = 2 if config.muon.ns_dtype == "bf16" else accumulate
    sent, kept = [0] * layout.stage_ranks, 0
    buffers = 0
    for matrices in matrix_rounds(buckets, layout):
        before, rounds = kept, [0] * layout.stage_ranks
        for matrix in matrices:
            for piece in matrix.gathered:
                sent[piece.rank] += (piece.stop - piece.start) * (piece.rank != matrix.owner)
            for piece in matrix.scattered:
                sent[matrix.owner] += (piece.stop - piece.start) * (piece.rank != matrix.owner)
                rounds[piece.rank] += piece.stop - piece.start
        kept = max(rounds)
        # Of the pieces: what is sent, its copy in one buffer, and the results; in fp32 one piece's update.
        buffers = max(
            buffers,
            width * (2 * before + 3 * kept) + 2 * accumulate * kept + width * max(map(_worked, matrices)),
        )
    return MuonExchange(max(sent) * width, buffers)


def _worked(matrix: OwnedMatrix) -> int:
    """Return the elements at the owner during the iterations.

    These are the received parts, the matrix twice, two matmuls of the short side, and the result.
    """
    short, long = sorted(matrix.segment.shape)
    return 4 * short * long + 2 * short * short


def seconds(
    model: ModelConfig, muon: MuonConfig, device: Device, precision: str, layers: float, ranks: int
) -> float:
    """Return the time of one rank's iterations if `ranks` share the matrices of some layers.

    It is at least the time of one matrix.
    """
    wanted = "bf16" if muon.ns_dtype == "bf16" else "fp32"
    dtype = wanted if wanted in device.peaks else precision
    shapes = [sorted(shape) for shape in matrix_shapes(model)]
    each = [
        # m: the short side
        muon.ns_steps * sum(matmul(device, *sizes, dtype) for sizes in ((m, m, n), (m, m, m), (m, n, m)))
        for m, n in shapes
    ]
    return max(layers * sum(each) / ranks, max(each))


def matrix_elements(model: ModelConfig) -> int:
    """Return the elements of one layer that are sent to owners, and back."""
    return sum(map(prod, matrix_shapes(model)))


def matrix_shapes(model: ModelConfig) -> list[tuple[int, ...]]:
    """Return the shapes of a layer's matrices."""
    segments = [
        segment for spec in model_specs(model, units=[1]) for segment in spec.segments if is_matrix(segment)
    ]
    counts = [segment.experts * segment.fused for segment in segments]  # each expert's gate, up and down
    return [
        (segment.shape[0] // count, segment.shape[1])
        for segment, count in zip(segments, counts, strict=True)
        for _ in range(count)
    ]
