"""RMSNorm with a gate over the groups of a block's channels (`megalite_kernels.gated_norm`).

A group may be split over neighboring tp ranks: then the sum of its squares is reduced over them, in forward
one number for each token and group, in backward the same. Otherwise no communication.
"""

from __future__ import annotations

from megalite_kernels import gated_norm
from megalite_kernels.gated_norm import Gate
from torch import Tensor

from megalite.mesh.mesh import MeshAxis
from megalite.parallel.collectives import all_reduce
from megalite.parallel.weight import Weight


class GatedNorm:
    """The norm of [seq, batch, channels/tp] with gates of the same shape.

    Args:
        weight: [channels of a group], the same for all groups, or [channels/tp].
        group: the number of channels of a whole group.
        tp: the ranks that have the channels.
        channels: the number of channels of a rank.
        rounded: whether the normalized value is rounded to the compute dtype before it is multiplied.
    """

    def __init__(
        self, weight: Weight, gate: Gate, eps: float, group: int, channels: int, tp: MeshAxis, rounded: bool
    ):
        self.weight, self.gate, self.eps, self.group, self.tp, self.rounded = (
            weight,
            gate,
            eps,
            group,
            tp,
            rounded,
        )
        self.width = min(group, channels)  # channels of a group on this rank
        self.ranks = group // self.width  # of a group
        first, groups = tp.rank * channels // group, tp.size * channels // group
        self.slots = slice(first, first + 1), groups

    def forward(self, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the output, and of groups that span ranks the sums of squares, [seq, batch, groups, 1]."""
        x, z = self._grouped(x), self._grouped(z)
        if self.ranks == 1:
            out = gated_norm.whole_forward(x, z, self._weight(x), self.gate, self.eps, self.rounded)
            return out.flatten(-2), None
        summed = self._summed(gated_norm.squares(x, z, self.gate))
        out = gated_norm.forward(x, z, self._weight(x), self.gate, self.eps, summed, self.group, self.rounded)
        return out.flatten(-2), summed

    def backward(self, dy: Tensor, x: Tensor, z: Tensor, summed: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the gradients of x and z, and accumulate that of the weight."""
        dy, x, z = self._grouped(dy), self._grouped(x), self._grouped(z)
        weight = self._weight(x)
        if summed is None:
            gradients = gated_norm.whole_backward(dy, x, z, weight, self.gate, self.eps)
        else:
            shared = weight, self.gate, self.eps, summed, self.group
            projected = self._summed(gated_norm.projections(dy, x, z, *shared))
            gradients = gated_norm.backward(dy, x, z, *shared, projected)
        self.weight.accumulate(gradients.weight.flatten())
        return gradients.x.flatten(-2), gradients.gate.flatten(-2)

    def _grouped(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.width))

    def _weight(self, x: Tensor) -> Tensor:
        """Return the weight in the shape that the kernels take."""
        weight = self.weight.tensor
        return weight if weight.numel() == self.width else weight.view(-1, self.width)

    def _summed(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks that have a part of the group."""
        own, groups = self.slots
        everywhere = x.new_zeros(*x.shape[:-2], groups, 1)  # the groups of all ranks
        everywhere[..., own, :] = x
        return all_reduce(everywhere, self.tp).wait()[..., own, :]
