"""Lower bounds of what a layout needs on a few of its pipeline ranks, before it is looked at in detail:
memory, and the time to recompute what does not fit. Part of the search, which rules out or puts off layouts
by them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple

from megalite.config.recompute import BUDGET, shown
from megalite.config.schema import Config
from megalite.model.cost.recomputed import groups
from megalite.model.unit_numbers import head_unit
from megalite.parallel.pipeline.generator import placement
from megalite.parallel.pipeline.orders import RECIPES
from megalite.parallel.pipeline.orders import ScheduleShape as OrderShape
from megalite.parallel.pipeline.schedule import ActionKind as Pass
from megalite.planner.budget.integer_program import ItemGroup, Option, Relaxation
from megalite.planner.cost.operations import PassTimes
from megalite.planner.cost.recomputed_time import of_operation
from megalite.planner.memory.activations import Activations
from megalite.planner.memory.domains import Parameters, shares
from megalite.planner.memory.peak_passes import fullest
from megalite.planner.memory.states import Widths
from megalite.planner.search.run_config import apply_layout
from megalite.planner.time.schedule_time import PipelineShape, schedule_of
from megalite.planner.time.step import LayoutChoice, Stepper

BOUND = 0.97
"""Factor on the memory bound that keeps it below the estimate: it counts a layer's largest tensors as if they
existed at once."""
AHEAD = 2  # memory is followed for this many times pp microbatches in flight: no rank holds more


class _StageBytes(NamedTuple):
    """Bytes of a stage and one microbatch.

    Attributes:
        saved: kept until its backward.
        stash: kept until its weight pass.
        largest: at most during its backward, which goes through its layers in reverse.
    """

    saved: float
    stash: float
    largest: float


class _Peak(NamedTuple):
    """Largest load of a rank.

    Attributes:
        bytes: its size.
        held: for each stage, the microbatches whose tensors are kept for backward.
    """

    bytes: float
    held: tuple[int, ...]


class _Rank(NamedTuple):
    """A pipeline rank: its number, its parameters, those of its layers, and the layers of its stages."""

    number: int
    parameters: Parameters
    of_layers: Parameters
    stages: tuple[tuple[int, ...], ...]

    @property
    def layers(self) -> int:
        return sum(map(len, self.stages))


class LayoutBounds:
    """Lower bounds for the layouts of one job on a few pipeline ranks.

    These are the first, the last, and the one with the most parameters.

    Args:
        base: the configuration that all choices share.
    """

    def __init__(self, base: Config, stepper: Stepper):
        self.base, self.stepper, self.job = base, stepper, stepper.job
        self._gradient = Widths.of(base).gradient
        self._units: dict[tuple[object, ...], Activations] = {}
        self._options: dict[tuple[object, ...], tuple[tuple[Option, ...], ...] | None] = {}
        self._known: dict[tuple[object, ...], list[_Rank]] = {}
        self._peaks: dict[tuple[object, ...], float] = {}
        self._kept: dict[tuple[object, ...], tuple[float, Relaxation | None]] = {}
        self._orders = lru_cache(maxsize=None)(_Order)

    def memory(self, choice: LayoutChoice) -> float:
        """Return a lower bound of the bytes of states and activations; a budget recomputes everything."""
        return BOUND * max(
            self._states(choice, rank) + self._least_peak(choice, rank) for rank in self._ranks(choice)
        )

    def roomy(self, variants: Sequence[LayoutChoice], room: float) -> list[LayoutChoice]:
        """Return the choices whose `memory` is within `room` bytes. They differ only in ZeRO and offload."""
        left = list(variants)
        for rank in self._ranks(variants[0]):
            states = [(choice, self._states(choice, rank)) for choice in left]
            if all(BOUND * held > room for _, held in states):
                return []
            peak = self._least_peak(variants[0], rank)
            left = [choice for choice, held in states if BOUND * (held + peak) <= room]
        return left

    def alone(self, choice: LayoutChoice) -> float:
        """Return the step seconds of the rank with the most parameters alone.

        See `Stepper.alone`. It is less than `time`, and cheaper to compute.
        """
        return self.stepper.alone(
            choice, max(self._ranks(choice), key=lambda rank: rank.parameters.stored).number
        )

    def time(self, choice: LayoutChoice, again: Mapping[int, float] = MappingProxyType({})) -> float:
        """Return a lower bound of the step time, in seconds.

        It adds to `Stepper.least` the time that the first, the last and the recomputing pipeline ranks must
        wait for gradients.

        Args:
            again: pipeline rank → seconds per microbatch that it must recompute, in addition to the choice.
        """
        passes, ranks = self.stepper.slowed(choice), {0, choice.pp - 1, *again}
        longest = max(self._span(choice, passes, rank, again) for rank in ranks)
        return self.stepper.least(choice, self.stepper.slow(choice) * longest)

    def _span(
        self, choice: LayoutChoice, passes: Sequence[PassTimes], rank: int, again: Mapping[int, float]
    ) -> float:
        """Return a lower bound of the pipeline time, from the order of the passes of one rank.

        The slowdown of devices is not included. The first backward of the rank follows the forwards before it
        in the order and, for one microbatch, all forwards and the backwards of later stages. After the last
        forward, one microbatch still requires all later forwards and all backwards. The computation in
        between takes its own time.
        """
        forwards, backwards = [each.forward for each in passes], [each.backward for each in passes]
        if not choice.splits:
            backwards = [each.backward + each.weight for each in passes]
        count, order = (
            self.job.microbatches(choice),
            self._orders(followed(choice, self.job.microbatches(choice)), rank),
        )
        own, again_here = order.own, again.get(rank, 0.0)
        warmup = sum(number * forwards[stage] for stage, number in zip(own, order.warmup, strict=True))
        work = count * (sum(passes[stage].total for stage in own) + again_here)
        start = sum(forwards[: own[0]])
        begun = max(start + warmup, sum(forwards) + sum(backwards[order.first_backward + 1 :]))
        if self.stepper.in_turn(choice):
            return begun - start + work - warmup
        if choice.splits:  # weight passes may run after the last backward
            return begun + work - warmup
        drained = sum(
            number * (backwards[stage] + again_here) for stage, number in zip(own, order.drained, strict=True)
        )
        returned = sum(forwards[order.last_forward + 1 :]) + sum(backwards) + sum(again.values())
        ended = begun if order.alternates else start + warmup  # plus what is between: the last forward
        return max(
            begun + work - warmup + sum(backwards[: order.last_backward]),
            ended + work - warmup - drained + returned,
        )

    def recomputation(self, choice: LayoutChoice, room: float) -> dict[int, float]:
        """Return the least recomputation seconds per microbatch so that each rank fits in `room` bytes.

        Infinity if recomputing everything is not enough.

        The relaxation of the programme that `budget` solves, with fractions of layers; empty for choices that
        do not leave it to a budget.
        """
        seconds: dict[int, float] = {}
        for rank in self._ranks(choice) if shown(choice.recompute) == BUDGET else ():
            key = (
                *self._key(choice),
                choice.schedule,
                choice.pp,
                choice.virtual_stages,
                self.job.microbatches(choice),
                rank.number,
            )
            if key not in self._kept:
                peak = self._peak(choice, rank.number, rank.stages, "none")
                self._kept[key] = peak.bytes, self._relaxation(choice, rank, peak)
            kept, relaxation = self._kept[key]
            needed = BOUND * (self._states(choice, rank) + kept) - room
            if needed > 0 and relaxation is not None:
                seconds[rank.number] = relaxation.least(needed / BOUND)
        return seconds

    def _relaxation(self, choice: LayoutChoice, rank: _Rank, peak: _Peak) -> Relaxation | None:
        """Return what the layers of a rank can recompute, with what it frees at the peak.

        None if these bytes do not add up.
        """
        counts = Counter(
            (self.stepper.kinds[index], held)
            for layers, held in zip(rank.stages, peak.held, strict=True)
            for index in layers
        )
        items: list[ItemGroup] = []
        for (kind, held), count in counts.items():
            groups = self._groups(choice, kind)
            if groups is None:
                return None
            items += [
                ItemGroup(count, tuple(Option(each.cost, (each.frees[0] * held,)) for each in group))
                for group in groups
            ]
        return Relaxation(items)

    def ranks(self, choice: LayoutChoice) -> list[int]:
        """Return the pipeline ranks with bounds, which tend to need the most memory."""
        return [rank.number for rank in self._ranks(choice)]

    def _least_peak(self, choice: LayoutChoice, rank: _Rank) -> float:
        """Return the activation bytes at a rank's peak; with a budget, everything is recomputed."""
        recompute = "full" if choice.recompute == BUDGET else choice.recompute
        key = (
            *self._key(choice),
            choice.schedule,
            choice.pp,
            choice.virtual_stages,
            self.job.microbatches(choice),
            recompute,
            rank.number,
        )
        if key not in self._peaks:
            self._peaks[key] = self._peak(choice, rank.number, rank.stages, recompute).bytes
        return self._peaks[key]

    def _ranks(self, choice: LayoutChoice) -> list[_Rank]:
        key = *self._key(choice), choice.schedule, choice.pp, choice.virtual_stages
        if key not in self._known:
            _, sizes, _ = self.stepper.stages(choice)
            split, placed = (
                self.stepper.layers_of_stages(len(sizes)),
                placement(choice.schedule, choice.pp, choice.asked_stages),
            )
            starts, parameters = [0, *accumulate(split)], self.stepper.held(choice, sizes)
            ranks = []
            largest = max(range(choice.pp), key=lambda rank: parameters[rank].stored)
            for number in sorted({0, largest, choice.pp - 1}):
                own = [stage for stage, rank in enumerate(placed) if rank == number]
                stages = tuple(tuple(self.stepper.own(starts[stage], starts[stage + 1])) for stage in own)
                layers = self.stepper.parameters(choice, [index for stage in stages for index in stage])
                ranks.append(_Rank(number, parameters[number], layers, stages))
            self._known[key] = ranks
        return self._known[key]

    def _peak(
        self, choice: LayoutChoice, number: int, layers: Sequence[tuple[int, ...]], recompute: str
    ) -> _Peak:
        """Return the largest load over a rank's list of actions, as in `memory.Profile`."""
        stages, peak = [self._stage(choice, recompute, indices) for indices in layers], _Peak(0.0, ())
        for kind, place, held, deferred in self._orders(
            followed(choice, self.job.microbatches(choice)), number
        ).moments:
            stage, now = stages[place], 0.0
            for each, count, waiting in zip(stages, held, deferred, strict=True):
                now += count * each.saved + waiting * each.stash
            if kind is Pass.FORWARD:
                more = tuple(count + (place == index) for index, count in enumerate(held))
                peak = max(peak, _Peak(now + stage.saved, more))
            else:
                peak = max(peak, _Peak(now - stage.saved + stage.largest, held))
                fewer = tuple(count - (place == index) for index, count in enumerate(held))
                peak = max(peak, _Peak(now - stage.saved + stage.stash, fewer))
        return peak

    def _stage(self, choice: LayoutChoice, recompute: str, layers: tuple[int, ...]) -> _StageBytes:
        count, numbers = (
            self.job.model.num_hidden_layers,
            [index + 1 for index in layers if index < self.job.model.num_hidden_layers],
        )
        ends = [0] * (layers[0] == 0), [head_unit(self.job.model)] * (count in numbers)
        units = self._activations(choice, recompute).stage([*ends[0], *numbers, *ends[1]])
        saved, stash, largest = 0.0, sum(unit.stash + unit.logits_stash for unit in units), 0.0
        waiting = stash  # of the units whose backward is done
        for unit in units:
            saved, waiting = saved + unit.saved + unit.logits, waiting - unit.stash - unit.logits_stash
            largest = max(largest, saved + waiting + unit.recomputed + unit.workspace)
        return _StageBytes(saved, stash, largest)

    def _states(self, choice: LayoutChoice, rank: _Rank) -> float:
        """Return the bytes of weights, gradients and optimizer state on the device.

        The sum contains the weights; master weights and moments of trained weights, sharded by the ZeRO
        stage; the gradients that accumulate until they are reduced, of two layers or of all layers with
        deferred weight passes; and the gathered weights of two layers.
        """
        size, width = self.stepper.operations.size, self._gradient
        master, moments = 0 if size == 4 else 4, self.job.moments
        two = min(2 / rank.layers, 1.0)
        spared = size - self.stepper.code if self.stepper.quantized_base else 0.0

        def bytes_of(elements: tuple[float, float, float]) -> float:
            return elements[0] * size - elements[2] * spared

        total = 0.0
        for share, whole, layers in zip(
            shares(choice), rank.parameters.domains, rank.of_layers.domains, strict=False
        ):
            weights_share, gradients_share, state_share = (
                share if choice.zero >= level else 1 for level in (3, 2, 1)
            )
            weights = 0.0 if choice.offload_parameters else size / weights_share
            state = (moments + master) / state_share if choice.offload == "none" else 0.0
            total += bytes_of(whole) * weights / size + whole[1] * (width / gradients_share + state)
            total += layers[1] * width * (1.0 if choice.splits else two) if gradients_share > 1 else 0.0
            total += bytes_of(layers) * two if weights_share > 1 else 0.0
        return total

    @staticmethod
    def _key(choice: LayoutChoice) -> tuple[object, ...]:
        split = (
            choice.tp,
            choice.cp,
            choice.context,
            choice.context_inner,
            choice.context_parts,
            choice.sequence_parallel,
        )
        return *split, choice.ep, choice.expert_dispatch, choice.micro_batch_size, choice.splits

    def _activations(self, choice: LayoutChoice, recompute: str) -> Activations:
        """Return the activations of a choice's share on one stage."""
        key = *self._key(choice), recompute
        if key not in self._units:
            config = apply_layout(
                self.base, replace(choice, pp=1, schedule="1f1b", virtual_stages=1, recompute=recompute)
            )
            self._units[key] = Activations(
                config, "cpu" if self.job.device.cpu else "cuda", choice.splits, config.lora
            )
        return self._units[key]

    def _groups(self, choice: LayoutChoice, kind: Hashable) -> tuple[tuple[Option, ...], ...] | None:
        """Return what a layer of a kind can recompute: groups of options with seconds and freed bytes."""
        key = *self._key(choice), kind
        if key not in self._options:
            activations, operations = self._activations(choice, "none"), self.stepper.operations
            index = self.stepper.kinds.index(kind)
            candidates = groups(activations.units, index)
            options = [
                tuple(
                    Option(
                        sum(of_operation(operations, activations.share, index, each)),
                        (activations.bytes_of(each.buffers),),
                    )
                    for each in group
                )
                for group in candidates
            ]
            self._options[key] = (
                None if any(each.scores for group in candidates for each in group) else tuple(options)
            )
        return self._options[key]


class _Order:
    """Properties of a rank's order of passes that bounds need.

    Attributes:
        own: the stages of the rank.
        warmup, drained: for each of them, the forwards before the first backward, and the backwards after the
            last forward.
        first_backward, last_forward, last_backward: the stages of these passes.
        alternates: whether a forward follows the first backward.
        moments: at which its memory can be largest.
    """

    def __init__(self, pipeline: PipelineShape, rank: int):
        name, ranks, microbatches, virtual_stages, _ = pipeline
        recipe = RECIPES[name]
        self.own = [
            stage for stage, each in enumerate(placement(name, ranks, virtual_stages)) if each == rank
        ]
        if recipe.splits:
            actions = schedule_of(pipeline).compute(rank)
        else:
            actions = recipe.order(rank, OrderShape(ranks, microbatches, len(self.own)))
        kinds, stages = [action.kind for action in actions], [action.stage for action in actions]
        first, last = kinds.index(Pass.BACKWARD), len(kinds) - 1 - kinds[::-1].index(Pass.FORWARD)
        self.warmup = [stages[:first].count(stage) for stage in self.own]
        self.drained = [stages[last + 1 :].count(stage) for stage in self.own]
        self.first_backward, self.last_forward, self.last_backward = stages[first], stages[last], stages[-1]
        self.alternates = last > first
        places = [self.own.index(stage) for stage in stages]
        self.moments = fullest(zip(kinds, places, strict=True), len(self.own), recipe.splits)


def followed(choice: LayoutChoice, microbatches: int) -> PipelineShape:
    """Return the pipeline whose memory is simulated. Memory does not grow with more microbatches."""
    if choice.schedule != "gpipe":
        microbatches = min(microbatches, microbatches % choice.pp + (AHEAD + 1) * choice.pp)
    return PipelineShape(choice.schedule, choice.pp, microbatches, choice.asked_stages)
