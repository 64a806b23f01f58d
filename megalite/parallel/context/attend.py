"""Interface of context parallelism for the model: attention of a rank's part of every row to whole rows, and
convolutions and recurrences along them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megalite.mesh.mesh import MeshAxis
from megalite.parallel.context.gathered import Gathered
from megalite.parallel.context.options import part_options, whole_row_options
from megalite.parallel.context.parts import SequencePart
from megalite.parallel.context.ring import Ring
from megalite.parallel.context.sinks import SomeSinks
from megalite.parallel.context.ulysses import Ulysses

if TYPE_CHECKING:
    from megalite.parallel.context.whole_rows import AcrossRows

Attend = Callable[[Tensor, Tensor, Tensor, dict[str, Any]], Tensor]
METHODS = {"ulysses": Ulysses, "gather": Gathered, "ring": Ring}


def attention_over(cp: MeshAxis, method: str, levels: tuple[MeshAxis, MeshAxis] | None = None) -> Attend:
    """Return attend(q, k, v, options) for a method of context parallelism.

    q is [seq/cp, batch, heads, dim], k and v are [seq/cp, batch, kv_heads, dim]. The result has the shape of
    q. All cp ranks call it in the same order.

    Its options are those of `megalite_kernels.attention`, `part` with the parts of all cp ranks, and `sinks`
    if heads have them.

    Args:
        levels: the inner and the outer axis of a ring of groups (`two_level`).
    """
    if levels is not None:
        from megalite.parallel.context.two_level import two_level

        return two_level(*levels)
    function = METHODS[method]

    kernel_options = whole_row_options if method == "ulysses" else part_options

    def attend(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        part: SequencePart = options["part"]
        sinks = options.get("sinks")
        own = SomeSinks(sinks, cp) if sinks is not None and method == "ulysses" else sinks
        out: Tensor = function.apply(q, k, v, cp, part, kernel_options(options), own)
        return out

    return attend


def across_rows(cp: MeshAxis, by_heads: bool) -> AcrossRows:
    """Return how convolutions and recurrences along rows are computed.

    Args:
        by_heads: whether recurrences exchange heads; otherwise they pass states.
    """
    if cp.size == 1:
        from megalite.parallel.context.whole_rows import WholeRows

        return WholeRows()
    if by_heads:
        from megalite.parallel.context.exchanged_heads import ExchangedHeads

        return ExchangedHeads(cp)
    from megalite.parallel.context.passed_states import PassedStates

    return PassedStates(cp)
