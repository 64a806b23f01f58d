"""All sizes derived from the options of a run's mesh.

world = pp · dp · cp · tp. Gradients are summed over data = dp · cp = shard · replicate, those of experts over
expert_data, where ep · expert_data = dp · cp · tp. Under ZeRO weights, gradients and optimizer state are
sharded over `shard` ranks, of experts over `expert_shard` ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Self

from megalite.config.schema import Config
from megalite.config.sections.parallel import ParallelConfig

TILE = 128
"""Queries of a tile of attention's kernels: a run of positions that is no multiple of it costs as much as a
longer one that is."""
FEWEST_BLOCKS, FEWEST_OF_LONG_ROWS = 8, 32
"""Blocks of a context-parallel rank: fewer could not be dealt out evenly, many would make lists of runs long.
"""
FIXED_STAGES = {"interleaved": None, "zb-v": 2, "v-half": 2}
"""Stages per rank of each schedule with several; None if parallel.virtual_stages sets it."""
DEFAULT_STAGES = 2


def fixed_stages(schedule: str) -> int | None:
    """Return the stages per rank that a schedule requires; None if parallel.virtual_stages sets them."""
    return FIXED_STAGES.get(schedule, 1)


def stages_per_rank(schedule: str, virtual_stages: int | None) -> int:
    """Return the number of stages per rank under a schedule and the value of parallel.virtual_stages."""
    return fixed_stages(schedule) or virtual_stages or DEFAULT_STAGES


@dataclass(frozen=True)
class ParallelDims:
    """The sizes of the mesh's axes, and those derived from them.

    Attributes:
        dp_shard: data ranks over which ZeRO shards; None: all of them, 1: no sharding.
        virtual_stages: pipeline stages per rank.
        microbatches: microbatches of one step on one dp rank.
        context_inner: neighbouring cp ranks that exchange heads for positions; the others are a ring.
        ep: ranks over which a layer's experts are split, the innermost of dp · cp · tp.
        sharded: whether ZeRO shards anything.
        experts: whether the model has experts.
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    dp_shard: int | None = field(default=None, repr=False)
    virtual_stages: int = field(default=1, repr=False)
    microbatches: int = field(default=1, repr=False)
    context_inner: int = field(default=1, repr=False)
    ep: int = field(default=1, repr=False)
    sharded: bool = field(default=True, repr=False)
    experts: bool = field(default=False, repr=False)

    @classmethod
    def of(cls, config: Config, world_size: int | None = None) -> Self:
        """The sizes of a run. If parallel.dp is null, dp fills `world_size`; without a world size, or if no
        dp fills it, dp is 1.

        Also works for inconsistent sizes: the rules read them to report what is wrong.
        """
        parallel, train = config.parallel, config.train
        dp = parallel.dp or (world_size and filling_dp(parallel, world_size)) or 1
        return cls(
            pp=parallel.pp,
            dp=dp,
            cp=parallel.cp,
            tp=parallel.tp,
            dp_shard=(parallel.dp_shard or dp * parallel.cp) if parallel.zero else 1,
            virtual_stages=stages_per_rank(parallel.schedule, parallel.virtual_stages),
            context_inner=parallel.context_inner,
            ep=parallel.ep,
            sharded=parallel.zero > 0,
            experts=config.model.num_experts is not None,
            microbatches=train.global_batch_size // max(train.micro_batch_size * dp, 1),
        )

    @property
    def sequence(self) -> int:
        """Number of ranks that have parts of the same rows at one pipeline stage."""
        return self.cp * self.tp

    @property
    def replica(self) -> int:
        """Number of ranks that train one copy of the model, on the same rows."""
        return self.pp * self.sequence

    @property
    def world(self) -> int:
        return self.dp * self.replica

    @property
    def data(self) -> int:
        return self.dp * self.cp

    @property
    def shard(self) -> int:
        return self.dp_shard or self.data

    @property
    def replicate(self) -> int:
        """Number of data ranks that hold the same shard (HSDP)."""
        return self.data // self.shard

    @property
    def expert_data(self) -> int:
        """Number of ranks of a stage that hold the same experts; the experts' gradients are summed over
        them."""
        return self.stage_ranks // self.ep

    @property
    def expert_shard(self) -> int:
        """Number of ranks over which a bucket of experts is sharded: those of a dense bucket, as far as they
        hold the same experts."""
        return max(self.shard * self.tp // self.ep, 1) if self.sharded else 1

    @property
    def owners(self) -> dict[str, int]:
        """Parameter domain → number of ranks among which each element has exactly one owner, for norms,
        checkpoints and bucket sizes."""
        return {"dense": self.data, "expert": self.expert_data}

    @property
    def stage_ranks(self) -> int:
        """Number of ranks at one coordinate of the pp axis."""
        return self.data * self.tp

    @property
    def stages(self) -> int:
        """Number of pipeline stages, over all ranks."""
        return self.pp * self.virtual_stages


def filling_dp(parallel: ParallelConfig, world_size: int) -> int | None:
    """The data-parallel size with which the mesh has `world_size` ranks; None if there is none."""
    ranks = parallel.pp * parallel.cp * parallel.tp
    return world_size // ranks if ranks > 0 and world_size % ranks == 0 else None


def part_length(config: Config) -> int:
    """Positions of a row that a context-parallel rank holds. All ranks hold equally many: a row that has no
    such parts is padded."""
    parallel = config.parallel
    ranks = parallel.tp if parallel.sequence_parallel else 1
    return equal_part(
        config.data.sequence_length, parallel.cp, parallel.context, ranks, parallel.context_parts
    )


def aligned_positions(config: Config) -> int:
    """A number of positions of which every segment of a row on a rank starts and ends at a multiple."""
    parallel, part = config.parallel, part_length(config)
    segment = part
    if parallel.cp > 1 and parallel.context != "ulysses":  # zigzag: an even group shares its two segments
        segment = part if parallel.context_inner % 2 == 0 else part // 2
        if parallel.context_parts == "balanced":
            segment = math.gcd(segment, block_length(part))
    return math.gcd(segment, part // parallel.tp) if parallel.sequence_parallel else segment


def attention_method(context: str) -> str:
    """How attention communicates over cp under a value of parallel.context."""
    return "gather" if context == "auto" else context


def whole_heads(heads: int, shared: int, ranks: int) -> bool:
    """Whether heads can be split over ranks so that each has whole heads, and `shared` ones, which groups of
    equally many heads have in common, are split or repeated evenly."""
    return heads % ranks == 0 and shared_evenly(shared, ranks)


def shared_evenly(shared: int, ranks: int) -> bool:
    """Whether ranks split or repeat `shared` heads evenly."""
    return shared % ranks == 0 or ranks % shared == 0


def equal_part(length: int, cp: int, context: str, ranks: int = 1, parts: str = "zigzag") -> int:
    """Positions of a padded row of `length` on each of cp ranks, of which each of `ranks` sequence-parallel
    ranks holds equally many."""
    if cp == 1:
        return length
    unit = ranks if context == "ulysses" else 2 * ranks  # zigzag: two runs of equal length on each rank
    part = -(-length // (cp * unit)) * unit
    if context == "ulysses" or parts == "zigzag":
        return part
    block = 1
    while _may_double(block, part):
        block *= 2
    unit = math.lcm(unit, block)
    return -(-part // unit) * unit


def block_length(part: int) -> int:
    """Length of the blocks that `balanced` parts of a padded row consist of: a power of two, with long rows
    whole tiles."""
    block = 1
    while part % (2 * block) == 0 and _may_double(block, part):
        block *= 2
    return block


def _may_double(block: int, part: int) -> bool:
    return part >= 2 * block * (FEWEST_BLOCKS if block < TILE else FEWEST_OF_LONG_ROWS)


def rows_per_expert(factor: float, length: int, k: int, experts: int) -> int:
    """Rows of a sequence of `length` tokens that an expert keeps at most. Exact for a factor as it is
    written: 1.1 is 11/10, not the nearest float."""
    from fractions import Fraction

    return math.ceil(Fraction(str(factor)) * length * k / experts)
