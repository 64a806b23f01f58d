"""Runtime that records forward and backward of its stages as CUDA graphs and replays them (`train.graphs`).

The host launches each kernel of a layer one after the other, with Python and autograd in between. A replay
launches all kernels of a pass in one call. It repeats the same kernels, with the same arguments, on the same
addresses, and executes no Python. This decides what is recorded, and what the runtime does beside it.

What is recorded: a pair of graphs, forward and backward, for each stage and slot. A slot is the memory of one
microbatch in flight. Microbatch i has slot i % n, where n is the largest number of microbatches that the
schedule keeps in flight in the stage. Forwards and backwards of a stage run in ascending order, so when
microbatch i begins, i - n has ended. Replaying one pair for two microbatches in flight would overwrite the
activations of the first with those of the second.

Weight gradients: the first contribution of a step overwrites the gradient's buffer, and the others are added
(`Weight`). Which of the two a kernel does is part of its graph, so microbatch 0 has a pair of its own.
Zeroing the buffers and always adding would need one pair less, but one more pass over the gradients. A replay
does not count contributions either. Weights therefore expect none in the step, and the runtime completes the
weights of a stage in their buckets after the stage's last backward. This starts the same reductions as
without graphs, but later: they do not overlap with that backward.

Inputs and outputs: tokens, targets, activations, the gradient of the output, and the loss scale are copied to
the pair's own tensors before a replay. Outputs are copied from them afterwards, because a message may still
read an output when the next microbatch of the slot begins.

Memory: graphs of one pool reuse each other's memory, which is correct only if they are replayed in the order
of their recording, or if the tensors of one are no longer needed when another is replayed. Each slot of a
stage has its own pool. Only the two pairs of slot 0 share one: they are never in flight together. Activations
therefore take the memory that the schedule plans. The temporary memory of a pass exists once for each slot,
and memory of the pools is not available to other computations, such as a validation. The tables that a graph
reads are kept with it.

When: the first step runs eagerly. It compiles and loads kernels and creates the handles of libraries, which
is not allowed during a recording. All graphs are recorded at the beginning of the second step, before its
first message: a recording waits for the device, and a device that waits for a peer's message could wait for
ever. If a later step has more microbatches (`train.rampup_batch_size`) and needs pairs that do not exist, all
are recorded again; the first step with a second microbatch runs eagerly, because it is the first to run the
kernels that add to gradients. Validation runs eagerly.

Recording: on one stream for all graphs. Autograd nodes from before are collected first, because the engine
makes the recorded stream wait for the stream on which a leaf's node was created, which ends the recording
with an error. Only the recording thread is restricted (`thread_local`), because other threads pin memory and
query events at any time. Nothing is garbage collected meanwhile, because unloading a module or destroying an
event is not allowed. Graphs are dropped all together: those of one stream share the workspace of cuBLAS.

Communication: none inside a graph. ZeRO-1's gathers are awaited before a replay, for all layers of the stage
at once. Weights, gradients and buckets must not move. `config.rules.graphs` rejects what a graph cannot
contain.
"""

from __future__ import annotations

import gc
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megalite.config.errors import ConfigError
from megalite.parallel.microbatch import Microbatch
from megalite.parallel.pipeline.runtime import Runtime
from megalite.parallel.pipeline.schedule import Action, ActionKind, Schedule
from megalite.parallel.weight import Weight
from megalite.system.clock import StepTiming
from megalite.system.messages import say

if TYPE_CHECKING:
    from megalite.parallel.pipeline.runtime import _Run


class Graphs(Protocol):
    """Interface for recording computations."""

    def begin(self) -> None:
        """Prepare for recording. Graphs that were recorded before are no longer used."""

    def record(self, compute: Callable[[], None], pool: Hashable) -> Callable[[], None]:
        """Record what `compute` does to tensors.

        It may or may not do it meanwhile: the values of the tensors that it writes are undefined afterwards.

        Args:
            pool: graphs of one pool share memory.

        Returns:
            a function that repeats the computation on the same tensors.
        """


class CudaGraphs:
    """Records CUDA graphs."""

    def __init__(self, device: torch.device | str):
        if torch.device(device).type != "cuda":
            reason = "requires a GPU, but this run does not use one"
            raise ConfigError(f"train.graphs = true {reason}. Set it to false.")
        self._stream = torch.cuda.Stream(device)
        self._pools: defaultdict[Hashable, Any] = defaultdict(torch.cuda.graph_pool_handle)

    def begin(self) -> None:
        self._pools.clear()
        gc.collect()
        torch.cuda.synchronize(self._stream.device)
        torch.cuda.empty_cache()  # the memory of the eager step, which graphs cannot use

    def record(self, compute: Callable[[], None], pool: Hashable) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with (
            _no_collection(),
            torch.cuda.graph(graph, self._pools[pool], self._stream, capture_error_mode="thread_local"),
        ):
            compute()
        return graph.replay


@contextmanager
def _no_collection() -> Iterator[None]:
    """Turn the garbage collector off."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def _named(stage: int) -> Iterator[None]:
    """Name the stage in an error of its recording."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise  # has a report of its own
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise RuntimeError(
            f"stage {stage} could not be recorded as a CUDA graph: {reason}. Set train.graphs to false."
        ) from error


class GraphSlot(NamedTuple):
    """Use of a pair of graphs.

    Attributes:
        number: which of the stage's microbatches in flight.
        first: whether for microbatch 0, whose gradients overwrite.
    """

    stage: int
    number: int
    first: bool


def in_flight(actions: Sequence[Action]) -> Counter[int]:
    """Return for each stage of a rank the largest number of microbatches between forward and backward."""
    now, most = Counter[int](), Counter[int]()
    for action in actions:
        if action.is_compute:
            now[action.stage] += 1 if action.kind is ActionKind.FORWARD else -1
            most[action.stage] = max(most[action.stage], now[action.stage])
    return most


class GraphedPasses:
    """The graphs of a stage's forward and backward, and the tensors that they read and write.

    Args:
        like: a microbatch with the shapes of all others.
        activations: memory for the stage's input, [seq (/tp), batch, hidden]; None for the first stage.

    Attributes:
        x: the stage's input: tokens [seq, batch], or activations.
        output: activations, or the loss of the last stage, a scalar.
        grad_output: memory for the gradient of `output`; None for the loss.
        statistics: by name, scalars.
        forward, backward: replay the graphs, once they are recorded.
    """

    forward: Callable[[], None]
    backward: Callable[[], None]
    output: Tensor
    statistics: Mapping[str, Tensor]

    def __init__(self, stage: Any, like: Microbatch, activations: Tensor | None, grad_output: Tensor | None):
        self._stage = stage
        own: dict[str, Any] = {
            name: value.clone() for name, value in vars(like).items() if isinstance(value, Tensor)
        }
        self._microbatch = replace(like, **own)
        self.x = self._microbatch.tokens if activations is None else activations.requires_grad_()
        self.grad_output = grad_output
        # computed here, not in the graph: positions are the same in all microbatches
        self._state = stage.forward_state(self._microbatch, step=0, training=True)

    def record_forward(self, graphs: Graphs, scale: Tensor, pool: Hashable) -> None:
        """Record the forward. The loss is multiplied by `scale`."""

        def compute() -> None:
            self._root, self.statistics = self._stage(self.x, self._microbatch, self._state, scale)

        self.forward = graphs.record(compute, pool)
        self.output = self._root.detach()

    def record_backward(self, graphs: Graphs, pool: Hashable) -> None:
        """Record the backward of the forward that was recorded."""
        self.backward = graphs.record(lambda: torch.autograd.backward(self._root, self.grad_output), pool)
        del self._root  # with the nodes of autograd, which belong to the stream of the recording

    def load(self, microbatch: Microbatch) -> None:
        """Copy a microbatch to the tensors that the graphs read."""
        for name, own in vars(self._microbatch).items():
            if isinstance(own, Tensor):
                own.copy_(getattr(microbatch, name))


class GraphedRuntime(Runtime):
    """Runtime that replays graphs from the second training step on. The schedule does not split the backward.

    Args:
        weights: the weights of the rank.

    Attributes:
        graphs: records them.
    """

    def __init__(self, *args: Any, weights: Iterable[Weight], **options: Any):
        super().__init__(*args, **options)
        self.graphs: Graphs = CudaGraphs(self.device)
        self._weights = [weight for weight in weights if weight.trainable]
        units = {unit for stage in self.stages.values() for unit in stage.units}
        assert units.issuperset(weight.spec.unit for weight in self._weights), "a stage completes each weight"
        accumulate_dtype = torch.promote_types(self.dtype, torch.float32)
        # a tensor, because a number would become part of the graphs
        self._scale = torch.zeros((), dtype=accumulate_dtype, device=self.device)
        self._recorded: dict[GraphSlot, GraphedPasses] = {}
        self._schedule: Schedule | None = None  # of this step
        self._slots = Counter[int]()  # number of its slots, by stage
        self._needed: dict[GraphSlot, None] = {}  # in the order of the step
        self._warm = 0  # the largest number of microbatches, up to 2, of a step that ran eagerly

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
        if training:
            loss_scale = self._scale.fill_(loss_scale)
            self._begin_step(schedule, microbatches[0])
        return super().run(
            schedule, microbatches, step=step, loss_scale=loss_scale, training=training, confirm=confirm
        )

    def _begin_step(self, schedule: Schedule, like: Microbatch) -> None:
        if schedule is not self._schedule:
            self._schedule, self._slots = schedule, in_flight(schedule.actions[self.mesh.pp.rank])
            numbers, stages = range(schedule.microbatches), sorted(self.stages)
            self._needed = dict.fromkeys(self._slot(stage, number) for number in numbers for stage in stages)
        if not self._needed.keys() <= self._recorded.keys():
            self._recorded.clear()
            if (warm := min(schedule.microbatches, 2)) > self._warm:
                self._warm = warm
                return  # this step runs eagerly
            self._record(list(self._needed), like, schedule.stages - 1)
        for weight in self._weights:
            weight.begin_step(0, 1)  # a replay counts no contributions

    def _slot(self, stage: int, microbatch: int) -> GraphSlot:
        return GraphSlot(stage, microbatch % self._slots[stage], microbatch == 0)

    def _record(self, slots: Sequence[GraphSlot], like: Microbatch, last: int) -> None:
        """Record the graphs of all slots, those of the first microbatch first.

        Gradients that are written meanwhile are overwritten by the step.
        """
        started = perf_counter()
        self.graphs.begin()
        self.weight_grads.begin_run(deferred=False)
        for stage in self.stages.values():
            self._await_weights(stage)
        for weight in self._weights:
            weight.begin_step(len(slots) + 1, 1)  # more than are recorded: none completes
        # As in a step: the last stage is the first to add to a gradient that it shares with the first stage.
        rounds: defaultdict[tuple[int, bool], list[GraphSlot]] = defaultdict(list)
        for slot in slots:
            rounds[slot.number, slot.first].append(slot)
        for together in rounds.values():
            for slot in together:
                self._recorded[slot] = self._passes_of(slot.stage, like, last)
                with torch.enable_grad(), _named(slot.stage):
                    self._recorded[slot].record_forward(self.graphs, self._scale, slot[:2])
            for slot in reversed(together):
                with _named(slot.stage):
                    self._recorded[slot].record_backward(self.graphs, slot[:2])
        if self.mesh.rank == 0:
            say(f"train.graphs: recorded {2 * len(slots)} graphs in {perf_counter() - started:.1f} s")

    def _passes_of(self, stage: int, like: Microbatch, last: int) -> GraphedPasses:
        def activations() -> Tensor:
            return torch.zeros(self.activation_shape, dtype=self.dtype, device=self.device)

        x, grad_output = activations() if stage else None, activations() if stage < last else None
        return GraphedPasses(self.stages[stage], like, x, grad_output)

    def _await_weights(self, stage: Any) -> None:
        for unit in stage.units:
            stage.gatherer.wait_for(unit)

    def _forward(self, run: _Run, action: Action) -> None:
        if not (run.training and self._recorded):
            super()._forward(run, action)
            return
        stage, microbatch = action.stage, action.microbatch
        passes = self._recorded[self._slot(stage, microbatch)]
        self._await_weights(self.stages[stage])
        passes.load(run.microbatches[microbatch])
        if stage > 0:
            with torch.no_grad():  # x is a leaf that requires a gradient
                passes.x.copy_(run.products.pop((stage - 1, microbatch)))
        passes.forward()
        for name, value in passes.statistics.items():
            run.statistics[name] = run.statistics.get(name, 0.0) + value.double()
        if passes.grad_output is not None:
            run.products[stage, microbatch] = passes.output.clone()

    def _backward(self, run: _Run, action: Action) -> None:
        if not self._recorded:
            super()._backward(run, action)
            return
        stage, microbatch = action.stage, action.microbatch
        passes = self._recorded[self._slot(stage, microbatch)]
        if passes.grad_output is not None:
            passes.grad_output.copy_(run.products.pop((stage + 1, microbatch)))
        passes.backward()
        if stage > 0:
            assert passes.x.grad is not None
            run.products[stage, microbatch] = passes.x.grad.clone()
        if microbatch == run.schedule.microbatches - 1:
            for weight in self._weights:
                if weight.spec.unit in self.stages[stage].units and weight.bucket is not None:
                    weight.bucket.complete(weight, 0)
