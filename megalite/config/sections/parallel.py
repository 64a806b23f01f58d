"""The mesh, and how each of its axes is used."""

from dataclasses import dataclass
from typing import Literal

from megalite.config import amounts
from megalite.config.option import NOT_NEGATIVE, POSITIVE, SIZE, option
from megalite.config.rule import Rule

ContextMethod = Literal["ulysses", "gather", "ring", "auto"]


@dataclass
class ParallelConfig:
    """The mesh pp × dp × cp × tp, and how each axis is used."""

    tp: int = option(1, SIZE)
    """Tensor-parallel size: number of ranks over which each layer's matrices are split."""
    pp: int = option(1, SIZE)
    """Pipeline-parallel size: number of ranks over which the layers are split."""
    dp: int | None = option(None, SIZE)
    """Data-parallel size: number of replicas over which the global batch is split. null: world size / (tp ·
    pp · cp)."""
    cp: int = option(1, SIZE)
    """Context-parallel size: number of ranks over which each sequence is split."""
    context: ContextMethod = "ulysses"
    """With cp > 1, what attention exchanges: heads for positions (ulysses), all keys and values at once
    (gather) or rank by rank (ring). Blocks with a state exchange heads with ulysses, and pass states with
    the others. auto: attention uses gather, and each kind of block with a state what sends fewer bytes."""
    context_inner: int = option(1, SIZE)
    """With context ring, number of neighbouring ranks, best those of a node, that exchange heads for
    positions (ulysses); the ring is between such groups. 1: a ring over all ranks."""
    context_parts: Literal["zigzag", "balanced"] = "zigzag"
    """With context gather, ring or auto, the part of a row that a rank holds: an early and a late run
    (zigzag), or with documents the blocks that give all ranks equally much attention to compute (balanced),
    chosen anew for every microbatch."""
    min_ranks: int | None = option(None, SIZE)
    """Let the number of ranks change while the run trains, between this one and tp · pp · cp · dp: the
    largest legal layout for the ranks that are there is used. null: the number is fixed."""
    sequence_parallel: bool = False
    """Split the activations between tensor-parallel regions along the sequence."""
    ep: int = option(1, SIZE)
    """Expert-parallel size: number of ranks over which the experts of a layer are split, each whole on its
    rank. They are the innermost ranks of dp · cp · tp."""
    expert_dispatch: Literal["all_to_all", "all_gather"] = "all_to_all"
    """With ep > 1, how tokens reach their experts: rows are sent to the ranks of their experts (all_to_all),
    or all rows to all ep ranks (all_gather), which suits a small ep."""
    dp_shard: int | None = option(None, SIZE)
    """Number of data-parallel ranks over which ZeRO shards; the shards are replicated over the other ranks
    (HSDP). null: all of them."""
    zero: int = 1
    """ZeRO stage. 0: nothing is sharded over dp; 1: master weights and optimizer state are; 2: gradients too;
    3: weights too."""
    zero3_reshard: Literal["action", "step"] = "action"
    """With ZeRO-3, free a layer's gathered weights after each use (action: gathered again for every
    microbatch and pass), or at the end of the step (step)."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Communication dtype of the gradient reduction over dp. fp32: the accumulate dtype, at least
    fp32 unless train.grad_dtype = bf16; bf16: cast to bf16, sent, and summed in fp32."""
    powersgd_rank: int | None = option(None, SIZE)
    """With ZeRO 0 or 1, send gradient matrices as two factors with this many columns (PowerSGD). null: no
    compression."""
    bucket_mb: float = option(25.0, POSITIVE, amount=amounts.MEGABYTES)
    """Maximum size of a gradient bucket, in MB of fp32, or with a unit: 25MB, 32MiB. A layer is never split:
    one that is larger has a bucket of its own."""
    offload: Literal["none", "cpu", "disk"] = "none"
    """Where master weights and optimizer state are stored: on the device (none), in CPU memory (cpu) or in a
    memory-mapped file (disk). With cpu and disk the optimizer runs on the CPU."""
    offload_dir: str | None = option(None, path=True)
    """Directory of the files of offload disk, best on a fast local disk. null: `offload/` in the run's
    directory. The files are scratch."""
    offload_parameters: bool = False
    """With ZeRO-3, keep the weights' shards in CPU memory; each layer is copied to the device when it is
    used."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-half"] = "1f1b"
    """Pipeline schedule; `megalite bubble --compare` shows the time and memory that each costs."""
    virtual_stages: int | None = option(None, SIZE)
    """Stages per pipeline rank, for schedule interleaved. null: 2 for interleaved, zb-v and v-half, 1 for the
    others."""
    schedule_costs: list[float] = option([1.0, 1.0, 1.0, 0.0], NOT_NEGATIVE)
    """Durations for which a schedule with a split backward is planned, in any unit: forward, input gradient
    and weight gradient of one rank, and one message."""
    optimistic_step: bool = True
    """With zb-h2 and zb-v, update before the global gradient norm is known, and correct the update if the
    norm clips. Keeps a copy of the optimizer's state; has no effect with offload."""
    partition: list[int] | None = None
    """Number of layers of each stage, first to last, for example [3, 5, 5, 3]. null: balanced by cost,
    embedding and head included."""
    layer_costs: list[float] | None = option(None, NOT_NEGATIVE)
    """Costs of the embedding, each layer and the head, in any unit, for the balanced partition. null:
    estimated FLOPs."""


RULES: tuple[Rule, ...] = (
    Rule(
        "inner ranks belong to a ring",
        "parallel.context_inner",
        lambda c: c.parallel.context_inner > 1 and (c.parallel.cp == 1 or c.parallel.context != "ring"),
        message="is incompatible with {parallel.cp} and {parallel.context}: it sets groups of ring ranks",
        legal="Set parallel.context to ring with parallel.cp above 1, or remove it.",
    ),
    Rule(
        "balanced parts of gather or ring",
        "parallel.context_parts",
        lambda c: (
            c.parallel.context_parts == "balanced" and c.parallel.cp > 1 and c.parallel.context == "ulysses"
        ),
        message="has no effect: with {parallel.context} all ranks already have the same amount of attention",
        legal="Remove it, or set parallel.context to gather, ring or auto.",
    ),
    Rule(
        "four schedule costs",
        "parallel.schedule_costs",
        lambda c: len(c.parallel.schedule_costs) != 4 or not sum(c.parallel.schedule_costs[:3]),
        message="must contain the durations of forward, input gradient, weight gradient and message, not "
        "all of the first three 0",
        legal="For example [1, 1, 1, 0].",
    ),
    Rule(
        "partition or layer costs",
        "parallel.layer_costs",
        lambda c: c.parallel.layer_costs and c.parallel.partition,
        message="has no effect, because {parallel.partition} is set",
        legal="Remove one of the two.",
    ),
    Rule(
        "dp_shard shares something",
        "parallel.dp_shard",
        lambda c: c.parallel.zero == 0 and c.parallel.dp_shard not in (None, 1),
        message="has no effect with {parallel.zero}",
        legal="Remove it, or set parallel.zero to 1, 2 or 3.",
    ),
    Rule(
        "zero stage",
        "parallel.zero",
        lambda c: c.parallel.zero not in (0, 1, 2, 3),
        message="is not a ZeRO stage",
        legal=[0, 1, 2, 3],
    ),
    Rule(
        "offloaded parameters are sharded",
        "parallel.offload_parameters",
        lambda c: c.parallel.offload_parameters and c.parallel.zero != 3,
        message="requires sharded weights (parallel.zero = 3), but {parallel.zero}",
        legal="Remove it, or set parallel.zero to 3.",
    ),
    Rule(
        "offload_dir is for disk",
        "parallel.offload_dir",
        lambda c: c.parallel.offload_dir is not None and c.parallel.offload != "disk",
        message="has no effect: {parallel.offload}",
        legal="Remove it, or set parallel.offload to disk.",
    ),
    Rule(
        "an elastic run keeps its errors",
        "parallel.min_ranks",
        lambda c: c.parallel.min_ranks is not None and c.parallel.powersgd_rank,
        message="is not supported with {parallel.powersgd_rank}: its error terms belong to ranks, and a "
        "change of their number would change the run",
        legal="Remove one of the two.",
    ),
    Rule(
        "PowerSGD reduces whole gradients",
        "parallel.powersgd_rank",
        lambda c: c.parallel.powersgd_rank and c.parallel.zero > 1,
        message="requires whole gradients, but {parallel.zero} shards them",
        legal="Set parallel.zero to 0 or 1, or remove powersgd_rank.",
    ),
    Rule(
        "one compression",
        "parallel.powersgd_rank",
        lambda c: c.parallel.powersgd_rank and c.parallel.reduce_dtype == "bf16",
        message="sends its factors in full precision, which is incompatible with {parallel.reduce_dtype}",
        legal="Remove one of the two.",
    ),
)
