"""The figures of one run or several side by side: rows of text for the page and the terminal, and plain data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from megalite.config.token_files import seen_in_training
from megalite.monitoring.metrics import VALIDATED
from megalite.monitoring.report.run import Run
from megalite.progress import duration


def summary(runs: Sequence[Run]) -> list[list[str]]:
    """The summary table, with a column for each run."""

    def number(value: float | None, form: str, scale: float = 1.0) -> str:
        return "–" if value is None else format(value * scale, form)

    def layout(run: Run) -> str:
        parallel = run.config.parallel
        schedule = f", {parallel.schedule}" if parallel.pp > 1 else ""
        context = f" × cp {parallel.cp}" if parallel.cp > 1 else ""
        experts = f", ep {parallel.ep}" if parallel.ep > 1 else ""
        return f"tp {parallel.tp} × pp {parallel.pp}{context} × dp {parallel.dp}{experts}, ZeRO-{parallel.zero}{schedule}"

    found = [as_json(run) for run in runs]
    names = dict.fromkeys(name for run in runs for name in run.names(VALIDATED))
    last = {name: [next(reversed(run.curve(VALIDATED + name)[1]), None) for run in runs] for name in names}
    sets = [[f"Last validation loss of {name}", *(number(value, ".4f") for value in values)] for name, values in last.items()]
    trained = [", ".join(seen_in_training(run.config.data)) for run in runs]
    return [
        ["State", *(state(run) for run in runs)],
        ["Parameters", *(f"{run.parameters:,}" for run in runs)],
        ["Layout", *(layout(run) for run in runs)],
        ["Precision, recomputation", *(f"{run.config.train.precision}, {run.config.train.recompute}" for run in runs)],
        ["Steps done, of", *(f"{each['step']:,} of {each['steps']:,}" for each in found)],
        ["Tokens seen", *(f"{each['tokens']:,}" for each in found)],
        ["Time of all steps", *(duration(each["seconds"]) for each in found)],
        ["Last loss", *(number(each["loss"], ".4f") for each in found)],
        ["Last validation loss", *(number(each["val_loss"], ".4f") for each in found)],
        ["Best validation loss", *(number(each["best_val_loss"], ".4f") for each in found)],
        *sets,
        *([["Validated on training data", *(each or "–" for each in trained)]] if any(trained) else []),
        ["Time of a step, s", *(number(run.typical("step_time_s"), ".4g") for run in runs)],
        ["Tokens/s", *(number(run.typical("tokens_per_second"), ",.0f") for run in runs)],
        ["TFLOP/s a rank", *(number(run.typical("tflops_per_gpu"), ".3g") for run in runs)],
        ["MFU", *(number(run.typical("mfu"), ".1%") for run in runs)],
        ["Bubble", *(number(run.typical("bubble_fraction"), ".1%") for run in runs)],
        ["Peak memory of rank 0, GiB", *(number(max(run.curve("peak_memory_bytes")[1], default=None), ".2f", 2.0**-30) for run in runs)],
        ["Steps skipped", *(str(sum(bool(line.get("skipped")) for line in run.steps)) for run in runs)],
    ]


def state(run: Run) -> str:
    """running, done, stopped, interrupted, or failed with its reason."""
    reason = run.summary.get("reason")
    return f"{run.summary.get('state', '–')}" + (f": {reason}" if reason else "")


def as_json(run: Run) -> dict[str, Any]:
    """The final figures as plain data: speeds are medians of the second half of the steps."""
    last, validations = run.steps[-1] if run.steps else {}, run.curve("val_loss")[1]
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
        "step_time_s": run.typical("step_time_s"),
        "tokens_per_second": run.typical("tokens_per_second"),
    }


def differences(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """The options in which the runs differ, their names aside: option → value of each run, None where a run has no such option."""
    flat = [dict(_flat(run.options)) for run in runs]
    names = dict.fromkeys(name for options in flat for name in options)
    found = {name: [options.get(name) for options in flat] for name in names if name != "run.name"}
    return {name: values for name, values in found.items() if any(value != values[0] for value in values)}


def difference_rows(runs: Sequence[Run]) -> list[list[str]]:
    """The differing options as text."""
    return [[name, *("–" if value is None else str(value) for value in values)] for name, values in differences(runs).items()]


def _flat(options: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    return ((f"{section}.{key}", value) for section, values in options.items() for key, value in (values or {}).items())
