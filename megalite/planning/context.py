"""The time of context parallelism's exchange in one layer: what is not hidden behind attention. Imports no torch.

ulysses     all-to-all before attention and after it, in both passes: nothing runs beside them
gather      all-gather of keys and values, in both passes, and reduce-scatter of their gradients: nothing runs beside them
ring        each hop runs beside the attention to one part; the last hop of gradients, and merging partial results, run alone
"""

from __future__ import annotations

from megalite.model.cost.units import Units
from megalite.planning.kernels import stream
from megalite.planning.links import Fabric, Group, group

WIDE = 4  # bytes of partial results and of gradients of keys and values
MERGE = 3  # times that a partial result passes memory: two are read, one is written


def exposed(fabric: Fabric, units: Units, attention: tuple[float, float], width: int) -> tuple[float, float]:
    """Seconds of one layer and microbatch in forward and in backward.

    Args:
        attention: seconds of the rank's part of attention, forward and backward.
        width: bytes of an element of queries, keys and values.
    """
    share, exchange, device = units.share, units.exchange, fabric.device
    if share.cp == 1:
        return 0.0, 0.0
    ranks = group(device, share.cp, share.tp)
    if share.context == "ulysses":
        calls = 2  # of half of the values each
        return (
            calls * fabric.all_to_all(exchange.forward / calls * width, ranks),
            calls * fabric.all_to_all(exchange.backward / calls * width, ranks),
        )
    if share.context == "gather":
        again = fabric.half(exchange.backward * width, ranks)
        return fabric.half(exchange.forward * width, ranks), again + fabric.half(exchange.summed * WIDE, ranks)
    return _ring(fabric, units, ranks, attention, width)


def _ring(fabric: Fabric, units: Units, ranks: Group, attention: tuple[float, float], width: int) -> tuple[float, float]:
    share, exchange, device = units.share, units.exchange, fabric.device
    part = exchange.forward / share.cp  # values of one rank's keys and values
    hops, kv, gradients = share.cp - 1, part * width, part * WIDE
    forward, backward = (0.0, 0.0) if device.cpu else (seconds / share.cp for seconds in attention)  # beside one hop
    merging = stream(device, MERGE * share.tokens * units.heads.query * units.heads.value_size * WIDE)
    summing = merging + stream(device, MERGE * gradients)
    ahead = hops * max(0.0, fabric.hop(kv, ranks) - forward)
    back = fabric.hop(gradients, ranks) + max(0.0, fabric.hop(kv, ranks) - backward)  # the first hop, and the last one of gradients
    back += (hops - 1) * max(0.0, fabric.hop(kv + gradients, ranks) - backward)
    return ahead + hops * merging, back + hops * summing
