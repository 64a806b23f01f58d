"""Muon (Jordan et al. 2024) for the matrices of the layers, AdamW for all other tensors, over the owned
ranges of flat buckets.

    m ← lerp(m, g, 1 − momentum)        u ← lerp(g, m, momentum) with nesterov, else m
    p ← p · (1 − lr · weight_decay) − lr · adjust · orthogonalized(u)

The elementwise part runs on each rank's ranges. Every matrix is orthogonalised whole, however it is sharded:

    round k     u of up to one matrix for each rank travels to the matrices' owners (`matrix_owners`): one
    all-to-all over the stage
                Newton-Schulz iterations at the owner, while the u of round k + 1 travels the results travel
                to the ranks that keep state of the matrices: one all-to-all, overlapped with the next round's
                iterations p

Both directions carry the dtype of the iterations, `muon.ns_dtype`: with bf16 the first operation on u would
round it anyway, so the bits do not depend on who is the owner. On one rank nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megalite.config.sections.muon import MuonConfig
from megalite.config.sections.optimizer import OptimizerConfig
from megalite.optimizer.adamw import AdamW
from megalite.optimizer.matrix_exchange import Round
from megalite.optimizer.matrix_owners import MatrixPiece, OwnedMatrix, matrix_rounds
from megalite.optimizer.newton_schulz import lr_factor, orthogonalized
from megalite.optimizer.state import OptimizerState
from megalite.optimizer.table import MOMENTUM


@dataclass(frozen=True)
class _OwnedPiece:
    """This rank's elements of a matrix: flat views of the bucket's memory and of the state."""

    grads: Tensor
    moment: Tensor
    master: Tensor
    weights: Tensor | None  # in compute precision; None: the masters are the weights
    factor: float  # of the learning rate


class Muon:
    """Muon for the matrices of this rank, AdamW for its other tensors.

    Args:
        options: of AdamW, and of the schedule of the learning rate.
        muon: of the matrices.

    Raises:
        ValueError: the mesh has no axis over the several ranks of a stage.
    """

    def __init__(self, state: OptimizerState, options: OptimizerConfig, muon: MuonConfig):
        self.state, self.options, self.muon = state, options, muon
        self._adamw = AdamW(state, options)
        store, mesh = state.store, state.store.mesh
        # at least fp32
        self._dtype = torch.bfloat16 if muon.ns_dtype == "bf16" else store.buckets[0].master.dtype
        like = torch.empty(0, dtype=self._dtype, device=store.device)
        if mesh.stage is None and mesh.dims.stage_ranks > 1:
            raise ValueError(
                "Muon exchanges parts of matrices over a stage: create the mesh with stage_axis=True"
            )
        rounds = matrix_rounds([bucket.layout for bucket in store.buckets], mesh.dims)
        self._rounds = [Round(each, mesh.stage, like) for each in rounds]
        self._pieces = {each: [self._piece(*kept) for kept in each.kept] for each in self._rounds}

    def _piece(self, matrix: OwnedMatrix, piece: MatrixPiece) -> _OwnedPiece:
        bucket = self.state.store.buckets[matrix.bucket]
        own, span = (
            slice(piece.start - bucket.start, piece.stop - bucket.start),
            self.state.span_at(bucket, piece.start),
        )
        return _OwnedPiece(
            bucket.owned_grads[own],
            span.state[MOMENTUM][piece.start - span.start : piece.stop - span.start],
            bucket.master[own],
            bucket.owned_weights[own] if bucket.has_own_master else None,
            lr_factor(matrix.segment.shape, self.muon.adjust_lr),
        )

    @torch.no_grad()
    def step(self, step: int, lr: float, divisor: Tensor | None) -> None:
        """As the interface says, and collective over the ranks of a stage. Matrices have a rate in the
        proportion of `lr` to its peak."""
        self._adamw.step(step, lr, divisor)
        rate = self.muon.lr * (lr / self.options.lr)
        scale = (
            None
            if divisor is None
            else divisor.to(self.state.store.state.device, torch.float32, non_blocking=True)
        )
        gathered: list[Callable[[], Tensor | None]] = [
            each.gather(self._mixed(each, scale)) for each in self._rounds[:1]
        ]
        update: Callable[[], None] = _nothing
        for number, each in enumerate(self._rounds):
            matrix = gathered.pop()()
            # travels while the matrix is orthogonalised
            for following in self._rounds[number + 1 : number + 2]:
                gathered.append(following.gather(self._mixed(following, scale)))
            scattered = each.scatter(None if matrix is None else orthogonalized(matrix, self.muon.ns_steps))
            update()  # of the round before
            update = partial(self._update, each, scattered, rate, scale)
        update()

    def _mixed(self, each: Round, scale: Tensor | None) -> list[Tensor]:
        """Update the moments of this rank's pieces of a round. Returns what is orthogonalised, in the dtype
        of the iterations."""
        momentum, found = self.muon.momentum, []
        for piece in self._pieces[each]:
            grads, moment = piece.grads.to(piece.moment.dtype), piece.moment
            if scale is None:
                moment.lerp_(grads, 1 - momentum)
            else:
                grads = grads / scale
                moment.copy_(torch.where(scale.isnan(), moment, moment.lerp(grads, 1 - momentum)))
            found.append((grads.lerp(moment, momentum) if self.muon.nesterov else moment).to(self._dtype))
        return found

    def _update(
        self, each: Round, scattered: Callable[[], list[Tensor]], rate: float, scale: Tensor | None
    ) -> None:
        """Update the master weights of this rank's pieces of a round, and its weights from them."""
        for piece, result in zip(self._pieces[each], scattered(), strict=True):
            new = piece.master if scale is None else piece.master.clone()
            new.mul_(1 - rate * self.muon.weight_decay).add_(result, alpha=-rate * piece.factor)
            if scale is not None:
                piece.master.copy_(torch.where(scale.isnan(), piece.master, new))
            if piece.weights is not None:
                piece.weights.copy_(piece.master, non_blocking=True)


def _nothing() -> None:
    """The update before the first round."""
