"""The time of context parallelism's exchange in one layer: what is not hidden behind attention.

ulysses     all-to-all before attention and after it, in both passes: nothing runs beside them
gather      all-gather of keys and values, in both passes, and reduce-scatter of their gradients: nothing runs
beside them
ring        each hop runs beside the attention to one part; the last hop of gradients, and merging partial
results, run alone
latents     all-gather of them and reduce-scatter of their gradient, as with gather; the matmuls with them
are steps of the layer

Where rows hold documents, ranks that attend with their own positions wait for the one that has the most to
compute. The planner does not know the documents' lengths: it assumes log-normal ones with a median of an
eighth of a row (benchmarks/results/context-parts.json).
"""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.schema import Config
from megalite.model.cost.context_parallel import Heads, levels
from megalite.model.cost.context_parallel import exchange as exchange_of
from megalite.model.cost.records import Share
from megalite.model.cost.units import Units
from megalite.planner.hardware.kernels import stream
from megalite.planner.hardware.links import Fabric, Group, group

WIDE = 4  # bytes of partial results and of gradients of keys and values
MERGE = 3  # times that a partial result passes memory: two are read, one is written
IMBALANCE = {"zigzag": {"gather": 1.50, "ring": 1.99}, "balanced": {"gather": 1.00, "ring": 1.10}}
"""By parts and method: the time of attention over that of equal shares, where rows hold documents. Other
methods are balanced."""
UNEVEN = 1.25
"""Imbalance above which the planner does not consider a ring."""


@dataclass(frozen=True)
class Rows:
    """Properties of rows that determine the time of context parallelism besides the layout.

    documents: whether a row may hold several documents, which do not attend to each other.
    """

    documents: bool = False

    @staticmethod
    def of(config: Config) -> Rows:
        return Rows(config.data.reset_positions or config.data.packing)

    def imbalance(self, method: str, parts: str) -> float:
        return IMBALANCE[parts].get(method, 1.0) if self.documents else 1.0


WHOLE = Rows()


def exposed(
    fabric: Fabric, units: Units, attention: tuple[float, float], width: int, rows: Rows
) -> tuple[float, float]:
    """Return the exposed seconds of one layer and microbatch in forward and in backward.

    Args:
        attention: seconds of the rank's part of attention, forward and backward.
        width: bytes of an element of queries, keys and values.
    """
    if units.share.cp == 1:
        return 0.0, 0.0
    forward = backward = 0.0
    stride = units.share.tp
    for share, heads in levels(units.share, units.heads):
        ahead, back = _exchange(fabric, share, heads, stride, attention, width)
        forward, backward, stride = forward + ahead, backward + back, stride * share.cp
    # Where latents travel, the parts of a ring are computed one after the other, and nobody waits between
    # them.
    slower = rows.imbalance("gather" if units.heads.latent else units.share.context, units.share.parts) - 1.0
    return forward + slower * attention[0], backward + slower * attention[1]


def _exchange(
    fabric: Fabric, share: Share, heads: Heads, stride: int, attention: tuple[float, float], width: int
) -> tuple[float, float]:
    """Return the exposed seconds of one level, with a stride of `stride` between its ranks."""
    exchange, ranks = exchange_of(share, heads), group(fabric.device, share.cp, stride)
    if share.context == "ulysses":
        calls = 2  # of half of the values each
        return (
            calls * fabric.all_to_all(exchange.forward / calls * width, ranks),
            calls * fabric.all_to_all(exchange.backward / calls * width, ranks),
        )
    if share.context == "gather" or heads.latent:
        again = fabric.half(exchange.backward * width, ranks)
        return fabric.half(exchange.forward * width, ranks), again + fabric.half(
            exchange.summed * WIDE, ranks
        )
    return _ring(fabric, share, heads, ranks, attention, width)


def _ring(
    fabric: Fabric, share: Share, heads: Heads, ranks: Group, attention: tuple[float, float], width: int
) -> tuple[float, float]:
    device = fabric.device
    part = exchange_of(share, heads).forward / share.cp  # values of one rank's keys and values
    hops, kv, gradients = share.cp - 1, part * width, part * WIDE
    # beside one hop
    forward, backward = (0.0, 0.0) if device.cpu else (seconds / share.cp for seconds in attention)
    merging = stream(device, MERGE * share.tokens * heads.query * heads.value_size * WIDE)
    summing = merging + stream(device, MERGE * gradients)
    ahead = hops * max(0.0, fabric.hop(kv, ranks) - forward)
    # the first hop, and the last one of gradients
    back = fabric.hop(gradients, ranks) + max(0.0, fabric.hop(kv, ranks) - backward)
    back += (hops - 1) * max(0.0, fabric.hop(kv + gradients, ranks) - backward)
    return ahead + hops * merging, back + hops * summing
