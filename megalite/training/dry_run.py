"""Memory, traffic, FLOPs and bubble of a run on any number of ranks, without starting it.

One rank of each kind is built on the meta device to check that its model states have the number of bytes that
the planner computes from specs; all other numbers are computed by the planner. A dry run reads no data, needs
no GPU, and writes nothing.
"""

from __future__ import annotations

from typing import Any

from megalite.assembly import plan
from megalite.assembly.fp8_matrices import describe_fp8
from megalite.assembly.mup_rates import describe_mup
from megalite.config.arguments import DRY_RUN, read_arguments
from megalite.config.dims import ParallelDims
from megalite.config.elastic import fit_layout, layouts
from megalite.config.errors import ConfigError
from megalite.config.load import resolve
from megalite.config.rampup import samples_after
from megalite.config.recompute import shown
from megalite.config.rules import check
from megalite.config.schema import Config
from megalite.config.sections.parallel import ParallelConfig
from megalite.config.token_files import remarks
from megalite.model.cost.flops import per_token
from megalite.model.kinds import dispatch_of
from megalite.model.parameters import active_parameters
from megalite.parallel.pipeline.schedule import Schedule
from megalite.parallel.pipeline.simulator import simulate
from megalite.parallel.spec import parameter_count
from megalite.planner.api import (
    DeviceType,
    budget_bytes,
    budget_table,
    checkpoint_bytes,
    decide_recomputation,
    describe_state_exchange,
    describe_worst_load,
    estimate,
    fp8_effect_of_run,
    resolve_budget,
    resolve_layout,
    sum_by_stage,
    traffic,
    unit_flops,
    worst_expert_bytes,
)
from megalite.system.text import aligned
from megalite.training.checkpointing import describe_saves

ABOUT_FILES = {
    *(
        "training data is given",
        "data.train exists",
        "data.validation exists",
        "vocabulary is known",
        "the run can be written",
    ),
    *(
        "data.reset_positions needs an end-of-document token",
        "data.eod_mask_loss needs an end-of-document token",
        "checkpoint exists",
    ),
    *("init_from exists", "init_from hf exists", "fine-tuning starts from weights", "kernels can run"),
}
"""Rules that check files, vocabulary and kernels, and are skipped in a dry run."""
UNITS = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}
PARTS = ("parameters", "gradients", "optimizer", "activations", "logits", "teacher", "communication")
"""Columns of the table; that of a teacher or a reference is there if a rank has one."""
AXES = ("tp", "cp", "dp", "pp")


def read(argv: list[str], world_size: int | None, device: DeviceType = "cuda") -> Config:
    """Return the validated configuration, without the checks that need files.

    A memory budget for recomputation is replaced by a list of operations. Raises ConfigError.
    """
    arguments = read_arguments(argv, (*DRY_RUN, "dry_run", "json"))
    config = resolve(arguments, world_size or 1, weights=False, device=device)
    if world_size is None:
        dims = ParallelDims.of(config)
        world_size, config.parallel.dp = dims.world, dims.dp
    if config.model.vocab_size is None:
        raise ConfigError(
            "Could not determine model.vocab_size: found no PREFIX.json next to data.train. Set "
            "--model.vocab_size N."
        )
    if config.parallel.min_ranks is not None:
        world_size = fit_layout(config, world_size, leave_out=ABOUT_FILES)
    check(config, world_size, leave_out=ABOUT_FILES)
    return resolve_budget(resolve_layout(config, world_size), device)


def by_size(config: Config) -> dict[int, ParallelConfig]:
    """Return the layout of each number of ranks of an elastic run, whose configuration has the largest one.

    Empty if the number of ranks is fixed. Raises ConfigError if one has none.
    """
    fewest = config.parallel.min_ranks
    if fewest is None:
        return {}
    return layouts(config, range(ParallelDims.of(config).world, fewest - 1, -1), leave_out=ABOUT_FILES)


def distinct(config: Config, ranks: list[int] | None) -> list[int]:
    """Return the ranks to build.

    By default these are the first and the last rank of each pipeline stage, where padding and shards may
    differ.
    """
    dims = ParallelDims.of(config)
    count, world_size = dims.stage_ranks, dims.world
    if ranks is None:
        return sorted({rank for first in range(0, world_size, count) for rank in (first, first + count - 1)})
    if wrong := [rank for rank in ranks if rank >= world_size]:
        raise ConfigError(
            f"--ranks must be between 0 and {world_size - 1} for a world of {world_size} ranks, "
            f"got {wrong[0]}."
        )
    return ranks


def calculate(config: Config, ranks: list[int], device: DeviceType) -> dict[str, Any]:
    """Compute all printed numbers, by name. Raises Disagreement if a built rank differs from its plan."""
    from megalite.training.meta_device import check_states

    dims = ParallelDims.of(config)
    world_size = dims.world
    check_states(config, ranks, device)
    schedule = plan.schedule(config, dims.microbatches)
    memory, sent = estimate(config, world_size, device, schedule), traffic(config, world_size, schedule)
    return {
        "parameters": parameter_count(
            [spec for rank in range(dims.pp) for spec in plan.specs_of(config, rank)]
        ),
        **({"active_parameters": active_parameters(config.model)} if dispatch_of(config.model) else {}),
        "world_size": world_size,
        "device": device,
        "built": ranks,
        "ranks": [
            {**planned.to_dict(), "bytes_sent": own.to_dict()}
            for planned, own in zip(memory, sent, strict=True)
        ],
        "checkpoint_bytes": checkpoint_bytes(config),
        **length(config),
        "flops_per_token": flops(config),
        "schedule": schedule.name,
        "microbatches": schedule.microbatches,
        "bubble_fraction": bubble(config, schedule),
        "recompute": config.train.recompute,
    }


def length(config: Config) -> dict[str, int]:
    """Return the steps and tokens of the whole run.

    The result is empty if they depend on data that is missing.
    """
    steps, samples = config.train.steps, samples_after(config.train, config.train.steps)
    return (
        {"steps": steps, "tokens": samples * config.data.sequence_length}
        if config.train.epochs is None
        else {}
    )


def flops(config: Config) -> dict[str, Any]:
    """Return the FLOPs per token of the model, and of the hardware including recomputation."""
    model, length, recompute = config.model, config.data.sequence_length, config.train.recompute
    return {
        name: per_token(model, length, name, recompute, lora=config.lora).to_dict()
        for name in ("palm", "causal")
    }


def bubble(config: Config, schedule: Schedule) -> float:
    """Return the fraction of the step that ranks are idle.

    The time of a stage is that of its matmuls, and messages take no time.
    """
    stages = sum_by_stage(config, unit_flops(config))
    return simulate(schedule, stages, stages, stages).bubble_fraction


def experts(config: Config, rows: list[dict[str, Any]]) -> list[str]:
    """Return a line about the experts if they are split over ranks."""
    if config.parallel.ep == 1:
        return []
    most = max(row["bytes_sent"]["ep"] for row in rows)
    return [
        f"experts: at most {most / UNITS['GiB']:.2f} GiB sent over ep {config.parallel.ep} per "
        f"step and rank; {describe_worst_load(config)}, and keeps "
        f"{worst_expert_bytes(config) / UNITS['GiB']:.3f} GiB more per layer and microbatch"
    ]


def describe(config: Config, content: dict[str, Any]) -> list[str]:
    """Format the numbers as lines of text."""
    parallel, rows = config.parallel, content["ranks"]
    active = f" ({content['active_parameters']:,} active per token)" if "active_parameters" in content else ""
    split = f", ep {parallel.ep}" if parallel.ep > 1 else ""
    sizes = f"pp {parallel.pp} × dp {parallel.dp} × cp {parallel.cp} × tp {parallel.tp}{split}"
    planned = (
        "planned for cuda (use --device cpu to plan for CPUs)"
        if content["device"] == "cuda"
        else f"planned for {content['device']}"
    )
    ranks = f"{content['world_size']:,} rank{'s' * (content['world_size'] > 1)}"
    head = f"{content['parameters']:,} parameters{active} on {ranks} ({sizes}), {planned}"
    unit = next((unit for unit, size in UNITS.items() if max(row["total"] for row in rows) >= size), "KiB")
    lines = [
        head,
        f"{unit} per rank; each part at its own peak; sent: per step",
        "",
        *table(rows, UNITS[unit]),
    ]
    if any(row["states"][place] for row in rows for place in ("host", "disk")):
        away = (
            f"{place} {max(row['states'][place] for row in rows) / UNITS[unit]:,.2f}"
            for place in ("host", "disk")
        )
        lines.append(
            f"of these at most, on a rank, not on the device: {', '.join(away)}; peak is that of the device"
        )
    if loading := max(row["loading"] for row in rows):
        lines.append(
            f"while a rank reads its base (lora.base {config.lora.base}), it needs another "
            f"{loading / UNITS[unit]:,.2f} of CPU memory"
        )
    if config.train.memory_budget is not None:
        decision = decide_recomputation(config, budget_bytes(config), device=content["device"])
        lines += ["", *budget_table(decision)]
    palm, causal = (content["flops_per_token"][name] for name in ("palm", "causal"))
    lines += [
        "",
        f"FLOPs per token: model {palm['model']:.4g} (all positions attended, as in PaLM), "
        f"{causal['model']:.4g} (causal); hardware {palm['hardware']:.4g}, "
        f"{causal['hardware']:.4g} with train.recompute {shown(config.train.recompute)}",
        (
            f"bubble: {content['bubble_fraction']:.1%} of the step under {content['schedule']} with "
            f"{content['microbatches']} microbatches, if the time of a stage is that of its matmuls"
        ),
        describe_saves(config),
        *(
            [f"length of the run: {content['steps']:,} steps, {content['tokens']:,} tokens"]
            if "steps" in content
            else []
        ),
        *experts(config, rows),
        *describe_state_exchange(config),
        *describe_fp8(config),
        *describe_mup(config),
        *fp8_effect_of_run(config),
        *remarks(config),
        f"built on the meta device with the planned number of bytes: {len(content['built'])} "
        f"rank{'s' * (len(content['built']) > 1)}",
    ]
    return lines


def table(rows: list[dict[str, Any]], unit: int) -> list[str]:
    """Return one table row per group of consecutive pipeline ranks with equal numbers."""
    parts = [part for part in PARTS if part != "teacher" or any(row["teacher"] for row in rows)]
    columns, groups = [*parts, "total"], list[list[dict[str, Any]]]()
    for row in rows:
        same = [*(row[name] for name in columns), row["bytes_sent"]]
        if groups and same == [*(groups[-1][0][name] for name in columns), groups[-1][0]["bytes_sent"]]:
            groups[-1].append(row)
        else:
            groups.append([row])
    axes = [axis for axis in AXES if axis != "cp" or any(row["bytes_sent"]["cp"] for row in rows)]
    names = ["pp rank", "ranks", *parts, "peak", *(f"{axis} sent" for axis in axes)]
    cells = [
        [
            span(group[0]["pp_rank"], group[-1]["pp_rank"]),
            span(group[0]["first_rank"], group[-1]["first_rank"] + group[-1]["ranks"] - 1),
            *(f"{group[0][name] / unit:,.2f}" for name in columns),
            *(f"{group[0]['bytes_sent'][axis] / unit:,.2f}" for axis in axes),
        ]
        for group in groups
    ]
    return aligned([names, *cells])


def span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"
