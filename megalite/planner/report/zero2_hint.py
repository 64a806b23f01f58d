"""A hint for ZeRO-2 whose ranks are on several nodes: each microbatch's gradients cross the network. Imports
no torch.

Between nodes there are as many rings as a group has ranks on a node (`links`), so of a collective over a
group each network card sends the ring's bytes divided by these ranks.
"""

from __future__ import annotations

from dataclasses import replace

from megalite.assembly import plan
from megalite.config.dims import ParallelDims
from megalite.config.schema import Config
from megalite.planner.memory.buffers import NARROW
from megalite.planner.memory.estimate import resolve_layout
from megalite.planner.memory.states import Sharing, Widths
from megalite.planner.report.explanation import amount
from megalite.planner.time.traffic import ring


def zero2_hint(config: Config, world_size: int, per_node: int) -> str | None:
    """Return a line if ZeRO-2 reduces several microbatches between nodes.

    Args:
        per_node: number of ranks on a node.
    """
    parallel, dims = config.parallel, ParallelDims.of(config, world_size)
    # ranks of a group of data = dp · cp on a node: tp is innermost, then cp, then dp
    local = per_node // parallel.tp
    alone = parallel.zero != 2 or dims.microbatches < 2
    if alone or world_size <= per_node or local < 1 or min(dims.shard, dims.data) <= local:
        return None
    config = resolve_layout(config, world_size)
    options = {
        "ZeRO-2": _sent(config, local),
        "parallel.zero: 1": _sent(with_parallel(config, zero=1), local),
    }
    if local > 1 and dims.data % local == 0:
        options[f"parallel.dp_shard: {local}"] = _sent(with_parallel(config, dp_shard=local), local)
    (_, now), *others = options.items()
    cheaper = " and ".join(f"with {name} {amount(sent)}" for name, sent in others if sent < now)
    if not cheaper:
        return None
    return (
        f"ZeRO-2 reduces each of {dims.microbatches} microbatches between nodes: {amount(now)} a step and "
        f"network card, {cheaper}"
    )


def with_parallel(config: Config, **changed: object) -> Config:
    """Return the configuration with other options in its section parallel."""
    return replace(config, parallel=replace(config.parallel, **changed))  # type: ignore[arg-type]


def _sent(config: Config, local: int) -> float:
    """Return the bytes that each network card sends per step over data parallelism.

    They are those of the fullest pipeline rank.
    """
    return max(_rank(config, pp_rank, local) for pp_rank in range(config.parallel.pp))


def _rank(config: Config, pp_rank: int, local: int) -> float:
    widths, dims = Widths.of(config), ParallelDims.of(config)
    width = NARROW if config.parallel.reduce_dtype == "bf16" else widths.gradient
    total = 0.0
    for bucket in plan.buckets_of(config, pp_rank):
        if not bucket.trainable:
            continue
        sharing, ranks = Sharing.of(config, bucket.domain), local
        if bucket.domain == "expert":
            ranks = max(local * dims.tp // dims.ep, 1)  # of a group, on a node
        rounds = dims.microbatches if sharing.gradients_sharded(bucket, config.run.deterministic) else 1
        if sharing.shard > ranks:  # reductions and the gathering of weights leave the node
            total += (
                rounds * ring(bucket.size * width, sharing.shard)
                + ring(bucket.size * widths.weights(bucket), sharing.shard)
            ) / ranks
        # each rank sums its shard with those of other nodes
        total += 2 * ring(sharing.kept(bucket) * width, sharing.replicate)
    return total
