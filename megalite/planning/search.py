"""Finds the fastest layouts of a job that fit, among all legal ones, without evaluating most of them in detail (best-first search).

A heap orders layouts by a lower bound of their step time. The layout at the top is refined and pushed back: first the work divided by the
ranks; then the busiest rank of the real partition, with the filling and draining of its pipeline; then the same with ZeRO and offload;
then the simulated step; then memory, estimated for every rank, and every rule of a run. Plans therefore come out fastest first, and none
is missed.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import count
from typing import Literal

from megalite.build import plan
from megalite.config.recomputation import BUDGET, shown
from megalite.config.schema import Config, ConfigError
from megalite.parallel.pipeline.communication import with_communication
from megalite.parallel.pipeline.generator import SCHEDULES, chunks_of, placement
from megalite.parallel.pipeline.orders import RECIPES
from megalite.parallel.pipeline.orders import Shape as OrderShape
from megalite.parallel.pipeline.schedule import Schedule
from megalite.planning.activations import Activations
from megalite.planning.budget import decide
from megalite.planning.configuring import USABLE, broken_rule, configured
from megalite.planning.context import UNEVEN
from megalite.planning.domains import Parameters, domains
from megalite.planning.experts import worst_total
from megalite.planning.memory import RankMemory, estimate
from megalite.planning.pacing import schedule_of
from megalite.planning.step import Choice, Job, Stepper, StepTime, recomputed_share
from megalite.progress import Report, silent

BOUND = 0.97
"""Factor on the memory bound that keeps it below the estimate: it counts a layer's largest tensors as if they existed at once."""
RECOMPUTE = (BUDGET,)
"""A budget keeps all that fits, so no mode is faster; other modes are followed where the user fixes them."""
MOST_MICROBATCHES = 4096  # per step on one rank: layouts with more are skipped, as nobody would run them
SHORTEST_PART = 8192  # tokens of a row on a cp rank: below it, data parallelism or shorter pipelines use the same ranks better
AHEAD = 2  # a memory estimate follows this many times pp microbatches in flight: no rank holds more


@dataclass(frozen=True)
class Plan:
    """One layout with its predicted time and memory.

    Attributes:
        step: its predicted time.
        memory: the fullest rank's.
        fits: whether that fits on the device, and no rule forbids the layout.
    """

    choice: Choice
    step: StepTime
    memory: RankMemory
    fits: bool


class Level(IntEnum):
    """How far a layout in the heap has been refined; at equal times the most refined comes first."""

    TIMED = 0
    VARIED = 1
    PARTITIONED = 2
    DIVIDED = 3


Entry = tuple[float, Level, int, Choice, StepTime | None]
"""A heap entry: time, level, insertion order, layout, and its step once it is simulated."""


@dataclass(eq=False)
class Search:
    """Searches for plans of a job.

    Args:
        base: the configuration that all plans share.
        gpus: number of ranks; every plan uses all of them.
        fixed: the user's choices: field of Choice → value.
        wanted: the number of plans; they differ in more than their schedule.
    """

    job: Job
    base: Config
    gpus: int
    fixed: dict[str, int | str] = field(default_factory=dict)
    wanted: int = 10
    considered: int = 0  # number of legal layouts
    timed: int = 0  # of these, the number simulated
    rejected: Choice | None = None  # the first layout, so about the fastest, that does not fit
    progress: Report = silent

    def __post_init__(self) -> None:
        self.stepper = Stepper(self.job)
        self.room = USABLE * self.job.device.memory
        self._schedules: dict[tuple[object, ...], Schedule] = {}
        self._kept: dict[tuple[object, ...], tuple[float, float]] = {}
        self._too_large: dict[Choice, list[tuple[int, float]]] = {}  # micro-batch sizes and negated recomputed fractions that did not fit

    def plans(self) -> list[Plan]:
        """The fastest plans that fit, fastest first; at most `wanted`."""
        number = count()
        heap: list[Entry] = [(self.stepper.divided(core), Level.DIVIDED, next(number), core, None) for core in self.cores()]
        shards = Counter(core.data > 1 for _, _, _, core, _ in heap)  # all that the number of variants depends on
        self.considered = sum(count * len(list(self.variants(Choice(dp=1 + several)))) for several, count in shards.items())
        heapq.heapify(heap)
        found: dict[Choice, Plan] = {}
        looked_at = count(1)
        while heap and len(found) < self.wanted:
            self.progress("searching", next(looked_at), unit="layouts")
            time, level, _, choice, step = heapq.heappop(heap)
            if level is Level.DIVIDED:
                heapq.heappush(heap, (max(time, self.stepper.filled(choice)), Level.PARTITIONED, next(number), choice, None))
            elif level is Level.PARTITIONED:
                for variant in self.variants(choice):
                    if not self._has_no_room(variant):
                        heapq.heappush(heap, (max(time, self.stepper.least(variant)), Level.VARIED, next(number), variant, None))
            elif level is Level.VARIED:
                choice = self._within_budget(choice)
                if choice.recompute != BUDGET:
                    step = self.stepper.step(choice)
                    heapq.heappush(heap, (step.total, Level.TIMED, next(number), choice, step))
                    self.timed += 1
            elif not found.keys() & {family := _family(choice), _family(replace(choice, offload="none", offload_parameters=False))}:
                best = self._within_budget(choice, exact=True)
                plan = self.plan(best, step if best == choice else None)
                if plan.fits:
                    found[family] = plan
                else:
                    self.rejected = self.rejected or choice
        return list(found.values())

    def _within_budget(self, choice: Choice, exact: bool = False) -> Choice:
        """A choice of a budget with what it must recompute to fit: of those that are listed the best, of the others a good solution. As it
        is, and rejected, if it does not fit."""
        if shown(choice.recompute) != BUDGET:
            return choice
        try:
            config, device = self._run(choice)
            schedule = self._schedule(choice) if choice.zero < 3 else plan.schedule(config, self._followed(choice))
            found = decide(config, int(self.room), choice.gpus, device, self.job.device, schedule, exact)
            return replace(choice, recompute=found.recompute)
        except ConfigError:
            self._too_large.setdefault(self._states_of(choice), []).append(self._holds(choice))
            self.rejected = self.rejected or choice
            return choice

    @staticmethod
    def _holds(choice: Choice) -> tuple[int, float]:
        """Micro-batch size, and the negated share of the layers that are recomputed: at most all within a budget."""
        return choice.micro_batch_size, -1.0 if shown(choice.recompute) == BUDGET else -recomputed_share(choice.recompute)

    def _has_no_room(self, choice: Choice) -> bool:
        """Whether a choice cannot fit: its memory bound exceeds the room, or a choice that holds less did not fit."""
        key, kept = self._states_of(choice), self._holds(choice)
        smaller = any(all(a <= b for a, b in zip(other, kept, strict=True)) for other in self._too_large.get(key, ()))
        if not smaller and self.memory_bound(choice) <= self.room:
            return False
        self.rejected = self.rejected or choice
        return True

    @staticmethod
    def _states_of(choice: Choice) -> Choice:
        """The key of choices that differ only in their activations."""
        return replace(choice, micro_batch_size=0, recompute="")

    def plan(self, choice: Choice, step: StepTime | None = None) -> Plan:
        """The plan of any choice, with its time and memory; the choice may use fewer devices than the search."""
        fullest = max(self.memory(choice), key=lambda rank: rank.total)
        inside = fullest.total <= self.room and fullest.states.host <= USABLE * self.job.device.host_size
        if not inside:
            self._too_large.setdefault(self._states_of(choice), []).append(self._holds(choice))
        fits = inside and broken_rule(configured(self.base, choice), choice.gpus) is None
        return Plan(choice, step or self.stepper.step(choice), fullest, fits)

    # --- candidates ----------------------------------------------------------------------------------------------------------

    def cores(self) -> Iterator[Choice]:
        """Choices of everything except ZeRO and offload: legal sizes, schedules, micro-batch sizes, recomputation."""
        for pp in self._sizes("pp", _divisors(self.gpus)):
            for tp in self._sizes("tp", _divisors(self.gpus // pp)):
                if "tp" not in self.fixed and self._cuts_nodes(tp):
                    continue
                for cp, context, inner in self._contexts(tp):
                    dp, rest = divmod(self.gpus, tp * pp * cp)
                    if rest == 0 and dp in self._sizes("dp", [dp]):
                        for schedule, stages in self._schedules_of(pp):
                            frame = Choice(tp, pp, dp, schedule, stages, zero=0, cp=cp, context=context, context_inner=inner)
                            yield from self._microbatches(frame)

    def _contexts(self, tp: int) -> Iterator[tuple[int, str, int]]:
        """(cp, method, ranks that exchange heads within a ring): powers of two that leave every rank enough of a row, unless the user has
        fixed cp. If legal, ulysses is a candidate, which is balanced whatever the documents, and one method that takes any number of heads;
        a ring only if it is balanced, over all ranks or between the groups of a node."""
        longest = max(1, self.job.sequence_length // SHORTEST_PART)
        for cp in self._sizes("cp", [1 << power for power in range(longest.bit_length())]):
            if cp == 1:
                yield 1, "ulysses", 1
                continue
            inside = tp * cp <= self.job.device.per_node  # one collective there, hops beside attention across nodes
            gathers = inside or self.job.rows.imbalance("ring") > UNEVEN
            for context in self._names("context", ("ulysses", "gather" if gathers else "ring")):
                yield cp, context, 1
                inner = math.gcd(cp, self.job.device.per_node // tp)
                if context == "ring" and 1 < inner < cp:
                    yield cp, context, inner

    def _cuts_nodes(self, size: int) -> bool:
        """Whether some groups of consecutive ranks would span nodes unevenly, so that every layer waits for the network."""
        node = self.job.device.per_node
        return self.gpus > node and node % size != 0 and size % node != 0

    def variants(self, core: Choice) -> Iterator[Choice]:
        """A core with each ZeRO stage and offload. On a CPU, offloading to CPU memory is left out."""
        for offload in self._names("offload", ("none", "disk") if self.job.device.cpu else ("none", "cpu", "disk")):
            for zero in self._sizes("zero", (1, 0, 2, 3) if core.data > 1 else (1,)):
                yield replace(core, zero=zero, offload=offload)
            if offload != "none" and self.fixed.get("zero", 3) == 3:
                yield replace(core, zero=3, offload=offload, offload_parameters=True)

    def _sizes(self, name: str, otherwise: Sequence[int]) -> Sequence[int]:
        """The value that the user has fixed, or else all candidates."""
        return [int(self.fixed[name])] if name in self.fixed else otherwise

    def _names(self, name: str, otherwise: Sequence[str]) -> Sequence[str]:
        return [str(self.fixed[name])] if name in self.fixed else otherwise

    def _schedules_of(self, pp: int) -> Iterator[tuple[str, int]]:
        """(schedule, stages per rank) pairs that give each stage at least one layer; on one rank only 1f1b."""
        for name in self._names("schedule", SCHEDULES if pp > 1 else ("1f1b",)):
            free = RECIPES[name].chunks is None
            for stages in self._sizes("virtual_stages", self._even_stages(pp) if free else (chunks_of(name),)):
                if (free or stages == chunks_of(name)) and pp * stages <= self.job.model.num_hidden_layers:
                    yield name, stages

    def _even_stages(self, pp: int) -> list[int]:
        """Numbers of virtual stages that split evenly the layers, or the layers plus embedding and head as one layer each; else the two
        smallest."""
        layers = self.job.model.num_hidden_layers
        most = range(2, layers // pp + 1)
        return [stages for stages in most if layers % (pp * stages) == 0 or (layers + 2) % (pp * stages) == 0] or list(most[:2])

    def _microbatches(self, frame: Choice) -> Iterator[Choice]:
        each, rest = divmod(self.job.global_batch_size, frame.dp)
        frame = replace(frame, sequence_parallel=frame.tp > 1 and (frame.cp > 1 or self.job.sequence_length % frame.tp == 0))
        if rest or broken_rule(configured(self.base, frame), self.gpus) is not None:
            return
        sizes = [size for size in _divisors(each) if size & (size - 1) == 0 or size == each]
        for size in self._sizes("micro_batch_size", sizes):
            if each % size or each // size > MOST_MICROBATCHES:
                continue
            for recompute in self._names("recompute", RECOMPUTE):
                for ep, dispatch in self._expert_groups(frame):
                    yield replace(frame, micro_batch_size=size, recompute=recompute, ep=ep, expert_dispatch=dispatch)

    def _expert_groups(self, frame: Choice) -> Iterator[tuple[int, str]]:
        """(ep, dispatcher) pairs: sizes that divide the experts and a stage's ranks and, unless the user has fixed ep, leave no group cut
        by nodes. Gathering all rows is a candidate where it moves no more bytes than sending each to its experts."""
        model, ranks = self.job.model, frame.data * frame.tp
        for ep in self._sizes("ep", _divisors(model.num_experts or 1)):
            if (model.num_experts or 1) % ep or ranks % ep or ("ep" not in self.fixed and self._cuts_nodes(ep)):
                continue
            gathers = 1 < ep <= model.num_experts_per_tok
            for dispatch in self._names("expert_dispatch", ("all_to_all", "all_gather") if gathers else ("all_to_all",)):
                yield ep, dispatch

    # --- memory --------------------------------------------------------------------------------------------------------------

    def memory(self, choice: Choice) -> list[RankMemory]:
        """The memory of every pipeline rank. What is in flight stops growing after a few microbatches, so only those are followed."""
        if choice.recompute == BUDGET:  # the least that it may need
            choice = replace(choice, recompute="full")
        config, device = self._run(choice)
        found = estimate(config, choice.gpus, device, self._schedule(choice))
        if choice.zero < 3 or max(rank.total for rank in found) > self.room:
            return found
        return estimate(config, choice.gpus, device, plan.schedule(config, self._followed(choice)))  # with gathered weights

    def imbalance(self, choice: Choice) -> int:
        """Bytes that the fullest rank needs in addition if all tokens choose the experts of one rank, in all mixtures and microbatches."""
        return worst_total(self._run(choice)[0], self._schedule(choice))

    def _run(self, choice: Choice) -> tuple[Config, Literal["cpu", "cuda"]]:
        """The configuration of a choice, and what it runs on."""
        config = configured(self.base, choice)
        config.parallel.partition = self.stepper.layers_of_stages(choice.pp * choice.virtual_stages)  # already known, and expensive to find
        return config, "cpu" if self.job.device.cpu else "cuda"

    def _followed(self, choice: Choice) -> int:
        """The number of microbatches after which a rank's memory no longer grows."""
        microbatches = self.job.microbatches(choice)
        return microbatches if choice.schedule == "gpipe" else min(microbatches, microbatches % choice.pp + (AHEAD + 1) * choice.pp)

    def _schedule(self, choice: Choice) -> Schedule:
        key = choice.schedule, choice.pp, self._followed(choice), choice.asked_stages
        if key not in self._schedules:
            self._schedules[key] = with_communication(schedule_of(*key))
        return self._schedules[key]

    def memory_bound(self, choice: Choice) -> float:
        """An approximate lower bound of the first pipeline rank's memory: its weights, gradients and optimizer states, the activations of
        its layers times the number of microbatches that its schedule holds, and the workspace of a layer's backward."""
        _, sizes, _ = self.stepper.stages(self.stepper.without_data(choice))
        own = [stage for stage, rank in enumerate(placement(choice.schedule, choice.pp, choice.asked_stages)) if rank == 0]
        shape = OrderShape(choice.pp, self.job.microbatches(choice), choice.virtual_stages)
        held = min(RECIPES[choice.schedule].activations(0, shape), shape.microbatches * shape.chunks)
        layers = sum(self.stepper.layers_of_stages(len(sizes))[stage] for stage in own)
        size = self.stepper.held(choice, sizes)[0]
        saved, beside = self._layer_bytes(choice)
        filling = 8.0 if choice.zero >= 2 and choice.data > 1 else 0.0  # two layers' gradients, filling and reduced
        buckets = size.trained / layers * filling
        return BOUND * (self._state_bytes(choice, size) + buckets + held * layers / len(own) * saved + beside)

    def _state_bytes(self, choice: Choice, held: Parameters) -> float:
        """Bytes on the device: weights, and of those that are trained gradients, master weights and moments, sharded by the choice's ZeRO
        stage."""
        size = self.stepper.operations.size
        master, moments = 0 if size == 4 else 4, 8 if self.job.muon is None else 4
        total = 0.0
        for domain in domains(self.job.device, choice, held):
            shared = [domain.ranks.size if choice.zero >= level else 1 for level in (3, 2, 1)]
            weights = 0.0 if choice.offload_parameters else size / shared[0]
            state = (moments + master) / shared[2] if choice.offload == "none" else 0.0
            total += domain.stored * weights + domain.trained * (max(size, 4) / shared[1] + state)
        return total

    def _layer_bytes(self, choice: Choice) -> tuple[float, float]:
        """Bytes a layer keeps per microbatch, averaged over recomputed and other layers, and bytes its backward needs in addition."""
        context, experts = (choice.cp, choice.context, choice.context_inner), (choice.ep, choice.expert_dispatch)
        layout = choice.tp, choice.sequence_parallel, *context, *experts
        if choice.recompute == BUDGET:
            choice = replace(choice, recompute="full")
        key = *layout, choice.micro_batch_size, choice.recompute, choice.splits
        if key not in self._kept:
            config = configured(self.base, replace(choice, pp=1, schedule="1f1b", virtual_stages=1))
            activations = Activations(config, "cpu" if self.job.device.cpu else "cuda", choice.splits, config.lora)
            layers = [activations.layer(index) for index in range(min(4, self.job.model.num_hidden_layers))]
            saved = sum(layer.saved for layer in layers) / len(layers)
            self._kept[key] = saved, min(layer.recomputed + layer.workspace for layer in layers)
        return self._kept[key]


def _family(choice: Choice) -> Choice:
    """The key by which listed plans differ: plans that differ only in their schedule, their method of context parallelism or their
    dispatcher count as one, as do those that offload needlessly."""
    plain = replace(choice, schedule="", virtual_stages=0, context="", context_inner=1, expert_dispatch="")
    return replace(plain, recompute=shown(choice.recompute))


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
