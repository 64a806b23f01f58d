"""Print the bubble, memory and messages of a pipeline schedule, simulated from the same plan that the runtime
executes.

    megalite bubble --pp 4 --microbatches 8 --schedule zb-h1 [--timeline zb-h1.html] [--print]
    megalite bubble --pp 4 --microbatches 8 --compare                   every schedule
    megalite bubble --pp 4 --sweep microbatches=4,8,16,32 --compare     at several sizes
    megalite bubble --from_run runs/demo [--compare]                    with the durations that a run measured

Durations are for one microbatch on a whole stage, one rank's share of the model; with several stages per
rank, each takes a fraction of it. Papers define the bubble in three ways, and all three are printed:
bubble_fraction = idle / makespan, bubble_over_ideal = makespan / ideal - 1, and bubble_rate = (longest_span -
ideal) / longest_span, where the longest span is the longest time of any rank from its first action to its
last.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from shutil import get_terminal_size
from typing import Any, Literal

from megalite.commands.parser import Parser, as_new_file, as_path, positive, progress_of, write_whole
from megalite.parallel.pipeline.bubble import BUBBLES, BubblePlan, GatheredWeights, compare, plan, sweep
from megalite.parallel.pipeline.generator import SCHEDULES
from megalite.parallel.pipeline.schedule import Costs, ScheduleError
from megalite.planner.drawing import measured, trace
from megalite.planner.drawing import timeline as drawing
from megalite.planner.drawing.tables import durations, grid, heading, summary, table
from megalite.planner.drawing.text import draw

FORMATS = (".png", ".svg", ".html", ".json")
LONGEST = 1e100  # largest duration: sums of durations stay finite
MOST_DRAWN = 2_000  # up to this number of actions the timeline is printed by default


def main(argv: list[str] | None = None) -> None:
    tool = parser()
    options = tool.parse_args(argv)
    check(tool, options)
    try:
        with progress_of(options.json) as progress:
            progress("simulating")
            plans, content = calculate(options)
            if options.timeline:
                progress(f"drawing {options.timeline}")
                write(plans, options.timeline)
    except ScheduleError as error:
        tool.error(str(error) if options.from_run else str(error).replace("parallel.", "--"))
    except (drawing.DrawingError, OSError) as error:
        tool.error(f"--timeline {options.timeline}: {getattr(error, 'strerror', error)}")
    print(json.dumps(content) if options.json else content)


def parser() -> Parser:
    parser = Parser(description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--pp", type=positive, metavar="P", help="pipeline ranks")
    add("--microbatches", type=positive, metavar="M", help="microbatches per step")
    add("--schedule", choices=SCHEDULES, metavar="NAME", help=f"one of {', '.join(SCHEDULES)}")
    add("--virtual_stages", type=positive, metavar="V", help="stages per rank, for interleaved (default 2)")
    for name, value, what in (
        ("forward", 1, "of a forward pass"),
        ("input_backward", 1, "of the gradient with respect to the input"),
        (
            "weight_backward",
            1,
            "of the gradient with respect to the weights; gpipe, 1f1b and interleaved compute both "
            "gradients in one pass",
        ),
        ("comm", 0, "of sending a message between two ranks"),
    ):
        add(f"--{name}", type=duration, metavar="T", help=f"duration {what} (default {value})")
    add(
        "--gather",
        type=duration,
        metavar="T",
        help="simulate ZeRO-3: duration of all-gathering the weights of a rank",
    )
    add(
        "--buckets",
        type=positive,
        metavar="N",
        help=(
            "number of buckets in which the weights of a rank are gathered (default "
            f"{GatheredWeights(0).buckets})"
        ),
    )
    add(
        "--reshard",
        choices=("action", "step"),
        help="free gathered weights after each use (default), or at the end of the step",
    )
    add("--compare", action="store_true", help="compare all schedules in one table")
    add("--sweep", type=sizes, metavar="microbatches=M,M,…|pp=P,P,…", help="simulate a range of sizes")
    add(
        "--from_run",
        type=as_path,
        metavar="RUN_DIR",
        help="read the schedule and the durations from traces/timeline.json of a run",
    )
    add(
        "--timeline",
        type=as_new_file,
        metavar="FILE",
        help="draw the timeline as .png, .svg or .html, or .json for Perfetto (ui.perfetto.dev)",
    )
    add(
        "--print",
        nargs="?",
        const="compute",
        choices=("compute", "messages"),
        help="print each rank's actions, optionally with messages",
    )
    add("--json", action="store_true", help="print only one JSON object on stdout")
    return parser


def duration(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= LONGEST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to {LONGEST:g}")
    return value


def sizes(text: str) -> tuple[Literal["microbatches", "pp"], list[int]]:
    name, _, values = text.partition("=")
    axis: Literal["microbatches", "pp"] = "pp" if name == "pp" else "microbatches"
    if name != axis:
        raise argparse.ArgumentTypeError(
            f"{text!r} must vary microbatches or pp, for example microbatches=4,8,16"
        )
    return axis, [positive(value) for value in values.split(",")]


def check(tool: Parser, options: argparse.Namespace) -> None:
    """Exit with an error if options conflict or are missing. Fills in the default durations."""
    # 0 is given
    given = {name for name, value in vars(options).items() if value is not None and value is not False}
    times = Costs()._asdict()
    swept = options.sweep[0] if options.sweep else None
    together = [
        ("from_run", name) for name in ("pp", "microbatches", "schedule", "virtual_stages", *times, "sweep")
    ]
    together += [("from_run", name) for name in GatheredWeights._fields]
    together += [("sweep", "timeline"), ("sweep", "print"), ("compare", "schedule"), ("compare", "print")]
    for one, other in together:
        if {one, other} <= given:
            tool.error(f"--{other} and --{one} are mutually exclusive. Remove one of them.")
    for name in ("buckets", "reshard"):
        if name in given and "gather" not in given:
            tool.error(f"--{name} requires --gather T, the duration of gathering.")
    for name in () if options.from_run else ("pp", "microbatches"):
        if (name in given) == (name == swept):
            tool.error(
                f"--{name} and --sweep {name} are mutually exclusive. Remove one of them."
                if name == swept
                else f"--{name} is required."
            )
    if not given & {"schedule", "compare", "from_run"}:
        tool.error("--schedule is required, unless --compare or --from_run RUN_DIR is given.")
    if options.timeline:
        formats = FORMATS[:-1] if options.compare else FORMATS  # a trace holds one schedule
        if options.timeline.suffix not in formats:
            tool.error(f"--timeline must end in {' or '.join(formats)}, got {options.timeline}.")
    vars(options).update({name: value for name, value in times.items() if name not in given})


def calculate(options: argparse.Namespace) -> tuple[list[BubblePlan], Any]:
    """Return the requested plans and their output: an object for JSON, or text."""
    costs = Costs(*(getattr(options, name) for name in Costs._fields))
    shared = {
        name: value for name in GatheredWeights._fields if (value := getattr(options, name)) is not None
    }
    weights = GatheredWeights(**shared) if shared else None
    if options.from_run:
        return from_run(options)
    if options.sweep:
        axis, values = options.sweep
        plans = sweep(
            axis,
            values,
            options.schedule,
            options.pp,
            options.microbatches,
            options.virtual_stages,
            costs,
            weights,
        )
        return plans, {
            "plans": [bubble_plan.measures() for bubble_plan in plans]
        } if options.json else sweep_text(plans, options)
    if options.compare:
        plans = compare(options.pp, options.microbatches, options.virtual_stages, costs, weights)
        return plans, compared(plans, options)
    bubble_plan = plan(
        options.schedule, options.pp, options.microbatches, options.virtual_stages, costs, weights
    )
    return [bubble_plan], single(bubble_plan, options)


def single(bubble_plan: BubblePlan, options: argparse.Namespace) -> Any:
    """Format the measures of a plan, its timeline if it is small, and its actions if requested."""
    schedule = bubble_plan.with_messages() if options.print == "messages" else bubble_plan.schedule
    if options.json:
        actions = {"actions": [list(map(repr, rank)) for rank in schedule.actions]} if options.print else {}
        return {**bubble_plan.measures(), **actions}
    parts = [f"{heading(bubble_plan)}; {durations(bubble_plan)}", summary(bubble_plan)]
    if not options.timeline and sum(map(len, bubble_plan.schedule.actions)) <= MOST_DRAWN:
        parts.append(draw(bubble_plan.timeline, get_terminal_size((160, 24)).columns))
    return "\n\n".join([*parts, str(schedule)] if options.print else parts)


def compared(plans: list[BubblePlan], options: argparse.Namespace) -> Any:
    """Compare all schedules at one size."""
    if options.json:
        return {"plans": [bubble_plan.measures() for bubble_plan in plans]}
    first = plans[0]
    return (
        f"{first.schedule.ranks} ranks, {first.schedule.microbatches} microbatches; "
        f"{durations(first)}\n\n{table(plans)}"
    )


def sweep_text(plans: list[BubblePlan], options: argparse.Namespace) -> str:
    """For one schedule, a table of every measure with a row per size; for all schedules, such a table for
    each measure."""
    axis, fixed = (
        options.sweep[0],
        f"{options.pp} ranks" if options.pp else f"{options.microbatches} microbatches",
    )
    if options.compare:
        stalled = ["stalled"] if plans[0].weights else []
        tables = [
            grid(plans, axis, measure)
            for measure in (*BUBBLES, "peak_activations", "peak_with_weight_stash", *stalled)
        ]
        return "\n\n".join([f"{fixed}; {durations(plans[0])}", *tables])
    return f"{options.schedule}: {fixed}; {durations(plans[0])}\n\n{table(plans, axis)}"


def from_run(options: argparse.Namespace) -> tuple[list[BubblePlan], Any]:
    """A run's measurements and its schedule simulated with its measured durations; with --compare, all
    schedules with their means."""
    run = measured.read(options.from_run)
    plans = run.compare() if options.compare else [run.plan]
    if options.json:
        result = {"measured": {**run.bubbles, "steps": run.steps}, "predicted": single(run.plan, options)}
        return plans, result | (compared(plans, options) if options.compare else {})
    parts = [run.beside(), single(run.plan, options)]
    if options.compare:
        halves = "" if run.plan.splits else " (each gradient counts as half of a backward)"
        parts.append(f"All schedules with the mean of these durations{halves}: {compared(plans, options)}")
    return plans, "\n\n".join(parts)


def write(plans: list[BubblePlan], path: Path) -> None:
    """Write the plans in the format given by the suffix of the path."""
    if path.suffix == ".json":
        write_whole(path, json.dumps(trace.chrome_trace(plans[0])))
        return
    drawn = drawing.picture(plans)
    if path.suffix == ".png":
        drawing.write_png(drawn, path)
    else:
        write_whole(path, drawing.svg(drawn) if path.suffix == ".svg" else drawing.html(drawn))
