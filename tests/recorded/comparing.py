"""What differs between two recordings."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

from tests.recorded.runs import SAVED


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """A line for each run that differs, with its first difference. A recording of some runs (--only) is compared in
    those."""
    names = [name for name in old["runs"] if new["only"] is None or name in new["only"]]
    lines = [] if old["data"] == new["data"] else ["the token files differ"]
    for name in dict.fromkeys([*names, *new["runs"]]):
        lines += [f"{name}: {line}" for line in first(of_run(old["runs"].get(name), new["runs"].get(name)))]
    for name, run in new.get("resumed", {}).items():
        uninterrupted = old["runs"].get(name)
        if uninterrupted is not None:
            uninterrupted = {
                **uninterrupted,
                "steps": [line for line in uninterrupted["steps"] if line["step"] > SAVED],
            }
        lines += [f"{name}, resumed: {line}" for line in first(of_run(uninterrupted, run))]
    return lines


def first(lines: Iterator[str]) -> list[str]:
    return [line for line, _ in zip(lines, range(1), strict=False)]


def of_run(old: dict[str, Any] | None, new: dict[str, Any] | None) -> Iterator[str]:
    """Every difference of a run, those that come first in time first."""
    if old is None or new is None:
        yield f"is not in the {'old' if old is None else 'new'} recording"
        return
    for before, now in zip_longest(old["steps"], new["steps"]):
        if before != now:
            yield f"expected {before}, found {now}"
    for part in ("state", "tensors"):
        for key in [*old[part], *(key for key in new[part] if key not in old[part])]:
            if old[part].get(key) != new[part].get(key):
                yield f"{key}: expected {old[part].get(key)}, found {new[part].get(key)}"
