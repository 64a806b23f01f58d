"""How long one kernel takes on a device: matrix products by tiles and waves, attention, and what is bound by memory. Seconds.

Every constant is a property of hardware or of a way to write kernels, and is the same for all devices, models and layouts. docs/planner.md
says where each comes from.
"""

from __future__ import annotations

import math
from bisect import bisect_left

from megalite.model.cost.steps import attended_pairs
from megalite.planning.hardware import Device

TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.93), (128, 64, 0.8), (64, 64, 0.62))
"""Rows and columns of the result that one multiprocessor computes at a time, and its speed: a small tile reads more for each FLOP."""
TILE_START = 1.2e-6
"""Seconds that a wave of tiles takes beyond its products: the first operands come from memory, the result goes there."""
STREAM = 0.8
"""Share of the data sheet's bandwidth that kernels reach; a plain copy of gigabytes reaches 0.9."""
ELEMENTWISE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
"""Bytes of a value."""
SOFTMAX = 4e-11
"""Seconds of one multiprocessor for a score of attention, besides its products: an exponential (16 a cycle), a maximum, a scale and two
sums, half of it beside the products."""
ATTENTION_BACKWARD = 1.2
"""How much slower attention's five backward products run than its two forward ones: gradients of queries are added up across tiles."""
BLOCK = 128
"""Positions that attention takes at a time: a block that the causal mask cuts is computed whole."""


def stream(device: Device, size: float) -> float:
    """A kernel that moves `size` bytes from or to memory and computes little."""
    return device.kernel + size / (device.bandwidth * (1.0 if device.measured else STREAM))


def product(device: Device, m: float, n: float, k: float, precision: str, batch: float = 1, written: float | None = None) -> float:
    """`batch` products of [m, k] and [k, n].

    written: bytes that move for each element of the result, by default one write of the precision; a gradient that is added to an fp32
        accumulator reads and writes it: 8.
    """
    size = ELEMENTWISE_BYTES[precision]
    moved = batch * (size * (m * k + k * n) + (size if written is None else written) * m * n)
    memory = moved / (device.bandwidth * (1.0 if device.measured else STREAM))
    if device.rates:
        return device.kernel + max(memory, 2 * batch * m * n * k / _measured_rate(device, m * n * k))
    return device.kernel + max(memory, _tiled(device, m, n, k, precision, batch))


def _tiled(device: Device, m: float, n: float, k: float, precision: str, batch: float) -> float:
    """The best of several tilings: tiles are dealt to the multiprocessors in waves, of which the last may be nearly empty. Where there are
    too few for one wave, several multiprocessors share a tile, each with a part of the inner dimension."""
    unit = device.peak(precision) * device.sustained / device.multiprocessors
    best = math.inf
    for rows, columns, speed in TILES:
        tiles = batch * math.ceil(m / rows) * math.ceil(n / columns)
        waves, shared = math.ceil(tiles / device.multiprocessors), max(1, device.multiprocessors // tiles)
        best = min(best, waves * (2 * rows * columns * k / shared / (unit * speed)) + TILE_START * min(waves, 2))
    return best


def _measured_rate(device: Device, volume: float) -> float:
    """FLOP/s of a product of m·n·k = volume, between the measured sizes linearly in the size's logarithm."""
    size = volume ** (1 / 3)
    sizes = [each for each, _ in device.rates]
    at = bisect_left(sizes, size)
    if at in (0, len(sizes)):
        return device.rates[min(at, len(sizes) - 1)][1]
    (low, slow), (high, fast) = device.rates[at - 1], device.rates[at]
    return slow + (fast - slow) * math.log(size / low) / math.log(high / low)


def computed_pairs(sequence: int, window: int | None) -> float:
    """(query, key) pairs that causal attention computes for one head of one sequence: those that it needs, in whole blocks."""
    return attended_pairs(sequence, window) + sequence * (min(BLOCK, window or sequence, sequence) - 1) / 2


def attention(
    device: Device, heads: float, head_size: int, sequence: int, batch: int, window: int | None, precision: str
) -> tuple[float, float]:
    """Forward and backward of attention that never writes its scores (FlashAttention, Dao et al. 2022); backward computes them again."""
    scores = batch * heads * computed_pairs(sequence, window)
    if device.attention is not None:
        flops = 4 * scores * head_size
        return device.kernel + flops / device.attention[0], device.kernel + 2.5 * flops / device.attention[1]
    rate = device.peak(precision) * device.sustained
    softmax = scores * SOFTMAX / device.multiprocessors
    traffic = stream(device, 4 * batch * heads * sequence * head_size * ELEMENTWISE_BYTES[precision])
    forward = max(4 * scores * head_size / rate + softmax, traffic)
    backward = max(ATTENTION_BACKWARD * (10 * scores * head_size / rate + softmax), 2 * traffic)
    return device.kernel + forward, 3 * device.kernel + backward
