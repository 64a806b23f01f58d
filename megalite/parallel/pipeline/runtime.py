"""Runtime that interprets one rank's list of actions. All decisions are made by the schedule.

Communication: point-to-point over the pp axis. Forward sends activations to the next stage, backward sends
their gradients to the previous one, both [seq (/tp), batch, hidden]. A receive is posted at its place in the
list and awaited only by the computation that needs it. A send starts right after the computation that
produces its tensor, which is kept until the send completes (gloo reads it only when the receiver is ready).
The host never waits for the device. A clock marks the start and end of each computation, from which the
bubble is measured.

`_Handoff` detaches the output of a stage from its autograd graph: the graph keeps a scalar token instead of
the activations, so that their memory is freed as soon as they are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.mesh.mesh import Mesh
from megalite.parallel.collectives import message
from megalite.parallel.microbatch import Microbatch
from megalite.parallel.pipeline.schedule import Action, ActionKind, Schedule
from megalite.parallel.pipeline.send_recv_actions import OUTSTANDING_SENDS, channel_of
from megalite.parallel.weight_grad_queue import WeightGradQueue
from megalite.system.clock import ActionMarks, ActionTiming, Clock, HostClock, StepTiming

Key = tuple[int, int]  # stage, microbatch
INPUTS = {
    ActionKind.FORWARD: (ActionKind.RECEIVE_FORWARD, -1),
    ActionKind.BACKWARD: (ActionKind.RECEIVE_BACKWARD, 1),
}
"""The receive of a computation's input, and the offset of the stage that produces it."""


class Gatherer(Protocol):
    """Interface for executing gathers and reshards of a schedule (ZeRO-3).

    Weights are stored as shards, and full weights only exist while they are used.
    """

    def begin_run(self, planned: bool) -> None:
        """Prepare for executing a schedule.

        Args:
            planned: its list contains gathers and reshards.
        """

    def gather(self, bucket: int, unit: int | None) -> None:
        """Gather a bucket when the next computation reaches a unit of the model, or immediately for None."""

    def reshard(self, bucket: int, unit: int | None) -> None:
        """Free a bucket when the next computation leaves a unit."""


class _Gradient:
    """Gradient of a detached output between its receive and `_Handoff.backward`."""

    value: Tensor | None = None


class _Handoff(torch.autograd.Function):
    """Forward: drop the output, return a scalar token. Backward: the gradient that the next stage sent."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, gradient: _Gradient) -> Tensor:
        ctx.gradient = gradient
        return out.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None]:
        value, ctx.gradient.value = ctx.gradient.value, None
        return value, None


@dataclass
class _Run:
    """State of one execution of a schedule.

    Activations and their gradients are [seq (/tp), batch, hidden].
    """

    schedule: Schedule
    microbatches: Sequence[Microbatch]
    step: int
    loss_scale: float | Tensor
    training: bool
    statistics: dict[str, Tensor]
    # leaves of the stages' graphs, whose .grad is sent to the previous stage
    inputs: dict[Key, Tensor] = field(default_factory=dict)
    # scalars from which backward starts: the loss, or the token of a _Handoff
    roots: dict[Key, Tensor] = field(default_factory=dict)
    gradients: dict[Key, _Gradient] = field(default_factory=dict)
    # outputs and input gradients that another stage will consume
    products: dict[Key, Tensor] = field(default_factory=dict)
    # receives in flight, with their buffers
    arriving: dict[tuple[ActionKind, Key], tuple[Any, Tensor]] = field(default_factory=dict)
    # sends in flight, with the tensors they read
    sends: dict[tuple[ActionKind, Key], tuple[Any, Tensor]] = field(default_factory=dict)
    marks: list[ActionMarks] = field(default_factory=list)


class Runtime:
    """Runtime that executes schedules on this rank's stages.

    Args:
        stages: the stages on this rank by number (`megalite.model.stage.Stage`).
        activation_shape: [seq (/tp), batch, hidden], the shape of every message between stages; their dtype
            is `dtype`.
        weight_grads: the stages' queue of weight-gradient matmuls, which W actions compute.
        gatherer: gathers and frees the stages' weights (ZeRO-3) according to the list of actions.

    Attributes:
        clock: measures the computations. On a GPU the default measures nothing, because reading its events
            waits for the device.
        ran: start and end of this rank's computations in the last execution.
    """

    def __init__(
        self,
        stages: Mapping[int, Any],
        mesh: Mesh,
        activation_shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str,
        weight_grads: WeightGradQueue | None = None,
        gatherer: Gatherer | None = None,
    ):
        self.stages, self.mesh, self.gatherer = stages, mesh, gatherer
        self.weight_grads = weight_grads or WeightGradQueue()
        self.activation_shape, self.dtype, self.device = tuple(activation_shape), dtype, device
        self.clock = HostClock() if torch.device(device).type == "cpu" else Clock()
        self.ran: list[ActionTiming] = []
        self._passes = {
            ActionKind.FORWARD: self._forward,
            ActionKind.BACKWARD: self._backward,
            ActionKind.WEIGHT: self._weight,
        }

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
        """Execute this rank's actions.

        Args:
            loss_scale: factor on the loss of every microbatch, and therefore on all gradients; a number, or a
                tensor [] on the device.
            confirm: called after the forwards at the start of the rank's list (`Schedule.forward_prefix`). It
                returns False, on every rank, if the weights have changed since the run began: the prefix is
                then discarded and executed again.

        Returns:
            The statistics of this rank's stages by name, summed over microbatches (0-d, fp64; `loss` is
            multiplied by loss_scale, and 0 on a rank without the last stage), and the rank's times, if the
            clock measures them. Discarded work counts as waiting.
        """
        run = self._begin(schedule, microbatches, step, loss_scale, training)
        self.mesh.activity.plan = actions = schedule.actions[self.mesh.pp.rank]
        prefix = 0
        thrown_away: list[ActionMarks] = []
        self.weight_grads.begin_run(deferred=ActionKind.WEIGHT in schedule.passes)
        with torch.set_grad_enabled(training):
            if confirm is not None:
                prefix = schedule.forward_prefix[self.mesh.pp.rank]
                self._execute(run, actions[:prefix])
                if not confirm():
                    self._throw_away(run)
                    thrown_away = run.marks
                    run = self._begin(schedule, microbatches, step, loss_scale, training)
                    self._execute(run, actions[:prefix])
            self._execute(run, actions[prefix:])
        for work, _ in run.sends.values():
            work.wait()  # the buffers must outlive their sends
        self.mesh.activity.runs += 1
        read = [ActionTiming(*each) for each in self.clock.read((*thrown_away, *run.marks))]
        self.ran, before = read[len(thrown_away) :], read[: len(thrown_away)]
        return run.statistics, StepTiming.of(self.ran, 0 in self.stages, before)

    def _begin(
        self,
        schedule: Schedule,
        microbatches: Sequence[Microbatch],
        step: int,
        loss_scale: float | Tensor,
        training: bool,
    ) -> _Run:
        if self.gatherer is not None:
            self.gatherer.begin_run(planned=bool(schedule.units))
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        return _Run(schedule, microbatches, step, loss_scale, training, {"loss": zero})

    def _execute(self, run: _Run, actions: Sequence[Action]) -> None:
        activity = self.mesh.activity
        for action in actions:
            activity.enter(action)
            if action.is_compute:
                free = self.clock.mark()  # until `start` the rank waits for another one: part of the bubble
                self._await_input(run, action)
                start = self.clock.mark()
                self._passes[action.kind](run, action)
                run.marks.append(ActionMarks(action, free, start, self.clock.mark()))
            elif action.is_message:
                (self._send if action.is_send else self._receive)(run, action)
            else:
                assert self.gatherer is not None and action.bucket is not None, (
                    f"{action} is not expected in a schedule without weight gathering"
                )
                (self.gatherer.gather if action.kind is ActionKind.GATHER else self.gatherer.reshard)(
                    action.bucket, action.unit
                )

    @classmethod
    def _await_input(cls, run: _Run, action: Action) -> None:
        """Wait for an action's input if another rank produces it.

        The input is stored like the output of a local stage. This also waits for operations whose tensors are
        no longer needed afterwards, so that these waits are not part of the time of a pass.
        """
        receive, step = INPUTS.get(action.kind, (action.kind, 0))
        if arrived := run.arriving.pop((receive, action[1:3]), None):
            work, buffer = arrived
            work.wait()
            run.products[action.stage + step, action.microbatch] = buffer
        if action.kind is ActionKind.BACKWARD:
            cls._release_output(run, action[1:3])

    def _throw_away(self, run: _Run) -> None:
        """Complete all messages of the prefixes.

        A remaining message would be received in place of its successor from the second attempt. The prefix of
        a peer may contain sends whose receives come after this rank's prefix; these are received here as
        well.
        """
        rank, plans, lengths = self.mesh.pp.rank, run.schedule.actions, run.schedule.forward_prefix
        for action in plans[rank][lengths[rank] :]:
            if action.kind is ActionKind.RECEIVE_FORWARD:
                assert action.peer is not None
                send = Action(ActionKind.SEND_FORWARD, action.stage - 1, action.microbatch, rank)
                if send in plans[action.peer][: lengths[action.peer]]:
                    self._receive(run, action)
        for work, _ in (*run.arriving.values(), *run.sends.values()):
            work.wait()

    def _forward(self, run: _Run, action: Action) -> None:
        key = (action.stage, action.microbatch)
        stage, microbatch = self.stages[action.stage], run.microbatches[action.microbatch]
        if action.stage == 0:
            x = microbatch.tokens  # [seq, batch]
        else:
            x = run.products.pop((action.stage - 1, action.microbatch))  # [seq (/tp), batch, hidden]
            if run.training:
                # detached from the previous stage's graph, so each stage has a graph of its own
                run.inputs[key] = x.requires_grad_()
        out, statistics = stage(
            x, microbatch, stage.forward_state(microbatch, run.step, run.training), run.loss_scale
        )
        for name, value in statistics.items():
            run.statistics[name] = run.statistics[name] + value if name in run.statistics else value.double()
        if action.stage == run.schedule.stages - 1:
            run.roots[key] = out  # the loss, a scalar
        else:
            run.products[key] = out.detach()
            if run.training:
                run.gradients[key] = _Gradient()
                run.roots[key] = _Handoff.apply(out, run.gradients[key])

    def _backward(self, run: _Run, action: Action) -> None:
        key = (action.stage, action.microbatch)
        if action.stage < run.schedule.stages - 1:
            run.gradients.pop(key).value = run.products.pop((action.stage + 1, action.microbatch))
        # before backward, because matmuls are queued under this key for the W action
        self.weight_grads.begin_backward(*key)
        # From the loss, or from the received gradient (`_Handoff.backward`), down through the backwards of
        # the head, the layers and, in the first stage, the embedding: the autograd functions of
        # parallel/tensor. Each hands weight gradients to its `Weight`.
        torch.autograd.backward(run.roots.pop(key))
        if action.stage > 0:
            gradient = run.inputs.pop(key).grad
            assert gradient is not None
            run.products[key] = gradient

    def _weight(self, run: _Run, action: Action) -> None:
        with torch.no_grad():  # as inside autograd's backward, where schedules without W compute the matmuls
            self.weight_grads.run(action.stage, action.microbatch)

    def _receive(self, run: _Run, action: Action) -> None:
        buffer = torch.empty(self.activation_shape, dtype=self.dtype, device=self.device)
        work = self._transfer(dist.irecv, buffer, action)
        run.arriving[action.kind, (action.stage, action.microbatch)] = (work, buffer)

    def _send(self, run: _Run, action: Action) -> None:
        key = (action.stage, action.microbatch)
        tensor = run.products.pop(key).contiguous()
        # Release completed sends, else the tensors of all microbatches would stay in memory until the end of
        # the run. On NCCL the wait is one of the stream and free; without it torch itself holds the tensor
        # until its watchdog looks at the send.
        for sent in [sent for sent, (work, _) in run.sends.items() if work.is_completed()]:
            run.sends.pop(sent)[0].wait()
        run.sends[action.kind, key] = (self._transfer(dist.isend, tensor, action), tensor)
        # gloo only reports a send as complete after waiting for it
        while len(run.sends) > OUTSTANDING_SENDS:
            work, _ = run.sends.pop(next(iter(run.sends)))
            work.wait()

    @staticmethod
    def _release_output(run: _Run, key: Key) -> None:
        """Free an output that was sent.

        Its gradient has arrived, so the receiver has it; the wait returns immediately, and gloo requires it.
        """
        work, _ = run.sends.pop((ActionKind.SEND_FORWARD, key), (None, None))
        if work is not None:
            work.wait()

    def _transfer(self, operation: Callable[..., Any], tensor: Tensor, action: Action) -> Any:
        """Start a message on its channel."""
        group = self.mesh.channels[channel_of(action, self.mesh.pp.rank).name]
        assert action.peer is not None
        peer = self.mesh.pp.ranks[action.peer]
        self.mesh.traffic[operation.__name__, "pp"] += 1
        return message(operation, tensor, peer, group, f"pipeline message {action}", self.mesh.activity)
