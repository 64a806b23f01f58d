"""The time of one kernel on a device, in seconds: matmuls by tiles and waves, attention, and
memory-bound kernels.

Every constant is a property of the hardware or of how kernels are written, and is the same for all devices,
models and layouts. docs/planner.md states the source of each.
"""

from __future__ import annotations

import math
from bisect import bisect_left

from megalite.model.cost.records import attended_pairs
from megalite.planner.hardware.devices import Device

TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.93), (128, 64, 0.8), (64, 64, 0.62))
"""Rows and columns of the output tile that one multiprocessor computes, and its relative speed: a small tile
reads more bytes per FLOP."""
TILE_START = 1.2e-6
"""Seconds that a wave of tiles takes beyond its matmuls: loading the first operands from memory and storing
the result."""
# values that it moves for each of the result: it reads one and writes one, forward and backward alike
DROPOUT = 2
ELEMENTWISE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
"""Bytes per element, by precision."""
SOFTMAX = 4e-11
"""Seconds of one multiprocessor per attention score, without the matmuls: an exponential (16 per
cycle), a maximum, a scale and two sums, half of which overlap with the matmuls."""
ATTENTION_BACKWARD = 1.2
"""Slowdown of attention's five backward matmuls relative to its two forward ones: query gradients are
accumulated across tiles."""
BLOCK = 128
"""Positions per attention block: a block that the causal mask cuts is computed in full."""


def reached_bandwidth(device: Device) -> float:
    """Return the bytes/s that memory-bound kernels reach."""
    return device.bandwidth * (1.0 if device.measured else device.constants.stream)


def stream(device: Device, size: float) -> float:
    """Return the time of a memory-bound kernel that moves `size` bytes from or to memory."""
    return device.kernel + size / reached_bandwidth(device)


def matmul(
    device: Device,
    m: float,
    n: float,
    k: float,
    precision: str,
    batch: float = 1,
    written: float | None = None,
) -> float:
    """Return the time of `batch` matmuls of [m, k] and [k, n].

    Args:
        written: bytes moved per element of the result, by default one write at the precision; 8 for a
            gradient that is added to an fp32 accumulator, which is read and written.
    """
    size = ELEMENTWISE_BYTES[precision]
    written = size if written is None else written
    return matmul_at(device, m, n, k, peak=device.peak(precision), size=size, batch=batch, written=written)


def matmul_at(
    device: Device,
    m: float,
    n: float,
    k: float,
    *,
    peak: float,
    size: float,
    batch: float,
    written: float,
    faster: float = 1.0,
) -> float:
    """Return the time of `batch` matmuls with a peak in FLOP/s and `size` bytes per element of both factors.

    Args:
        faster: speed relative to measured rates, if the device has these.
    """
    memory = batch * (size * (m * k + k * n) + written * m * n) / reached_bandwidth(device)
    if device.rates:
        rate = faster * _measured_rate(device, m * n * k)
        return device.kernel + max(memory, 2 * batch * m * n * k / rate)
    return device.kernel + max(memory, _tiled(device, m, n, k, peak, batch))


def _tiled(device: Device, m: float, n: float, k: float, peak: float, batch: float) -> float:
    """Return the time of the fastest tiling.

    Tiles are assigned to the multiprocessors in waves, and the last wave may be nearly empty. If there are
    too few tiles for one wave, several multiprocessors share a tile, each with a part of the inner dimension
    (split-K).
    """
    unit = peak * device.sustained / device.multiprocessors
    best = math.inf
    for rows, columns, speed in TILES:
        tiles = batch * math.ceil(m / rows) * math.ceil(n / columns)
        waves, shared = math.ceil(tiles / device.multiprocessors), max(1, device.multiprocessors // tiles)
        best = min(
            best, waves * (2 * rows * columns * k / shared / (unit * speed)) + TILE_START * min(waves, 2)
        )
    return best


def _measured_rate(device: Device, volume: float) -> float:
    """Return the FLOP/s of a matmul with m·n·k = volume.

    It is interpolated between the measured sizes, linearly in the logarithm of the size.
    """
    size = volume ** (1 / 3)
    sizes = [each for each, _ in device.rates]
    at = bisect_left(sizes, size)
    if at in (0, len(sizes)):
        return device.rates[min(at, len(sizes) - 1)][1]
    (low, slow), (high, fast) = device.rates[at - 1], device.rates[at]
    return slow + (fast - slow) * math.log(size / low) / math.log(high / low)


def computed_pairs(sequence: int, window: int | None) -> float:
    """Return the (query, key) pairs that causal attention computes for one head and sequence.

    These are the attended pairs, rounded up to whole blocks.
    """
    return attended_pairs(sequence, window) + sequence * (min(BLOCK, window or sequence, sequence) - 1) / 2


def attention(
    device: Device,
    heads: float,
    head_size: float,
    sequence: int,
    batch: int,
    window: int | None,
    precision: str,
) -> tuple[float, float]:
    """Return the times of attention's forward and backward without writing scores to memory.

    Such a kernel (FlashAttention, Dao et al. 2022) recomputes the scores in its backward.
    """
    scores = batch * heads * computed_pairs(sequence, window)
    if device.attention is not None:
        flops = 4 * scores * head_size
        return device.kernel + flops / device.attention[0], device.kernel + 2.5 * flops / device.attention[1]
    rate = device.peak(precision) * device.sustained * device.constants.attention
    softmax = scores * SOFTMAX / device.multiprocessors / device.constants.attention
    traffic = stream(device, 4 * batch * heads * sequence * head_size * ELEMENTWISE_BYTES[precision])
    forward = max(4 * scores * head_size / rate + softmax, traffic)
    backward = max(ATTENTION_BACKWARD * (10 * scores * head_size / rate + softmax), 2 * traffic)
    return device.kernel + forward, 3 * device.kernel + backward
