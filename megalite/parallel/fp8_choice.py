"""Which stored matrices multiply in fp8 (`train.fp8`), from their specs alone.

A matrix multiplies in fp8 if its part on each rank consists of whole blocks. Then the codes of the parts are
those of the whole matrix, so that no layout changes them. Where a part has other sizes, the matrix keeps the
compute dtype.
"""

from __future__ import annotations

from typing import NamedTuple

from megalite.config.sections.train import TrainConfig
from megalite.mesh.layout import Coordinates
from megalite.parallel.spec import ParamSpec

BLOCKS = {"block": 128, "mxfp8": 32}
"""Recipe → number of elements of a block, by which both dimensions of a part must be divisible."""
ROLES = frozenset(
    (
        *("q", "k", "v", "o", "gate", "up", "down", "q_a", "q_b", "kv_a", "kv_b", "attention_gate"),
        *("delta_q", "delta_k", "delta_v", "delta_z", "delta_o"),
        *("mamba_z", "mamba_x", "mamba_B", "mamba_C", "mamba_o"),
        *("conv_B", "conv_C", "conv_x", "conv_o", "experts.in", "experts.down"),
    )
)
"""The roles of matrices that may multiply in fp8. Embedding, head, routers, norms, indexers, the small
projections of decays and gates, and adapters are not among them."""
FORWARD_ONLY = frozenset({"kv_b"})
"""Roles whose gradients keep the compute dtype. Where latents are exchanged over cp, each rank has only its
own queries' share of the output gradient, whose codes would not be those of the sum."""


class Fp8Options(NamedTuple):
    """The options of a run by which matrices are chosen.

    Attributes:
        recipe: `train.fp8`.
        first_last: `train.fp8_first_last`.
        weight_gradients: `train.fp8_weight_gradients`.
    """

    recipe: str = "none"
    first_last: int = 0
    weight_gradients: bool = False

    @classmethod
    def of(cls, train: TrainConfig) -> Fp8Options:
        return cls(train.fp8, train.fp8_first_last, train.fp8_weight_gradients)

    def in_unit(self, unit: int, layers: int) -> bool:
        """Return whether any matrix of a unit (the first layer is 1) may multiply in fp8.

        Args:
            layers: number of layers of the model, without modules for further tokens.
        """
        return self.recipe != "none" and self.first_last < unit <= layers - self.first_last


NO_FP8 = Fp8Options()


class Fp8Choice(NamedTuple):
    """What of a stored matrix multiplies in fp8.

    Attributes:
        rows: the number of its leading rows on this rank that do; 0: none.
        size: a size that is not a multiple of the block, for which reason other rows do not; None: there is
            none.
        forward: whether all rows do in the forward, which then reads nothing of the input but codes.
        input_gradient: whether all rows do for the input gradient, which then reads codes only.
        weight_gradient: whether the weight gradient is a matmul of codes.
        partial_gradient: whether a rank has a partial sum of the output's gradient. Gradients then keep the
            compute dtype, because codes of parts are not those of the sum.
    """

    rows: int
    size: int | None = None
    forward: bool = False
    input_gradient: bool = False
    weight_gradient: bool = False
    partial_gradient: bool = False


def fp8_choice(spec: ParamSpec, at: Coordinates, options: Fp8Options, layers: int) -> Fp8Choice:
    """Return which rows of a stored matrix multiply in fp8 on the rank at these coordinates.

    Args:
        layers: number of layers of the model, without modules for further tokens.
    """
    if not options.in_unit(spec.unit, layers):
        return Fp8Choice(0)
    block, rows = BLOCKS[options.recipe], 0
    partial = spec.segments[0].role in FORWARD_ONLY
    for segment in spec.segments:
        if segment.role not in ROLES or len(segment.shape) != 2:
            break
        part = segment.local(at)
        # the matrices of experts are stacked
        each = segment.shape[0] // (segment.experts * segment.fused) if segment.experts > 1 else part.shape[0]
        for size in (each, part.shape[1]):
            if size % block:
                return Fp8Choice(rows, size, partial_gradient=partial)
        rows += part.shape[0]
        # ranks that hold the same key-value head each have their own queries' share of its gradient
        partial = partial or segment.replicas > 1
    whole = rows > 0 and rows == spec.local_shape(at)[0]
    backward = whole and not partial
    return Fp8Choice(rows, None, whole, backward, backward and options.weight_gradients, partial)


ACTIVATION_BYTES = 1 + 1 / 32
"""Bytes of the code of an activation with its part of a scale: 4 bytes for 128 elements with `block`, one for
32 with `mxfp8`."""


def gathered_as_codes(spec: ParamSpec, at: Coordinates, options: Fp8Options, layers: int) -> bool:
    """Return whether ZeRO-3 gathers the codes of a stored matrix instead of its weights.

    It does if all of it multiplies in fp8 only. The two sets of codes of `mxfp8` together have more bytes
    than weights in bf16. Arguments as for `fp8_choice`.
    """
    return options.recipe == "block" and fp8_choice(spec, at, options, layers).input_gradient


def code_bytes(rows: int, columns: int, recipe: str) -> int:
    """Return the bytes of the codes and scales of a weight.

    `mxfp8` has a second set, because blocks of 1 × 32 do not serve both dimensions.
    """
    elements, block = rows * columns, BLOCKS[recipe]
    if recipe == "mxfp8":
        return 2 * (elements + elements // block)
    return elements + 4 * elements // block**2
