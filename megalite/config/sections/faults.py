"""Handling of bad steps; and faults to inject, with their syntax."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megalite.config.amounts import duration_seconds
from megalite.config.option import POSITIVE, SIZE, option
from megalite.config.rule import (
    Rule,
    nearest_name,
)

if TYPE_CHECKING:
    from megalite.config.rules.context import RuleContext


@dataclass
class FaultsConfig:
    """Handling of bad steps, and faults injected on purpose for tests."""

    spike_sigma: float | None = option(None, POSITIVE)
    """Skip a step whose loss exceeds the mean of the last accepted steps by more than this many standard
    deviations. null: never."""
    spike_window: int = option(100, SIZE)
    """Number of accepted steps over which that mean and deviation are computed; no step counts as a spike
    before there are that many."""
    skip_limit: int = option(10, SIZE)
    """Number of consecutive skipped steps after which the run ends. Overflows that only lower fp16's loss
    scale are not counted."""
    rollback: bool = False
    """Instead of ending the run, return to the last checkpoint and continue with the samples that follow the
    skipped ones, at most three times."""
    recheck: int | None = option(None, SIZE)
    """Repeat forward and backward of every n-th step on another replica, and compare the bits, to find a
    device that computes wrong values. null: never."""
    on_corruption: Literal["stop", "warn"] = "stop"
    """What to do once `recheck` has found wrong values and named the rank: end the run with status 74, or
    continue with gradients that were computed again."""
    inject: str | list[str] | None = None
    """Faults to inject, KIND:rank=R,step=S, separated by spaces or as a list; also --faults. docs/faults.md
    lists kinds and options."""


KINDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("kill", "exit", "hang", "nan", "oom", "sigint", "sigterm", "sigusr1", "return"), ()),
    "slow": ("seconds",),
    "spike": ("factor",),
    "bitflip": ("matmul",),
}
"""Kind → the keys that it needs besides `step`."""
OPTIONAL = {"bitflip": ("pass",)}
"""Kind → the keys that it takes besides `rank` and `restart`."""
OWN_PASS, PASSES = 2, range(1, 5)
"""The pass of a step whose gradients are used; and all passes that `faults.recheck` may run."""


@dataclass(frozen=True)
class Fault:
    """One fault to inject."""

    kind: str
    steps: range  # it happens once in each
    rank: int | None  # None: every rank
    restart: int  # number of restarts of the process in which it happens
    amount: float  # seconds, factor or index of a matmul, if the kind has one
    in_pass: int = 0  # of those that faults.recheck runs; 0: the kind has none


def _amount(kind: str, values: dict[str, str]) -> float:
    """The number that a kind of fault needs; seconds may have a unit. Raises ValueError if it is not a
    number."""
    if kind == "slow" and (seconds := duration_seconds(values["seconds"])):
        return seconds
    return float(values[KINDS[kind][0]]) if KINDS[kind] else 0.0


def _parse(text: str) -> Fault:
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        near = nearest_name(kind, KINDS)
        raise ValueError(text, f"is not a known kind of fault{f' (nearest: {near})' if near else ''}")
    values = {name: value for name, _, value in (part.partition("=") for part in rest.split(","))}
    needed, optional = {"step", *KINDS[kind]}, (*OPTIONAL.get(kind, ()), "rank")
    if not needed <= values.keys() <= needed | {*optional, "restart"}:
        reason = f"requires {' and '.join(sorted(needed))}, and besides it takes {', '.join(optional)}"
        raise ValueError(text, f"{reason} and restart only")
    first, _, last = values["step"].partition("-")
    try:
        steps = range(int(first), int(last or first) + 1)
        rank = int(values["rank"]) if "rank" in values else None
        in_pass = int(values.get("pass", OWN_PASS)) if kind == "bitflip" else 0
        fault = Fault(kind, steps, rank, int(values.get("restart", 0)), _amount(kind, values), in_pass)
    except ValueError:
        raise ValueError(text, "has a value that is not a number") from None
    if not steps or steps[0] < 1 or fault.restart < 0 or (kind == "slow" and not fault.amount > 0):
        raise ValueError(
            text, "has a value out of range: steps count from 1, restarts from 0, and seconds are positive"
        )
    if kind == "bitflip" and (in_pass not in PASSES or fault.amount < 0 or fault.amount % 1):
        raise ValueError(text, "has a value out of range: matmuls count from 0, and passes from 1 to 4")
    return fault


def parse_faults(value: str | list[str] | None) -> list[Fault]:
    """The faults in `faults.inject`. Raises ValueError(text, reason) for the first one that is not valid."""
    return [_parse(text) for text in (value.split() if isinstance(value, str) else value or ())]


def _wrong(c: "RuleContext") -> tuple[str, str] | None:
    """The first fault that cannot happen, and why."""
    try:
        faults = parse_faults(c.faults.inject)
    except ValueError as error:
        text, reason = error.args
        return text, reason
    for fault in faults:
        if fault.kind == "bitflip" and c.faults.recheck is None:
            return f"bitflip:step={fault.steps[0]}", "requires faults.recheck, which looks for flipped bits"
        if fault.in_pass not in (0, OWN_PASS) and any(step % (c.faults.recheck or 1) for step in fault.steps):
            what = f"bitflip:step={fault.steps[0]},pass={fault.in_pass}"
            return what, f"names a step that faults.recheck = {c.faults.recheck} does not repeat"
    if c.parallel.min_ranks is not None:  # a fault may concern a start with more ranks
        return None
    absent = [fault for fault in faults if fault.rank is not None and not 0 <= fault.rank < c.world_size]
    return (
        (f"{absent[0].kind}:rank={absent[0].rank}", f"names a rank that {c.world_size} processes do not have")
        if absent
        else None
    )


RULES: tuple[Rule, ...] = (
    Rule(
        "faults can happen",
        "faults.inject",
        _wrong,
        value=lambda c: (_wrong(c) or ("",))[0],
        message=lambda c: (_wrong(c) or ("", ""))[1],
        legal=(
            "Write KIND:rank=R,step=S, for example kill:rank=0,step=7, nan:step=7-9, "
            "slow:rank=0,step=7,seconds=60, "
            "spike:step=7,factor=100, bitflip:rank=0,step=8,matmul=5, kill:rank=0,step=9,restart=1; "
            f"kinds: {', '.join(KINDS)}."
        ),
    ),
)
