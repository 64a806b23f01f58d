"""Figures of one or several runs, as rows of text for the page and the terminal, and as plain data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from megalite.config.token_files import seen_in_training
from megalite.monitoring.metrics import VALIDATED
from megalite.monitoring.report.run import RecordedRun
from megalite.monitoring.report.segments import RunSegment, flattened
from megalite.monitoring.report.segments import differences as changed_options
from megalite.system.progress import duration

RECENT = 20  # number of steps from which the remaining time is estimated
MOST_NAMED = 3  # values of a run's segments in one cell


def number(value: float | None, form: str, scale: float = 1.0) -> str:
    """Format a number, or return "–" for None."""
    return "–" if value is None else format(value * scale, form)


OF_A_SEGMENT: dict[str, Callable[[RunSegment], str]] = {
    "Layout": lambda each: each.layout,
    "Ranks": lambda each: each.hardware,
    "Precision, recomputation": lambda each: each.precision,
    "Global batch": lambda each: each.batch,
    "Kernels": lambda each: each.kernels,
    "Step time, s": lambda each: number(each.typical("step_time_s"), ".4g"),
    "Tokens/s": lambda each: number(each.typical("tokens_per_second"), ",.0f"),
    "TFLOP/s per rank": lambda each: number(each.typical("tflops_per_gpu"), ".3g"),
    "MFU": lambda each: number(each.typical("mfu"), ".1%"),
    "Bubble": lambda each: number(each.typical("bubble_fraction") if each.has_pipeline else None, ".1%"),
    "Peak memory (rank 0), GiB": lambda each: number(each.highest("peak_memory_bytes"), ".2f", 2.0**-30),
}
"""Name of a figure that a resume may change → function that formats it for a segment."""


def summary(runs: Sequence[RecordedRun]) -> list[list[str]]:
    """Return the summary table, with a column for each run.

    A value that differs between segments is listed for each, as in "a → b".
    """
    figures, lefts = [as_json(run) for run in runs], [time_left(run) for run in runs]
    names = dict.fromkeys(name for run in runs for name in run.names(VALIDATED))
    last = {name: [next(reversed(run.curve(VALIDATED + name)[1]), None) for run in runs] for name in names}
    sets = [
        [f"Last validation loss ({name})", *(number(value, ".4f") for value in values)]
        for name, values in last.items()
    ]
    trained = [", ".join(seen_in_training(run.config.data)) for run in runs]
    by_segment = {
        name: [name, *(_joined([of(entry) for entry in run.segments]) for run in runs)]
        for name, of in OF_A_SEGMENT.items()
    }
    settings = [
        row
        for name, row in by_segment.items()
        if name in ("Layout", "Ranks", "Precision, recomputation", "Global batch")
    ]
    return [
        ["State", *(state(run) for run in runs)],
        ["Parameters", *(f"{run.parameters:,}" for run in runs)],
        *settings,
        ["Steps", *(f"{entry['step']:,} of {entry['steps']:,}" for entry in figures)],
        ["Tokens seen", *(f"{entry['tokens']:,}" for entry in figures)],
        ["Training time", *(duration(entry["seconds"]) for entry in figures)],
        *(
            [["Time left", *("–" if left is None else duration(left) for left in lefts)]]
            if any(left is not None for left in lefts)
            else []
        ),
        ["Last loss", *(number(entry["loss"], ".4f") for entry in figures)],
        ["Last validation loss", *(number(entry["val_loss"], ".4f") for entry in figures)],
        ["Best validation loss", *(number(entry["best_val_loss"], ".4f") for entry in figures)],
        *sets,
        *([["Validated on training data", *(entry or "–" for entry in trained)]] if any(trained) else []),
        *(row for row in by_segment.values() if row not in settings),
        ["Steps skipped", *(str(sum(bool(line.get("skipped")) for line in run.steps)) for run in runs)],
    ]


def _joined(values: Sequence[str]) -> str:
    """Join the values of a run's segments in one cell, without repeating equal neighbors."""
    distinct = [value for index, value in enumerate(values) if index == 0 or value != values[index - 1]]
    return " → ".join(distinct if len(distinct) <= MOST_NAMED else [distinct[0], "…", distinct[-1]])


def segment_rows(run: RecordedRun) -> list[list[str]]:
    """Return a table of the segments of a run, with OF_A_SEGMENT and the options that were changed."""
    rows = [[name, *(map(of, run.segments))] for name, of in OF_A_SEGMENT.items()]
    options = changed_options([segment.start for segment in run.segments])
    changed = [
        [name, *("–" if value is None else str(value) for value in values)]
        for name, values in options.items()
    ]
    return [["Steps", *(segment.steps for segment in run.segments)], *rows, *changed]


def time_left(run: RecordedRun) -> float | None:
    """Estimate the remaining seconds of an active run from its RECENT last steps, or return None."""
    seconds = run.segments[-1].values("step_time_s")[-RECENT:]
    if run.summary.get("state") != "running" or not seconds:
        return None
    return median(seconds) * max(run.config.train.steps - run.steps[-1]["step"], 0)


def state(run: RecordedRun) -> str:
    """Return running, done, stopped, interrupted, or failed with the reason."""
    reason = run.summary.get("reason")
    return f"{run.summary.get('state', '–')}" + (f": {reason}" if reason else "")


def as_json(run: RecordedRun) -> dict[str, Any]:
    """Return the final figures as plain data.

    Speeds are medians over the second half of the steps of the last segment.
    """
    last, validations, newest = run.steps[-1] if run.steps else {}, run.curve("val_loss")[1], run.segments[-1]
    return {
        "run": run.name,
        "state": run.summary.get("state"),
        "parameters": run.parameters,
        "step": last.get("step", 0),
        "steps": run.config.train.steps,
        "tokens": list(run.sums("tokens").values() or [0])[-1],
        "seconds": round(sum(line.get("step_time_s") or 0.0 for line in run.steps), 3),
        "loss": last.get("loss"),
        "val_loss": run.validations[-1]["val_loss"] if run.validations else None,
        "best_val_loss": min(validations, default=None),
        "step_time_s": newest.typical("step_time_s"),
        "tokens_per_second": newest.typical("tokens_per_second"),
        "segments": [_segment_json(run, segment) for segment in run.segments],
    }


def _segment_json(run: RecordedRun, segment: RunSegment) -> dict[str, Any]:
    """Return the figures that a resume may change, as plain data."""
    config = segment.config
    return {
        "first_step": segment.first,
        "last_step": segment.last,
        "ranks": segment.ranks,
        "device": segment.device,
        "layout": None
        if config is None
        else {**segment.sizes(), "ep": config.parallel.ep, "zero": config.parallel.zero},
        "schedule": None if config is None or config.parallel.pp == 1 else config.parallel.schedule,
        "precision": None if config is None else config.train.precision,
        "global_batch_size": None if config is None else config.train.global_batch_size,
        "micro_batch_size": None if config is None else config.train.micro_batch_size,
        "kernels": segment.start.kernels if segment.start else [],
        **{
            key: segment.typical(key)
            for key in ("step_time_s", "tokens_per_second", "tflops_per_gpu", "mfu", "bubble_fraction")
        },
        "peak_memory_bytes": segment.highest("peak_memory_bytes"),
        "predicted": {name: value for name, value, _ in segment.predicted(run.recorded_in(segment))},
    }


def differences(runs: Sequence[RecordedRun]) -> dict[str, list[Any]]:
    """Return the options that differ between the newest starts of the runs, except for their names.

    Returns:
        option → value in each run, None if a run does not have the option.
    """
    flat = [dict(flattened(run.options)) for run in runs]
    names = dict.fromkeys(name for options in flat for name in options)
    by_name = {name: [options.get(name) for options in flat] for name in names if name != "run.name"}
    return {name: values for name, values in by_name.items() if any(value != values[0] for value in values)}


def difference_rows(runs: Sequence[RecordedRun]) -> list[list[str]]:
    """Return the differing options as text."""
    return [
        [name, *("–" if value is None else str(value) for value in values)]
        for name, values in differences(runs).items()
    ]
