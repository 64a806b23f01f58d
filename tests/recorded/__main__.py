"""Record the runs of a tree, or compare two recordings: see the package."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.recorded.comparing import differences
from tests.recorded.measuring import Recorder
from tests.recorded.runs import RUNS


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.recorded", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="train the runs by the tree in a directory, and write their numbers")
    recording.add_argument("--tree", type=Path, required=True, metavar="DIR")
    recording.add_argument("--output", type=Path, required=True, metavar="FILE")
    recording.add_argument(
        "--only", nargs="+", choices=[run.name for run in RUNS], metavar="NAME", help="these runs alone"
    )
    recording.add_argument(
        "--runs", type=Path, metavar="DIR", help="keep the runs there (new or empty), for --resume of another tree"
    )
    recording.add_argument(
        "--resume", type=Path, metavar="DIR", help="also resume from the checkpoints of an older recording's --runs"
    )
    recording.add_argument("--at_once", type=int, default=2, help="runs that are trained at the same time")
    comparing = commands.add_parser(
        "compare", help="name the first difference of each run; exit status 1 where there is one"
    )
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    options = parser.parse_args()
    if options.command == "record":
        record(options)
    else:
        sys.exit(compare(json.loads(options.old.read_text()), json.loads(options.new.read_text())))


def record(options: argparse.Namespace) -> None:
    started = time.monotonic()
    if options.runs is not None and options.runs.exists() and any(options.runs.iterdir()):
        raise SystemExit(f"{options.runs} is not empty: runs that it holds could be taken for new ones")
    chosen = [run for run in RUNS if options.only is None or run.name in options.only]
    chosen.sort(key=lambda run: -run.ranks)  # the longest first, so that none is left over
    with tempfile.TemporaryDirectory() as scratch:
        recorder = Recorder(options.tree, options.runs or Path(scratch))
        recording: dict[str, Any] = {
            "only": options.only,
            "data": recorder.prepare(),
            "runs": recorder.record(chosen, options.at_once),
        }
        if options.resume is not None:
            resumed = [run for run in chosen if run.resumed]
            recording["resumed"] = recorder.record(resumed, options.at_once, options.resume / "runs")
    options.output.write_text(json.dumps(recording, indent=1))
    print(f"{len(chosen)} runs in {time.monotonic() - started:.0f} s: {options.output}")


def compare(old: dict[str, Any], new: dict[str, Any]) -> int:
    lines = differences(old, new)
    print(
        "\n".join(lines)
        if lines
        else f"equal: {len(new['runs'])} runs, {len(new.get('resumed', {}))} of them resumed as well"
    )
    return int(bool(lines))


if __name__ == "__main__":
    main()
