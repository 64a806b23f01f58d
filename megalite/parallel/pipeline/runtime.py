"""The runtime: an interpreter of one rank's list of actions. It decides nothing; the schedule does.

A receive is posted where the list says so and awaited only by the computation that needs it; a send is started right after the computation
that makes its tensor and held until it is complete (gloo reads the tensor when the receiver is ready). Nothing waits on the device.
Each computation is marked by a clock at its start and end: that is the measured bubble.

A stage's output is cut out of its autograd graph by `_Handoff`: the graph keeps a scalar token instead of the activations, so their memory
is free the moment they are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.batch import Microbatch
from megalite.clock import ActionMarks, ActionTiming, Clock, HostClock, StepTiming
from megalite.mesh import Mesh
from megalite.parallel.collectives import message
from megalite.parallel.pipeline.communication import OUTSTANDING_SENDS, channel_of
from megalite.parallel.pipeline.schedule import Action, Kind, Schedule
from megalite.parallel.weight import WeightGradQueue

Key = tuple[int, int]  # stage, microbatch
INPUTS = {Kind.FORWARD: (Kind.RECEIVE_FORWARD, -1), Kind.BACKWARD: (Kind.RECEIVE_BACKWARD, 1)}
"""What brings a computation its input from another rank, and how many stages further it is made."""


class Gatherer(Protocol):
    """What carries out a schedule's gathers and reshards: weights that are kept as shards are whole while they are used (ZeRO-3)."""

    def begin_run(self, planned: bool) -> None:
        """A schedule begins to execute; `planned`: its list has gathers and reshards."""

    def gather(self, bucket: int, unit: int | None) -> None:
        """Gather a bucket when the next computation reaches a unit of the model; None: now."""

    def reshard(self, bucket: int, unit: int | None) -> None:
        """Free a bucket when the next computation leaves a unit."""


class _Gradient:
    """Where the gradient of a handed-over output arrives."""

    value: Tensor | None = None


class _Handoff(torch.autograd.Function):
    """Forward: drop the output, return a scalar token.  Backward: the gradient that the next stage sent."""

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
    """What is under way in one execution of a schedule."""

    schedule: Schedule
    microbatches: Sequence[Microbatch]
    step: int
    loss_scale: float
    training: bool
    statistics: dict[str, Tensor]
    inputs: dict[Key, Tensor] = field(default_factory=dict)
    roots: dict[Key, Tensor] = field(default_factory=dict)
    gradients: dict[Key, _Gradient] = field(default_factory=dict)
    products: dict[Key, Tensor] = field(default_factory=dict)  # outputs and input gradients on their way to another stage
    arriving: dict[tuple[Kind, Key], tuple[Any, Tensor]] = field(default_factory=dict)
    sends: dict[tuple[Kind, Key], tuple[Any, Tensor]] = field(default_factory=dict)
    marks: list[ActionMarks] = field(default_factory=list)


class Runtime:
    """Executes schedules on this rank's stages.

    Args:
        stages: the stages on this rank by number (`megalite.model.stage.Stage`).
        activation_shape: [seq (/tp), batch, hidden] of what travels between stages, in `dtype`.
        weight_grads: the stages' queue of weight-gradient products, which W actions compute.
        gatherer: gathers and frees the stages' weights (ZeRO-3) as the list of actions says.

    Attributes:
        clock: what measures; on a GPU by default nothing, since reading its clock waits for the device.
        ran: this rank's computations in the last execution, in time.
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
        self._passes = {Kind.FORWARD: self._forward, Kind.BACKWARD: self._backward, Kind.WEIGHT: self._weight}

    def run(
        self,
        schedule: Schedule,
        microbatches: Sequence[Microbatch],
        *,
        step: int,
        loss_scale: float,
        training: bool = True,
        confirm: Callable[[], bool] | None = None,
    ) -> tuple[dict[str, Tensor], StepTiming]:
        """Execute this rank's actions.

        `confirm` is called after the forwards with which the rank starts. False says that the weights have changed since, on every
        rank: what was done so far is thrown away, and done again.

        Returns what this rank's stages have measured, summed over microbatches by name (0-d fp64; `loss` is that of the microbatches, times
        loss_scale, where the last stage is here, else 0), and how the rank spent its time, as far as the clock measures it. Work that was
        thrown away counts as waiting.
        """
        run = self._begin(schedule, microbatches, step, loss_scale, training)
        actions, prefix = schedule.actions[self.mesh.pp.rank], 0
        thrown_away: list[ActionMarks] = []
        self.weight_grads.begin_run(deferred=Kind.WEIGHT in schedule.passes)
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
            work.wait()
        self.mesh.activity.runs += 1
        read = [ActionTiming(*each) for each in self.clock.read((*thrown_away, *run.marks))]
        self.ran, before = read[len(thrown_away) :], read[: len(thrown_away)]
        return run.statistics, StepTiming.of(self.ran, 0 in self.stages, before)

    def _begin(self, schedule: Schedule, microbatches: Sequence[Microbatch], step: int, loss_scale: float, training: bool) -> _Run:
        if self.gatherer is not None:
            self.gatherer.begin_run(planned=bool(schedule.units))
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        return _Run(schedule, microbatches, step, loss_scale, training, {"loss": zero})

    def _execute(self, run: _Run, actions: Sequence[Action]) -> None:
        activity = self.mesh.activity
        for action in actions:
            activity.enter(action)
            if action.is_compute:
                free = self.clock.mark()
                self._await_input(run, action)
                start = self.clock.mark()
                self._passes[action.kind](run, action)
                run.marks.append(ActionMarks(action, free, start, self.clock.mark()))
            elif action.is_message:
                (self._send if action.is_send else self._receive)(run, action)
            else:
                assert self.gatherer is not None and action.bucket is not None, f"{action} in a schedule for weights that are whole"
                (self.gatherer.gather if action.kind is Kind.GATHER else self.gatherer.reshard)(action.bucket, action.unit)

    @staticmethod
    def _await_input(run: _Run, action: Action) -> None:
        """Where another rank makes an action's input, wait until it is here: from then on it is as if it had been made here."""
        receive, step = INPUTS.get(action.kind, (action.kind, 0))
        if arrived := run.arriving.pop((receive, action[1:3]), None):
            work, buffer = arrived
            work.wait()
            run.products[action.stage + step, action.microbatch] = buffer

    def _throw_away(self, run: _Run) -> None:
        """Complete every message of the prefixes, so that none is taken for one of the second try."""
        rank, plans, lengths = self.mesh.pp.rank, run.schedule.actions, run.schedule.forward_prefix
        for action in plans[rank][lengths[rank] :]:
            if action.kind is Kind.RECEIVE_FORWARD:
                assert action.peer is not None
                send = Action(Kind.SEND_FORWARD, action.stage - 1, action.microbatch, rank)
                if send in plans[action.peer][: lengths[action.peer]]:
                    self._receive(run, action)
        for work, _ in (*run.arriving.values(), *run.sends.values()):
            work.wait()

    def _forward(self, run: _Run, action: Action) -> None:
        key = (action.stage, action.microbatch)
        stage, microbatch = self.stages[action.stage], run.microbatches[action.microbatch]
        if action.stage == 0:
            x = microbatch.tokens
        else:
            x = run.products.pop((action.stage - 1, action.microbatch))
            if run.training:
                run.inputs[key] = x.requires_grad_()
        out, statistics = stage(x, microbatch, stage.forward_state(microbatch, run.step, run.training), run.loss_scale)
        for name, value in statistics.items():
            run.statistics[name] = run.statistics[name] + value if name in run.statistics else value.double()
        if action.stage == run.schedule.stages - 1:
            run.roots[key] = out
        else:
            run.products[key] = out.detach()
            if run.training:
                run.gradients[key] = _Gradient()
                run.roots[key] = _Handoff.apply(out, run.gradients[key])

    def _backward(self, run: _Run, action: Action) -> None:
        key = (action.stage, action.microbatch)
        if action.stage < run.schedule.stages - 1:
            run.gradients.pop(key).value = run.products.pop((action.stage + 1, action.microbatch))
            self._release_output(run, key)
        self.weight_grads.begin_backward(*key)
        torch.autograd.backward(run.roots.pop(key))
        if action.stage > 0:
            gradient = run.inputs.pop(key).grad
            assert gradient is not None
            run.products[key] = gradient

    def _weight(self, run: _Run, action: Action) -> None:
        with torch.no_grad():  # as in a backward, where the products of other schedules run
            self.weight_grads.run(action.stage, action.microbatch)

    def _receive(self, run: _Run, action: Action) -> None:
        buffer = torch.empty(self.activation_shape, dtype=self.dtype, device=self.device)
        work = self._transfer(dist.irecv, buffer, action)
        run.arriving[action.kind, (action.stage, action.microbatch)] = (work, buffer)

    def _send(self, run: _Run, action: Action) -> None:
        key = (action.stage, action.microbatch)
        tensor = run.products.pop(key).contiguous()
        run.sends = {sent: (work, held) for sent, (work, held) in run.sends.items() if not work.is_completed()}
        run.sends[action.kind, key] = (self._transfer(dist.isend, tensor, action), tensor)
        while len(run.sends) > OUTSTANDING_SENDS:  # gloo reports nothing as complete to those who do not wait
            work, _ = run.sends.pop(next(iter(run.sends)))
            work.wait()

    @staticmethod
    def _release_output(run: _Run, key: Key) -> None:
        """Free an output whose gradient is here, and which has therefore arrived: gloo tells that to nobody who does not wait."""
        work, _ = run.sends.pop((Kind.SEND_FORWARD, key), (None, None))
        if work is not None:
            work.wait()

    def _transfer(self, operation: Callable[..., Any], tensor: Tensor, action: Action) -> Any:
        """Start a message on its channel."""
        group = self.mesh.channels[channel_of(action, self.mesh.pp.rank).name]
        assert action.peer is not None
        peer = self.mesh.pp.ranks[action.peer]
        self.mesh.traffic[operation.__name__, "pp"] += 1
        return message(operation, tensor, peer, group, f"pipeline message {action}", self.mesh.activity)
