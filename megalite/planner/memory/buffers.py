"""Communication buffers: messages between stages, weights gathered for use, gradient buckets not yet reduced.

Computed by following a rank's list of actions as the runtime does, so they hold for any schedule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from megalite.assembly.plan import staggered_end
from megalite.config.schema import Config
from megalite.parallel.pipeline.gather_actions import uses
from megalite.parallel.pipeline.schedule import Action, ActionKind, Schedule
from megalite.parallel.pipeline.send_recv_actions import (
    OUTSTANDING_SENDS,
    Edge,
    chain,
    channel_of,
    connection_bytes,
    receive_before,
)
from megalite.parallel.sharding.buckets import BucketLayout
from megalite.parallel.spec import ParamSpec
from megalite.planner.memory.states import DeviceType, Sharing, Widths

NARROW = 2  # bytes of a bf16 element: gradients may be reduced in bf16


def message_bytes(schedule: Schedule, rank: int, size: int) -> int:
    """Return the peak bytes of tensors in flight between stages, each of `size` bytes.

    A tensor is in flight if it was received ahead of use, is sent and may not have arrived, or is handed
    over within the rank. A received tensor that is in use counts as an activation or as workspace
    instead.
    """
    return _messages(schedule, rank) * size


@lru_cache(maxsize=4096)
def _messages(schedule: Schedule, rank: int) -> int:
    arriving: set[Action] = set()
    handed: set[tuple[ActionKind, int, int]] = (
        set()
    )  # (pass, stage, microbatch) whose result waits on this rank
    sends: dict[tuple[ActionKind, int, int], None] = {}
    most = 0
    for action in schedule.actions[rank]:
        kind, stage, microbatch = action[:3]
        if action.is_send:
            sends[kind, stage, microbatch] = None
            most = max(most, len(arriving) + len(handed) + len(sends))
            while len(sends) > OUTSTANDING_SENDS:
                del sends[next(iter(sends))]
        elif action.is_message:
            arriving.add(action)
        elif action.is_compute and kind is not ActionKind.WEIGHT:
            step = 1 if kind is ActionKind.FORWARD else -1
            arriving.discard(receive_before(action, schedule) or action)
            handed.discard((kind, stage - step, microbatch))
            if kind is ActionKind.BACKWARD:
                sends.pop((ActionKind.SEND_FORWARD, stage, microbatch), None)
            if 0 <= stage + step < schedule.stages and schedule.placement[stage + step] == rank:
                handed.add((kind, stage, microbatch))
        most = max(most, len(arriving) + len(handed) + len(sends))
    return most


def channel_bytes(config: Config, schedule: Schedule, rank: int) -> int:
    """Return the bytes of NCCL's connections to neighbours in the pipeline.

    They are allocated at the start, one for each channel and peer.
    """
    totals = [chain(schedule.ranks), chain(schedule.ranks, down=True)] if staggered_end(config) else []
    return sum(connection_bytes(each, rank) for each in [_connections(schedule, rank), *totals])


@lru_cache(maxsize=4096)
def _connections(schedule: Schedule, rank: int) -> tuple[Edge, ...]:
    """Return the edges over which a rank sends and receives in its pipeline."""
    messages = {
        (channel_of(each, rank), each.peer, each.is_send)
        for each in schedule.actions[rank]
        if each.peer is not None
    }
    return tuple((rank, peer) if sends else (peer, rank) for _, peer, sends in messages)


def gathered_bytes(schedule: Schedule, rank: int, buckets: Sequence[BucketLayout], widths: Widths) -> int:
    """Return the peak bytes of gathered weights under ZeRO-3.

    These are the weights of the current unit and of the next one, which is prefetched.
    """
    if not schedule.units:
        return 0
    sizes = [widths.gathered(bucket) for bucket in buckets]
    announced: list[Action] = []
    whole: set[int] = set()
    most = 0

    def carry_out(unit: int | None, kind: ActionKind) -> None:
        for move in [move for move in announced if move.unit == unit and move.kind is kind]:
            announced.remove(move)
            assert move.bucket is not None
            (whole.add if kind is ActionKind.GATHER else whole.discard)(move.bucket)

    for action in schedule.actions[rank]:
        if action.bucket is not None:
            announced.append(action)
            carry_out(None, ActionKind.GATHER)
        for unit in uses(action, schedule) if action.is_compute else ():
            carry_out(unit.number, ActionKind.GATHER)
            most = max(most, sum(sizes[number] for number in whole))
            carry_out(unit.number, ActionKind.RESHARD)
    return most


def values_bytes(buckets: Sequence[BucketLayout], widths: Widths) -> int:
    """Return the bytes of the values of the largest quantized matrix, while it is multiplied (`lora.base`).

    Of experts, whose matrices are stacked, one has values at a time.
    """
    slots = [slot for bucket in buckets if bucket.quantized_bytes for slot in bucket.slots]
    largest = max((math.prod(slot.shape) // _experts(slot.spec, slot.shape) for slot in slots), default=0)
    return largest * widths.compute


def _experts(spec: ParamSpec, shape: tuple[int, ...]) -> int:
    """Return the number of experts whose matrices are stacked in this rank's part."""
    segment = spec.segments[0]
    return max(segment.experts * shape[0] // segment.shape[0], 1)


def open_gradients(
    config: Config, schedule: Schedule, buckets: Sequence[BucketLayout], device: DeviceType
) -> int:
    """Return the peak bytes of gradients in addition to those that are kept.

    These are whole buckets that fill or wait for their reduction (ZeRO-2 and 3), and buffers of the
    reduction itself: copies in bf16; on gloo, the other ranks' parts.
    """
    width = Widths.of(config).gradient
    shared = [(bucket, Sharing.of(config, bucket.domain)) for bucket in buckets if bucket.trainable]
    shared = [(bucket, sharing) for bucket, sharing in shared if sharing.data > 1]
    # reductions at a time, see `sharding.reducer`
    two = config.parallel.reduce_dtype == "bf16" and device == "cuda"
    sizes = sorted(
        (_reduction(config, bucket.size, sharing, device) for bucket, sharing in shared), reverse=True
    )
    reducing = sum(sizes[: 2 if two else 1])
    opened = [
        (bucket.size, sharing.shard)
        for bucket, sharing in shared
        if sharing.gradients_sharded(bucket, config.run.deterministic)
    ]
    if not opened:
        return reducing
    # A backward fills one bucket after the other, and a full one may still wait for its reduction. If weight
    # gradients are deferred, every bucket of a stage stays open between a backward and its weight pass.
    largest, whole = max(size for size, _ in opened), sum(size for size, _ in opened)
    filling = whole if ActionKind.WEIGHT in schedule.passes else min(2 * largest, whole)
    return filling * width + max(reducing, max(size // shard for size, shard in opened) * width)


def _reduction(config: Config, size: int, sharing: Sharing, device: DeviceType) -> int:
    """Return the bytes of buffers that the reduction of a bucket with `size` elements needs."""
    width = Widths.of(config).gradient
    if config.parallel.reduce_dtype == "bf16":
        return 2 * size * NARROW + size // sharing.data * width
    return size * width * (sharing.data - 1) // sharing.data if device == "cpu" else 0
