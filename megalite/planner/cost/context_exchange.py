"""The time of context parallelism's exchange in one layer: what is not hidden behind attention.

    ulysses    all-to-all before attention and after it, in both passes: nothing runs beside them
    gather     all-gather of keys and values, in both passes, and reduce-scatter of their gradients: nothing
               runs beside them
    ring       each hop runs beside the attention to one part; the last hop of gradients, and merging partial
               results, run alone
    states     all-gathers of the ends of segments and of what these do to a state, and of the gradients of
               both
    latents    all-gather of them and reduce-scatter of their gradient, as with gather; the matmuls with them
               are steps of the layer

Where rows hold documents, ranks that attend with their own positions wait for the one that has the most to
compute. The planner does not know the documents' lengths: it assumes log-normal ones with a median of an
eighth of a row (benchmarks/results/context-parts.json).
"""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.schema import Config
from megalite.model.cost.records import BlockCost, ContextExchange, Share
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

    Attributes:
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
    fabric: Fabric, share: Share, block: BlockCost, seconds: tuple[float, float], width: int, rows: Rows
) -> tuple[float, float]:
    """Return the exposed seconds of one block and microbatch in forward and in backward.

    Args:
        seconds: the rank's part of what runs beside a ring, forward and backward.
        width: bytes of an element of what is exchanged.
    """
    if not block.exchanges:
        return 0.0, 0.0
    forward = backward = 0.0
    stride = share.tp
    for exchange in block.exchanges:
        ahead, back = _exchange(fabric, exchange, stride, seconds, width)
        forward, backward, stride = forward + ahead, backward + back, stride * exchange.ranks
    slower = rows.imbalance(block.exchanges[-1].method, share.parts) - 1.0
    return forward + slower * seconds[0], backward + slower * seconds[1]


def _exchange(
    fabric: Fabric, exchange: ContextExchange, stride: int, seconds: tuple[float, float], width: int
) -> tuple[float, float]:
    """Return the exposed seconds of one level, with a stride of `stride` between its ranks."""
    ranks = group(fabric.device, exchange.ranks, stride)
    if exchange.method == "ulysses":
        calls = 2  # of half of the values each
        return (
            calls * fabric.all_to_all((exchange.forward * width + exchange.states * WIDE) / calls, ranks),
            calls * fabric.all_to_all((exchange.backward * width + exchange.summed * WIDE) / calls, ranks),
        )
    if exchange.method == "states":
        return (
            fabric.half(exchange.forward * width, ranks) + fabric.half(exchange.states * WIDE, ranks),
            fabric.half(exchange.backward * width, ranks) + fabric.half(exchange.summed * WIDE, ranks),
        )
    if exchange.method == "gather":
        again = fabric.half(exchange.backward * width, ranks)
        return fabric.half(exchange.forward * width, ranks), again + fabric.half(
            exchange.summed * WIDE, ranks
        )
    return _ring(fabric, exchange, ranks, seconds, width)


def _ring(
    fabric: Fabric, exchange: ContextExchange, ranks: Group, seconds: tuple[float, float], width: int
) -> tuple[float, float]:
    device = fabric.device
    part = exchange.forward / exchange.ranks  # values of one rank's keys and values
    hops, kv, gradients = exchange.ranks - 1, part * width, part * WIDE
    # beside one hop
    forward, backward = (0.0, 0.0) if device.cpu else (each / exchange.ranks for each in seconds)
    merging = stream(device, MERGE * exchange.merged * WIDE)
    summing = merging + stream(device, MERGE * gradients)
    ahead = hops * max(0.0, fabric.hop(kv, ranks) - forward)
    # the first hop, and the last one of gradients
    back = fabric.hop(gradients, ranks) + max(0.0, fabric.hop(kv, ranks) - backward)
    back += (hops - 1) * max(0.0, fabric.hop(kv + gradients, ranks) - backward)
    return ahead + hops * merging, back + hops * summing
