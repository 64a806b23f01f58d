"""Derives from a configuration the partition, the schedule and the stored parameters of each pipeline rank.

The runtime executes these plans, and the planner calls the same functions for any number of ranks without
starting one.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from megalite.config.dims import ParallelDims, part_length
from megalite.config.schema import Config
from megalite.config.sections.model import ModelConfig
from megalite.config.token_files import is_chat, prefixes
from megalite.mesh.layout import AxisPlace, Coordinates
from megalite.model.adapter_parameters import trained_specs
from megalite.model.cost.flops import layer_costs
from megalite.model.kinds import block_kinds, learns_from_steps, stage_starts
from megalite.model.mtp.losses import further_losses
from megalite.model.parameters import model_specs
from megalite.model.unit_numbers import stage_units
from megalite.objectives.find import objective_of
from megalite.optimizer.registry import alignment
from megalite.optimizer.state_tensors import check_blocks
from megalite.parallel.fp8_choice import Fp8Options, gathered_as_codes
from megalite.parallel.pipeline.gather_actions import with_gathering
from megalite.parallel.pipeline.generator import build, placement
from megalite.parallel.pipeline.orders import RECIPES
from megalite.parallel.pipeline.partition import balanced
from megalite.parallel.pipeline.schedule import Costs, Schedule, Unit
from megalite.parallel.pipeline.send_recv_actions import OUTSTANDING_SENDS, with_communication
from megalite.parallel.pipeline.validator import validate
from megalite.parallel.sharding.buckets import BucketLayout, bucket_layout, buckets_of_units
from megalite.parallel.spec import ParamSpec


def partition(config: Config) -> list[int]:
    """Return the number of layers of each stage.

    Unless it is configured, the partition balances measured or estimated costs, including embedding and head.
    """
    model, parallel, stages = config.model, config.parallel, ParallelDims.of(config).stages
    if parallel.partition is not None:
        return parallel.partition
    if parallel.layer_costs is not None:
        embedding, *layers, head = parallel.layer_costs
        return balanced(layers, stages, embedding, head, stage_starts(model))
    costs = layer_costs(model, config.data.sequence_length)
    return balanced(costs.layers, stages, costs.embedding, costs.head, stage_starts(model))


def units_of(config: Config) -> dict[int, range]:
    """Return the units of each stage."""
    layers = partition(config)
    return {stage: stage_units(layers, stage) for stage in range(len(layers))}


def specs_of(config: Config, rank: int) -> list[ParamSpec]:
    """Return the stored parameters of a pipeline rank."""
    parallel = config.parallel
    ranks = placement(parallel.schedule, parallel.pp, parallel.virtual_stages)
    units = [unit for stage, units in units_of(config).items() if ranks[stage] == rank for unit in units]
    sequence_parallel = parallel.sequence_parallel
    specs = model_specs(config.model, tp=parallel.tp, sequence_parallel=sequence_parallel, units=units)
    trained = trained_specs(specs, config, parallel.tp)
    if config.optimizer.moments == "8bit":
        check_blocks(trained, first_place(config))
    return [coded(spec, config) for spec in trained]


def coded(spec: ParamSpec, config: Config) -> ParamSpec:
    """Return the spec of a stored tensor, marked as `coded` if ZeRO-3 gathers its fp8 codes.

    Weights in CPU memory are uploaded instead, and DoRA computes with the weights that it adapts.
    """
    if config.train.fp8 == "none" or spec.domain not in sharded_domains(config):
        return spec
    lora, layers = config.lora, config.model.num_hidden_layers
    read = lora.dora and any(lora.adapts(segment.role) for segment in spec.segments)
    if read or config.parallel.offload_parameters:
        return spec
    options = Fp8Options.of(config.train)
    return replace(spec, coded=gathered_as_codes(spec, first_place(config), options, layers))


def activation_shape(config: Config) -> tuple[int, int, int]:
    """Return the shape of a rank's activations between layers and between stages.

    The shape is [seq/cp (/tp under sequence parallelism), batch, hidden].
    """
    parallel = config.parallel
    length = part_length(config) // (parallel.tp if parallel.sequence_parallel else 1)
    return length, config.train.micro_batch_size, config.model.hidden_size


def first_place(config: Config) -> Coordinates:
    """Return the coordinates of the first rank on the axes that tensors are split over."""
    parallel = config.parallel
    return Coordinates({"tp": AxisPlace(0, parallel.tp), "expert": AxisPlace(0, parallel.ep)})


def buckets_of(config: Config, rank: int) -> list[BucketLayout]:
    """Return the buckets of a pipeline rank, the same on all of its tp, dp and ep ranks."""
    parallel, owners = config.parallel, ParallelDims.of(config).owners
    size, specs = parallel.bucket_mb * 1e6, specs_of(config, rank)
    return bucket_layout(specs, first_place(config), owners, size, alignment(config))


def sharded_domains(config: Config) -> tuple[str, ...]:
    """Return the domains whose weights ZeRO-3 shards or offloads, to gather or upload them before use."""
    parallel, dims = config.parallel, ParallelDims.of(config)
    if parallel.zero < 3 or (dims.shard == 1 and not parallel.offload_parameters):
        return ()
    # experts that no other rank has stay whole
    return ("dense", "expert") if dims.expert_shard > 1 or parallel.offload_parameters else ("dense",)


def gathered_units(config: Config) -> tuple[tuple[Unit, ...], ...]:
    """Return the units of each stage with the buckets that are gathered or uploaded before use.

    Empty unless ZeRO-3 shards or offloads weights.
    """
    parallel, domains = config.parallel, sharded_domains(config)
    if not domains:
        return ()

    def gathered(rank: int) -> dict[int, tuple[int, ...]]:
        """Unit → the indices of its buckets that are gathered."""
        buckets = buckets_of(config, rank)
        whole = {index for index, bucket in enumerate(buckets) if bucket.domain not in domains}
        units = buckets_of_units(buckets)
        return {unit: tuple(index for index in units[unit] if index not in whole) for unit in units}

    ranks = placement(parallel.schedule, parallel.pp, parallel.virtual_stages)
    buckets = [gathered(rank) for rank in range(parallel.pp)]
    return tuple(
        tuple(Unit(unit, buckets[ranks[stage]][unit]) for unit in units)
        for stage, units in units_of(config).items()
    )


def schedule(config: Config, microbatches: int, forward_only: bool = False) -> Schedule:
    """Return the validated list of actions of every rank, including messages.

    Under ZeRO-3 it also includes gathers and reshards. Raises as `validate`.
    """
    options, units = config.parallel, gathered_units(config)
    keep = bool(units) and options.zero3_reshard == "step" and not forward_only
    name, ranks, virtual_stages = options.schedule, options.pp, options.virtual_stages
    costs = Costs(*options.schedule_costs)
    return _validated(name, ranks, microbatches, virtual_stages, costs, forward_only, units, keep)


# the start of a run needs the same plan several times: for the channels of the mesh, for the steps, for
# reports
@lru_cache(maxsize=8)
def _validated(
    name: str,
    ranks: int,
    microbatches: int,
    virtual_stages: int | None,
    costs: Costs,
    forward_only: bool,
    units: tuple[tuple[Unit, ...], ...],
    keep: bool,
) -> Schedule:
    plan = with_communication(build(name, ranks, microbatches, virtual_stages, costs, forward_only))
    if units:
        plan = with_gathering(plan, units, keep=keep)
    validate(plan, OUTSTANDING_SENDS)
    return plan


def counts_tokens(config: Config) -> bool:
    """Return whether the ranks sum the number of valid tokens before each backward.

    They do if the number differs between steps, or if further losses or an objective have numbers of their
    own.
    """
    if objective_of(config) is not None:
        return True
    chat = any(map(is_chat, prefixes(config.data.train)))
    return config.data.eod_mask_loss or further_losses(config.model) > 0 or chat


def counts_queries(config: Config) -> bool:
    """Return whether a loss is a mean over all tokens but padding, those without a target included."""
    return any(kind.counts_queries(config.model) for kind in block_kinds(config.model))


def staggered_end(config: Config) -> bool:
    """Return whether ranks finish a step one after the other.

    Then they should not wait for the last one (`training.weight_update`).
    """
    return RECIPES[config.parallel.schedule].staggered and config.parallel.pp > 1


def optimistic_step(config: Config) -> bool:
    """Return whether a rank updates before the norm is known."""
    parallel, model, precision = config.parallel, config.model, config.train.precision
    allowed = may_be_optimistic(parallel.schedule, parallel.pp, parallel.offload, model, precision)
    return parallel.optimistic_step and allowed


def may_be_optimistic(schedule: str, pp: int, offload: str, model: ModelConfig, precision: str) -> bool:
    """Return whether a rank may update before the norm is known, where ranks finish one after the other.

    Not under offload: the copy of its optimizer state would not fit in memory. Not in fp16: a changed loss
    scale would require the next step's first forwards again. Not if blocks learn from the step: its
    statistics are summed together with the norm, and those forwards need them.
    """
    if not RECIPES[schedule].staggered or pp == 1:
        return False
    return offload == "none" and precision != "fp16" and not learns_from_steps(model)
