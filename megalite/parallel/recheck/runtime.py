"""Runtime that repeats every n-th step on other ranks and compares the bits (`faults.recheck`).

    repetition   forward and backward of the samples of the previous replica; only digests are kept
    own pass     the pass of the step: its gradients are reduced, and update the weights
    comparison   each rank's events of its own pass with those of the rank that has repeated it

If they differ, two more passes follow. The third decides which values are right: it runs on a third replica,
if there is one. The fourth replaces the gradients of the own pass.

Replicas exchange their microbatches over dp before a repetition, and its loss scale with them. Random numbers
are keyed by sample. Experts whose group spans several dp ranks are moved together, because the rows of a
group's ranks are added in the order of the ranks. If a step has only one such group, or one replica, each
rank repeats its own samples: this finds errors that do not occur twice.

A repetition reduces nothing and returns no statistics. Its gradients accumulate in the same buffers, and the
own pass overwrites them.
"""

from __future__ import annotations

import io
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.mesh.layout import Layout
from megalite.parallel.all_to_all import all_to_all
from megalite.parallel.collectives import all_gather
from megalite.parallel.microbatch import Microbatch
from megalite.parallel.pipeline.runtime import Runtime
from megalite.parallel.pipeline.schedule import Schedule
from megalite.parallel.recheck.judgment import Block, Culprit, Judgment, Pass, judge
from megalite.parallel.recheck.pass_record import PassRecord
from megalite.parallel.sharding.gradient_bucket import GradientBucket
from megalite.parallel.sharding.reducer import GradientReducer
from megalite.system.clock import StepTiming
from megalite.system.messages import say

PASSES = ("the repetition", "the own pass", "the third pass", "the fourth pass")

Inject = Callable[[int, int], AbstractContextManager[None]]
"""(step, pass from 1) → the faults that are injected into this pass."""


class CorruptionError(RuntimeError):
    """Raised on all ranks if a rank has computed wrong values and the run must not continue."""


@dataclass(frozen=True)
class Corruption:
    """Wrong values that were detected in a step.

    Attributes:
        ranks: the ranks that have computed them; with several, it may be only one of them.
        message: for the user.
    """

    step: int
    ranks: tuple[int, ...]
    message: str


class _RecordedReducer:
    """What buckets start in place of the reducer: records their gradients, then reduces or drops them."""

    def __init__(self, reducer: GradientReducer):
        self._reducer = reducer
        self.make_room = reducer.make_room
        self.record: PassRecord | None = None
        self.drops = False

    def start(self, bucket: GradientBucket) -> None:
        if self.record is not None and bucket.full is not None:
            self._record(bucket, self.record)
        if not self.drops:
            self._reducer.start(bucket)
        elif bucket.shards_only and bucket.full is not None:
            bucket.release_full()

    @staticmethod
    def _record(bucket: GradientBucket, record: PassRecord) -> None:
        if bucket.shards_only:  # zeroes what has no contribution
            bucket.full = bucket.release_full()
        names = [slot.spec.name for slot in bucket.layout.slots]
        what = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        for buffer in (bucket.full, bucket.separate_embedding_grad):
            if buffer is not None:
                record.accumulated(f"gradients of {what}", buffer)


class RecheckedRuntime(Runtime):
    """Runtime that repeats every `interval`-th training step and compares.

    Args:
        stops: whether wrong values end the run even if a further pass has the right gradients.
        reducer: with all buckets of the rank.

    Attributes:
        corruptions: what rechecks have detected. Whoever reports it removes it.
        inject: injects faults into passes.
    """

    def __init__(self, *args: Any, interval: int, stops: bool, reducer: GradientReducer, **options: Any):
        super().__init__(*args, **options)
        self.corruptions: list[Corruption] = []
        self.inject: Inject = lambda step, number: nullcontext()
        self._interval, self._stops, self._reducer = interval, stops, reducer
        self._recorded = _RecordedReducer(reducer)
        for bucket in reducer.buckets:
            bucket.reducer = cast(GradientReducer, self._recorded)
        mesh = self.mesh
        # dp ranks that a group of experts spans
        self._span = max(mesh.expert.size // (mesh.tp.size * mesh.cp.size), 1)
        self._blocks = _blocks(mesh.dims, self._span)

    def run(
        self,
        schedule: Schedule,
        microbatches: Sequence[Microbatch],
        *,
        step: int,
        loss_scale: float | Tensor,
        training: bool = True,
        confirm: Callable[[], bool] | None = None,
    ) -> tuple[dict[str, Tensor], StepTiming]:
        if not training or step % self._interval:
            with self.inject(step, 2) if training else nullcontext():
                return super().run(
                    schedule,
                    microbatches,
                    step=step,
                    loss_scale=loss_scale,
                    training=training,
                    confirm=confirm,
                )
        if confirm is not None:
            confirm()  # the weights are final: what the step before may still change is repeated by no pass

        def compute(number: int, shift: int, reduces: bool) -> tuple[Any, PassRecord]:
            samples, scale = self._samples_of(microbatches, loss_scale, shift)
            if number > 1:
                self._begin_again(len(samples))
            return self._pass(schedule, samples, step, scale, number, reduces)

        _, repeated = compute(1, self._shift(1), False)
        result, own = compute(2, 0, True)
        if self._agree(repeated, own):
            return result
        shift = self._shift(2) or self._shift(1)
        _, third = compute(3, shift, False)
        result, fourth = compute(4, 0, True)
        records = (repeated, own, third, fourth)
        self._report(step, records, (self._shift(1), 0, shift, 0))
        return cast(tuple[dict[str, Tensor], StepTiming], result)

    def _shift(self, blocks: int) -> int:
        """Return by how many dp ranks samples move if they move by a number of blocks."""
        return blocks * self._span % self.mesh.dp.size

    def _samples_of(
        self, microbatches: Sequence[Microbatch], loss_scale: float | Tensor, shift: int
    ) -> tuple[Sequence[Microbatch], float | Tensor]:
        """Return the microbatches and the loss scale of the dp rank `shift` before this one. Collective."""
        dp = self.mesh.dp
        if shift == 0:
            return microbatches, loss_scale
        file = io.BytesIO()
        torch.save((list(microbatches), loss_scale), file)
        own = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8).to(self.device)
        sizes = all_gather(torch.tensor([len(own)], device=self.device), dp).wait().tolist()
        send, receive = [0] * dp.size, [0] * dp.size
        source, target = (dp.rank - shift) % dp.size, (dp.rank + shift) % dp.size
        send[target], receive[source] = len(own), sizes[source]
        arrived = all_to_all(own, dp, send, receive).wait()
        file = io.BytesIO(arrived.cpu().numpy().tobytes())
        # from ranks of this run, whose microbatches have more than tensors
        samples, scale = torch.load(file, map_location=self.device, weights_only=False)
        return samples, scale

    def _begin_again(self, microbatches: int) -> None:
        """Prepare for the gradients of a further pass, which overwrite those of the last one."""
        self._reducer.make_room(in_flight=0)  # reductions still use the buffers
        for bucket in self._reducer.buckets:
            scale = 1.0 if bucket.compression is None else bucket.compression.loss_scale
            bucket.begin_step(microbatches, scale)

    def _pass(
        self,
        schedule: Schedule,
        microbatches: Sequence[Microbatch],
        step: int,
        loss_scale: float | Tensor,
        number: int,
        reduces: bool,
    ) -> tuple[tuple[dict[str, Tensor], StepTiming], PassRecord]:
        activity = self.mesh.activity
        record = PassRecord(activity, self.device)
        activity.transfers = self._recorded.record = record
        self._recorded.drops = not reduces
        try:
            with self.inject(step, number):
                result = super().run(schedule, microbatches, step=step, loss_scale=loss_scale)
            for bucket in self._reducer.buckets:
                for weight in bucket.weights:
                    weight.finish_step()
        finally:
            activity.transfers = self._recorded.record = None
            self._recorded.drops = False
        return result, record

    def _agree(self, repeated: PassRecord, own: PassRecord) -> bool:
        """Return whether all repetitions are equal to the own passes. Collective; the same on all ranks."""
        summaries = torch.cat((repeated.summary(), own.summary())).unsqueeze(0)
        table = all_gather(summaries, self.mesh.world).wait().tolist()  # [world, 4]
        following = [*self._blocks[1:], self._blocks[0]]
        return all(
            table[executor][:2] == table[rank][2:]
            for ranks, executors in zip(self._blocks, following, strict=True)
            for rank, executor in zip(ranks, executors, strict=True)
        )

    def _report(self, step: int, records: Sequence[PassRecord], shifts: Sequence[int]) -> None:
        """Name the ranks with wrong values. Collective.

        Raises:
            CorruptionError: the run must end.
        """
        world, own = self.mesh.world, (self._place(), [record.events() for record in records])
        everyone: list[Any] = [own] * world.size
        if world.size > 1:
            dist.all_gather_object(everyone, own, group=world.group)
        passes = [
            Pass(shift // self._span, [events[number] for _, events in everyone])
            for number, shift in enumerate(shifts)
        ]
        judgment = judge(passes, self._blocks)
        message = _message(step, judgment, [place for place, _ in everyone])
        if self._stops or not judgment.last_is_right:
            raise CorruptionError(message)
        if self.mesh.rank == 0:
            say(message)
        self.corruptions.append(Corruption(step, tuple(each.rank for each in judgment.culprits), message))

    def _place(self) -> str:
        """Return the host and the device of this rank."""
        device = torch.device(self.device)
        if device.type != "cuda":
            return f"host {socket.gethostname()}"
        known = torch.cuda.get_device_properties(device)
        return f"host {socket.gethostname()}, {device}, {known.name}, UUID {known.uuid}"


def _blocks(dims: Layout, span: int) -> list[Block]:
    """Return the ranks of each block: `span` neighbours on dp, at all coordinates of the other axes."""
    lines = dict.fromkeys(dims.peers(rank, ("dp",)) for rank in range(dims.world))
    return [
        tuple(rank for line in lines for rank in line[first : first + span])
        for first in range(0, dims.dp, span)
    ]


def _message(step: int, judgment: Judgment, places: Sequence[str]) -> str:
    """Return the lines for the user, of which the first names the ranks."""
    named = [f"rank {each.rank} ({places[each.rank]})" for each in judgment.culprits]
    joined = (" and " if judgment.decided else " or ").join(named)
    lines = [f"silent corruption in step {step}: {joined} computed wrong values"]
    if not judgment.decided:
        lines.append("no further replica decides between results that their ranks repeat")
    lines += [f"rank {culprit.rank}: {_origin(culprit)}" for culprit in judgment.culprits]
    if judgment.last_is_right:
        lines.append("the step was computed again, and its gradients are right")
    else:
        lines.append("the step was computed again, but its gradients are not known to be right")
    return "\n".join([*lines, "exclude the host, and continue from the newest checkpoint"])


def _origin(culprit: Culprit) -> str:
    where = PASSES[culprit.number]
    if culprit.event is None:
        return f"events are missing in {where}"
    kind, what, during, _ = culprit.event
    return f"the first difference is what it {kind} in {where}, {during}: {what}"
