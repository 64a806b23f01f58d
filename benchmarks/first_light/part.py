"""Process of one part of first-light: `python -m benchmarks.first_light.part SPEC.json`.

Each row is printed as soon as it is available.
"""

from __future__ import annotations

import json
import time
from importlib import import_module

from benchmarks.first_light.parts import NAMES, PARTS
from benchmarks.first_light.rows import Row, Scene, failure
from benchmarks.measure import read_spec
from benchmarks.report import ROW


def main() -> None:
    spec = read_spec()
    part = PARTS[NAMES.index(spec.pop("part"))]
    ends = time.monotonic() + spec.pop("seconds")
    scene = Scene(**{**spec, "gpus": tuple(spec["gpus"])}, ends=ends)
    try:
        for row in import_module(f"benchmarks.first_light.{part.module}").rows(scene):
            say(row)
    except Exception as error:  # rows that have been printed stay
        say(failure(part.name, "proof" if part.proves else "measurement", error))


def say(row: Row) -> None:
    print(ROW + json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
