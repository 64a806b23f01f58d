"""Finds the fastest layouts of a job that fit, among all legal ones, without evaluating most of them in
detail (best-first search).

A heap orders layouts by a lower bound of their step time. The layout at the top is refined and pushed back:
first the work divided by the ranks, the same for all schedules; then the busiest rank of the real partition,
with the filling and draining of its pipeline; then, with each ZeRO and offload that memory allows, one rank
by itself; then all ranks, with what at least must be recomputed for lack of memory (`bounds`); then with what
makes a few ranks fit, and all; then the simulated step; then the same with the best of what it may recompute;
then memory, estimated for every rank, and every rule of a run. Plans therefore come out fastest first, and
none is missed.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import lru_cache
from itertools import count
from typing import Literal

from megalite.assembly import plan
from megalite.config.dims import fixed_stages
from megalite.config.recompute import BUDGET, shown
from megalite.config.schema import Config
from megalite.model.cost.records import Share
from megalite.model.kinds import dispatch_of
from megalite.parallel.pipeline.gather_actions import with_gathering
from megalite.parallel.pipeline.generator import SCHEDULES, chunks_of
from megalite.parallel.pipeline.schedule import Schedule, Unit
from megalite.parallel.pipeline.send_recv_actions import with_communication
from megalite.parallel.sharding.buckets import BucketLayout
from megalite.planner.budget.decision import BudgetProblem, problem_of, recompute_within
from megalite.planner.cost.context_exchange import UNEVEN
from megalite.planner.cost.expert_exchange import worst_total
from megalite.planner.cost.state_exchange import recurrences
from megalite.planner.memory.estimate import RankMemory, estimate
from megalite.planner.search.bounds import LayoutBounds, followed
from megalite.planner.search.run_config import USABLE, apply_layout, first_broken_rule
from megalite.planner.time.schedule_time import PipelineShape, schedule_of
from megalite.planner.time.step import LayoutChoice, PlannedJob, Stepper, StepTime, recomputed_share
from megalite.system.progress import Report, silent

RECOMPUTE = (BUDGET,)
"""A budget keeps all that fits, so no mode is faster; other modes are followed where the user fixes them."""
MOST_MICROBATCHES = 4096  # per step on one rank: layouts with more are skipped, as nobody would run them
# tokens of a row on a cp rank: below it, data parallelism or shorter pipelines use the same ranks better
SHORTEST_PART = 8192


@dataclass(frozen=True)
class Plan:
    """A layout with its predicted time and memory.

    Attributes:
        step: its predicted time.
        memory: the fullest rank's.
        fits: whether that fits on the device, and no rule forbids the layout.
    """

    choice: LayoutChoice
    step: StepTime
    memory: RankMemory
    fits: bool


class Refinement(IntEnum):
    """How far a layout in the heap has been refined; at equal times the most refined comes first."""

    DECIDED = 0
    TIMED = 1  # simulated
    FITTED = 2  # with a good choice of what all ranks recompute
    BEGUN = 3  # the same for a few ranks
    BOUNDED = 4  # by all ranks
    VARIED = 5  # with ZeRO and offload, bounded by one rank
    PARTITIONED = 6  # with a schedule
    DIVIDED = 7


Entry = tuple[float, Refinement, int, LayoutChoice, StepTime | None]
"""A heap entry: time, level, insertion order, layout, and its step once it is simulated."""


@dataclass(eq=False)
class Search:
    """Search for the fastest plans of a job.

    Args:
        base: the configuration that all plans share.
        gpus: number of ranks; every plan uses all of them.
        fixed: the user's choices: field of Choice → value.
        wanted: the number of plans; they differ in more than their schedule.
    """

    job: PlannedJob
    base: Config
    gpus: int
    fixed: dict[str, int | str] = field(default_factory=dict)
    wanted: int = 10
    considered: int = 0  # number of legal layouts
    timed: int = 0  # of these, the number simulated
    rejected: LayoutChoice | None = None  # the first layout, so about the fastest, that does not fit
    progress: Report = silent

    def __post_init__(self) -> None:
        self.stepper = Stepper(self.job)
        self.bounds = LayoutBounds(self.base, self.stepper)
        self.room = USABLE * self.job.device.memory
        # recurrences choose by the bytes that they send where attention gathers
        self._gather = "auto" if recurrences(self.job.model, Share(1)) else "gather"
        self._communicating = lru_cache(maxsize=None)(_communicating)
        self._gathering = lru_cache(maxsize=8)(self._with_gathers)
        self.plans_by_family: dict[LayoutChoice, Plan] = {}
        self._problems: dict[LayoutChoice, BudgetProblem] = {}
        self._buckets: dict[tuple[int, int, bool, int], dict[Hashable, list[BucketLayout]]] = {}
        self._gathered: dict[LayoutChoice, tuple[tuple[Unit, ...], ...]] = {}
        self._legal: dict[LayoutChoice, list[tuple[str, int]]] = {}
        # micro-batch sizes and negated recomputed fractions that did not fit
        self._too_large: dict[LayoutChoice, list[tuple[int, float]]] = {}

    def plans(self) -> list[Plan]:
        """Return the fastest plans that fit, fastest first; at most `wanted`.

        Each is in `plans_by_family` as soon as it is found.
        """
        number = count()
        heap: list[Entry] = []
        for layout in self.layouts():
            if not (ways := self._ways(layout)):
                continue
            self.considered += len(self._schedules(layout)) * len(ways)
            heap.append((self.stepper.divided(layout), Refinement.DIVIDED, next(number), layout, None))
        heapq.heapify(heap)
        plans = self.plans_by_family
        while heap and len(plans) < self.wanted:
            self.progress("searching", len(plans), self.wanted, "plans")
            time, level, _, choice, step = heapq.heappop(heap)
            if level <= Refinement.VARIED and plans.keys() & _families(choice):
                continue  # a faster one is among the plans
            if level is not Refinement.DECIDED:
                for new_time, new_level, variant, timed in self._refined(time, level, choice):
                    heapq.heappush(heap, (new_time, new_level, next(number), variant, timed))
                continue
            plan = self.plan(choice, step)
            if plan.fits:
                plans[_family(choice)] = plan
            else:
                self.rejected = self.rejected or choice
        return list(plans.values())

    def until_interrupted(self) -> tuple[list[Plan], bool]:
        """Return the plans, and whether the search was completed.

        After Ctrl-C the plans are those found so far, which are the fastest.
        """
        try:
            return self.plans(), True
        except KeyboardInterrupt:
            return list(self.plans_by_family.values()), False

    def _refined(
        self, time: float, level: Refinement, choice: LayoutChoice
    ) -> Iterator[tuple[float, Refinement, LayoutChoice, StepTime | None]]:
        """Yield the entries that replace an entry that is not decided yet."""
        if level is Refinement.DIVIDED:
            for core in self.scheduled(choice):
                yield max(time, self.stepper.filled(core)), Refinement.PARTITIONED, core, None
        elif level is Refinement.PARTITIONED:
            variants = list(self.variants(choice))
            roomy = self.bounds.roomy(variants, self.room)
            self.rejected = self.rejected or next(
                (variant for variant in variants if variant not in roomy), None
            )
            for variant in roomy:
                yield max(time, self.bounds.alone(variant)), Refinement.VARIED, variant, None
        elif level is Refinement.FITTED:
            self.timed += 1
            step = self.stepper.step(choice)
            yield step.total, Refinement.TIMED, choice, step
        elif (
            level is Refinement.TIMED
        ):  # the best of what it may recompute, with messages, may take a little more or less time
            best = self._within_budget(choice, exact=True)
            step = self.stepper.step(best)
            yield step.total, Refinement.DECIDED, best, step
        elif self._did_not_fit(choice):
            self.rejected = self.rejected or choice
        elif level is Refinement.VARIED:
            again = self.bounds.recomputation(choice, self.room)
            if math.inf in again.values():
                self.rejected = self.rejected or choice
            else:
                yield max(time, self.bounds.time(choice, again)), Refinement.BOUNDED, choice, None
        else:
            yield from self._fitted(time, level, choice)

    def _fitted(
        self, time: float, level: Refinement, choice: LayoutChoice
    ) -> Iterator[tuple[float, Refinement, LayoutChoice, StepTime | None]]:
        """Return a choice with the recomputation that it requires to fit.

        It is computed first on the few ranks that require most, because these are usually too slow already.
        """
        ends = self.bounds.ranks(choice) if level is Refinement.BOUNDED else None
        fitted = self._within_budget(choice, ranks=ends)
        if fitted.recompute == BUDGET:
            return
        bound = max(time, self.bounds.time(fitted))
        yield (
            (bound, Refinement.FITTED, fitted, None)
            if ends is None or len(ends) == choice.pp
            else (bound, Refinement.BEGUN, choice, None)
        )

    def _within_budget(
        self, choice: LayoutChoice, exact: bool = False, ranks: Iterable[int] | None = None
    ) -> LayoutChoice:
        """Return a choice of a budget with the recomputation that it requires to fit.

        The recomputation is on all pipeline ranks or on some of them. Listed plans get the best solution,
        others a good one. A choice that does not fit is returned unchanged and rejected.
        """
        if shown(choice.recompute) != BUDGET:
            return choice
        # a good solution leaves out messages, which take little memory and long to place
        problem = self._problem(choice, messages=exact)
        recompute = recompute_within(problem, int(self.room), exact, ranks)
        if recompute is not None:
            return replace(choice, recompute=recompute)
        self._too_large.setdefault(self._states_of(choice), []).append(self._holds(choice))
        self.rejected = self.rejected or choice
        return choice

    def _problem(self, choice: LayoutChoice, messages: bool) -> BudgetProblem:
        """Return the recomputation problem of a choice.

        Choices that differ only in ZeRO and offload share everything except the available bytes.
        """
        key = replace(choice, zero=0, dp_shard=None, offload="none", offload_parameters=False, recompute="")
        config, device = self._run(choice)
        schedule = self._carried_out(choice, config, messages)
        if key not in self._problems:
            buckets = self._buckets.setdefault(
                (choice.tp, choice.ep, choice.sequence_parallel, choice.data), {}
            )
            self._problems[key] = problem_of(config, choice.gpus, device, self.job.device, schedule, buckets)
        return self._problems[key].stored(config, schedule)

    @staticmethod
    def _holds(choice: LayoutChoice) -> tuple[int, float]:
        """Return the micro-batch size and the negated fraction of recomputed layers.

        A budget counts as recomputing all of them.
        """
        return choice.micro_batch_size, -1.0 if shown(choice.recompute) == BUDGET else -recomputed_share(
            choice.recompute
        )

    def _did_not_fit(self, choice: LayoutChoice) -> bool:
        """Return whether a choice that holds no more did not fit."""
        kept, others = self._holds(choice), self._too_large.get(self._states_of(choice), ())
        return any(all(a <= b for a, b in zip(other, kept, strict=True)) for other in others)

    @staticmethod
    def _states_of(choice: LayoutChoice) -> LayoutChoice:
        """Return the key of choices that differ only in their activations."""
        return replace(choice, micro_batch_size=0, recompute="")

    def plan(self, choice: LayoutChoice, step: StepTime | None = None) -> Plan:
        """Return the plan of a choice, with its time and memory.

        The choice may use fewer devices than the search.
        """
        fullest = max(self.memory(choice), key=lambda rank: rank.total)
        inside = fullest.total <= self.room and fullest.host <= USABLE * self.job.device.host_size
        if not inside:
            self._too_large.setdefault(self._states_of(choice), []).append(self._holds(choice))
        fits = inside and first_broken_rule(apply_layout(self.base, choice), choice.gpus) is None
        return Plan(choice, step or self.stepper.step(choice), fullest, fits)

    # --- candidates
    # --------------------------------------------------------------------------------------------------------

    def cores(self) -> Iterator[LayoutChoice]:
        """Yield choices of everything except ZeRO and offload."""
        for layout in self.layouts():
            yield from self.scheduled(layout)

    def layouts(self) -> Iterator[LayoutChoice]:
        """Yield choices of everything except schedule, ZeRO and offload.

        These are legal sizes, micro-batch sizes and recomputation.
        """
        sizes = self._sizes("pp", _divisors(self.gpus))
        for done, pp in enumerate(sizes):
            self.progress("listing the legal layouts", done, len(sizes), "pipeline sizes")
            for tp in self._sizes("tp", _divisors(self.gpus // pp)):
                if "tp" not in self.fixed and self._cuts_nodes(tp):
                    continue
                for context in self._contexts(tp):
                    dp, rest = divmod(self.gpus, tp * pp * context.cp)
                    if rest == 0 and dp in self._sizes("dp", [dp]):
                        even = context.cp > 1 or self.job.sequence_length % tp == 0
                        yield from self._microbatches(
                            replace(context, tp=tp, pp=pp, dp=dp, zero=0, sequence_parallel=tp > 1 and even)
                        )

    def scheduled(self, layout: LayoutChoice) -> Iterator[LayoutChoice]:
        """Yield a layout with each legal schedule."""
        return (
            replace(layout, schedule=schedule, virtual_stages=stages)
            for schedule, stages in self._schedules(layout)
        )

    def _schedules(self, layout: LayoutChoice) -> list[tuple[str, int]]:
        """Return the (schedule, stages per rank) pairs with which a layout breaks no rule.

        Its micro-batch size and experts do not matter.
        """
        frame = replace(layout, micro_batch_size=1, recompute="none", ep=1, expert_dispatch="all_to_all")
        if frame not in self._legal:
            each = (
                (pair, replace(frame, schedule=pair[0], virtual_stages=pair[1]))
                for pair in self._schedules_of(frame.pp)
            )
            self._legal[frame] = [
                pair
                for pair, core in each
                if first_broken_rule(apply_layout(self.base, core), self.gpus) is None
            ]
        return self._legal[frame]

    def _contexts(self, tp: int) -> Iterator[LayoutChoice]:
        """Return the choices of context parallelism.

        These are powers of two that leave every rank enough of a row, unless the user has fixed cp. If legal,
        ulysses is a candidate, because it is balanced for any documents, and so is one method that supports
        any number of heads. A ring is a candidate only if it is balanced, over all ranks or between the
        groups of a node. Rows with documents have balanced parts.
        """
        longest, rows = max(1, self.job.sequence_length // SHORTEST_PART), self.job.rows
        (parts,) = self._names("context_parts", ("balanced" if rows.documents else "zigzag",))
        for cp in self._sizes("cp", [1 << power for power in range(longest.bit_length())]):
            if cp == 1:
                yield LayoutChoice()
                continue
            # one collective there, hops beside attention across nodes
            inside = tp * cp <= self.job.device.per_node
            gathers = inside or rows.imbalance("ring", parts) > UNEVEN
            for context in self._names("context", ("ulysses", self._gather if gathers else "ring")):
                choice = LayoutChoice(
                    cp=cp, context=context, context_parts="zigzag" if context == "ulysses" else parts
                )
                yield choice
                inner = math.gcd(cp, self.job.device.per_node // tp)
                if context == "ring" and 1 < inner < cp:
                    yield replace(choice, context_inner=inner)

    def _cuts_nodes(self, size: int) -> bool:
        """Return whether some groups of consecutive ranks would span nodes unevenly.

        Every layer would then wait for the network.
        """
        node = self.job.device.per_node
        return self.gpus > node and node % size != 0 and size % node != 0

    def variants(self, core: LayoutChoice) -> Iterator[LayoutChoice]:
        """Yield a core with each ZeRO stage and offload. CPUs have no offload to CPU memory."""
        return (
            replace(core, zero=zero, dp_shard=shard, offload=offload, offload_parameters=weights)
            for zero, shard, offload, weights in self._ways(core)
        )

    def _ways(self, layout: LayoutChoice) -> list[tuple[int, int | None, str, bool]]:
        """Return zero, dp_shard, offload and offload_parameters of each variant of a layout."""
        shards: Sequence[int | None] = self._shards(layout)
        unsharded: Sequence[int | None] = [] if "dp_shard" in self.fixed else [None]
        ways: list[tuple[int, int | None, str, bool]] = []
        for offload in self._names(
            "offload", ("none", "disk") if self.job.device.cpu else ("none", "cpu", "disk")
        ):
            own = shards if offload == "none" else shards[:1]
            for zero in self._sizes("zero", (1, 0, 2, 3) if layout.data > 1 else (1,)):
                ways += [(zero, shard, offload, False) for shard in (own if zero else unsharded)]
            if offload != "none" and self.fixed.get("zero", 3) == 3:
                ways += [(3, shard, offload, True) for shard in own]
        return ways

    def _shards(self, core: LayoutChoice) -> Sequence[int | None]:
        """Return the numbers of data ranks over which ZeRO may shard.

        These are all ranks (None) and, on several nodes, the ranks of one node, with shards replicated over
        the nodes. An expert group lies inside a shard group.
        """
        local = int(self.fixed.get("dp_shard", self.job.device.per_node // core.tp))
        whole = local > 0 and core.data % local == 0 and local * core.tp % core.ep == 0
        if "dp_shard" in self.fixed:
            return [local] if whole else []
        return [None, local] if whole and 1 < local < core.data else [None]

    def _sizes(self, name: str, otherwise: Sequence[int]) -> Sequence[int]:
        """Return the value that the user has fixed, or else all candidates."""
        return [int(self.fixed[name])] if name in self.fixed else otherwise

    def _names(self, name: str, otherwise: Sequence[str]) -> Sequence[str]:
        return [str(self.fixed[name])] if name in self.fixed else otherwise

    def _schedules_of(self, pp: int) -> Iterator[tuple[str, int]]:
        """Yield (schedule, stages per rank) pairs that give each stage at least one layer.

        On one rank the schedule is 1f1b.
        """
        for name in self._names("schedule", SCHEDULES if pp > 1 else ("1f1b",)):
            free = fixed_stages(name) is None
            for stages in self._sizes(
                "virtual_stages", self._even_stages(pp) if free else (chunks_of(name),)
            ):
                if (free or stages == chunks_of(name)) and pp * stages <= self.job.model.num_hidden_layers:
                    yield name, stages

    def _even_stages(self, pp: int) -> list[int]:
        """Return numbers of virtual stages that split the layers evenly, or else the two smallest.

        The embedding and the head may also count as one layer each.
        """
        layers = self.job.model.num_hidden_layers
        most = range(2, layers // pp + 1)
        return [
            stages for stages in most if layers % (pp * stages) == 0 or (layers + 2) % (pp * stages) == 0
        ] or list(most[:2])

    def _microbatches(self, frame: LayoutChoice) -> Iterator[LayoutChoice]:
        each, rest = divmod(self.job.global_batch_size, frame.dp)
        if rest or not self._schedules(frame):
            return
        sizes = [size for size in _divisors(each) if size & (size - 1) == 0 or size == each]
        for size in self._sizes("micro_batch_size", sizes):
            if each % size or each // size > MOST_MICROBATCHES:
                continue
            for recompute in self._names("recompute", RECOMPUTE):
                for ep, dispatch in self._expert_groups(frame):
                    yield replace(
                        frame, micro_batch_size=size, recompute=recompute, ep=ep, expert_dispatch=dispatch
                    )

    def _expert_groups(self, frame: LayoutChoice) -> Iterator[tuple[int, str]]:
        """Return the candidate pairs (ep, dispatcher).

        Sizes divide the experts and the ranks of a stage and, unless the user has fixed ep, keep every group
        within a node or over whole nodes. Gathering all rows is a candidate if it moves no more bytes than
        sending each row to its experts.
        """
        split, ranks = dispatch_of(self.job.model), frame.data * frame.tp
        experts, choices = (1, 0) if split is None else (split.experts, split.choices)
        for ep in self._sizes("ep", _divisors(experts)):
            if experts % ep or ranks % ep or ("ep" not in self.fixed and self._cuts_nodes(ep)):
                continue
            gathers = 1 < ep <= choices
            for dispatch in self._names(
                "expert_dispatch", ("all_to_all", "all_gather") if gathers else ("all_to_all",)
            ):
                yield ep, dispatch

    # --- memory
    # --------------------------------------------------------------------------------------------------------

    def memory(self, choice: LayoutChoice) -> list[RankMemory]:
        """Return the memory of every pipeline rank.

        Memory stops growing after a few microbatches, so only those are simulated.
        """
        if choice.recompute == BUDGET:  # the least that it may need
            choice = replace(choice, recompute="full")
        config, device = self._run(choice)
        ranks = estimate(config, choice.gpus, device, self._schedule(choice))
        if choice.zero < 3 or max(rank.total for rank in ranks) > self.room:
            return ranks
        # with gathered weights
        return estimate(config, choice.gpus, device, self._carried_out(choice, config))

    def imbalance(self, choice: LayoutChoice) -> int:
        """Return the additional bytes on the fullest rank if all tokens choose the experts of one rank.

        It is assumed for all mixtures and microbatches.
        """
        return worst_total(self._run(choice)[0], self._schedule(choice))

    def _run(self, choice: LayoutChoice) -> tuple[Config, Literal["cpu", "cuda"]]:
        """Return the configuration of a choice, and its device type."""
        config = apply_layout(self.base, choice)
        # already known, and expensive to find
        config.parallel.partition = self.stepper.layers_of_stages(choice.dims.stages)
        return config, "cpu" if self.job.device.cpu else "cuda"

    def _carried_out(self, choice: LayoutChoice, config: Config, messages: bool = True) -> Schedule:
        """Return the schedule of a choice with its messages, and the gathers and reshards of ZeRO-3."""
        stored = replace(choice, micro_batch_size=0, recompute="")
        if stored not in self._gathered:
            self._gathered[stored] = plan.gathered_units(config)
        units, key = self._gathered[stored], followed(choice, self.job.microbatches(choice))
        if units:
            return self._gathering(key, units, config.parallel.zero3_reshard == "step", messages)
        return self._schedule(choice) if messages else schedule_of(key)

    def _with_gathers(
        self, key: PipelineShape, units: tuple[tuple[Unit, ...], ...], keep: bool, messages: bool
    ) -> Schedule:
        return with_gathering(self._communicating(key) if messages else schedule_of(key), units, keep)

    def _schedule(self, choice: LayoutChoice) -> Schedule:
        return self._communicating(followed(choice, self.job.microbatches(choice)))


def _communicating(pipeline: PipelineShape) -> Schedule:
    return with_communication(schedule_of(pipeline))


def _family(choice: LayoutChoice) -> LayoutChoice:
    """Return the key that distinguishes listed plans.

    Plans that differ only in their schedule, context parallelism method, dispatcher or required recomputation
    count as one plan, and so do plans that offload needlessly.
    """
    plain = replace(choice, context="", context_inner=1, context_parts="", expert_dispatch="")
    return replace(plain, schedule="", virtual_stages=0, recompute="")


def _families(choice: LayoutChoice) -> set[LayoutChoice]:
    """Return the families of a choice, and of the same choice without offload."""
    return {_family(choice), _family(replace(choice, offload="none", offload_parameters=False))}


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
