"""Muon (Jordan et al. 2024) for the matrices of layers, and AdamW for all other tensors.

Both update the owned ranges of flat buckets.

    m ← lerp(m, g, 1 − momentum)        u ← lerp(g, m, momentum) with nesterov, else m
    p ← p · (1 − lr · weight_decay) − lr · adjust · orthogonalized(u)

The elementwise part runs on each rank's ranges. Every matrix is orthogonalized whole, however it is sharded,
in rounds of up to one matrix for each rank (`ownership`):

    gather    u travels to the matrices' owners: one all-to-all over the stage
    iterate   Newton-Schulz iterations at the owner, while u of the next round travels
    scatter   the results travel to the ranks that keep state of the matrices: one all-to-all, overlapped
              with the iterations of the next round
    update    p, on these ranks

Both directions carry the dtype of the iterations, `muon.ns_dtype`: with bf16 the first operation on u would
round it anyway, so the bits do not depend on who is the owner. On one rank nothing is communicated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.config.sections.muon import MuonConfig
from megalite.config.sections.optimizer import OptimizerConfig
from megalite.optimizer.adamw_rule import adamw
from megalite.optimizer.muon.exchange import Round
from megalite.optimizer.muon.newton_schulz import lr_factor, orthogonalized
from megalite.optimizer.muon.ownership import MatrixPiece, OwnedMatrix, matrix_rounds
from megalite.optimizer.registry import MOMENTUM
from megalite.optimizer.state import OptimizerState


@dataclass(frozen=True)
class _PieceViews:
    """This rank's elements of a matrix: flat views of the bucket's memory and of the state."""

    grads: Tensor
    moment: Tensor
    master: Tensor
    weights: Tensor | None  # in compute precision; None: the masters are the weights
    lr_factor: float


class Muon:
    """Muon for the matrices of this rank, AdamW for its other tensors.

    Args:
        options: options of AdamW and of the learning rate's schedule.
        muon: options of the matrices.

    Raises:
        ValueError: the mesh has no axis over the several ranks of a stage.
    """

    def __init__(self, state: OptimizerState, options: OptimizerConfig, muon: MuonConfig):
        self.state, self.options, self.muon = state, options, muon
        self._adamw = adamw(state, options)
        store, mesh = state.store, state.store.mesh
        # at least fp32
        self._dtype = torch.bfloat16 if muon.ns_dtype == "bf16" else store.buckets[0].master.dtype
        like = torch.empty(0, dtype=self._dtype, device=store.device)
        if mesh.stage is None and mesh.dims.stage_ranks > 1:
            raise ValueError(
                "Muon requires a mesh with an axis over the ranks of a stage. Create it with stage_axis=True."
            )
        rounds = matrix_rounds([bucket.layout for bucket in store.buckets], mesh.dims)
        self._rounds = [Round(matrices, mesh.stage, like) for matrices in rounds]
        self._pieces = [[self._views(*piece) for piece in current.pieces] for current in self._rounds]

    def _views(self, matrix: OwnedMatrix, piece: MatrixPiece) -> _PieceViews:
        bucket = self.state.store.buckets[matrix.bucket]
        span = self.state.span_at(bucket, piece.start)
        in_bucket = slice(piece.start - bucket.start, piece.stop - bucket.start)
        in_span = slice(piece.start - span.start, piece.stop - span.start)
        return _PieceViews(
            bucket.owned_grads[in_bucket],
            span.state[MOMENTUM][in_span],
            bucket.master[in_bucket],
            bucket.owned_weights[in_bucket] if bucket.has_own_master else None,
            lr_factor(matrix.segment.shape, self.muon.adjust_lr, matrix.segment.growth),
        )

    @torch.no_grad()
    def step(self, step: int, lr: float, divisor: Tensor | None) -> None:
        """As in `registry.Optimizer`; collective over the ranks of a stage.

        The learning rate of matrices has the same ratio to its peak as `lr`.
        """
        self._adamw.step(step, lr, divisor)
        rate, scale = self.muon.lr * (lr / self.options.lr), None
        if divisor is not None:
            scale = divisor.to(self.state.store.state.device, torch.float32, non_blocking=True)
        self._start(0, scale)
        for number, current in enumerate(self._rounds):
            matrix = current.finish_gather()
            self._start(number + 1, scale)  # travels during the iterations
            current.start_scatter(None if matrix is None else orthogonalized(matrix, self.muon.ns_steps))
            if number > 0:
                self._finish(number - 1, rate, scale)  # its results travelled during the iterations
        if self._rounds:
            self._finish(len(self._rounds) - 1, rate, scale)

    def _start(self, number: int, scale: Tensor | None) -> None:
        """Update the moments of this rank's pieces of a round, and start sending u to the owners.

        u is sent in the dtype of the iterations. Does nothing after the last round.
        """
        if number == len(self._rounds):
            return
        momentum, directions = self.muon.momentum, []
        for piece in self._pieces[number]:
            grads, moment = piece.grads.to(piece.moment.dtype), piece.moment
            if scale is None:
                moment.lerp_(grads, 1 - momentum)
            else:
                grads = grads / scale
                moment.copy_(torch.where(scale.isnan(), moment, moment.lerp(grads, 1 - momentum)))
            direction = grads.lerp(moment, momentum) if self.muon.nesterov else moment
            directions.append(direction.to(self._dtype))
        self._rounds[number].start_gather(directions)

    def _finish(self, number: int, rate: float, scale: Tensor | None) -> None:
        """Update the master weights of this rank's pieces of a round, and its weights from them."""
        results = self._rounds[number].finish_scatter()
        for piece, result in zip(self._pieces[number], results, strict=True):
            new = piece.master if scale is None else piece.master.clone()
            new.mul_(1 - rate * self.muon.weight_decay).add_(result, alpha=-rate * piece.lr_factor)
            if scale is not None:
                piece.master.copy_(torch.where(scale.isnan(), piece.master, new))
            if piece.weights is not None:
                piece.weights.copy_(piece.master, non_blocking=True)
