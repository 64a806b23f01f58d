"""Builds the specs of norms, linears and single tensors: what the stored parameters of blocks consist of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt

from megalite.config.sections.model import ModelConfig
from megalite.parallel.spec import ParamSpec, Segment

INDEXER = "indexer"  # role of the segments of indexers, which neither Muon nor adapters know
REWARD = "score"  # role of the head of a reward model, which is trained next to adapters
VOCAB_ALIGN = 8  # vocabulary rows per tp rank are padded to a multiple of this


def padded_vocabulary(vocab_size: int, tp: int) -> int:
    """Return the number of embedding rows over all tp ranks, including padding.

    All ranks have the same number of rows, a multiple of VOCAB_ALIGN.
    """
    per_rank = -(-vocab_size // tp)
    return tp * -(-per_rank // VOCAB_ALIGN) * VOCAB_ALIGN


def one_each(unit: int, *segments: Segment, at_least_fp32: bool = False) -> list[ParamSpec]:
    """Return a stored tensor for each segment."""
    return [ParamSpec(segment.name, unit, (segment,), at_least_fp32=at_least_fp32) for segment in segments]


class SpecBuilder:
    """Builds the specs of one unit of a model for a tp size.

    Args:
        sequence_parallel: determines which gradients are partial.
    """

    def __init__(self, model: ModelConfig, unit: int, tp: int, sequence_parallel: bool):
        self.model, self.unit, self.tp = model, unit, tp
        # Under sequence parallelism norms, positions and row biases see 1/tp of the sequence: their gradients
        # must be summed over tp.
        self.partial_axis = "tp" if sequence_parallel and tp > 1 else None
        self.std = model.initializer_range
        # of row-parallel weights, one of which each block adds to the residual with
        self.out_std = self.std / sqrt(model.block_count / model.depth_growth)

    def norm(
        self, name: str, width: int | None = None, *, axis: str | None = None, rms: bool | None = None
    ) -> list[ParamSpec]:
        """Return the weight of a norm, and the bias of a LayerNorm: [width or hidden].

        Args:
            axis: the axis over which gradients are partial even if the sequence is not split.
            rms: whether it is an RMSNorm; None: as `model.norm`, with a weight if `model.norm_weight`.
        """
        if rms is None and not self.model.norm_weight:
            return []
        axis = axis or self.partial_axis
        rms = self.model.norm == "rms" if rms is None else rms
        shape = (width or self.model.hidden_size,)
        weight = self.norm_weight(f"{name}.weight", shape[0], grad_partial_axis=axis)
        if rms or not self.model.norm_bias:
            return one_each(self.unit, weight)
        bias = Segment(f"{name}.bias", shape, grad_partial_axis=axis, decay=False, role="norms")
        return one_each(self.unit, weight, bias)

    def norm_weight(self, name: str, width: int, split: int | None = None, **options: object) -> Segment:
        """Return the weight of a norm, [width], which starts so that the norm multiplies by 1."""
        one = 1.0 - self.model.norm_offset
        return Segment(name, (width,), split, decay=False, init_value=one, role="norms", **options)  # type: ignore[arg-type]

    def column(
        self,
        name: str,
        parts: Sequence[tuple[str, int, int]],
        bias: bool,
        roles: Mapping[str, str] | None = None,
    ) -> list[ParamSpec]:
        """Return a column-parallel linear: weights [width, hidden], split along dim 0.

        Args:
            parts: (name, output width, replicas) of each segment.
            roles: the roles of segments that have other roles than their names.
        """
        hidden = self.model.hidden_size
        prefix = name.rsplit(".", 1)[0]
        weights = tuple(
            Segment(
                f"{prefix}.{part}.weight",
                (width, hidden),
                0,
                copies,
                init_std=self.std,
                role=(roles or {}).get(part, part),
            )
            for part, width, copies in parts
        )
        biases = tuple(
            Segment(f"{prefix}.{part}.bias", (width,), 0, copies, decay=False)
            for part, width, copies in parts
        )
        weight = ParamSpec(f"{name}.weight", self.unit, weights)
        return [weight, ParamSpec(f"{name}.bias", self.unit, biases)] if bias else [weight]

    def row(self, name: str, role: str, width: int, bias: bool) -> list[ParamSpec]:
        """Return a row-parallel linear: weight [hidden, width], split along dim 1.

        The bias is replicated and added after the sum over tp.
        """
        hidden = self.model.hidden_size
        segments = [Segment(f"{name}.weight", (hidden, width), 1, init_std=self.out_std, role=role)]
        if bias:
            axis = self.partial_axis
            segments.append(Segment(f"{name}.bias", (hidden,), grad_partial_axis=axis, decay=False))
        return one_each(self.unit, *segments)

    def whole(self, name: str, outputs: int, role: str = "", wider: int = 1) -> list[ParamSpec]:
        """Return a matrix [outputs, wider · hidden], whole on each tp rank, for its part of the sequence."""
        shape = (outputs, wider * self.model.hidden_size)
        axis = self.partial_axis
        return one_each(self.unit, Segment(name, shape, grad_partial_axis=axis, init_std=self.std, role=role))

    def vocabulary(self, name: str, copy: bool = False) -> Segment:
        """Return a table [vocabulary, hidden], split along dim 0.

        In memory, it is padded so that all ranks have the same number of rows.
        """
        rows = padded_vocabulary(self.model.vocabulary, self.tp)
        shape, role = (self.model.vocabulary, self.model.hidden_size), name.removesuffix(".weight")
        return Segment(name, shape, 0, padded=rows, copy=copy, init_std=self.std, role=role)
