"""The layouts of a run whose number of ranks may change (`parallel.min_ranks`).

The options describe the layout of the largest number of ranks. With fewer ranks, dp becomes smaller first. If
not even one replica fits, pp, then tp, then cp become smaller, because a change of these moves more of the
state between ranks. The rules judge every candidate, so the global batch, each stage of a batch ramp-up and
the experts stay whole. A number of ranks without a layout of its own uses the next smaller one; the other
ranks are spares.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator
from dataclasses import replace

from megalite.config.dims import ParallelDims
from megalite.config.errors import ConfigError
from megalite.config.rule import divisors
from megalite.config.rules import check
from megalite.config.schema import Config
from megalite.config.sections.parallel import ParallelConfig


def layout_of(config: Config, ranks: int, leave_out: Container[str] = ()) -> ParallelConfig | None:
    """Return the largest legal layout of at most `ranks` ranks, or None if there is none.

    Args:
        config: a configuration with the layout of the largest number of ranks; parallel.dp is set.
        leave_out: names of rules to skip.
    """
    for sizes in _tiers(config.parallel):
        for tp, pp, cp, dp in _largest_first(sizes, ranks):
            for candidate in _variants(config.parallel, tp, pp, cp, dp):
                if _reason(config, candidate, leave_out) is None:
                    return candidate
    return None


def fit_layout(config: Config, world_size: int, leave_out: Container[str] = ()) -> int:
    """Give a configuration with `parallel.min_ranks` the layout of a number of processes.

    Returns the number of ranks of the layout; the other processes are spares.

    Raises:
        ConfigError: the configuration is not legal with its largest layout, or has no layout for this number
            of processes.
    """
    parallel, largest = config.parallel, ParallelDims.of(config, world_size)
    if parallel.dp is None:
        config.parallel = parallel = replace(parallel, dp=largest.dp)
    check(config, largest.world, leave_out=leave_out)
    fewest = parallel.min_ranks or largest.world
    if world_size > largest.world:
        raise ConfigError(
            f"parallel.dp = {largest.dp} with tp * pp * cp = {largest.replica} makes {largest.world} ranks, "
            f"fewer than the run's {world_size} processes. Start at most {largest.world}, or enlarge the "
            "layout: with parallel.min_ranks it is that of the largest number of ranks."
        )
    if fewest > largest.world:
        raise ConfigError(
            f"parallel.min_ranks = {fewest} exceeds the {largest.world} ranks of the layout. Legal values: "
            f"1 to {largest.world}."
        )
    if world_size < fewest:
        raise ConfigError(
            f"parallel.min_ranks = {fewest} exceeds the run's {world_size} processes. Start at least "
            f"{fewest}, or set it to {world_size}."
        )
    layout = layout_of(config, world_size, leave_out)
    if layout is None:
        raise ConfigError(_no_layout(config, world_size, leave_out))
    config.parallel = layout
    return ParallelDims.of(config).world


def layouts(
    config: Config, sizes: Iterable[int], leave_out: Container[str] = ()
) -> dict[int, ParallelConfig]:
    """Return the layout of each number of ranks. Raises ConfigError if one has none."""
    by_size = dict[int, ParallelConfig]()
    for size in sizes:
        layout = layout_of(config, size, leave_out)
        if layout is None:
            raise ConfigError(_no_layout(config, size, leave_out))
        by_size[size] = layout
    return by_size


def ranks_of(layout: ParallelConfig) -> int:
    """Return the number of ranks that a layout uses."""
    return layout.tp * layout.pp * layout.cp * (layout.dp or 1)


def describe(layout: ParallelConfig) -> str:
    """Return the sizes of a layout: "tp 2 · pp 2 · dp 3", with cp and ep if they are above 1."""
    names = ["tp", "pp", "dp", *(name for name in ("cp", "ep") if getattr(layout, name) > 1)]
    return " · ".join(f"{name} {getattr(layout, name)}" for name in names)


def table(by_size: dict[int, ParallelConfig]) -> list[str]:
    """Return the layouts by number of ranks as lines of text, the largest first."""
    rows = [["ranks", "spares", "layout"]]
    for size in sorted(by_size, reverse=True):
        layout = by_size[size]
        rows.append([str(size), str(size - ranks_of(layout)), describe(layout)])
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return [f"{ranks:>{widths[0]}}  {spares:>{widths[1]}}  {layout}" for ranks, spares, layout in rows]


Sizes = tuple[int, int, int]  # tp, pp, cp


def _tiers(parallel: ParallelConfig) -> Iterator[list[Sizes]]:
    """The sizes of a replica, from the wanted one on; a later list counts if no earlier one has a layout."""
    tp, pp, cp = parallel.tp, parallel.pp, parallel.cp
    yield [(tp, pp, cp)]
    yield [(tp, stages, cp) for stages in range(pp - 1, 0, -1)]
    every_pp = range(pp, 0, -1)
    yield [(size, stages, cp) for size in divisors(tp)[-2::-1] for stages in every_pp]
    yield [
        (size, stages, context)
        for context in divisors(cp)[-2::-1]
        for size in divisors(tp)[::-1]
        for stages in every_pp
    ]


def _largest_first(sizes: Iterable[Sizes], ranks: int) -> list[tuple[int, int, int, int]]:
    """Layouts (tp, pp, cp, dp) of at most `ranks` ranks; of equally large ones first the earlier sizes."""
    fitting = [(tp, pp, cp, dp) for tp, pp, cp in sizes for dp in range(1, ranks // (tp * pp * cp) + 1)]
    return sorted(fitting, key=lambda layout: -math.prod(layout))


def _variants(parallel: ParallelConfig, tp: int, pp: int, cp: int, dp: int) -> Iterator[ParallelConfig]:
    """The options of a layout with these sizes: experts over as many ranks as possible."""
    shard = parallel.dp_shard and max(size for size in divisors(dp * cp) if size <= parallel.dp_shard)
    inner = parallel.context_inner if cp == parallel.cp else 1
    partition = parallel.partition if pp == parallel.pp else None
    for ep in reversed(divisors(parallel.ep)):
        yield replace(
            parallel,
            tp=tp,
            pp=pp,
            cp=cp,
            dp=dp,
            ep=ep,
            dp_shard=shard,
            context_inner=inner,
            partition=partition,
        )


def _reason(config: Config, layout: ParallelConfig, leave_out: Container[str]) -> ConfigError | None:
    """Why a layout is not legal; None if it is."""
    try:
        check(replace(config, parallel=layout), ranks_of(layout), leave_out=leave_out)
    except ConfigError as error:
        return error
    return None


def _no_layout(config: Config, ranks: int, leave_out: Container[str]) -> str:
    """The message about a number of ranks without a layout: why one rank cannot train the model."""
    one = next(_variants(config.parallel, 1, 1, 1, 1))
    return (
        f"parallel.min_ranks = {config.parallel.min_ranks}: no layout of {ranks} or fewer ranks is legal. On "
        f"one rank: {_reason(config, one, leave_out)}"
    )
